"""Put the project's modules and module_utils on the path, as ansible.cfg does for Ansible."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ansible.module_utils
import hypothesis

ROOT = Path(__file__).resolve().parents[2]

for folder in (ROOT / "module_utils", ROOT / "library", ROOT / "filter_plugins"):
    sys.path.insert(0, str(folder))
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

# On a person's machine the property tests look for new cases; in CI they are the same each time, and a busy machine is
# no reason to fail.
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
