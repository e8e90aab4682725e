"""Rotation: which workers a router sends to, and whether an engine has finished what it was sent.

A router forgets at its next start what was taken out of it, so each address that is out has a file below the router's
directory, on the router's host; role sglang_router's launcher leaves these addresses out.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import state, units

# SGLang's counts of requests, newest first: /v1/loads, then /get_load of releases that lack it.
LOADS = ("/v1/loads", "/get_load")
# An engine may look idle between two requests that the router had already sent: so many readings must agree.
READINGS = 3
# What role sglang_router keeps on its host, and runs there.
DIRECTORY = "/var/lib/dflash-fleet-router"
UNIT = "dflash-fleet-router.service"
# Seconds that a router needs after its start to list the workers that it was started with (measured: 1.1).
SETTLE = 10
# Who keeps an address out: a person until a person lets it in; a deployment until its gate; new: until its first gate.
PERSON, DEPLOYMENT, NEW = "person", "deployment", "new"

Ask = Callable[[str, str, "Mapping[str, Any] | None"], "tuple[int, Any]"]


class DrainError(Exception):
    """What stands in the way, for a person."""


class Refused(DrainError):
    """The engine runs with another key, which waiting does not change."""


class Lost(DrainError):
    """Nothing listens at the router's address, or the connection broke: it is stopped, or being started."""


class NoRouter(DrainError):
    """Role sglang_router has not been on this host."""


def asker(key: str = "", timeout: float = 5, certificate: str = "") -> Ask:
    """(method, address, body) to (status, JSON); never through a proxy of the environment.

    `certificate` is a file with the very certificate that an https:// address must show, whatever names stand in it.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certificate:
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", 0x80000)  # named from Python 3.10 on
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)

    def ask(method: str, address: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data=data, headers=headers, method=method)
        try:
            with opener.open(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as problem:
            status, text = problem.code, problem.read()
        except http.client.HTTPException as problem:  # it went away in the middle of its answer
            raise ConnectionResetError(f"{type(problem).__name__}: {problem}") from problem
        try:
            return status, json.loads(text or b"null")
        except ValueError:
            return status, None

    return ask


def requests_in(loads: Any) -> tuple[int, int] | None:
    """(running, queued) of an answer of /v1/loads or /get_load, over all ranks; None where it has none."""
    ranks = loads.get("loads") if isinstance(loads, dict) else loads
    if not isinstance(ranks, list) or not ranks:
        return None
    running = queued = 0
    for rank in ranks:
        waiting = rank.get("num_waiting_reqs")
        all_of_it = rank.get("num_running_reqs", rank.get("num_reqs"))
        if all_of_it is None:
            return None
        # num_reqs of /get_load counts the waiting ones too.
        running += all_of_it - (waiting or 0 if "num_running_reqs" not in rank else 0)
        queued += waiting or 0
    return running, queued


def load_of(engine: str, ask: Ask) -> tuple[int, int] | None:
    """(running, queued) of one engine; None where nothing listens, which has no requests."""
    for path in LOADS:
        try:
            status, answer = ask("GET", engine + path, None)
        except urllib.error.URLError as problem:
            if isinstance(problem.reason, ConnectionRefusedError):
                return None
            raise DrainError(f"{engine} does not answer: {problem.reason}") from None
        except OSError as problem:
            raise DrainError(f"{engine} does not answer: {problem}") from None
        if status in (401, 403):
            raise Refused(f"{engine} runs with another key (HTTP {status})")
        counts = requests_in(answer) if status == 200 else None
        if counts is not None:
            return counts
    raise DrainError(f"{engine} says nothing about its requests at {' or '.join(LOADS)}")


def answers(engine: str, ask: Ask) -> bool:
    """Whether an engine answers to its health check."""
    try:
        return ask("GET", engine.rstrip("/") + "/health", None)[0] == 200
    except OSError:
        return False


def wait_idle(engines: list[str], ask: Ask, timeout: float, pause: float = 0.5) -> dict[str, Any]:
    """Wait until every engine has neither running nor queued requests in READINGS looks in a row, or for `timeout`."""
    begun = time.monotonic()
    quiet = 0
    while True:
        running = queued = 0
        problem = ""
        for engine in engines:
            try:
                counts = load_of(engine, ask) or (0, 0)
            except Refused as error:
                seconds = round(time.monotonic() - begun, 1)
                return {"idle": False, "running": 0, "queued": 0, "seconds": seconds, "problem": str(error)}
            except DrainError as error:  # a busy engine may miss one look
                problem = str(error)
                continue
            running, queued = running + counts[0], queued + counts[1]
        quiet = quiet + 1 if not (running or queued or problem) else 0
        seconds = time.monotonic() - begun
        if quiet >= READINGS or seconds >= timeout:
            idle = quiet >= READINGS
            return {
                "idle": idle,
                "running": running,
                "queued": queued,
                "seconds": round(seconds, 1),
                "problem": problem,
            }
        time.sleep(pause)


def request(ask: Ask, method: str, router: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """(status, answer) of a router; Lost where it has no connection to give."""
    try:
        return ask(method, router + path, body)
    except OSError as problem:
        reason = problem.reason if isinstance(problem, urllib.error.URLError) else problem
        kind = Lost if isinstance(reason, ConnectionError) else DrainError
        raise kind(f"the router {router} does not answer: {reason}") from problem


def workers_of(router: str, ask: Ask) -> dict[str, dict[str, Any]]:
    """What the router sends to, by address."""
    status, answer = request(ask, "GET", router, "/workers")
    if status != 200 or not isinstance(answer, dict):
        raise DrainError(f"the router {router} answers HTTP {status} to GET /workers")
    return {str(worker["url"]).rstrip("/"): worker for worker in answer.get("workers", [])}


def differing(present: Mapping[str, Any], wanted: list[str], joined: bool) -> list[str]:
    """The addresses to take out, or to put in."""
    return [url for url in wanted if (url.rstrip("/") in present) != joined]


def set_rotation(
    router: str, urls: list[str], joined: bool, ask: Ask, worker_key: str = "", timeout: float = 60, pause: float = 0.2
) -> None:
    """Take workers out of a router or put them in, and wait until its list says so; both are queued jobs there.

    A router that is started again meanwhile has forgotten what it was asked, and is asked anew.
    """
    begun = time.monotonic()
    asked: set[str] = set()
    while True:
        late = time.monotonic() - begun >= timeout
        try:
            present = workers_of(router, ask)
            wrong = differing(present, urls, joined)
            for url in [url for url in wrong if url not in asked]:
                if joined:
                    body = {"url": url, **({"api_key": worker_key} if worker_key else {})}
                    status, _ = request(ask, "POST", router, "/workers", body)
                else:
                    status, _ = request(ask, "DELETE", router, f"/workers/{present[url.rstrip('/')]['id']}")
                # 404: another run has just taken it out.
                if status not in (200, 201, 202) and not (status == 404 and not joined):
                    raise DrainError(f"the router {router} answers HTTP {status} for {url}")
                asked.add(url)
        except Lost:
            if late:
                raise
            asked.clear()
            time.sleep(pause)
            continue
        if joined:
            wrong += [url for url in urls if not present.get(url.rstrip("/"), {"is_healthy": True}).get("is_healthy")]
        if not wrong:
            return
        if late:
            word = "serving" if joined else "out"
            raise DrainError(f"the router {router} has {', '.join(wrong)} not {word} after {timeout:g} s")
        time.sleep(pause)


def seconds_since_start(unit: str = UNIT) -> float | None:
    """How long the router's unit has run, 0 while systemd is about to start it; None where it is stopped."""
    try:
        found = units.show(unit)
    except units.BusError as problem:
        raise DrainError(f"cannot ask systemd about {unit}: {problem}") from problem
    if found["ActiveState"] in ("inactive", "failed"):
        return None
    if found["ActiveState"] != "active":
        return 0.0
    return max(time.monotonic() - found["ExecMainStartTimestampMonotonic"] / 1e6, 0.0)


class Door:
    """One router of role sglang_router, seen from its own host: its control plane, its workers, and who is kept out.

    control.json: {schema, url, key, worker_key, certificate}; workers.json: {schema, workers}; drained/: one file for
    each address that is out, {schema, url, by, since}.
    """

    def __init__(
        self,
        directory: str = DIRECTORY,
        ask: Ask | None = None,
        age: Callable[[], float | None] = seconds_since_start,
        pause: float = 0.2,
    ) -> None:
        self.directory = Path(directory)
        control = state.read_state(self.directory / "control.json")
        if control is None:
            raise NoRouter(f"there is no router of role sglang_router on this host ({self.directory}/control.json)")
        self.url = str(control["url"])
        self.worker_key = str(control.get("worker_key") or "")
        self.age, self.pause = age, pause
        self.ask = ask or asker(str(control.get("key") or ""), certificate=str(control.get("certificate") or ""))

    def workers(self) -> list[str]:
        """Every address that the inventory names."""
        return list((state.read_state(self.directory / "workers.json") or {}).get("workers", []))

    def _marker(self, url: str) -> Path:
        return self.directory / "drained" / (urllib.parse.quote(url, safe="") + ".json")

    def drained(self) -> dict[str, dict[str, Any]]:
        """The addresses that are kept out, with who keeps them."""
        found = [state.read_state(path) for path in sorted((self.directory / "drained").glob("*.json"))]
        return {str(marker["url"]): marker for marker in found if marker}

    def keep_out(self, url: str, by: str) -> bool:
        """Keep an address out from now on; False where it was out already. A person's word outlives a deployment's."""
        before = self.drained().get(url)
        if before and (before["by"] == PERSON or by == before["by"]):
            return False
        self._marker(url).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        since = before["since"] if before else state.now_utc()
        state.write_state(self._marker(url), {"url": url, "by": by, "since": since}, mode=0o644)
        return True

    def held(self, urls: Sequence[str], by: str) -> list[str]:
        """Those that someone with a longer arm keeps out."""
        markers = self.drained()
        return [url for url in urls if url in markers and markers[url]["by"] == PERSON and by != PERSON]

    def present(self) -> dict[str, dict[str, Any]] | None:
        """What the router sends to now; None where it does not run, and sends nothing anywhere."""
        try:
            return workers_of(self.url, self.ask)
        except Lost:
            return None

    def settle(self) -> None:
        """Wait until the router has listed what it was started with, or is known to be stopped.

        One that is being started may have read who is kept out before that changes, and lists it later: a host would
        get requests while it is worked on, or none after its gate. So this comes before each change.
        """
        begun, stopped = time.monotonic(), 0
        while True:
            age = self.age()
            stopped = stopped + 1 if age is None else 0
            if stopped >= READINGS:  # between two starts a unit looks so for a moment
                return
            present = self.present() if age is not None else None
            if age is not None and present is not None:
                out = self.drained()
                listed = not differing(present, [url for url in self.workers() if url not in out], True)
                if listed or age >= SETTLE:
                    return
            if time.monotonic() - begun >= 3 * SETTLE:
                if present is None:
                    raise DrainError(f"the router {self.url} does not listen; see journalctl -u {UNIT}")
                return
            time.sleep(self.pause)

    def out(self, urls: list[str], by: str, timeout: float = 60) -> list[str]:
        """Take addresses out, now and for every later start of the router; returns those of which that is news.

        An address that this router is not for is left alone, here and below.
        """
        urls = [url for url in urls if url in self.workers()]
        if urls:
            self.settle()
        marked = [url for url in urls if self.keep_out(url, by)]
        present = self.present()
        left = differing(present, urls, False) if present is not None else []
        if left:
            set_rotation(self.url, left, False, self.ask, timeout=timeout)
        return [url for url in urls if url in marked or url in left]

    def join(self, urls: list[str], by: str, timeout: float = 60) -> list[str]:
        """Put addresses in again, and wait until the router calls them healthy; returns those that were out."""
        held, own = self.held(urls, by), self.workers()
        urls = [url for url in urls if url in own and url not in held]
        if urls:
            self.settle()
        markers = self.drained()
        for url in urls:
            self._marker(url).unlink(missing_ok=True)
        present = self.present()
        joined = differing(present, urls, True) if present is not None else []
        if joined:
            set_rotation(self.url, joined, True, self.ask, self.worker_key, timeout)
        return [url for url in urls if url in markers or url in joined]

    def members(
        self, urls: list[str], answers: Callable[[str], bool], timeout: float = 60, pause: float = 0.2
    ) -> dict[str, list[str]]:
        """Make `urls` the router's workers, and wait until it sends to each that is not kept out and answers.

        A new address that does not answer yet is kept out until its first gate: the router would let it in by itself,
        the moment its port opens. One that does not answer but did before stays the router's business.
        """
        known = self.workers()
        new = [url for url in urls if url not in known]
        waiting = [url for url in new if not answers(url)]
        for url in waiting:
            self.keep_out(url, NEW)
        for url in self.drained():
            if url not in urls:
                self._marker(url).unlink(missing_ok=True)
        if known != urls:
            state.write_state(self.directory / "workers.json", {"workers": urls}, mode=0o644)
        wanted = [url for url in urls if url not in self.drained()]
        begun = time.monotonic()
        while (present := self.present()) is None:
            if time.monotonic() - begun >= timeout:
                raise DrainError(f"the router {self.url} does not listen after {timeout:g} s")
            time.sleep(pause)
        surplus = [url for url in present if url not in {one.rstrip("/") for one in wanted}]
        if surplus:
            set_rotation(self.url, surplus, False, self.ask, timeout=timeout)
        missing = [url for url in differing(present, wanted, True) if answers(url)]
        # It may have been started with them a moment ago; only what it cannot know yet is told at once.
        while missing and not set(missing) & set(new) and time.monotonic() - begun < SETTLE:
            time.sleep(pause)
            missing = [url for url in differing(self.present() or {}, wanted, True) if answers(url)]
        if missing:
            set_rotation(self.url, missing, True, self.ask, self.worker_key, timeout)
        return {"joined": missing, "left": surplus, "waiting": waiting, "new": new}
