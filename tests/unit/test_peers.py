"""Weights from peers: the line of hosts, and the peer's server against the real huggingface_hub client."""

from __future__ import annotations

import functools
import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import peer_server, peers, snapshot
from test_hf_snapshot import COMMIT, FILES, OTHER, REPO, ROOT, TOKEN, Bench, fill

RUN_TOKEN = "one-run-only-canary-0123456789abcdef"
SIZE = sum(map(len, FILES.values()))


# -- the line


@pytest.mark.parametrize(
    ("index", "roots", "fanout", "expected"),
    [
        (0, 1, 1, []),
        (1, 1, 1, [0]),
        (4, 1, 1, [3, 2, 1, 0]),
        (1, 2, 1, []),
        (4, 2, 1, [2, 0]),
        (5, 2, 1, [3, 1]),
        (6, 1, 2, [2, 0]),
        (13, 1, 3, [4, 1, 0]),
    ],
)
def test_ancestors(index: int, roots: int, fanout: int, expected: list[int]) -> None:
    assert peers.ancestors(index, roots, fanout) == expected


@pytest.mark.parametrize("roots", [1, 2, 5])
@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_line_is_a_tree_in_order(roots: int, fanout: int) -> None:
    """Everybody hangs on a root by hosts that come before, and nobody has more children than the fan-out."""
    children: dict[int, int] = {}
    for index in range(roots, 200):
        line = peers.ancestors(index, roots, fanout)
        assert line == sorted(line, reverse=True)
        assert line[0] < index
        assert line[-1] < roots
        children[line[0]] = children.get(line[0], 0) + 1
    assert max(children.values()) == fanout


@pytest.mark.parametrize(("hosts", "expected"), [(1, 1), (15, 1), (64, 1), (95, 2), (500, 2)])
def test_chain_until_it_is_long(hosts: int, expected: int) -> None:
    assert peers.best_fanout(hosts) == expected


def stocks(**hosts: str) -> dict[str, Any]:
    """host -> one letter a repository: A it is here, a it is wanted."""
    found = {}
    for number, (host, letters) in enumerate(hosts.items()):
        results = [
            {"repo": f"org/{x.lower()}", "revision": COMMIT, "action": "none" if x.isupper() else "fetch"}
            for x in letters
        ]
        server = {"address": f"10.0.0.{number}", "port": 18560, "models": "/m", "group": "sglang"}
        found[host] = peers.stock(results, ["*"], [], server)
    return found


def key(letter: str) -> str:
    return peers.key(f"org/{letter}", COMMIT, ["*"], [])


def test_first_host_goes_to_the_hub_and_the_others_stand_in_line() -> None:
    fleet = stocks(h0="ab", h1="ab", h2="ab", h3="ab")
    plan = peers.plan(list(fleet), list(fleet), fleet)
    assert [peers.sources(plan, host, key("a")) for host in fleet] == [
        [],
        ["http://10.0.0.0:18560"],
        ["http://10.0.0.1:18560", "http://10.0.0.0:18560"],
        ["http://10.0.0.2:18560", "http://10.0.0.1:18560", "http://10.0.0.0:18560"],
    ]
    assert set(plan["servers"]) == {"h0", "h1", "h2"}  # nobody asks the last one
    assert [r["repo"] for r in plan["servers"]["h1"]["repositories"]] == ["org/a", "org/b"]
    assert plan["helpers"] == []
    assert plan["clients"] == ["10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_hosts_that_have_it_are_roots_and_nobody_goes_to_the_hub() -> None:
    fleet = stocks(canary="AB", h1="Ab", h2="ab")
    plan = peers.plan(["h1", "h2"], ["canary"], fleet)
    assert peers.sources(plan, "h1", key("b")) == ["http://10.0.0.0:18560"]
    assert peers.sources(plan, "h2", key("a")) == ["http://10.0.0.1:18560"]  # the batch's own hosts first
    assert plan["helpers"] == ["canary"]
    assert [r["repo"] for r in plan["servers"]["canary"]["repositories"]] == ["org/b"]


def test_hosts_of_other_batches_that_have_nothing_are_left_out() -> None:
    fleet = stocks(h0="a", later="a")
    plan = peers.plan(["h0"], ["h0", "later"], fleet)
    assert plan["servers"] == {}
    assert plan["lines"][key("a")]["hosts"] == ["h0"]
    assert peers.filled(fleet["later"])["repositories"][0]["here"]


def test_seeds_and_other_patterns() -> None:
    fleet = stocks(h0="a", h1="a", h2="a", h3="a")
    result = {"repo": "org/a", "revision": COMMIT, "action": "fetch"}
    fleet["h4"] = peers.stock([result], ["*.safetensors"], [], {"address": "10.0.0.4", "port": 1})
    plan = peers.plan(list(fleet), [], fleet, seeds=2)
    assert [len(peers.sources(plan, host, key("a"))) for host in ("h0", "h1", "h2", "h3")] == [0, 0, 2, 2]
    assert peers.sources(plan, "h4", peers.key("org/a", COMMIT, ["*.safetensors"], [])) == []


def test_address_of_ip6() -> None:
    assert peers.url({"address": "fd00::1", "port": 1}) == "http://[fd00::1]:1"


# -- the server


class Host:
    """A folder of models on "another host", and its server."""

    def __init__(self, models: Path, token: str = RUN_TOKEN, **options: Any) -> None:
        wanted = {"repo": REPO, "revision": COMMIT, "allow_patterns": [], "ignore_patterns": []}
        self.models = models
        self.server = peer_server.Server(("127.0.0.1", 0), str(models), [wanted], token, **options)
        self.port = int(self.server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def ask(
        self, path: str, method: str = "GET", token: str | None = RUN_TOKEN, **headers: str
    ) -> tuple[int, bytes, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


def get(bench: Bench, models: Path, *urls: str, **changes: Any) -> dict[str, Any]:
    """Fetch into another host's folder from peers."""
    options = {k: changes.pop(k) for k in ("hub", "mirror", "check") if k in changes}
    check = options.pop("check", False)
    request = bench.request(**{"root": str(models), **changes})
    return peers.ensure(request, peers.Sources(peers=urls, token=RUN_TOKEN, **options), check, bench.warnings.append)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    it = Bench(tmp_path)
    yield it
    it.stop()


@pytest.fixture
def host(bench: Bench) -> Iterator[Host]:
    """A host that has everything, as a fetch leaves it."""
    fill(bench.path, FILES)
    hashes = {path: hashlib.sha256(data).hexdigest() for path, data in FILES.items()}
    snapshot.write_manifest(str(bench.path), bench.request(), hashes, "")
    it = Host(bench.models)
    yield it
    it.stop()


def tree(models: Path) -> dict[str, bytes]:
    folder = models / "org--model" / COMMIT
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != snapshot.MANIFEST]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


FILES_AT = f"/{REPO}/resolve/{COMMIT}"
FILE = f"{FILES_AT}/config.json"


@pytest.mark.parametrize("token", [None, "", "wrong", RUN_TOKEN[:-1], RUN_TOKEN + "x", "\xff"])
@pytest.mark.parametrize("path", [FILE, f"/api/models/{REPO}", "/"])
def test_nothing_without_the_token(host: Host, token: str | None, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, body, _ = host.ask(path, token=token)
    assert (status, body) == (401, b"")
    said = capfd.readouterr()
    assert "refused 127.0.0.1" in said.err
    assert RUN_TOKEN not in said.err + said.out


def test_server_without_a_real_token_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too short"):
        Host(tmp_path, token="")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/models",
        f"/api/models/{REPO}x",
        "/api/models/other/model",
        f"/api/models/{REPO}/tree/{OTHER}",
        f"/api/models/{REPO}/tree/main",
        f"/api/models/{REPO}/here/{OTHER}",
        f"/api/models/{REPO}/here",
        f"/{REPO}/resolve/{OTHER}/config.json",
        f"/other/model/resolve/{COMMIT}/config.json",
        f"{FILES_AT}/",
        f"{FILES_AT}/nested",
        f"{FILES_AT}/{snapshot.MANIFEST}",
        f"{FILES_AT}/../{COMMIT}/config.json",
        f"{FILES_AT}/../secret",
        f"{FILES_AT}/%2e%2e/secret",
        f"{FILES_AT}/..%2fsecret",
        f"{FILES_AT}//etc/passwd",
        f"{FILES_AT}/%2fetc%2fpasswd",
        "/etc/passwd",
        "/../../etc/passwd",
    ],
)
def test_nothing_else_than_the_files_of_the_revision(host: Host, path: str) -> None:
    fill(host.models / "other--model" / COMMIT, {"config.json": b"private"})
    (host.models / "org--model" / "secret").write_bytes(b"private")
    for method in ("GET", "HEAD"):
        status, body, _ = host.ask(path, method)
        assert (status, body) == (404, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading(host: Host, method: str) -> None:
    assert host.ask(FILE, method)[0] == 501


def test_what_is_here(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once where somebody knows none of it; held back, and then not yet, where there is nothing new."""
    monkeypatch.setattr(peer_server, "HOLD_SECONDS", 0.2)
    path = f"/api/models/{REPO}/here/{COMMIT}"
    for query in ("", "?after=0", f"?after={len(FILES) - 1}", "?after=-1", "?after=x"):
        status, body, _ = host.ask(path + query)
        assert (status, sorted(json.loads(body))) == (200, sorted(FILES))
    assert host.ask(f"{path}?after={len(FILES)}")[0] == 425
    host.server.waits = False
    assert host.ask(f"{path}?after={len(FILES)}")[0] == 404


def test_link_in_the_folder_is_not_followed(host: Host) -> None:
    folder = host.models / "org--model" / COMMIT
    (folder / "config.json").rename(folder / "elsewhere")
    (folder / "config.json").symlink_to(folder / "elsewhere")
    host.server.waits = False
    assert host.ask(FILE)[0] == 404


def test_ranges(host: Host) -> None:
    path = f"/{REPO}/resolve/{COMMIT}/model-00001-of-00002.safetensors"
    data = FILES["model-00001-of-00002.safetensors"]
    status, body, headers = host.ask(path, Range="bytes=1000-1999")
    assert (status, body, headers["Content-Range"]) == (206, data[1000:2000], f"bytes 1000-1999/{len(data)}")
    assert host.ask(path, Range="bytes=5-")[1] == data[5:]
    assert host.ask(path, Range=f"bytes={len(data)}-")[0] == 416
    status, body, headers = host.ask(path, "HEAD")
    assert (status, body, int(headers["Content-Length"])) == (200, b"", len(data))


def test_program_of_the_unit(bench: Bench, tmp_path: Path) -> None:
    """The one file that the unit runs, with the system's Python and nothing of ours on its path."""
    bench.ensure()
    code = "import sys; from weights_peer import program; sys.stdout.buffer.write(program())"
    paths = os.pathsep.join(path for path in sys.path if path)
    made = subprocess.run(
        [sys.executable, "-c", f"import conftest\n{code}"], check=True, capture_output=True, cwd=ROOT / "tests/unit",
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    archive = tmp_path / "peer.pyz"
    archive.write_bytes(made.stdout)
    (tmp_path / "token").write_text(RUN_TOKEN)
    wanted = {"repo": REPO, "revision": COMMIT, "allow_patterns": [], "ignore_patterns": []}
    told = {"models": str(bench.models), "address": "127.0.0.1", "port": 0, "repositories": [wanted]}
    (tmp_path / "told.json").write_text(json.dumps(told))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        server = subprocess.Popen(
            ["/usr/bin/python3", "-I", str(archive), str(tmp_path / "told.json")],
            env={"CREDENTIALS_DIRECTORY": str(tmp_path), "NOTIFY_SOCKET": str(tmp_path / "notify")},
        )
        try:
            assert manager.recv(100) == b"READY=1"
        finally:
            server.kill()
            server.wait()


# -- fetches


def test_from_a_peer_without_the_hub(bench: Bench, host: Host, tmp_path: Path) -> None:
    asked = bench.asked()
    result = get(bench, tmp_path / "other", host.url, hub=False)
    assert result["action"] == "fetch"
    assert result["source"] == host.url
    assert result["fetched_bytes"] == SIZE
    assert tree(tmp_path / "other") == FILES
    assert bench.asked() == asked
    assert bench.warnings == []
    ours = json.loads((host.models / "org--model" / COMMIT / snapshot.MANIFEST).read_text())["files"]
    theirs = json.loads((tmp_path / "other/org--model" / COMMIT / snapshot.MANIFEST).read_text())["files"]
    assert [(f["path"], f["sha256"]) for f in ours] == [(f["path"], f["sha256"]) for f in theirs]
    again = get(bench, tmp_path / "other", "http://127.0.0.1:1", hub=False)
    assert again["action"] == "none"


def test_three_in_a_row_while_the_first_still_fetches(bench: Bench, tmp_path: Path) -> None:
    """The last one begins first, before anybody has a single file; the hub sends one copy."""
    bench.faults({"path": "model-00002", "do": "slow", "rate": 150_000})
    models = [tmp_path / name for name in "abc"]
    servers = [Host(folder) for folder in models[:2]]
    results: dict[str, Any] = {}

    def work(name: str, folder: Path, *urls: str) -> None:
        results[name] = get(bench, folder, *urls, hub=not urls)

    threads = [
        threading.Thread(target=work, args=("c", models[2], servers[1].url)),
        threading.Thread(target=work, args=("b", models[1], servers[0].url)),
        threading.Thread(target=work, args=("a", models[0])),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.7)
    for thread in threads:
        thread.join(60)
    for server in servers:
        server.stop()
    assert [results[x]["fetched_bytes"] for x in "abc"] == [SIZE] * 3
    assert all(tree(folder) == FILES for folder in models)
    assert bench.hub.stats["bytes"] == SIZE


@pytest.mark.parametrize(("early", "late"), [("model-00001", "model-00002"), ("model-00002", "model-00001")])
def test_file_is_passed_on_before_the_others_are_there(bench: Bench, tmp_path: Path, early: str, late: str) -> None:
    """A receiver has one file while its peer still waits for the other one, in whichever order they come."""
    bench.faults({"path": late, "do": "slow", "rate": 15_000})
    peer = Host(tmp_path / "a")
    first = threading.Thread(target=get, args=(bench, tmp_path / "a"))
    second = threading.Thread(target=get, args=(bench, tmp_path / "b", peer.url), kwargs={"hub": False})
    first.start()
    second.start()
    file = tmp_path / "b/org--model" / f"{COMMIT}.partial" / f"{early}-of-00002.safetensors"
    published = tmp_path / "a/org--model" / COMMIT
    deadline = time.monotonic() + 20
    while not file.exists() and time.monotonic() < deadline:
        assert not published.exists(), "the peer was done before it passed anything on"
        time.sleep(0.02)
    assert file.exists()
    first.join(60)
    second.join(60)
    peer.stop()
    assert tree(tmp_path / "b") == FILES


def test_unverified_file_is_not_passed_on(bench: Bench, tmp_path: Path) -> None:
    host = Host(tmp_path / "a")
    stage = tmp_path / "a/org--model" / f"{COMMIT}.partial"
    fill(stage, FILES)
    files = [{"path": p, "size": len(d), "sha1": "0" * 40, "sha256": None} for p, d in FILES.items()]
    (stage / ".cache/dflash-fleet").mkdir(parents=True)
    request = bench.request()
    snapshot.write_json(str(stage / snapshot.LISTING), {"schema": 1, **snapshot.selection(request), "files": files})
    started = time.monotonic()
    assert host.ask(FILE)[0] == 425
    assert time.monotonic() - started >= peer_server.HOLD_SECONDS
    host.stop()


def test_next_source_where_a_peer_is_gone(bench: Bench, host: Host, tmp_path: Path) -> None:
    asked = bench.asked()
    result = get(bench, tmp_path / "other", "http://127.0.0.1:1", host.url, hub=False)
    assert result["source"] == host.url
    assert bench.asked() == asked
    assert len(bench.warnings) == 1
    assert f"going on with {host.url}" in bench.warnings[0]


def test_hub_where_every_peer_is_gone(bench: Bench, tmp_path: Path) -> None:
    result = get(bench, tmp_path / "other", "http://127.0.0.1:1")
    assert result["source"] == bench.url
    assert tree(tmp_path / "other") == FILES


def test_fails_where_the_hub_is_not_allowed(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(snapshot.SnapshotError) as caught:
        get(bench, tmp_path / "other", "http://127.0.0.1:1", hub=False, names={"peers": "model_weights_peer_port"})
    assert caught.value.kind == "network"
    assert "model_weights_peer_port" in str(caught.value)
    assert bench.asked() == 0


def test_peer_that_dies_in_the_middle(
    bench: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came from the first stays, the rest comes from the second."""
    second = Host(host.models)
    sent = threading.Event()
    real = peer_server.Handler._send

    def send(self: Any, stream: Any, revision: str, entry: dict[str, Any]) -> None:
        if self.server is host.server and entry["path"].startswith("model-00002") and self.command == "GET":
            host.server.socket.close()  # nobody listens any more
            self.close_connection = True
            self.connection.close()
            sent.set()
            raise ConnectionResetError
        real(self, stream, revision, entry)

    monkeypatch.setattr(peer_server.Handler, "_send", send)
    result = get(bench, tmp_path / "other", host.url, second.url, hub=False)
    second.stop()
    assert sent.is_set()
    assert result["source"] == second.url
    assert result["fetched_bytes"] < SIZE
    assert tree(tmp_path / "other") == FILES


def test_peer_with_a_flipped_bit(bench: Bench, host: Host, tmp_path: Path) -> None:
    """Same size and time: the peer does not notice, the receiver does."""
    shard = host.models / "org--model" / COMMIT / "model-00001-of-00002.safetensors"
    info = shard.stat()
    data = bytearray(shard.read_bytes())
    data[1234] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(info.st_atime_ns, info.st_mtime_ns))
    result = get(bench, tmp_path / "other", host.url)
    assert result["source"] == bench.url
    assert tree(tmp_path / "other") == FILES
    assert "twice with contents that do not have the hash" in bench.warnings[0]


def test_peer_whose_fetch_has_ended_without_it_is_given_up(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "GRACE_SECONDS", 2.0)
    peer = Host(tmp_path / "a")
    started = time.monotonic()
    result = get(bench, tmp_path / "b", peer.url)
    peer.stop()
    assert result["source"] == bench.url
    assert time.monotonic() - started < 20


def test_peer_whose_fetch_failed_says_so_at_once(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the list of files and no room for them."""
    monkeypatch.setattr(peer_server, "FOLDER", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    peer = Host(tmp_path / "a", folder=peer_server.FOLDER)
    started = time.monotonic()
    child = threading.Thread(target=get, args=(bench, tmp_path / "b", peer.url))
    child.start()
    with pytest.raises(snapshot.SnapshotError, match="have to stay free"):
        get(bench, tmp_path / "a", margin=10**18)
    child.join(40)
    peer.stop()
    assert tree(tmp_path / "b") == FILES
    assert time.monotonic() - started < 20 < peer_server.GRACE_SECONDS


def test_peer_that_is_fetching_is_waited_for(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than its grace, and longer than the limit on standing still."""
    monkeypatch.setattr(peer_server, "GRACE_SECONDS", 1.5)
    monkeypatch.setattr(peer_server, "HOLD_SECONDS", 1.0)
    home = tmp_path / "a/org--model"
    home.mkdir(parents=True)
    peer = Host(tmp_path / "a")
    request = bench.request(root=str(tmp_path / "a"))
    result: dict[str, Any] = {}
    with snapshot.Lock(request):
        fetch = functools.partial(get, bench, tmp_path / "b", peer.url, hub=False, stall=6)
        child = threading.Thread(target=lambda: result.update(fetch()))
        child.start()
        time.sleep(8)
        assert child.is_alive()
    get(bench, tmp_path / "a")
    child.join(30)
    peer.stop()
    assert result["source"] == peer.url


def test_other_patterns_are_not_passed_on(bench: Bench, tmp_path: Path) -> None:
    bench.ensure(allow=["*.json"])
    peer = Host(bench.models, waits=False)
    assert peer.ask(FILE)[0] == 404
    result = get(bench, tmp_path / "b", peer.url)
    peer.stop()
    assert result["source"] == bench.url
    assert tree(tmp_path / "b") == FILES


def test_own_fault_is_not_tried_elsewhere(bench: Bench, host: Host, tmp_path: Path) -> None:
    with pytest.raises(snapshot.SnapshotError) as caught:
        get(bench, tmp_path / "other", host.url, margin=10**18)
    assert caught.value.kind == "disk_full"
    assert bench.warnings == []


def test_way_to_peers_needs_no_proxy(bench: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    result = get(bench, tmp_path / "other", host.url, hub=False)
    assert result["source"] == host.url
    assert os.environ["http_proxy"] == "http://127.0.0.1:1"


def test_hub_token_does_not_reach_a_peer(
    bench: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = peer_server.Handler._answer

    def answer(self: Any) -> None:
        seen.append(str(self.headers))
        real(self)

    monkeypatch.setattr(peer_server.Handler, "_answer", answer)
    get(bench, tmp_path / "other", host.url, token=TOKEN)
    assert seen
    assert not [text for text in seen if TOKEN in text]


def test_check_mode_asks_no_peer(bench: Bench, tmp_path: Path) -> None:
    result = get(bench, tmp_path / "other", "http://127.0.0.1:1", check=True)
    assert result["to_fetch_bytes"] == SIZE
    result = get(bench, tmp_path / "other", "http://127.0.0.1:1", check=True, hub=False)
    assert result["to_fetch_bytes"] is None
    assert not (tmp_path / "other").exists()


# -- a folder on the host


def test_mirror(bench: Bench, tmp_path: Path) -> None:
    bench.ensure()
    asked = bench.asked()
    result = get(bench, tmp_path / "other", mirror=str(bench.models), hub=False)
    assert result["source"] == str(bench.models)
    assert tree(tmp_path / "other") == FILES
    assert bench.asked() == asked
    assert (tmp_path / "other/org--model" / COMMIT / "config.json").stat().st_nlink == 1


def test_mirror_that_lacks_a_file(bench: Bench, tmp_path: Path) -> None:
    bench.ensure()
    (bench.path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(snapshot.SnapshotError, match=r"model-00002"):
        get(bench, tmp_path / "other", mirror=str(bench.models), hub=False, workers=1)
    before = bench.hub.stats["bytes"]
    assert get(bench, tmp_path / "other", mirror=str(bench.models))["source"] == bench.url
    assert tree(tmp_path / "other") == FILES
    assert bench.hub.stats["bytes"] - before < SIZE


def test_mirror_that_is_not_there(bench: Bench, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(snapshot.SnapshotError, match=r"model_weights_source is .*nowhere.*not there") as caught:
        get(bench, tmp_path / "other", mirror=nowhere, hub=False, names={"mirror": "model_weights_source"})
    assert caught.value.kind == "mirror"
    assert get(bench, tmp_path / "other", mirror=nowhere)["source"] == bench.url


def test_mirror_that_is_a_typing_error(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(snapshot.SnapshotError, match="absolute path") as caught:
        get(bench, tmp_path / "other", mirror="peer")
    assert caught.value.kind == "path"
    assert bench.asked() == 0


def test_stage_can_be_read_by_the_group_alone(bench: Bench, tmp_path: Path) -> None:
    """A peer's server is a member of the group and nobody else."""
    old = os.umask(0o077)
    try:
        bench.faults({"path": "model-00002", "do": "slow", "rate": 5_000})
        assert bench.fails(timeout=8).kind == "timeout"
    finally:
        os.umask(old)
    for path in [bench.stage, bench.stage / "nested/deep", bench.stage / ".cache/dflash-fleet"]:
        assert path.stat().st_mode & 0o777 == 0o750, path
    for name in ("config.json", "nested/deep/notes.txt", snapshot.VERIFIED, snapshot.LISTING):
        assert (bench.stage / name).stat().st_mode & 0o777 == 0o640, name

