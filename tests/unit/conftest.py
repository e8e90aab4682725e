"""Put the project's modules and module_utils on the path, as ansible.cfg does for Ansible."""

from __future__ import annotations

import sys
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[2]

for folder in (ROOT / "module_utils", ROOT / "library", ROOT / "filter_plugins"):
    sys.path.insert(0, str(folder))
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
