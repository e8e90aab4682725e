"""Time and memory of a diagnosis have bounds, whatever a unit printed: a journalctl that never stops talking."""

# ruff: noqa: E501  (one script in one piece)
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from dflash_fleet import diagnosis, journal
journal.MAX_SCAN_SECONDS = 2.0
limit = journal.MAX_SCAN_SECONDS
began = time.monotonic()
collected = journal.read_invocation("u.service", "a", journal.Journalctl(binary=sys.argv[2]))
read = time.monotonic() - began
began = time.monotonic()
result = diagnosis.diagnose_collected(collected)
took = time.monotonic() - began
# Not ru_maxrss: that begins with the memory of the process that started this one.
peak = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"read_s": read, "diagnose_s": took, "mb": peak,
                  "entries": len(collected.entries), "verdict": result["verdict"], "complete": result["complete"]}))
"""


def entry(message: object) -> str:
    return json.dumps(
        {
            "MESSAGE": message,
            "_PID": "7",
            "_SYSTEMD_UNIT": "u.service",
            "_SYSTEMD_INVOCATION_ID": "a",
            "__REALTIME_TIMESTAMP": "1764460800000000",
            "_TRANSPORT": "stdout",
        }
    )


TRACEBACK = [
    entry(text)
    for text in (
        "ValueError: x",
        "    raise ValueError()",
        '  File "/a/b.py", line 3, in f',
        "Traceback (most recent call last):",
    )
]
TALK = {
    "tracebacks": "while :; do cat {file}; done",
    "long lines": "while :; do cat {file}; done",
    "bytes": "while :; do cat {file}; done",
    "one line without end": "while :; do tr '\\0' x < /dev/zero; done",
    "one line of 64 MiB, then more": "printf '{{\"MESSAGE\":\"'; head -c 67108864 /dev/zero | tr '\\0' x; echo '\"}}'; cat {file}",
}
LINES = {
    "tracebacks": TRACEBACK * 2000,
    "long lines": [entry("RuntimeError: " + "x" * 60_000)] * 50,
    "bytes": [entry([27, *b"[31mRuntimeError: "] + [120] * 20_000)] * 50,
    "one line without end": [],
    "one line of 64 MiB, then more": TRACEBACK * 500,
}


@pytest.mark.parametrize("kind", TALK)
def test_bounded(tmp_path: Path, kind: str) -> None:
    text, binary = tmp_path / "lines", tmp_path / "journalctl"
    text.write_text("".join(line + "\n" for line in LINES[kind]))
    binary.write_text("#!/bin/sh\n" + TALK[kind].format(file=text) + "\n")
    binary.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT / "module_utils"), str(binary)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["mb"] < 160, found
    # Three queries of the journal, each with a limit of its own (2 s here, 5 s for the start of the run and what stands beside it).
    assert found["read_s"] < 20, found
    assert found["diagnose_s"] < 20, found
    assert found["verdict"] != "no_evidence" or kind == "one line without end", found
