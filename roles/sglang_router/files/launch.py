"""Starts SGLang's router with what must not stand in its arguments: keys, and the workers that are in rotation now.

    python launch.py DIRECTORY OPTION...

DIRECTORY holds workers.json and, for each address that was taken out, a file in drained/. Keys and certificate come as
systemd credentials. Runs in the router's own environment, with nothing of dflash-fleet beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from sglang_router.launch_router import launch_router, parse_router_args


def rotation(directory: Path) -> list[str]:
    """The workers that nobody has taken out. Without a list yet, none: role sglang_router brings it."""
    try:
        workers = json.loads((directory / "workers.json").read_text(encoding="utf-8"))["workers"]
    except FileNotFoundError:
        return []
    out = {json.loads(path.read_text(encoding="utf-8"))["url"] for path in (directory / "drained").glob("*.json")}
    return [url for url in workers if url not in out]


def credential(name: str) -> str:
    """A credential's text; empty where the unit has none of that name."""
    try:
        return Path(os.environ["CREDENTIALS_DIRECTORY"], name).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def main(words: list[str]) -> None:
    """Ends with the router."""
    directory, options = Path(words[0]), words[1:]
    workers = rotation(directory)
    if workers:
        options += ["--worker-urls", *workers]
    if credential("tls_key"):
        folder = os.environ["CREDENTIALS_DIRECTORY"]
        options += ["--tls-cert-path", f"{folder}/tls_certificate", "--tls-key-path", f"{folder}/tls_key"]
    arguments = parse_router_args(options)
    arguments.api_key = credential("api_key") or None
    arguments.control_plane_api_keys = [("dflash-fleet", "dflash-fleet", credential("control_key"), "admin")]
    print(f"dflash-fleet: starting with {len(workers)} workers: {', '.join(workers) or 'none yet'}", flush=True)
    launch_router(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
