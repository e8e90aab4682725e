"""--check --diff on a deployed fleet: nothing where nothing would change, and the very lines where something would."""

from __future__ import annotations

import re

import controller


def changes(output):
    """Changes per host, from Ansible's recap."""
    return {name: int(count) for name, count in re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", output, re.M)}


def test_no_change_is_predicted():
    output = controller.deploy(__file__, "--check", "--diff")
    assert changes(output) == {"rehearsal-01": 0, "rehearsal-02": 0}


def test_another_profile_shows_its_lines_and_the_restart():
    output = controller.deploy(__file__, "--check", "--diff", "-e", "sglang_profile=ep4")
    assert changes(output) == {"rehearsal-01": 1, "rehearsal-02": 1}
    assert "--- before: sglang-main-ep8.service" in output
    assert "+++ after: sglang-main-ep4.service  (restart: sglang-main-ep4.service)" in output
    assert re.search(r"^-\s+--ep-size 8", output, re.M)
    assert re.search(r"^\+\s+--ep-size 4", output, re.M)
    # What stays the same is no change.
    assert not re.search(r"^[-+]\s+--tp-size", output, re.M)
