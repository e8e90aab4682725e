"""Hold the diagnosis against every fixture and print the score by kind; ends with 1 below 100 %.

    python tests/diagnose_corpus.py            the table
    python tests/diagnose_corpus.py NAME       one fixture: what was expected, what came
"""

# ruff: noqa: E501  (patterns and table rows are read in one piece)
from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "journals"
sys.path.insert(0, str(ROOT / "module_utils"))

from dflash_fleet import diagnosis, journal  # noqa: E402  (the path above comes first)


def fixtures() -> list[Path]:
    """Every expected-answer file that has a journal beside it."""
    return sorted(FIXTURES.glob("*/*.expected.json"))


def journal_of(expected: Path) -> Path:
    stem = expected.name[: -len(".expected.json")]
    found = list(expected.parent.glob(f"{stem}.*.gz"))
    if len(found) != 1:
        raise FileNotFoundError(f"{expected}: expected one journal beside it, found {len(found)}")
    return found[0]


def diagnose_file(path: Path, unit: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """As module journal_crash does it with journal_file."""
    with tempfile.TemporaryDirectory() as folder:
        source = path
        if path.name.endswith(".journal.gz"):
            source = Path(folder) / path.name[:-3]
            source.write_bytes(gzip.decompress(path.read_bytes()))
        collected = journal.collect(unit, arguments.get("invocation_id"), str(source))
        return diagnosis.diagnose(
            collected.entries,
            collected.unit,
            invocation_id=collected.invocation_id,
            engine_version=arguments.get("engine_version"),
            in_effect=arguments.get("in_effect"),
            kernel_entries=collected.kernel,
            gaps=collected.gaps,
        )


def differences(expect: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """What is not as expected; an expectation names only what matters."""
    out: list[str] = []

    def same(label: str, wanted: Any, have: Any) -> None:
        if wanted != have:
            out.append(f"{label}: expected {wanted!r}, got {have!r}")

    for key, wanted in expect.items():
        if key in ("verdict", "cause", "phase", "complete"):
            same(key, wanted, result[key])
        elif key in ("exception", "root_frame", "first_failure", "exit", "native_fault") and wanted is None:
            same(key, None, result[key])
        elif key == "exception":
            have = result["exception"]
            if have is None:
                out.append("exception: expected one, got none")
                continue
            if "type" in wanted:
                same("exception.type", wanted["type"], have["type"])
            if "message" in wanted and not (have["message"] or "").startswith(wanted["message"]):
                out.append(f"exception.message: expected {wanted['message']!r}..., got {(have['message'] or '')[:200]!r}")
            if wanted.get("message") == "":
                same("exception.message", "", have["message"])
            if "links" in wanted:
                same("exception.chain", wanted["links"], len(have["chain"]))
        elif key == "root_frame":
            have = result["root_frame"]
            if have is None:
                out.append("root_frame: expected one, got none")
                continue
            if "file" in wanted:
                same("root_frame.file", wanted["file"], have["file"].rsplit("/", 1)[-1])
            for name in ("line", "function"):
                if name in wanted:
                    same(f"root_frame.{name}", wanted[name], have[name])
        elif key in ("first_failure", "exit", "native_fault"):
            have = result[key]
            if have is None:
                out.append(f"{key}: expected one, got none")
                continue
            for name, value in wanted.items():
                same(f"{key}.{name}", value, have[name])
        elif key == "kernel":
            for name, value in wanted.items():
                have = result["kernel"][name]
                have = [xid["code"] for xid in have] if name == "xid" else len(have) if name == "segfault" and isinstance(value, int) else have
                same(f"kernel.{name}", value, have)
        elif key == "ranks_failed":
            same(key, wanted, len(result[key]))
        elif key == "engine":
            same(key, wanted, result["engine"]["name"])
        elif key == "remedies":
            same(key, wanted, [remedy["id"] for remedy in result["remedies"]])
        elif key == "remedies_first":
            same(key, wanted, result["remedies"][0]["id"] if result["remedies"] else None)
        elif key == "remedies_without":
            same(key, [], [remedy["id"] for remedy in result["remedies"] if remedy["id"] in wanted])
        elif key == "absent":
            text = json.dumps(result)
            same(key, [], [word for word in wanted if word in text])
    return out


def check(expected: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    answer = json.loads(expected.read_text())
    result = diagnose_file(journal_of(expected), answer["unit"], answer["arguments"])
    return answer, result, differences(answer["expect"], result)


def main(names: list[str]) -> int:
    score: dict[str, list[int]] = {}
    wrong: list[str] = []
    chosen = [path for path in fixtures() if not names or path.name[: -len(".expected.json")] in names]
    if not chosen:
        print("no fixture found", file=sys.stderr)
        return 1
    for expected in chosen:
        row = score.setdefault(expected.parent.name, [0, 0, 0])
        answer, result, found = check(expected)
        if names:
            print(json.dumps(result, indent=2, ensure_ascii=False))
        if not found:
            row[0] += 1
        else:
            # Not knowing is a lesser fault than a wrong answer: it is counted apart.
            row[2 if result["cause"] == "unknown" and answer["expect"].get("cause") != "unknown" else 1] += 1
            wrong.append(f"{expected.parent.name}/{expected.name[: -len('.expected.json')]}")
            wrong += [f"    {line}" for line in found]
    width = max(len(kind) for kind in score)
    print(f"{'kind':<{width}}  right  wrong  unknown")
    for kind, (right, bad, unknown) in sorted(score.items()):
        print(f"{kind:<{width}}  {right:5d}  {bad:5d}  {unknown:7d}")
    total = [sum(row[column] for row in score.values()) for column in range(3)]
    print(f"{'all':<{width}}  {total[0]:5d}  {total[1]:5d}  {total[2]:7d}   {100 * total[0] / sum(total):.1f} %")
    if wrong:
        print("\n" + "\n".join(wrong))
    return 0 if not wrong else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
