"""What tests of interrupted installations ask a host: trees to compare, and things that go wrong beside a play."""

from __future__ import annotations

import json
import re
from typing import Any

# Names, kinds, modes, owners and contents of everything in a folder; of files that a pattern names no contents.
TREE = r"""
import hashlib, json, os, re, stat, sys
root, nameless, out = sys.argv[1], sys.argv[2], {}
for folder, folders, files in os.walk(root):
    for name in folders + files:
        path = os.path.join(folder, name)
        about = os.lstat(path)
        kind = "link " + os.readlink(path) if stat.S_ISLNK(about.st_mode) else ""
        if stat.S_ISREG(about.st_mode) and not re.search(nameless, name):
            kind = hashlib.sha256(open(path, "rb").read()).hexdigest()
        out[os.path.relpath(path, root)] = [stat.filemode(about.st_mode), about.st_uid, about.st_gid, kind]
print(json.dumps(out))
"""


def sh(host: Any, command: str, rc: int = 0) -> str:
    """Run as root; it must end with `rc`."""
    with host.sudo():
        done = host.run(command)
    assert done.rc == rc, f"{command}\n{done.stdout}{done.stderr}"
    return str(done.stdout)


def python(host: Any, code: str, *arguments: str) -> str:
    """Run Python as root; it must succeed."""
    with host.sudo():
        done = host.run("python3 -c %s" + " %s" * len(arguments), code, *arguments)
    assert done.rc == 0, done.stderr
    return str(done.stdout)


def background(host: Any, unit: str, script: str) -> None:
    """Run a script beside what comes next; from a file, since systemd would read the dollars in it as its own."""
    python(host, "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", f"/run/{unit}.sh", script)
    sh(host, f"systemd-run --unit={unit} --collect sh /run/{unit}.sh")


def tree(host: Any, folder: str, without_contents: str) -> dict[str, list[Any]]:
    """What is in a folder. `without_contents` matches names of files that hold times, of which only the names count."""
    found = dict(json.loads(python(host, TREE, folder, without_contents)))
    assert found, folder
    return found


def changed(output: str, host: str) -> int:
    """Tasks that changed a host, from Ansible's recap."""
    match = re.search(rf"^{re.escape(host)}\s.*changed=(\d+)", output, re.M)
    assert match, output
    return int(match[1])
