"""The version string: the imitated release with the local label `+rehearsal`."""

from __future__ import annotations

from ._rehearsal.releases import RELEASE

__version__ = RELEASE + "+rehearsal"
