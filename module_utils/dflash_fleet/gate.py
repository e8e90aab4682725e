"""The gate an engine passes before it counts as ready, and the requests that prove it.

Three questions, none of which a log line, `/v1/models` or `/health` can answer: does the listener of the port belong to
this unit (another server may answer 200 there), does the model answer under its served name, and do several concurrent
requests each generate at least eight drafter blocks (a one-token health check never runs the drafter's verify step).
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from . import units

CONNECT_TIMEOUT = 5.0  # s
GENERATION_TIMEOUT = 120.0  # s, for one whole smoke request
HEALTH_TIMEOUT = 25.0  # s; SGLang itself gives up after 20 s, and a client that leaves earlier leaves its probe behind
BLOCKS = 8  # drafter blocks each smoke request must generate
PLAIN_TOKENS = 64  # tokens of a smoke request without a drafter
_MAX_BODY = 4 * 1024 * 1024

# Plain prose of different kinds, short enough for a context of 512 byte-level tokens.
PROMPTS = (
    "The lighthouse keeper counted the ships each evening and wrote down their names, until one night",
    "To boil an egg, put it into cold water, bring the water to the boil, and then",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return",
    "A train leaves the station at nine with forty people on board. At the first stop",
    "Rivers carry sand and stones towards the sea, and where the current grows slow they",
    "Dear neighbour, thank you for looking after the garden while we were away. The roses",
    "In the year when the bridge was finished, the town held a market on both banks and",
    "Question: why does ice float on water? Answer: because water expands when it",
)


class GateError(Exception):
    """A request failed. `kind` is connect, timeout, http, body or refused_key; `status` the HTTP status, if any."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


# --- who listens -----------------------------------------------------------------------------------------------------


def _address(text: str) -> str:
    """Address of /proc/net/tcp{,6}: 32-bit words in the machine's byte order, in hexadecimal."""
    words = [text[index : index + 8] for index in range(0, len(text), 8)]
    raw = b"".join(struct.pack("=I", int(word, 16)) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def parse_listeners(text: str, port: int) -> list[dict[str, Any]]:
    """Listening sockets on `port` in the text of /proc/net/tcp or tcp6: [{address, inode, uid}]."""
    wanted = f":{port:04X}"
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        # 0A is LISTEN
        if len(fields) > 9 and fields[3] == "0A" and fields[1].endswith(wanted):
            found.append(
                {"address": _address(fields[1].rsplit(":", 1)[0]), "inode": int(fields[9]), "uid": int(fields[7])}
            )
    return found


def listeners(port: int, proc: str = "/proc") -> list[dict[str, Any]]:
    """Listening sockets on `port`: [{address, inode, uid}], asked of the kernel where it answers, else read.

    Reading /proc/net/tcp takes the kernel through its table of all connections, 3 ms on a small machine.
    """
    if proc == "/proc":
        told = diagnosed_listeners(port)
        if told is not None:
            return told
    found = []
    for name in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/net/{name}", encoding="ascii") as handle:
                found += parse_listeners(handle.read(), port)
        except OSError:
            continue  # no IPv6
    return found


def connect_host(host: str) -> str:
    """Where to reach an engine that listens on `host`: every address includes loopback."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host.strip("[]"))


def _numeric(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(connect_host(host), None, type=socket.SOCK_STREAM)}
    except OSError:
        return {host}


def listener_for(host: str, port: int, proc: str = "/proc") -> dict[str, Any] | None:
    """The listening socket that a connection to host:port reaches: the exact address first, then a wildcard."""
    here = listeners(port, proc)
    wanted = _numeric(host)
    mapped = {f"::ffff:{address}" for address in wanted if ":" not in address}
    for candidates in (wanted | mapped, {"0.0.0.0", "::"}):
        for one in here:
            if one["address"] in candidates:
                return one
    return None


def _holds(pid: int, inode: int, proc: str = "/proc") -> bool | None:
    """Whether the process has the socket open; None where we may not look."""
    wanted = f"socket:[{inode}]"
    folder = f"{proc}/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except PermissionError:
        return None
    except OSError:
        return False
    for number in numbers:
        try:
            if os.readlink(f"{folder}/{number}") == wanted:
                return True
        except OSError:
            continue
    return False


# Run as the unit's own user: root without CAP_SYS_PTRACE (as in many containers) may not look into others' processes.
_LOOK = """
import os, sys
wanted = "socket:[" + sys.argv[1] + "]"
for pid in sys.argv[2:]:
    try:
        for fd in os.listdir("/proc/" + pid + "/fd"):
            try:
                if os.readlink("/proc/" + pid + "/fd/" + fd) == wanted:
                    print(pid)
                    sys.exit()
            except OSError:
                pass
    except OSError:
        print("?")
"""


def _holder_as_user(inode: int, pids: list[int]) -> tuple[int | None, bool]:
    """(pid that holds the socket, whether every process could be looked at), asked as the processes' own users."""
    if os.geteuid() != 0:
        return None, False
    owners: dict[tuple[int, int], list[int]] = {}
    for pid in pids:
        try:
            entry = os.stat(f"/proc/{pid}")
        except OSError:
            continue
        owners.setdefault((entry.st_uid, entry.st_gid), []).append(pid)
    complete = True
    for (uid, gid), theirs in owners.items():
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _LOOK, str(inode), *map(str, theirs)],
                user=uid,
                group=gid,
                extra_groups=[],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
                cwd="/",
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            complete = False
            continue
        for line in done.stdout.split():
            if line.isdigit():
                return int(line), True
            complete = False
        if done.returncode:
            complete = False
    return None, complete


_SOCK_DIAG_BY_FAMILY = 20
_INET_DIAG_CGROUP_ID = 21
_TCP_LISTEN = 10
_NLMSG_ERROR, _NLMSG_DONE = 2, 3


def diagnosed_listeners(port: int) -> list[dict[str, Any]] | None:
    """[{address, inode, uid, cgroup}] of the listeners on `port`, by netlink (sock_diag(7)); None where that fails.

    Needs no privileges. `cgroup`, the id of the control group, is None before kernel 5.8.
    """
    found = _diagnose(socket.AF_INET, port)
    if found is None:
        return None
    return found + (_diagnose(socket.AF_INET6, port) or [])  # a kernel may be without IPv6


def _diagnose(family: int, port: int) -> list[dict[str, Any]] | None:
    # struct inet_diag_req_v2: family, protocol, ext, pad, states, then a socket id of 48 bytes (source port first)
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)
    request += struct.pack(">HH", port, 0) + b"\0" * 44
    head = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, 0x301, 1, 0)  # REQUEST | DUMP
    found: list[dict[str, Any]] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:  # NETLINK_SOCK_DIAG
            link.settimeout(2)
            link.send(head + request)
            while True:
                data = link.recv(65536)
                if not data:
                    return None
                at = 0
                while at + 16 <= len(data):
                    length, kind = struct.unpack_from("=IH", data, at)
                    if kind == _NLMSG_DONE:
                        return found
                    if length < 16 or kind == _NLMSG_ERROR:
                        return None
                    one = _diag(data[at + 16 : at + length], port)
                    if one is not None:
                        found.append(one)
                    at += (length + 3) & ~3
    except OSError:
        return None


def socket_cgroups(port: int) -> dict[int, int]:
    """{socket inode: control group id} of the listeners on `port`, where the kernel tells."""
    return {one["inode"]: one["cgroup"] for one in diagnosed_listeners(port) or [] if one["cgroup"] is not None}


def _diag(message: bytes, port: int) -> dict[str, Any] | None:
    """One struct inet_diag_msg (72 bytes: source port at 4, source at 8, uid at 64, inode at 68) and its attributes."""
    if len(message) < 72 or struct.unpack_from(">H", message, 4)[0] != port:
        return None
    family = message[0]
    raw = message[8:12] if family == socket.AF_INET else message[8:24]
    uid, inode = struct.unpack_from("=II", message, 64)
    found = {"address": socket.inet_ntop(family, raw), "inode": inode, "uid": uid, "cgroup": None}
    at = 72
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            break
        if kind == _INET_DIAG_CGROUP_ID and length >= 12:
            (found["cgroup"],) = struct.unpack_from("=Q", message, at + 4)
        at += (length + 3) & ~3
    return found


def _group_ids(control_group: str) -> set[int]:
    """Ids (inode numbers) of the unit's v2 control group and its sub-groups."""
    ids: set[int] = set()
    for directory in units.cgroup_directories(control_group):
        if "/systemd/" in directory + "/" and not os.path.exists(os.path.join(directory, "cgroup.controllers")):
            continue  # v1: its ids are another hierarchy's
        for parent, _folders, _files in os.walk(directory):
            try:
                ids.add(os.stat(parent).st_ino)
            except OSError:
                continue
    return ids


def check_listener(host: str, port: int, control_group: str) -> dict[str, Any]:
    """Whose listener answers on host:port.

    Returns {listening, owned, holder, how, lacks}: `owned` is None when it cannot be told, and `lacks` says what is
    missing; `holder` is {pid, command, uid} of a foreign process, pid None where it may not be seen.
    """
    result: dict[str, Any] = {"listening": False, "owned": None, "holder": None, "how": None, "lacks": None}
    here = listener_for(host, port)
    if here is None:
        return result
    result["listening"] = True
    inode = here["inode"]
    members = sorted(units.cgroup_pids(control_group))
    hidden = False
    for pid in members:
        answer = _holds(pid, inode)
        if answer:
            return {**result, "owned": True, "how": "fd"}
        hidden = hidden or answer is None
    if not hidden:
        if members or not control_group:
            return {**result, "owned": False, "how": "fd", "holder": find_holder(here)}
        hidden = True  # the group cannot be read here
    ids = _group_ids(control_group)
    group = socket_cgroups(port).get(inode)
    if ids and group:
        owned = group in ids
        return {**result, "owned": owned, "how": "cgroup", "holder": None if owned else find_holder(here)}
    holder, complete = _holder_as_user(inode, members)
    if holder is not None:
        return {**result, "owned": True, "how": "user"}
    if complete and members:
        return {**result, "owned": False, "how": "user", "holder": find_holder(here)}
    uids = set()
    for pid in members:
        try:
            uids.add(os.stat(f"/proc/{pid}").st_uid)
        except OSError:
            continue
    if uids and here["uid"] not in uids:
        return {**result, "owned": False, "how": "uid", "holder": find_holder(here)}
    result["lacks"] = (
        "permission to see which process holds the port (root can; so can a kernel from 5.8 on with control groups v2)"
    )
    return result


def find_holder(listener: dict[str, Any], proc: str = "/proc") -> dict[str, Any]:
    """Who holds a socket, as far as we may see: {pid, command, uid}."""
    for name in os.listdir(proc):
        if name.isdigit() and _holds(int(name), listener["inode"], proc):
            return {"pid": int(name), "command": units.command_line(int(name), proc)[:300], "uid": listener["uid"]}
    pids = [int(name) for name in os.listdir(proc) if name.isdigit()]
    owned = []
    for pid in pids:
        try:
            if os.stat(f"{proc}/{pid}").st_uid == listener["uid"]:
                owned.append(pid)
        except OSError:
            continue
    pid_found, _complete = _holder_as_user(listener["inode"], owned)
    if pid_found is not None:
        return {"pid": pid_found, "command": units.command_line(pid_found, proc)[:300], "uid": listener["uid"]}
    return {"pid": None, "command": "", "uid": listener["uid"]}


def holder_text(holder: dict[str, Any] | None) -> str:
    if not holder:
        return "another process"
    if holder.get("pid") is None:
        return f"a process of user {holder.get('uid')} (its number is not visible to this user)"
    command = str(holder.get("command") or "").split("\n")[0]
    return f"process {holder['pid']} ({command[:120]})"


# --- HTTP ------------------------------------------------------------------------------------------------------------


class Client:
    """Short requests to one engine: never by a proxy of the environment, with time limits, the key in a header only."""

    def __init__(self, host: str, port: int, api_key: str | None = None) -> None:
        self.host = connect_host(host)
        self.port = int(port)
        self._key = api_key or ""
        if self._key and not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            # Checked here, because http.client would quote the header, and with it the key, in its error.
            raise GateError("refused_key", "the API key holds characters that an HTTP header cannot carry")

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 10.0
    ) -> tuple[int, Any]:
        """(status, parsed body or text). Raises GateError for what is no HTTP answer within `timeout` s."""
        headers = {"Accept": "application/json", "Connection": "close"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=min(CONNECT_TIMEOUT, timeout))
        try:
            try:
                connection.connect()
            except OSError as error:
                raise GateError(
                    "connect", f"cannot connect to {self.host}:{self.port}: {error.strerror or error}"
                ) from None
            connection.sock.settimeout(timeout)
            try:
                connection.request(method, path, body=data, headers=headers)
                response = connection.getresponse()
                raw = response.read(_MAX_BODY)
            except (socket.timeout, TimeoutError):
                raise GateError("timeout", f"{method} {path}: no answer within {timeout:.0f} s") from None
            except (OSError, http.client.HTTPException) as error:
                raise GateError(
                    "connect", f"{method} {path}: {type(error).__name__} before the whole answer came"
                ) from None
        finally:
            connection.close()
        text = raw.decode("utf-8", "replace")
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text


def probe_up(client: Client, engine: str = "sglang", version: str | None = None) -> tuple[bool, str]:
    """Whether the server says it is up, with what it said. Proves nothing about generation: that is `smoke`."""
    # /ready (0.5.20 on) generates nothing; /health generates a token, which is harmless once at the end of a start.
    path = "/health"
    if engine == "sglang" and version and _release(version) >= (0, 5, 20):
        path = "/ready"
    status, body = client.request("GET", path, timeout=HEALTH_TIMEOUT)
    if status == 404:
        path = "/health" if path == "/ready" else "/v1/models"
        status, body = client.request("GET", path, timeout=HEALTH_TIMEOUT)
    del body
    return status == 200, f"{path} answers {status}"


def _release(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = ""
        for char in part:
            if not char.isdigit():
                break
            digits += char
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers[:3])


def served_names(client: Client, engine: str = "sglang") -> list[str]:
    """Names under which the server serves; /model_info of SGLang where the OpenAI list is not there."""
    status, body = client.request("GET", "/v1/models")
    if status in (401, 403):
        raise GateError("http", f"/v1/models answers {status}: the API key given is not the engine's", status)
    if status == 200 and isinstance(body, dict):
        return [str(item.get("id")) for item in body.get("data") or [] if isinstance(item, dict)]
    if engine == "sglang":
        status, body = client.request("GET", "/model_info")
        if status == 200 and isinstance(body, dict):
            return [str(body[key]) for key in ("served_model_name", "model_path") if body.get(key)]
    raise GateError("http", f"/v1/models answers {status}", status)


def max_tokens(drafter: bool, block_size: int) -> int:
    """Tokens per smoke request: eight blocks even where every proposed token is accepted."""
    return BLOCKS * max(1, block_size) if drafter else PLAIN_TOKENS


def _reason(body: Any) -> str:
    if isinstance(body, dict):
        error = body.get("error", body.get("message", body.get("detail", body)))
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)[:300]
    return str(body).strip()[:300]


def generate(
    client: Client,
    prompt: str,
    tokens: int,
    engine: str = "sglang",
    model: str = "",
    timeout: float = GENERATION_TIMEOUT,
) -> dict[str, Any]:
    """One request; {tokens, accept_length, verifies}. Raises GateError unless it generated `tokens` tokens."""
    if engine == "sglang":
        path = "/generate"
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        status, body = client.request("POST", path, {"text": prompt, "sampling_params": sampling}, timeout)
    else:
        path = "/v1/completions"
        payload = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        status, body = client.request("POST", path, payload, timeout)
        if status == 400 and "ignore_eos" in _reason(body):
            del payload["ignore_eos"]  # an extension that not every server takes
            status, body = client.request("POST", path, payload, timeout)
    if status != 200:
        raise GateError("http", f"{path} answers {status}: {_reason(body)}", status)
    if isinstance(body, list):
        body = body[0] if body else None
    if not isinstance(body, dict):
        raise GateError("body", f"{path} answers something that is no JSON object")
    if engine != "sglang":
        done = int((body.get("usage") or {}).get("completion_tokens") or 0)
        if done < 1:
            raise GateError("body", f"{path} generated nothing")
        return {"tokens": done, "accept_length": None, "verifies": None}
    info = body.get("meta_info") or {}
    finish = info.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type") == "abort":
        raise GateError("http", f"{path} aborted: {_reason(finish)}")
    done = int(info.get("completion_tokens") or 0)
    if done < tokens:
        raise GateError("body", f"{path} ended after {done} of {tokens} tokens")
    verifies = info.get("spec_verify_ct") or None
    length = info.get("spec_accept_length")
    if length is None and verifies:
        length = done / verifies
    return {"tokens": done, "accept_length": None if length is None else float(length), "verifies": verifies}


def smoke(
    client: Client,
    requests: int = 4,
    drafter: bool = False,
    block_size: int = 8,
    engine: str = "sglang",
    model: str = "",
    timeout: float = GENERATION_TIMEOUT,
) -> dict[str, Any]:
    """Concurrent generations: {requests, ok, tokens, accept_length, tokens_per_second, errors: [{kind, ...}]}."""
    tokens = max_tokens(drafter, block_size)
    results: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    lock = threading.Lock()

    def one(index: int) -> None:
        # The nonce stands first, or a prefix cache would answer for the model.
        prompt = f"[{secrets.token_hex(4)}] {PROMPTS[index % len(PROMPTS)]}"
        try:
            answer = generate(client, prompt, tokens, engine, model, timeout)
            with lock:
                results.append(answer)
        except GateError as error:
            with lock:
                errors.append({"kind": error.kind, "message": str(error), "status": error.status})
        except Exception as error:
            # A thread that dies silently would leave a request unaccounted for.
            with lock:
                errors.append(
                    {"kind": "body", "message": f"unreadable answer ({type(error).__name__})", "status": None}
                )

    begin = time.monotonic()
    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(max(1, requests))]
    for thread in threads:
        thread.start()
    deadline = begin + timeout + CONNECT_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    wall = max(1e-6, time.monotonic() - begin)
    with lock:
        missing = len(threads) - len(results) - len(errors)
        errors += [{"kind": "timeout", "message": f"no whole answer within {timeout:.0f} s", "status": None}] * missing
        total = sum(item["tokens"] for item in results)
        lengths = [item["accept_length"] for item in results if item["accept_length"] is not None]
        return {
            "requests": len(threads),
            "ok": len(results),
            "tokens": total,
            "accept_length": round(sum(lengths) / len(lengths), 2) if lengths else None,
            "tokens_per_second": round(total / wall, 1),
            "errors": list(errors),
        }


def judge(result: dict[str, Any], drafter: bool, min_accept_length: float, engine: str = "sglang") -> tuple[str, str]:
    """('ok' | 'failed' | 'drafter', why) for a smoke result."""
    if result["ok"] < result["requests"]:
        first = result["errors"][0]["message"] if result["errors"] else "no answer"
        return "failed", f"{result['ok']} of {result['requests']} requests generated text; {first}"
    if drafter and engine == "sglang":
        if result["accept_length"] is None:
            return (
                "drafter",
                "the engine reports no accept length: it does not speculate, though a drafter is configured",
            )
        if result["accept_length"] < min_accept_length:
            return "drafter", (
                f"accept length {result['accept_length']:.2f} is below {min_accept_length:g}: the drafter is loaded "
                "but hardly any of its tokens is accepted, so it costs time and brings nothing"
            )
    return "ok", ""


# --- results in the shape of journal_crash ---------------------------------------------------------------------------


def verdict(
    verdict_: str,
    cause: str,
    summary: str,
    phase: str,
    unit: str,
    invocation_id: str = "",
    version: str | None = None,
    remedies: list[dict[str, Any]] | None = None,
    engine: str = "sglang",
) -> dict[str, Any]:
    """A journal_crash result for what no log shows (a useless drafter, a wrong key): same keys, no evidence lines."""
    return {
        "verdict": verdict_,
        "cause": cause,
        "summary": summary,
        "phase": phase,
        "exception": None,
        "native_fault": None,
        "root_frame": None,
        "first_failure": None,
        "ranks_failed": [],
        "exit": None,
        "kernel": {"oom_killed": False, "xid": [], "segfault": []},
        "complete": True,
        "gaps": [],
        "remedies": remedies or [],
        "evidence": [],
        "unit": unit,
        "invocation_id": invocation_id,
        "engine": {"name": engine, "version": version},
    }
