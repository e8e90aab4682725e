#!/usr/bin/env python3
"""A small Hugging Face hub over plain HTTP, for demo and tests: it serves the repositories of `rehearsal/models.py`.

It speaks what the huggingface_hub client asks (revision, tree, HEAD and GET of a file with ranges, error codes, gated
repositories); files carry plain LFS entries, never Xet hashes. Standard library only, so it runs on any host or image.

    hub.py --root DIR [--bind 127.0.0.1] [--port 8090] [--token-file FILE [--gated]] [--faults FILE] [--log]

`DIR/<org>/<name>/<40-hex>/...` are a repository's revisions; `DIR/index.json` says which one `main` is. A file `.gated`
in `DIR/<org>/<name>/` makes the repository gated: it needs `Authorization: Bearer <token>` with a token of --token-file
(one a line); --gated does so for all. GET /__stats answers with what was asked so far, POST /__stats/reset forgets it.

Faults, for tests: a JSON list, read again at each request. Each entry is
`{"path": regex of "<repo>/<path>", "do": flip|truncate|cut|slow|whole|status|redirect, "at": byte, "status": 429,
"rate": bytes/s, "to": address, "times": n}`: flip inverts the byte at `at`; truncate serves a file of `at` bytes as if
it were whole; cut closes the connection after `at` bytes; slow limits the rate; whole ignores ranges; status answers
with an error; redirect sends to the same path at another address, as the real hub does for large files. `times` limits
how often (0: always).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = re.compile(r"[0-9a-f]{40}")
# What the hub keeps in LFS: its entries carry a SHA-256, the others a git blob hash.
LFS = re.compile(r"\.(safetensors|bin|pt|pth|gguf|model)$")
CHUNK = 1 << 16


def git_blob_sha1(data_file: Path) -> str:
    digest = hashlib.sha1(b"blob %d\0" % data_file.stat().st_size, usedforsecurity=False)
    with data_file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256(data_file: Path) -> str:
    digest = hashlib.sha256()
    with data_file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class HubError(Exception):
    """An answer that is not a file: status, the hub's error code, a sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Repositories:
    """The folder that is served. Hashes are kept as long as a file does not change."""

    def __init__(self, root: Path, tokens: frozenset[str] = frozenset(), gated: bool = False) -> None:
        self.root = root
        self.tokens = tokens
        self.gated = gated
        self._hashes: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def folder(self, repo: str, authorization: str | None) -> Path:
        folder = self.root / repo
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or ".." in repo or not folder.is_dir():
            # The real hub does not tell a stranger whether a repository is missing or private.
            raise HubError(404 if authorization else 401, "RepoNotFound", "Repository not found")
        if self.gated or (folder / ".gated").exists():
            scheme, _, token = (authorization or "").partition(" ")
            if scheme.lower() != "bearer":
                raise HubError(401, "GatedRepo", f"Access to model {repo} is restricted. You must be authenticated.")
            if token not in self.tokens:
                raise HubError(403, "GatedRepo", f"Access to model {repo} is restricted and you are not in its list.")
        return folder

    def revision(self, repo: str, folder: Path, name: str) -> tuple[str, Path]:
        if not COMMIT.fullmatch(name):
            try:
                index = json.loads((self.root / "index.json").read_text())
                name = index["repos"][repo][name]
            except (OSError, KeyError, ValueError):
                raise HubError(404, "RevisionNotFound", f"Invalid rev id: {name}")
        if not (folder / name).is_dir():
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {name}")
        return name, folder / name

    def entry(self, file: Path, path: str) -> dict[str, Any]:
        stat = file.stat()
        key = (str(file), stat.st_size, stat.st_mtime_ns)
        with self._lock:
            known = self._hashes.get(key)
        if known is None:
            known = {"type": "file", "path": path, "size": stat.st_size, "oid": git_blob_sha1(file)}
            if LFS.search(path):
                known["lfs"] = {"oid": sha256(file), "size": stat.st_size, "pointerSize": 134}
            with self._lock:
                self._hashes[key] = known
        return known

    def tree(self, folder: Path) -> list[dict[str, Any]]:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return [self.entry(p, p.relative_to(folder).as_posix()) for p in files]


class Faults:
    """Faults on request; `times` counts per entry as long as the file does not change."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._stamp: tuple[int, int, int] | None = None
        self._entries: list[dict[str, Any]] = []
        self._used: Counter[int] = Counter()
        self._lock = threading.Lock()

    def match(self, what: str, method: str) -> dict[str, Any]:
        """The first fault for this request, or {}. HEAD meets only errors, redirects and wrong sizes."""
        if self.file is None:
            return {}
        with self._lock:
            try:
                stat = self.file.stat()
                stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if stamp != self._stamp:
                    self._entries = json.loads(self.file.read_text())
                    self._used.clear()
                    self._stamp = stamp
            except (OSError, ValueError):
                return {}
            for number, fault in enumerate(self._entries):
                if not re.search(fault.get("path", ""), what):
                    continue
                if method == "HEAD" and fault["do"] not in ("truncate", "status", "redirect"):
                    continue
                if fault.get("times") and self._used[number] >= fault["times"]:
                    continue
                self._used[number] += 1
                return fault
        return {}


class Hub(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], repos: Repositories, faults: Faults, log: bool = False) -> None:
        super().__init__(address, Handler)
        self.repos = repos
        self.faults = faults
        self.log = log
        self.stats: Counter[str] = Counter()
        self.stats_lock = threading.Lock()

    def count(self, **amounts: int) -> None:
        with self.stats_lock:
            self.stats.update(amounts)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "dflash-fleet-rehearsal-hub"
    server: Hub
    timeout = 120

    def log_message(self, format: str, *args: Any) -> None:
        if self.server.log:
            super().log_message(format, *args)

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        if self.path == "/__stats/reset":
            with self.server.stats_lock:
                self.server.stats.clear()
            self._json({})
        else:
            self._error(HubError(404, "", "Not found"))

    def _handle(self) -> None:
        try:
            self._route(unquote(urlsplit(self.path).path))
        except HubError as error:
            self._error(error)

    def _route(self, path: str) -> None:
        if path == "/__stats":
            with self.server.stats_lock:
                self._json(dict(self.server.stats))
            return
        if path == "/__health":
            self._json({"ok": True})
            return
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/.*)?)?", path):
            repo, kind, name = match.group(1), match.group(2), match.group(3) or "main"
            self.server.count(requests=1, api=1)
            if fault := self.server.faults.match(f"{repo}/", self.command):
                self._meet(fault)
            folder = self.server.repos.folder(repo, self.headers.get("Authorization"))
            sha, tree = self.server.repos.revision(repo, folder, name)
            entries = self.server.repos.tree(tree)
            if kind == "tree":
                self._json(entries)
            else:
                siblings = [{"rfilename": e["path"]} for e in entries]
                self._json({"id": repo, "modelId": repo, "sha": sha, "siblings": siblings})
            return
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*match.groups())
            return
        raise HubError(404, "", "Not found")

    def _meet(self, fault: dict[str, Any]) -> None:
        if fault["do"] == "status":
            raise HubError(int(fault.get("status", 429)), str(fault.get("code", "")), "on request of a test")

    def _file(self, repo: str, revision: str, path: str) -> None:
        server = self.server
        server.count(requests=1, **{self.command.lower(): 1})
        if "Authorization" in self.headers:
            server.count(authorized=1)
        fault = server.faults.match(f"{repo}/{path}", self.command)
        if fault:
            server.count(faults=1)
            self._meet(fault)
        folder = server.repos.folder(repo, self.headers.get("Authorization"))
        sha, tree = server.repos.revision(repo, folder, revision)
        file = tree / path
        if ".." in path.split("/") or not file.is_file():
            raise HubError(404, "EntryNotFound", "Entry not found")
        entry = server.repos.entry(file, path)
        size = entry["size"]
        if fault.get("do") == "truncate":
            size = min(size, int(fault.get("at", 0)))
        if fault.get("do") == "redirect":
            self._redirect(str(fault["to"]), sha, entry)
            return
        start, end = 0, size
        status = 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and fault.get("do") != "whole":
            start = int(wanted.group(1))
            end = min(size, int(wanted.group(2)) + 1) if wanted.group(2) else size
            if start >= size or end <= start:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status = 206
            server.count(ranges=1)
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self._identify(sha, entry, size)
        self.end_headers()
        if self.command == "GET":
            self._send(file, start, end, fault)

    def _identify(self, sha: str, entry: dict[str, Any], size: int) -> None:
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", f'"{etag}"')
        if "lfs" in entry:
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("X-Linked-Size", str(size))

    def _redirect(self, address: str, sha: str, entry: dict[str, Any]) -> None:
        self.send_response(302)
        self.send_header("Location", address + self.path)
        self._identify(sha, entry, entry["size"])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, file: Path, start: int, end: int, fault: dict[str, Any]) -> None:
        do, at = fault.get("do"), int(fault.get("at", 0))
        rate = float(fault.get("rate", 0)) if do == "slow" else 0.0
        step = max(1, min(CHUNK, int(rate / 10))) if rate else CHUNK
        position = start
        try:
            with file.open("rb") as stream:
                stream.seek(start)
                while position < end:
                    chunk = bytearray(stream.read(min(step, end - position)))
                    if not chunk:
                        break
                    if do == "flip" and position <= at < position + len(chunk):
                        chunk[at - position] ^= 0xFF
                    if do == "cut" and position + len(chunk) > at:
                        chunk = chunk[: max(0, at - position)]
                        self.close_connection = True
                    self.wfile.write(chunk)
                    position += len(chunk)
                    self.server.count(bytes=len(chunk))
                    if self.close_connection and do == "cut":
                        return
                    if rate:
                        time.sleep(len(chunk) / rate)
        except OSError:  # the client is gone: what a killed download looks like from here
            self.close_connection = True

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, error: HubError) -> None:
        body = json.dumps({"error": str(error)}).encode()
        self.server.count(errors=1)
        self.send_response(error.status)
        if error.code:
            self.send_header("X-Error-Code", error.code)
        self.send_header("X-Error-Message", str(error))
        if error.status == 429:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def serve(
    root: Path,
    bind: str = "127.0.0.1",
    port: int = 0,
    tokens: frozenset[str] = frozenset(),
    faults: Path | None = None,
    log: bool = False,
    gated: bool = False,
) -> Hub:
    """A hub that is bound but does not serve yet: call `.serve_forever()`."""
    return Hub((bind, port), Repositories(root, tokens, gated), Faults(faults), log)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="folder of the repositories")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8090, help="port to listen on, 0 for a free one (%(default)s)")
    parser.add_argument("--token-file", type=Path, help="tokens that open gated repositories, one a line")
    parser.add_argument("--gated", action="store_true", help="every repository is gated")
    parser.add_argument("--faults", type=Path, help="JSON list of faults, for tests")
    parser.add_argument("--log", action="store_true", help="log each request")
    args = parser.parse_args(argv)
    tokens = frozenset(args.token_file.read_text().split()) if args.token_file else frozenset()
    hub = serve(args.root, args.bind, args.port, tokens, args.faults, args.log, args.gated)
    host, port = hub.server_address[:2]
    print(f"rehearsal hub on http://{host if isinstance(host, str) else host.decode()}:{port}", flush=True)
    try:
        hub.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
