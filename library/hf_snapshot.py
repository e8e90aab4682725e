#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""A repository of a Hugging Face hub at one revision, complete and verified on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: hf_snapshot
short_description: A repository of a Hugging Face hub at one revision, complete and verified on the host
description:
  - Has V(<root>/<org>--<name>/<revision>/) complete. The folder appears by one rename, after every file has been
    checked against the hub's own hash and a manifest (C(.dflash-fleet.json)) has been written; until then files gather
    in V(<revision>.partial), where a killed or failed run goes on.
  - Where the manifest agrees with sizes and times of the files, nothing is read and nothing is asked of the hub.
  - Files come through the real huggingface_hub client of O(python), whose word counts once the hash is right.
  - A damaged file of a published folder is replaced by a rename, so an engine that has it open keeps what it has.
  - The token reaches the client through a pipe. It is in no argument, environment or file.
options:
  environment:
    description: Environment variables for the client, such as C(https_proxy) and C(SSL_CERT_FILE).
    type: dict
    default: {}
  repo:
    description: Repository on the hub, V(org/name).
    type: str
    required: true
  revision:
    description: Commit, 40 hexadecimal digits. Branches and tags are refused, because they move.
    type: str
    required: true
  root:
    description: Folder that holds all models.
    type: path
    default: /var/lib/sglang/models
  python:
    description:
      - A Python that has the huggingface_hub client. Needed as soon as something is to be fetched.
      - Without it, check mode looks at the host alone and asks no hub.
    type: path
    default: ""
  endpoint:
    description: Hub or mirror, V(https://huggingface.co) where empty.
    type: str
    default: ""
  token:
    description: Access token, for gated and private repositories.
    type: str
    default: ""
  peers:
    description:
      - Addresses of M(weights_peer) on other hosts, which are asked one after the other before the hub. One that does
        not have a file yet is waited for as long as it is at work on it.
    type: list
    elements: str
    default: []
  peer_token:
    description: Token that the peers of this run want.
    type: str
    default: ""
  peer_workers:
    description:
      - Files that are fetched from a peer at the same time. With one, a file is passed on soonest; more help where one
        connection does not fill the link.
    type: int
    default: 1
  mirror:
    description:
      - A folder on this host that is laid out like O(root), such as an NFS mount or a disk, and is asked first. Its
        manifests say what is in it; every file is copied and verified.
    type: path
    default: ""
  hub:
    description: Whether the hub is asked for what neither O(mirror) nor O(peers) brought.
    type: bool
    default: true
  allow_patterns:
    description: Only files that match one of these patterns (as in the client). Empty means all.
    type: list
    elements: str
    default: []
  ignore_patterns:
    description: No file that matches one of these patterns.
    type: list
    elements: str
    default: []
  max_workers:
    description: Files that are fetched at the same time.
    type: int
    default: 8
  min_free_margin:
    description: Bytes that have to stay free on the filesystem when everything is there.
    type: int
    default: 0
  owner:
    description: Owner of folders and files.
    type: str
    default: root
  group:
    description: Group of folders and files, which the engine's user is in.
    type: str
    default: root
  mode:
    description: Mode of the files, octal digits in quotes.
    type: str
    default: "0640"
  directory_mode:
    description: Mode of the folders, octal digits in quotes.
    type: str
    default: "0750"
  timeout:
    description: Seconds that the whole fetch may take; V(0) is no limit. What is here by then stays for the next run.
    type: int
    default: 0
  stall_timeout:
    description: Seconds without a byte after which the fetch fails; V(0) is no limit.
    type: int
    default: 300
  verify:
    description:
      - V(manifest) compares sizes and times with the manifest and reads only files whose time differs.
      - V(full) reads and hashes every file, several at a time.
    type: str
    choices: [manifest, full]
    default: manifest
  slice:
    description:
      - Seconds after which this run ends with C(finished) false while the fetch goes on in a process of its own; the
        same task again, within five minutes, goes on watching. Set by the action plugin of the same name, which shows
        the progress; V(0) waits for the end.
    type: float
    default: 0
  xet:
    description:
      - Whether files that the hub keeps in Xet storage may come by that protocol. It is quicker, but a killed run
        starts such a file again from zero.
    type: bool
    default: true
  variables:
    description: What the person who reads an error calls an option, as C(option) to C(variable).
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    details: Asks the hub what would be fetched and whether there is room, and writes nothing.
  diff_mode:
    support: full
    details: Files and sizes before and after.
author: dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Have the target's weights
  hf_snapshot:
    repo: moonshotai/Kimi-K2.6
    revision: 0123456789abcdef0123456789abcdef01234567
    python: /opt/hf-client/bin/python
    group: sglang
    min_free_margin: 20000000000

- name: Read and hash every file again
  hf_snapshot:
    repo: moonshotai/Kimi-K2.6
    revision: 0123456789abcdef0123456789abcdef01234567
    python: /opt/hf-client/bin/python
    group: sglang
    verify: full
"""

RETURN = r"""
path:
  description: The folder, which an engine is started with.
  returned: always
  type: str
action:
  description: >-
    What was done, or would be: V(none), V(fetch), V(repair) (damaged or missing files replaced), V(adopt) (files
    that somebody else put there were verified), V(manifest) (times had changed, contents not), V(attributes) (owner
    or mode).
  returned: success
  type: str
files:
  description: Number of files; null where the hub could not be asked in check mode.
  returned: success
  type: int
bytes:
  description: Size of all files.
  returned: success
  type: int
fetched_bytes:
  description: Bytes that came over the network in this run.
  returned: success
  type: int
to_fetch_bytes:
  description: Bytes that a real run would fetch; null where the hub could not be asked.
  returned: check mode
  type: int
seconds:
  description: Duration.
  returned: success
  type: float
source:
  description: The address or folder that the last files came from.
  returned: success, outside of check mode
  type: str
verified:
  description: V(stat) where sizes and times agreed with the manifest, V(hash) where contents were read.
  returned: success
  type: str
finished:
  description: Whether this is the result, or only how far it is.
  returned: with O(slice)
  type: bool
progress:
  description: >-
    How far it is: C(repo), C(step) (V(list), V(fetch), V(verify)), C(seconds), C(done_bytes), C(total_bytes),
    C(percent), C(bytes_per_second), C(remaining) seconds.
  returned: with O(slice), while not finished
  type: dict
kind:
  description: What kind of failure it was, for example V(gated), V(disk_full), V(network).
  returned: failure
  type: str
"""

import functools
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import peers, snapshot


def octal(module: AnsibleModule, option: str) -> int:
    text = module.params[option]
    if not (text.isdigit() and len(text) in (3, 4) and set(text) <= set("01234567")):
        module.fail_json(msg=f"{option} is {text!r}: write octal digits in quotes, for example '0640'", kind="mode")
    return int(text, 8)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "repo": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/var/lib/sglang/models"},
            "python": {"type": "path", "default": ""},
            "endpoint": {"type": "str", "default": ""},
            "token": {"type": "str", "default": "", "no_log": True},
            "peers": {"type": "list", "elements": "str", "default": []},
            "peer_token": {"type": "str", "default": "", "no_log": True},
            "peer_workers": {"type": "int", "default": 1},
            "mirror": {"type": "path", "default": ""},
            "hub": {"type": "bool", "default": True},
            "allow_patterns": {"type": "list", "elements": "str", "default": []},
            "ignore_patterns": {"type": "list", "elements": "str", "default": []},
            "max_workers": {"type": "int", "default": 8},
            "min_free_margin": {"type": "int", "default": 0},
            "owner": {"type": "str", "default": "root"},
            "group": {"type": "str", "default": "root"},
            "mode": {"type": "str", "default": "0640"},
            "directory_mode": {"type": "str", "default": "0750"},
            "timeout": {"type": "int", "default": 0},
            "stall_timeout": {"type": "int", "default": 300},
            "verify": {"type": "str", "choices": ["manifest", "full"], "default": "manifest"},
            "slice": {"type": "float", "default": 0},
            "xet": {"type": "bool", "default": True},
            "variables": {"type": "dict", "default": {}},
            "environment": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    options: dict[str, Any] = module.params
    # The client inherits it. An argument and no environment of the task, since that one stands in a command line.
    os.environ.update({str(name): str(value) for name, value in options["environment"].items()})
    # The package's name for a setting -> what the person calls it.
    settings = {
        "repo": "repo",
        "revision": "revision",
        "root": "root",
        "python": "python",
        "endpoint": "endpoint",
        "token": "token",
        "peers": "peers",
        "mirror": "mirror",
        "peer_token": "peer_token",
        "allow": "allow_patterns",
        "ignore": "ignore_patterns",
        "workers": "max_workers",
        "margin": "min_free_margin",
        "owner": "owner",
        "group": "group",
        "timeout": "timeout",
        "stall": "stall_timeout",
    }
    request = snapshot.Request(
        repo=options["repo"],
        revision=options["revision"],
        root=options["root"],
        python=options["python"],
        endpoint=options["endpoint"].rstrip("/"),
        token=options["token"].strip(),
        allow=options["allow_patterns"],
        ignore=options["ignore_patterns"],
        workers=options["max_workers"],
        margin=options["min_free_margin"],
        owner=options["owner"],
        group=options["group"],
        mode=octal(module, "mode"),
        directory_mode=octal(module, "directory_mode"),
        timeout=options["timeout"],
        stall=options["stall_timeout"],
        full=options["verify"] == "full",
        xet=options["xet"],
        names={setting: str(options["variables"].get(option, option)) for setting, option in settings.items()},
    )
    sources = peers.Sources(
        mirror=options["mirror"],
        peers=tuple(options["peers"]),
        token=options["peer_token"],
        workers=options["peer_workers"],
        hub=options["hub"],
    )
    try:
        fetch = functools.partial(peers.ensure, given=sources)
        if options["slice"]:
            result = snapshot.ensure_in_slices(
                request,
                options["slice"],
                check=module.check_mode,
                warn=module.warn,
                fetch=fetch,
                fetch_key=sources.fingerprint(),
            )
        else:
            result = fetch(request, check=module.check_mode, warn=module.warn)
    except snapshot.SnapshotError as error:
        facts = {k: v for k, v in error.facts.items() if v is not None}
        module.fail_json(msg=str(error), kind=error.kind, path=request.path, **facts)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
