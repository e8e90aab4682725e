#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Let a host pass verified weights on to other hosts for the duration of a play."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: weights_peer
short_description: Let a host pass verified weights on to other hosts for the duration of a play
description:
  - Starts C(dflash-fleet-weights-peer.service), a transient and sandboxed unit that answers the questions of a
    huggingface_hub client for the given repositories and revisions, from files that M(hf_snapshot) has verified on this
    host, also while it is still fetching others.
  - Who asks needs the token. Nothing is written but C(/run/dflash-fleet-peer/), which goes away when it is stopped.
  - A host that cannot pass anything on (the port is taken, say) gets a warning and no failure, since the others have
    further sources.
options:
  state:
    description: V(present) starts it anew, with this token; V(absent) stops it.
    type: str
    choices: [present, absent]
    default: present
  repositories:
    description: >-
      What to pass on, each with C(repo), C(revision), C(allow_patterns) and C(ignore_patterns) as M(hf_snapshot) has
      them.
    type: list
    elements: dict
    default: []
  root:
    description: Folder that holds all models.
    type: path
    default: /var/lib/sglang/models
  group:
    description: Group of the files; the unit has no other right to read them.
    type: str
    default: root
  address:
    description: Address or name of this host that it listens on.
    type: str
  port:
    description: Port that it listens on.
    type: int
  token:
    description: Token that others have to show, of one run. Needed for V(present).
    type: str
  clients:
    description: >-
      Addresses, names or networks that may reach the port; systemd drops the packets of all others. Empty leaves that
      to the token alone.
    type: list
    elements: str
    default: []
  seconds:
    description: Seconds after which the unit stops by itself, should nobody be left to stop it.
    type: int
    default: 21600
  variables:
    description: What the person who reads a warning calls an option, as C(option) to C(variable).
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    details: Starts and stops nothing.
  diff_mode:
    support: none
    details: There is nothing that lasts.
author: dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Pass the target's weights on
  weights_peer:
    repositories:
      - repo: moonshotai/Kimi-K2.6
        revision: 0123456789abcdef0123456789abcdef01234567
        allow_patterns: []
        ignore_patterns: []
    group: sglang
    address: 10.0.0.11
    port: 18560
    token: "{{ token_of_this_run }}"
    clients: [10.0.0.12, 10.0.0.13]

- name: Stop it
  weights_peer:
    state: absent
"""

RETURN = r"""
running:
  description: Whether it runs now.
  returned: success
  type: bool
"""

import io
import json
import os
import shutil
import socket
import sys
import zipfile
from typing import Any

from ansible.module_utils import dflash_fleet
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import peer_server

UNIT = "dflash-fleet-weights-peer.service"
FOLDER = peer_server.FOLDER
# It reads files of one group and answers on one port: everything else is closed.
SANDBOX = """
DynamicUser=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
PrivateMounts=yes
ProtectProc=invisible
ProcSubset=pid
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
LockPersonality=yes
MemoryDenyWriteExecute=yes
RemoveIPC=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM
DevicePolicy=closed
UMask=0077
TasksMax=512
MemoryMax=1G
OOMScoreAdjust=500
TimeoutStopSec=5
"""


def program() -> bytes:
    """The server and what it imports as one file that Python runs."""
    archive = io.BytesIO()
    start = "import sys\nfrom dflash_fleet.peer_server import main\n\nsys.exit(main(sys.argv[1:]))\n"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("__main__.py", start)
        for name, module in sorted(sys.modules.items()):
            if name == dflash_fleet.__name__ or name.startswith(f"{dflash_fleet.__name__}."):
                file = "__init__" if module is dflash_fleet else name.rpartition(".")[2]
                loader: Any = module.__loader__
                packed.writestr(f"dflash_fleet/{file}.py", loader.get_source(name))
    return archive.getvalue()


def write(name: str, content: bytes, mode: int) -> str:
    path = os.path.join(FOLDER, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(content)
    os.chmod(path, mode)
    return path


def numeric(name: str) -> list[str]:
    """Addresses of a name; addresses and networks as they are."""
    if "/" in name:
        return [name]
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})


def properties(options: dict[str, Any], token: str) -> list[str]:
    """The unit's settings; `token` is a file."""
    lines = [line for line in SANDBOX.splitlines() if line]
    lines += [
        f"SupplementaryGroups={options['group']}",
        f"LoadCredential=token:{token}",
        f"RuntimeMaxSec={options['seconds']}",
    ]
    if options["clients"]:
        allowed = sorted({address for client in options["clients"] for address in numeric(client)})
        lines += ["IPAddressDeny=any", "IPAddressAllow=localhost", f"IPAddressAllow={' '.join(allowed)}"]
    return lines


def stop(module: AnsibleModule) -> bool:
    """Whether there was something to stop."""
    show = ["systemctl", "show", "--property=LoadState", "--value", UNIT]
    _code, state, _error = module.run_command(show, check_rc=True)
    loaded = state.strip() != "not-found"
    there = os.path.isdir(FOLDER)
    if module.check_mode:
        return loaded or there
    if loaded:
        module.run_command(["systemctl", "stop", UNIT], check_rc=True)
    if there:
        shutil.rmtree(FOLDER)
    return loaded or there


def can_listen(address: str, port: int) -> None:
    """Raises what the unit would die of, where a person sees it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind((address, port))


def start(module: AnsibleModule) -> None:
    """Raises OSError where it cannot be."""
    options = module.params
    address = numeric(options["address"])[0]
    can_listen(address, options["port"])
    os.mkdir(FOLDER, 0o755)
    os.chmod(FOLDER, 0o755)
    told = {
        "models": options["root"],
        "address": address,
        "port": options["port"],
        "repositories": options["repositories"],
    }
    file = write("peer.pyz", program(), 0o644)
    settings = write("settings.json", json.dumps(told, indent=1).encode(), 0o644)
    token = write("token", options["token"].encode(), 0o600)
    command = ["systemd-run", f"--unit={UNIT}", "--collect", "--quiet", "--service-type=notify"]
    command += ["--description=Weights for other hosts of the fleet, while a play runs"]
    command += [f"--property={line}" for line in properties(options, token)]
    code, _out, error = module.run_command([*command, "/usr/bin/python3", "-I", file, settings])
    if code != 0:
        raise OSError(f"{UNIT} did not start, its journal says why: {error.strip()}")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "repositories": {"type": "list", "elements": "dict", "default": []},
            "root": {"type": "path", "default": "/var/lib/sglang/models"},
            "group": {"type": "str", "default": "root"},
            "address": {"type": "str"},
            "port": {"type": "int"},
            "token": {"type": "str", "no_log": True},
            "clients": {"type": "list", "elements": "str", "default": []},
            "seconds": {"type": "int", "default": 21600},
            "variables": {"type": "dict", "default": {}},
        },
        required_if=[("state", "present", ("repositories", "address", "port", "token"))],
        supports_check_mode=True,
    )
    stopped = stop(module)
    if module.params["state"] == "absent" or module.check_mode:
        module.exit_json(changed=stopped or module.params["state"] == "present", running=False)
    try:
        start(module)
    except OSError as error:
        stop(module)
        where = " and ".join(f"{module.params['variables'].get(n, n)}={module.params[n]}" for n in ("address", "port"))
        text = f"passes no weights on with {where}, others have to go to their next source"
        module.warn(f"this host {text}: {error.strerror or error}")
        module.exit_json(changed=stopped, running=False)
    module.exit_json(changed=True, running=True)


if __name__ == "__main__":
    main()
