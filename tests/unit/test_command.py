"""The command `dflash-fleet`: its table, whose configuration holds, and the wheel, built, installed and run."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import dflash_fleet_cli as command  # noqa: E402 - found by the line above

# Of the environment that tests themselves run in, what would decide for the command.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "DFLASH_FLEET_"))}
PLAN = ("-i", str(ROOT / "inventory" / "demo"), "-e", "plan_offline=true")


def run(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(words), cwd=cwd, env={**CLEAN, **more}, capture_output=True, text=True, check=False)


# The table --------------------------------------------------------------------------------------------------------
def test_every_playbook_has_a_name_and_says_what_it_does():
    known = command.playbooks()
    assert {path.name for path, _ in known.values()} == {path.name for path in (ROOT / "playbooks").glob("*.yml")}
    assert {"deploy", "plan", "status", "diagnose", "rollback", "preflight", "fetch-weights"} <= set(known)
    for name, (_, text) in known.items():
        assert len(text) > 20, name
        assert text in command.parser().format_help()


def test_everything_after_the_name_is_passed_on():
    given = command.parser().parse_args(["deploy", "-i", "x", "--check", "-e", "a=b", "--help"])
    assert (given.command, given.arguments) == ("deploy", ["-i", "x", "--check", "-e", "a=b", "--help"])


# Whose configuration ----------------------------------------------------------------------------------------------
OURS = command.read_settings(ROOT / "ansible.cfg")


def test_every_setting_of_the_project_has_its_variable():
    assert set(OURS) == set(command.SETTINGS)


def test_the_variables_are_ansibles_own():
    """Ansible shows what it reads where: every variable of the table has to be one of them."""
    known = run(str(Path(sys.executable).parent / "ansible-config"), "list", "--type", "all", cwd=ROOT).stdout
    named = set(re.findall(r"\bname: (ANSIBLE_\w+)", known))
    assert {name for name, _ in command.SETTINGS.values()} <= named


def test_without_a_configuration_the_projects_holds():
    assert command.settings(None, {}) == {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    assert command.settings(ROOT / "ansible.cfg", {}) == {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}


def test_beside_ones_own_configuration_the_projects_fills_the_gaps(tmp_path):
    own = tmp_path / "ansible.cfg"
    own.write_text("[defaults]\nforks = 3\nroles_path = mine:/srv/roles\ncallbacks_enabled = timer\n")
    added = command.settings(own, {"ANSIBLE_GATHERING": "smart"})
    assert "ANSIBLE_FORKS" not in added
    assert "ANSIBLE_GATHERING" not in added
    assert "ANSIBLE_CONFIG" not in added
    assert added["ANSIBLE_ROLES_PATH"] == f"{ROOT}/roles:{tmp_path}/mine:/srv/roles"
    assert added["ANSIBLE_LIBRARY"] == f"{ROOT}/library"
    assert added["ANSIBLE_CALLBACKS_ENABLED"] == "timer,sglang_summary"
    assert added["ANSIBLE_INVENTORY"] == f"{ROOT}/inventory/demo"
    # Without it, Ansible writes a module's arguments, secrets among them, to a file on the host.
    assert added["ANSIBLE_PIPELINING"] == "True"


# The wheel --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel in it; what it depends on comes from the one that the tests run in."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    (theirs,) = [path for path in sys.path if path.endswith("site-packages")]
    (ours,) = folder.glob("lib/python*/site-packages")
    (ours / "dependencies.pth").write_text(f"{theirs}\n")
    for name in ("ansible", "ansible-playbook", "ansible-doc"):
        text = (Path(sys.executable).parent / name).read_text()
        (folder / "bin" / name).write_text(f"#!{python}\n{text.partition(chr(10))[2]}")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"


def test_the_wheel_holds_the_project_as_it_is_in_git(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if "/project/" in name}
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    left = (".ci/", ".config/", "benchmarks/", "changes/", "dflash_fleet_cli/", "docs/", "molecule/", "tests/")
    wanted = {
        f"dflash_fleet_cli/project/{name}"
        for name in tracked
        if (ROOT / name).is_file()
        and not name.startswith(left)
        and ("/" in name or name in ("ansible.cfg", "deploy-dflash.yml"))
    }
    assert held == wanted
    # Written while a fleet is up: addresses and keys of this machine.
    assert "dflash_fleet_cli/project/inventory/demo/hosts.yml" not in held


def test_plan_from_anywhere_says_what_the_checkout_says(installed, tmp_path):
    there = run(str(installed / "dflash-fleet"), "plan", *PLAN, cwd=tmp_path, HOME=str(tmp_path))
    here = run(str(Path(sys.executable).parent / "ansible-playbook"), "playbooks/plan.yml", *PLAN, cwd=ROOT)
    assert there.returncode == here.returncode == 0, there.stdout + there.stderr + here.stdout
    assert "86 tok/s" in there.stdout
    # Hosts answer in an order of their own.
    assert sorted(there.stdout.splitlines()) == sorted(here.stdout.splitlines())
    assert list(tmp_path.iterdir()) in ([], [tmp_path / ".ansible"])


def test_plan_beside_a_configuration_of_ones_own(installed, tmp_path):
    (tmp_path / "ansible.cfg").write_text("[defaults]\nforks = 2\nstdout_callback = minimal\n")
    done = run(str(installed / "dflash-fleet"), "plan", *PLAN, cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "86 tok/s" in done.stdout
    assert "PLAY [" not in done.stdout  # their callback


def test_documentation_of_modules(installed, tmp_path):
    done = run(str(installed / "dflash-fleet"), "exec", "ansible-doc", "sglang_wait", cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "drafter" in done.stdout


def test_reports_go_to_where_one_works(installed, tmp_path):
    journal = tmp_path / "crash.json"
    packed = ROOT / "tests/fixtures/journals/gpu_oom/memory_unbalanced.json.gz"
    journal.write_bytes(gzip.decompress(packed.read_bytes()))
    done = run(
        str(installed / "dflash-fleet"), "diagnose", "-e", f"journal_file={journal}", cwd=tmp_path, HOME=str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cause     gpu_memory_busy" in done.stdout
    assert [path.suffix for path in sorted((tmp_path / "reports" / "localhost").glob("*/*"))] == [".json", ".txt"]


def test_nothing_is_written_beside_the_playbooks():
    """They may lie in an installed package: whoever names the folder of reports asks the filter for it."""
    files = [*(ROOT / "playbooks").rglob("*.yml"), *(ROOT / "roles").rglob("*.yml")]
    assert [str(path) for path in files if "/../reports" in path.read_text(encoding="utf-8")] == []


def test_wrong_calls_say_what_is_right(installed, tmp_path):
    dflash = str(installed / "dflash-fleet")
    unknown = run(dflash, "deplpy", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "deploy" in unknown.stderr
    other = run(dflash, "exec", "ls", cwd=tmp_path)
    assert other.returncode == 2
    assert "ansible-doc" in other.stderr


def test_completion_of_names(installed, tmp_path):
    """As bash asks for it after `dflash-fleet dep<TAB>` (argcomplete's protocol)."""
    line = "dflash-fleet dep"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    done = subprocess.run(
        ["bash", "-c", f'exec 8>{tmp_path}/answer; exec "$0"', str(installed / "dflash-fleet")],
        env={**CLEAN, **asked}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answer").read_text().split() == ["deploy"]
