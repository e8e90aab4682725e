"""One repository of a Hugging Face hub at one revision, complete and verified in a folder of this host.

`ensure` is the whole of it. The folder `<root>/<org>--<name>/<revision>` appears by one rename, when every file in it
has been checked against the hub's own hash (SHA-256 of LFS files, git's blob hash of the others) and a manifest with
each file's size, time and SHA-256 has been written into it. From then on a run is a matter of stat calls. Until then
the files are in `<revision>.partial`, where a later run finds them again, finished or not.

The bytes come through the real client, in its own process (`hub_fetch.py`), whose word is not taken for anything: it
says "downloaded" over a truncated file, over a flipped bit and, at times, with no hub at all.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import functools
import grp
import hashlib
import json
import os
import pwd
import queue
import re
import shutil
import stat as stat_module
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from . import background, hub_fetch, words

MANIFEST = ".dflash-fleet.json"
SCHEMA = 1
CACHE = ".cache"
VERIFIED = os.path.join(CACHE, "dflash-fleet", "verified.jsonl")
LISTING = os.path.join(CACHE, "dflash-fleet", "listing.json")
REVISION = re.compile(r"[0-9a-f]{40}")
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
DEFAULT_ENDPOINT = "https://huggingface.co"
HASH_CHUNK = 1 << 20
# Directory entries, our own files: a filesystem needs a little more than the sum of the sizes.
INODE_MARGIN = 64
CLIENT_FOLDER = "dflash-fleet-fetch-"
LOCK_SECONDS = 20
POLL_SECONDS = 0.5
GROWTH_SECONDS = 5
RATE_SECONDS = 30  # the rate that a person sees is that of the last so many


class SnapshotError(Exception):
    """What is wrong, in one sentence that names the variable to change."""

    def __init__(self, kind: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.facts = facts


@dataclass
class Request:
    """What to have. `names` says how the person who reads an error calls each setting."""

    repo: str
    revision: str
    root: str
    python: str
    endpoint: str = ""
    token: str = ""
    allow: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    workers: int = 8
    margin: int = 0  # bytes that have to stay free
    owner: str = "root"
    group: str = "root"
    mode: int = 0o640
    directory_mode: int = 0o750
    timeout: float = 0  # seconds for the whole fetch; 0: no limit
    stall: float = 300  # seconds without a byte
    peer: bool = False  # the endpoint is another host of the fleet (peers.py), not a hub
    full: bool = False
    xet: bool = True
    tmpdir: str | None = None
    names: dict[str, str] = field(default_factory=dict)

    def name(self, setting: str) -> str:
        return self.names.get(setting, setting)

    @property
    def home(self) -> str:
        return os.path.join(self.root, self.repo.replace("/", "--"))

    @property
    def path(self) -> str:
        return os.path.join(self.home, self.revision)

    @property
    def stage(self) -> str:
        return self.path + ".partial"

    @property
    def hub(self) -> str:
        return self.endpoint or DEFAULT_ENDPOINT

    def fingerprint(self) -> str:
        """The same for runs that ask for the same in the same way; says nothing about the token."""
        told = {name: value for name, value in vars(self).items() if name not in ("names", "token")}
        text = json.dumps([told, hashlib.sha256(self.token.encode()).hexdigest()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def validate(self) -> None:
        if not REPO.fullmatch(self.repo) or "--" in self.repo:
            raise SnapshotError(
                "repository_name",
                f"{self.name('repo')} is {self.repo!r}, which is not a repository's name: write ORGANISATION/NAME",
            )
        if not REVISION.fullmatch(self.revision):
            raise SnapshotError(
                "revision",
                f"{self.name('revision')} is {self.revision!r}: it has to be a commit of {self.repo}, 40 hexadecimal"
                " digits, so that what runs is what was chosen; a branch or tag can move",
            )


# ---------------------------------------------------------------------------------------------------------------------
# Small pieces


class Progress:
    """How far a run is. What works says what it does; who wants to know looks, from another thread."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.begin("list", 0)

    def begin(self, step: str, total: int, measure: Callable[[], int] | None = None) -> None:
        """`step` is list, fetch or verify; `measure` says how many of its bytes are done, else they are counted."""
        with self.lock:
            self.step, self.total, self.measure, self.counted = step, total, measure, 0
            self.samples: collections.deque[tuple[float, int]] = collections.deque()

    def count(self, size: int) -> None:
        with self.lock:
            self.counted += size

    def look(self) -> dict[str, Any]:
        """The state as data; `remaining` is in seconds, null where that cannot be said."""
        with self.lock:
            step, total, measure, done = self.step, self.total, self.measure, self.counted
        if measure is not None:
            done = measure()
        done = max(0, min(done, total))
        now = time.monotonic()
        with self.lock:
            self.samples.append((now, done))
            while len(self.samples) > 2 and now - self.samples[1][0] >= RATE_SECONDS:
                self.samples.popleft()
            since, before = self.samples[0]
        rate = max(0, done - before) / (now - since) if now > since else 0.0
        return {
            "repo": self.repo,
            "step": step,
            "seconds": round(now - self.started, 1),
            "done_bytes": done,
            "total_bytes": total,
            "percent": done * 100 // total if total else None,
            "bytes_per_second": round(rate),
            "remaining": round((total - done) / rate) if rate else None,
        }


def progress_text(shot: dict[str, Any]) -> str:
    """The state for a person: `org/model  31 %  190.1 GB of 610.0 GB  1.1 GB/s`."""
    if not shot["total_bytes"]:
        return f"{shot['repo']}  asking for the list of files"
    parts = [shot["repo"], *(["checking"] if shot["step"] == "verify" else []), f"{shot['percent']:>2} %"]
    parts.append(f"{words.size(shot['done_bytes'])} of {words.size(shot['total_bytes'])}")
    if shot["bytes_per_second"]:
        parts.append(f"{words.size(shot['bytes_per_second'])}/s")
    return "  ".join(parts)


def hash_file(path: str, git: bool = False, count: Callable[[int], None] | None = None) -> tuple[str, str]:
    """(SHA-256, git blob hash or "") of a file, read once; `count` is told of the bytes as they are done."""
    sha256 = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        sha1 = None
        if git:
            sha1 = hashlib.sha1(b"blob %d\0" % os.fstat(stream.fileno()).st_size)
        buffer = bytearray(HASH_CHUNK)
        view = memoryview(buffer)
        while True:
            size = stream.readinto(buffer)
            if not size:
                break
            sha256.update(view[:size])
            if sha1:
                sha1.update(view[:size])
            if count is not None:
                count(size)
    return sha256.hexdigest(), sha1.hexdigest() if sha1 else ""


def matches(path: str, entry: dict[str, Any], count: Callable[[int], None] | None = None) -> str | None:
    """The SHA-256 of a file that is what the hub's tree says, else None."""
    try:
        if os.lstat(path).st_size != entry["size"] or not stat_module.S_ISREG(os.lstat(path).st_mode):
            return None
        sha256, sha1 = hash_file(path, git=not entry["sha256"], count=count)
    except FileNotFoundError:
        return None
    good = sha256 == entry["sha256"] if entry["sha256"] else sha1 == entry["sha1"]
    return sha256 if good else None


def free_space(path: str) -> tuple[int, int | None]:
    """(free bytes, free inodes or None where the filesystem does not count them) for an unprivileged user."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize, info.f_favail if info.f_files else None


def check_space(request: Request, need: int, files: int) -> None:
    free, inodes = free_space(request.home)
    if need and need + request.margin > free:
        raise SnapshotError(
            "disk_full",
            f"{request.repo} needs {words.size(need)} more and {words.size(request.margin)} have to stay free"
            f" ({request.name('margin')}), but the filesystem of {request.root} has {words.size(free)} free:"
            f" make room there or set {request.name('root')} to a larger one",
            needed=need,
            free=free,
        )
    if inodes is not None and files and files + INODE_MARGIN > inodes:
        raise SnapshotError(
            "disk_full",
            f"{request.repo} needs {files + INODE_MARGIN} inodes, but the filesystem of {request.root} has {inodes}"
            f" left: remove files there or set {request.name('root')} to another one",
            needed=need,
            free=free,
        )


def safe_path(path: str) -> bool:
    """A hub is not trusted with paths: nothing outside the folder, nothing in our own corners."""
    parts = path.split("/")
    return not {"", ".", ".."} & set(parts) and parts[0] not in (CACHE, MANIFEST)


def fsync_path(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: str) -> None:
    if os.path.lexists(path):
        shutil.rmtree(path)


# ---------------------------------------------------------------------------------------------------------------------
# Manifest


def read_files(path: str, keys: set[str]) -> dict[str, Any] | None:
    """A file of ours that describes a revision's files, None where it is not there or not whole."""
    try:
        with open(path, encoding="utf-8") as stream:
            found = json.load(stream)
        ok = found["schema"] == SCHEMA and all(keys <= f.keys() for f in found["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if ok else None


def read_manifest(folder: str) -> dict[str, Any] | None:
    return read_files(os.path.join(folder, MANIFEST), {"path", "size", "mtime_ns", "sha256"})


def read_listing(stage: str) -> dict[str, Any] | None:
    """What the hub said the revision consists of, while it is being fetched."""
    return read_files(os.path.join(stage, LISTING), {"path", "size", "sha1", "sha256"})


def read_verified(stage: str) -> dict[str, dict[str, Any]]:
    """Files of a stage that were verified: path -> SHA-256, size, time and inode as they were then."""
    records: dict[str, dict[str, Any]] = {}
    try:
        with open(os.path.join(stage, VERIFIED), encoding="utf-8") as stream:
            for line in stream:
                try:
                    record = json.loads(line)
                    records[record["path"]] = record
                except (ValueError, KeyError, TypeError):
                    continue  # the line that a kill cut off
    except FileNotFoundError:
        pass
    return records


def same_selection(request: Request, manifest: dict[str, Any]) -> bool:
    """Whether a manifest or listing is of the wanted files of the wanted revision."""
    return all(manifest.get(name) == value for name, value in selection(request).items())


def selection(request: Request) -> dict[str, Any]:
    return {
        "repo": request.repo,
        "revision": request.revision,
        "allow_patterns": sorted(request.allow),
        "ignore_patterns": sorted(request.ignore),
    }


def write_manifest(folder: str, request: Request, hashes: dict[str, str], client: str) -> dict[str, Any]:
    files = []
    for path in sorted(hashes):
        info = os.lstat(os.path.join(folder, path))
        files.append({"path": path, "size": info.st_size, "mtime_ns": info.st_mtime_ns, "sha256": hashes[path]})
    manifest = {
        "schema": SCHEMA,
        **selection(request),
        "client": client,
        "written_at": datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "files": files,
    }
    write_json(os.path.join(folder, MANIFEST), manifest)
    return manifest


def write_json(target: str, value: Any) -> None:
    """Whole or not at all."""
    fresh = target + ".new"
    with open(fresh, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, target)


def stat_check(folder: str, manifest: dict[str, Any]) -> dict[str, str]:
    """Files that are not as the manifest says: path -> missing, size or time. No file is read."""
    problems = {}
    for file in manifest["files"]:
        try:
            info = os.lstat(os.path.join(folder, file["path"]))
        except OSError:
            problems[file["path"]] = "missing"
            continue
        if not stat_module.S_ISREG(info.st_mode) or info.st_size != file["size"]:
            problems[file["path"]] = "size"
        elif info.st_mtime_ns != file["mtime_ns"]:
            problems[file["path"]] = "time"
    return problems


def all_matches(folder: str, files: Iterable[dict[str, Any]], progress: Progress) -> dict[str, str]:
    """path -> SHA-256 of files that are what their entry (of the hub's tree or a manifest) says, read in parallel."""
    largest_first = sorted(files, key=lambda file: -file["size"])
    if not largest_first:
        return {}
    progress.begin("verify", sum(file["size"] for file in largest_first))

    def look(file: dict[str, Any]) -> str | None:
        try:
            return matches(os.path.join(folder, file["path"]), file, progress.count)
        except OSError:
            return None  # what cannot be read is not what it should be

    with ThreadPoolExecutor(max_workers=hash_workers()) as pool:
        found = zip(largest_first, pool.map(look, largest_first))
        return {file["path"]: sha256 for file, sha256 in found if sha256}


def hash_workers() -> int:
    return max(1, min(16, len(os.sched_getaffinity(0))))


def unexpected_files(folder: str, known: Iterable[str]) -> list[str]:
    """Files in the folder that no manifest names. An engine may read them (a mask_embedding.pt, say), so we tell."""
    expected = {*known, MANIFEST}
    found = []
    for base, _folders, files in os.walk(folder):
        for file in files:
            path = os.path.relpath(os.path.join(base, file), folder)
            if path not in expected:
                found.append(path)
    return sorted(found)


# ---------------------------------------------------------------------------------------------------------------------
# Owner, group and mode


@dataclass
class Attributes:
    uid: int
    gid: int
    mode: int
    directory_mode: int

    @classmethod
    def of(cls, request: Request) -> Attributes:
        try:
            uid = int(request.owner) if request.owner.isdigit() else pwd.getpwnam(request.owner).pw_uid
        except KeyError:
            raise SnapshotError(
                "owner", f"the user {request.owner!r} ({request.name('owner')}) does not exist on this host"
            )
        try:
            gid = int(request.group) if request.group.isdigit() else grp.getgrnam(request.group).gr_gid
        except KeyError:
            raise SnapshotError(
                "group", f"the group {request.group!r} ({request.name('group')}) does not exist on this host"
            )
        return cls(uid, gid, request.mode, request.directory_mode)

    def wrong(self, path: str) -> bool:
        info = os.lstat(path)
        mode = self.directory_mode if stat_module.S_ISDIR(info.st_mode) else self.mode
        return (info.st_uid, info.st_gid, stat_module.S_IMODE(info.st_mode)) != (self.uid, self.gid, mode)

    def apply(self, path: str) -> None:
        is_folder = stat_module.S_ISDIR(os.lstat(path).st_mode)
        # The owner first: a change of owner may clear mode bits.
        os.chown(path, self.uid, self.gid, follow_symlinks=False)
        os.chmod(path, self.directory_mode if is_folder else self.mode)


def owned_paths(folder: str, files: Iterable[str]) -> list[str]:
    """Everything whose owner and mode are ours: folders first."""
    folders = {folder}
    paths = []
    for file in files:
        paths.append(os.path.join(folder, file))
        parent = os.path.dirname(file)
        while parent:
            folders.add(os.path.join(folder, parent))
            parent = os.path.dirname(parent)
    return [*sorted(folders), *paths]


# ---------------------------------------------------------------------------------------------------------------------
# The client's process


@functools.cache
def client_source() -> str:
    """The text of hub_fetch.py, which Ansible sends inside an archive that goes when the module's run ends."""
    loader: Any = hub_fetch.__loader__
    return str(loader.get_source(hub_fetch.__name__))


def client_folder(parent: str | None) -> tuple[str, int]:
    """A folder for one run of the client, and the lock that says it is in use; what killed runs left is removed."""
    parent = parent or tempfile.gettempdir()
    for name in os.listdir(parent):
        if not name.startswith(CLIENT_FOLDER):
            continue
        path = os.path.join(parent, name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone in between, or none of ours
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # somebody works with it
        finally:
            os.close(descriptor)
    # Under another name until it is locked.
    fresh = tempfile.mkdtemp(prefix="." + CLIENT_FOLDER, dir=parent)
    descriptor = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    folder = os.path.join(parent, os.path.basename(fresh)[1:])
    os.rename(fresh, folder)
    return folder, descriptor


class Client:
    """The real client in the tool environment; see hub_fetch.py for what is said over the pipes."""

    def __init__(self, request: Request, lock: int | None) -> None:
        self.request = request
        self.folder, in_use = client_folder(request.tmpdir)
        script = os.path.join(self.folder, "hub_fetch.py")
        with open(script, "w", encoding="utf-8") as stream:
            stream.write(client_source())
        self.errors = open(os.path.join(self.folder, "stderr"), "w+b")  # noqa: SIM115 (lives as long as the process)
        # -I: neither PYTHON* variables nor files lying about change what runs.
        self.process = subprocess.Popen(
            [request.python, "-I", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=client_environment(request, self.folder),
            cwd=self.folder,
            pass_fds=[in_use, *([] if lock is None else [lock])],
            text=True,
            encoding="utf-8",
        )
        os.close(in_use)  # from here on it is in use as long as the client lives
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._say(
            {
                "repo": request.repo,
                "revision": request.revision,
                "endpoint": request.endpoint,
                "token": request.token,
                "allow": request.allow,
                "ignore": request.ignore,
                "workers": request.workers,
                "peer": request.peer,
                "stage": request.stage,
            }
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.events.put(json.loads(line))
            except ValueError:
                continue
        self.events.put(None)

    def _say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died: the event loop says of what

    def fetch(self, files: list[dict[str, Any]]) -> None:
        self._say({"fetch": [{"path": f["path"], "size": f["size"]} for f in files]})

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next event; None when there is none yet. Raises what the client reports."""
        try:
            event = self.events.get(timeout=seconds)
        except queue.Empty:
            return None
        if event is None:
            raise self._died()
        if event["event"] == "error":
            raise explain(self.request, event)
        return event

    def _died(self) -> SnapshotError:
        code = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "it printed nothing"
        text = f"the hub client under {self.request.python} ended with status {code}: {last[:500]}"
        return SnapshotError("client", text)

    def close(self) -> None:
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()  # the runner ends when its standard input does
            except BrokenPipeError:
                pass
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def client_environment(request: Request, folder: str) -> dict[str, str]:
    """The module's environment (proxies, certificates) without anybody else's hub settings or tokens."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "PYTHON"))}
    env.update(
        HF_HOME=folder,
        HF_XET_CACHE=os.path.join(request.stage, CACHE, "xet"),
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_UPDATE_CHECK="1",
        HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
        HF_HUB_DOWNLOAD_TIMEOUT="30",
        LC_ALL="C.UTF-8",
    )
    if request.endpoint:
        env["HF_ENDPOINT"] = request.endpoint
    if not request.xet:
        env["HF_HUB_DISABLE_XET"] = "1"
    return env


def explain(request: Request, event: dict[str, Any]) -> SnapshotError:
    """The client's failure as a sentence with the variable to change."""
    repo, hub, kind = request.repo, request.hub, event["kind"]
    detail, status = event.get("detail", ""), event.get("status")
    path = f" (file {event['path']})" if event.get("path") else ""
    token, endpoint = request.name("token"), request.name("endpoint")
    has_token = "the given token" if token == "token" else f"the token in {token}"
    if kind == "no_client":
        text = (
            f"{request.python} has no huggingface_hub client ({detail}):"
            f" {request.name('python')} has to be a Python that has it"
        )
    elif kind == "gated":
        text = (
            f"{repo} is gated on {hub} and {has_token} has no access to it: ask for access on the repository's page"
            if request.token
            else f"{repo} is gated on {hub}: set {token} to a token that has access to it"
        )
    elif kind == "repository":
        text = (
            f"{repo} is not on {hub}, or {has_token} may not see it: check {request.name('repo')}"
            if request.token
            else f"{repo} is not on {hub}, or it is private: check {request.name('repo')}, or set {token}"
        )
    elif kind == "revision":
        text = f"{repo} on {hub} has no revision {request.revision}: check {request.name('revision')}"
    elif kind == "entry":
        text = f"{hub} lists a file of {repo} that it does not have{path}: try again, or another {endpoint}"
    elif kind == "repository_name":
        text = f"{request.name('repo')} is {repo!r}, which the hub client does not take for a repository's name"
    elif kind == "unauthorized":
        text = (
            f"{hub} refuses {has_token} for {repo} (HTTP {status}){path}"
            if request.token
            else f"{hub} wants a token for {repo} (HTTP {status}){path}: set {token}"
        )
    elif kind == "rate_limited":
        text = (
            f"{hub} keeps answering 429, too many requests{path}: run again later (what is here already stays),"
            f" set {token}, or lower {request.name('workers')}"
        )
    elif kind == "hub_error":
        text = f"{hub} keeps answering HTTP {status}{path}: run again later, what is here already stays"
    elif kind == "network":
        text = f"{hub} cannot be reached{path}, {detail}: check {endpoint}, name service and route of this host"
    elif kind == "size":
        text = f"{hub} sends a file of {repo} with another size than it lists{path}: {detail}"
    elif kind == "disk_full":
        free, _inodes = free_space(request.home)
        text = (
            f"the filesystem of {request.root} ran full while {repo} was fetched{path}, {words.size(free)} are free"
            f" now: make room and run again (what is here already stays), or set {request.name('root')} to a larger one"
        )
    else:
        text = f"the hub client failed on {repo}{path}: {detail}"
    return SnapshotError(kind, text, status=status)


# ---------------------------------------------------------------------------------------------------------------------
# The work


class Snapshot:
    """One run. Nothing outside `<root>/<org>--<name>` is written."""

    def __init__(
        self, request: Request, check: bool, warn: Callable[[str], None], progress: Progress | None = None
    ) -> None:
        self.request = request
        self.check = check
        self.warn = warn
        self.progress = progress or Progress(request.repo)
        self.sound: dict[str, str] = {}  # files of the published folder that this run has read: path -> SHA-256
        self.started = time.monotonic()
        self.client: Client | None = None
        self.client_version = ""
        self.fetched = 0

    def run(self) -> dict[str, Any]:
        request = self.request
        request.validate()
        if os.path.lexists(request.path) and (os.path.islink(request.path) or not os.path.isdir(request.path)):
            raise SnapshotError("path", f"{request.path} is in the way: it is not a folder; move it away")
        manifest = read_manifest(request.path) if os.path.isdir(request.path) else None
        if manifest is not None and same_selection(request, manifest):
            done = self._check_published(manifest)
            if done is not None:
                return done
        if self.check:
            return self._predict(manifest)
        attributes = Attributes.of(request)
        for folder in (request.root, request.home):
            if not os.path.isdir(folder):
                os.makedirs(folder, mode=request.directory_mode)
                attributes.apply(folder)
        with Lock(request) as lock:
            return self._work(attributes, lock, manifest)

    def settled(self) -> bool:
        """Whether stat calls alone say that there is nothing to fetch and nothing to read."""
        request = self.request
        manifest = None if request.full else read_manifest(request.path)
        return manifest is not None and same_selection(request, manifest) and not stat_check(request.path, manifest)

    # -- a folder that was published before

    def _check_published(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """The result where the folder holds what it should (or only times and owners differ), else None."""
        request, folder = self.request, self.request.path
        problems = stat_check(folder, manifest)
        by_path = {f["path"]: f for f in manifest["files"]}
        if any(kind != "time" for kind in problems.values()):
            return None
        # Another time with the same size: read it before believing either.
        suspects = by_path if request.full else problems
        self.sound = all_matches(folder, [by_path[p] for p in suspects], self.progress)
        if len(self.sound) < len(suspects):
            return None
        files = list(by_path)
        drift = []
        try:
            attributes = Attributes.of(request)
            drift = [p for p in [request.home, *owned_paths(folder, [*files, MANIFEST])] if attributes.wrong(p)]
        except SnapshotError:
            if not self.check:
                raise
            drift = [folder]  # the user or group is yet to be made
        if not self.check:
            if problems:
                hashes = {p: f["sha256"] for p, f in by_path.items()}
                write_manifest(folder, request, hashes, manifest.get("client", ""))
                attributes.apply(os.path.join(folder, MANIFEST))
            for path in drift:
                attributes.apply(path)
            self._sweep()
        extra = unexpected_files(folder, files)
        if extra:
            self.warn(f"{folder} holds files that are not part of {request.repo}: {', '.join(extra[:5])}")
        action = "manifest" if problems else "attributes" if drift else "none"
        verified = "hash" if request.full else "stat"
        return self._result(action, by_path.values(), before=by_path.values(), verified=verified)

    def _sweep(self) -> None:
        """A run that was killed between the last file and here leaves an empty shell."""
        if os.path.isdir(self.request.stage):
            remove_tree(self.request.stage)

    # -- check mode

    def _predict(self, manifest: dict[str, Any] | None) -> dict[str, Any]:
        request = self.request
        before = manifest["files"] if manifest else []
        if not os.access(request.python, os.X_OK):
            return self._result("fetch", None, before=before, to_fetch=None)
        try:
            tree = self._open(None)
        except SnapshotError as error:
            if error.kind not in ("network", "hub_error", "rate_limited", "no_client"):
                raise
            self.warn(f"{error}; how much is to be fetched is not known")
            return self._result("fetch", None, before=before, to_fetch=None)
        known = {f["path"]: f for f in before}
        bad = stat_check(request.path, manifest) if manifest else {}
        missing = []
        for file in tree:
            published = known.get(file["path"])
            if published and file["path"] not in bad:
                continue
            if not self._has_size(request.stage, file) and (manifest or not self._has_size(request.path, file)):
                missing.append(file)
        need = sum(f["size"] for f in missing) - self._part_bytes(missing)
        check_space(request, need, len(missing))
        return self._result("repair" if os.path.isdir(request.path) else "fetch", tree, before=before, to_fetch=need)

    @staticmethod
    def _has_size(folder: str, file: dict[str, Any]) -> bool:
        try:
            return os.lstat(os.path.join(folder, file["path"])).st_size == file["size"]
        except OSError:
            return False

    # -- the fetch

    def _open(self, lock: int | None) -> list[dict[str, Any]]:
        """Start the client; what the hub says the revision consists of."""
        request = self.request
        if not os.access(request.python, os.X_OK):
            where = f"there is no Python at {request.python}" if request.python else "no Python is given"
            raise SnapshotError("no_client", f"{where}: {request.name('python')} has to be one with huggingface_hub")
        self.client = Client(request, lock)
        event = self._wait(self.client, lambda: "while the hub was asked for the list of files")
        self.client_version = event["client"]
        files: list[dict[str, Any]] = event["files"]
        for file in files:
            if not safe_path(file["path"]):
                text = (
                    f"{request.hub} lists a file of {request.repo} under a path that is not allowed: {file['path']!r}"
                )
                raise SnapshotError("path", text)
        if not files:
            raise SnapshotError(
                "empty",
                f"{request.repo} at {request.revision} has no file that {request.name('allow')} and"
                f" {request.name('ignore')} leave over",
            )
        return files

    def _wait(self, client: Client, doing: Callable[[], str], tick: Callable[[], None] | None = None) -> dict[str, Any]:
        """The client's next event, within the limits on time and on standing still."""
        request = self.request
        size, moved, looked = -1, time.monotonic(), 0.0
        while True:
            event = client.next(POLL_SECONDS)
            if event is not None and event["event"] != "waiting":
                return event
            if event is not None:
                moved = time.monotonic()  # a peer that waits itself is no standstill
            if tick is not None:
                tick()
            now = time.monotonic()
            if request.timeout and now - self.started > request.timeout:
                raise SnapshotError(
                    "timeout",
                    f"{request.repo} was not here after {request.timeout:.0f} s ({request.name('timeout')}), {doing()}:"
                    " run again, it goes on from there",
                )
            if now - looked >= GROWTH_SECONDS:
                looked = now
                grown = folder_size(request.stage)
                if grown != size:
                    size, moved = grown, now
            if request.stall and now - moved > request.stall:
                raise SnapshotError(
                    "stalled",
                    f"no byte of {request.repo} came from {request.hub} for {request.stall:.0f} s"
                    f" ({request.name('stall')}), {doing()}: run again, it goes on from there",
                )

    def _work(self, attributes: Attributes, lock: int | None, manifest: dict[str, Any] | None) -> dict[str, Any]:
        request = self.request
        repair = os.path.isdir(request.path)
        tree = self._open(lock)
        client = self.client
        assert client is not None
        wanted = {f["path"]: f for f in tree}
        good: dict[str, str] = {}
        if repair:
            good.update(self._still_good(wanted, manifest))
        published = set(good)
        good.update(self._finished_before(wanted, set(good)))
        missing = [f for f in tree if f["path"] not in good]
        parts = self._part_bytes(missing)
        check_space(request, sum(f["size"] for f in missing) - parts, len(missing))
        if missing:
            os.makedirs(os.path.join(request.stage, hub_fetch.PARTS), mode=request.directory_mode, exist_ok=True)
            write_json(os.path.join(request.stage, LISTING), {"schema": SCHEMA, **selection(request), "files": tree})
            # Of the whole repository, so that a second run begins where the first one stopped.
            before = folder_size(request.stage) - parts
            here = sum(f["size"] for f in tree) - sum(f["size"] for f in missing)
            total = sum(f["size"] for f in tree)
            self.progress.begin("fetch", total, lambda: here + folder_size(request.stage) - before)
            good.update(self._download(client, missing, attributes))
            self.fetched -= parts
        client.close()
        if repair:
            self._mend(wanted, good, published, manifest, attributes)
        else:
            self._publish(good, attributes)
        action = "fetch" if not repair else "repair" if missing else "adopt"
        return self._result(action, tree, before=manifest["files"] if manifest else [], verified="hash")

    def _still_good(self, wanted: dict[str, dict[str, Any]], manifest: dict[str, Any] | None) -> dict[str, str]:
        """Files of a published folder that need not be fetched: path -> SHA-256."""
        request, folder = self.request, self.request.path
        known = {f["path"]: f for f in manifest["files"]} if manifest else {}
        problems = stat_check(folder, manifest) if manifest else {}
        good, unknown = {}, []
        for path, file in wanted.items():
            record = known.get(path)
            agrees = record and (not file["sha256"] or record["sha256"] == file["sha256"])
            if record and agrees and (path in self.sound or (path not in problems and not request.full)):
                good[path] = record["sha256"]
            else:
                unknown.append(file)
        return {**good, **all_matches(folder, unknown, self.progress)}

    def _finished_before(self, wanted: dict[str, dict[str, Any]], have: set[str]) -> dict[str, str]:
        """Files that an earlier run finished in the stage; the rest of what it left there is removed."""
        request, stage = self.request, self.request.stage
        if not os.path.isdir(stage):
            return {}
        records = read_verified(stage)
        keep = {hub_fetch.part_path(stage, p) for p in wanted if p not in have}
        keep.add(os.path.join(stage, VERIFIED))
        good, unknown, found = {}, [], []
        for base, _folders, files in os.walk(stage):
            for name in files:
                file = os.path.join(base, name)
                path = os.path.relpath(file, stage)
                if file in keep:
                    continue
                found.append(path)
                entry = wanted.get(path)
                if entry is None or path in have:
                    continue
                info = os.lstat(file)
                record = records.get(path, {})
                seen = (record.get("size"), record.get("mtime_ns"), record.get("ino"))
                same = seen == (info.st_size, info.st_mtime_ns, info.st_ino)
                if same and not request.full and (not entry["sha256"] or record.get("sha256") == entry["sha256"]):
                    good[path] = record["sha256"]
                else:
                    unknown.append(entry)
        good.update(all_matches(stage, unknown, self.progress))
        for path in found:
            if path not in good:
                # temporary files of the client, files that are wrong or not wanted any more
                os.unlink(os.path.join(stage, path))
        return good

    def _part_bytes(self, missing: list[dict[str, Any]]) -> int:
        total = 0
        for file in missing:
            try:
                size = os.lstat(hub_fetch.part_path(self.request.stage, file["path"])).st_size
            except OSError:
                continue
            total += size if size <= file["size"] else 0
        return total

    def _download(self, client: Client, missing: list[dict[str, Any]], attributes: Attributes) -> dict[str, str]:
        """Fetch files and hash each as soon as it is complete, while others are still coming."""
        request = self.request
        wanted = {f["path"]: f for f in missing}
        total = sum(f["size"] for f in missing)
        good: dict[str, str] = {}

        def so_far() -> str:
            return f"{len(good)} of {len(missing)} files, {words.size(total)} in all, were complete"

        records = os.open(os.path.join(request.stage, VERIFIED), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # Who passes verified files on to other hosts is no more than a member of the group.
            for path in owned_paths(request.stage, [VERIFIED, LISTING]):
                attributes.apply(path)
            with ThreadPoolExecutor(max_workers=hash_workers()) as pool:
                todo, again = missing, False
                while todo:
                    client.fetch(todo)
                    checks: dict[str, Future[str | None]] = {}
                    while True:
                        event = self._wait(client, so_far)
                        if event["event"] == "done":
                            break
                        path = event["path"]
                        self.fetched += wanted[path]["size"]
                        checks[path] = pool.submit(self._verify, wanted[path], records, attributes)
                        good.update({p: h for p, c in checks.items() if c.done() and (h := c.result())})
                    for path, check in checks.items():
                        sha256 = check.result()
                        if sha256:
                            good[path] = sha256
                        else:
                            os.unlink(os.path.join(request.stage, path))
                    # Also what the client did not speak of at all.
                    failed = [file for file in todo if file["path"] not in good]
                    if failed and again:
                        names = ", ".join(f["path"] for f in failed[:3])
                        raise SnapshotError(
                            "corrupt",
                            f"{request.hub} sent {names} of {request.repo} twice with contents that do not have the"
                            " hash it lists: the hub or something on the way to it is broken;"
                            f" check {request.name('endpoint')}",
                        )
                    todo, again = failed, True
        finally:
            os.close(records)
        return good

    def _verify(self, file: dict[str, Any], records: int, attributes: Attributes) -> str | None:
        path = os.path.join(self.request.stage, file["path"])
        sha256 = matches(path, file)
        if sha256:
            for owned in owned_paths(self.request.stage, [file["path"]]):
                attributes.apply(owned)
            fsync_path(path)
            info = os.lstat(path)
            record = {"path": file["path"], "sha256": sha256}
            record.update(size=info.st_size, mtime_ns=info.st_mtime_ns, ino=info.st_ino)
            os.write(records, (json.dumps(record) + "\n").encode())
        return sha256

    def _publish(self, good: dict[str, str], attributes: Attributes) -> None:
        """The stage becomes the folder: all of it or nothing."""
        request, stage = self.request, self.request.stage
        remove_tree(os.path.join(stage, CACHE))
        self._remove_empty(stage, good)
        write_manifest(stage, request, good, self.client_version)
        paths = owned_paths(stage, [*good, MANIFEST])
        for path in paths:
            attributes.apply(path)
        for path in paths:
            if os.path.isdir(path):
                fsync_path(path)
        os.rename(stage, request.path)
        attributes.apply(request.home)
        fsync_path(request.home)

    def _mend(
        self,
        wanted: dict[str, dict[str, Any]],
        good: dict[str, str],
        published: set[str],
        manifest: dict[str, Any] | None,
        attributes: Attributes,
    ) -> None:
        """Replace the wrong files one by one, each by a rename: an engine that has the old one open keeps it."""
        request, folder = self.request, self.request.path
        for path in sorted(set(good) - published):
            os.makedirs(os.path.dirname(os.path.join(folder, path)), mode=request.directory_mode, exist_ok=True)
            os.replace(os.path.join(request.stage, path), os.path.join(folder, path))
        for file in manifest["files"] if manifest else []:
            if file["path"] not in wanted and safe_path(file["path"]):
                try:
                    os.unlink(os.path.join(folder, file["path"]))
                except FileNotFoundError:
                    pass
        write_manifest(folder, request, good, self.client_version)
        for path in [request.home, *owned_paths(folder, [*good, MANIFEST])]:
            if attributes.wrong(path):
                attributes.apply(path)
        for path in owned_paths(folder, good):
            if os.path.isdir(path):
                fsync_path(path)
        remove_tree(request.stage)
        extra = unexpected_files(folder, good)
        if extra:
            self.warn(f"{folder} holds files that are not part of {request.repo}: {', '.join(extra[:5])}")

    @staticmethod
    def _remove_empty(stage: str, good: dict[str, str]) -> None:
        """Folders of files that are not wanted any more."""
        keep = set(owned_paths(stage, good))
        for base, _folders, _files in os.walk(stage, topdown=False):
            if base not in keep:
                shutil.rmtree(base)

    # -- the result

    def _result(
        self,
        action: str,
        files: Iterable[dict[str, Any]] | None,
        before: Iterable[dict[str, Any]],
        verified: str = "",
        to_fetch: int | None = 0,
    ) -> dict[str, Any]:
        request = self.request
        after = None if files is None else sorted((f["path"], f["size"]) for f in files)
        result: dict[str, Any] = {
            "changed": action != "none",
            "action": action,
            "path": request.path,
            "repo": request.repo,
            "revision": request.revision,
            "files": None if after is None else len(after),
            "bytes": None if after is None else sum(size for _path, size in after),
            "fetched_bytes": max(0, self.fetched),
            "seconds": round(time.monotonic() - self.started, 3),
            "verified": verified,
            "diff": {
                "before_header": request.path,
                "after_header": request.path,
                "before": listing((f["path"], f["size"]) for f in before),
                "after": listing(after) if after is not None else f"{request.repo} at {request.revision}\n",
            },
        }
        if action in ("attributes", "manifest"):
            result["diff"]["before"] = f"{action} of {request.path}: different\n"
            result["diff"]["after"] = f"{action} of {request.path}: as asked\n"
        if self.check:
            result["to_fetch_bytes"] = to_fetch
        return result

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def listing(files: Iterable[tuple[str, int]]) -> str:
    return "".join(f"{size:>15}  {path}\n" for path, size in sorted(files))


def folder_size(folder: str) -> int:
    total = 0
    for base, _folders, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(base, file)).st_size
            except OSError:
                continue
    return total


class Lock:
    """One run at a time for a repository. The client's process holds it too: after a kill the next run waits for it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.descriptor: int | None = None

    def __enter__(self) -> int | None:
        self.descriptor = os.open(self.request.home, os.O_RDONLY | os.O_DIRECTORY)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self.descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self.descriptor)
                    text = f"another run is fetching {self.request.repo} on this host: wait for it to end"
                    raise SnapshotError("busy", text)
                time.sleep(0.2)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP):
                    raise
                return None  # a network filesystem without locks

    def __exit__(self, *_exc: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


def ensure(
    request: Request,
    check: bool = False,
    warn: Callable[[str], None] = lambda _text: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Have `request.path` complete. Returns the module's result; raises SnapshotError."""
    run = Snapshot(request, check, warn, progress)
    try:
        return run.run()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise explain(request, {"kind": "disk_full"})
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise SnapshotError(
                "permission",
                f"{request.root} cannot be written: {error.strerror} ({error.filename}); check {request.name('root')}",
            )
        raise
    finally:
        run.close()


def ensure_in_slices(
    request: Request,
    seconds: float,
    check: bool = False,
    warn: Callable[[str], None] = lambda _text: None,
    fetch: Callable[..., dict[str, Any]] = ensure,
    fetch_key: str = "",
) -> dict[str, Any]:
    """`fetch`, of which this run waits for `seconds` at most: {"finished": False, "progress": ...} until it is done.

    What takes long goes on in a process of its own, until nobody has asked for it for some minutes. A run that comes
    after one whose controller died goes on watching the same fetch.
    """
    request.validate()
    progress = Progress(request.repo)

    def begin() -> Callable[[], Any] | None:
        if (check and not request.full) or Snapshot(request, check, warn).settled():
            return None
        client_source()  # the module's own files are gone when the client is started
        return work

    def work() -> dict[str, Any]:
        warnings: list[str] = []
        try:
            return {"done": fetch(request, check=check, warn=warnings.append, progress=progress), "warnings": warnings}
        except SnapshotError as error:
            return {"error": [error.kind, str(error), error.facts], "warnings": warnings}

    name = f"{request.path} {'looked at' if check else 'fetched'}"
    try:
        finished, answer = background.look(name, request.fingerprint() + fetch_key, seconds, begin, progress.look)
    except background.Busy:
        raise SnapshotError("busy", f"another run is fetching {request.repo} on this host: wait for it to end")
    except background.Died as error:
        raise SnapshotError(
            "killed",
            f"the process that fetched {request.repo} on this host was killed or hangs ({error}): run again, it goes on"
            " from there; the host's journal may say who did it",
        )
    if not finished:
        return {"finished": False, "changed": False, "path": request.path, "progress": answer}
    if answer is None:
        return {"finished": True, **fetch(request, check=check, warn=warn)}
    for text in answer.get("warnings", []):
        warn(text)
    if "error" in answer:
        kind, text, facts = answer["error"]
        raise SnapshotError(kind, text, **facts)
    if "crash" in answer:
        raise RuntimeError(answer["crash"])
    return {"finished": True, **answer["done"]}
