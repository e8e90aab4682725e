"""What benchmarks on rehearsal hosts share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    """As `make` has it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    path = f"{BIN}:{os.environ['PATH']}"
    return {**kept, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "PATH": path}


@contextlib.contextmanager
def booted(fleet: str, spec: str) -> Iterator[Path]:
    """A fleet of rehearsal/fleet.py for as long as it is measured; the folder of its inventory."""
    command = [sys.executable, str(ROOT / "rehearsal/fleet.py")]
    with tempfile.TemporaryDirectory() as name:
        hosts, inventory = Path(name, "hosts.yml"), Path(name, "inventory")
        hosts.write_text(spec)
        inventory.mkdir()
        try:
            subprocess.run([*command, "up", fleet, f"--spec={hosts}", f"--inventory={inventory}"], check=True)
            yield inventory
        finally:
            subprocess.run([*command, "down", fleet], check=False)


@contextlib.contextmanager
def rehearsals(fleet: str, count: int) -> Iterator[Path]:
    """The same of so many rehearsal hosts, with the demo's variables."""
    hosts = [f"  - {{name: rehearsal-{number:02d}, image: bookworm, groups: [rehearsal]}}\n"
             for number in range(1, count + 1)]  # fmt: skip
    with booted(fleet, "hub: true\nhosts:\n" + "".join(hosts)) as inventory:
        (inventory / "group_vars").symlink_to(ROOT / "inventory/demo/group_vars")
        yield inventory
