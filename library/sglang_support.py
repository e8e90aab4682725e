#!/usr/bin/python
# Copyright: dflash-fleet contributors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Install on a host what its units run themselves."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_support
short_description: Install the supervisor that units start their engine with
version_added: "0.1.0"
description:
  - Writes C(supervisor.py) (with its prober, the reporter of crashes and the measures for Prometheus) and the parts of
    the package C(dflash_fleet) that they need to C(/usr/local/lib/dflash-fleet/<version>/). The module
    carries them as its own imports, so one call is enough.
  - Files are replaced whole, and only where they differ. A running engine has long replaced its supervisor.
options:
  path:
    description: Folder of all versions.
    type: path
    default: /usr/local/lib/dflash-fleet
attributes:
  check_mode:
    support: full
    description: Predicts which files would be written.
  diff_mode:
    support: full
    description: Shows the names of the files.
  platform:
    platforms: Linux
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Install the supervisor
  sglang_support:
  become: true
  register: support

- name: Say where it is
  ansible.builtin.debug:
    var: support.supervisor
"""

RETURN = r"""
version:
  description: Version of dflash-fleet that was installed.
  type: str
  returned: always
  sample: 0.1.0
supervisor:
  description: The program that ExecStart= names.
  type: str
  returned: always
  sample: /usr/local/lib/dflash-fleet/0.1.0/supervisor.py
systemd:
  description: Version of the host's systemd, which decides about some lines of a unit.
  type: int
  returned: always
  sample: 257
written:
  description: Files that were (or would be) written.
  type: list
  elements: str
  returned: always
"""

import os
import pkgutil
import re
import tempfile
from pathlib import Path

from ansible.module_utils import dflash_fleet
from ansible.module_utils.basic import AnsibleModule

# Imported so that Ansible sends them along; their text is what gets installed.
from ansible.module_utils.dflash_fleet import (
    causes,
    deployed,
    diagnosis,
    gate,
    hostfacts,
    journal,
    ladder,
    measures,
    own_log,
    phases,
    prober,
    redact,
    redacting_logs,
    release,
    release_options,
    releases,
    remedies,
    reports,
    runfacts,
    state,
    supervisor,
    textfile,
    tracebacks,
    units,
    verdict,
    watch,
    words,
)

PARTS = (
    causes, deployed, diagnosis, gate, hostfacts, journal, ladder, measures, own_log, phases, prober, redact,
    redacting_logs, release, release_options, releases, remedies, reports, runfacts, state, textfile, tracebacks, units,
    verdict, watch, words,
)  # fmt: skip
FILES = {
    "supervisor.py": supervisor,
    "dflash_fleet/__init__.py": dflash_fleet,
    **{f"dflash_fleet/{part.__name__.rpartition('.')[2]}.py": part for part in PARTS},
}


def source(module: object) -> bytes:
    """The text of an imported module, also out of the archive that Ansible sends."""
    package = dflash_fleet.__name__
    file = os.path.basename(str(getattr(module, "__file__", "")))
    data = pkgutil.get_data(package, file)
    if data is None:
        raise RuntimeError(f"{package}: {file} cannot be read from {module}")
    return data


def systemd_version(module: AnsibleModule) -> int:
    """`systemd 257 (257.9-1~deb13u1)` as 257."""
    _code, out, _err = module.run_command(["systemctl", "--version"], check_rc=True)
    return int(re.match(r"systemd (\d+)", out)[1])


def main() -> None:
    """Compare and write."""
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "default": "/usr/local/lib/dflash-fleet"}}, supports_check_mode=True
    )
    folder = Path(module.params["path"], dflash_fleet.__version__)
    wanted = {folder / name: source(part) for name, part in FILES.items()}
    differing = [path for path, text in wanted.items() if not path.is_file() or path.read_bytes() != text]
    result = {
        "changed": bool(differing),
        "version": dflash_fleet.__version__,
        "supervisor": str(folder / "supervisor.py"),
        "systemd": systemd_version(module),
        "written": [str(path) for path in differing],
    }
    if differing:
        before = "".join(f"{path}\n" for path in differing if path.exists())
        result["diff"] = {"before": before, "after": "".join(f"{path} (new text)\n" for path in differing)}
    if module.check_mode:
        module.exit_json(**result)
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in (path.parent, folder, folder.parent):
            os.chmod(parent, 0o755)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(wanted[path])
            os.fchmod(out.fileno(), 0o644)
        os.replace(temporary, path)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
