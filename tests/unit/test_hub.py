"""The rehearsal hub's protocol, asked directly and through the real client."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "a" * 40
TOKEN = "hf_secret"
SHARD = bytes(range(256)) * 40


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"rehearsal_{name}", ROOT / "rehearsal" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


hub_module = load("hub")


class Asker:
    def __init__(self, hub: Any, faults: Path) -> None:
        self.hub = hub
        self.port = hub.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.faults = faults

    def __call__(self, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        try:
            body = response.read()
        except http.client.IncompleteRead as cut:
            body = cut.partial
        connection.close()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, body


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Asker]:
    root = tmp_path / "repos"
    for repo in ("org/open", "org/closed"):
        folder = root / repo / COMMIT
        (folder / "sub").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "sub" / "model.safetensors").write_bytes(SHARD)
    (root / "org/closed/.gated").touch()
    (root / "index.json").write_text(json.dumps({"schema": 1, "repos": {"org/open": {"main": COMMIT}}}))
    faults = tmp_path / "faults.json"
    hub = hub_module.serve(root, tokens=frozenset([TOKEN]), faults=faults)
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    yield Asker(hub, faults)
    hub.shutdown()
    hub.server_close()


def test_revision_and_tree(ask: Asker) -> None:
    for name in ("main", COMMIT):
        status, _headers, body = ask("GET", f"/api/models/org/open/revision/{name}")
        assert status == 200
        assert json.loads(body)["sha"] == COMMIT
    status, _headers, body = ask("GET", f"/api/models/org/open/tree/{COMMIT}?recursive=true&expand=false")
    by_path = {entry["path"]: entry for entry in json.loads(body)}
    assert set(by_path) == {"config.json", "sub/model.safetensors"}
    assert "lfs" not in by_path["config.json"]
    assert by_path["config.json"]["oid"] == hashlib.sha1(b"blob 2\0{}").hexdigest()
    assert by_path["sub/model.safetensors"]["lfs"]["oid"] == hashlib.sha256(SHARD).hexdigest()
    assert by_path["sub/model.safetensors"]["size"] == len(SHARD)


def test_head_get_and_ranges(ask: Asker) -> None:
    path = f"/org/open/resolve/{COMMIT}/sub/model.safetensors"
    status, headers, body = ask("HEAD", path)
    assert (status, body) == (200, b"")
    assert headers["x-repo-commit"] == COMMIT
    assert headers["etag"] == headers["x-linked-etag"] == f'"{hashlib.sha256(SHARD).hexdigest()}"'
    assert headers["x-linked-size"] == headers["content-length"] == str(len(SHARD))
    assert ask("GET", path)[2] == SHARD
    status, headers, body = ask("GET", path, Range="bytes=100-")
    assert (status, body) == (206, SHARD[100:])
    assert headers["content-range"] == f"bytes 100-{len(SHARD) - 1}/{len(SHARD)}"
    assert ask("GET", path, Range="bytes=5-9")[2] == SHARD[5:10]
    assert ask("GET", path, Range=f"bytes={len(SHARD)}-")[0] == 416
    assert "x-linked-etag" not in ask("HEAD", "/org/open/resolve/main/config.json")[1]


@pytest.mark.parametrize(
    ("path", "token", "status", "code"),
    [
        ("/api/models/org/nothing", None, 401, "RepoNotFound"),
        ("/api/models/org/nothing", TOKEN, 404, "RepoNotFound"),
        ("/api/models/org/../org/revision/main", TOKEN, 404, None),
        (f"/api/models/org/open/tree/{'b' * 40}", None, 404, "RevisionNotFound"),
        ("/api/models/org/open/revision/dev", None, 404, "RevisionNotFound"),
        (f"/org/open/resolve/{COMMIT}/nothing.json", None, 404, "EntryNotFound"),
        (f"/org/open/resolve/{COMMIT}/../../open/x", None, 404, "EntryNotFound"),
        (f"/org/closed/resolve/{COMMIT}/config.json", None, 401, "GatedRepo"),
        (f"/org/closed/resolve/{COMMIT}/config.json", "other", 403, "GatedRepo"),
        (f"/org/closed/resolve/{COMMIT}/config.json", TOKEN, 200, None),
        ("/api/agent-harnesses", None, 404, None),
    ],
)
def test_answers_other_than_files(ask: Asker, path: str, token: str | None, status: int, code: str | None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    got, answer, _body = ask("GET", path, **headers)
    assert got == status
    assert answer.get("x-error-code") == code


def test_faults(ask: Asker) -> None:
    path = f"/org/open/resolve/{COMMIT}/sub/model.safetensors"

    def fault(**entry: Any) -> None:
        fresh = ask.faults.with_suffix(".new")
        fresh.write_text(json.dumps([{"path": "sub/model", **entry}]))
        fresh.replace(ask.faults)

    fault(do="flip", at=3, times=1)
    assert ask("GET", path)[2] == SHARD[:3] + bytes([SHARD[3] ^ 0xFF]) + SHARD[4:]
    assert ask("GET", path)[2] == SHARD
    fault(do="truncate", at=100)
    assert ask("GET", path)[2] == SHARD[:100]
    assert ask("HEAD", path)[1]["x-linked-size"] == "100"
    fault(do="cut", at=2000)
    assert ask("GET", path)[2] == SHARD[:2000]
    fault(do="redirect", to="http://elsewhere:1")
    for method in ("HEAD", "GET"):
        status, headers, _body = ask(method, path)
        assert (status, headers["location"]) == (302, f"http://elsewhere:1{path}")
        assert headers["x-linked-size"] == str(len(SHARD))
    fault(do="status", status=429)
    status, headers, _body = ask("GET", path)
    assert (status, headers["retry-after"]) == (429, "1")
    assert ask("GET", f"/org/open/resolve/{COMMIT}/config.json")[0] == 200


def test_stats(ask: Asker) -> None:
    ask("GET", f"/org/open/resolve/{COMMIT}/config.json")
    ask("HEAD", f"/org/open/resolve/{COMMIT}/config.json")
    assert json.loads(ask("GET", "/__stats")[2]) == {"requests": 2, "get": 1, "head": 1, "bytes": 2}
    ask("POST", "/__stats/reset")
    assert json.loads(ask("GET", "/__stats")[2]) == {}


def test_the_real_client(ask: Asker, tmp_path: Path) -> None:
    """`hf download` by branch, as a person would; then the client's own verification."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env.update(HF_ENDPOINT=ask.url, HF_HOME=str(tmp_path / "home"), HF_TOKEN=TOKEN, HF_HUB_DISABLE_TELEMETRY="1")
    program = (
        "import sys, huggingface_hub as h;"
        "print(h.snapshot_download('org/open', local_dir=sys.argv[1]));"
        f"print(h.snapshot_download('org/closed', revision='{COMMIT}', local_dir=sys.argv[2]))"
    )
    folders = [tmp_path / "open", tmp_path / "closed"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, folders)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for folder in folders:
        assert (folder / "sub" / "model.safetensors").read_bytes() == SHARD


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "repos").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "rehearsal" / "hub.py"), "--root", str(tmp_path / "repos"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/__health")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        process.terminate()
        process.wait()
