"""Prometheus and promtool for the tests: those of the machine, else Debian's package, unpacked and not installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "rehearsal"))

import fleet  # noqa: E402 - found by the line above

NAMES = ("prometheus", "promtool")


def programs() -> Path:
    """The folder with both programs. Installing the package would start a service; so it is only unpacked."""
    found = [shutil.which(name) for name in NAMES]
    if all(found):
        return Path(str(found[0])).parent
    folder = fleet.cache_dir() / "prometheus"
    with fleet.locked("prometheus", "another run that unpacks Prometheus"):
        if not all((folder / "usr/bin" / name).exists() for name in NAMES):
            _unpack(folder)
    return folder / "usr" / "bin"


def _unpack(folder: Path) -> None:
    if not shutil.which("apt-get"):
        raise RuntimeError("neither prometheus and promtool nor apt-get are on this machine: install Prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        fetch = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
        done = subprocess.run(fetch, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:  # no lists yet, or old ones
            subprocess.run(["apt-get", "-q", "update"], capture_output=True, check=False)
            done = subprocess.run(fetch, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"apt-get download prometheus failed:\n{done.stdout}{done.stderr}")
        (package,) = Path(place).glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True, capture_output=True)


def promtool(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One call of promtool; its status is the caller's to judge."""
    command = [str(programs() / "promtool"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


class Server:
    """A Prometheus that answers queries."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def get(self, path: str, **arguments: str) -> Any:
        """The data of one call of its API."""
        url = f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str, at: float) -> list[dict[str, Any]]:
        """The instant vector of an expression."""
        found: list[dict[str, Any]] = self.get("query", query=expression, time=str(at))["result"]
        return found


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(folder: Path, configuration: str, data: Path | None = None) -> Iterator[Server]:
    """A Prometheus of this configuration, and with these blocks of data, until the end of the block."""
    (folder / "prometheus.yml").write_text(configuration, encoding="utf-8")
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(programs() / "prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={data or folder / 'data'}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )  # fmt: skip
        server = Server(port)
        try:
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{server.address}/-/ready", timeout=2).close()
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "prometheus.log").read_text(encoding="utf-8")[-2000:])
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            process.wait(20)
