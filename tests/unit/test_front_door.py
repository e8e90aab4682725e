"""Which hosts run engines, what a router in front of them sends to, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from dflash_fleet import front_door
from plugins import load

FILTERS = load("filter_plugins/sglang.py")
DEFAULTS = {"sglang_host": "127.0.0.1", "sglang_port": 30000, "sglang_api_key": "", "sglang_instances": []}


def test_routers_and_monitors_run_no_engine_unless_another_group_names_them() -> None:
    groups = {
        "all": ["r1", "m1", "gpu-01", "gpu-02", "lone"],
        "ungrouped": ["lone"],
        "gpu": ["gpu-01", "gpu-02"],
        "sglang_router": ["r1", "gpu-01"],
        "sglang_monitoring": ["m1"],
    }
    assert front_door.engine_hosts(groups) == ["gpu-01", "gpu-02", "lone"]


def test_every_instance_is_a_worker_under_the_address_that_others_reach() -> None:
    hostvars = {
        "gpu-01": {"ansible_host": "192.0.2.11", "sglang_host": "0.0.0.0", "sglang_api_key": "k"},
        "gpu-02": {"sglang_host": "fd00::2", "sglang_instances": [{"name": "a", "port": 1}, {"name": "b", "port": 2}]},
        "gpu-03": {"sglang_host": "10.0.0.3", "sglang_instances": [{"name": "a", "state": "absent"}]},
    }
    found = FILTERS.sglang_workers(list(hostvars), hostvars, DEFAULTS)
    assert [(row["host"], row["instance"], row["url"], row["key"]) for row in found] == [
        ("gpu-01", "main", "http://192.0.2.11:30000", True),
        ("gpu-02", "a", "http://[fd00::2]:1", False),
        ("gpu-02", "b", "http://[fd00::2]:2", False),
    ]


@pytest.mark.parametrize(
    ("host", "instance", "release", "url"),
    [
        ("gpu-01", "main", None, "http://192.0.2.11:30000"),
        ("gpu-01", "old", None, ""),
        ("gpu-01", "old", {"host": "0.0.0.0", "port": 30000}, "http://192.0.2.11:30000"),
        ("gpu-01", "old", {"host": "10.0.0.1", "port": 30001}, "http://10.0.0.1:30001"),
        ("gpu-02", "old", {"host": "fd00::2", "port": 3}, "http://[fd00::2]:3"),
    ],
)
def test_an_instance_that_is_replaced_is_known_by_its_release(host, instance, release, url) -> None:
    hostvars = {"gpu-01": {"ansible_host": "192.0.2.11", "sglang_host": "0.0.0.0"}, "gpu-02": {}}
    assert FILTERS.sglang_worker_url(host, hostvars, DEFAULTS, instance, release) == url


WISH = {"host": "10.0.0.9", "port": 8000, "own": ["r1"], "key": False, "certificate": "", "certificate_key": ""}
WORKER = {"host": "gpu-01", "instance": "main", "url": "http://10.0.0.1:30000", "key": False}


@pytest.mark.parametrize(
    ("wish", "worker", "word"),
    [
        ({}, {}, None),
        ({"host": "127.0.0.1"}, {}, None),
        ({"host": "0.0.0.0"}, {}, "every interface"),
        ({"host": "0.0.0.0", "key": True}, {"key": True}, None),
        ({"host": "8.8.8.8"}, {}, "a public address"),
        ({"host": "router.example"}, {}, "no IP address"),
        ({"port": 443}, {}, "sglang_router_port: 443 is below 1024"),
        ({"port": "8443"}, {}, None),
        ({"certificate": "/c"}, {}, "belong together"),
        ({"certificate": "/c", "certificate_key": "/k"}, {}, None),
        ({}, {"url": "http://127.0.0.1:30000"}, "gpu-01 (instance main) listens on loopback"),
        ({"own": ["gpu-01"]}, {"url": "http://127.0.0.1:30000"}, None),
        ({"key": True}, {}, "the engine has none"),
        ({}, {"key": True}, "the router has none"),
    ],
)
def test_problems(wish: dict[str, Any], worker: dict[str, Any], word: str | None) -> None:
    found = front_door.problems({**WISH, **wish}, [{**WORKER, **worker}])
    assert len(found) == (1 if word else 0)
    assert not word or word in found[0]


def test_a_router_is_for_one_model() -> None:
    """sglang-router 0.3.2 does not look at a request's model, and its mode that does needs the internet to start."""
    assert front_door.problems(WISH, [{**WORKER, "model": "a"}, {**WORKER, "model": "a"}]) == []
    assert "(a, b)" in front_door.problems(WISH, [{**WORKER, "model": "b"}, {**WORKER, "model": "a"}])[0]


def test_a_router_before_nobody_is_a_mistake() -> None:
    assert "no engine" in front_door.problems(WISH, [])[0]


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.0.0.1", "http://10.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")],
)
def test_own_address(host: str, address: str) -> None:
    assert front_door.own_address({"host": host, "port": 1}) == address
