"""The main process: arguments, children, HTTP server, warm-up, and the ways it ends."""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any

from . import config_file, failures, frames, logs, options, process, rank, releases, server_args, shapes
from .channel import Channel, Closed
from .http_api import Piece, Server
from .metrics import Metrics
from .settings import Failure, Settings, SettingsError, due, load, throughput

BANNER = (
    "This is a REHEARSAL of SGLang {release} (pace {pace:g}): no GPU, no model, nothing is computed. "
    "Every line ends with the mark of a rehearsal; exceptions are left exact."
)


def run(argv: list[str]) -> int:
    """The whole life of a server; returns the exit status unless the process kills itself."""
    logs.basic("info")
    try:
        settings = load()
    except SettingsError as error:
        sys.stderr.write(f"{error} [rehearsal]\n")
        return 1
    logs.info(BANNER.format(release=releases.RELEASE, pace=settings.pace))
    try:
        merged = config_file.merge(list(argv), options.rows())
    except (ValueError, OSError) as error:
        where = "merge_config_with_args" if isinstance(error, ValueError) else "_parse_yaml_config"
        folder = "utils/" if releases.has("args_as_dict") else ""
        frame = frames.other(f"sglang/srt/{folder}server_args_config_parser.py", 82, where, "raise ValueError(msg)")
        return _refuse(error, [frame])
    args, merged = server_args.parse(merged)
    logs.basic(args.log_level)
    time.sleep(settings.seconds("launch") * 0.3)  # imports
    try:
        plan = server_args.resolve(args, merged)
    except server_args.Refused as refused:
        return _refuse(refused.error, failures.named(list(refused.frames)))
    return Engine(plan, settings).run()


def _refuse(error: BaseException, where: list[frames.Frame]) -> int:
    """An exception that reaches the top of the main process: printed by Python, status 1."""
    top = frames.frame("launch.run_server")
    name = type(error).__name__
    sys.stderr.write(frames.traceback([*top, *where], f"{name}: {error}"))
    return 1


class Engine:
    """A server from its first log line to its end."""

    def __init__(self, plan: server_args.Plan, settings: Settings) -> None:
        self.plan, self.settings = plan, settings
        self.version = f"{releases.RELEASE}+rehearsal"
        self.began = time.time()
        self.status = "Starting"  # Starting, Up, UnHealthy
        self.draining = self.paused = self.zombie = False
        self.first_request = False
        self.last_receive = 0.0
        self.stats: dict[str, Any] = {}
        self.metrics = Metrics(plan)
        self.children: list[process.Child] = []
        self.control: list[Channel] = []
        self.timings: list[dict[str, float]] = []
        self.answers: dict[str, queue.Queue[Piece]] = {}
        self.states: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.lock = threading.Lock()
        self.stop_watching = threading.Event()
        self.ending = threading.Event()
        self.exit_status = 0
        self.server: Server | None = None
        self.failures: list[Failure] = []
        self.terminated = False

    # Life ---------------------------------------------------------------------------------------------------------
    def run(self) -> int:
        plan = self.plan
        try:
            logs.configure_logger(plan.args)
        except Exception:
            traceback.print_exc()
            return 1
        for level, text in plan.messages:
            (logs.warning if level == "warning" else logs.info)(text)
        logs.info(f"server_args={plan.args!r}")
        signal.signal(signal.SIGQUIT, self._on_sigquit)
        self._launch()
        if not plan.args.chat_template:
            logs.info("Using default HuggingFace chat template with detected content format: string")
        try:
            self._wait_for_ranks()
        except RuntimeError as error:
            return self._died_loading(error)
        for line in shapes.startup_timings(self.startup(), plan):
            logs.info(line)
        threading.Thread(target=self._read_tokens, daemon=True, name="tokens").start()
        threading.Thread(target=self._read_control, daemon=True, name="control").start()
        if not self.zombie:
            threading.Thread(target=self._watch, daemon=True, name="subprocess-watchdog").start()
        return self._serve()

    def _launch(self) -> None:
        plan = self.plan
        arguments = plan.args.as_dict()
        asked = [failure for failure in self.settings.failures if due(failure, arguments)]
        self.settings.throughput = throughput(self.settings, arguments)
        self.failures = [*asked, *failures.by_rule(plan, asked)]
        self.zombie = any(failure.kind == "zombie" for failure in self.failures)
        count = len(plan.ranks)
        wires = rank.Wires(count)
        sys.stdout.flush()
        sys.stderr.flush()
        for index in range(count):

            def body(index: int = index) -> None:
                rank.Rank(plan, self.settings, index, wires, self.failures).run()

            self.children.append(process.fork(f"scheduler_{index}", body))
        self.children.append(process.fork("detokenizer", lambda: rank.detokenize(plan, wires)))
        self.control = [two[0] for two in wires.control]
        self.text = wires.text[1]
        wires.keep(self.text, *self.control)
        self._pipes = (*wires.fuse, *wires.logged, *wires.noise)  # kept open: a rank may write when the others are gone

    @property
    def schedulers(self) -> list[process.Child]:
        return self.children[:-1]

    def _wait_for_ranks(self) -> None:
        """In order of ranks; every few seconds all are looked at, so a death is found late but surely."""
        for index, channel in enumerate(self.control):
            while True:
                if channel.ready(self.settings.seconds("ready_poll")):
                    try:
                        (message, *_) = channel.receive()
                    except Closed:
                        raise self._death(index)
                    self.timings.append(message["timings"])
                    break
                for other, child in enumerate(self.schedulers):
                    if not child.alive():
                        raise self._death(other)

    def _death(self, index: int) -> RuntimeError:
        child = self.schedulers[index]
        process.wait_all([child], 10)
        return RuntimeError(
            f"Rank {index} scheduler died during initialization (exit code: {child.exitcode}). "
            "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. "
            "Run `dmesg -T | grep -i oom` to check."
        )

    def _died_loading(self, error: RuntimeError) -> int:
        # A rank that raised has sent SIGQUIT just before it ended: let that arrive, as it does in reality.
        time.sleep(0.1)
        self.kill_tree(include_parent=False)
        keys = ["launch.run_server", "launch.launch_server", "http.launch_server", "engine.wait_ready", "engine.wait"]
        text = frames.traceback(failures.named(keys), f"RuntimeError: {error}")
        sys.stderr.write(text)
        sys.stderr.flush()
        return 1

    def startup(self) -> dict[str, float]:
        """The slowest rank's seconds of each part, and the whole."""
        merged: dict[str, float] = {}
        for timings in self.timings:
            for name, value in timings.items():
                merged[name] = max(merged.get(name, 0.0), value)
        merged["total"] = time.time() - self.began
        for name in ("weights", "kv", "graph", "scheduler"):
            merged.setdefault(name, 0.0)
        if not self.metrics.startup:
            self.metrics.startup = merged
        return merged

    def startup_time(self) -> dict[str, Any]:
        """The field of that name in /server_info."""
        seconds = self.metrics.startup
        return {
            "load_weight": seconds["weights"],
            "kv_cache_allocation": seconds["kv"],
            "scheduler_e2e": seconds["scheduler"],
            "cuda_graph": shapes.graph_times(seconds["graph"], self.plan),
            "tokenizer_e2e": seconds["total"],
        }

    # Serving ------------------------------------------------------------------------------------------------------
    def _serve(self) -> int:
        args = self.plan.args
        logs.configure_uvicorn(args.log_level_http or args.log_level)
        logs.uvicorn(f"Started server process [{os.getpid()}]")
        logs.uvicorn("Waiting for application startup.")
        warmup = threading.Thread(target=self._warm_up, daemon=True, name="warmup")
        warmup.start()
        logs.uvicorn("Application startup complete.")
        host, port = str(args.host or "127.0.0.1"), int(args.port)
        try:
            self.server = Server(host, port, self)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            text = f"[Errno {error.errno}] error while attempting to bind on address ('{host}', {port}): {reason}"
            logs.uvicorn(text, logging.ERROR)
            logs.uvicorn("Waiting for application shutdown.")
            # The warm-up is asking whoever holds the port. If that is another SGLang, "ready" is printed all the same.
            warmup.join()
            logs.uvicorn("Application shutdown complete.")
            self.kill_tree(include_parent=False)
            return 3
        signal.signal(signal.SIGTERM, self._on_early_sigterm)
        threading.Thread(target=self.server.serve_forever, daemon=True, name="http").start()
        shown = f"[{host}]" if ":" in host else host
        logs.uvicorn(f"Uvicorn running on http://{shown}:{port} (Press CTRL+C to quit)")
        try:
            while not self.ending.wait(3600):
                pass
        except KeyboardInterrupt:
            self.exit_status = 0
            self.stop_watching.set()
            self._shutdown_ranks()
        self._uvicorn_ends()
        self.kill_tree(include_parent=False)
        logs.info("The rehearsal ends here.")
        sys.stderr.flush()
        if self.terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        return self.exit_status

    def _uvicorn_ends(self) -> None:
        logs.uvicorn("Shutting down")
        if self.answers:
            logs.uvicorn("Waiting for connections to close. (CTRL+C to force quit)")
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
        logs.uvicorn("Waiting for application shutdown.")
        logs.uvicorn("Application shutdown complete.")
        logs.uvicorn(f"Finished server process [{os.getpid()}]")

    def _warm_up(self) -> None:
        """Asks the address, not the process: what answers there is taken for this server."""
        if self.plan.args.skip_server_warmup:
            self.status = "Up"
        else:
            try:
                self._ask_warm_up()
            except Exception:
                logs.exact(f"Initialization failed. warmup error: {traceback.format_exc()}")
                self.kill_tree()
                return
        if releases.has("freeze_gc"):
            try:
                self._ask("POST", "/freeze_gc", None, 10)
            except OSError:
                logs.warning("post-warmup freeze_gc failed")
        self.control[0].send({"op": "serving"})
        logs.info(shapes.READY)

    def _ask_warm_up(self) -> None:
        pause = max(0.05, min(1.0, self.settings.pace))
        last: BaseException | None = None
        info: dict[str, Any] = {}
        for _ in range(120):
            time.sleep(pause)
            try:
                status, data = self._ask("GET", "/model_info", None, 5)
                assert status == 200, f"res=<Response [{status}]>, res.text={data.decode(errors='replace')!r}"
                info = json.loads(data)
                break
            except (OSError, AssertionError, ValueError, http.client.HTTPException) as error:
                last = error
        else:
            raise last or RuntimeError("no answer")
        if self.plan.target.architecture == "KimiK25ForConditionalGeneration" and releases.has("kimi_warmup_image"):
            logs.info("Using a 512x512 image for Kimi VLM startup warmup to compile MoonViT position interpolation.")
        if info.get("has_image_understanding"):
            content = [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
                {"type": "text", "text": "Describe the image."},
            ]
            body: dict[str, Any] = {
                "model": self.plan.args.served_model_name,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 8,
                "stream": False,
                "temperature": 0.0,
            }
            path = "/v1/chat/completions"
        else:
            params = {"temperature": 0, "max_new_tokens": 8}
            body = {"text": "The capital city of France is", "sampling_params": params}
            path = "/generate"
        status, data = self._ask("POST", path, body, float(os.environ.get("SGLANG_WARMUP_TIMEOUT", "600")))
        assert status == 200, data.decode(errors="replace")
        self.status = "Up"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        args = self.plan.args
        host = str(args.host or "127.0.0.1")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        headers = {"content-type": "application/json"}
        key = (args.admin_api_key if path == "/freeze_gc" else None) or args.api_key
        if key:
            headers["authorization"] = f"Bearer {key}"
        connection = http.client.HTTPConnection(host, int(args.port), timeout=timeout if timeout > 0 else 600)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    # Requests -----------------------------------------------------------------------------------------------------
    def submit(self, rid: str, prompt: int, limit: int, ignore_eos: bool) -> queue.Queue[Piece]:
        """Hands a request to rank 0; the queue fills as the detokenizer reports."""
        pieces: queue.Queue[Piece] = queue.Queue()
        with self.lock:
            if not self.first_request:
                # Real SGLang installs these two handlers with the first request.
                self.first_request = True
                threading.Thread(target=self._drain, daemon=True, name="sigterm-watchdog").start()
            self.answers[rid] = pieces
        try:
            self.control[0].send({"op": "gen", "rid": rid, "prompt": prompt, "max": limit, "ignore_eos": ignore_eos})
        except Closed:
            pass  # rank 0 is dead: the request waits until the watchdog ends the server
        return pieces

    def forget(self, rid: str) -> None:
        with self.lock:
            self.answers.pop(rid, None)

    def abort(self, rid: str | None) -> None:
        """Ends one request, or all."""
        with self.lock:
            rids = [rid] if rid is not None else list(self.answers)
        for one in rids:
            with self.lock:
                pieces = self.answers.pop(one, None)
            if pieces is None:
                continue
            self.metrics.aborted += 1
            pieces.put(Piece(0, "abort", None))
            try:
                self.control[0].send({"op": "abort", "rid": one})
            except Closed:
                pass

    def _read_tokens(self) -> None:
        while True:
            try:
                messages = self.text.receive()
            except (Closed, ValueError):
                return  # the watchdog says what happened
            self.last_receive = time.time()
            for message in messages:
                for rid, tokens, reason, spec in message["r"]:
                    with self.lock:
                        pieces = self.answers.pop(rid, None) if reason else self.answers.get(rid)
                    if pieces is not None:
                        pieces.put(Piece(tokens, reason, spec))

    def _read_control(self) -> None:
        while True:
            try:
                messages = self.control[0].receive()
            except (Closed, ValueError):
                return
            for message in messages:
                if "stats" in message:
                    self.stats = message["stats"]
                elif "state" in message:
                    waiting = self.states.get(message["id"])
                    if waiting is not None:
                        waiting.put(message["state"])

    def ask_state(self) -> dict[str, Any]:
        """Rank 0's counters; without an answer from it there is none, as with the real engine."""
        number = threading.get_ident()
        answer: queue.Queue[dict[str, Any]] = queue.Queue()
        self.states[number] = answer
        try:
            self.control[0].send({"op": "state", "id": number})
        except Closed:
            pass
        try:
            return answer.get()
        finally:
            self.states.pop(number, None)

    def gauges(self) -> dict[str, Any]:
        """What /metrics shows besides its own counters."""
        pool = shapes.pool_tokens(self.plan)
        with self.lock:
            running = len(self.answers)
        return {
            **self.stats,
            "running": max(0, running - int(self.stats.get("queued", 0))),
            "pool": pool,
            "kv_gb": round(pool * 70272 / 2**30, 2),
            "weight_gb": round(self.settings.gpu_gb * 0.7793, 2),
        }

    # Ends ---------------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """Notices a child that died without saying so."""
        while not self.stop_watching.wait(self.settings.seconds("watchdog_poll")):
            for child in self.children:
                if child.alive() or child.exitcode == 0:
                    continue
                logs.error(
                    f"Subprocess {child.name} (pid={child.pid}) crashed with exit code {child.exitcode}. "
                    "Triggering SIGQUIT for cleanup..."
                )
                os.kill(os.getpid(), signal.SIGQUIT)
                return

    def _on_sigquit(self, signum: int, _: Any) -> None:
        # The other ranks' signals arrive while this one is handled; the real event loop is busy with the first, too.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        if not self.first_request:
            logs.error("Received sigquit from a child process. It usually means the child failed.")
        else:
            # An event loop's handler gets neither of the two.
            logs.error("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
            self.stop_watching.set()
            self._diagnose()
        if any(failure.kind == "exit_zero" for failure in self.failures):
            # Where the SIGKILL on oneself does not take (a container's PID 1), the status says that all is well.
            self.kill_tree(include_parent=False)
            logs.info("The rehearsal ends here.")
            os._exit(0)
        self.kill_tree()

    def _diagnose(self) -> None:
        """Since 0.5.13 a crash is followed by dumps, which take their time."""
        if not releases.has("crash_diagnostics"):
            return

        def on(name: str) -> bool:
            return os.environ.get(name, "true").lower() in ("1", "true", "yes", "y")

        pyspy, core = on("SGLANG_PYSPY_DUMP_BEFORE_CRASH"), on("SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
        if not pyspy and not core:
            return
        logs.info("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
        time.sleep(self.settings.seconds("crash_diagnostics"))
        living = [child for child in self.schedulers if child.alive()]
        if not living:
            logs.error("No live scheduler processes found; skipping py-spy and CUDA coredump.")
            return
        if pyspy:
            for child in living:
                for native in (" --native", ""):
                    command = f"py-spy dump{native} --pid {child.pid}"
                    logs.exact(f"Pyspy failed ({command}). Error: /bin/sh: 1: py-spy: not found\n")
                logs.error(f"All pyspy dump attempts failed for PID {child.pid}.")
        if core:
            seconds = float(os.environ.get("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "60"))
            logs.info(f"Waiting {seconds:.1f} seconds for CUDA coredumps before exiting.")
            time.sleep(seconds * self.settings.pace)

    def kill_tree(self, include_parent: bool = True) -> None:
        """SIGKILL to all children, and to oneself: how every crash ends."""
        me = os.getpid()
        if releases.has("kill_line"):
            logs.info(f"kill_process_tree called: parent_pid={me}, include_parent={include_parent}, pid={me}")
        if include_parent:
            # The real one first walks /proc for its children; the last ranks' words get out meanwhile.
            time.sleep(0.15)
            logs.info("The rehearsal ends here.")
        sys.stdout.flush()
        sys.stderr.flush()
        for child in self.children:
            child.kill()
        if include_parent:
            os.kill(me, signal.SIGKILL)
        process.wait_all(self.children, 10)

    def _on_early_sigterm(self, signum: int, _: Any) -> None:
        """The web server's own handler while no request has come, the drain after that."""
        if self.first_request:
            logs.warning("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
            self.draining = True
            return
        self.terminated = True
        self.stop_watching.set()
        self.ending.set()

    def _drain(self) -> None:
        """Waits for SIGTERM, then for the requests in flight, then ends as the release does."""
        poll = self.settings.seconds("drain_poll")
        while not self.draining:
            time.sleep(poll)
        while True:
            with self.lock:
                rids = list(self.answers)
            if self.status == "UnHealthy":
                logs.error("Signal SIGTERM received while health check failed. Force exiting.")
                break
            if os.environ.get("SGL_FORCE_SHUTDOWN", "").lower() in ("1", "true", "yes"):
                logs.error("Signal SIGTERM received while force shutdown flag set. Force exiting.")
                break
            logs.info(
                f"Gracefully exiting... Remaining number of requests {len(rids)}. Remaining requests "
                f"remaining_rids={rids}."
            )
            if not rids:
                break
            time.sleep(poll)
        self.stop_watching.set()
        if releases.key(releases.RELEASE) >= releases.key("0.5.14"):
            self._shutdown_ranks()
        if not releases.has("clean_exit"):
            self.kill_tree()
        self.ending.set()

    def _shutdown_ranks(self) -> None:
        """Asks the schedulers to end by themselves."""
        try:
            self.control[0].send({"op": "shutdown"})
        except Closed:
            pass
        left = process.wait_all(self.schedulers, 15 * max(self.settings.pace, 0.2))
        if left:
            pids = [child.pid for child in left]
            logs.warning(f"Schedulers still alive 15s after ShutdownReq, killing them before they released: {pids}")
        self.kill_tree(include_parent=False)
