"""Reading journals: every format, the right run, bounded memory, anything at all as input."""

# ruff: noqa: E501  (log lines are as long as programs print them)
from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import diagnosis, journal
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import journal_cases
from journal_builder import JOURNAL_REMOTE, Journal, to_export, to_json, write_journal

needs_journalctl = pytest.mark.skipif(
    not shutil.which("journalctl") or not os.path.exists(JOURNAL_REMOTE), reason="needs journalctl and systemd-journal-remote"
)


def build(name: str) -> Journal:
    return next(case for case in journal_cases.CASES if case.name == name).build()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None), ("x", "x"), ([104, 105], "hi"), ([255, 104], "\ufffdh"), (b"\xff", "\ufffd"), (["a", "b"], "a\nb"), ([104, 300], "104\n300"), (7, "7"), ([], ""), ([None, "a"], "a"),
    ],
)  # fmt: skip
def test_message_forms(value: Any, text: str | None) -> None:
    assert journal.text_of(value) == text


def test_json_forms() -> None:
    rows = [{"MESSAGE": "a"}, {"MESSAGE": "b"}]
    forms = {
        "lines": "".join(json.dumps(row) + "\n" for row in rows),
        "pretty": "".join(json.dumps(row, indent=8) + "\n" for row in rows),
        "array": json.dumps(rows),
        "array, a line each": "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n",
        "sse": "".join(f"data: {json.dumps(row)}\n\n" for row in rows),
        "seq": "".join(f"\x1e{json.dumps(row)}\n" for row in rows),
        "damaged": '{"MESSAGE": "a"}\n{"MESSAGE": "cut\n{"MESSAGE": "b"}\nnonsense\n',
    }
    for name, text in forms.items():
        got = [entry["MESSAGE"] for entry in journal.parse_json(io.BytesIO(text.encode()))]
        assert got[:1] == ["a"], name
        if name != "damaged":
            assert got == ["a", "b"], name


def test_export_forms() -> None:
    entries = [{"MESSAGE": "a\nb", "_PID": "1"}, {"MESSAGE": [27, 91, 109, 120], "X": "y"}, {"MESSAGE": "c"}]
    got = list(journal.parse_export(io.BytesIO(to_export(entries))))
    assert [journal.text_of(entry["MESSAGE"]) for entry in got] == ["a\nb", "\x1b[mx", "c"]
    assert got[0]["_PID"] == "1"
    assert list(journal.parse_export(io.BytesIO(b"MESSAGE\n\xff\xff"))) == []


def test_short_form(tmp_path: Path) -> None:
    path = tmp_path / "paste.txt"
    path.write_text(
        "Nov 30 00:01:02 gpu-01 systemd[1]: Started sglang-k.service - K.\n"
        "Nov 30 00:01:03 gpu-01 python[106330]: [2025-11-30 00:01:03] Scheduler hit an exception: Traceback (most recent call last):\n"
        'Nov 30 00:01:03 gpu-01 python[106330]:   File "/a/sglang/srt/x.py", line 3, in f\n'
        "Nov 30 00:01:03 gpu-01 python[106330]: torch.OutOfMemoryError: CUDA out of memory.\n"
        "Nov 30 00:01:04 gpu-01 systemd[1]: sglang-k.service: Main process exited, code=killed, status=9/KILL\n"
        "Nov 30 00:01:04 gpu-01 systemd[1]: sglang-k.service: Failed with result 'signal'.\n"
    )
    collected = journal.collect("sglang-k", None, str(path))
    result = diagnosis.diagnose(collected.entries, collected.unit)
    assert (result["verdict"], result["cause"], result["exception"]["type"]) == ("crashed", "gpu_oom", "torch.OutOfMemoryError")


@pytest.mark.parametrize("form", ["json", "export", "json.gz", "export.gz"])
def test_text_files(tmp_path: Path, form: str) -> None:
    source = build("incident_then_healthy")
    data = to_json(source.entries).encode() if "json" in form else to_export(source.entries)
    path = tmp_path / f"x.{form}"
    path.write_bytes(gzip.compress(data) if form.endswith("gz") else data)
    collected = journal.collect(source.unit, None, str(path))
    first = next(entry["_SYSTEMD_INVOCATION_ID"] for entry in source.entries if entry.get("_SYSTEMD_UNIT") == source.unit)
    assert collected.invocation_id == first
    assert diagnosis.diagnose(collected.entries, collected.unit, collected.invocation_id)["cause"] == "cuda_graph_replay_failure"


@needs_journalctl
@pytest.mark.parametrize("name", ["incident_then_healthy", "gpu_off_the_bus", "segfault_kernel_and_core", "two_runs_opposite_advice", "unified_memory_freeze", "rate_limited", "ambiguous_flag_start_limit", "executable_missing"])
def test_a_journal_file_answers_as_its_export(tmp_path: Path, name: str) -> None:
    """journalctl's way through the index and the way through text find the same."""
    source = build(name)
    write_journal(source.entries, tmp_path / "x.journal")
    (tmp_path / "x.json").write_text(to_json(source.entries))

    def answer(path: str) -> dict[str, Any]:
        collected = journal.collect(source.unit, None, path)
        result = diagnosis.diagnose_collected(collected)
        return {key: value for key, value in result.items() if key not in ("evidence", "gaps")}

    one, other = answer(str(tmp_path / "x.journal")), answer(str(tmp_path / "x.json"))
    for key, value in one.items():
        assert value == other[key], key


@needs_journalctl
def test_unit_is_found_where_none_is_named(tmp_path: Path) -> None:
    source = build("incident_dflash_ep8")
    write_journal(source.entries, tmp_path / "x.journal")
    (tmp_path / "x.json").write_text(to_json(source.entries))
    for name in ("x.journal", "x.json"):
        assert journal.collect("", None, str(tmp_path / name)).unit == source.unit


@needs_journalctl
def test_early_failure_before_hours_of_health_lines(tmp_path: Path) -> None:
    source, run = journal_cases.start(2)
    run.to_serving()
    run.rank_raw(1, 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "/x.py", line 9 in f')
    for _number in range(9000):
        source.tick(10)
        run.log('INFO:     10.0.0.9:52000 - "GET /health HTTP/1.1" 200 OK')
    write_journal(source.entries, tmp_path / "x.journal")
    collected = journal.collect(source.unit, None, str(tmp_path / "x.journal"))
    result = diagnosis.diagnose(collected.entries, collected.unit, collected.invocation_id, gaps=collected.gaps)
    assert (result["verdict"], result["cause"], result["first_failure"]["rank"]) == ("running_but_dead", "native_segfault", "TP1")


def test_memory_is_bounded_whatever_was_printed(tmp_path: Path) -> None:
    """A flood of long lines: what is kept stays small, and what matters is still there."""
    source, run = journal_cases.start(1)
    run.to_serving()
    path = tmp_path / "flood.json"
    with path.open("w") as handle:
        handle.write(to_json(source.entries))
        source.entries.clear()
        run.raise_in(0, journal_cases.traceback(journal_cases.VERIFY, "RuntimeError: CUDA error: device-side assert triggered"))
        handle.write(to_json(source.entries))
        source.entries.clear()
        for number in range(3000):
            run.rank_raw(0, f"Assertion failed {number} " + "x" * 20_000)
            handle.write(to_json(source.entries))
            source.entries.clear()
        run.self_kill(serving=True)
        handle.write(to_json(source.entries))
    tracemalloc.start()
    collected = journal.collect(source.unit, None, str(path))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    result = diagnosis.diagnose(collected.entries, collected.unit, collected.invocation_id)
    assert result["cause"] == "cuda_device_side_assert"


def test_missing_and_unreadable_files() -> None:
    with pytest.raises(journal.JournalError, match="no such file"):
        journal.collect("x", None, "/nonexistent.json")


@settings(max_examples=60, deadline=None)
@given(data=st.one_of(st.binary(max_size=600), st.text(max_size=300).map(str.encode), st.binary(max_size=200).map(lambda raw: b"MESSAGE\n" + raw), st.binary(max_size=200).map(lambda raw: b'{"MESSAGE": "' + raw + b'"}\n')))
def test_any_bytes_as_a_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "any"
    path.write_bytes(data)
    if data.startswith((b"LPKSHHRH", b"\x1f\x8b")):
        return
    collected = journal.collect("u", None, str(path))
    result = diagnosis.diagnose(collected.entries, collected.unit, collected.invocation_id)
    assert result["verdict"] in diagnosis.VERDICTS


@pytest.mark.parametrize("head", [b"\x1f\x8bnot gzip", b"\x1f\x8b"])
def test_damaged_archives_are_told(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(head)
    with pytest.raises(journal.JournalError):
        journal.collect("u", None, str(path))


def test_unit_names() -> None:
    assert journal.unit_name("sglang-main-ep8") == "sglang-main-ep8.service"
    assert journal.unit_name("a.socket") == "a.socket"
    assert journal.unit_name("") == ""
