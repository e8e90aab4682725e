"""The console script `sglang`: `serve` and `version`."""

from __future__ import annotations

import argparse
import sys

from .version import __version__


def main() -> None:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="sglang")
    commands = parser.add_subparsers(dest="subcommand", required=True)
    commands.add_parser("serve", help="Launch a rehearsal of an SGLang server.", add_help=False)
    commands.add_parser("version", help="Show the version.")
    args, rest = parser.parse_known_args()
    if args.subcommand == "version":
        print(f"sglang version: {__version__}")
        return
    if not any(word in ("-h", "--help") or word.split("=")[0] in ("--model-path", "--model") for word in rest):
        # Real SGLang looks for the path before it merges --config, so a path in that file does not count.
        raise Exception("Error: --model-path is required. Please provide the path to the model.")
    from ._rehearsal.parent import run

    sys.exit(run(rest))
