"""One scheduler process: loads on paper at the chosen pace, then, as rank 0, steps through requests.

Ranks depend on each other as tensor-parallel ranks do: a step needs an answer from every rank, so a rank that is dead
or stopped stops the whole engine.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import select
import signal
import socket
import threading
import time
from typing import Any, Callable

from . import failures as bad
from . import frames, logs, releases, shapes, speculation
from .channel import Channel, Closed
from .process import set_title
from .server_args import Plan
from .settings import Failure, Settings, spend

REDRAW = 0.1  # seconds between two redraws of a bar, as tqdm's


class Wires:
    """The sockets and pipes of one engine, made before the fork; each process keeps its own ends."""

    def __init__(self, ranks: int) -> None:
        from .channel import pair

        self.control = [pair() for _ in range(ranks)]  # main <-> rank
        self.peers = [socket.socketpair() for _ in range(ranks)]  # rank 0 <-> rank; the first pair is unused
        self.tokens = pair()  # rank 0 -> detokenizer
        self.text = pair()  # detokenizer -> main
        self.fuse = os.pipe()  # who fails first lets the others go on
        self.logged = os.pipe()  # they tell the first that they have
        self.noise = os.pipe()  # a death that the others talk about

    def keep(self, *wanted: Any) -> None:
        """Closes every end that this process does not use, so that a death shows as end of file."""
        ends: list[Any] = [end for two in [*self.control, *self.peers, self.tokens, self.text] for end in two]
        for end in ends:
            if not any(end is keeper for keeper in wanted):
                end.close()


class Rank:
    """A scheduler process from fork to death."""

    def __init__(self, plan: Plan, settings: Settings, index: int, wires: Wires, failures: list[Failure]) -> None:
        self.plan, self.settings, self.index = plan, settings, index
        self.failures = failures
        self.prefix = plan.prefix(index)
        self.leader = index == 0
        self.parent = os.getppid()
        self.control: Channel = wires.control[index][1]
        self.fuse, self.logged, self.noise = wires.fuse, wires.logged, wires.noise
        self.memory = shapes.Memory(settings.gpu_gb, index)
        self.timings: dict[str, float] = {}
        if self.leader:
            self.followers = [two[0] for two in wires.peers[1:]]
            self.tokens: Channel = wires.tokens[0]
            wires.keep(self.control, self.tokens, *self.followers)
        else:
            self.lead = wires.peers[index][1]
            wires.keep(self.control, self.lead)

    # Life ---------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """The process's body."""
        set_title("sglang::scheduler" + self.prefix.replace(" ", "_"))
        if not any(f.options.get("core") for f in self.failures):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable()
        logs.configure_logger(self.plan.args, prefix=self.prefix)
        if any(f.collateral for f in self.failures):
            threading.Thread(target=self._echo, daemon=True).start()
        began = time.monotonic()
        self._load()
        self.timings["scheduler"] = time.monotonic() - began
        self.control.send({"status": "ready", "timings": self.timings})
        if self.leader:
            Loop(self).run()
        else:
            self._follow()

    def _pass(self, phase: str, seconds: float, tick: Callable[[float], None] | None = None) -> None:
        """Spends the seconds of a phase; a failure of this phase and rank happens inside it."""
        seconds *= self._slowness(phase)
        begin = time.monotonic()
        failure = self._mine(phase)
        fuse = begin + min(failure.after * self.settings.pace, seconds * 0.98) if failure else None
        end = begin + seconds
        while True:
            now = time.monotonic()
            if failure is not None and fuse is not None and now >= fuse:
                self.fail(failure)
                failure = None
            if tick:
                tick(min(now, end) - begin)
            if now >= end:
                return
            nap = end - now
            if tick:
                nap = min(nap, max(REDRAW, seconds / 100))
            if fuse is not None and failure is not None:
                nap = min(nap, max(0.0, fuse - now))
            time.sleep(max(nap, 0.0005))

    def _slowness(self, at: str) -> float:
        for failure in self.failures:
            if failure.kind == "slow" and failure.at == at:
                return float(failure.options.get("factor", 5.0))
        return 1.0

    def _mine(self, at: str) -> Failure | None:
        """The failure that this rank meets in this phase of the load."""
        for failure in self.failures:
            kind = bad.KINDS[failure.kind]
            if failure.at != at or kind.how == "quiet":
                continue
            if kind.every_rank or failure.rank % len(self.plan.ranks) == self.index:
                return failure
        return None

    def _load(self) -> None:
        plan, settings = self.plan, self.settings
        spread = 1.0
        if len(plan.ranks) > 1:
            # The fastest rank takes 73 s where the slowest takes 115; the order of ranks is mixed but fixed.
            place = (self.index * 5 + 2) % len(plan.ranks)
            spread = 0.635 + 0.365 * place / (len(plan.ranks) - 1)
        self._pass("launch", settings.seconds("launch") * 0.6)
        if plan.speculative:
            self._drafter_warnings()
        logs.info(shapes.dist_begin())
        begin = time.monotonic()
        self._pass("dist_init", settings.seconds("dist_init"))
        self.barrier()
        for line in shapes.dist_end(time.monotonic() - begin, self.memory.context):
            logs.info(line)
        self._weights(spread, draft=False)
        if releases.has("overlap_drafter"):
            # All weights, then all pools, then all graphs.
            if plan.speculative:
                self._weights(spread, draft=True)
                self._drafter_ready()
            self.barrier()
            self._pool(draft=False)
            if plan.speculative:
                self._pool(draft=True)
            for line in shapes.after_pools(plan):
                logs.info(line)
            self._graphs(draft=False)
            if plan.speculative:
                self._graphs(draft=True)
        else:
            self.barrier()
            self._pool(draft=False)
            self._graphs(draft=False)
            if plan.speculative:
                self._weights(spread, draft=True)
                self.barrier()
                self._pool(draft=True)
                for line in shapes.after_pools(plan):
                    logs.info(line)
                self._graphs(draft=True)
                self._drafter_ready()
        if self.leader:
            logs.info(shapes.sizing(plan, self.memory))
        for line in shapes.prefix_cache():
            logs.info(line)
        self.barrier()

    def _drafter_warnings(self) -> None:
        drafter, target = self.plan.drafter, self.plan.target
        assert drafter is not None
        if drafter.target_layers is not None and drafter.target_layers != target.layers:
            first = "Draft" if releases.has("draft_config_words") else "DFLASH draft"
            logs.warning(
                f"{first} config num_target_layers={drafter.target_layers} differs from runtime target "
                f"num_hidden_layers={target.layers}; selecting capture layers based on the runtime target model."
            )

    def _drafter_ready(self) -> None:
        drafter = self.plan.drafter
        assert drafter is not None
        if not self.leader or self.plan.args.speculative_algorithm != "DFLASH":
            return
        if drafter.block is not None and drafter.block != self.plan.block:
            logs.warning(
                f"DFLASH block size mismatch: using speculative_num_draft_tokens={self.plan.block} but draft config "
                f"block_size={drafter.block}."
            )
        for line in shapes.drafter_ready(self.plan):
            logs.info(line)

    def _weights(self, spread: float, draft: bool) -> None:
        plan, memory = self.plan, self.memory
        seconds = self.settings.seconds("draft_weights" if draft else "weights") * spread
        if draft:
            for line in shapes.draft_dist():
                logs.info(line)
        logs.info(shapes.weights_begin(memory))
        total = 1 if draft else plan.target.shards
        bar = Bar(total, lambda done, elapsed: shapes.shards(done, total, elapsed)) if self.leader else None
        begin = time.monotonic()
        at = "draft" if draft else "weights"
        self._pass(at, seconds, (lambda gone: bar.to(gone / max(seconds, 1e-9), gone)) if bar else None)
        if bar:
            bar.close(time.monotonic() - begin)
        elapsed = time.monotonic() - begin
        self.timings["weights"] = self.timings.get("weights", 0.0) + elapsed
        kind = plan.drafter.architecture if draft and plan.drafter else plan.target.architecture
        quantization = "" if draft else plan.target.quantization
        used = memory.draft if draft else memory.weights
        logs.info(shapes.weights_end(memory, elapsed, kind, quantization, used))

    def _pool(self, draft: bool) -> None:
        begin = time.monotonic()
        self._pass("kv_cache", self.settings.seconds("kv_cache") * (0.25 if draft else 0.75))
        for line in shapes.kv_pool(self.plan, self.memory, draft):
            logs.info(line)
        self.timings["kv"] = self.timings.get("kv", 0.0) + time.monotonic() - begin

    def _graphs(self, draft: bool) -> None:
        plan, memory = self.plan, self.memory
        self.timings.setdefault("graph", 0.0)
        if not plan.decode_graphs:
            return
        seconds = self.settings.seconds("graph_capture") * (0.3 if draft else 0.7 if plan.speculative else 1.0)
        for line in shapes.graph_begin(plan, memory, draft):
            logs.info(line)
        sizes = list(reversed(plan.capture_sizes))
        bar = None
        if self.leader:
            for line in shapes.graph_sizes(plan):
                logs.info(line)
            free = memory.free
            bar = Bar(
                len(sizes),
                lambda done, elapsed: shapes.graph_bar(
                    done, len(sizes), sizes[min(done, len(sizes) - 1)], free - 0.04 * done, elapsed
                ),
            )
        begin = time.monotonic()
        self._pass("graph_capture", seconds, (lambda gone: bar.to(gone / max(seconds, 1e-9), gone)) if bar else None)
        elapsed = time.monotonic() - begin
        if bar:
            bar.close(elapsed)
        self.timings["graph"] += elapsed
        logs.info(shapes.graph_end(plan, memory, draft, elapsed))

    # Ranks among themselves ---------------------------------------------------------------------------------------
    def barrier(self) -> None:
        """All ranks meet; a dead one is waited for without end, as in a collective."""
        for _ in range(2):  # all have come; all may go
            if self.leader:
                self.collective(b"b")
                continue
            while self._read() != b"b":
                pass
            self._answer()

    def collective(self, word: bytes) -> None:
        """One step of the leader with all followers."""
        try:
            for follower in self.followers:
                follower.sendall(word + b"\0")
            for follower in self.followers:
                if not follower.recv(1):
                    forever()
        except OSError:
            forever()

    def _read(self) -> bytes:
        """The leader's next word; the second byte is kept as its argument."""
        try:
            data = self.lead.recv(2, socket.MSG_WAITALL)
        except OSError:
            data = b""
        if len(data) < 2:
            forever()
        self.argument = data[1]
        return data[:1]

    def _answer(self) -> None:
        try:
            self.lead.sendall(b"k")
        except OSError:
            forever()

    def _follow(self) -> None:
        """Serving as a follower: answer the leader's steps until told to end."""
        while True:
            word = self._read()
            if word in (b"s", b"b"):
                self._answer()
            elif word == b"q":
                self._answer()
                return
            elif word == b"x":
                self.fail(self.failures[self.argument], led=True)
            elif word == b"h":
                self._answer()
                self.hang(self.failures[self.argument])

    # Deaths -------------------------------------------------------------------------------------------------------
    def fail(self, failure: Failure, led: bool = False) -> None:
        """This rank meets the failure. With `led` the leader keeps the order among ranks; else the fuse does."""
        kind = bad.KINDS[failure.kind]
        first = failure.rank % len(self.plan.ranks) == self.index
        if first:
            spend(failure)
        if failure.collateral and first:
            os.write(self.noise[1], b"!" * (len(self.plan.ranks) - 1))
        if kind.how == "hang":
            self.hang(failure)
        if kind.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind.how == "native":
            self._native(failure)
        if not led and kind.every_rank and not first:
            os.read(self.fuse[0], 1)
            time.sleep(0.002 * (1 + self.index % 7))
        if failure.kind == "device_side_assert":
            for line in bad.assert_lines():
                logs.raw(line)
        assert kind.text is not None
        logs.exact(f"Scheduler hit an exception: {kind.text(self.plan, self.index, failure)}")
        speaks = self._after_all(first, led) if kind.every_rank else True
        if led and not self.leader and not kind.every_rank:
            self._answer()
        if speaks and failure.kind != "zombie":
            self._signal_parent()
        # The exception was caught, so the process ends by itself with status 0. Its main process kills it sooner.
        os._exit(0)

    def _after_all(self, first: bool, led: bool) -> bool:
        """Lets every rank log before one of them tells the main process: milliseconds on real GPUs, longer on a laptop.

        Returns whether this rank is the one to tell.
        """
        others = len(self.plan.ranks) - 1
        if led:
            if not self.leader:
                self._answer()
            return self.leader  # it comes last
        if not first:
            os.write(self.logged[1], b"!")
            return False
        os.write(self.fuse[1], b"!" * others)
        deadline = time.monotonic() + 1.0
        while others > 0 and select.select([self.logged[0]], [], [], max(0.0, deadline - time.monotonic()))[0]:
            others -= len(os.read(self.logged[0], others))
        return True

    def _signal_parent(self) -> None:
        if any(failure.collateral for failure in self.failures):
            time.sleep(0.2)  # the other ranks notice before the parent ends them all
        try:
            os.kill(self.parent, signal.SIGQUIT)
        except ProcessLookupError:
            pass

    def hang(self, failure: Failure) -> None:
        """No progress. With a batch in flight the scheduler's own watchdog ends it, during the load nothing does."""
        if failure.at in ("warmup", "serving") and failure.options.get("watchdog", True):
            timeout = float(self.plan.args.watchdog_timeout or 300)
            time.sleep(max(1.0, timeout * self.settings.pace))
            running = "scheduler.cur_batch.batch_size()=1\nscheduler.cur_batch.reqs=[Req(rid=hung)]\n"
            logs.exact(f"Scheduler debug info:\n{running}")
            me = os.getpid()
            for native in (" --native", ""):
                command = f"py-spy dump{native} --pid {me}"
                logs.exact(f"Pyspy failed ({command}). Error: /bin/sh: 1: py-spy: not found\n")
            logs.exact(f"All pyspy dump attempts failed for PID {me}.")
            logs.exact(f"Scheduler watchdog timeout (self.watchdog_timeout={timeout:g}, self.soft=False)")
            time.sleep(self.settings.seconds("crash_diagnostics"))
            self._signal_parent()
        forever()

    def _native(self, failure: Failure) -> None:
        """Dies below Python: faulthandler prints, no exception exists."""
        if failure.kind == "nccl_timeout":
            for line in bad.nccl_timeout_lines(self.index, len(self.plan.ranks)):
                logs.raw(line)
        where = bad.chain(self.plan, failure.at)[-6:]
        if failure.kind == "segfault":
            below = frames.other(
                "sglang/srt/distributed/device_communicators/pynccl_wrapper.py", 351, "ncclCommInitRank", ""
            )
            inside([*where, below], lambda: ctypes.string_at(0))
        inside(where, os.abort)

    def _echo(self) -> None:
        """Noise of a rank that notices another's death."""
        os.read(self.noise[0], 1)
        for line in bad.collateral_lines(self.index):
            logs.raw(line)


class Bar:
    """A tqdm bar on stderr: redrawn with carriage returns, at most every tenth of a second."""

    def __init__(self, total: int, draw: Callable[[int, float], str]) -> None:
        self.total, self.draw = total, draw
        self.done = 0
        self.last = time.monotonic()
        self._put(0.0)

    def _put(self, elapsed: float) -> None:
        logs.raw("\r" + self.draw(self.done, elapsed) + logs.SUFFIX)

    def to(self, share: float, elapsed: float) -> None:
        """Moves to this share of the whole."""
        done = min(self.total, int(share * self.total))
        now = time.monotonic()
        if done > self.done and now - self.last >= REDRAW:
            self.done, self.last = done, now
            self._put(elapsed)

    def close(self, elapsed: float) -> None:
        self.done = self.total
        self._put(elapsed)
        logs.raw("\n")


def forever() -> None:
    """Waits for a collective that never ends; the main process or the kernel ends this process."""
    while True:
        time.sleep(3600)


def inside(where: list[frames.Frame], leaf: Callable[[], Any]) -> None:
    """Calls `leaf` below frames of these files and lines: faulthandler prints the real stack, so it has to be one."""
    call = leaf
    for item in reversed(where):
        space: dict[str, Any] = {}
        name = item.function if item.function.isidentifier() else "module"
        source = "\n" * (item.line - 1) + f"def {name}(go): go()"
        exec(compile(source, item.file, "exec"), space)
        call = _bound(space[name], call)
    call()


def _bound(function: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
    return lambda: function(argument)


class Loop:
    """Rank 0's event loop: admits requests, steps through them, tells the detokenizer how many tokens there are."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.plan, self.settings = rank, rank.plan, rank.settings
        self.running: list[speculation.Request] = []
        self.waiting: list[speculation.Request] = []
        self.warm = False
        self.decoded = False
        self.serving_since: float | None = None
        self.next_step = 0.0
        mean = self._accept_mean()
        self.acceptance = speculation.Acceptance(mean, self.plan.block)
        self.slow = rank._slowness("serving")
        self.pool = max(1, shapes.pool_tokens(self.plan))
        # Counters since the last decode line, and since the start
        self.interval: dict[str, float] = {"steps": 0, "verifies": 0, "tokens": 0, "since": time.monotonic()}
        self.total: dict[str, float] = {"verifies": 0, "tokens": 0, "steps": 0}
        self.average = 0.0  # accept length since the start, as of the last decode line
        self.last_accept = 0.0
        self.last_speed = 0.0

    def _accept_mean(self) -> float:
        drafter, target = self.plan.drafter, self.plan.target
        if drafter is None:
            return 1.0
        if any(f.kind == "useless_drafter" for f in self.rank.failures):
            return 1.02
        if drafter.target_layers is not None and drafter.target_layers != target.layers:
            return 1.02  # trained for another target: loads, starts, and is never right
        if drafter.block is not None and drafter.block != self.plan.block:
            return 1.05
        return self.settings.accept_length

    def run(self) -> None:
        """Serves until told to shut down."""
        control = self.rank.control
        while True:
            timeout = self._timeout()
            try:
                if control.ready(timeout):
                    for message in control.receive():
                        if message["op"] == "shutdown":
                            self.rank.collective(b"q")
                            return
                        self._handle(message)
            except Closed:
                return
            self._due()
            self._admit()
            if self.running and time.monotonic() >= self.next_step:
                self._step()

    def _timeout(self) -> float | None:
        """Until the next step or the next failure; without either, until a message comes."""
        now = time.monotonic()
        times = []
        if self.running:
            times.append(self.next_step - now)
        elif self.waiting:
            times.append(0.0)
        if self.serving_since is not None:
            times += [self.serving_since + f.after - now for f in self.rank.failures if self._pending(f)]
        return max(0.0, min(times)) if times else None

    def _pending(self, failure: Failure) -> bool:
        spent = failure.options.get("spent")
        return failure.at == "serving" and bad.KINDS[failure.kind].how != "quiet" and not spent

    def _handle(self, message: dict[str, Any]) -> None:
        if message["op"] == "gen":
            limit = max(1, int(message["max"]))
            seed = int(self.plan.args.random_seed or 0)
            self.waiting.append(
                speculation.Request(message["rid"], int(message["prompt"]), limit, bool(message["ignore_eos"]), seed)
            )
        elif message["op"] == "abort":
            self.running = [r for r in self.running if r.rid != message["rid"]]
            self.waiting = [r for r in self.waiting if r.rid != message["rid"]]
        elif message["op"] == "serving":
            self.serving_since = time.monotonic()
        elif message["op"] == "state":
            self.rank.control.send({"state": self._state(), "id": message["id"]})

    def _due(self) -> None:
        """Failures of the serving phase whose time has come."""
        if self.serving_since is None:
            return
        for failure in self.rank.failures:
            if self._pending(failure) and time.monotonic() >= self.serving_since + failure.after:
                failure.options["spent"] = True
                self._trip(failure)

    def _trip(self, failure: Failure) -> None:
        """Lets the ranks meet a failure in order: the named one first."""
        number = self.rank.failures.index(failure)
        kind = bad.KINDS[failure.kind]
        first = failure.rank % len(self.plan.ranks)
        order = [first, *(i for i in range(len(self.plan.ranks)) if i != first and kind.every_rank)]
        if kind.how == "hang":
            for follower in self.rank.followers:
                follower.sendall(b"h" + bytes([number]))
            self.rank.hang(failure)
        me = first == 0
        for index in order:
            if index == 0:
                continue
            if me and kind.how == "raise":
                self._log_first(failure)
                me = False
            follower = self.rank.followers[index - 1]
            try:
                follower.sendall(b"x" + bytes([number]))
                follower.settimeout(2.0)
                follower.recv(1)  # it has logged, or is dead
                follower.settimeout(None)
            except OSError:
                pass
        if 0 in order:
            if first == 0 and len(order) > 1 and kind.how == "raise":
                # Logged above, before the others.
                if failure.kind != "zombie":
                    self.rank._signal_parent()
                os._exit(0)
            self.rank.fail(failure, led=True)

    def _log_first(self, failure: Failure) -> None:
        spend(failure)
        if failure.collateral:
            os.write(self.rank.noise[1], b"!" * (len(self.plan.ranks) - 1))
        text = bad.KINDS[failure.kind].text
        assert text is not None
        logs.exact(f"Scheduler hit an exception: {text(self.plan, 0, failure)}")

    def _admit(self) -> None:
        limit = int(self.plan.args.max_running_requests or 160)
        fresh: list[speculation.Request] = []
        while self.waiting and len(self.running) + len(fresh) < limit:
            fresh.append(self.waiting.pop(0))
        if not fresh:
            return
        began = time.monotonic()
        tokens = sum(request.prompt for request in fresh)
        if not self.warm:
            self._warm_up()
        else:
            time.sleep(max(0.0, self.settings.throughput.get("ttft", 0.08) * self.slow))
        self.rank.collective(b"s")
        seconds = max(time.monotonic() - began, 1e-6)
        logs.info(
            shapes.prefill(
                len(fresh), tokens, self._usage(), len(self.running), len(self.waiting), False, tokens / seconds
            )
        )
        results: list[tuple[Any, ...]] = []
        for request in fresh:
            # The prefill gives the first token.
            request.done = 1
            self._report(results, request, 1)
            if request.done < request.end:
                self.running.append(request)
        self._tell(results)
        if self.running and self.next_step < time.monotonic():
            self.next_step = time.monotonic()

    def _warm_up(self) -> None:
        """The first forward pass compiles kernels; what is to fail in the warm-up fails in it."""
        self.warm = True
        seconds = self.settings.seconds("warmup" if self.plan.decode_graphs else "warmup_eager")
        begin = time.monotonic()
        seconds *= self.rank._slowness("warmup")
        for failure in sorted(self.rank.failures, key=lambda item: item.after):
            kind = bad.KINDS[failure.kind]
            if failure.at != "warmup" or kind.how == "quiet" or failure.options.get("decode"):
                continue
            wait = begin + min(failure.after * self.settings.pace, seconds * 0.98) - time.monotonic()
            time.sleep(max(0.0, wait))
            self._trip(failure)
        time.sleep(max(0.0, begin + seconds - time.monotonic()))

    def _step(self) -> None:
        """One forward pass of the running batch."""
        if not self.decoded:
            self.decoded = True
            for failure in self.rank.failures:
                if failure.options.get("decode") and failure.at == "warmup":
                    self._trip(failure)
        self.rank.collective(b"s")
        speculative = self.plan.speculative
        results: list[tuple[Any, ...]] = []
        given = 0
        for request in self.running:
            tokens = request.advance(self.acceptance, speculative)
            given += tokens
            self._report(results, request, tokens)
        batch = len(self.running)
        if speculative and self.total["steps"] == 0 and self.running:
            for line in shapes.first_verify(self.running[0].drafts):
                logs.info(line)
        self.running = [request for request in self.running if request.done < request.end]
        for counters in (self.interval, self.total):
            counters["steps"] += 1
            counters["verifies"] += batch
            counters["tokens"] += given
        self._tell(results)
        interval = int(self.plan.args.decode_log_interval or 40)
        if self.interval["steps"] >= interval:
            self._decode_line(batch)
        # The step takes as long as this batch's tokens take at the speed of so many streams.
        rate = speculation.speed(self.plan, self.settings, max(1, batch)) / self.slow
        cost = batch * (self.acceptance.mean if speculative else 1.0) / rate
        now = time.monotonic()
        self.next_step = max(self.next_step + cost, now - 0.2)
        if not self.running and not self.waiting:
            self.interval["since"] = now
            self._stats(0)

    def _decode_line(self, batch: int) -> None:
        now = time.monotonic()
        speed = self.interval["tokens"] / max(now - self.interval["since"], 1e-6)
        accept = self.interval["tokens"] / max(1.0, self.interval["verifies"]) if self.plan.speculative else 0.0
        used = sum(request.prompt + request.done for request in self.running)
        logs.info(
            shapes.decode(
                batch, used, self._usage(), accept, self.plan.block, self.plan.decode_graphs, speed, len(self.waiting)
            )
        )
        self.last_accept, self.last_speed = accept, speed
        self.average = self.total["tokens"] / max(1.0, self.total["verifies"])
        self.interval = {"steps": 0, "verifies": 0, "tokens": 0, "since": now}
        self._stats(batch)

    def _usage(self) -> float:
        return min(1.0, sum(request.prompt + request.done for request in self.running) / self.pool)

    def _report(self, results: list[tuple[Any, ...]], request: speculation.Request, tokens: int) -> None:
        finished = request.done >= request.end
        spec = None
        if self.plan.speculative and request.verifies:
            spec = [request.verifies, request.drafts, request.histogram if finished else []]
        results.append((request.rid, tokens, request.reason if finished else None, spec))

    def _tell(self, results: list[tuple[Any, ...]]) -> None:
        if results:
            try:
                self.rank.tokens.send({"r": results})
            except Closed:
                forever()  # no detokenizer: the real one waits for it too

    def _stats(self, running: int) -> None:
        self.rank.control.send({"stats": {**self._state(), "running": running, "queued": len(self.waiting)}})

    def _state(self) -> dict[str, Any]:
        return {
            "accept": self.average,
            "last_accept": self.last_accept,
            "speed": self.last_speed,
            "usage": self._usage(),
            "running": len(self.running),
            "queued": len(self.waiting),
            "verifies": self.total["verifies"],
            "tokens": self.total["tokens"],
            "steps": self.total["steps"],
            "free": round(self.rank.memory.free, 2),
        }


def detokenize(plan: Plan, wires: Wires) -> None:
    """The detokenizer process: hands on what rank 0 says."""
    source, sink = wires.tokens[1], wires.text[0]
    wires.keep(source, sink)
    set_title("sglang::detokenizer")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    logs.configure_logger(plan.args)
    while True:
        data = source.end.recv(65536)
        if not data:
            forever()  # waits for messages that do not come, as the real one
        sink.end.sendall(data)
