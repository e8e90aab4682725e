"""The README stays true: its commands are run as they stand there, on the demo fleet, in their order.

Run by CI (`make test-readme`), not by `make test`: it boots and removes the fleet that a person may be looking at.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
BLOCKS = re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
COMMANDS = [
    line.split("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if re.match(r"(make|ansible-playbook|cp|\$EDITOR) ", line)
]

pytestmark = pytest.mark.readme


def run(command: str) -> str:
    """As a person types it in the prepared environment; an editor is `true` here."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "EDITOR": "true", "ANSIBLE_NOCOLOR": "1"}
    # The README's commands are for a shell.
    done = subprocess.run(  # noqa: S602
        command, shell=True, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1500, check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{command}\n" + done.stdout[-6000:]
    return done.stdout


def changes(output: str) -> dict[str, int]:
    """Changes per host, from Ansible's recap."""
    return {name: int(count) for name, count in re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", output, re.M)}


def test_there_are_commands() -> None:
    """The expressions above still find what the README shows."""
    assert COMMANDS[0] == "make demo"
    assert "make demo-down" in COMMANDS
    assert len([command for command in COMMANDS if command.startswith("ansible-playbook")]) >= 8


def check_demo(demo: str) -> None:
    """The table and the incident, as the README shows them."""
    table = demo[demo.index("SGLANG") :]
    assert re.search(r"^cpu-01\s+main\s+sglang 0\.5\.23 cpu\s+single\+dflash\s+serving\s+\d+:\d\d\s+8\.0", table, re.M)
    for host in ("rehearsal-01", "rehearsal-02"):
        line = rf"^{host}\s+main\s+sglang 0\.5\.11 rehearsal\s+ep8\+dflash\s+degraded\s+\d+:\d\d\s+(\d\.\d)"
        found = re.search(line, table, re.M)
        # The rehearsal draws its accept lengths around 3.4; the mean of four short answers wanders.
        assert found, table
        assert 1.5 <= float(found[1]) <= 8.0, table
    assert "AttributeError: 'NoneType' object has no attribute 'dtype'" in demo.replace("''", "'")


def test_demo_commands() -> None:
    """From `make demo` to `make demo-down`, with what each promises."""
    first, last = COMMANDS.index("make demo"), COMMANDS.index("make demo-down")
    run(COMMANDS[last])  # a fleet that is still up would remember its fallback, and show no crash
    try:
        check_demo(run(COMMANDS[first]))
        again = run(COMMANDS[first + 1])
        assert COMMANDS[first + 1] == "ansible-playbook deploy-dflash.yml"
        assert changes(again) == {"cpu-01": 0, "rehearsal-01": 0, "rehearsal-02": 0}
        upgraded = run(COMMANDS[first + 2])
        assert "0.5.20" in COMMANDS[first + 2]
        line = r"^rehearsal-0\d\s+main\s+sglang 0\.5\.20 rehearsal\s+ep8\+dflash\s+serving"
        served = re.findall(line, upgraded, re.M)
        assert len(served) == 2, upgraded
        predicted = run(COMMANDS[first + 3])
        assert "--check --diff" in COMMANDS[first + 3]
        assert "+++ after: sglang-main-tp8.service  (restart: sglang-main-tp8.service)" in predicted
        assert re.search(r"^-\s+--ep-size 8", predicted, re.M)
        rest = {command: run(command) for command in COMMANDS[first + 4 : last]}
        swept = next(output for command, output in rest.items() if "benchmark.yml -l cpu-01" in command)
        # The tiny pair agrees about all of a block of eight; how fast that is on these cores is not for a test.
        assert re.search(r"^single\+dflash +\d.* [78]\.\d\d ", swept, re.M), swept
        assert re.search(r"^single +\d", swept, re.M), swept
    finally:
        run(COMMANDS[last])


def test_own_fleet_commands() -> None:
    """The example is never contacted: its playbooks are parsed, and its plan is made without asking a host."""
    own = ROOT / "inventory" / "mine"
    assert not own.exists(), "inventory/mine is somebody's"
    try:
        for command in COMMANDS[COMMANDS.index("make demo-down") + 1 :]:
            run(command + " --syntax-check" if command.startswith("ansible-playbook") else command)
        plan = run("ansible-playbook -i inventory/mine playbooks/plan.yml -e plan_offline=true")
        assert "--ep-size 8" in plan
    finally:
        run("rm -rf inventory/mine")
