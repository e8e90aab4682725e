"""hf_snapshot against the rehearsal hub, with the real huggingface_hub client.

Every trap of the client that its exit status hides is here: a flipped bit, a truncated shard, a hub that is down.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import hub_fetch, snapshot

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "c" * 40
OTHER = "d" * 40
REPO = "org/model"
TOKEN = "hf_canary_4f1d"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"rehearsal_{name}", ROOT / "rehearsal" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


hub = load("hub")

FILES = {
    "config.json": b'{"hidden_size": 64}\n',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 800,
    "model-00002-of-00002.safetensors": bytes(range(255, -1, -1)) * 700,
    "nested/deep/notes.txt": b"small\n",
    "weights.gguf": b"another format",
}


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


class Bench:
    """A hub, its faults, and a place to fetch into."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.repos = tmp / "repos"
        self.models = tmp / "models"
        fill(self.repos / REPO / COMMIT, FILES)
        self.faults_file = tmp / "faults.json"
        self.hub = hub.serve(self.repos, tokens=frozenset([TOKEN]), faults=self.faults_file)
        threading.Thread(target=self.hub.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.hub.server_address[1]}"
        self.warnings: list[str] = []
        self.path = self.models / "org--model" / COMMIT
        self.stage = Path(f"{self.path}.partial")

    def stop(self) -> None:
        self.hub.shutdown()
        self.hub.server_close()

    def faults(self, *entries: dict[str, Any]) -> None:
        fresh = self.faults_file.with_suffix(".new")
        fresh.write_text(json.dumps(entries))
        fresh.replace(self.faults_file)

    def request(self, **changes: Any) -> snapshot.Request:
        settings: dict[str, Any] = {
            "repo": REPO,
            "revision": COMMIT,
            "root": str(self.models),
            "python": sys.executable,
            "endpoint": self.url,
            "owner": str(os.getuid()),
            "group": str(os.getgid()),
            "tmpdir": str(self.tmp),
            "names": {"token": "model_weights_token", "revision": "sglang_model_revision", "root": "sglang_root"},
        }
        return snapshot.Request(**{**settings, **changes})

    def ensure(self, check: bool = False, **changes: Any) -> dict[str, Any]:
        return snapshot.ensure(self.request(**changes), check=check, warn=self.warnings.append)

    def fails(self, check: bool = False, **changes: Any) -> snapshot.SnapshotError:
        with pytest.raises(snapshot.SnapshotError) as caught:
            self.ensure(check=check, **changes)
        return caught.value

    def content(self, folder: Path | None = None) -> dict[str, bytes]:
        folder = folder or self.path
        return {
            str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != snapshot.MANIFEST
        }

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.path / snapshot.MANIFEST).read_text())

    def asked(self) -> int:
        return self.hub.stats["requests"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    it = Bench(tmp_path)
    yield it
    it.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries as often as ever, but does not wait as long in between."""
    quick = "import time; _sleep = time.sleep; time.sleep = lambda seconds: _sleep(seconds / 50)\n"
    first = "from __future__ import annotations\n"
    source = snapshot.client_source()
    assert first in source
    monkeypatch.setattr(snapshot, "client_source", lambda: source.replace(first, first + quick, 1))


# -- the plain way


def test_fresh_then_unchanged(bench: Bench) -> None:
    first = bench.ensure()
    assert first["changed"]
    assert first["action"] == "fetch"
    assert first["files"] == 5
    assert first["bytes"] == first["fetched_bytes"] == sum(map(len, FILES.values()))
    assert bench.content() == FILES
    manifest = bench.manifest()
    assert manifest["schema"] == 1
    assert (manifest["repo"], manifest["revision"]) == (REPO, COMMIT)
    assert {f["path"]: f["sha256"] for f in manifest["files"]} == {
        p: hashlib.sha256(d).hexdigest() for p, d in FILES.items()
    }
    asked = bench.asked()
    second = bench.ensure(python="/nowhere", endpoint="http://127.0.0.1:1")
    assert not second["changed"]
    assert second["fetched_bytes"] == 0
    assert bench.asked() == asked
    assert os.listdir(bench.models / "org--model") == [COMMIT]
    assert not bench.warnings


def test_modes_are_set_and_kept(bench: Bench) -> None:
    bench.ensure()
    modes = {str(p.relative_to(bench.models)): p.stat().st_mode & 0o7777 for p in bench.models.rglob("*")}
    assert {m for p, m in modes.items() if (bench.models / p).is_dir()} == {0o750}
    assert {m for p, m in modes.items() if (bench.models / p).is_file()} == {0o640}
    (bench.path / "config.json").chmod(0o600)
    assert bench.ensure(check=True)["action"] == "attributes"
    assert bench.ensure()["action"] == "attributes"
    assert not bench.ensure()["changed"]
    assert bench.ensure(mode=0o644)["action"] == "attributes"
    assert (bench.path / "config.json").stat().st_mode & 0o7777 == 0o644


def test_stat_check_is_quick(tmp_path: Path) -> None:
    """64 shards are a matter of milliseconds (the goal is 50)."""
    files = {f"model-{n:05d}-of-00064.safetensors": b"x" for n in range(64)}
    request = snapshot.Request(
        REPO, COMMIT, str(tmp_path), "", owner=str(os.getuid()), group=str(os.getgid()), endpoint="http://127.0.0.1:1"
    )
    fill(Path(request.path), files)
    snapshot.write_manifest(request.path, request, {p: hashlib.sha256(d).hexdigest() for p, d in files.items()}, "")
    snapshot.ensure(request)  # modes
    result = snapshot.ensure(request)
    assert not result["changed"]
    assert result["seconds"] < 0.05


def test_check_mode_predicts_and_writes_nothing(bench: Bench) -> None:
    predicted = bench.ensure(check=True)
    assert predicted["changed"]
    assert predicted["to_fetch_bytes"] == sum(map(len, FILES.values()))
    assert not bench.models.exists()
    assert "config.json" in predicted["diff"]["after"]
    bench.ensure()
    assert not bench.ensure(check=True)["changed"]


@pytest.mark.parametrize("change", [{"python": ""}, {"python": "/nowhere/bin/python"}])
def test_check_mode_before_the_client_is_installed(bench: Bench, change: dict[str, Any]) -> None:
    predicted = bench.ensure(check=True, **change)
    assert predicted["changed"]
    assert predicted["to_fetch_bytes"] is None
    assert bench.asked() == 0


def test_patterns(bench: Bench) -> None:
    bench.ensure(ignore=["*.gguf", "nested/*"])
    assert set(bench.content()) == set(FILES) - {"weights.gguf", "nested/deep/notes.txt"}
    more = bench.ensure(ignore=["*.gguf"])
    assert more["action"] == "repair"
    assert more["fetched_bytes"] == len(FILES["nested/deep/notes.txt"])
    less = bench.ensure(allow=["*.json", "nested/*"])
    assert less["changed"]
    assert set(bench.content()) == {"config.json", "nested/deep/notes.txt"}
    assert "leave over" in str(bench.fails(allow=["*.nothing"]))


# -- damage on this host


def test_flipped_bit_with_same_size_and_time_is_found_by_full(bench: Bench) -> None:
    bench.ensure()
    shard = bench.path / "model-00001-of-00002.safetensors"
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not bench.ensure()["changed"]  # what a manifest of sizes and times cannot see
    assert bench.ensure(check=True, full=True)["action"] == "repair"
    repaired = bench.ensure(full=True)
    assert repaired["action"] == "repair"
    assert repaired["fetched_bytes"] == len(data)
    assert bench.content() == FILES
    assert not bench.ensure(full=True)["changed"]


@pytest.mark.parametrize("how", ["truncated", "deleted", "flipped"])
def test_damage_is_repaired(bench: Bench, how: str) -> None:
    bench.ensure()
    shard = bench.path / "model-00002-of-00002.safetensors"
    opened = shard.open("rb")  # an engine that has the file open keeps what it has
    if how == "truncated":
        os.truncate(shard, 1000)
    elif how == "deleted":
        shard.unlink()
    else:
        shard.write_bytes(b"\0" * len(FILES[shard.name]))
    assert bench.ensure(check=True)["changed"]
    repaired = bench.ensure()
    assert repaired["action"] == "repair"
    assert repaired["fetched_bytes"] == len(FILES[shard.name])
    assert bench.content() == FILES
    assert os.fstat(opened.fileno()).st_ino != shard.stat().st_ino
    opened.close()
    assert not bench.ensure(full=True)["changed"]
    assert not bench.stage.exists()


def test_touched_files_are_read_not_fetched(bench: Bench) -> None:
    bench.ensure()
    asked = bench.asked()
    os.utime(bench.path / "config.json")
    assert bench.ensure(check=True)["action"] == "manifest"
    assert bench.ensure()["action"] == "manifest"
    assert not bench.ensure()["changed"]
    assert bench.asked() == asked


def test_files_put_there_by_other_means_are_adopted(bench: Bench) -> None:
    fill(bench.path, FILES)
    (bench.path / "mask_embedding.pt").write_bytes(b"?")
    adopted = bench.ensure()
    assert adopted["action"] == "adopt"
    assert adopted["fetched_bytes"] == 0
    assert "mask_embedding.pt" in bench.warnings[0]
    assert not bench.ensure()["changed"]


def test_a_file_in_the_way(bench: Bench) -> None:
    bench.path.parent.mkdir(parents=True)
    bench.path.write_text("?")
    assert "in the way" in str(bench.fails())


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": 2, "files": []}', '{"schema": 1, "files": [{"path": 1}]}']
)
def test_a_broken_manifest_counts_as_none(bench: Bench, content: str) -> None:
    bench.ensure()
    (bench.path / snapshot.MANIFEST).write_text(content)
    assert bench.ensure()["action"] == "adopt"
    assert not bench.ensure()["changed"]


# -- a hub that misbehaves


def test_flipped_on_the_way_once(bench: Bench) -> None:
    bench.faults({"path": "00001-of", "do": "flip", "at": 5000, "times": 1})
    assert bench.ensure()["changed"]
    assert bench.content() == FILES
    assert bench.hub.stats["faults"] == 1


@pytest.mark.parametrize("times", [1, 2])
def test_client_that_is_done_without_a_file(bench: Bench, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """What it does not speak of is fetched again, and never published as a whole."""
    fetch, asked = snapshot.Client.fetch, []

    def without_the_last(client: snapshot.Client, files: list[dict[str, Any]]) -> None:
        asked.append(len(files))
        fetch(client, files[:-1] if len(asked) <= times else files)

    monkeypatch.setattr(snapshot.Client, "fetch", without_the_last)
    if times == 1:
        assert bench.ensure()["changed"]
        assert bench.content() == FILES
    else:
        assert bench.fails().kind == "corrupt"
        assert not bench.path.exists()
    assert asked == [len(FILES), 1]


def test_flipped_on_the_way_always(bench: Bench) -> None:
    bench.faults({"path": "00001-of", "do": "flip", "at": 5000})
    error = bench.fails()
    assert error.kind == "corrupt"
    assert "model-00001-of-00002.safetensors" in str(error)
    assert not bench.path.exists()
    bench.faults()
    again = bench.ensure()
    assert again["fetched_bytes"] == len(FILES["model-00001-of-00002.safetensors"])
    assert bench.content() == FILES


def test_truncated_by_the_hub(bench: Bench) -> None:
    bench.faults({"path": "00002-of", "do": "truncate", "at": 1000})
    error = bench.fails()
    assert error.kind == "size"
    assert not bench.path.exists()
    bench.faults()
    bench.ensure()
    assert bench.content() == FILES


def test_connection_cut_once(bench: Bench) -> None:
    bench.faults({"path": "00001-of", "do": "cut", "at": 70000, "times": 1})
    bench.ensure()
    assert bench.content() == FILES


def test_too_many_requests_once(bench: Bench) -> None:
    bench.faults({"path": "config.json", "do": "status", "status": 429, "times": 1})
    bench.ensure()
    assert bench.content() == FILES


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        # A hub that is only slow is no failure: see `kind` none.
        ({"do": "slow", "rate": 400_000}, None, ""),
        # The connection breaks again and again, each time at the same byte.
        ({"do": "cut", "at": 70_000}, "network", "cannot be reached"),
        ({"do": "status", "status": 429}, "rate_limited", "429, too many requests"),
        ({"do": "status", "status": 503}, "hub_error", "HTTP 503"),
        ({"do": "status", "status": 404, "code": "EntryNotFound"}, "entry", "lists a file of org/model"),
        ({"do": "status", "status": 403}, "unauthorized", "HTTP 403"),
        ({"do": "truncate", "at": 1000}, "size", "another size"),
        ({"do": "flip", "at": 5000}, "corrupt", "do not have the hash"),
    ],
    ids=["slow", "cut", "429", "503", "404", "403", "short", "flipped"],
)
@pytest.mark.usefixtures("impatient")
def test_a_shard_that_never_comes_right(bench: Bench, fault: dict[str, Any], kind: str | None, words: str) -> None:
    """Nothing is published over it, what came right stays, and with a good hub the next run fetches the rest alone."""
    bench.faults({"path": "00001-of", **fault})
    if kind is None:
        bench.ensure()
    else:
        error = bench.fails()
        assert error.kind == kind
        assert words in str(error)
        assert REPO in str(error) or bench.url in str(error)
        assert not bench.path.exists()
        part = Path(hub_fetch.part_path(str(bench.stage), SHARD))
        kept = part.stat().st_size if part.exists() else 0
        others = {p for p in FILES if (bench.stage / p).exists()}
        assert SHARD not in others
        bench.faults()
        bench.hub.stats.clear()
        again = bench.ensure()
        assert again["fetched_bytes"] == sum(len(FILES[p]) for p in set(FILES) - others) - kept
        assert bench.hub.stats["bytes"] == again["fetched_bytes"]
    assert bench.content() == FILES
    assert os.listdir(bench.models / "org--model") == [COMMIT]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(429, "", "rate_limited"), (503, "", "hub_error"), (404, "RepoNotFound", "repository"),
     (404, "RevisionNotFound", "revision"), (401, "GatedRepo", "gated"), (403, "GatedRepo", "gated")],
)  # fmt: skip
@pytest.mark.usefixtures("impatient")
def test_a_hub_that_refuses_the_list_of_files(bench: Bench, status: int, code: str, kind: str) -> None:
    bench.faults({"path": f"^{REPO}/$", "do": "status", "status": status, "code": code})
    assert bench.fails().kind == kind
    assert not bench.path.exists()


def test_a_small_file_flipped_on_the_way(bench: Bench) -> None:
    """Files outside LFS are known by git's hash alone."""
    bench.faults({"path": "config.json", "do": "flip", "at": 3})
    assert bench.fails().kind == "corrupt"
    bench.faults()
    bench.ensure()
    assert bench.content() == FILES


@pytest.mark.parametrize("how", ["flipped", "too long", "of another file"])
def test_a_part_that_is_damaged(bench: Bench, how: str) -> None:
    """What a killed run left is believed as far as the hash of the whole goes, and no further."""
    part = Path(hub_fetch.part_path(str(bench.stage), SHARD))
    part.parent.mkdir(parents=True)
    data = FILES[SHARD]
    part.write_bytes(
        {"flipped": b"?" + data[1:100_000], "too long": data + b"more", "of another file": data[::-1][:5000]}[how]
    )
    assert bench.ensure()["changed"]
    assert bench.content() == FILES


def test_a_hub_that_ignores_ranges(bench: Bench) -> None:
    """It answers a question for the rest with the whole: that is not put behind what is there."""
    part = Path(hub_fetch.part_path(str(bench.stage), SHARD))
    part.parent.mkdir(parents=True)
    part.write_bytes(FILES[SHARD][:50_000])
    bench.faults({"path": "00001-of", "do": "whole"})
    bench.ensure()
    assert bench.hub.stats["faults"] == 1
    assert bench.content() == FILES


def test_hub_down_with_files_from_before(bench: Bench) -> None:
    """The client says "downloaded" here."""
    fill(bench.stage, {"stray.txt": b"x", "config.json": FILES["config.json"]})
    bench.stop()
    error = bench.fails()
    assert error.kind == "network"
    assert "model_weights" not in str(error)  # no name given for the endpoint: the option's own
    assert "endpoint" in str(error)
    assert not bench.path.exists()


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"repo": "org/nothing"}, "repository", "org/nothing is not on"),
        ({"repo": "org/nothing", "token": TOKEN}, "repository", "may not see it"),
        ({"revision": OTHER}, "revision", "check sglang_model_revision"),
        ({"revision": "main"}, "revision", "sglang_model_revision is 'main'"),
        ({"revision": "C" * 40}, "revision", "40 hexadecimal digits"),
        ({"repo": "nothing"}, "repository_name", "ORGANISATION/NAME"),
        ({"repo": "../etc"}, "repository_name", "ORGANISATION/NAME"),
        ({"python": "/nowhere/python"}, "no_client", "/nowhere/python"),
        ({"margin": 10**18}, "disk_full", "sglang_root"),
        ({"owner": "nobody-of-that-name"}, "owner", "nobody-of-that-name"),
    ],
)
def test_refusals(bench: Bench, changes: dict[str, Any], kind: str, words: str) -> None:
    error = bench.fails(**changes)
    assert error.kind == kind
    assert words in str(error)
    assert "\n" not in str(error)
    assert not bench.path.exists()


def test_a_python_without_the_client(bench: Bench, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    error = bench.fails(python=str(bare))
    assert error.kind == "no_client"
    bare.write_text("#!/bin/sh\necho broken interpreter >&2\nexit 7\n")
    error = bench.fails(python=str(bare))
    assert "broken interpreter" in str(error)


def test_gated(bench: Bench) -> None:
    (bench.repos / REPO / ".gated").touch()
    error = bench.fails()
    assert error.kind == "gated"
    assert "set model_weights_token" in str(error)
    error = bench.fails(token="hf_wrong")
    assert error.kind == "gated"
    assert "no access" in str(error)
    assert "hf_wrong" not in str(error)
    bench.ensure(token=TOKEN)
    assert bench.content() == FILES


def test_the_token_is_not_sent_on_to_a_storage_server(bench: Bench) -> None:
    storage = hub.serve(bench.repos)
    threading.Thread(target=storage.serve_forever, args=(0.05,), daemon=True).start()
    try:
        (bench.repos / REPO / ".gated").touch()
        storage.repos.tokens = frozenset()
        url = f"http://127.0.0.1:{storage.server_address[1]}"
        bench.faults({"path": "safetensors", "do": "redirect", "to": url})
        # The storage server does not know about gates: it serves the same files without a token.
        storage.repos.folder = lambda repo, _authorization: bench.repos / repo
        bench.ensure(token=TOKEN)
        assert storage.stats["get"] == 2
        assert storage.stats["authorized"] == 0
        assert bench.hub.stats["authorized"] > 0
        assert bench.content() == FILES
    finally:
        storage.shutdown()
        storage.server_close()


class FakeError(Exception):
    """Stands in for the client's exceptions, by name and status."""

    def __init__(self, status: int | None = None) -> None:
        super().__init__("words")
        if status is not None:
            self.response = type("Response", (), {"status_code": status})()


def fake_error(name: str, status: int | None = None) -> BaseException:
    error: BaseException = type(name, (FakeError,), {})(status)
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(28, "No space left on device"), "disk_full"),
        (fake_error("GatedRepoError", 403), "gated"),
        (fake_error("RepositoryNotFoundError", 401), "repository"),
        (fake_error("RevisionNotFoundError", 404), "revision"),
        (fake_error("RemoteEntryNotFoundError", 404), "entry"),
        (fake_error("HFValidationError"), "repository_name"),
        (fake_error("HfHubHTTPError", 401), "unauthorized"),
        (fake_error("HfHubHTTPError", 429), "rate_limited"),
        (fake_error("HfHubHTTPError", 503), "hub_error"),
        (fake_error("HfHubHTTPError", 416), "size"),
        (fake_error("ConnectError"), "network"),
        (ConnectionResetError("reset"), "network"),
        (TimeoutError(), "network"),
        (OSError("Consistency check failed: file should be of size 1"), "size"),
        (ValueError("something else"), "client"),
    ],
)
def test_failures_of_the_client_by_kind(bench: Bench, error: BaseException, kind: str) -> None:
    event = hub_fetch.classify(error)
    assert event["kind"] == kind
    for token in ("", TOKEN):
        sentence = str(snapshot.explain(bench.request(token=token), {**event, "path": "a/file"}))
        assert REPO in sentence or bench.url in sentence
        assert TOKEN not in sentence


def test_a_cause_further_down_counts() -> None:
    wrapper = RuntimeError("wrapped")
    wrapper.__cause__ = OSError(28, "No space left on device")
    assert hub_fetch.classify(wrapper)["kind"] == "disk_full"


def test_xet_files_go_through_the_client_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Xet server can be had here: what is asked of the client is looked at."""
    settings = {"repo": REPO, "revision": COMMIT, "endpoint": "http://hub", "token": "", "stage": str(tmp_path)}
    runner = hub_fetch.Runner({**settings, "allow": [], "ignore": [], "workers": 1, "peer": False})
    answer = type("Metadata", (), {"xet_file_data": object(), "location": "http://hub/x"})()
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(runner, "metadata", lambda *_a, **_k: answer)
    monkeypatch.setattr(runner, "xet", True)

    class Client:
        hf_hub_url = staticmethod(lambda *_a, **_k: "http://hub/x")

        @staticmethod
        def hf_hub_download(*names: str, **options: Any) -> None:
            asked.append({"names": names, **options})

    monkeypatch.setattr(runner, "hub", Client)
    runner._fetch_one("a.safetensors", 5)
    assert asked[0]["names"] == (REPO, "a.safetensors")
    assert asked[0]["local_dir"] == str(tmp_path)
    assert asked[0]["revision"] == COMMIT
    assert asked[0]["token"] is False


def test_paths_from_the_hub_stay_inside() -> None:
    good = ["a", "a/b", "a..b", ".gitattributes"]
    bad = ["", "/etc/passwd", "../a", "a/../../b", "a//b", ".cache/x", snapshot.MANIFEST, "./a"]
    assert [p for p in good + bad if snapshot.safe_path(p)] == good


# -- runs that are killed

DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dflash_fleet import snapshot
snapshot.ensure(snapshot.Request(**json.loads(sys.stdin.read())))
"""


def start(bench: Bench, **changes: Any) -> subprocess.Popen[bytes]:
    """A run in a process of its own, to be killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(ROOT / "module_utils")], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(vars(bench.request(**changes))).encode())
    process.stdin.close()
    return process


def until(condition: Callable[[], Any], seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def clients(folder: Path) -> list[int]:
    """Client processes that were started from a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"hub_fetch.py" in command and str(folder).encode() in command:
                found.append(int(entry.name))
    return found


def test_kill_and_resume(bench: Bench) -> None:
    """SIGKILL in the middle of a shard: the client ends too, and the next run asks for the rest only."""
    size = 30 << 20
    data = random.Random(0).randbytes(size)
    fill(bench.repos / REPO / COMMIT, {"model-00001-of-00002.safetensors": data})
    bench.faults({"path": "00001-of", "do": "slow", "rate": 40 << 20})
    run = start(bench)
    part = Path(hub_fetch.part_path(str(bench.stage), "model-00001-of-00002.safetensors"))
    until(lambda: part.exists() and part.stat().st_size >= 10 << 20)
    run.kill()
    run.wait()
    until(lambda: not clients(bench.tmp))
    assert not list(bench.tmp.glob("dflash-fleet-fetch-*"))
    have = part.stat().st_size
    # What other versions of the client leave behind is removed.
    fill(bench.stage, {".cache/huggingface/download/x.1234.incomplete": b"x" * 100, "junk": b"?"})
    bench.faults()
    bench.hub.stats.clear()
    result = bench.ensure()
    assert bench.hub.stats["ranges"] == 1
    assert have >= 10 << 20
    assert result["fetched_bytes"] <= size - have + sum(map(len, FILES.values()))
    assert bench.content() == {**FILES, "model-00001-of-00002.safetensors": data}
    assert os.listdir(bench.models / "org--model") == [COMMIT]
    assert not bench.ensure(full=True)["changed"]


def test_module_and_client_killed_at_once(bench: Bench) -> None:
    """Nobody is left to clean up: the next run does, and leaves alone what another run works with."""
    bench.faults({"path": "00001-of", "do": "slow", "rate": 100_000})
    run = start(bench)
    until(lambda: bench.hub.stats["get"])
    (client,) = clients(bench.tmp)
    os.kill(run.pid, signal.SIGSTOP)  # so that it does not see the client's end
    os.kill(client, signal.SIGKILL)
    run.kill()
    run.wait()
    assert len(list(bench.tmp.glob("dflash-fleet-fetch-*"))) == 1
    until(lambda: not clients(bench.tmp))
    time.sleep(0.3)  # it closes what it had open
    other, lock = snapshot.client_folder(str(bench.tmp))
    assert [str(path) for path in bench.tmp.glob("*dflash-fleet-fetch-*")] == [other]
    bench.faults()
    assert bench.ensure()["changed"]
    assert [str(path) for path in bench.tmp.glob("*dflash-fleet-fetch-*")] == [other]
    os.close(lock)
    bench.ensure(full=True, ignore=["*.gguf"])
    assert not list(bench.tmp.glob("*dflash-fleet-fetch-*"))


def test_killed_at_every_step_ends_in_the_same_tree(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies right before or after each call that changes the disk; the next run finishes."""
    calls = ["os.replace", "os.rename", "os.chown", "os.fsync", "shutil.rmtree", "os.unlink"]
    bench.ensure()
    clean = bench.content()
    seen = 0
    for number in range(40):
        shutil.rmtree(bench.models, ignore_errors=True)
        child = os.fork()
        if child == 0:
            count = 0

            def deadly(original: Callable[..., Any], stop: int = number) -> Callable[..., Any]:
                def call(*args: Any, **kwargs: Any) -> Any:
                    nonlocal count
                    if count == stop:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count += 1
                    return original(*args, **kwargs)

                return call

            # Without the network: the files are in the stage already, only the way from there is walked.
            fill(bench.stage, FILES)
            for name in calls:
                module, _, attribute = name.partition(".")
                target = {"os": os, "shutil": shutil}[module]
                monkeypatch.setattr(target, attribute, deadly(getattr(target, attribute)))
            monkeypatch.setattr(snapshot.Snapshot, "_open", fake_tree)
            try:
                bench.ensure()
            finally:
                os._exit(0)
        _pid, status = os.waitpid(child, 0)
        monkeypatch.setattr(snapshot.Snapshot, "_open", fake_tree)
        bench.ensure()
        monkeypatch.undo()
        assert bench.content() == clean
        assert os.listdir(bench.models / "org--model") == [COMMIT]
        assert not bench.ensure()["changed"]
        if status == 0:
            break
        seen += 1
    assert seen > 10


def fake_tree(self: snapshot.Snapshot, lock: int | None) -> list[dict[str, Any]]:
    """What the hub would list, without a client."""

    class Nothing:
        def close(self) -> None: ...

    self.client = Nothing()  # type: ignore[assignment]
    return [{"path": p, "size": len(d), "sha1": "", "sha256": hashlib.sha256(d).hexdigest()} for p, d in FILES.items()]


def test_two_runs_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.faults({"path": "00001-of", "do": "slow", "rate": 60_000})
    run = start(bench)
    try:
        until(lambda: clients(bench.tmp))
        until(lambda: bench.hub.stats["get"])
        monkeypatch.setattr(snapshot, "LOCK_SECONDS", 0.3)
        assert bench.fails().kind == "busy"
    finally:
        run.kill()
        run.wait()
    bench.faults()
    monkeypatch.setattr(snapshot, "LOCK_SECONDS", 10)
    bench.ensure()
    assert bench.content() == FILES


def test_the_token_is_nowhere_to_be_read(bench: Bench) -> None:
    """Not in the client's arguments, environment or any file while it works, nor afterwards."""
    (bench.repos / REPO / ".gated").touch()
    bench.faults({"path": "00001-of", "do": "slow", "rate": 100_000})
    run = start(bench, token=TOKEN)
    try:
        pid = until(lambda: clients(bench.tmp))[0]
        until(lambda: bench.hub.stats["get"])
        secret = TOKEN.encode()
        for process in (pid, run.pid):
            assert secret not in Path(f"/proc/{process}/cmdline").read_bytes()
            assert secret not in Path(f"/proc/{process}/environ").read_bytes()
        looked = 0
        for file in [p for p in bench.tmp.rglob("*") if p.is_file()]:
            with contextlib.suppress(FileNotFoundError):  # the client is at work: its own files come and go
                assert secret not in file.read_bytes()
                looked += 1
        assert looked > 5
    finally:
        run.kill()
        run.wait()


def test_stalled_and_out_of_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "GROWTH_SECONDS", 0.2)
    bench.faults({"path": "00001-of", "do": "slow", "rate": 500})
    error = bench.fails(stall=1)
    assert error.kind == "stalled"
    assert "of 5 files" in str(error)
    error = bench.fails(timeout=1)
    assert error.kind == "timeout"
    assert not clients(bench.tmp)


@contextlib.contextmanager
def filesystem(path: Path, options: str) -> Iterator[Path]:
    """A filesystem of its own with a limit; the test is skipped where this user may not mount one."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small filesystem")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_disk_runs_full_for_real(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filesystem(tmp_path / "small", "size=256k") as small:
        error = bench.fails(root=str(small))
        assert error.kind == "disk_full"
        assert "needs 384 kB more" in str(error)
        assert not list(small.rglob("*.safetensors"))
        # Somebody else takes the space after the check: the client meets a full disk.
        monkeypatch.setattr(snapshot, "check_space", lambda *_a: None)
        error = bench.fails(root=str(small))
        assert error.kind == "disk_full"
        assert "ran full" in str(error)


def test_inodes_run_out_before_the_first_byte(bench: Bench, tmp_path: Path) -> None:
    """Room for the bytes, none for the files: found out from the filesystem, with no file asked of the hub."""
    with filesystem(tmp_path / "few-inodes", "size=64m,nr_inodes=40") as small:
        error = bench.fails(root=str(small))
        assert error.kind == "disk_full"
        assert f"needs {len(FILES) + snapshot.INODE_MARGIN} inodes" in str(error)
        assert "sglang_root" in str(error)
        assert "get" not in bench.hub.stats
        assert not list(small.rglob("*.safetensors"))


# -- a fetch in slices

SLICES = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dflash_fleet import background, snapshot
background.ORPHAN = float(sys.argv[3])
asked = json.loads(sys.stdin.read())
warnings = []
try:
    answer = snapshot.ensure_in_slices(
        snapshot.Request(**asked["request"]), float(sys.argv[2]), check=asked["check"], warn=warnings.append
    )
    print(json.dumps({**answer, "warnings": warnings}))
except snapshot.SnapshotError as error:
    print(json.dumps({"failed": error.kind, "msg": str(error)}))
"""


def watch(bench: Bench, seconds: float = 0.5, orphan: float = 20, check: bool = False, **changes: Any) -> Any:
    """One slice, in a process of its own as Ansible has it."""
    done = subprocess.run(
        [sys.executable, "-c", SLICES, str(ROOT / "module_utils"), str(seconds), str(orphan)],
        input=json.dumps({"request": vars(bench.request(**changes)), "check": check}).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def to_the_end(bench: Bench, **changes: Any) -> Any:
    for _ in range(60):
        answer = watch(bench, seconds=1, **changes)
        if answer.get("finished", True):
            return answer
    raise AssertionError(answer)


BIG = 40 << 20  # the client writes 10 MB at a time
SLOW = {"path": "00001-of", "do": "slow", "rate": 14 << 20}


@pytest.fixture
def slow(bench: Bench) -> Bench:
    """A shard that takes three seconds."""
    data = random.Random(1).randbytes(BIG)
    fill(bench.repos / REPO / COMMIT, {"model-00001-of-00002.safetensors": data})
    bench.faults(SLOW)
    return bench


def test_slices_show_progress_and_end_in_the_result(slow: Bench) -> None:
    seen = []
    while True:
        answer = watch(slow)
        if answer["finished"]:
            break
        seen.append(answer["progress"])
    assert answer["changed"]
    assert answer["action"] == "fetch"
    assert answer["fetched_bytes"] == answer["bytes"]
    fetching = [shot for shot in seen if shot["step"] == "fetch"]
    assert len(fetching) >= 2
    assert [shot["done_bytes"] for shot in fetching] == sorted(shot["done_bytes"] for shot in fetching)
    assert {shot["total_bytes"] for shot in fetching} == {answer["bytes"]}
    assert 0 < fetching[-1]["percent"] <= 100
    assert fetching[-1]["bytes_per_second"] > 0
    assert fetching[-1]["remaining"] is not None
    assert os.listdir(slow.models / "org--model") == [COMMIT]
    # One client for all slices, and nothing is left of it.
    assert slow.hub.stats["get"] == len(FILES)
    until(lambda: not clients(slow.tmp))
    again = watch(slow, python="/nowhere")
    assert (again["finished"], again["changed"]) == (True, False)


def test_a_failure_in_a_slice_is_the_same_failure(bench: Bench) -> None:
    (bench.repos / REPO / ".gated").touch()
    answer = to_the_end(bench)
    assert answer["failed"] == "gated"
    assert "set model_weights_token" in answer["msg"]
    assert watch(bench, revision="main")["failed"] == "revision"


def test_nobody_watches_any_more(slow: Bench) -> None:
    """A controller that went away for good: the fetch ends, what it has stays."""
    slow.faults({**SLOW, "rate": 6 << 20})
    assert not watch(slow, seconds=1.5, orphan=0.3)["finished"]
    until(lambda: not clients(slow.tmp))
    assert slow.stage.exists()
    slow.faults()
    assert to_the_end(slow)["fetched_bytes"] < BIG + sum(map(len, FILES.values()))


def test_the_process_that_fetches_is_killed(slow: Bench) -> None:
    slow.faults({**SLOW, "rate": 6 << 20})
    assert not watch(slow, seconds=1.5)["finished"]
    (client,) = clients(slow.tmp)
    parent = int(Path(f"/proc/{client}/stat").read_text().rsplit(")", 1)[1].split()[1])
    watcher = subprocess.Popen(
        [sys.executable, "-c", SLICES, str(ROOT / "module_utils"), "30", "20"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    threading.Timer(1, os.kill, [parent, signal.SIGKILL]).start()
    output, _ = watcher.communicate(json.dumps({"request": vars(slow.request()), "check": False}).encode())
    assert json.loads(output)["failed"] == "killed"
    until(lambda: not clients(slow.tmp))
    slow.faults()
    assert to_the_end(slow)["changed"]
    assert slow.content()["model-00001-of-00002.safetensors"] == random.Random(1).randbytes(BIG)
    assert os.listdir(slow.models / "org--model") == [COMMIT]


def test_a_run_with_other_settings_takes_over(slow: Bench) -> None:
    """Nobody follows the first one any more, so the second need not wait for it."""
    slow.faults({**SLOW, "rate": 1 << 20})
    assert not watch(slow)["finished"]
    assert not watch(slow, workers=2)["finished"]
    slow.faults()
    answer = to_the_end(slow, workers=2)
    assert answer["action"] == "fetch"
    assert slow.content()["model-00001-of-00002.safetensors"] == random.Random(1).randbytes(BIG)


def test_a_run_with_other_settings_waits_for_one_that_is_followed(slow: Bench) -> None:
    slow.faults({**SLOW, "rate": 6 << 20})
    code = [sys.executable, "-c", SLICES, str(ROOT / "module_utils"), "4", "20"]
    watcher = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert watcher.stdin is not None
    watcher.stdin.write(json.dumps({"request": vars(slow.request()), "check": False}).encode())
    watcher.stdin.close()
    until(lambda: clients(slow.tmp))
    assert watch(slow, workers=2)["failed"] == "busy"
    watcher.wait()
    slow.faults()
    assert to_the_end(slow)["changed"]


def test_full_check_in_slices(bench: Bench) -> None:
    bench.ensure()
    assert not to_the_end(bench, full=True)["changed"]
    shard = bench.path / "model-00001-of-00002.safetensors"
    before = shard.stat()
    shard.write_bytes(b"?" * before.st_size)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert to_the_end(bench, check=True, full=True)["action"] == "repair"
    assert to_the_end(bench, full=True)["action"] == "repair"
    assert bench.content() == FILES


def test_progress_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: now[0])
    progress = snapshot.Progress("org/model")
    assert snapshot.progress_text(progress.look()) == "org/model  asking for the list of files"
    done = [190_000_000_000]
    progress.begin("fetch", 610_000_000_000, lambda: done[0])
    assert progress.look()["remaining"] is None
    for _ in range(60):
        now[0] += 1
        done[0] += 1_000_000_000
    now[0] += 1
    done[0] += 0
    shot = progress.look()
    assert shot["percent"] == 40
    assert snapshot.progress_text(shot) == "org/model  40 %  250 GB of 610 GB  984 MB/s"
    # What stands still for a while has no rate any more, and no promise.
    for _ in range(snapshot.RATE_SECONDS + 1):
        now[0] += 1
        shot = progress.look()
    assert (shot["bytes_per_second"], shot["remaining"]) == (0, None)
    progress.begin("verify", 1000)
    progress.count(500)
    assert snapshot.progress_text(progress.look()) == "org/model  checking  50 %  500 B of 1.0 kB"


# -- the module


def module_run(arguments: dict[str, Any], check: bool = False, diff: bool = False) -> tuple[dict[str, Any], str]:
    """The module as Ansible runs it, without Ansible around it."""
    code = (
        "import sys, runpy, ansible.module_utils as m; m.__path__.append(sys.argv[1]);"
        "import ansible.module_utils.basic as b; b._ANSIBLE_PROFILE = 'legacy';"
        "b._ANSIBLE_ARGS = sys.stdin.buffer.read();"
        "runpy.run_path(sys.argv[2], run_name='__main__')"
    )
    payload = {**arguments, "_ansible_check_mode": check, "_ansible_diff": diff, "_ansible_tmpdir": None}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "module_utils"), str(ROOT / "library" / "hf_snapshot.py")],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": payload}).encode(),
        capture_output=True,
        check=False,
    )
    text = done.stdout.decode()
    return json.loads(text), text + done.stderr.decode()


def test_module(bench: Bench) -> None:
    (bench.repos / REPO / ".gated").touch()
    arguments = {
        "repo": REPO,
        "revision": COMMIT,
        "root": str(bench.models),
        "python": sys.executable,
        "endpoint": bench.url + "/",
        "owner": str(os.getuid()),
        "group": str(os.getgid()),
        "token": TOKEN,
        "variables": {"token": "model_weights_token"},
    }
    result, text = module_run({**arguments, "token": ""})
    assert result["failed"]
    assert result["kind"] == "gated"
    assert "model_weights_token" in result["msg"]
    result, text = module_run(arguments)
    assert result["changed"]
    assert result["path"] == str(bench.path)
    assert TOKEN not in text
    result, text = module_run(arguments, check=True, diff=True)
    assert not result["changed"]
    result, text = module_run({**arguments, "mode": "0999"})
    assert "octal" in result["msg"]
