"""The half of hf_snapshot that runs inside the tool environment, where the huggingface_hub client is.

`snapshot.py` starts this file with that environment's Python and talks to it in JSON lines. Requests come on standard
input (the token too: a pipe is in no process list, environment or file), answers go to standard output:

    {"repo", "revision", "endpoint", "token", "allow", "ignore", "workers", "peer", "stage"}   first line, always
        -> {"event": "tree", "client", "files": [{"path", "size", "sha1", "sha256"}]}
    {"fetch": [{"path", "size"}, ...]}       any number of times
        -> {"event": "file", "path"} for each, then {"event": "done"}
    a peer does not have it yet -> {"event": "waiting"}, every few seconds
    any failure -> {"event": "error", "kind", "detail", "status", "path"} and the process ends.

When standard input closes (the module was killed), this process ends too: two runs never write the same files.

The client is asked for one file at a time through its own functions. Where it would fetch by plain HTTP, its
`http_get` is given the bytes that an earlier, killed run left behind: `hf_hub_download` names its temporary files anew
each time and starts from zero. Xet transfers go through `hf_hub_download` as they are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

# Where a file grows, inside the folder being filled.
PARTS = os.path.join(".cache", "dflash-fleet")
# Network trouble that the client gave up on is tried so many times, from where it stopped; a peer that is gone once.
ATTEMPTS = 3
NETWORK = {"ConnectError", "TimeoutException", "RemoteProtocolError", "ReadError", "ProxyError"}

T = TypeVar("T")


def part_path(stage: str, path: str) -> str:
    """Where the bytes of a file are collected until they are all there."""
    return os.path.join(stage, PARTS, hashlib.sha256(path.encode()).hexdigest()[:32] + ".part")


def classify(error: BaseException) -> dict[str, Any]:
    """An exception of the client as a kind that the module has a sentence for."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    response = next((getattr(e, "response", None) for e in chain if getattr(e, "response", None) is not None), None)
    status = getattr(response, "status_code", None)
    names = [base.__name__ for e in chain for base in type(e).__mro__]
    if any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in chain):
        kind = "disk_full"
    elif "GatedRepoError" in names:
        kind = "gated"
    elif "RevisionNotFoundError" in names:
        kind = "revision"
    elif "RepositoryNotFoundError" in names:
        kind = "repository"
    elif "RemoteEntryNotFoundError" in names or ("EntryNotFoundError" in names and status == 404):
        kind = "entry"
    elif "HFValidationError" in names:
        kind = "repository_name"
    elif status in (401, 403):
        kind = "unauthorized"
    elif status == 425:
        kind = "not_yet"
    elif status == 429:
        kind = "rate_limited"
    elif status is not None and status >= 500:
        kind = "hub_error"
    elif NETWORK & set(names) or any(isinstance(e, (ConnectionError, TimeoutError)) for e in chain):
        kind = "network"
    elif status == 416 or any("Consistency check failed" in str(e) for e in chain):
        kind = "size"
    else:
        kind = "client"
    detail = " ".join(f"{type(chain[-1]).__name__}: {chain[-1]}".split())
    return {"event": "error", "kind": kind, "detail": detail[:600], "status": status}


class Runner:
    """One repository at one revision, for as long as the module keeps the pipe open."""

    def __init__(self, request: dict[str, Any]) -> None:
        import huggingface_hub
        from huggingface_hub.file_download import get_hf_file_metadata, http_get, is_xet_available
        from huggingface_hub.utils import build_hf_headers

        self.hub = huggingface_hub
        self.metadata = get_hf_file_metadata
        self.http_get = http_get
        self.xet = is_xet_available()
        self.request = request
        self.endpoint = request["endpoint"] or None
        self.token = request["token"] or False  # False: no token, not even one that lies around on the host
        self.headers = build_hf_headers(token=self.token)
        self.out = threading.Lock()

    def send(self, **event: Any) -> None:
        with self.out:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()

    def knock(self) -> None:
        """Ask the hub for anything. Where nobody is there, the client itself would try for half a minute."""
        from huggingface_hub.utils import get_session

        url = f"{self.endpoint or 'https://huggingface.co'}/api/models/{self.request['repo']}"
        try:
            get_session().head(url, headers=self.headers, timeout=10)
        except Exception as error:
            if classify(error)["kind"] != "network":
                return  # whatever it is, the real question will have it too
            time.sleep(1)
            get_session().head(url, headers=self.headers, timeout=10)

    def patiently(self, ask: Callable[[], T]) -> T:
        """A peer holds back its answer until it has what was asked for, and after a few seconds says: not yet."""
        while True:
            try:
                return ask()
            except Exception as error:
                if classify(error)["kind"] != "not_yet":
                    raise
            self.send(event="waiting")

    def tree(self) -> None:
        from huggingface_hub.utils import filter_repo_objects

        request = self.request
        self.knock()
        api = self.hub.HfApi(endpoint=self.endpoint, token=self.token)
        files = {}
        listing = self.patiently(
            lambda: list(api.list_repo_tree(request["repo"], recursive=True, revision=request["revision"]))
        )
        for entry in listing:
            if isinstance(entry, self.hub.RepoFile):
                lfs = entry.lfs
                files[entry.path] = {
                    "path": entry.path,
                    "size": lfs.size if lfs else entry.size,
                    "sha1": entry.blob_id,
                    "sha256": lfs.sha256 if lfs else None,
                }
        kept = filter_repo_objects(
            files, allow_patterns=request["allow"] or None, ignore_patterns=request["ignore"] or None
        )
        self.send(event="tree", client=self.hub.__version__, files=[files[path] for path in kept])

    def fetch(self, files: list[dict[str, Any]]) -> None:
        with ThreadPoolExecutor(max_workers=max(1, int(self.request["workers"]))) as pool:
            for file in self.as_they_come(files):
                pool.submit(self.fetch_or_end, file)
        self.send(event="done")

    def as_they_come(self, files: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """A hub has them all; a peer that is fetching itself has them one after the other, in an order of its own."""
        if not self.request["peer"]:
            yield from files
            return
        wanted = {file["path"]: file for file in files}
        known = 0
        while wanted:
            here = self.patiently(partial(self.here, known))
            known = len(here)
            for path in here:
                if path in wanted:
                    yield wanted.pop(path)

    def here(self, known: int) -> list[str]:
        """What a peer has verified, once that is more than so many files (peer_server.py)."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        request = self.request
        url = f"{self.endpoint}/api/models/{request['repo']}/here/{request['revision']}?after={known}"
        answer = get_session().get(url, headers=self.headers, timeout=10)
        hf_raise_for_status(answer)
        return list(answer.json())

    def fetch_or_end(self, file: dict[str, Any]) -> None:
        try:
            self.fetch_one(file)
        except Exception as error:
            self.send(**classify(error), path=file["path"])
            # The others stop where they are: their parts stay and the next run goes on from there.
            os._exit(1)

    def fetch_one(self, file: dict[str, Any]) -> None:
        attempts = 1 if self.request["peer"] else ATTEMPTS
        for attempt in range(attempts):
            try:
                self.patiently(lambda: self._fetch_one(file["path"], file["size"]))
                break
            except Exception as error:
                kind = classify(error)["kind"]
                if kind == "size":  # the part is longer or shorter than anything the hub has to add
                    _remove(part_path(self.request["stage"], file["path"]))
                if attempt + 1 == attempts or kind not in ("network", "hub_error", "size"):
                    raise
                time.sleep(0.5 if kind == "size" else 2 * (attempt + 1))
        self.send(event="file", path=file["path"])

    def _fetch_one(self, path: str, size: int) -> None:
        request = self.request
        stage = request["stage"]
        target = os.path.join(stage, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        url = self.hub.hf_hub_url(request["repo"], path, revision=request["revision"], endpoint=self.endpoint)
        metadata = self.metadata(url, token=self.token, endpoint=self.endpoint, retry_on_errors=not request["peer"])
        if metadata.xet_file_data is not None and self.xet:
            self.hub.hf_hub_download(
                request["repo"],
                path,
                revision=request["revision"],
                local_dir=stage,
                endpoint=self.endpoint,
                token=self.token,
                force_download=True,
            )
            return
        headers = dict(self.headers)
        if _host(metadata.location) != _host(url):
            # A storage server has its own signature in the address; the token is none of its business.
            headers.pop("authorization", None)
        part = part_path(stage, path)
        os.makedirs(os.path.dirname(part), exist_ok=True)
        with open(part, "r+b" if os.path.exists(part) else "w+b") as stream:
            have = stream.seek(0, os.SEEK_END)
            if have > size:
                have = stream.seek(0)
                stream.truncate()
            self.http_get(metadata.location, stream, resume_size=have, headers=headers, expected_size=size)
        os.replace(part, target)


def _host(url: str) -> str:
    return urlsplit(url).netloc


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def main() -> int:
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        # The module closed the pipe, or was killed: then nobody else cleans up the folder it made for this process.
        shutil.rmtree(os.path.dirname(os.path.abspath(__file__)), ignore_errors=True)
        os._exit(0)

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=read, daemon=True).start()
    runner = None
    try:
        runner = Runner(request)
        runner.tree()
        while True:
            runner.fetch(json.loads(lines.get())["fetch"])
    except ImportError as error:
        print(json.dumps({"event": "error", "kind": "no_client", "detail": str(error), "status": None}), flush=True)
    except Exception as error:
        print(json.dumps({**classify(error), "path": None}), flush=True)
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
