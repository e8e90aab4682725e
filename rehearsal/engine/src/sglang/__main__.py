"""`python -m sglang serve ...`: the same as the console script."""

from __future__ import annotations

from .cli import main

main()
