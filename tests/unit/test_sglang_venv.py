"""The module sglang_venv and its action plugin: what is sent, what is predicted, and what a person is told."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sglang_venv
from ansible.errors import AnsibleError
from ansible.module_utils.testing import patch_module_args
from dflash_fleet import venvs
from test_wheels import make_wheel

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("action_sglang_venv", ROOT / "action_plugins" / "sglang_venv.py")
action = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(action)

# The module and the plugin see the package under Ansible's name.
package = sglang_venv.venvs


@pytest.fixture
def unbuilt(monkeypatch):
    """An installation that leaves a usable interpreter and the names of the wheels it had."""

    def install(
        path: Path, _requirements: str, _interpreter: object, wheels: Path, index: bool, _network: object
    ) -> dict[str, float]:
        (path / "bin").mkdir(parents=True)
        (path / "bin" / "python").symlink_to(sys.executable)
        (path / "had").write_text(json.dumps([index, sorted(one.name for one in wheels.glob("*.whl"))]))
        return {"install": 1.0, "compile": 0.0}

    monkeypatch.setattr(package, "install", install)
    monkeypatch.setattr(package, "verify", lambda *_arguments: None)


class Connection:
    """A host whose directories are on this machine."""

    class _shell:
        join_path = staticmethod(lambda *parts: "/".join(parts))


class Action(action.ActionModule):
    """The plugin with the module called in this process and files copied instead of sent."""

    def __init__(self, tmp: Path, arguments: dict, check: bool) -> None:
        self._task = type("Task", (), {"args": arguments, "check_mode": check, "async_val": 0, "diff": False})()
        self._connection = Connection()
        self.tmp = tmp
        self.calls: list[str] = []
        self.sent: list[str] = []

    def run(self, tmp=None, task_vars=None):
        # What ActionBase.run does beyond an empty result needs a real connection.
        self_run = action.ActionBase.run
        action.ActionBase.run = lambda *_arguments: {}
        try:
            return super().run(tmp, task_vars)
        finally:
            action.ActionBase.run = self_run

    def _execute_module(self, module_name, module_args, task_vars):
        self.calls.append(module_args["step"])
        options = {"python": sys.executable, "imports": [], "command": [], "environment": {}, "user": "", **module_args}
        options.setdefault("engine", None)
        options.setdefault("archive", "")
        options.setdefault("archive_sha256", "")
        options.setdefault("keep", 3)
        options.setdefault("network", {})
        options.setdefault("index", False)
        try:
            # A module's result always has a file's attributes beside a path.
            return {**sglang_venv.step(options), "state": "directory", "uid": 0}
        except (package.VenvError, OSError) as error:
            return {"failed": True, "msg": str(error)}

    def _make_tmp_path(self):
        folder = self.tmp / "arrived"
        folder.mkdir()
        return str(folder)

    def _remove_tmp_path(self, folder):
        shutil.rmtree(folder)

    def _transfer_file(self, local, remote):
        self.sent.append(Path(remote).name)
        shutil.copyfile(local, remote)


@pytest.fixture
def host(tmp_path):
    """A wheelhouse on the controller, an empty host, and a way to run the task."""

    class Host:
        house = tmp_path / "house"
        root = tmp_path / "host" / "venvs"

        def __init__(self) -> None:
            self.wheels = [make_wheel(self.house, "alpha"), make_wheel(self.house, "beta")]
            self.lock()

        def lock(self) -> None:
            text = "".join(
                "{}=={} --hash=sha256:{}\n".format(*one.name.split("-")[:2], venvs.sha256(one)) for one in self.wheels
            )
            (self.house / "requirements.txt").write_text(text)

        def run(self, check: bool = False, **arguments: object):
            task = Action(
                tmp_path,
                {
                    "name": "test",
                    "wheelhouse": str(self.house),
                    "root": str(self.root),
                    "cache": str(tmp_path / "host" / "cache"),
                    **arguments,
                },
                check,
            )
            return task, task.run(task_vars={"inventory_hostname": "gpu-01"})

    return Host()


def test_build_sends_once_and_second_run_only_looks(host, unbuilt):
    task, result = host.run()
    assert result["changed"] is True
    assert result["found"] == "absent"
    assert task.calls == ["probe", "adopt", "build"]
    # Small wheels travel as one file.
    assert task.sent == ["small.tar"]
    assert result["sent_bytes"] == sum(one.stat().st_size for one in host.wheels)
    assert set(result["seconds"]) == {"send", "install", "compile", "check"}
    assert not {"state", "uid", "have", "free_bytes"} & set(result)
    again, second = host.run()
    assert second["changed"] is False
    assert second["found"] == "complete"
    assert second["path"] == result["path"]
    assert again.calls == ["probe"]
    assert again.sent == []


def test_check_mode_predicts_and_touches_nothing(host, unbuilt, tmp_path):
    task, result = host.run(check=True)
    assert result["changed"] is True
    assert "absent" in result["diff"]["before"]
    assert task.calls == ["probe"]
    assert not (tmp_path / "host").exists()
    _, real = host.run()
    assert real["path"] == result["path"]
    assert host.run(check=True)[1]["changed"] is False


def test_large_wheels_travel_alone_in_portions(host, unbuilt, monkeypatch):
    monkeypatch.setattr(action, "SMALL", 10)
    monkeypatch.setattr(action, "PORTION", 500)
    task, result = host.run()
    assert sorted(task.sent) == sorted(one.name for one in host.wheels)
    assert task.calls == ["probe", "adopt", "adopt", "build"]
    assert result["changed"] is True


def test_what_an_interrupted_run_sent_is_not_sent_again(host, unbuilt, monkeypatch):
    def fail(*_arguments, **_options):
        raise package.VenvError("installing failed")

    with monkeypatch.context() as patch:
        patch.setattr(package, "build", fail)
        task, result = host.run()
        assert result["failed"] is True
        assert result["msg"] == "installing failed"
    task, result = host.run()
    assert task.sent == []
    assert result["changed"] is True


def test_changed_lock_is_another_environment(host, unbuilt):
    first = host.run()[1]["path"]
    host.wheels[1].unlink()
    host.wheels[1] = make_wheel(host.house, "beta", "2.0")
    host.lock()
    second = host.run()[1]["path"]
    assert first != second
    assert Path(first, ".complete").is_file()


def test_full_disk_is_told_before_anything_is_sent(host, unbuilt, monkeypatch):
    monkeypatch.setattr(package, "free_space", lambda _path: (100, -1))
    task, result = host.run()
    assert result["failed"] is True
    assert result["changed"] is False
    assert "100 B are free" in result["msg"]
    assert task.sent == []
    monkeypatch.setattr(package, "free_space", lambda _path: (10**12, 2))
    assert "inodes" in host.run()[1]["msg"]


def test_wheels_for_another_python_are_named(host, unbuilt):
    for wheel in host.wheels:
        wheel.unlink()
    host.wheels = [make_wheel(host.house, "alpha", tag="cp399-cp399-linux_x86_64")]
    host.lock()
    _, result = host.run()
    assert result["failed"] is True
    assert "alpha==1.0" in result["msg"]
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in result["msg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"wheelhouse": "/nowhere"}, ["sglang_venv_wheelhouse", "/nowhere/requirements.txt"]),
        ({"wheelhouse": None}, ["wheelhouse, recipe"]),
        (
            {"wheelhouse": None, "recipe": {"kind": "cuda", "release": "0.5.99"}},
            ["sglang_version", "wheels.py lock cuda 0.5.99 --python 3.11"],
        ),
        (
            {"wheelhouse": None, "recipe": {"kind": "cuda", "release": "0.5.20", "python": "3.11"}, "python": "PY399"},
            ["sglang_venv_python_version", "3.99.1"],
        ),
    ],
)
def test_errors_name_variable_and_remedy(host, unbuilt, arguments, words, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_FLEET_CACHE", str(tmp_path / "controller"))
    if arguments.get("python"):
        python = tmp_path / "python399"
        python.write_text("#!/bin/sh\necho 3.99.1\n")
        python.chmod(0o755)
        arguments = {**arguments, "python": str(python)}
    for check in (True, False):
        _, result = host.run(check=check, **arguments)
        assert result["failed"] is True
        assert result["changed"] is False
        for word in words:
            assert word in result["msg"]


class Mirror(http.server.ThreadingHTTPServer):
    """Serves one file under /python.tar.gz after a moment, and counts who asked for it."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        self.asked: list[str] = []
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                time.sleep(0.3)
                self.send_response(200 if self.path.startswith("/python.tar.gz") else 404)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_arguments: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_FLEET_CACHE", str(tmp_path / "controller"))
    server = Mirror(b"an interpreter")
    yield server
    server.shutdown()
    server.server_close()


DIGEST = hashlib.sha256(b"an interpreter").hexdigest()


def test_interpreter_is_fetched_once_for_all_hosts_and_kept(mirror):
    url = f"{mirror.url}/python.tar.gz?token=1"
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: action._archive(url, DIGEST), range(4)))
    assert len(mirror.asked) == 1
    (path,) = paths
    assert path.name == "python.tar.gz"
    assert path.read_bytes() == b"an interpreter"
    mirror.shutdown()
    mirror.server_close()
    assert action._archive(url, DIGEST) == path


def test_interpreter_of_another_hash_is_named_and_not_kept(mirror, tmp_path):
    for _ in range(2):
        with pytest.raises(AnsibleError) as said:
            action._archive(f"{mirror.url}/python.tar.gz", "0" * 64)
        assert all(word in str(said.value) for word in ("sglang_venv_python_sha256", DIGEST, "0" * 64))
    assert len(mirror.asked) == 2
    assert not [path for path in (tmp_path / "controller").rglob("*.tar.gz*") if path.is_file()]
    # One that was damaged in the cache afterwards is fetched again.
    path = action._archive(f"{mirror.url}/python.tar.gz", DIGEST)
    path.write_bytes(b"another")
    assert action._archive(f"{mirror.url}/python.tar.gz", DIGEST).read_bytes() == b"an interpreter"


@pytest.mark.parametrize(
    ("source", "digest", "words"),
    [
        ("MIRROR/gone.tar.gz", DIGEST, ["sglang_venv_python_archive", "cannot be fetched", "404"]),
        ("http://127.0.0.1:1/python.tar.gz", DIGEST, ["sglang_venv_python_archive", "cannot be fetched", "refused"]),
        ("/nowhere/python.tar.gz", DIGEST, ["sglang_venv_python_archive", "no /nowhere/python.tar.gz"]),
        ("MIRROR/python.tar.gz", "", ["sglang_venv_python_sha256", "64 hex digits"]),
    ],
)
def test_interpreter_that_cannot_be_had_names_the_variable(mirror, source, digest, words):
    with pytest.raises(AnsibleError) as said:
        action._archive(source.replace("MIRROR", mirror.url), digest)
    assert [word for word in words if word not in str(said.value)] == [], str(said.value)


def test_index_mode_sends_only_what_no_index_has(host, unbuilt, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_FLEET_CACHE", str(tmp_path / "controller"))
    tool = action._wheels_tool()
    pip = make_wheel(tmp_path / "pool", "pip")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"alpha==1.0 --hash=sha256:{'0' * 64}\npip==1.0 --hash=sha256:{venvs.sha256(pip)}\n")
    monkeypatch.setattr(tool, "wheelhouse", lambda *_: tool.Wheelhouse("test", lock, ("3.11",)))
    monkeypatch.setattr(tool, "download", lambda requirements, *_: [pip] if requirements[0].name == "pip" else 1 / 0)
    _, result = host.run(wheelhouse=None, recipe={"kind": "hf-client"}, index=True)
    assert result["changed"] is True
    assert json.loads(Path(result["path"], "had").read_text()) == [True, [pip.name]]


def test_recipes_need_the_right_python_only_where_the_lock_does():
    assert action._House(None, {"kind": "cuda", "release": "0.5.20", "python": "3.11"}, False).python == "3.11"
    assert action._House(None, {"kind": "hf-client"}, False).python == ""
    assert action._House(None, {"kind": "rehearsal", "release": "0.5.11"}, False).python == ""


def test_module_without_its_plugin_says_so(capfd):
    with patch_module_args({"name": "test", "wheelhouse": "/x"}), pytest.raises(SystemExit):
        sglang_venv.main()
    assert "action plugin" in json.loads(capfd.readouterr().out)["msg"]


def test_module_probe_and_its_errors(capfd, tmp_path):
    text = f"alpha==1.0 --hash=sha256:{'0' * 64}\n"
    arguments = {"name": "test", "requirements": text, "root": str(tmp_path / "venvs"), "python": sys.executable}
    (tmp_path / "venvs" / ("0" * 16)).mkdir(parents=True)
    with patch_module_args(arguments), pytest.raises(SystemExit):
        sglang_venv.main()
    result = json.loads(capfd.readouterr().out)
    assert result["found"] == "absent"
    assert result["changed"] is False
    assert result["pruned"] == ["0" * 16], "what a build would remove"
    assert (tmp_path / "venvs" / ("0" * 16)).is_dir()
    assert Path(result["path"]).parent == tmp_path / "venvs"
    with patch_module_args({**arguments, "python": "/no/python"}), pytest.raises(SystemExit):
        sglang_venv.main()
    result = json.loads(capfd.readouterr().out)
    assert result["failed"] is True
    assert "sglang_venv_python" in result["msg"]


def test_portions_hold_every_wheel_once(tmp_path, monkeypatch):
    files = []
    for number, size in enumerate([10, 600, 40, 50, 300]):
        files.append(tmp_path / f"{number}.whl")
        files[-1].write_bytes(b"x" * size)
    monkeypatch.setattr(action, "PORTION", 350)
    groups = action._portions(files)
    assert sorted(path for group in groups for path in group) == files
    assert [sum(path.stat().st_size for path in group) for group in groups] == [600, 350, 50]
