"""Phases read from log lines, by release; monotone whatever the order, and whole whatever the journal lost."""

from __future__ import annotations

import json

import pytest
from dflash_fleet import phases
from hypothesis import given, settings
from hypothesis import strategies as st

RANKS = [f"TP{n} EP{n}" for n in range(8)]


def entry(text, at=None, pid=100, title=None):
    made = {"MESSAGE": text, "_PID": str(pid)}
    if at is not None:
        made["__MONOTONIC_TIMESTAMP"] = str(int(at * 1e6))
    if title:
        made["_CMDLINE"] = title
    return made


def line(text, rank=None, at=None):
    return entry(f"[2026-11-29 12:00:00{' ' + rank if rank else ''}] {text}", at)


def every(text, at, ranks=RANKS):
    return [line(text, rank, at + index / 1000) for index, rank in enumerate(ranks)]


def weights_end(kind):
    return f"Load weight end. elapsed=73.00 s, type={kind}, quant=None, avail mem=20.00 GB, mem usage=73.00 GB."


KIMI, DRAFT = weights_end("KimiK25ForConditionalGeneration"), weights_end("DFlashDraftModel")
OLD = [  # wording up to 0.5.13
    line("server_args=ServerArgs(model_path='x')", None, 10),
    *every("Init torch distributed begin.", 20),
    *every("Init torch distributed ends. elapsed=4.00 s, mem usage=0.50 GB", 24),
    *every("Load weight begin. avail mem=94.00 GB", 25),
    *every(KIMI, 98),
    *every("KV Cache is allocated. #tokens: 100000, KV size: 6.70 GB", 100),
    *every("Memory pool end. avail mem=9.00 GB", 101),
    *every("Capture cuda graph begin. This can take up to several minutes. avail mem=8.9 GB", 102),
    *every("Capture cuda graph end. Time elapsed: 10.00 s. mem usage=1 GB. avail mem=7.00 GB.", 112),
    *every("Load weight begin. avail mem=7.00 GB", 113),
    *every(DRAFT, 118),
    *every("KV Cache is allocated. #tokens: 100000, K size: 0.2 GB, V size: 0.2 GB", 119),
    *every("Memory pool end. avail mem=5.00 GB", 119),
    *every("Capture cuda graph begin. This can take up to several minutes. avail mem=5 GB", 120),
    *every("Capture cuda graph end. Time elapsed: 2.00 s. mem usage=1 GB. avail mem=4.00 GB.", 122),
    line("INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)", None, 123),
    line("The server is fired up and ready to roll!", None, 130),
]
NEW = [  # wording from 0.5.21
    line("server_args=...", None, 10),
    *every("Init parallel begin.", 20),
    *every("Init parallel ends. elapsed=4.00 s", 24),
    *every("Load weight begin. avail mem=94.00 GB", 25),
    *every(KIMI, 98),
    *every("Load weight begin. avail mem=20.00 GB", 98.5),
    *every(DRAFT, 99),
    *every("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 100000, KV size: 6.70 GB", 100),
    *every("Memory pool end. avail mem=9.00 GB", 101),
    *every("Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=8, avail mem=8.90 GB", 102),
    *every("Capture target verify CUDA graph end. bs=[1, 2], elapsed=10.0 s, mem usage=1 GB, avail mem=7.90 GB.", 112),
    *every("Capture draft verify CUDA graph begin. backend=full, num_tokens_per_req=8, avail mem=7.90 GB", 113),
    *every("Capture draft verify CUDA graph end. bs=[1, 2], elapsed=3.0 s, mem usage=1 GB, avail mem=6.90 GB.", 116),
    line("INFO:     Application startup complete.", None, 123),
    line("The server is fired up and ready to roll!", None, 130),
]
EXPECTED = {"launch": 10.0, "dist_init": 5.0, "weights": 75.0, "kv_cache": 2.0, "graph_capture": 21.0, "warmup": 7.0}


@pytest.mark.parametrize("log", [OLD, NEW], ids=["0.5.11", "0.5.23"])
def test_a_whole_start(log):
    tracker = phases.PhaseTracker(ranks=8, drafter=True, started=10)
    tracker.feed_many(log)
    shot = tracker.snapshot()
    assert shot["phase"] == "serving"
    seconds = {row["name"]: row["seconds"] for row in shot["phases"]}
    assert {name: seconds[name] for name in EXPECTED} == pytest.approx(EXPECTED, abs=0.11)
    done = {row["name"]: row["ranks_done"] for row in shot["phases"] if "ranks_done" in row}
    assert done == {"dist_init": 8, "weights": 8, "kv_cache": 8, "graph_capture": 8}
    assert tracker.fatal is None


def reached(lines, **kinds):
    tracker = phases.PhaseTracker(**{"ranks": 8, "drafter": True, "started": 0.0, **kinds})
    tracker.feed_many(lines)
    return tracker.snapshot()


@pytest.mark.parametrize(
    ("lines", "phase", "more"),
    [
        ([], "launch", {}),
        (every("Load weight begin. avail mem=1 GB", 1), "weights", {"ranks_done": 0, "percent": None}),
        (every("Load weight begin.", 1) + every(KIMI, 2, RANKS[:3]), "weights", {"ranks_done": 3}),
        (every(KIMI, 2), "weights", {"ranks_done": 8}),
        # the target's graphs are done, the drafter is only now loaded: no way back
        (OLD[:66], "graph_capture", {"detail": "drafter weights"}),
        (every("Capture target verify CUDA graph begin. backend=full", 1), "graph_capture", {"detail": "verify"}),
        (every("Capture draft verify CUDA graph begin. backend=full", 1), "graph_capture", {"detail": "draft verify"}),
        (every("Capture piecewise cuda graph begin", 1), "graph_capture", {"detail": ""}),
        ([line("Load weight end. Committed real weights after CUDA graph capture", "TP0")], "weights", {}),
        ([line("SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")], "stopping", {}),
        ([entry("INFO:     Uvicorn running on http://127.0.0.1:1 (Press CTRL+C to quit)")], "warmup", {}),
        # systemd's words about a unit are no engine's words
        ([{**entry("Load weight begin."), "_PID": "1"}], "launch", {}),
    ],
)
def test_phase_of_a_log_that_ends_early(lines, phase, more):
    shot = reached(lines)
    assert shot["phase"] == phase
    assert {name: shot[name] for name in more} == more


SHARDS = "Multi-thread loading shards: {0:3.0f}% Completed | {1}/64 [00:12<00:27, 1.6it/s]"


@pytest.mark.parametrize(
    ("message", "phase", "percent", "step"),
    [
        (SHARDS.format(31, 20), "weights", 31, [20, 64]),
        ("\r" + "\r".join(SHARDS.format(n * 100 / 64, n) for n in range(21)), "weights", 31, [20, 64]),
        ([ord(c) for c in "\rMulti-thread loading shards:  50% Completed | 32/64 [0<1]"], "weights", 50, [32, 64]),
        ("\x1b[32mLoading safetensors checkpoint shards:  25% Completed | 1/4 [0<1]\x1b[0m", "weights", 25, [1, 4]),
        ("Loading safetensors checkpoint shards:  25%|##5       | 1/4 [00:00<00:01]", "weights", 25, [1, 4]),
        ("Capturing batches (bs=48 avail_mem=7.31 GB):  35%|###5  | 6/17 [00:02<00:04]", "graph_capture", 35, [6, 17]),
        (
            list(b"\xff\xfe\rCapturing batches (bs=1 avail_mem=1 GB): 100%|####| 17/17 [00:02<00:00]"),
            "graph_capture",
            100,
            [17, 17],
        ),
        (SHARDS.format(31, 20) + "[2026-11-29 12:00:00 TP0] Memory pool end. avail mem=1 GB", "kv_cache", None, None),
        (None, "launch", None, None),
        ([], "launch", None, None),
        (["two values of one field", "Load weight begin."], "weights", None, None),
    ],
)
def test_progress_bars(message, phase, percent, step):
    shot = reached([entry(message, 1)])
    assert (shot["phase"], shot["percent"], shot["step"]) == (phase, percent, step)


def test_a_bar_of_the_drafter_counts_anew():
    shot = reached(
        [
            *every("Load weight begin.", 1),
            entry(SHARDS.format(100, 64), 2),
            *every(KIMI, 3),
            *every("Load weight begin.", 4),
        ]
    )
    assert (shot["percent"], shot["detail"], shot["ranks_done"]) == (None, "drafter weights", 8)
    shot = reached([*OLD[:66], entry("Multi-thread loading shards:  50% Completed | 1/2 [0<1]", 114)])
    assert (shot["phase"], shot["step"], shot["detail"]) == ("graph_capture", [1, 2], "drafter weights")


def test_ranks_by_process_title():
    lines = [entry("Load weight end. elapsed=1 s", 1, title=f"sglang::scheduler_TP{n}_EP{n}") for n in range(3)]
    assert reached(lines)["ranks_done"] == 3
    assert phases.rank_of("x", {"_CMDLINE": "sglang::scheduler_DP1_ATTN_CP0_MOE_DP2_TP3"}) == (
        "DP1 ATTN_CP0 MOE_DP2 TP3",
        "x",
    )
    assert phases.rank_of("[2026-11-29 12:00:00.123 PP3] Load weight begin.", {}) == ("PP3", "Load weight begin.")
    assert phases.rank_of("[2026-11-29 12:00:00] hello", {}) == (None, "hello")


def test_single_rank_has_no_prefix():
    shot = reached([line("Load weight begin."), line(KIMI), line("Memory pool end. avail mem=1 GB")], ranks=1)
    assert (shot["phase"], shot["ranks_done"], shot["ranks"]) == ("kv_cache", 1, 1)


def test_lost_lines_leave_no_rank_behind():
    lines = every(KIMI, 5, RANKS[:5]) + every("Memory pool end. avail mem=1 GB", 6)
    rows = {row["name"]: row for row in reached(lines)["phases"]}
    assert rows["weights"]["ranks_done"] == 8


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(OLD + NEW), max_size=60))
def test_never_backwards(lines):
    tracker = phases.PhaseTracker(ranks=8, drafter=True, started=0.0)
    order = []
    for one in lines:
        tracker.feed(one)
        order.append(phases.PHASES.index(tracker.phase))
    assert order == sorted(order)
    # what is handed to the next process carries everything
    copy = phases.PhaseTracker.from_state(json.loads(json.dumps(tracker.state())))
    assert copy.snapshot() == tracker.snapshot()
    assert copy.state() == tracker.state()


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.none(), st.text(), st.lists(st.integers(-5, 300)), st.lists(st.text()), st.integers()))
def test_any_message_is_taken(message):
    phases.PhaseTracker(started=0.0).feed({"MESSAGE": message, "__MONOTONIC_TIMESTAMP": "x"})


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("Scheduler hit an exception: Traceback (most recent call last):", True),
        ("Received sigquit from a child process. It usually means the child failed.", True),
        ("SIGQUIT received. signum=3, frame=None. It usually means one child failed.", True),
        ("Subprocess scheduler_0 (pid=24810) crashed with exit code -9. Triggering SIGQUIT for cleanup...", True),
        ("Rank 3 scheduler died during initialization (exit code: -9). If exit code is -9", True),
        ("Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", True),
        ("Initialization failed. warmup error: Traceback", True),
        ("Load weight begin.", False),
        ("watchdog_timeout=300", False),
    ],
)
def test_the_engine_says_that_it_ends(text, seen):
    tracker = phases.PhaseTracker(ranks=8, started=0.0)
    tracker.feed(line(text, "TP0", 3))
    assert (tracker.fatal is not None) is seen


@pytest.mark.parametrize(
    ("texts", "graphs"),
    [
        ([], None),
        (["Decode batch, #running-req: 1, accept len: 3.2, cuda graph: True, gen throughput"], True),
        (
            [
                "Decode batch, #running-req: 1, cuda graph: True, x",
                "Decode batch, #running-req: 9, cuda graph: False, x",
            ],
            False,
        ),
        (["Prefill batch, #new-seq: 1, cuda graph: False, input"], None),
    ],
)
def test_graphs_in_use(texts, graphs):
    tracker = phases.PhaseTracker(started=0.0)
    for text in texts:
        tracker.feed(line(text, "TP0", 1))
    assert tracker.graphs is graphs


def test_stalls_by_phase():
    tracker = phases.PhaseTracker(ranks=8, started=0.0)
    tracker.feed(line("Load weight begin.", "TP0", 10))
    assert tracker.stalled(200) is None
    assert tracker.stalled(311) == pytest.approx(301)
    assert tracker.stalled(311, {"weights": 400}) is None
    assert tracker.stalled(10_000, {"weights": 0}) is None
    tracker.feed(entry(SHARDS.format(31, 20), 300))
    assert tracker.stalled(311) is None
    # the same bar again, and other people's requests, are no progress
    tracker.feed(entry(SHARDS.format(31, 20), 500))
    tracker.feed(line('INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 503 Service Unavailable', None, 590))
    assert tracker.stalled(601) == pytest.approx(301)


def test_work_counts_as_progress_while_nothing_is_printed():
    tracker = phases.PhaseTracker(ranks=8, started=0.0)
    tracker.feed(line("Load weight begin.", "TP0", 10))
    tracker.alive(1000, 100)
    tracker.alive(1500, 200)  # too little to be a load
    assert tracker.stalled(311) is not None
    tracker.alive(900_000, 300)
    assert tracker.stalled(311) is None
    tracker.alive(100, 400)  # a process has ended: counted anew
    tracker.alive(100, 700)
    assert tracker.stalled(700) is not None


BASELINE = {
    "launch": 10,
    "dist_init": 5,
    "weights": 100,
    "kv_cache": 5,
    "graph_capture": 40,
    "warmup": 20,
    "serving": 99,
}


@pytest.mark.parametrize(
    ("phase", "elapsed", "percent", "left"),
    [
        ("launch", 0, None, 180),
        ("weights", 30, None, 135),
        ("weights", 500, None, 65),
        ("weights", 50, 50, 65 + 50),
        (
            "weights",
            100,
            50,
            65 + 50,
        ),  # half of it took 100 s: the rest is expected to take as long as last time's half
        ("weights", 150, 75, 65 + 37.5),
        ("warmup", 5, None, 15),
        ("serving", 5, None, None),
    ],
)
def test_time_left(phase, elapsed, percent, left):
    assert phases.remaining(phase, elapsed, percent, BASELINE) == (
        None if left is None else pytest.approx(left, abs=0.1)
    )


def test_no_time_left_without_a_good_start():
    assert phases.remaining("weights", 10, 50, {}) is None
    assert phases.remaining("weights", 10, 50, None) is None


@pytest.mark.parametrize(
    ("lines", "elapsed", "left", "text"),
    [
        (
            [*every("Load weight begin.", 1), entry(SHARDS.format(31, 20), 2), *every(KIMI, 3)],
            14,
            100.4,
            "gpu-01  0:14  weights        8/8 ranks  31 %   about 1:40 left",
        ),
        ([], 3, None, "gpu-01  0:03  launch"),
        ([line("Uvicorn running on http://127.0.0.1:1")], 90, 0.2, "gpu-01  1:30  warmup          any moment now"),
        (
            [
                line("Capture target verify CUDA graph begin.", "TP0", 1),
                entry("Capturing batches (x): 35%|#| 6/17 [0<1]", 2),
            ],
            118,
            None,
            "gpu-01  1:58  graph_capture  0/8 ranks  verify 6/17  35 %",
        ),
    ],
)
def test_line_for_a_person(lines, elapsed, left, text):
    assert phases.progress_line("gpu-01", elapsed, reached(lines), left) == text


def test_seconds_of_phases_do_not_know_the_wall_clock():
    straight, stepped = (phases.PhaseTracker(ranks=8, drafter=True) for _ in range(2))
    for index, each in enumerate(OLD):
        straight.feed(dict(each))
        wall = 1_764_460_800_000_000 + (-(10**14) if index > len(OLD) // 2 else 0)
        stepped.feed({**each, "__REALTIME_TIMESTAMP": str(wall), "_SOURCE_REALTIME_TIMESTAMP": str(wall)})
    assert stepped.seconds() == straight.seconds()
    assert straight.seconds()["weights"] > 70
