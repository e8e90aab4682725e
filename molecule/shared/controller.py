"""What tests of several scenarios do on the controller: run the project's own commands against the scenario's hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import testinfra
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    """As a person's shell has it in the checkout: the project's ansible.cfg, not the one that molecule wrote."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
    return {
        **kept,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_VAULT_PASSWORD_FILE": str(ROOT / "molecule/shared/vault-password"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }


def start(test_file: str, playbook: str, *arguments: str, own_group: bool = False) -> subprocess.Popen[str]:
    """Start a playbook against the hosts of the scenario that `test_file` belongs to.

    With `own_group` it and its workers are a process group of their own, so that a test can kill them all at once.
    """
    inventory = Path(test_file).resolve().parents[1] / "inventory"
    command = [str(BIN / "ansible-playbook"), "-i", str(inventory), playbook, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=own_group,
    )


def play(test_file: str, playbook: str, *arguments: str, rc: int | None = 0, timeout: float = 600) -> str:
    """Run a playbook to its end and return what it printed; the exit code must be `rc` (None: not zero)."""
    run = start(test_file, playbook, *arguments)
    output, _ = run.communicate(timeout=timeout)
    if rc is None:
        assert run.returncode != 0, output
    else:
        assert run.returncode == rc, f"exit code {run.returncode}\n{output}"
    return output


def until(check: Callable[[], Any], seconds: float = 60, pause: float = 0.3) -> Any:
    """What `check` says once that is true, or what it said last."""
    end = time.monotonic() + seconds
    while not (found := check()) and time.monotonic() < end:
        time.sleep(pause)
    return found


def module(test_file: str, host: str, name: str, arguments: str, *more: str) -> str:
    """One module on one host, ad hoc; its result as JSON stands in what is returned. It must succeed."""
    inventory = Path(test_file).resolve().parents[1] / "inventory"
    run = subprocess.run(
        [str(BIN / "ansible"), host, "-i", str(inventory), "-m", name, "-a", arguments, *more],
        cwd=ROOT, env={**environment(), "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def deploy(test_file: str, *arguments: str, rc: int | None = 0) -> str:
    """The advertised command."""
    return play(test_file, "deploy-dflash.yml", *arguments, rc=rc)


def host_names(test_file: str) -> list[str]:
    """The hosts of the scenario that run engines."""
    spec = yaml.safe_load((Path(test_file).resolve().parents[1] / "hosts.yml").read_text())
    return [str(host["name"]) for host in spec["hosts"] if host["groups"] != ["sglang_router"]]


def scenario_host(test_file: str, name: str) -> Any:
    """Testinfra's view of one host of the scenario, for tests that need a certain one."""
    inventory = Path(test_file).resolve().parents[1] / "inventory"
    return testinfra.get_host(f"ansible://{name}?ansible_inventory={inventory}")


def fleet(test_file: str, command: str, *arguments: str) -> str:
    """A command of rehearsal/fleet.py on the scenario's fleet."""
    name = "molecule_" + Path(test_file).resolve().parents[1].name
    run = subprocess.run(
        [sys.executable, str(ROOT / "rehearsal/fleet.py"), command, name, *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
