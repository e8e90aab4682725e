"""Rotation: which workers a router sends to, and whether an engine has finished what it was sent."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

# SGLang's counts of requests, newest first: /v1/loads, then /get_load of releases that lack it.
LOADS = ("/v1/loads", "/get_load")
# An engine may look idle between two requests that the router had already sent: so many readings must agree.
READINGS = 3

Ask = Callable[[str, str, "Mapping[str, Any] | None"], "tuple[int, Any]"]


class DrainError(Exception):
    """What stands in the way, for a person."""


def asker(key: str = "", timeout: float = 5) -> Ask:
    """(method, address, body) to (status, JSON); never through a proxy of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(method: str, address: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data=data, headers=headers, method=method)
        try:
            with opener.open(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as problem:
            status, text = problem.code, problem.read()
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
            raise DrainError(f"{engine} refuses the key (HTTP {status})")
        counts = requests_in(answer) if status == 200 else None
        if counts is not None:
            return counts
    raise DrainError(f"{engine} says nothing about its requests at {' or '.join(LOADS)}")


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


def workers_of(router: str, ask: Ask) -> dict[str, dict[str, Any]]:
    """What the router sends to, by address."""
    try:
        status, answer = ask("GET", router + "/workers", None)
    except OSError as problem:
        raise DrainError(f"the router {router} does not answer: {problem}") from None
    if status != 200 or not isinstance(answer, dict):
        raise DrainError(f"the router {router} answers HTTP {status} to GET /workers")
    return {str(worker["url"]).rstrip("/"): worker for worker in answer.get("workers", [])}


def differing(present: Mapping[str, Any], wanted: list[str], joined: bool) -> list[str]:
    """The addresses to take out, or to put in."""
    return [url for url in wanted if (url.rstrip("/") in present) != joined]


def set_rotation(
    router: str, urls: list[str], joined: bool, ask: Ask, worker_key: str = "", timeout: float = 60, pause: float = 0.2
) -> None:
    """Take workers out of a router or put them in, and wait until its list says so; both are queued jobs there."""
    present = workers_of(router, ask)
    for url in differing(present, urls, joined):
        if joined:
            body = {"url": url, **({"api_key": worker_key} if worker_key else {})}
            status, _ = ask("POST", router + "/workers", body)
        else:
            status, _ = ask("DELETE", f"{router}/workers/{present[url.rstrip('/')]['id']}", None)
        # 404: another run has just taken it out.
        if status not in (200, 201, 202) and not (status == 404 and not joined):
            raise DrainError(f"the router {router} answers HTTP {status} for {url}")
    begun = time.monotonic()
    while True:
        present = workers_of(router, ask)
        wrong = differing(present, urls, joined)
        if joined:
            wrong += [url for url in urls if not present.get(url.rstrip("/"), {"is_healthy": True}).get("is_healthy")]
        if not wrong:
            return
        if time.monotonic() - begun >= timeout:
            word = "serving" if joined else "out"
            raise DrainError(f"the router {router} has {', '.join(wrong)} not {word} after {timeout:g} s")
        time.sleep(pause)
