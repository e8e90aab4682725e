"""The gate: whose listener it is, and what the smoke requests prove."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from dflash_fleet import gate, units
from fake_server import FakeServer

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000   997        0 11
   1: 00000000:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12
   2: 0100007F:7530 0100007F:9C40 01 00000000:00000000 00:00000000 00000000   997        0 13
   3: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 14
"""
TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue
   0: 00000000000000000000000000000000:7531 00000000000000000000000000000000:0000 0A 0:0 00:0 0 5 0 21 1 0
   1: 00000000000000000000000001000000:7532 00000000000000000000000000000000:0000 0A 0:0 00:0 0 5 0 22 1 0
"""


def test_listeners_are_read():
    assert gate.parse_listeners(TCP, 30000) == [
        {"address": "127.0.0.1", "inode": 11, "uid": 997},
        {"address": "0.0.0.0", "inode": 12, "uid": 0},
    ]
    assert gate.parse_listeners(TCP, 30001) == []
    assert gate.parse_listeners(TCP6, 30001) == [{"address": "::", "inode": 21, "uid": 5}]


@pytest.mark.parametrize(
    ("host", "port", "inode"),
    [
        ("127.0.0.1", 30000, 11),
        ("0.0.0.0", 30000, 11),  # reached over loopback
        ("192.0.2.7", 30000, 12),
        ("::1", 30002, 22),
        ("127.0.0.1", 30001, 21),  # :: takes IPv4 too
        ("127.0.0.1", 30002, None),
        ("127.0.0.1", 443, None),
    ],
)
def test_the_listener_that_a_connection_reaches(tmp_path, host, port, inode):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP)
    (tmp_path / "net" / "tcp6").write_text(TCP6)
    found = gate.listener_for(host, port, str(tmp_path))
    assert (found and found["inode"]) == inode


@pytest.fixture
def held():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield one.getsockname()[1]


def test_listener_of_the_unit(held, monkeypatch):
    monkeypatch.setattr(units, "cgroup_pids", lambda _group: {os.getpid()})
    found = gate.check_listener("127.0.0.1", held, "/system.slice/x.service")
    assert (found["listening"], found["owned"], found["how"]) == (True, True, "fd")


def test_listener_of_somebody_else_is_named(held, monkeypatch):
    with subprocess.Popen(["sleep", "20"]) as child:
        monkeypatch.setattr(units, "cgroup_pids", lambda _group: {child.pid})
        found = gate.check_listener("127.0.0.1", held, "/system.slice/x.service")
        child.kill()
    assert found["owned"] is False
    assert found["holder"]["pid"] == os.getpid()
    assert str(os.getpid()) in gate.holder_text(found["holder"])


def test_nobody_listens(monkeypatch):
    monkeypatch.setattr(units, "cgroup_pids", lambda _group: {os.getpid()})
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        assert gate.check_listener("127.0.0.1", one.getsockname()[1], "/x")["listening"] is False


@pytest.mark.parametrize(
    ("group", "ids", "as_user", "uids", "owned", "how"),
    [
        (7, {7, 8}, (None, False), {0}, True, "cgroup"),
        (9, {7, 8}, (None, False), {0}, False, "cgroup"),
        (None, {7}, (4711, True), {0}, True, "user"),
        (None, set(), (None, True), {0}, False, "user"),
        (None, set(), (None, False), {os.getuid() + 1}, False, "uid"),
        (None, set(), (None, False), {os.getuid()}, None, None),
    ],
)
def test_owner_without_the_right_to_look(held, monkeypatch, group, ids, as_user, uids, owned, how):
    inode = gate.listener_for("127.0.0.1", held)["inode"]
    monkeypatch.setattr(units, "cgroup_pids", lambda _group: {os.getpid()})
    monkeypatch.setattr(gate, "_holds", lambda *_args: None)
    monkeypatch.setattr(gate, "socket_cgroups", lambda _port: {} if group is None else {inode: group})
    monkeypatch.setattr(gate, "_group_ids", lambda _group: ids)
    monkeypatch.setattr(gate, "_holder_as_user", lambda *_args: as_user)
    monkeypatch.setattr(gate, "find_holder", lambda _listener: {"pid": None, "command": "", "uid": 5})
    real = os.stat
    monkeypatch.setattr(
        os,
        "stat",
        lambda path, **more: _Owner(next(iter(uids))) if str(path) == f"/proc/{os.getpid()}" else real(path, **more),
    )
    found = gate.check_listener("127.0.0.1", held, "/x")
    assert (found["owned"], found["how"]) == (owned, how)
    assert bool(found["lacks"]) is (owned is None)
    if owned is False:
        assert "user 5" in gate.holder_text(found["holder"])


class _Owner:
    def __init__(self, uid):
        self.st_uid = uid
        self.st_gid = 0


def test_the_kernel_tells_a_listeners_control_group(held):
    groups = gate.socket_cgroups(held)
    assert groups == {} or set(groups) == {gate.listener_for("127.0.0.1", held)["inode"]}


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_kernels_answer_is_what_proc_says(address, monkeypatch):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        one.bind((address, 0))
        one.listen()
        port = one.getsockname()[1]
        told = gate.diagnosed_listeners(port)
        monkeypatch.setattr(gate, "diagnosed_listeners", lambda _port: None)
        read = gate.listeners(port)
    assert [{**one, "cgroup": None} for one in told] == [{**one, "cgroup": None} for one in read]
    assert [one["address"] for one in read] == [address]
    assert told[0]["inode"] > 0


def test_a_kernel_without_ipv6_still_tells_the_others(held, monkeypatch):
    whole = gate._diagnose
    monkeypatch.setattr(gate, "_diagnose", lambda family, port: whole(family, port) if family < 10 else None)
    assert [one["address"] for one in gate.diagnosed_listeners(held)] == ["127.0.0.1"]
    monkeypatch.setattr(gate, "_diagnose", lambda *_: None)
    assert gate.diagnosed_listeners(held) is None
    assert [one["address"] for one in gate.listeners(held)] == ["127.0.0.1"]  # read from /proc instead


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_looking_as_the_processes_own_user():
    code = (
        "import socket, time\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\n"
        "print(s.getsockname()[1], flush=True)\ntime.sleep(20)"
    )
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        port = int(child.stdout.readline())
        listener = gate.listener_for("127.0.0.1", port)
        assert gate._holder_as_user(listener["inode"], [child.pid]) == (child.pid, True)
        assert gate._holder_as_user(listener["inode"] + 1, [child.pid]) == (None, True)
        child.kill()


# --- HTTP


def client(server, key=None):
    return gate.Client("127.0.0.1", server.port, key)


@pytest.mark.parametrize(
    ("behaviour", "version", "up", "path"),
    [
        ({}, "0.5.23", True, "/ready"),
        ({"up": False}, "0.5.23", False, "/ready"),
        ({"has_ready": False}, "0.5.20", True, "/health"),
        ({}, "0.5.11", True, "/health"),
        ({}, "0.5.12.post1", True, "/health"),
        ({}, None, True, "/health"),
    ],
)
def test_up(behaviour, version, up, path):
    with FakeServer(**behaviour) as server:
        answer, said = gate.probe_up(client(server), "sglang", version)
        assert answer is up
        assert path in said
        assert server.paths()[-1] == path


def test_names():
    with FakeServer(names=["a", "b"]) as server:
        assert gate.served_names(client(server)) == ["a", "b"]
        server.names = None
        assert gate.served_names(client(server)) == ["/models/kimi"]
        with pytest.raises(gate.GateError, match="404"):
            gate.served_names(client(server), "openai")


def test_smoke_with_a_drafter():
    with FakeServer(delay=0.05) as server:
        result = gate.smoke(client(server), requests=4, drafter=True, block_size=8)
        bodies = [body for _method, path, body, _headers in server.seen if path == "/generate"]
    assert {name: result[name] for name in ("requests", "ok", "tokens", "accept_length", "errors")} == {
        "requests": 4,
        "ok": 4,
        "tokens": 256,
        "accept_length": 3.4,
        "errors": [],
    }
    assert result["tokens_per_second"] > 0
    assert server.at_once == 4
    assert len({body["text"] for body in bodies}) == 4
    assert all(
        body["sampling_params"] == {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True} for body in bodies
    )
    assert gate.judge(result, True, 1.1) == ("ok", "")


def test_no_prompt_is_ever_sent_twice():
    with FakeServer() as server:
        for _ in range(2):
            gate.smoke(client(server), requests=2)
        texts = [body["text"] for _method, path, body, _headers in server.seen if path == "/generate"]
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("drafter", "block", "tokens"), [(True, 8, 64), (True, 16, 128), (True, 4, 32), (False, 8, 64)]
)
def test_tokens_are_eight_blocks(drafter, block, tokens):
    assert gate.max_tokens(drafter, block) == tokens


@pytest.mark.parametrize(
    ("behaviour", "drafter", "verdict", "text"),
    [
        ({}, False, "ok", ""),
        ({"accept": None}, False, "ok", ""),
        ({"accept": 1.02}, True, "drafter", "1.02 is below 1.1"),
        ({"accept": None}, True, "drafter", "does not speculate"),
        ({"status": 500}, True, "failed", "/generate answers 500: boom"),
        ({"status": 503, "body": "busy"}, True, "failed", "answers 503: busy"),
        ({"short": 3}, True, "failed", "ended after 61 of 64 tokens"),
        ({"drop": True}, True, "failed", "before the whole answer came"),
        ({"body": "no JSON"}, True, "failed", "no JSON object"),
        ({"body": [1]}, True, "failed", "no JSON object"),
        ({"body": {"meta_info": {"completion_tokens": "many"}}}, True, "failed", "unreadable answer"),
        (
            {"body": {"meta_info": {"completion_tokens": 64, "finish_reason": {"type": "abort", "message": "gone"}}}},
            True,
            "failed",
            "aborted: gone",
        ),
        # an accept length from the counters where the field is not there
        ({"body": {"meta_info": {"completion_tokens": 64, "spec_verify_ct": 32}}}, True, "ok", ""),
        ({"body": [{"meta_info": {"completion_tokens": 64, "spec_verify_ct": 63}}]}, True, "drafter", "1.02"),
    ],
)
def test_judgement(behaviour, drafter, verdict, text):
    with FakeServer(**behaviour) as server:
        result = gate.smoke(client(server), requests=2, drafter=drafter, block_size=8)
    found, why = gate.judge(result, drafter, 1.1)
    assert found == verdict, result
    assert text in why


def test_one_bad_request_of_several_is_enough():
    result = {"requests": 4, "ok": 3, "tokens": 192, "accept_length": 3.0, "errors": [{"message": "m"}]}
    assert gate.judge(result, True, 1.1) == ("failed", "3 of 4 requests generated text; m")


def test_silence_is_a_timeout():
    with FakeServer(delay=3) as server:
        result = gate.smoke(client(server), requests=2, timeout=0.3)
    assert (result["ok"], {item["kind"] for item in result["errors"]}) == (0, {"timeout"})


def test_openai_engine_is_asked_for_text_only():
    with FakeServer(accept=None, refuses_ignore_eos=True) as server:
        result = gate.smoke(client(server), requests=2, drafter=True, engine="openai", model="kimi")
        assert set(server.paths()) == {"/v1/completions"}
        assert server.seen[0][2]["model"] == "kimi"
    assert (result["ok"], result["accept_length"]) == (2, None)
    assert gate.judge(result, True, 1.1, "openai") == ("ok", "")


CANARY = "canary-3f9c"


def test_key_is_a_bearer_header_and_nothing_else():
    with FakeServer(key=CANARY) as server:
        assert gate.served_names(client(server, CANARY)) == ["kimi"]
        assert gate.smoke(client(server, CANARY), requests=1)["ok"] == 1
        for _method, path, body, headers in server.seen:
            assert headers["Authorization"] == f"Bearer {CANARY}"
            assert CANARY not in path + str(body)
        with pytest.raises(gate.GateError, match="API key") as caught:
            gate.served_names(client(server, "wrong"))
        assert caught.value.status == 401


@pytest.mark.parametrize("key", [f"{CANARY}\nX: y", f"{CANARY} x", f"{CANARY}\x00", f"ä{CANARY}"])
def test_key_that_no_header_can_carry_is_refused_unseen(key):
    with pytest.raises(gate.GateError) as caught:
        gate.Client("127.0.0.1", 1, key)
    assert CANARY not in str(caught.value)


def test_proxies_are_never_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with FakeServer() as server:
        assert gate.probe_up(client(server))[0] is True


def test_refused_connection():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        with pytest.raises(gate.GateError) as caught:
            gate.Client("0.0.0.0", one.getsockname()[1]).request("GET", "/health")
    assert caught.value.kind == "connect"


def test_own_verdicts_have_the_shape_of_a_crash():
    found = gate.verdict("running", "drafter_mismatch", "s", "serving", "x.service", "abc", "0.5.20", [{"id": "r"}])
    assert found["engine"] == {"name": "sglang", "version": "0.5.20"}
    assert set(found) == {
        "verdict", "cause", "summary", "phase", "exception", "native_fault", "root_frame", "first_failure",
        "ranks_failed", "exit", "kernel", "complete", "gaps", "remedies", "evidence", "unit", "invocation_id", "engine",
    }  # fmt: skip
