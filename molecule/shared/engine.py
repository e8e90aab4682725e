"""What Testinfra tests of several scenarios ask a host. Every function takes Testinfra's `host`."""

from __future__ import annotations

import json
import shlex
from typing import Any

ROOT = "/var/lib/sglang"
# Of the ordinary users that scenarios boot hosts with (hosts.yml); their playbooks take it from a vault.
SUDO_PASSWORD = "rehearsal-only"


def as_root(host: Any, command: str) -> Any:
    """Run a command as root, whoever the host is reached as; returns Testinfra's result."""
    if host.user().name == "root":
        return host.run(command)
    return host.run(f"printf '%s\\n' {SUDO_PASSWORD} | sudo -S -p '' -- /bin/sh -c {shlex.quote(command)}")


def sudo(host: Any, command: str) -> str:
    """Run a command as root and return what it printed; it must succeed."""
    run = as_root(host, command)
    assert run.rc == 0, f"{command}: {run.stderr or run.stdout}"
    return str(run.stdout)


def grep(host: Any, secret: str, command: str) -> list[str]:
    """What `command` prints when its grep is given the secret (`-f $P`); the secret itself is in no argv meanwhile."""
    half = len(secret) // 2
    write = f"printf '%s%s\\n' {secret[:half]} {secret[half:]} > $P"
    script = f"P=/dev/shm/pattern; umask 077; {write}; {{ {command}; }} 2>/dev/null; rm -f $P"
    return sudo(host, script).split("\n")[:-1]


def read_json(host: Any, path: str) -> dict[str, Any]:
    """A JSON file of the host."""
    return dict(json.loads(sudo(host, f"cat {shlex.quote(path)}")))


def state(host: Any, name: str, instance: str = "main") -> dict[str, Any]:
    """A state file of an instance (ready.json, last_good.json, rungs.json)."""
    document = read_json(host, f"{ROOT}/{instance}/state/{name}")
    assert document["schema"] == 1
    return document


def release(host: Any, instance: str = "main") -> dict[str, Any]:
    """release.json of the current release."""
    return read_json(host, f"{ROOT}/{instance}/current/release.json")


def show(host: Any, unit: str, name: str) -> str:
    """One property of a unit."""
    return sudo(host, f"systemctl show {shlex.quote(unit)} --property={name} --value").strip()


# An HTTP request with nothing but the host's own Python; the key comes by standard input, never by argv.
CLIENT = """
import json, sys, urllib.request, urllib.error
url, body, key = json.load(sys.stdin)
headers = {"Content-Type": "application/json", **({"Authorization": "Bearer " + key} if key else {})}
data = None if body is None else json.dumps(body).encode()
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    answer = opener.open(urllib.request.Request(url, data, headers), timeout=120)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status)
print(answer.read().decode())
"""


def request(
    host: Any,
    path: str,
    body: dict[str, Any] | None = None,
    key: str = "",
    port: int = 30000,
    address: str = "127.0.0.1",
) -> tuple[int, Any]:
    """A request from the host to its engine: (status, JSON or text)."""
    arguments = json.dumps([f"http://{address}:{port}{path}", body, key])
    run = host.run(f"printf %s {shlex.quote(arguments)} | python3 -c {shlex.quote(CLIENT)}")
    assert run.rc == 0, run.stderr
    status, _, text = str(run.stdout).partition("\n")
    try:
        return int(status), json.loads(text)
    except ValueError:
        return int(status), text


def generate(host: Any, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy generation through /generate: text and meta_info."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}, **more}
    status, answer = request(host, "/generate", body)
    assert status == 200, answer
    return dict(answer)


def journal(host: Any, unit: str) -> str:
    """Every line of a unit, systemd's own among them."""
    return sudo(host, f"journalctl --no-pager --all -o cat -u {shlex.quote(unit)}")
