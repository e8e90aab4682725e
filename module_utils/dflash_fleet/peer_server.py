"""Passes verified weights of this host on to others: what the huggingface_hub client needs of a hub.

The client of another host gets this server as its endpoint and a token of one run (`peers.py`). What it may ask:

    HEAD, GET /api/models/<repo>                       whether it is here
    GET       /api/models/<repo>/tree/<revision>       files with sizes and hashes
    GET       /api/models/<repo>/here/<revision>       which of them are here by now (of a peer alone; no hub has it)
    HEAD, GET /<repo>/resolve/<revision>/<path>        one file, whole or from a byte on

Only repositories and revisions that the server was told to pass on, each file only once this host has verified it. A
file that is still being fetched here is waited for: after a few seconds the answer is 425, ask again. Where no fetch is
at work on this host any more, what is missing is not coming: 404, and the other host turns to its next source.

A path of a request is looked up in the list of files and never joined to a folder, so there is no way out of it.

`main` is the program of a transient unit (library/weights_peer.py), which packs it with `snapshot.py` into one file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from . import snapshot

# The client gives a question 10 s.
HOLD_SECONDS = 4.0
LOOK_SECONDS = 0.05
# A host that is not fetching may be about to: between two repositories, or before the first one. One whose fetch has
# failed says so at once, by a mark in the unit's folder.
GRACE_SECONDS = 60.0
FOLDER = "/run/dflash-fleet-peer"
IDLE_SECONDS = 60
TOO_EARLY = 425
API = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/(tree|here)/([0-9a-f]{40})/?)?")
AFTER = re.compile(r"after=(\d{1,9})")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")

T = TypeVar("T")


def mark(folder: str, repo: str, revision: str) -> str:
    """The file that says that a fetch on this host has failed."""
    return os.path.join(folder, f"failed-{repo.replace('/', '--')}-{revision}")


class Refusal(Exception):
    """An answer without content: status, and the hub's code for it."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code


class Shelf:
    """One repository at one revision, as far as this host has it."""

    def __init__(self, models: str, wanted: dict[str, Any], folder: str) -> None:
        self.mark = mark(folder, wanted["repo"], wanted["revision"]) if folder else ""
        self.request = snapshot.Request(
            repo=wanted["repo"],
            revision=wanted["revision"],
            root=models,
            python="",
            allow=wanted["allow_patterns"],
            ignore=wanted["ignore_patterns"],
        )
        self.request.validate()
        self._listing: dict[str, dict[str, Any]] | None = None
        self._verified: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._lock = threading.Lock()  # what one thread saw first, another must not find missing

    def listing(self) -> dict[str, dict[str, Any]] | None:
        """{path: size and hashes} of all files of the revision, None while this host does not know them."""
        if self._listing is None:
            request = self.request
            found = snapshot.read_manifest(request.path) or snapshot.read_listing(request.stage)
            if found is not None and snapshot.same_selection(request, found):
                self._listing = {f["path"]: f for f in found["files"] if snapshot.safe_path(f["path"])}
        return self._listing

    def _news(self, file: str) -> bool:
        """Whether a file is another one than at the last look."""
        try:
            info = os.stat(file)
        except OSError:
            return False
        seen = (info.st_ino, info.st_size, info.st_mtime_ns)
        changed = self._seen.get(file) != seen
        self._seen[file] = seen
        return changed

    def _look(self) -> None:
        request = self.request
        if self._news(os.path.join(request.stage, snapshot.VERIFIED)):
            self._verified.update(snapshot.read_verified(request.stage))
        if self._news(os.path.join(request.path, snapshot.MANIFEST)):
            manifest = snapshot.read_manifest(request.path)
            if manifest is not None and snapshot.same_selection(request, manifest):
                self._verified.update({f["path"]: f for f in manifest["files"]})

    def here(self, after: int) -> list[str] | None:
        """Paths of verified files, the earliest first, None while there are no more than `after`."""
        with self._lock:
            self._look()
            paths = list(self._verified)
        known = self.listing() or {}
        paths = [path for path in paths if path in known]
        return paths if len(paths) > after else None

    def open(self, path: str) -> int | None:
        """A descriptor of a file that was verified and is as it was then, None while there is none."""
        with self._lock:
            self._look()
            record = self._verified.get(path)
        if record is None:
            return None
        # The stage becomes the folder by a rename, at any time.
        for folder in (self.request.path, self.request.stage, self.request.path):
            try:
                descriptor = os.open(os.path.join(folder, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            info = os.fstat(descriptor)
            if (info.st_size, info.st_mtime_ns) == (record["size"], record["mtime_ns"]):
                return descriptor
            os.close(descriptor)
        return None

    def failed(self) -> bool:
        """Whether the fetch on this host has ended without it."""
        return bool(self.mark) and os.path.exists(self.mark)

    def busy(self) -> bool:
        """Whether a fetch of this repository is at work: it holds a lock on the folder."""
        try:
            descriptor = os.open(self.request.home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False  # a filesystem without locks; whether something is coming shows in the grace alone
        finally:
            os.close(descriptor)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    # Another run's server may have ended a moment ago.
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        models: str,
        repositories: list[dict[str, Any]],
        token: str,
        waits: bool = True,
        folder: str = "",
    ) -> None:
        """`waits`: whether what is not here may still come; `folder`: where failed fetches leave a mark."""
        if len(token) < 20:
            raise ValueError("the token is too short to keep anybody out")
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.shelves = {(r["repo"], r["revision"]): Shelf(models, r, folder) for r in repositories}
        self.authorization = f"Bearer {token}".encode()
        self.waits = waits
        self.lock = threading.Lock()
        self.hope: float | None = None  # until when something that is not here may still come, once asked for
        super().__init__(address, Handler)
        if waits:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Hope lasts as long as a fetch is at work here, and a while longer."""
        while True:
            if any(shelf.busy() for shelf in self.shelves.values()):
                self._extend_hope()
            time.sleep(0.5)

    def _extend_hope(self) -> None:
        with self.lock:
            self.hope = time.monotonic() + GRACE_SECONDS

    def hopeful(self) -> bool:
        if self.hope is None:
            self._extend_hope()
        assert self.hope is not None
        return self.waits and time.monotonic() < self.hope

    def wait_for(self, shelf: Shelf, look: Callable[[], T | None], code: str = "EntryNotFound") -> T:
        deadline = time.monotonic() + HOLD_SECONDS
        while True:
            found = look()
            if found is not None:
                return found
            if shelf.failed() or not self.hopeful():
                raise Refusal(404, code)
            if time.monotonic() > deadline:
                raise Refusal(TOO_EARLY)
            time.sleep(LOOK_SECONDS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "dflash-fleet-peer"
    sys_version = ""
    server: Server
    timeout = IDLE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Each file of each host would be a line of the journal."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        try:
            given = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self.server.authorization):
                print(f"refused {self.client_address[0]}: no token, or a wrong one", file=sys.stderr, flush=True)
                raise Refusal(401)
            asked = urlsplit(self.path)
            self._route(unquote(asked.path), asked.query)
        except Refusal as refusal:
            self.send_response(refusal.status)
            if refusal.code:
                self.send_header("X-Error-Code", refusal.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _route(self, path: str, query: str) -> None:
        server = self.server
        if match := API.fullmatch(path):
            repo, what, revision = match.groups()
            if repo not in {name for name, _revision in server.shelves}:
                raise Refusal(404, "RepoNotFound")
            if what is None:
                self._json({"id": repo})
            elif what == "tree":
                self._json(self._tree(self._shelf(repo, revision)))
            else:
                self._json(self._here(self._shelf(repo, revision), query))
        elif match := FILE.fullmatch(path):
            repo, revision, file = match.groups()
            self._file(self._shelf(repo, revision), file)
        else:
            raise Refusal(404)

    def _shelf(self, repo: str, revision: str) -> Shelf:
        shelf = self.server.shelves.get((repo, revision))
        if shelf is None:
            raise Refusal(404, "RevisionNotFound")
        return shelf

    def _tree(self, shelf: Shelf) -> list[dict[str, Any]]:
        entries = []
        for path, file in self.server.wait_for(shelf, shelf.listing, "RevisionNotFound").items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": file["size"], "oid": file.get("sha1", "")}
            if file["sha256"]:
                entry["lfs"] = {"oid": file["sha256"], "size": file["size"], "pointerSize": 0}
            entries.append(entry)
        return entries

    def _here(self, shelf: Shelf, query: str) -> list[str]:
        match = AFTER.fullmatch(query)
        after = int(match.group(1)) if match else 0
        return self.server.wait_for(shelf, lambda: shelf.here(after))

    def _file(self, shelf: Shelf, path: str) -> None:
        entry = self.server.wait_for(shelf, shelf.listing, "RevisionNotFound").get(path)
        if entry is None:
            raise Refusal(404, "EntryNotFound")
        with open(self.server.wait_for(shelf, lambda: shelf.open(path)), "rb") as stream:
            self._send(stream, shelf.request.revision, entry)

    def _send(self, stream: Any, revision: str, entry: dict[str, Any]) -> None:
        size = int(entry["size"])
        start, end = 0, size
        wanted = RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted:
            start = int(wanted.group(1))
            end = min(size, int(wanted.group(2)) + 1) if wanted.group(2) else size
            if start >= end:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.send_header("X-Repo-Commit", revision)
        self.send_header("ETag", f'"{entry["sha256"] or entry["sha1"]}"')
        self.end_headers()
        if self.command == "GET" and end > start:
            try:
                self.connection.sendfile(stream, start, end - start)
            except OSError:  # the other host is gone, or takes nothing any more
                self.close_connection = True

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def notify(text: str) -> None:
    """Tell systemd (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)) as out:
            out.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)


def main(argv: list[str]) -> int:
    """`argv`: a file that says what to pass on, where to listen; the token is a credential of the unit."""
    with open(argv[0], encoding="utf-8") as stream:
        told = json.load(stream)
    with open(os.path.join(os.environ["CREDENTIALS_DIRECTORY"], "token"), encoding="ascii") as stream:
        token = stream.read().strip()
    try:
        address = (told["address"], told["port"])
        server = Server(address, told["models"], told["repositories"], token, folder=os.path.dirname(argv[0]))
    except OSError as error:
        print(f"cannot listen on {told['address']} port {told['port']}: {error.strerror}", file=sys.stderr)
        return 1
    notify("READY=1")
    server.serve_forever()
    return 0
