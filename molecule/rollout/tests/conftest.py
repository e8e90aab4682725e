"""PART=front_door runs the first file alone, on three of the hosts: what every change must pass."""

import os

collect_ignore = ["test_rollout.py"] if os.environ.get("PART") == "front_door" else []
