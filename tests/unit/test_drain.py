"""Drain and join against a router and engines that are plain data."""

from __future__ import annotations

import importlib.util
import sys
import types
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import drain, state

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


def test_an_engine_with_another_key_is_not_waited_for() -> None:
    asked: list[str] = []

    def ask(_: str, address: str, __: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        asked.append(address)
        return 401, None

    found = drain.wait_idle(["http://a"], ask, 60, pause=0)
    assert not found["idle"]
    assert found["problem"] == "http://a runs with another key (HTTP 401)"
    assert len(asked) == 1


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


class Front:
    """A router with the files of its role: what it would start with, and what it sends to now."""

    def __init__(self, folder: Path, *urls: str, router: Router | None = None) -> None:
        control = {"url": ROUTER, "key": "control", "worker_key": "engine", "certificate": ""}
        state.write_state(folder / "control.json", control)
        (folder / "drained").mkdir()
        if urls:
            state.write_state(folder / "workers.json", {"workers": list(urls)})
        self.router = router or Router(*urls)
        self.ages: list[float | None] = [3600.0]
        self.door = drain.Door(str(folder), self.router, self.age, pause=0)
        self.folder = folder

    def age(self) -> float | None:
        """One after the other, the last for ever."""
        return self.ages.pop(0) if len(self.ages) > 1 else self.ages[0]

    def starts_with(self) -> list[str]:
        """What role sglang_router's launcher would name to the router."""
        return launcher().rotation(self.folder)


def launcher() -> Any:
    """roles/sglang_router/files/launch.py, whose router is not installed here."""
    for name in ("sglang_router", "sglang_router.launch_router"):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        for member in ("launch_router", "parse_router_args"):
            setattr(module, member, None)
    file = Path(__file__).resolve().parents[2] / "roles/sglang_router/files/launch.py"
    spec = importlib.util.spec_from_file_location("router_launch", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


A, B, C = "http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://10.0.0.3:30000"


def test_what_is_out_stays_out_when_the_router_restarts(tmp_path: Path) -> None:
    front = Front(tmp_path, A, B)
    assert front.door.out([A], drain.DEPLOYMENT) == [A]
    assert list(front.router.workers) == [B]
    assert front.starts_with() == [B]
    assert front.door.out([A], drain.DEPLOYMENT) == []
    assert front.door.join([A], drain.DEPLOYMENT) == [A]
    assert front.router.bodies == [{"url": A, "api_key": "engine"}]
    assert front.starts_with() == [A, B]
    assert front.door.join([A], drain.DEPLOYMENT) == []


def test_a_deployment_does_not_end_what_a_person_began(tmp_path: Path) -> None:
    front = Front(tmp_path, A, B)
    front.door.out([A], drain.DEPLOYMENT)
    assert front.door.out([A], drain.PERSON) == [A], "the person's word is written down"
    assert front.door.out([A], drain.DEPLOYMENT) == []
    assert front.door.join([A], drain.DEPLOYMENT) == []
    assert front.door.held([A, B], drain.DEPLOYMENT) == [A]
    assert front.starts_with() == [B]
    assert front.door.join([A], drain.PERSON) == [A]
    assert front.starts_with() == [A, B]


def test_a_router_that_does_not_run_is_told_by_its_files(tmp_path: Path) -> None:
    def refuses(*_: Any) -> tuple[int, Any]:
        raise urllib.error.URLError(ConnectionRefusedError())

    front = Front(tmp_path, A, B)
    front.door.ask, front.ages = refuses, [None]
    assert front.door.out([A], drain.DEPLOYMENT) == [A]
    assert front.starts_with() == [B]
    assert front.door.join([A], drain.DEPLOYMENT) == [A]
    assert front.starts_with() == [A, B]


class Restarted(Router):
    """Gone for two looks, then there without a list, then with the one it was started with."""

    def __init__(self, *started_with: str) -> None:
        super().__init__(*started_with)
        self.looks = 0

    def __call__(self, method: str, address: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        self.looks += 1
        if self.looks <= 2:
            raise urllib.error.URLError(ConnectionRefusedError()) if self.looks == 1 else ConnectionResetError()
        if self.looks <= 4:
            assert method == "GET"
            return 200, {"workers": []}
        return super().__call__(method, address, body)


def test_a_host_leaves_a_router_that_is_just_being_started(tmp_path: Path) -> None:
    front = Front(tmp_path, A, B, router=Restarted(A, B))
    front.ages = [3600.0, None, 0.0, 0.5]
    assert front.door.out([A], drain.DEPLOYMENT) == [A]
    assert list(front.router.workers) == [B], "it was started with the host, a moment before that left"
    assert front.starts_with() == [B]


def test_a_host_joins_a_router_that_is_just_being_started(tmp_path: Path) -> None:
    front = Front(tmp_path, A, B, router=Restarted(B))
    front.door.keep_out(A, drain.DEPLOYMENT)
    front.ages = [3600.0, None, 0.0, 0.5]
    assert front.door.join([A], drain.DEPLOYMENT) == [A]
    assert front.router.workers == {B: True, A: True}
    assert front.starts_with() == [A, B]


def test_an_engine_that_is_off_does_not_keep_a_router_from_being_settled(tmp_path: Path) -> None:
    front = Front(tmp_path, A, B, C, router=Router(A, B))
    front.ages = [drain.SETTLE - 1.0, drain.SETTLE + 1.0]
    assert front.door.out([A], drain.DEPLOYMENT) == [A]
    assert list(front.router.workers) == [B]


def test_a_router_that_is_killed_is_asked_again() -> None:
    class Killed(Router):
        def __call__(self, method: str, address: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
            if method == "DELETE" and not self.bodies:
                self.bodies.append({})
                raise ConnectionResetError("Connection reset by peer")
            return super().__call__(method, address, body)

    router = Killed("http://a", "http://b")
    drain.set_rotation(ROUTER, ["http://a"], False, router, pause=0)
    assert list(router.workers) == ["http://b"]

    def gone(*_: Any) -> tuple[int, Any]:
        raise urllib.error.URLError(ConnectionRefusedError(111, "Connection refused"))

    with pytest.raises(drain.Lost, match=r"http://router does not answer: .*Connection refused"):
        drain.set_rotation(ROUTER, ["http://a"], False, gone, timeout=0, pause=0)


def test_a_router_that_cannot_be_asked_is_an_error(tmp_path: Path) -> None:
    def hangs(*_: Any) -> tuple[int, Any]:
        raise urllib.error.URLError(TimeoutError("timed out"))

    front = Front(tmp_path, A, B)
    front.door.ask = hangs
    with pytest.raises(drain.DrainError, match="does not answer"):
        front.door.out([A], drain.DEPLOYMENT)


def test_new_engines_join_where_they_answer_and_wait_for_their_gate_where_not(tmp_path: Path) -> None:
    front = Front(tmp_path, router=Router())
    found = front.door.members([A, B], lambda url: url == A, pause=0)
    assert found == {"joined": [A], "left": [], "waiting": [B], "new": [A, B]}
    assert list(front.router.workers) == [A]
    assert front.starts_with() == [A]
    assert front.door.members([A, B], lambda _: True, pause=0) == {"joined": [], "left": [], "waiting": [], "new": []}
    assert front.door.join([B], drain.DEPLOYMENT) == [B], "its gate lets it in"
    assert sorted(front.router.workers) == [A, B]


def test_an_engine_that_is_down_for_a_while_is_the_routers_business(tmp_path: Path) -> None:
    front = Front(tmp_path, A, B, router=Router(A))
    assert front.door.members([A, B], lambda url: url == A, pause=0)["joined"] == []
    assert front.starts_with() == [A, B]


def test_what_leaves_the_inventory_leaves_the_router(tmp_path: Path) -> None:
    front = Front(tmp_path, A, B, C)
    front.door.out([B], drain.PERSON)
    assert front.door.members([A], lambda _: True, pause=0)["left"] == [C]
    assert list(front.router.workers) == [A]
    assert (front.starts_with(), front.door.drained()) == ([A], {})


def test_an_engine_of_another_router_is_left_alone(tmp_path: Path) -> None:
    front = Front(tmp_path, A)
    assert front.door.out([B], drain.PERSON) == []
    assert front.door.join([B], drain.PERSON) == []
    assert (front.router.bodies, front.door.drained()) == ([], {})


def test_a_host_without_a_router_says_so(tmp_path: Path) -> None:
    with pytest.raises(drain.NoRouter, match="no router of role sglang_router"):
        drain.Door(str(tmp_path))
