"""Build hooks: the release to imitate comes from REHEARSAL_RELEASE and is baked into the wheel."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SHAPE = re.compile(r"^0\.5\.(1[1-9]|2[0-3])(\.post\d+)?$")
DEFAULT = "0.5.23"


def release() -> str:
    """The release asked for; refused here when the engine has no rules for it."""
    wanted = os.environ.get("REHEARSAL_RELEASE", DEFAULT).strip()
    if not SHAPE.match(wanted):
        raise ValueError(f"REHEARSAL_RELEASE={wanted!r}: expected a release between 0.5.11 and 0.5.23")
    return wanted


class ReleaseMetadata(MetadataHookInterface):
    """Gives the wheel the version `<release>+rehearsal`."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["version"] = release() + "+rehearsal"


class ReleaseModule(BuildHookInterface):
    """Adds `sglang/_release.py`, so that the engine knows its release without reading metadata."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # Written outside the source tree: a build leaves nothing behind in it.
        self.folder = tempfile.TemporaryDirectory(prefix="rehearsal-engine-")
        module = Path(self.folder.name) / "_release.py"
        module.write_text(f'"""The release this wheel imitates."""\n\nRELEASE = "{release()}"\n', encoding="utf-8")
        build_data["force_include"][str(module)] = "sglang/_release.py"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()


def get_metadata_hook() -> type[MetadataHookInterface]:
    return ReleaseMetadata


def get_build_hook() -> type[BuildHookInterface]:
    return ReleaseModule
