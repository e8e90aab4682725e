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

# A busy machine is no reason to fail. On a person's machine the property tests look for new cases, in CI they are the
# same each time.
hypothesis.settings.register_profile("person", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("person"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "person")
