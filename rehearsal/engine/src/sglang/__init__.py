"""Rehearsal stand-in for SGLang. It imitates one release's outside and computes nothing."""

from __future__ import annotations

from .version import __version__

__all__ = ["__version__"]
