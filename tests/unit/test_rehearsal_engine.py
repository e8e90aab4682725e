"""The rehearsal engine: built as wheels, installed, started, asked and killed; its rules as tables in this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "rehearsal" / "engine"
LOGS = ROOT / "tests" / "fixtures" / "engine-logs"


def load_package() -> None:
    """The engine's package under a name of its own: `sglang` is also the name of a filter plugin here."""
    folder = ENGINE / "src" / "sglang"
    spec = importlib.util.spec_from_file_location(
        "rehearsal_sglang", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["rehearsal_sglang"] = package
    spec.loader.exec_module(package)


load_package()

from rehearsal_sglang._rehearsal import (  # noqa: E402 - made by the call above
    config_file,
    failures,
    frames,
    model,
    options,
    releases,
    server_args,
    settings,
    speculation,
)

KIMI = ["--model-path", "moonshotai/Kimi-K2.6"]
DFLASH = [
    "--speculative-algorithm", "DFLASH",
    "--speculative-draft-model-path", "SubSir/Kimi-K2.6-DFlash-tmp-long",
    "--speculative-num-draft-tokens", "8",
]  # fmt: skip
EP8 = [*KIMI, "--tp-size", "8", "--ep-size", "8", *DFLASH]
FAST = {"pace": 0.01, "throughput": {"single": 2000, "peak": 40000, "ttft": 0}}
INSTANT = {**FAST, "pace": 0.0}
LONG = {**FAST, "phases": {"launch": 1, "weights": 2000}}  # 20 s of weights, to be interrupted
BUILT = ("0.5.11", "0.5.20", "0.5.23")


# Wheels and processes ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One wheel a release, built as rehearsal/wheels.py builds them."""
    folder = tmp_path_factory.mktemp("wheels")

    def build(release: str) -> Path:
        out = folder / release
        environ = {**os.environ, "REHEARSAL_RELEASE": release, "SOURCE_DATE_EPOCH": "1577836800"}
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([*command, "--wheel-dir", str(out), str(ENGINE)], env=environ, check=True, capture_output=True)
        (wheel,) = out.glob("*.whl")
        return wheel

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(BUILT, pool.map(build, BUILT)))


@pytest.fixture(scope="module")
def pythons(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One virtual environment a release with nothing but the wheel in it."""
    folder = tmp_path_factory.mktemp("venvs")

    def install(release: str) -> Path:
        venv = folder / release
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, capture_output=True)
        python = venv / "bin" / "python"
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*command, str(wheels[release])], check=True, capture_output=True)
        return python

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(BUILT, pool.map(install, BUILT)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A started engine; its output goes to one file, as to one journal stream."""

    def __init__(
        self, python: Path, folder: Path, arguments: list[str], config: dict[str, Any], **environ: str
    ) -> None:
        self.port = free_port()
        self.file = folder / f"{self.port}.log"
        settings_file = folder / f"{self.port}.json"
        settings_file.write_text(json.dumps(config))
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "REHEARSAL_RELEASE")}
        clean.update(DFLASH_REHEARSAL_CONFIG=str(settings_file), PYTHONUNBUFFERED="1", **environ)
        if "--port" in arguments:
            self.port = int(arguments[arguments.index("--port") + 1])
        else:
            arguments = [*arguments, "--port", str(self.port)]
        self.key = ""
        with self.file.open("wb") as stream:
            command = [str(python), "-m", "sglang.launch_server", *arguments]
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, env=clean)

    @property
    def log(self) -> str:
        return self.file.read_text(encoding="utf-8")

    def until(self, text: str, seconds: float = 20.0) -> str:
        """Waits for a text in the log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if text in self.log:
                return self.log
            if self.process.poll() is not None and text not in self.log:
                break
            time.sleep(0.02)
        pytest.fail(f"no {text!r} in:\n{self.log[-4000:]}")

    def ready(self) -> Running:
        self.until("fired up and ready to roll")
        return self

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 25.0) -> tuple[int, bytes]:
        """One request; status 0 where the connection is refused."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        except ConnectionRefusedError:
            return 0, b""
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        status, data = self.ask(method, path, body)
        assert status == 200, data
        return json.loads(data)

    def events(self, path: str, body: Any) -> list[Any]:
        status, data = self.ask("POST", path, body)
        assert status == 200, data
        parts = [line[6:] for line in data.decode().split("\n\n") if line]
        assert parts[-1] == "[DONE]"
        return [json.loads(part) for part in parts[:-1]]

    def children(self) -> dict[str, int]:
        """Process title -> PID, from the command lines that journald and ps see."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    title = (entry / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()
                    found[title] = int(entry.name)
        return found

    def end(self, seconds: float = 20.0) -> int:
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture
def start(pythons: dict[str, Path], tmp_path: Path) -> Iterator[Any]:
    """Starts engines and makes sure that none stays."""
    running: list[Running] = []

    def run(release: str, arguments: list[str], config: dict[str, Any] = FAST, **environ: str) -> Running:
        engine = Running(pythons[release], tmp_path, arguments, config, **environ)
        running.append(engine)
        return engine

    yield run
    for engine in running:
        engine.stop()


def exceptions(log: str) -> list[tuple[str, str]]:
    """(rank, last line) of each scheduler's exception, in the order of the log."""
    found = []
    pattern = r"^\[[^]]*?( (?:[A-Z_]+\d+ ?)+)?\] Scheduler hit an exception: (.*?)\n\n"
    for match in re.finditer(pattern, log, re.M | re.S):
        found.append(((match.group(1) or "").strip(), match.group(2).splitlines()[-1]))
    return found


# The wheel --------------------------------------------------------------------------------------------------------
def test_wheels_are_named_for_their_release(wheels: dict[str, Path], pythons: dict[str, Path]) -> None:
    for release, wheel in wheels.items():
        assert wheel.name == f"sglang-{release}+rehearsal-py3-none-any.whl"
        shown = subprocess.run(
            [str(pythons[release].parent / "sglang"), "version"], capture_output=True, text=True, check=True
        )
        assert f"{release}+rehearsal" in shown.stdout
    code = "import sglang; print(sglang.__version__)"
    shown = subprocess.run([str(pythons["0.5.11"]), "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "0.5.11+rehearsal"


def test_the_same_source_gives_the_same_bytes(wheels: dict[str, Path], tmp_path: Path) -> None:
    environ = {**os.environ, "REHEARSAL_RELEASE": "0.5.20", "SOURCE_DATE_EPOCH": "1577836800"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, env=environ, cwd=ENGINE, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.read_bytes() == wheels["0.5.20"].read_bytes()


def test_a_release_without_rules_is_refused(tmp_path: Path) -> None:
    environ = {**os.environ, "REHEARSAL_RELEASE": "0.5.10"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, env=environ, cwd=ENGINE, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "between 0.5.11 and 0.5.23" in done.stderr


# A whole life -----------------------------------------------------------------------------------------------------
def test_life_of_a_server_with_a_key(start: Any, tmp_path: Path) -> None:
    secret = tmp_path / "key.yaml"
    secret.write_text("api-key: 'c4n4ry key'\n")
    secret.chmod(0o600)
    slow = {**FAST, "pace": 0.005, "phases": {"warmup": 160}}  # 0.8 s of warm-up, to be looked at
    engine = start("0.5.20", [*EP8, "--config", str(secret), "--enable-metrics", "--served-model-name", "kimi"], slow)
    engine.key = "c4n4ry key"
    assert engine.ask("GET", "/health")[0] == 0
    engine.until("Uvicorn running on")
    # Bound and warming up: what lies about being ready answers 200 already.
    states = {path: engine.ask("GET", path)[0] for path in ("/health", "/ready", "/v1/models", "/model_info")}
    assert states == {"/health": 503, "/ready": 503, "/v1/models": 200, "/model_info": 200}
    engine.ready()
    assert engine.ask("GET", "/ready")[0] == 200
    began = time.monotonic()
    assert engine.ask("GET", "/health")[0] == 200
    assert time.monotonic() - began >= 1.0
    # The key opens, its absence does not; probes need none.
    engine.key = ""
    assert engine.ask("GET", "/v1/models") == (401, b'{"error":"Unauthorized"}')
    assert engine.ask("POST", "/generate", {"text": "x"})[0] == 401
    assert engine.ask("GET", "/ready")[0] == 200
    assert engine.ask("GET", "/metrics")[0] == 200
    engine.key = "c4n4ry key"
    assert engine.json("GET", "/v1/models")["data"][0]["id"] == "kimi"

    # Processes: one a rank, with its own title and PID.
    titles = engine.children()
    assert set(titles) == {f"sglang::scheduler_TP{i}_EP{i}" for i in range(8)} | {"sglang::detokenizer"}
    pid = titles["sglang::scheduler_TP3_EP3"]
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "sglang::schedul"

    # Text that says what it is, as many tokens as asked for, and the drafter's figures.
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    answer = engine.json("POST", "/generate", body)
    info = answer["meta_info"]
    assert answer["text"].startswith("[rehearsal]")
    assert info["completion_tokens"] == 200
    assert info["finish_reason"] == {"type": "length", "length": 200}
    assert 2.2 < info["spec_accept_length"] < 4.8
    # The bonus token of the prefill counts, but belongs to no verify.
    assert info["spec_verify_ct"] + info["spec_num_correct_drafts"] == 199
    assert info["spec_num_proposed_drafts"] == 7 * info["spec_verify_ct"]
    assert sum(info["spec_correct_drafts_histogram"]) == info["spec_verify_ct"]

    # A stream: several tokens a chunk, and usage at its end.
    asked = {"prompt": "hello", "max_tokens": 120, "ignore_eos": True, "stream": True}
    events = engine.events("/v1/completions", {**asked, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 120
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert len(text.split()) == 120
    assert len(events) < 100
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "stream": True}
    events = engine.events("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 40
    done = engine.json("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "any"})
    assert done["choices"][0]["finish_reason"] == "stop"
    assert done["choices"][0]["message"]["content"].startswith("[rehearsal]")
    assert engine.ask("POST", "/v1/chat/completions", {"max_tokens": 3})[0] == 400
    assert engine.ask("GET", "/nothing")[0] == 404
    assert engine.ask("GET", "/generate")[0] == 405

    # Sixty-four at once.
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        counts = list(pool.map(lambda _: len(engine.events("/v1/completions", asked)), range(64)))
    assert min(counts) > 10

    shown = engine.json("GET", "/server_info")
    assert shown["version"] == "0.5.20+rehearsal"
    assert shown["ep_size"] == 8
    assert "--api-key c4n4ry key" in shown["launch_command"]
    assert 2.8 < shown["internal_states"][0]["avg_spec_accept_length"] < 4.0
    assert shown["startup_time"]["load_weight"] > 0
    metrics = engine.ask("GET", "/metrics")[1].decode()
    assert re.search(r'^sglang:generation_tokens_total\{engine_type="unified",model_name="kimi"\} [1-9]', metrics, re.M)
    assert re.search(r"^sglang:spec_accept_length\{.*\} [2-4]\.", metrics, re.M)

    log = engine.log
    assert "'api_key': 'c4n4ry key'" in log  # no release hides it
    assert re.search(r"TP0 EP0\] Decode batch, .* accept len: \d\.\d\d, .*cuda graph: True, ", log)
    assert re.search(r"Prefill batch, #new-seq: \d+, #new-token: \d+, .* \[rehearsal\]$", log, re.M)
    for rank in range(8):
        assert re.search(rf" TP{rank} EP{rank}\] Load weight end\. .*type=KimiK25ForConditionalGeneration", log)
        assert re.search(rf" TP{rank} EP{rank}\] Load weight end\. .*type=DFlashDraftModel", log)
    # Every line says that it is a rehearsal.
    unmarked = [line for line in re.split(r"[\n\r]", log) if line and not line.endswith("[rehearsal]")]
    assert [line for line in unmarked if "warnings.warn" not in line] == []

    # A second server on the same port loads in full, is refused, and says that it is ready.
    second = start("0.5.20", [*KIMI, "--port", str(engine.port), "--api-key", "c4n4ry key"], INSTANT)
    assert second.end() == 3
    assert "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1'" in second.log
    assert second.log.index("Errno 98") < second.log.index("fired up and ready to roll")
    assert engine.ask("GET", "/ready")[0] == 200

    # SIGTERM to the main process alone: what runs ends well, nothing new is taken, exit 0.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
        pending = pool.submit(engine.json, "POST", "/v1/completions", long)
        time.sleep(0.1)
        engine.process.send_signal(signal.SIGTERM)
        engine.until("SIGTERM received.")
        refused = [engine.ask(*request)[0] for request in (("GET", "/ready"), ("GET", "/health"))]
        refused.append(engine.ask("POST", "/v1/completions", long)[0])
        assert refused == [503, 503, 503]
        assert pending.result()["usage"]["completion_tokens"] == 2000
    assert engine.end() == 0
    assert "Gracefully exiting... Remaining number of requests 1." in engine.log
    assert "INFO:     Finished server process [" in engine.log
    assert "crashed" not in engine.log
    assert engine.children() == {}


def test_the_newest_release_without_a_drafter(start: Any) -> None:
    engine = start("0.5.23", [*KIMI, "--tp-size", "2"], INSTANT).ready()
    info = engine.json(
        "POST", "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
    )
    assert not [name for name in info["meta_info"] if name.startswith("spec_")]
    log = engine.log
    assert "TP1] Init parallel ends. elapsed=" in log
    assert "TP1] Memory baseline taken. mem usage=" in log
    assert "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=" in log
    assert "Engine startup timings (s): load_weight=" in log
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 0


# The incident -----------------------------------------------------------------------------------------------------
def test_the_incident_happens_by_rule(start: Any) -> None:
    engine = start("0.5.11", EP8, INSTANT)
    assert engine.end() == -signal.SIGKILL
    found = exceptions(engine.log)
    assert found[0] == ("TP3 EP3", "AttributeError: 'NoneType' object has no attribute 'dtype'")
    assert {rank for rank, _ in found} == {f"TP{i} EP{i}" for i in range(8)}
    assert {text for _, text in found} == {found[0][1]}
    log = engine.log
    assert re.search(
        r'cuda_graph_runner.py", line 124, in _grouped_foreach_copy_\n    key = \(dst.dtype, src.dtype\)\n', log
    )
    assert 'scheduler.py", line 2981, in run_batch' in log
    assert 'dflash_worker.py", line 660, in _prepare_for_speculative_decoding' in log
    assert "SIGQUIT received. signum=None, frame=None. It usually means one child failed." in log
    assert "kill_process_tree called" not in log  # first in 0.5.13
    assert "fired up" not in log
    assert log.index("Uvicorn running") < log.index("Prefill batch") < log.index("Scheduler hit an exception")


@pytest.mark.parametrize(
    ("release", "arguments"),
    [
        ("0.5.11", [*EP8, "--disable-cuda-graph"]),
        ("0.5.11", [*KIMI, "--tp-size", "8", *DFLASH]),
    ],
    ids=["graphs off", "no expert parallelism"],
)
def test_the_incident_needs_graphs_and_experts(start: Any, release: str, arguments: list[str]) -> None:
    engine = start(release, arguments, INSTANT).ready()
    answer = engine.json(
        "POST", "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
    )
    assert answer["meta_info"]["spec_accept_length"] > 1.5
    assert answer["meta_info"]["spec_accepted_drafts"] > 0  # this release's name for it
    graphs = "--disable-cuda-graph" not in arguments
    assert ("Capture cuda graph end. Time elapsed:" in engine.log) is graphs
    assert engine.ask("GET", "/ready")[0] == 404  # first in 0.5.20
    assert re.search(r"TP0(?: EP0)?\] DFLASH verify completed. num_accepted_drafts_per_req=\[\d+\]", engine.log)
    # A clean stop of this release ends by SIGKILL on itself.
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == -signal.SIGKILL
    assert "Gracefully exiting... Remaining number of requests 0." in engine.log
    assert "Scheduler hit" not in engine.log


# Deaths from outside ----------------------------------------------------------------------------------------------
def test_sigterm_while_loading_has_its_default_effect(start: Any) -> None:
    engine = start("0.5.20", EP8, LONG)
    engine.until("Load weight begin")
    titles = engine.children()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == -signal.SIGTERM
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}/cmdline").exists() for pid in titles.values()):
        time.sleep(0.02)
    assert not [pid for pid in titles.values() if Path(f"/proc/{pid}/cmdline").exists()]


def test_a_rank_killed_while_loading(start: Any) -> None:
    engine = start("0.5.20", EP8, LONG)
    engine.until("Load weight begin")
    os.kill(engine.children()["sglang::scheduler_TP5_EP5"], signal.SIGKILL)
    assert engine.end() == 1
    assert engine.log.splitlines()[-1] == (
        "RuntimeError: Rank 5 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a "
        "common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
    )
    assert re.search(
        r'engine.py", line 1828, in _wait_for_scheduler_ready\n    raise _scheduler_died_error', engine.log
    )


def test_a_rank_killed_while_serving(start: Any) -> None:
    engine = start("0.5.23", EP8, INSTANT).ready()
    pid = engine.children()["sglang::scheduler_TP2_EP2"]
    os.kill(pid, signal.SIGKILL)
    assert engine.end() == -signal.SIGKILL
    lines = [
        f"Subprocess scheduler_2 (pid={pid}) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
        "SIGQUIT received. signum=None",
        "Sleeping 5 seconds before crash diagnostics",
        "Waiting 60.0 seconds for CUDA coredumps before exiting.",
        f"kill_process_tree called: parent_pid={engine.process.pid}, include_parent=True, pid={engine.process.pid}",
    ]
    places = [engine.log.index(line) for line in lines]
    assert places == sorted(places)


def test_a_stopped_rank_makes_health_fail(start: Any) -> None:
    engine = start("0.5.20", [*KIMI, "--tp-size", "2"], INSTANT, SGLANG_HEALTH_CHECK_TIMEOUT="1").ready()
    pid = engine.children()["sglang::scheduler_TP1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert engine.ask("GET", "/health")[0] == 503
        assert engine.ask("GET", "/ready")[0] == 503
        assert engine.ask("GET", "/v1/models")[0] == 200
        assert "Server couldn't get a response from detokenizer for last 1 seconds" in engine.log
    finally:
        os.kill(pid, signal.SIGCONT)


# Failures asked for -----------------------------------------------------------------------------------------------
RUN_TIME = [
    # kind, settings, exit status, what the log must hold
    ("gpu_oom", {"at": "weights", "rank": 1}, -9, ["TP1 EP1] Scheduler", "OutOfMemoryError: CUDA out of", "create_w"]),
    ("gpu_oom", {"at": "graph_capture"}, -9, ["Exception: Capture cuda graph failed: CUDA out of memory. Tried"]),
    ("cuda_graph_capture", {}, -9, ["stream is capturing", "During handling of the above", "Possible solutions:"]),
    ("kv_pool_too_small", {}, -9, ["increase --mem-fraction-static. Current value: mem_fraction_static=0.88"]),
    ("illegal_memory_access", {"rank": 1, "collateral": True}, -9, ["cudaErrorIllegalAddress", '"should dump" flag']),
    ("device_side_assert", {}, -9, ["vectorized_gather_kernel: block: [0,0,0]", "device-side assert triggered"]),
    ("nccl_timeout", {"rank": 1}, -9, ["[rank1]:[E", "Watchdog caught collective", "exit code -6", "Aborted"]),
    ("segfault", {"rank": 1}, -9, ["Fatal Python error: Segmentation fault", "ncclCommInitRank", "exit code -11"]),
    ("segfault", {"at": "dist_init", "rank": 1}, 1, ["Rank 1 scheduler died during initialization (exit code: -11)"]),
    ("abort", {}, -9, ["Fatal Python error: Aborted", "Subprocess scheduler_0 (pid="]),
    ("hang", {"at": "warmup"}, -9, ["Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"]),
    ("kill_rank", {"at": "kv_cache", "rank": 1}, 1, ["Rank 1 scheduler died during initialization (exit code: -9)"]),
    ("exit_zero", {}, 0, ["SIGQUIT received.", "Scheduler hit an exception"]),
    ("unknown_exception", {"type": "OddError", "message": "why"}, -9, ["\nOddError: why\n"]),
    ("gpu_memory_busy", {}, -9, ["The memory capacity is unbalanced.", "Received sigquit from a child process."]),
    ("weights_corrupt", {}, -9, ["SafetensorError: Error while deserializing header"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def failed(pythons: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit status and log of each case: they wait more than they work, so they run side by side."""
    folder = tmp_path_factory.mktemp("failed")
    arguments = [*KIMI, "--tp-size", "2", "--ep-size", "2", *DFLASH]

    def run(case: tuple[str, dict[str, Any], int, list[str]]) -> tuple[int, str]:
        config = {**INSTANT, "failures": [{"kind": case[0], **case[1]}]}
        engine = Running(pythons["0.5.20"], folder, arguments, config, SGLANG_PYSPY_DUMP_BEFORE_CRASH="0")
        try:
            status = engine.end(30)
            assert not engine.children()
            return status, engine.log
        finally:
            engine.stop()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        return list(pool.map(run, RUN_TIME))


@pytest.mark.parametrize("index", range(len(RUN_TIME)), ids=[f"{case[0]}-{case[1].get('at', '')}" for case in RUN_TIME])
def test_failures_on_request(failed: list[tuple[int, str]], index: int) -> None:
    _, _, expected, texts = RUN_TIME[index]
    status, log = failed[index]
    assert status == expected, log[-3000:]
    for text in texts:
        assert text in log, log[-3000:]


def test_a_hang_in_the_load_stays_one(start: Any) -> None:
    engine = start("0.5.20", EP8, {**INSTANT, "failures": [{"kind": "hang", "at": "weights", "rank": 4}]})
    engine.until("TP7 EP7] Load weight end. elapsed")
    time.sleep(0.5)
    log = engine.log
    assert "TP4 EP4] Load weight begin" in log
    assert "TP4 EP4] Load weight end" not in log
    assert engine.process.poll() is None
    assert engine.ask("GET", "/health")[0] == 0


def test_a_zombie_answers_health(start: Any) -> None:
    config = {**INSTANT, "failures": [{"kind": "zombie"}]}
    engine = start("0.5.11", [*KIMI, "--tp-size", "2", *DFLASH], config).ready()
    engine.until("Scheduler hit an exception")
    time.sleep(0.3)
    assert engine.process.poll() is None
    assert engine.ask("GET", "/health")[0] == 200
    with pytest.raises(TimeoutError):
        engine.ask("POST", "/generate", {"text": "x"}, timeout=0.5)


def test_a_failure_wanted_once_lets_the_next_start_live(start: Any, tmp_path: Path) -> None:
    # The text of the settings names the mark, so it must be this test's own.
    config = {**INSTANT, "failures": [{"kind": "kill_rank", "rank": 1, "once": True, "note": str(tmp_path)}]}
    assert start("0.5.20", [*KIMI, "--tp-size", "2"], config).end() == 1
    engine = start("0.5.20", [*KIMI, "--tp-size", "2"], config).ready()
    for mark in Path("/dev/shm").glob("dflash-rehearsal-*"):
        if mark.name.endswith("-0") and mark.stat().st_mtime > time.time() - 60:
            mark.unlink()
    assert engine.ask("GET", "/v1/models")[0] == 200


def test_a_useless_drafter_is_seen_in_the_accept_length(start: Any) -> None:
    engine = start("0.5.20", EP8, {**INSTANT, "failures": [{"kind": "useless_drafter"}]}).ready()
    body = {"text": "x", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    assert 1.0 <= engine.json("POST", "/generate", body)["meta_info"]["spec_accept_length"] < 1.1


# Drafters that do not fit -----------------------------------------------------------------------------------------
def write_models(folder: Path, **changed: Any) -> list[str]:
    """A target and a drafter as files; returns the options that name them."""
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir(), drafter.mkdir()
    tiny = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 512, "max_position_embeddings": 512}
    (target / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **tiny})
    )
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (target / name).write_bytes(b"")
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 1, 2]},
        "num_target_layers": 4,
        "hidden_size": 64,
        "num_hidden_layers": 2,
    }
    config.update(changed)
    (drafter / "config.json").write_text(json.dumps(config))
    return [
        "--model-path",
        str(target),
        "--speculative-algorithm",
        "DFLASH",
        "--speculative-draft-model-path",
        str(drafter),
    ]


BAD = [
    ({"hidden_size": 96}, "ValueError: DFLASH target_hidden feature dim mismatch. Expected shape [N, 288]"),
    ({"architectures": ["NoSuchDraftModel"]}, "ValueError: Cannot find model module. 'NoSuchDraftModel' is not a reg"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 9]}}, "target_layer_ids[2]=9, target_num_layers=4."),
    ({"dflash_config": {"mask_token_id": 512}}, "mask_token_id=512, vocab_size=512."),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "text"), BAD, ids=["hidden_size", "architecture", "layer ids", "mask token"])
def test_a_drafter_that_does_not_fit_dies(start: Any, tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    engine = start("0.5.23", write_models(tmp_path, **changed), INSTANT, SGLANG_PYSPY_DUMP_BEFORE_CRASH="0",
                   SGLANG_CUDA_COREDUMP_BEFORE_CRASH="0")  # fmt: skip
    assert engine.end() == -9
    assert text in engine.log
    # Only the wrong width binds the port first.
    assert ("Uvicorn running" in engine.log) is ("hidden_size" in changed)


@pytest.mark.parametrize(
    ("changed", "more", "text"),
    [
        (
            {"num_target_layers": 36},
            [],
            "Draft config num_target_layers=36 differs from runtime target num_hidden_layers=4;",
        ),
        (
            {},
            ["--speculative-num-draft-tokens", "4"],
            "DFLASH block size mismatch: using speculative_num_draft_tokens=4 but ",
        ),
    ],
    ids=["trained for another target", "another block size"],
)
def test_a_drafter_that_only_warns(start: Any, tmp_path: Path, changed: Any, more: list[str], text: str) -> None:
    engine = start("0.5.23", [*write_models(tmp_path, **changed), *more], INSTANT).ready()
    assert text in engine.log
    body = {"text": "x", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    assert engine.json("POST", "/generate", body)["meta_info"]["spec_accept_length"] < 1.2


# Beside the real engine -------------------------------------------------------------------------------------------
# What the CPU or another unrehearsed part says: not looked for in the rehearsal.
ONLY_REAL = re.compile(
    r"UserWarning|warnings\.warn|Ignore import error|Example: sglang serve|Cuda graph is disabled because|RLIMIT_NOFILE"
    r"|number of ranks .* numa node|init_threads_binding|init_cpu_threads_env|Setup Custom allreduce|CUDA architecture"
    r"|multimem all-gather|fallback token IDs|ORJSONResponse|await \w*handler|non-greedy verification"
    r"|^  Example|GET /nothing|POST /v1|GET /v1|GET /server_info|GET /metrics|GET /health"
)
ONLY_REHEARSAL = re.compile(
    r"This is a REHEARSAL|The rehearsal ends here|recommended entrypoint|warnings\.warn|is deprecated and will"
)


def shape(line: str) -> str:
    """A line without its numbers: what a parser of logs goes by."""
    line = line.removesuffix(" [rehearsal]")
    line = re.sub(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{3})?", "[time", line)
    line = line.replace("cpu graph", "cuda graph").replace("available_cpu_mem", "available_gpu_mem")
    line = re.sub(r"server_args=\{.*", "server_args={", line)
    line = re.sub(r"\d+(?:\.\d+)?(?:e-?\d+)?it/s|\?it/s|\d+\.\d+s/it", "RATE", line)
    line = re.sub(r" +(\d)", r" \1", line)
    line = re.sub(r"(?<![A-Za-z])-?\d+(?:\.\d+)?", "N", line)
    # A pool of bytes and one of gigabytes are told apart by their fields, not by which model has which.
    return re.sub(r"KV size: N GB", "K size: N GB, V size: N GB", line)


def shapes_of(text: str, skip: re.Pattern[str]) -> list[str]:
    # A progress bar has no end of line: what another rank writes meanwhile, with its time in front, stands behind it.
    lines = [line for line in re.split(r"[\n\r]|(?=\[\d{4}-\d\d-\d\d \d\d:)", text) if line.strip()]
    return [shape(line) for line in lines if not skip.search(line)]


def real(name: str) -> str:
    return (LOGS / f"real-0.5.23-cpu-{name}").read_bytes().decode()


TINY = ["--max-total-tokens", "4096", "--max-running-requests", "4", "--attention-backend", "torch_native"]
TINY += ["--disable-cuda-graph", "--device", "cuda"]


def test_lines_and_answers_have_the_real_shapes(start: Any, tmp_path: Path) -> None:
    arguments = [*write_models(tmp_path), *TINY, "--tp-size", "2", "--enable-metrics"]
    engine = start("0.5.23", arguments, {**INSTANT, "accept_length": 8.0}).ready()
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}}
    prompt = {"prompt": "hello", "max_tokens": 24, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "ignore_eos": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    mine: dict[str, Any] = {
        "generate": engine.json("POST", "/generate", body),
        "generate_stream": engine.events("/generate", {**body, "stream": True}),
        "completions": engine.json("POST", "/v1/completions", prompt),
        "completions_stream": engine.events("/v1/completions", {**prompt, **stream}),
        "chat": engine.json("POST", "/v1/chat/completions", chat),
        "chat_stream": engine.events("/v1/chat/completions", {**chat, **stream}),
        "v1_models": engine.json("GET", "/v1/models"),
        "v1_loads": engine.json("GET", "/v1/loads"),
    }
    assert engine.ask("GET", "/health")[0] == 200
    theirs = json.loads(real("answers.json"))
    # Streams: the same kinds of events in the same order, and every field that is sent is one of the real ones.
    for name in ("generate", "completions", "chat", "v1_models", "v1_loads"):
        assert keys(mine[name]) <= keys(theirs[name]), name
    for name in ("completions_stream", "chat_stream", "generate_stream"):
        assert keys(mine[name][0]) <= keys(theirs[name][0]), name
        assert keys(mine[name][1]) <= keys(theirs[name][1]), name
        details = {("usage", "prompt_tokens_details"), ("usage", "completion_tokens_details")}
        assert keys(mine[name][-1]) <= keys(theirs[name][-1]) | details, name
    wanted = {
        *("spec_accept_length", "spec_accept_rate", "spec_verify_ct", "spec_num_correct_drafts"),
        *("spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
        *("completion_tokens", "prompt_tokens", "finish_reason", "e2e_latency"),
    }
    assert wanted <= set(mine["generate"]["meta_info"]) & set(theirs["generate"]["meta_info"])
    assert mine["generate"]["meta_info"]["spec_accept_length"] > 7.5
    info = engine.json("GET", "/server_info")
    assert keys(info["startup_time"]) == keys(theirs["server_info"]["startup_time"])
    metrics = {
        re.split(r"[ {]", line)[0] for line in engine.ask("GET", "/metrics")[1].decode().splitlines() if line[0] != "#"
    }
    # The real one has this name only after a weight update.
    assert metrics - {"sglang:weight_load_duration_seconds"} <= set(theirs["metrics"])

    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 0
    wanted_lines = shapes_of(real("dflash-tp2-sigterm.log"), ONLY_REAL)
    lines = shapes_of(engine.log, re.compile(ONLY_REHEARSAL.pattern + "|" + ONLY_REAL.pattern))
    assert sorted(set(lines) - set(wanted_lines)) == []
    assert sorted(set(wanted_lines) - set(lines)) == []

    # And one rank's lines come in the same order.
    def order(lines: list[str]) -> list[str]:
        end = next(i for i, line in enumerate(lines) if "Started server process" in line)
        return [line for line in lines[:end] if line.startswith("[time TP1]")]

    assert order(lines) == order(wanted_lines)


def keys(value: Any) -> set[tuple[str, ...]]:
    """The paths of all fields of a JSON value."""
    found: set[tuple[str, ...]] = set()
    if isinstance(value, dict):
        for name, inner in value.items():
            found.add((name,))
            found |= {(name, *path) for path in keys(inner)}
    elif isinstance(value, list):
        for inner in value:
            found |= keys(inner)
    return found


def test_a_killed_scheduler_ends_in_the_real_words(start: Any) -> None:
    engine = start("0.5.23", [*KIMI, *TINY], INSTANT).ready()
    os.kill(engine.children()["sglang::scheduler"], signal.SIGKILL)
    assert engine.end() == -9
    cut = "Subprocess scheduler_N"
    mine = shapes_of(engine.log, ONLY_REHEARSAL)
    theirs = shapes_of(real("plain-scheduler-killed.log"), ONLY_REAL)
    tails = [lines[next(i for i, line in enumerate(lines) if cut in line) :] for lines in (mine, theirs)]
    assert tails[0] == tails[1]


def test_a_traceback_has_the_real_frames(start: Any, tmp_path: Path) -> None:
    changed = {"hidden_size": 32, "dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 1, 2]}}
    engine = start("0.5.23", [*write_models(tmp_path, **changed), *TINY], INSTANT)
    assert engine.end() == -9

    def record(log: str) -> list[str]:
        text = log[log.index("Scheduler hit an exception") :]
        text = text[: text.index("SIGQUIT received")]
        text = re.sub(r'"[^"]*/site-packages/', '"', text)
        lines = text.splitlines()[:-1]  # the prefix of the next record
        return [re.sub(r"shape=\(\d+, \d+\)", "shape=(..)", line) for line in lines]

    mine, theirs = record(engine.log), record(real("drafter-hidden-size.log"))
    assert [line for line in mine if line.startswith("  File")] == [
        line for line in theirs if line.startswith("  File")
    ]
    assert mine == theirs


# Refused before any load ------------------------------------------------------------------------------------------
def refuse(python: Path, arguments: list[str], tmp_path: Path, module: bool = True) -> tuple[int, str]:
    # A file of its own for each call: several run at once, and one must not read what another is still writing.
    handle, config = tempfile.mkstemp(suffix=".json", dir=tmp_path)
    with os.fdopen(handle, "w") as out:
        json.dump(INSTANT, out)
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "REHEARSAL_RELEASE")}
    command = [str(python), "-m", "sglang.launch_server"] if module else [str(python.parent / "sglang"), "serve"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=20, check=False,
                          env={**environ, "DFLASH_REHEARSAL_CONFIG": config})  # fmt: skip
    return done.returncode, done.stderr


REFUSED = [
    ("0.5.20", [*KIMI, "--no-such-flag"], 2, "sglang serve: error: unrecognized arguments: --no-such-flag"),
    ("0.5.20", [*KIMI, "--cuda-graph-max-bs", "8"], 2, "ambiguous option: --cuda-graph-max-bs could match"),
    ("0.5.20", [*KIMI, "--pp", "8"], 2, "ambiguous option: --pp could match"),
    ("0.5.20", ["--tp-size", "8"], 2, "the following arguments are required: --model-path/--model"),
    ("0.5.20", [*KIMI, "--tp-size", "x"], 2, "invalid int value: 'x'"),
    ("0.5.20", [*KIMI, "--attention-backend", "bogus"], 2, "invalid choice: 'bogus'"),
    ("0.5.11", [*KIMI, "--cuda-graph-backend-decode", "disabled"], 2, "unrecognized arguments: --cuda-graph-backend"),
    ("0.5.20", [*KIMI, "--pp-size", "8", *DFLASH], 1, "DFLASH speculative decoding only supports pp_size == 1."),
    ("0.5.20", [*KIMI, "--speculative-algorithm", "DFLASH"], 1, "requires setting --speculative-draft-model-path."),
    ("0.5.20", [*EP8, "--speculative-dflash-block-size", "16"], 1, "but they differ. For DFLASH they must match."),
    ("0.5.20", [*KIMI, "--tp-size", "8", "--ep-size", "3"], 1, "ValueError: tp_size 8 must be divisible by ep_size 3"),
    ("0.5.20", [*KIMI, "--speculative-algorithm", "BOGUS"], 1, "ValueError: Unknown speculative algorithm name: BOGUS"),
    ("0.5.20", ["--model-path", "/no/such/model"], 1, "OSError: Repo id must be in the form 'repo_name' or"),
    ("0.5.20", [*KIMI, "--config", "/no/such.yaml"], 1, "ValueError: Config file not found: /no/such.yaml"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refused(pythons: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit status and error output of each case."""
    folder = tmp_path_factory.mktemp("refused")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda case: refuse(pythons[case[0]], case[1], folder), REFUSED))


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[case[3][:40] for case in REFUSED])
def test_refusals(refused: list[tuple[int, str]], index: int) -> None:
    _, _, expected, text = REFUSED[index]
    code, said = refused[index]
    assert code == expected
    assert text in said.splitlines()[-1]
    assert "REHEARSAL of SGLang" in said


def test_serve_needs_the_model_path_on_the_command_line(pythons: dict[str, Path], tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("model-path: moonshotai/Kimi-K2.6\n")
    code, said = refuse(pythons["0.5.20"], ["--config", str(config)], tmp_path, module=False)
    assert code == 1
    assert "Error: --model-path is required." in said


def test_settings_say_what_is_wrong_with_them(pythons: dict[str, Path], tmp_path: Path) -> None:
    for content, text in (
        ("{", "is not JSON"),
        ('{"speed": 1}', "unknown key 'speed'"),
        ('{"failures": [{"kind": "sneeze"}]}', "kind must be one of abort,"),
        ('{"failures": [{"kind": "hang", "at": "lunch"}]}', "at must be one of launch,"),
        ('{"pace": "fast"}', "pace must be a number"),
    ):
        file = tmp_path / "bad.json"
        file.write_text(content)
        with pytest.raises(settings.SettingsError, match=re.escape(text)):
            settings.load(str(file))


# Tables, in this process ------------------------------------------------------------------------------------------
@pytest.fixture
def imitate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the imported modules imitate a release."""

    def choose(release: str) -> None:
        monkeypatch.setattr(releases, "RELEASE", release)
        frames._cache.clear()

    yield choose
    frames._cache.clear()


def parse(arguments: list[str]) -> server_args.Plan:
    args, merged = server_args.parse(arguments)
    return server_args.resolve(args, merged)


# (key and value in the file) -> release -> ok, ValueError or exit status 2
FROM_FILE = {
    "tp-size: 8": {"0.5.11": "ok", "0.5.14": "ok", "0.5.23": "ok"},
    "tp: 8": {"0.5.11": "ok", "0.5.23": "ok"},
    "tp_size: 8": {"0.5.11": 2, "0.5.23": 2},
    "api-key: 'k'": dict.fromkeys(releases.ORDER, "ok"),
    "disable-cuda-graph: true": {"0.5.11": "ok", "0.5.13": "ok", "0.5.14": ValueError, "0.5.23": ValueError},
    "disable-cuda-graph: false": {"0.5.13": "ok", "0.5.20": ValueError},
    "cuda-graph-max-bs: 8": {"0.5.11": "ok", "0.5.14": "ok", "0.5.19": "ok", "0.5.20": 2, "0.5.23": 2},
    "cuda-graph-max-bs-decode: 8": {"0.5.11": 2, "0.5.14": ValueError, "0.5.19": ValueError, "0.5.20": "ok"},
    "cuda-graph-backend-prefill: disabled": {"0.5.13": 2, "0.5.14": ValueError, "0.5.20": "ok"},
    "cuda-graph-backend-decode: disabled": {"0.5.13": 2, "0.5.14": "ok", "0.5.23": "ok"},
    "disable-decode-cuda-graph: true": {"0.5.13": 2, "0.5.14": "ok", "0.5.23": "ok"},
    "disable-piecewise-cuda-graph: true": {"0.5.13": "ok", "0.5.14": 2, "0.5.20": 2},
    "speculative-draft-window-size: 32": {"0.5.11": 2, "0.5.12.post1": "ok", "0.5.13": ValueError, "0.5.20": "ok"},
    "speculative-dflash-draft-window-size: 32": {"0.5.11": "ok", "0.5.19": "ok", "0.5.20": 2},
    "enable-dp-attention: true": {"0.5.14": "ok", "0.5.21": "ok", "0.5.22": ValueError, "0.5.23": ValueError},
    "trust-remote-code: 'true'": {"0.5.20": 2},
    "trust-remote-code: yes": {"0.5.20": "ok"},
    "chunked-prefill-size:": {"0.5.20": 2},
    "no-such-key: 1": {"0.5.20": 2},
    "pp: 8": {"0.5.20": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "release", "outcome"),
    [(line, release, outcome) for line, table in FROM_FILE.items() for release, outcome in table.items()],
)
def test_config_file_by_release(imitate: Any, tmp_path: Path, line: str, release: str, outcome: Any) -> None:
    imitate(release)
    file = tmp_path / "engine.yaml"
    file.write_text(f"# comment\n{line}\n")
    arguments = [*KIMI, "--config", str(file)]
    if outcome == "ok":
        server_args.parse(arguments)
    elif outcome == 2:
        with pytest.raises(SystemExit) as stopped:
            server_args.parse(arguments)
        assert stopped.value.code == 2
    else:
        with pytest.raises(outcome, match="Unsupported config option"):
            server_args.parse(arguments)


def test_config_file_goes_first_and_its_spelling_matters(imitate: Any, tmp_path: Path) -> None:
    imitate("0.5.20")
    file = tmp_path / "engine.yaml"
    file.write_text(
        "tp-size: 4\nserved-model-name: 'a # b'  # why\ncuda-graph-bs-decode: [1, 2]\nextra-metric-labels:\n  zone: a\n"
        "revision:\nrandom-seed: 0123\nstop: x\n".replace("stop: x\n", "")
    )
    args, merged = server_args.parse([*KIMI, "--tensor-parallel-size", "8", "--config", str(file)])
    assert merged[:2] == ["--tp-size", "4"]
    assert args.tp_size == 8  # the command line comes later and wins
    assert args.served_model_name == "a # b"
    assert args.cuda_graph_bs_decode == [1, 2]
    assert args.extra_metric_labels == {"zone": "a"}
    assert args.revision == "None"  # an empty value is the word
    assert args.random_seed == 83
    # With "=" the file is silently ignored.
    args, _ = server_args.parse([*KIMI, f"--config={file}"])
    assert args.tp_size == 1
    with pytest.raises(ValueError, match="Multiple config files"):
        config_file.merge(["--config", str(file), "--config", str(file)], options.rows())


@pytest.mark.parametrize("release", releases.ORDER)
def test_every_release_takes_the_incidents_options(imitate: Any, release: str) -> None:
    imitate(release)
    more = ["--trust-remote-code", "--reasoning-parser", "kimi_k2", "--tool-call-parser", "kimi_k2"]
    plan = parse([*EP8, *more, "--mem-fraction-static", "0.9", "--host", "127.0.0.1", "--disable-cuda-graph"])
    assert [plan.prefix(i) for i in (0, 3)] == [" TP0 EP0", " TP3 EP3"]
    assert plan.args.max_running_requests == 48
    assert not plan.decode_graphs
    crashes = releases.key(release) < releases.key("0.5.13")
    plan = parse(EP8)
    assert any(f.kind == "cuda_graph_replay" for f in failures.by_rule(plan, [])) is crashes


# Actions of each release's own parser, --help left out; read off by running it.
COUNTS = {"0.5.11": 374, "0.5.13": 406, "0.5.14": 420, "0.5.15": 437, "0.5.16": 460, "0.5.17": 474, "0.5.18": 488,
          "0.5.19": 503, "0.5.23": 531}  # fmt: skip


@pytest.mark.parametrize(("release", "count"), COUNTS.items())
def test_number_of_options(release: str, count: int) -> None:
    assert len(options.rows(release)) == count


PREFIXES = [
    (["--tp-size", "8", "--ep-size", "4"], 5, " TP5 EP2"),
    (["--tp-size", "8"], 3, " TP3"),
    (["--pp-size", "8"], 3, " PP3"),
    ([], 0, ""),
    (["--tp-size", "2", "--dp-size", "2"], 3, " DP1 TP1"),
    (["--tp-size", "8", "--ep-size", "2", "--moe-a2a-backend", "deepep"], 7, " TP7 EP7"),
]


@pytest.mark.parametrize(("arguments", "rank", "prefix"), PREFIXES)
def test_prefixes(imitate: Any, arguments: list[str], rank: int, prefix: str) -> None:
    imitate("0.5.20")
    assert parse([*KIMI, *arguments]).prefix(rank) == prefix


GRAPHS = [
    ("0.5.11", ["--disable-cuda-graph"], False),
    ("0.5.20", ["--disable-cuda-graph"], False),
    ("0.5.20", ["--cuda-graph-backend-decode", "disabled"], False),
    ("0.5.20", ["--disable-decode-cuda-graph"], False),
    ("0.5.20", ["--cuda-graph-config", '{"decode": {"backend": "disabled"}}'], False),
    ("0.5.20", ["--disable-cuda-graph", "--cuda-graph-config", '{"decode": {"backend": "full"}}'], True),
    ("0.5.20", ["--disable-prefill-cuda-graph"], True),
    ("0.5.20", [], True),
]


@pytest.mark.parametrize(("release", "arguments", "graphs"), GRAPHS)
def test_graphs_by_options(imitate: Any, release: str, arguments: list[str], graphs: bool) -> None:
    imitate(release)
    assert parse([*KIMI, *arguments]).decode_graphs is graphs


@pytest.mark.parametrize("release", releases.ORDER)
@pytest.mark.parametrize("kind", sorted(name for name, kind in failures.KINDS.items() if kind.text))
def test_every_traceback_of_every_release(imitate: Any, release: str, kind: str) -> None:
    imitate(release)
    plan = parse(EP8)
    plan.drafter = model.Drafter(layer_ids=[1, 99], mask_token_id=200000, architecture="Odd", hidden=96)
    text = failures.KINDS[kind].text
    assert text is not None
    for at in (failures.KINDS[kind].at, "weights", "graph_capture", "kv_cache", "serving"):
        shown = text(plan, 3, settings.Failure(kind=kind, at=at))
        assert shown.startswith("Traceback (most recent call last):\n  File ")
        assert shown.endswith("\n")
        assert "[rehearsal]" not in shown
        assert "<<" not in shown
        for line in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', shown):
            assert line[0].startswith(frames.site_packages())
            assert int(line[1]) > 0
        # A caret row never stands without a line above it, and never reaches beyond it.
        rows = shown.splitlines()
        for above, row in zip(rows, rows[1:]):
            if row.strip() and not row.strip("^ "):
                assert len(row) <= len(above)


def test_acceptance_has_the_mean_asked_for() -> None:
    import random

    dice = random.Random(7)
    for mean, block in ((3.4, 8), (1.02, 8), (1.0, 8), (8.0, 8), (2.0, 4)):
        acceptance = speculation.Acceptance(mean, block)
        drawn = [acceptance.draw(dice) for _ in range(4000)]
        assert abs(sum(drawn) / len(drawn) - mean) < 0.12
        assert set(drawn) <= set(range(1, block + 1))


def test_speed_grows_from_one_stream_to_the_peak(imitate: Any) -> None:
    imitate("0.5.20")
    chosen = settings.Settings()

    def played(plan: Any, streams: int, graphs: bool = True) -> float:
        plan.decode_graphs = graphs
        return float(speculation.speed(plan, chosen, streams))

    # What the incident has measured: without a drafter TP8 at one stream, EP8 and EP4 at very many; EP8 with its
    # drafter and without graphs at both.
    tp8, ep8, ep4 = (parse([*KIMI, "--tp-size", "8", *more]) for more in ([], ["--ep-size", "8"], ["--ep-size", "4"]))
    assert played(tp8, 1) == pytest.approx(97.9)
    assert played(tp8, 1, graphs=False) == pytest.approx(26.0)
    assert played(ep8, 10**6) == pytest.approx(1493, rel=1e-3)
    assert played(ep4, 10**6) == pytest.approx(1531, rel=1e-3)
    assert played(parse(EP8), 1, graphs=False) == pytest.approx(86.0)
    assert played(parse(EP8), 10**6, graphs=False) == pytest.approx(1146, rel=1e-3)
    for plan in (tp8, ep8, ep4, parse(EP8)):
        figures = [played(plan, streams) for streams in (1, 8, 64, 512)]
        assert figures == sorted(figures)


def test_speed_may_depend_on_the_arguments() -> None:
    raw = {"throughput": [{"when": {"ep_size": 4}, "single": 180, "peak": 700}, {"single": 60, "ttft": 0.02}]}
    chosen = settings.parse(raw, "x")
    assert settings.throughput(chosen, {"ep_size": 4}) == {"single": 180.0, "peak": 700.0}
    assert settings.throughput(chosen, {"ep_size": 8}) == {"single": 60.0, "ttft": 0.02}
    one = settings.parse({"throughput": {"peak": 1000}}, "x")
    assert settings.throughput(one, {"ep_size": 8}) == {"peak": 1000.0}
    assert settings.throughput(settings.parse({}, "x"), {}) == {}
    for wrong in ([{"speed": 1}], [7], {"peak": "fast"}, {"peak": True}):
        with pytest.raises(settings.SettingsError, match=r"throughput|peak must be a number"):
            settings.parse({"throughput": wrong}, "x")


def test_logging_configuration_replaces_the_format(start: Any, tmp_path: Path) -> None:
    """A formatter of ours finds the rank in the caller's `prefix`, as it must with the real engine."""
    module = tmp_path / "shape.py"
    module.write_text(
        "import logging, sys\n"
        "class Formatter(logging.Formatter):\n"
        "    def __init__(self, *a, **k):\n"
        "        super().__init__()\n"
        "        frame = sys._getframe()\n"
        "        while frame and frame.f_code.co_name != 'configure_logger':\n"
        "            frame = frame.f_back\n"
        "        self.prefix = frame.f_locals['prefix']\n"
        "    def format(self, record):\n"
        "        return f'<{self.prefix}> ' + record.getMessage().replace('c4n4ry', '***')\n"
    )
    config = tmp_path / "logging.json"
    handler = {"class": "logging.StreamHandler", "formatter": "ours"}
    config.write_text(json.dumps({
        "version": 1, "disable_existing_loggers": False, "formatters": {"ours": {"()": "shape.Formatter"}},
        "handlers": {"ours": handler}, "root": {"level": "INFO", "handlers": ["ours"]},
    }))  # fmt: skip
    arguments = [*KIMI, "--tp-size", "2", "--api-key", "c4n4ry"]
    engine = start(
        "0.5.20", arguments, INSTANT, SGLANG_LOGGING_CONFIG_PATH=str(config), PYTHONPATH=str(tmp_path)
    ).ready()
    assert "< TP1> Load weight end." in engine.log
    assert "'api_key': '***'" in engine.log
    assert "c4n4ry" not in engine.log


def test_milliseconds(start: Any) -> None:
    engine = start("0.5.20", KIMI, INSTANT, SGLANG_LOG_MS="1").ready()
    assert re.search(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] Load weight begin", engine.log, re.M)


def test_modules_import_alone() -> None:
    """No module leans on another's import order."""
    for file in sorted((ENGINE / "src" / "sglang" / "_rehearsal").glob("*.py")):
        importlib.import_module(f"rehearsal_sglang._rehearsal.{file.stem}")
