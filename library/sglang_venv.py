#!/usr/bin/python
# Copyright: dflash-fleet contributors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Build a locked virtual environment on a host, from wheels that the controller brings."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_venv
short_description: Build a locked virtual environment in its final directory
version_added: "0.1.0"
description:
  - Makes C(<root>/<hash>), where the hash is over the pinned requirements and the minor version of the host's Python;
    another lock is another directory, and an environment that serves is never touched.
  - The environment is checked (releases of all packages, imports, a command line) as an unprivileged user and then
    marked complete by the file C(.complete), written last. A directory without the mark is built again.
  - An action plugin of the same name runs on the controller. It finds or makes the wheelhouse, sends only wheels that
    the host lacks and only if the environment is not complete, and drives the steps below. The host needs its Python's
    standard library, neither pip nor ensurepip, and no route out.
options:
  name:
    description: What the environment is for, in messages and in its mark.
    type: str
    required: true
  wheelhouse:
    description:
      - Folder on the controller with C(requirements.txt) (pinned and hashed) and the wheels it names.
      - One of O(wheelhouse) and O(recipe) is required.
    type: path
  recipe:
    description:
      - What C(rehearsal/wheels.py) makes the wheelhouse from, on the controller, when it is not there or not current.
    type: dict
    suboptions:
      kind:
        description: Which set of packages.
        type: str
        choices: [cpu, cuda, rehearsal, hf-client, sglang-router]
        required: true
      release:
        description: SGLang release, where O(recipe.kind) has one.
        type: str
        default: ""
      python:
        description: Minor version of Python that the lock file is for, where it is for one.
        type: str
        default: "3.11"
  index:
    description:
      - Let the host's pip fetch the packages with its own configuration (mirror, proxy), against the same hashes. Only
        pip itself and wheels made by this project come from the controller then.
    type: bool
    default: false
  python:
    description: The interpreter on the host that the environment is made from.
    type: path
    default: /usr/bin/python3
  archive:
    description:
      - Archive (tar) with an interpreter for hosts whose own does not suit - a path on the controller, or an address
        that the controller fetches it from, once. It takes the place of O(python).
    type: str
    default: ""
  archive_sha256:
    description: SHA-256 of O(archive), required with it.
    type: str
    default: ""
  network:
    description: Environment variables for pip where it fetches packages by itself, such as C(https_proxy).
    type: dict
    default: {}
  keep:
    description:
      - Environments that nothing refers to any more and that are kept all the same, the newest ones. Those that a unit,
        a kept release, an instance's state or a running process names are never removed.
    type: int
    default: 2
  root:
    description: Directory of the environments on the host.
    type: path
    default: /var/lib/sglang/venvs
  cache:
    description: Where wheels lie on the host until the environment is complete.
    type: path
    default: /var/lib/sglang/cache/wheels
  engine:
    description: Which of the packages is the engine (C(name)) and its C(build), for C(.complete).
    type: dict
  imports:
    description: Modules whose import must succeed.
    type: list
    elements: str
    default: []
  command:
    description: Arguments for the environment's Python that must exit with 0 and print something.
    type: list
    elements: str
    default: []
  environment:
    description: Environment variables for the checks.
    type: dict
    default: {}
  user:
    description: User to check as; C(nobody) where there is no such user yet.
    type: str
    default: sglang
  requirements:
    description: Content of C(requirements.txt). Set by the action plugin.
    type: str
  step:
    description:
      - Set by the action plugin. V(probe) looks, V(adopt) takes over sent wheels, V(build) builds, V(interpreter)
        unpacks the archive that was sent.
    type: str
    choices: [probe, adopt, build, interpreter]
    default: probe
  arrived:
    description: Directory with wheels that were just sent. Set by the action plugin.
    type: path
attributes:
  check_mode:
    support: full
    description: Predicts whether an environment would be built, and where. A wheel of this project may be built on the
      controller for that; nothing is downloaded or sent.
  diff_mode:
    support: full
  platform:
    platforms: Linux, x86_64, glibc 2.34 or later
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Install SGLang 0.5.20 from wheels that the controller has or makes
  sglang_venv:
    name: sglang 0.5.20 (cuda)
    recipe: {kind: cuda, release: 0.5.20}
    engine: {name: sglang, build: cuda}
    command: [-m, sglang.launch_server, --help]
  become: true

- name: Install from a folder
  sglang_venv:
    name: tools
    wheelhouse: /srv/wheelhouses/tools
  become: true
"""

RETURN = r"""
path:
  description: The environment's directory, also under check mode.
  type: str
  returned: always
  sample: /var/lib/sglang/venvs/3f2a9c0d1b7e4a55
id:
  description: The hash that names it.
  type: str
  returned: always
found:
  description: What was there before this task, V(complete), V(incomplete) (interrupted) or V(absent).
  type: str
  returned: always
python:
  description: Release of the host's interpreter.
  type: str
  returned: always
mark:
  description: Content of C(.complete), seconds of each step among it.
  type: dict
  returned: when complete
pruned:
  description: Environments that nothing referred to and that were removed, or would be; empty where nothing is built.
  type: list
  elements: str
  returned: always, unless an interpreter has to be brought first
sent_bytes:
  description: Bytes of wheels sent to the host.
  type: int
  returned: when built
seconds:
  description: Seconds for sending, installing, compiling and checking.
  type: dict
  returned: when built
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import venvs


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "wheelhouse": {"type": "path"},
            "recipe": {
                "type": "dict",
                "options": {
                    "kind": {
                        "type": "str",
                        "choices": ["cpu", "cuda", "rehearsal", "hf-client", "sglang-router"],
                        "required": True,
                    },
                    "release": {"type": "str", "default": ""},
                    "python": {"type": "str", "default": "3.11"},
                },
            },
            "index": {"type": "bool", "default": False},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "archive": {"type": "str", "default": ""},
            "archive_sha256": {"type": "str", "default": ""},
            "network": {"type": "dict", "default": {}},
            "keep": {"type": "int", "default": 2},
            "root": {"type": "path", "default": "/var/lib/sglang/venvs"},
            "cache": {"type": "path", "default": "/var/lib/sglang/cache/wheels"},
            "engine": {"type": "dict"},
            "imports": {"type": "list", "elements": "str", "default": []},
            "command": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": "sglang"},
            "requirements": {"type": "str"},
            "step": {"type": "str", "choices": ["probe", "adopt", "build", "interpreter"], "default": "probe"},
            "arrived": {"type": "path"},
        },
        required_one_of=[["requirements", "wheelhouse", "recipe"]],
        supports_check_mode=True,
    )
    options = module.params
    if not options["requirements"]:
        module.fail_json(msg="the action plugin sglang_venv did not run: is action_plugins/ on the controller's path?")
    try:
        module.exit_json(**step(options))
    except (venvs.VenvError, OSError) as error:
        module.fail_json(msg=f"{options['name']}: {error}")


def step(options: dict) -> dict:
    """One of the three steps; the action plugin puts them together."""
    root, text = Path(options["root"]), options["requirements"]
    if options["step"] == "interpreter":
        (archive,) = Path(options["arrived"]).iterdir()
        return {"changed": True, "path": str(venvs.unpack_interpreter(archive, root, options["archive_sha256"]))}
    if options["archive"]:
        brought = venvs.brought_interpreter(root, options["archive_sha256"])
        if not brought.exists():
            # Not there yet, which is all that can be said: its version is known once it can be run.
            return {"changed": False, "found": "absent", "interpreter": "absent"}
        options["python"] = str(brought)
    interpreter = venvs.find_interpreter(options["python"])
    found = venvs.probe(root, text, interpreter)
    wheels = venvs.wheel_folder(Path(options["cache"]), found["id"])
    if options["step"] == "adopt":
        return {
            "changed": True,
            "adopted": venvs.adopt(Path(options["arrived"]), wheels, venvs.parse_requirements(text)),
        }
    if options["step"] == "build":
        mark = venvs.build(
            root,
            text,
            interpreter,
            wheels,
            name=options["name"],
            engine=options["engine"],
            index=options["index"],
            check={name: options[name] for name in ("imports", "command", "environment")},
            user=options["user"],
            network={str(name): str(value) for name, value in options["network"].items()},
        )
        pruned = venvs.prune(root, options["keep"], [found["id"]])
        return {**found, "changed": True, "mark": mark, "pruned": pruned}
    free_bytes, free_inodes = venvs.free_space(root)
    have = sorted(wheel.name for wheel in wheels.glob("*.whl")) if wheels.is_dir() else []
    pruned = [] if found["found"] == "complete" else venvs.unused(root, options["keep"], [found["id"]])
    room = {"free_bytes": free_bytes, "free_inodes": free_inodes}
    return {**found, "changed": False, "have": have, **room, "pruned": pruned}


if __name__ == "__main__":
    main()
