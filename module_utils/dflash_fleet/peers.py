"""Which host gets weights from which, and a fetch that goes through several sources.

`plan` is made once for all hosts of a play. For each repository the hosts stand in a line: first the roots (hosts that
have it, or else the first `seeds` of the list, which go to the hub), then those that want it. With a fan-out of 1 the
line is a chain, each host behind the one before it; with 2 it is a binary tree, and so on. Every host passes a file on
as soon as it has verified it, and the one behind it takes files in the order in which they come: with F files, W of
which the first host fetches at once, a chain of N hosts takes about (F + W + N) times one file.

A host that passes on to d others has 1/d of its link for each: a chain is best until it gets long (`best_fanout`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import peer_server, snapshot, words

# A model has about so many files; only the choice of the fan-out depends on it.
TYPICAL_FILES = 64
FANOUTS = (1, 2, 3, 4)
# Ancestors that a host asks one after the other, the roots not counted.
ANCESTORS = 3
# Failures that another source does not cure.
OWN_FAULTS = frozenset(
    {"busy", "disk_full", "group", "no_client", "owner", "path", "permission", "repository_name", "timeout"}
)
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def best_fanout(hosts: int, files: int = TYPICAL_FILES) -> int:
    """The fan-out with which the last of so many hosts is done first, where each host's link is the limit."""

    def cost(fanout: int) -> int:
        depth, reached, level = 0, 0, 1
        while reached < hosts:
            level *= fanout
            reached += level
            depth += 1
        return fanout * (files + depth)

    return min(FANOUTS, key=cost)


def ancestors(index: int, roots: int, fanout: int) -> list[int]:
    """Places of the line that place `index` hangs on, nearest first; a root hangs on none."""
    found = []
    while index >= roots:
        index = (index - roots) // fanout
        found.append(index)
    return found


def key(repo: str, revision: str, allow: Iterable[str], ignore: Iterable[str]) -> str:
    """What two hosts must have in common to pass weights on: patterns too, since they decide which files there are."""
    return f"{repo}@{revision} {json.dumps([sorted(allow), sorted(ignore)])}"


def stock(
    results: Iterable[Mapping[str, Any]],
    allow: Iterable[str],
    ignore: Iterable[str],
    server: Mapping[str, Any],
) -> dict[str, Any]:
    """What a host has and wants, from the results of hf_snapshot, and how it can be reached (`server`)."""
    repositories = [
        {
            "key": key(result["repo"], result["revision"], allow, ignore),
            "here": result["action"] == "none",
            "repo": result["repo"],
            "revision": result["revision"],
            "allow_patterns": sorted(allow),
            "ignore_patterns": sorted(ignore),
        }
        for result in results
    ]
    return {"server": dict(server), "repositories": repositories}


def filled(one: Mapping[str, Any]) -> dict[str, Any]:
    """The stock of a host whose fetch went well."""
    return {**one, "repositories": [{**repository, "here": True} for repository in one["repositories"]]}


def plan(
    batch: Iterable[str], others: Iterable[str], stocks: Mapping[str, Any], seeds: int = 1, fanout: int = 0
) -> dict[str, Any]:
    """Who passes what on to whom. `batch`: hosts that fetch now; `others` may have what they want already.

    `servers`: host -> what it passes on, and where. `helpers`: servers that fetch nothing themselves.
    `lines`: key -> hosts in their places, `roots` of them roots. `clients`: addresses that may ask.
    """
    batch = list(batch)
    known = {host: stocks[host] for host in dict.fromkeys([*batch, *others]) if stocks.get(host)}
    about: dict[str, dict[str, Any]] = {}
    have: dict[str, list[str]] = {}
    want: dict[str, list[str]] = {}
    for host, one in known.items():
        for repository in one["repositories"]:
            about[repository["key"]] = {k: v for k, v in repository.items() if k not in ("key", "here")}
            if repository["here"]:
                have.setdefault(repository["key"], []).append(host)
            elif host in batch:
                want.setdefault(repository["key"], []).append(host)
    lines = {}
    servers: dict[str, dict[str, Any]] = {}
    for name, wanting in want.items():
        roots = have.get(name, [])[: max(1, seeds)]
        count = len(roots) or min(max(1, seeds), len(wanting))
        hosts = [*roots, *wanting]
        degree = fanout or best_fanout(-(-(len(hosts) - count) // count))
        lines[name] = {"hosts": hosts, "roots": count, "fanout": degree}
        passing = {place for index in range(len(hosts)) for place in ancestors(index, count, degree)}
        for place in sorted(passing):
            server = servers.setdefault(hosts[place], {**known[hosts[place]]["server"], "repositories": []})
            server["repositories"].append(about[name])
    fetching = {host for wanting in want.values() for host in wanting}
    return {
        "lines": lines,
        "servers": servers,
        "helpers": [host for host in servers if host not in fetching],
        "clients": sorted({known[host]["server"]["address"] for host in fetching}),
    }


def url(server: Mapping[str, Any]) -> str:
    return f"http://{words.endpoint(str(server['address']), server['port'])}"


def sources(whole: Mapping[str, Any], host: str, name: str) -> list[str]:
    """Addresses that a host asks for a repository, in that order; none where it goes to the hub."""
    line = whole["lines"].get(name)
    if line is None or host not in line["hosts"]:
        return []
    above = ancestors(line["hosts"].index(host), line["roots"], line["fanout"])
    places = dict.fromkeys([*above[:ANCESTORS], *(range(line["roots"]) if above else [])])
    return [url(whole["servers"][line["hosts"][place]]) for place in places if line["hosts"][place] in whole["servers"]]


# ---------------------------------------------------------------------------------------------------------------------
# A fetch from several sources


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where a fetch may go, one after the other: a mirror on this host, peers, the hub."""

    mirror: str = ""  # a folder like sglang_root/models, for example an NFS mount
    peers: tuple[str, ...] = ()
    token: str = ""
    workers: int = 1
    hub: bool = True

    def fingerprint(self) -> str:
        """The same for runs that go to the same sources with the same token, which it does not tell."""
        return hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()


@contextlib.contextmanager
def serve_mirror(folder: str, request: snapshot.Request) -> Iterator[tuple[str, str]]:
    """(address, token) of a server on the loopback that has the mirror's copy of the repository, if there is one."""
    name = f"{request.name('mirror')} is {folder!r}"
    if not os.path.isabs(folder):
        raise snapshot.SnapshotError("path", f"{name}: write hub, peers, or the absolute path of a folder")
    if not os.path.isdir(folder):
        raise snapshot.SnapshotError("mirror", f"{name}, which is not there on this host: is it mounted?")
    token = secrets.token_urlsafe(32)
    wanted = {
        "repo": request.repo,
        "revision": request.revision,
        "allow_patterns": request.allow,
        "ignore_patterns": request.ignore,
    }
    server = peer_server.Server(("127.0.0.1", 0), folder, [wanted], token, waits=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", token
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def without_proxy() -> Iterator[None]:
    """Peers are reached directly, whatever the way to the hub is. The client inherits the environment."""
    names = {name for proxy in PROXIES for name in (proxy, proxy.upper())}
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def ensure(
    request: snapshot.Request,
    given: Sources,
    check: bool = False,
    warn: Callable[[str], None] = lambda _text: None,
    progress: snapshot.Progress | None = None,
) -> dict[str, Any]:
    """snapshot.ensure from the first source that has it all; what one has brought stays for the next.

    The result says under `source` where the last bytes came from. Hosts that wait for this one learn of a failure.
    """
    try:
        return _ensure(request, given, check, warn, progress)
    except Exception:
        if os.path.isdir(peer_server.FOLDER) and not check:
            with contextlib.suppress(FileNotFoundError):  # the server has just been stopped
                open(peer_server.mark(peer_server.FOLDER, request.repo, request.revision), "w").close()
        raise


def _ensure(
    request: snapshot.Request,
    given: Sources,
    check: bool,
    warn: Callable[[str], None],
    progress: snapshot.Progress | None,
) -> dict[str, Any]:
    if check:
        # Nothing is passed on in check mode. Without the hub, the host alone is looked at.
        return snapshot.ensure(request if given.hub else dataclasses.replace(request, python=""), True, warn, progress)
    request.validate()
    near = [*([given.mirror] if given.mirror else []), *given.peers]
    names = {**request.names, "endpoint": request.name("peers"), "token": request.name("peer_token")}
    for number, source in enumerate(near):
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(without_proxy())
                address, token, workers = source, given.token, given.workers
                if given.mirror and number == 0:
                    address, token = stack.enter_context(serve_mirror(source, request))
                    workers = request.workers
                nearby = dataclasses.replace(
                    request, endpoint=address, token=token, workers=workers, peer=True, xet=False, names=names
                )
                return {**snapshot.ensure(nearby, False, warn, progress), "source": source}
        except snapshot.SnapshotError as error:
            last = number + 1 == len(near)
            if error.kind in OWN_FAULTS or (last and not given.hub):
                raise
            then = request.hub if last else near[number + 1]
            warn(f"{source} did not bring {request.repo}, going on with {then}: {error}")
    return {**snapshot.ensure(request, False, warn, progress), "source": request.hub}
