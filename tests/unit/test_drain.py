"""Drain and join against a router and engines that are plain data."""

from __future__ import annotations

import urllib.error
from collections.abc import Mapping
from typing import Any

import pytest
from dflash_fleet import drain

ROUTER = "http://router"


class Router:
    """Its list changes one look after the request, as the real one's does; a new worker is healthy one look later."""

    def __init__(self, *urls: str, stuck: bool = False) -> None:
        self.workers = dict.fromkeys(urls, True)
        self.jobs: list[tuple[str, str]] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.stuck = stuck

    def __call__(self, method: str, address: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        if method == "GET":
            shown = [{"id": f"id-{url}", "url": url, "is_healthy": up} for url, up in self.workers.items()]
            self.workers = dict.fromkeys(self.workers, True)
            while self.jobs and not self.stuck:
                verb, url = self.jobs.pop()
                self.workers.update({url: False}) if verb == "POST" else self.workers.pop(url)
            return 200, {"workers": shown}
        if method == "POST":
            assert body is not None
            self.bodies.append(body)
            self.jobs.append(("POST", body["url"]))
        else:
            self.jobs.append(("DELETE", address.split("/workers/id-")[1]))
        return 202, {"status": "accepted"}


def test_a_host_leaves_and_the_router_is_waited_for() -> None:
    router = Router("http://a", "http://b")
    drain.set_rotation(ROUTER, ["http://a"], False, router, pause=0)
    assert list(router.workers) == ["http://b"]
    drain.set_rotation(ROUTER, ["http://a"], False, router, pause=0)
    assert router.jobs == []


def test_a_host_joins_with_its_key_and_is_healthy_then() -> None:
    router = Router("http://b")
    drain.set_rotation(ROUTER, ["http://a"], True, router, worker_key="secret", pause=0)
    assert router.workers == {"http://b": True, "http://a": True}
    assert router.bodies == [{"url": "http://a", "api_key": "secret"}]


def test_a_router_that_does_nothing_is_an_error() -> None:
    with pytest.raises(drain.DrainError, match="http://a not out after 0 s"):
        drain.set_rotation(ROUTER, ["http://a"], False, Router("http://a", stuck=True), timeout=0, pause=0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 3}]}, (2, 3)),
        ({"loads": [{"num_running_reqs": 2}, {"num_running_reqs": 1, "num_waiting_reqs": 1}]}, (3, 1)),
        ([{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 9}], (3, 2)),
        ({"loads": []}, None),
        (None, None),
        ([{}], None),
    ],
)
def test_requests_in(answer: Any, expected: Any) -> None:
    assert drain.requests_in(answer) == expected


def looks(*running: int) -> tuple[drain.Ask, list[str]]:
    """An engine with these numbers of running requests, look by look; the last one stays."""
    asked: list[str] = []

    def ask(_: str, address: str, __: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        asked.append(address)
        return 200, {"loads": [{"num_running_reqs": running[min(len(asked), len(running)) - 1], "num_waiting_reqs": 0}]}

    return ask, asked


def test_idle_is_several_looks_in_a_row() -> None:
    ask, asked = looks(3, 0, 0, 1, 0)
    assert drain.wait_idle(["http://a"], ask, 60, pause=0)["idle"]
    assert len(asked) == 4 + drain.READINGS


def test_the_limit_says_what_was_left() -> None:
    ask, _ = looks(2)
    found = drain.wait_idle(["http://a"], ask, 0, pause=0)
    assert (found["idle"], found["running"]) == (False, 2)


@pytest.mark.parametrize(("reason", "idle"), [(ConnectionRefusedError(), True), (TimeoutError("timed out"), False)])
def test_only_an_engine_that_is_down_counts_as_idle_without_an_answer(reason: OSError, idle: bool) -> None:
    def ask(*_: Any) -> tuple[int, Any]:
        raise urllib.error.URLError(reason)

    assert drain.wait_idle(["http://a"], ask, 0.05, pause=0)["idle"] is idle


@pytest.mark.parametrize("status", [401, 404, 500])
def test_an_engine_that_does_not_count_is_never_idle(status: int) -> None:
    found = drain.wait_idle(["http://a"], lambda *_: (status, None), 0.02, pause=0)
    assert not found["idle"]
    assert found["problem"]
