# PYTHON_ARGCOMPLETE_OK
"""The command `dflash-fleet`: the project's playbooks by their names, from any directory.

    dflash-fleet plan -i my/inventory -e plan_offline=true
    dflash-fleet deploy -i my/inventory -l gpu-01 --check --diff
    dflash-fleet exec ansible-doc sglang_wait

It is `ansible-playbook` underneath, and hands everything after the name on to it. What it adds is the way to the
project's roles and plugins: without an ansible.cfg of yours the project's own holds, beside one of yours the project's
settings fill what yours leaves open. Completion: eval "$(register-python-argcomplete dflash-fleet)"
"""

from __future__ import annotations

import argparse
import configparser
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: In a wheel the project lies inside the package, in a checkout around it.
PROJECT = HERE / "project" if (HERE / "project").is_dir() else HERE.parent

#: Names that differ from the playbook's.
NAMES = {"deploy-dflash": "deploy"}
#: Environment variable of each setting in the project's ansible.cfg, and whether it is a list of paths that adds up.
SETTINGS: dict[tuple[str, str], tuple[str, bool]] = {
    ("defaults", "inventory"): ("ANSIBLE_INVENTORY", False),
    ("defaults", "roles_path"): ("ANSIBLE_ROLES_PATH", True),
    ("defaults", "library"): ("ANSIBLE_LIBRARY", True),
    ("defaults", "module_utils"): ("ANSIBLE_MODULE_UTILS", True),
    ("defaults", "action_plugins"): ("ANSIBLE_ACTION_PLUGINS", True),
    ("defaults", "filter_plugins"): ("ANSIBLE_FILTER_PLUGINS", True),
    ("defaults", "callback_plugins"): ("ANSIBLE_CALLBACK_PLUGINS", True),
    ("defaults", "callbacks_enabled"): ("ANSIBLE_CALLBACKS_ENABLED", False),
    ("defaults", "inject_facts_as_vars"): ("ANSIBLE_INJECT_FACT_VARS", False),
    ("defaults", "gathering"): ("ANSIBLE_GATHERING", False),
    ("defaults", "callback_result_format"): ("ANSIBLE_CALLBACK_RESULT_FORMAT", False),
    ("defaults", "interpreter_python"): ("ANSIBLE_PYTHON_INTERPRETER", False),
    ("defaults", "forks"): ("ANSIBLE_FORKS", False),
    ("defaults", "retry_files_enabled"): ("ANSIBLE_RETRY_FILES_ENABLED", False),
    ("defaults", "nocows"): ("ANSIBLE_NOCOWS", False),
    ("ssh_connection", "pipelining"): ("ANSIBLE_PIPELINING", False),
    ("ssh_connection", "ssh_args"): ("ANSIBLE_SSH_ARGS", False),
}
PATHS = ("inventory",)


def playbooks(project: Path = PROJECT) -> dict[str, tuple[Path, str]]:
    """By name the playbook, and what it does: its first comment."""
    found = {}
    for path in sorted((project / "playbooks").glob("*.yml")):
        comments = [line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
        found[NAMES.get(path.stem, path.stem)] = (path, comments[0].partition(". ")[0].rstrip(".:") if comments else "")
    return found


def read_settings(file: Path) -> dict[tuple[str, str], str]:
    """What a configuration says, by section and name."""
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=(";",))
    parser.read(file, encoding="utf-8")
    return {(section, name): value for section in parser.sections() for name, value in parser.items(section)}


def beside(folder: Path, value: str) -> str:
    """Paths of a configuration are relative to it."""
    return os.pathsep.join(str(folder / Path(part).expanduser()) for part in value.split(os.pathsep) if part)


def settings(own: Path | None, environment: Mapping[str, str], project: Path = PROJECT) -> dict[str, str]:
    """Environment variables to set: where `own` is the configuration that Ansible would read, and is not the project's.

    What the environment says stands. What `own` says stands, but for plugins and roles, of which the project's come
    first and theirs after.
    """
    ours = project / "ansible.cfg"
    if own is None or (own.exists() and own.samefile(ours)):
        return {"ANSIBLE_CONFIG": str(ours)}
    theirs = read_settings(own)
    added = {}
    for key, value in read_settings(ours).items():
        name, adds_up = SETTINGS[key]
        if adds_up:
            rest = environment.get(name) or beside(own.parent, theirs.get(key, ""))
            added[name] = os.pathsep.join(filter(None, [beside(project, value), rest]))
        elif name not in environment and key not in theirs:
            added[name] = beside(project, value) if key[1] in PATHS else value
    enabled = SETTINGS["defaults", "callbacks_enabled"][0]
    if enabled not in added:
        asked = environment.get(enabled) or theirs["defaults", "callbacks_enabled"]
        added[enabled] = f"{asked},{read_settings(ours)['defaults', 'callbacks_enabled']}"
    return added


def find_configuration() -> Path | None:
    """The configuration that Ansible would read by itself."""
    from ansible.config.manager import find_ini_config_file

    found = find_ini_config_file()
    return Path(os.fsdecode(found)) if found else None


def environment_for(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the program."""
    added = settings(find_configuration(), environment)
    # Reports go to where one works, never into an installed package.
    reports = environment.get("DFLASH_FLEET_REPORTS") or str(Path.cwd() / "reports")
    # What the summary advises to run next.
    return {**environment, **added, "DFLASH_FLEET_REPORTS": reports, "DFLASH_FLEET_COMMAND": f"dflash-fleet {name}"}


def parser() -> argparse.ArgumentParser:
    """One name, and all the rest."""
    known = playbooks()
    width = max(map(len, known)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in known.items()]
    lines += [f"  {'exec':<{width}}Any program of Ansible with this project's plugins: exec ansible-doc sglang_wait"]
    result = argparse.ArgumentParser(
        prog="dflash-fleet",
        description="SGLang with a DFlash drafter on GPU hosts. All that follows COMMAND goes to ansible-playbook.",
        epilog="\n".join(["commands:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="dflash-fleet COMMAND [-i INVENTORY] [options of ansible-playbook]",
    )
    result.add_argument("command", choices=[*known, "exec"], metavar="COMMAND", help="what to do, see below")
    result.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of ansible-playbook")
    return result


def program(name: str) -> str:
    """A program of Ansible: the one beside this Python first."""
    beside_us = Path(sys.executable).parent / name
    found = str(beside_us) if beside_us.exists() else shutil.which(name)
    if not found:
        sys.exit(f"dflash-fleet: {name} is not installed beside {sys.executable}")
    return found


def main() -> None:
    """Become ansible-playbook."""
    asked = parser()
    try:
        import argcomplete
    except ImportError:  # a checkout without it completes nothing
        pass
    else:
        argcomplete.autocomplete(asked)
    given = asked.parse_args()
    if given.command == "exec":
        if not given.arguments or not given.arguments[0].startswith("ansible"):
            asked.error("exec needs a program of Ansible: ansible, ansible-doc, ansible-inventory, ansible-vault, ...")
        command = [program(given.arguments[0]), *given.arguments[1:]]
    else:
        command = [program("ansible-playbook"), str(playbooks()[given.command][0]), *given.arguments]
    os.execve(command[0], command, environment_for(given.command, os.environ))


if __name__ == "__main__":
    main()
