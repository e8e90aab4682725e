"""The diagnosis against the fixtures, and its answer under everything that must not change it."""

# ruff: noqa: E501  (log lines are as long as programs print them)
from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import causes, diagnosis
from growth import is_linear
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import diagnose_corpus
import journal_cases
from journal_builder import Journal

CASES = {case.name: case for case in journal_cases.CASES}
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize("expected", diagnose_corpus.fixtures(), ids=lambda path: f"{path.parent.name}/{path.name[:-14]}")
def test_fixture(expected: Path) -> None:
    _answer, _result, found = diagnose_corpus.check(expected)
    assert found == []


def test_fixtures_are_what_the_cases_build() -> None:
    for case in journal_cases.CASES:
        path = journal_cases.path_of(case)
        assert path.exists(), f"{case.name}: run python tests/journal_cases.py"
        answer = json.loads((path.parent / f"{case.name}.expected.json").read_text())
        assert answer["expect"] == json.loads(json.dumps(case.expect))


def test_every_row_of_the_corpus_kinds_has_a_case() -> None:
    rows = {row for case in journal_cases.CASES for row in case.corpus}
    assert set(range(1, 111)) - rows == set()


def test_causes_that_cases_expect_are_known() -> None:
    expected = {case.expect["cause"] for case in journal_cases.CASES if "cause" in case.expect}
    assert expected <= set(causes.CAUSES)


# --------------------------------------------------------------------------------------------- what must not change the answer

SHUFFLED = (
    "incident_dflash_ep8", "capture_torch_compile", "oom_at_run_time", "collective_timeout", "collateral_noise_of_survivors", "memory_unbalanced",
    "hybrid_backend_no_spec", "watchdog_module_load", "segfault_two_processes", "uncaught_interleaved", "nccl_shm", "weights_cut_off", "vllm_memory_busy_four_times",
    "killed_rank_named_by_parent", "device_assert_flood", "ninja_compile_error", "two_runs_opposite_advice", "gpu_off_the_bus",
)  # fmt: skip


def core(result: dict[str, Any]) -> dict[str, Any]:
    """What the answer is, without what a different log text may change."""
    exception = result["exception"]
    first = result["first_failure"]
    return {
        "verdict": result["verdict"],
        "cause": result["cause"],
        "phase": result["phase"],
        "exception": exception and (exception["type"], "".join((exception["message"] or "").split()), [link["type"] for link in exception["chain"]]),
        "frames": exception and [(frame["file"], frame["line"]) for frame in exception["frames"]],
        "root": result["root_frame"] and (result["root_frame"]["file"], result["root_frame"]["line"]),
        "first": first and (first["rank"], first["pid"], first["process"]),
        "native": result["native_fault"] and result["native_fault"]["signal"],
        "exit": result["exit"],
        "ranks": sorted(result["ranks_failed"]),
        "remedies": [remedy["id"] for remedy in result["remedies"]],
    }


def answer(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    arguments = CASES[name].arguments
    return diagnosis.diagnose(entries, "" or CASES_UNIT[name], engine_version=arguments.get("engine_version"), in_effect=arguments.get("in_effect"))


BUILT = {name: CASES[name].build() for name in SHUFFLED}
CASES_UNIT = {name: journal.unit for name, journal in BUILT.items()}
WANTED = {name: core(answer(journal.entries, name)) for name, journal in BUILT.items()}


def restamp(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same times in the new order: who comes first in the journal came first in time."""
    times = sorted((int(entry["__REALTIME_TIMESTAMP"]), int(entry["__MONOTONIC_TIMESTAMP"])) for entry in entries)
    return [{**entry, "__REALTIME_TIMESTAMP": str(real), "__MONOTONIC_TIMESTAMP": str(mono)} for entry, (real, mono) in zip(entries, times)]


def interleaved(name: str, seed: int) -> list[dict[str, Any]]:
    """Mix the lines of the processes between two of PID 1's or the kernel's, each process in its own order.

    Who begins a stretch still begins it: the first to fail stays the first.
    """
    chooser = random.Random(seed)
    out: list[dict[str, Any]] = []
    stretch: list[dict[str, Any]] = []

    def flush() -> None:
        queues: dict[str, list[dict[str, Any]]] = {}
        for entry in stretch:
            queues.setdefault(entry["_PID"], []).append(entry)
        if stretch:
            out.append(queues[stretch[0]["_PID"]].pop(0))
        waiting = [queue for queue in queues.values() if queue]
        while waiting:
            queue = chooser.choice(waiting)
            for _number in range(chooser.randint(1, 3)):
                if queue:
                    out.append(queue.pop(0))
            waiting = [queue for queue in waiting if queue]
        stretch.clear()

    for entry in BUILT[name].entries:
        text = entry["MESSAGE"] if isinstance(entry["MESSAGE"], str) else ""
        # Ends of stretches: PID 1, the kernel, other units, and what the parent says in answer to a child.
        barrier = entry["_PID"] == "1" if "_PID" in entry else True
        barrier = barrier or "hit an exception" in text or "ProcessGroupNCCL" in text or "Fatal Python" in text or "watchdog timeout" in text or "sigquit" in text.lower() or "crashed with exit" in text
        barrier = barrier or "Process Process" in text or "Worker" in text[:12] or "EngineCore" in text[:14] or "APIServer" in text[:14]
        if barrier:
            flush()
            out.append(entry)
        else:
            stretch.append(entry)
    flush()
    return restamp(out)


@QUICK
@given(name=st.sampled_from(SHUFFLED), seed=st.integers(0, 2**32))
def test_interleaving_changes_nothing(name: str, seed: int) -> None:
    assert core(answer(interleaved(name, seed), name)) == WANTED[name]


@QUICK
@given(
    name=st.sampled_from(SHUFFLED), place=st.floats(0, 1), days=st.sampled_from((-400, -1, -0.04, 0.04, 1, 400)),
    more=st.sampled_from((0, -2, 2)),
)
def test_a_wall_clock_that_steps_changes_nothing(name: str, place: float, days: float, more: float) -> None:
    """The clock is set in the middle of a run, once or twice; journald goes on with its monotonic clock."""
    entries = BUILT[name].entries
    first, second = int(place * len(entries)), int((1 + place) / 2 * len(entries))
    out = []
    for index, entry in enumerate(entries):
        step = (days if index >= first else 0) + (more if index >= second else 0)
        out.append({**entry, "__REALTIME_TIMESTAMP": str(int(entry["__REALTIME_TIMESTAMP"]) + int(step * 86_400_000_000))})
    assert core(answer(out, name)) == WANTED[name]


def cut_entries(name: str, seed: int) -> list[dict[str, Any]]:
    """Cut lines where another process writes in between, as journald does: the rest comes later, blanks at the cut are gone."""
    chooser = random.Random(seed)
    out: list[dict[str, Any]] = []
    for entry in BUILT[name].entries:
        text = entry["MESSAGE"]
        whole = not isinstance(text, str) or entry.get("_TRANSPORT") != "stdout" or len(text) < 12 or text.startswith(("[20", "(", "[rank")) or "_LINE_BREAK" in entry
        if whole or chooser.random() > 0.3 or entry.get("_SYSTEMD_UNIT") != CASES_UNIT[name]:
            out.append(entry)
            continue
        at = chooser.randrange(4, len(text) - 2)
        while text[at - 1].isspace() or text[at].isspace():
            at -= 1
            if at < 4:
                break
        if at < 4:
            out.append(entry)
            continue
        out.append({**entry, "MESSAGE": text[:at].rstrip(), "_LINE_BREAK": "pid-change"})
        out.append({**entry, "MESSAGE": "gpu-01:77:78 [0] NCCL INFO comm 0x55 rank 0", "_PID": "77", "_CMDLINE": "sglang::detokenizer", "_COMM": "sglang::detoken"})
        out.append({**entry, "MESSAGE": text[at:]})
    return restamp([{**entry, "__REALTIME_TIMESTAMP": entry["__REALTIME_TIMESTAMP"]} for entry in out])


@QUICK
@given(name=st.sampled_from([name for name in SHUFFLED if not name.startswith("vllm")]), seed=st.integers(0, 2**32))
def test_cuts_change_nothing(name: str, seed: int) -> None:
    assert core(answer(cut_entries(name, seed), name)) == WANTED[name]


NOISE = (
    ("main", '[2026-11-29 12:00:00] INFO:     10.0.0.9:52000 - "GET /health HTTP/1.1" 503 Service Unavailable'),
    ("rank", "gpu-01:20101:20991 [1] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"),
    ("rank", "/opt/venv/lib/python3.11/site-packages/torch/x.py:12: UserWarning: no kernel image, CUDA out of memory, illegal memory access: only a warning"),
    ("rank", "\r 50%|#####     | 2/4 [00:01<00:01,  1.90it/s]"),
    ("other", "Traceback (most recent call last):"),
    ("other", "MemoryError"),
    ("other", "Out of memory"),
)


@QUICK
@given(name=st.sampled_from(SHUFFLED), seed=st.integers(0, 2**32), count=st.integers(1, 120))
def test_floods_of_noise_change_nothing(name: str, seed: int, count: int) -> None:
    chooser = random.Random(seed)
    entries = list(BUILT[name].entries)
    pids = sorted({entry["_PID"] for entry in entries if entry.get("_SYSTEMD_UNIT") == CASES_UNIT[name]})
    sample = next(entry for entry in entries if entry.get("_SYSTEMD_UNIT") == CASES_UNIT[name])
    for _number in range(count):
        who, text = chooser.choice(NOISE)
        at = chooser.randrange(len(entries))
        fields = {**sample, "MESSAGE": list(text.encode()) if "\r" in text else text, "_LINE_BREAK": None}
        if who == "other":
            fields = {**fields, "_PID": "4242", "_SYSTEMD_UNIT": "trainer.service", "_SYSTEMD_INVOCATION_ID": "7" * 32, "_CMDLINE": "python train.py", "_COMM": "python"}
        else:
            pid = chooser.choice(pids)
            like = next(entry for entry in entries if entry.get("_PID") == pid)
            fields = {**fields, "_PID": pid, "_CMDLINE": like.get("_CMDLINE"), "_COMM": like.get("_COMM"), "_SYSTEMD_INVOCATION_ID": like.get("_SYSTEMD_INVOCATION_ID")}
            if who == "main" or name.startswith("vllm"):
                # Inside another process' traceback a record of its own would be a record: noise goes between processes only.
                fields = {**fields, "_PID": "21999", "_CMDLINE": "python3 -m helper", "_COMM": "python3"}
        if who != "other" and entries[at].get("_SYSTEMD_INVOCATION_ID") != fields["_SYSTEMD_INVOCATION_ID"]:
            continue
        fields = {**fields, "__REALTIME_TIMESTAMP": entries[at]["__REALTIME_TIMESTAMP"], "__MONOTONIC_TIMESTAMP": entries[at]["__MONOTONIC_TIMESTAMP"], "_BOOT_ID": entries[at]["_BOOT_ID"]}
        entries.insert(at, fields)
    got, wanted = core(answer(entries, name)), dict(WANTED[name])
    assert got == wanted


@QUICK
@given(order=st.permutations(range(8)))
def test_first_in_time_is_first(order: list[int]) -> None:
    journal, run = journal_cases.start(ep=True, speculative_algorithm="DFLASH")
    run.to_warmup()
    journal_cases.all_ranks(run, journal_cases.traceback([*journal_cases.VERIFY, *journal_cases.INCIDENT_ROWS], journal_cases.INCIDENT), tuple(order))
    run.self_kill(serving=True)
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert result["first_failure"]["rank"] == f"TP{order[0]} EP{order[0]}"
    assert result["ranks_failed"] == [f"TP{rank} EP{rank}" for rank in order]


# --------------------------------------------------------------------------------------------- anything at all

KEYS = set(diagnosis.empty_result("x"))
MESSAGES = st.one_of(
    st.none(),
    st.text(max_size=200),
    st.lists(st.integers(-5, 300), max_size=60),
    st.integers(),
    st.sampled_from(["Traceback (most recent call last):", '  File "a", line 1, in f', "X: y", "Fatal Python error: Aborted", "terminate called after throwing an instance of 'a'",
                     "Main process exited, code=killed, status=9/KILL", "Failed with result 'signal'.", "Rank 1 scheduler died during initialization (exit code: -9)", "  + Exception Group Traceback (most recent call last):",
                     "  | A: b", "The above exception was the direct cause of the following exception:", "[2026-11-29 12:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):",
                     "NVRM: Xid (PCI:0): 79, x", "Out of memory: Killed process 7 (x)", "sglang[7]: segfault at 0 ip 0 in libnccl.so[0+1]"]),
)  # fmt: skip
ENTRIES = st.lists(
    st.fixed_dictionaries(
        {"MESSAGE": MESSAGES},
        optional={
            "_PID": st.sampled_from(["1", "7", "8", "x", ""]),
            "_TRANSPORT": st.sampled_from(["stdout", "kernel", "journal"]),
            "_SYSTEMD_UNIT": st.sampled_from(["u.service", "v.service"]),
            "UNIT": st.sampled_from(["u.service", "v.service"]),
            "INVOCATION_ID": st.sampled_from(["a", "b"]),
            "_SYSTEMD_INVOCATION_ID": st.sampled_from(["a", "b"]),
            "__REALTIME_TIMESTAMP": st.one_of(st.integers(-(10**20), 10**20).map(str), st.text(max_size=4)),
            "_LINE_BREAK": st.sampled_from(["pid-change", "nul", "eof", "line-max"]),
            "EXIT_STATUS": st.text(max_size=3),
            "MESSAGE_ID": st.sampled_from(list(journal_cases.Journal.__module__ and ["98e322203f7a4ed290d09fe03c09fe15", "d9b373ed55a64feb8242e02dbe79a49c", "fc2e22bc6ee647b6b90729ab34a250b1", "a596d6fe7bfa4994828e72309e95d61e"])),
            "COREDUMP_PID": st.text(max_size=3),
        },
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(entries=ENTRIES)
def test_any_entries_get_a_whole_answer(entries: list[dict[str, Any]]) -> None:
    result = diagnosis.diagnose(entries, "u.service")
    assert set(result) == KEYS
    assert result["verdict"] in diagnosis.VERDICTS
    assert result["cause"] in causes.CAUSES
    json.dumps(result)
    assert isinstance(diagnosis.headline(result, "h", 1.0), str)
    assert isinstance(diagnosis.report_text(result, "h", 1.0), str)


@pytest.mark.parametrize("name", ["incident_dflash_ep8", "device_assert_flood", "collective_timeout"])
def test_time_is_linear_in_the_log(name: str) -> None:
    journal = BUILT[name]

    def log(times: int) -> list[dict[str, Any]]:
        entries = []
        for number in range(times):
            entries += [{**entry, "_PID": entry["_PID"] if entry.get("_PID") == "1" else str(int(entry.get("_PID") or 0) + 20 * (number % 3))} for entry in journal.entries]
        return entries

    logs = {times: log(times) for times in (1, 32)}
    assert is_linear(lambda times: diagnosis.diagnose(logs[times], journal.unit), 1, times=32)


# --------------------------------------------------------------------------------------------- details


def test_remedy_in_effect_is_not_offered() -> None:
    journal = CASES["incident_dflash_ep8"].build()
    off = diagnosis.diagnose(journal.entries, journal.unit, engine_version="0.5.11", in_effect={"sglang_cuda_graph": "disabled", "sglang_profile": "tp8"})
    assert [remedy["id"] for remedy in off["remedies"]] == ["upgrade_sglang"]
    new = diagnosis.diagnose(journal.entries, journal.unit, engine_version="0.5.20")
    assert "upgrade_sglang" not in [remedy["id"] for remedy in new["remedies"]]


def test_invocation_can_be_named() -> None:
    journal = CASES["incident_then_healthy"].build()
    runs = sorted({entry["_SYSTEMD_INVOCATION_ID"] for entry in journal.entries if entry.get("_SYSTEMD_UNIT") == journal.unit})
    assert diagnosis.diagnose(journal.entries, journal.unit)["invocation_id"] == runs[0]
    second = diagnosis.diagnose(journal.entries, journal.unit, invocation_id=runs[1])
    assert (second["verdict"], second["cause"]) == ("running", "none")


def test_user_rows_come_first() -> None:
    journal = CASES["spec_exception_unseen"].build()
    rows = [{"id": "codec", "cause": "audio_codec_broken", "type": r"CodecError$"}]
    result = diagnosis.diagnose(journal.entries, journal.unit, extra_causes=rows)
    assert result["cause"] == "audio_codec_broken"
    assert diagnosis.headline(result)


def test_headline_of_the_incident() -> None:
    journal = CASES["incident_dflash_ep8"].build()
    text = diagnosis.headline(diagnosis.diagnose(journal.entries, journal.unit, engine_version="0.5.11"), "gpu-02", 123.4)
    assert text.splitlines()[0] == "gpu-02: sglang-main-ep8.service died on its first batch, 123 s after start; TP3 EP3 first, then all 8 ranks"
    assert "  AttributeError: 'NoneType' object has no attribute 'dtype'" in text
    assert "cuda_graph_runner.py:124" in text
    assert "dflash_worker.py" in text
    assert "(status 9/KILL is SGLang ending itself, not the OOM killer)" in text
    assert "sglang_version: 0.5.20" in text


def test_times_are_utc_with_microseconds() -> None:
    journal = CASES["incident_dflash_ep8"].build()
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert result["first_failure"]["at"].startswith("2025-11-30T00:0")
    assert result["first_failure"]["at"].endswith("Z")
    assert len(result["first_failure"]["at"]) == len("2025-11-30T00:00:00.000000Z")
    assert all(row["cursor"] for row in result["evidence"])


def test_main_killed_from_outside_and_main_segfault() -> None:
    for signal, cause, native in ((9, "unknown", None), (11, "native_segfault", "SIGSEGV")):
        journal = Journal()
        run = journal.run().begin(1)
        run.to_serving()
        run.exit(signal=signal, dumped=signal == 11)
        result = diagnosis.diagnose(journal.entries, journal.unit)
        assert (result["verdict"], result["cause"]) == ("crashed", cause)
        assert result["first_failure"]["process"] == "main"
        assert result["exit"]["self_inflicted"] is False
        assert (result["native_fault"] or {}).get("signal") == native


def test_oom_kill_while_serving_is_told_from_self_kill() -> None:
    journal, run = journal_cases.start(4)
    run.to_serving()
    journal.kernel(f"Out of memory: Killed process {run.pid_of(2)} (sglang::schedul) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:990 pgtables:1kB oom_score_adj:0")
    run.raise_in(0, journal_cases.traceback(journal_cases.VERIFY, "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41234"))
    run.log(f"Subprocess scheduler_2 (pid={run.pid_of(2)}) crashed with exit code -9. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert (result["cause"], result["first_failure"]["rank"], result["kernel"]["oom_killed"], result["exit"]["self_inflicted"]) == ("host_oom_killer", "TP2", True, True)


def test_lines_behind_a_pipe_have_one_writer() -> None:
    """Behind tee all lines carry its pid: the prefixes tell the ranks."""
    journal = CASES["oom_at_run_time"].build()
    for entry in journal.entries:
        if entry.get("_SYSTEMD_UNIT") == journal.unit:
            entry.update({"_PID": "555", "_COMM": "tee", "_CMDLINE": "tee /var/log/sglang.log"})
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert (result["cause"], result["first_failure"]["rank"], result["exception"]["type"]) == ("gpu_oom", "TP4", "torch.OutOfMemoryError")


def test_child_that_said_nothing_is_named_by_the_parent() -> None:
    journal, run = journal_cases.start(1)
    run.to_serving()
    run.log("Subprocess detokenizer (pid=777) crashed with exit code -9. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert (result["verdict"], result["cause"]) == ("crashed", "unknown")
    assert (result["first_failure"]["process"], result["first_failure"]["pid"]) == ("detokenizer", 777)
    assert "SIGKILL from outside" in result["summary"]


def test_hang_keeps_its_phase_when_somebody_stops_it() -> None:
    journal, run = journal_cases.start(1)
    run.to_serving()
    for _number in range(3):
        journal.tick(30)
        run.log("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 00:05:00.")
    run.stopping()
    run.log("SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")
    run.exit(signal=9)
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert (result["verdict"], result["cause"], result["phase"]) == ("hung", "scheduler_hang", "serving")


def test_process_on_the_failed_gpu_was_first() -> None:
    journal, run = journal_cases.start(4)
    run.to_serving()
    journal.kernel(f"NVRM: Xid (PCI:0000:41:00): 119, pid={run.pid_of(1)}, name=sglang::schedul, Timeout after 6s of waiting for RPC response from GPU1 GSP!")
    journal.tick(300)
    for rank in (0, 2, 3):
        run.rank(rank, "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)")
    run.self_kill(serving=True)
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert (result["verdict"], result["cause"], result["first_failure"]["rank"]) == ("hung", "gpu_xid_hardware", "TP1")


def test_sparse_entries_are_enough() -> None:
    """Without message ids, invocation ids and titles: only texts, pids and times."""
    journal = CASES["incident_dflash_ep8"].build()
    for entry in journal.entries:
        for name in ("MESSAGE_ID", "EXIT_CODE", "EXIT_STATUS", "UNIT_RESULT", "_CMDLINE", "_COMM", "INVOCATION_ID", "_SYSTEMD_INVOCATION_ID"):
            entry.pop(name, None)
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert (result["cause"], result["phase"], result["first_failure"]["rank"], result["exit"]["status"]) == ("cuda_graph_replay_failure", "warmup", "TP3 EP3", 9)


def test_last_lines_without_invocation_belong_to_the_run_before_them() -> None:
    """journald looks the invocation up when it reads a line: of a process that is gone it finds none."""
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(journal_cases.traceback([("sglang/launch_server.py", 40, "<module>")], "ModuleNotFoundError: No module named 'orjson'"))
    run.exit(1)
    for entry in journal.entries:
        if entry.get("_TRANSPORT") == "stdout":
            for name in ("_SYSTEMD_INVOCATION_ID", "_COMM", "_CMDLINE"):
                entry.pop(name)
    journal.tick(20)
    journal.run().begin(1).to_weights()
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert (result["verdict"], result["cause"], result["exception"]["type"]) == ("crashed", "package_mismatch", "ModuleNotFoundError")
