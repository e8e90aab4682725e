"""venvs: names by content, wheels for an interpreter, adoption by hash, and a build that is complete or not there."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from dflash_fleet import venvs
from test_wheels import make_wheel

HASH = "a" * 64
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="module")
def pip_wheel(tmp_path_factory):
    """pip's own wheel: what every environment is installed with. Taken from the project's cache or from pip."""
    cached = Path("~/.cache/dflash-fleet/wheels").expanduser()
    for wheel in cached.glob("*/pip-*.whl"):
        return wheel
    folder = tmp_path_factory.mktemp("pip")
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "pip"], check=True)
    return next(folder.glob("pip-*.whl"))


@pytest.fixture
def host(tmp_path, pip_wheel):
    """Wheels as they lie on a host after sending, and the lock that names them."""

    class Host:
        root = tmp_path / "venvs"
        cache = tmp_path / "cache"
        interpreter = venvs.find_interpreter(sys.executable)

        def __init__(self) -> None:
            self.extra: list[Path] = [make_wheel(tmp_path / "made", "alpha")]
            self.lay_out()

        def lay_out(self) -> None:
            files = [pip_wheel, *self.extra]
            self.text = "".join(
                "{}=={} --hash=sha256:{}\n".format(*file.name.split("-")[:2], venvs.sha256(file)) for file in files
            )
            self.identity = venvs.venv_id(self.text, self.interpreter.version)
            self.wheels = venvs.wheel_folder(self.cache, self.identity)
            self.wheels.mkdir(parents=True, exist_ok=True)
            for file in files:
                (self.wheels / file.name).write_bytes(file.read_bytes())

        @property
        def path(self) -> Path:
            return self.root / self.identity

        def probe(self) -> dict:
            return venvs.probe(self.root, self.text, self.interpreter)

        def build(self, **options) -> dict:
            # As ourselves: pytest's directories and this interpreter may be closed to others.
            options = {"name": "test", "user": pwd.getpwuid(os.geteuid()).pw_name, **options}
            return venvs.build(self.root, self.text, self.interpreter, self.wheels, **options)

    return Host()


@pytest.fixture
def uncompiled(monkeypatch):
    """Compiling pip takes longer than all else here."""
    monkeypatch.setattr(venvs, "compile_all", lambda _path: None)


@pytest.fixture
def unbuilt(monkeypatch):
    """An installation that leaves a usable interpreter and nothing else, for tests of what is around it."""

    def install(path: Path, *_arguments: object) -> dict[str, float]:
        (path / "bin").mkdir(parents=True)
        (path / "bin" / "python").symlink_to(sys.executable)
        return {"install": 0.0, "compile": 0.0}

    monkeypatch.setattr(venvs, "install", install)
    monkeypatch.setattr(venvs, "verify", lambda *_arguments: None)


def test_requirements_in_all_spellings():
    text = (
        f"# made by x\nAlpha_One==1.0 \\\n    --hash=sha256:{HASH} \\\n    --hash=sha256:{'b' * 64}\n\n"
        f"beta==2 --hash=sha256:{HASH}  # why\n"
    )
    assert venvs.parse_requirements(text) == [
        venvs.Requirement("alpha-one", "1.0", (HASH, "b" * 64)),
        venvs.Requirement("beta", "2", (HASH,)),
    ]
    again = "".join(one.line() + "\n" for one in venvs.parse_requirements(text))
    assert venvs.parse_requirements(again) == venvs.parse_requirements(text)


@pytest.mark.parametrize(
    "line",
    [
        "alpha",
        "alpha>=1 --hash=sha256:" + HASH,
        "alpha==1",
        "alpha==1 --hash=md5:" + HASH,
        "-r other.txt",
        "--index-url https://example.com",
        "alpha @ file:///x.whl --hash=sha256:" + HASH,
        "alpha==1 --hash=sha256:" + HASH[:-1],
        "",
    ],
)
def test_unpinned_or_unhashed_requirements_are_refused(line):
    with pytest.raises(venvs.VenvError):
        venvs.parse_requirements(line)


def test_id_is_by_content_and_minor_python():
    one, other = f"alpha==1 --hash=sha256:{HASH}\n", f"beta==2 --hash=sha256:{'b' * 64}\n"
    identity = venvs.venv_id(one + other, "3.11.2")
    assert len(identity) == 16
    assert int(identity, 16) >= 0
    assert identity == venvs.venv_id("# a comment\n" + other + one, "3.11.9")
    assert identity != venvs.venv_id(one + other, "3.13.5")
    assert identity != venvs.venv_id(one + other.replace("beta==2", "beta==3"), "3.11.2")
    assert identity != venvs.venv_id(one + other.replace("b" * 64, "c" * 64), "3.11.2")


@pytest.mark.parametrize(
    ("wheel", "python", "fits"),
    [
        ("a-1-py3-none-any.whl", "3.11", True),
        ("a-1-py2.py3-none-any.whl", "3.13.5", True),
        ("a-1-py2-none-any.whl", "3.11", False),
        ("a-1-cp311-cp311-manylinux_2_34_x86_64.whl", "3.11.2", True),
        ("a-1-cp311-cp311-manylinux_2_34_x86_64.whl", "3.13", False),
        ("a-1-cp313-cp313-manylinux_2_34_x86_64.whl", "3.11", False),
        ("a-1-cp38-abi3-manylinux2014_x86_64.whl", "3.11", True),
        ("a-1-cp312-abi3-manylinux2014_x86_64.whl", "3.11", False),
        ("a-1-cp311-none-manylinux2014_x86_64.whl", "3.11", True),
        ("a-1-py3-none-manylinux_2_28_x86_64.whl", "3.11", True),
        ("a-1-py312-none-any.whl", "3.11", False),
        ("a-1-pp311-pypy311_pp73-manylinux2014_x86_64.whl", "3.11", False),
        ("a-1-1-cp311-cp311-linux_x86_64.whl", "3.11", True),
    ],
)
def test_suits(wheel, python, fits):
    assert venvs.suits(wheel, python) is fits


def test_choose_wheels_by_interpreter_and_name_what_is_missing():
    requirements = venvs.parse_requirements(
        "".join(f"{name}==1.0 --hash=sha256:{HASH}\n" for name in ("py-yaml", "pure", "gone"))
    )
    files = [
        "py_yaml-1.0-cp311-cp311-linux_x86_64.whl",
        "py_yaml-1.0-cp313-cp313-linux_x86_64.whl",
        "pure-1.0-py3-none-any.whl",
    ]
    assert venvs.choose_wheels(requirements, files, "3.13.5") == ([files[1], files[2]], ["gone==1.0"])
    assert venvs.choose_wheels(requirements, files, "3.12")[1] == ["py-yaml==1.0", "gone==1.0"]


def test_bundles_carry_wheels_and_nothing_else(tmp_path):
    made = [make_wheel(tmp_path / "made", "alpha"), make_wheel(tmp_path / "made", "beta")]
    folder = tmp_path / "arrived"
    folder.mkdir()
    venvs.bundle(made, folder / "small.tar")
    venvs.unbundle(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(one.name for one in made)
    (tmp_path / "link.whl").symlink_to("/etc/passwd")
    with tarfile.open(folder / "small.tar", "w") as archive:
        archive.add(tmp_path / "link.whl", arcname="../../link.whl")
    with pytest.raises(venvs.VenvError, match="no wheel"):
        venvs.unbundle(folder)
    with tarfile.open(folder / "small.tar", "w") as archive:
        archive.add(made[0], arcname="../../outside.whl")
    venvs.unbundle(folder)
    assert (folder / "outside.whl").is_file()
    assert not (tmp_path.parent / "outside.whl").exists()


def test_adopt_takes_only_files_that_the_lock_names(tmp_path):
    wheel = make_wheel(tmp_path / "arrived", "alpha")
    requirements = venvs.parse_requirements(f"alpha==1.0 --hash=sha256:{venvs.sha256(wheel)}\n")
    folder = tmp_path / "cache" / "x"
    assert venvs.adopt(tmp_path / "arrived", folder, requirements) == [wheel.name]
    assert (folder / wheel.name).stat().st_mode & 0o777 == 0o644
    damaged = make_wheel(tmp_path / "arrived", "alpha", body="x = 2\n")
    (folder / wheel.name).unlink()
    with pytest.raises(venvs.VenvError, match="changed or damaged"):
        venvs.adopt(tmp_path / "arrived", folder, requirements)
    assert damaged.is_file()
    assert list(folder.iterdir()) == []


def test_build_checks_compiles_and_marks_last(host):
    assert host.probe()["found"] == "absent"
    mark = host.build(check={"imports": ["alpha"]}, engine={"name": "alpha", "build": "cpu"})
    found = host.probe()
    assert found["found"] == "complete"
    assert found["mark"] == mark
    assert (mark["schema"], mark["engine"], mark["version"], mark["build"]) == (1, "alpha", "1.0", "cpu")
    assert mark["python"] == host.interpreter.version
    assert not host.wheels.exists()
    site = host.path / "lib" / f"python{PYTHON}" / "site-packages"
    assert list((site / "__pycache__").glob("alpha.*.pyc"))
    assert host.path.stat().st_mode & 0o777 == 0o755
    # Nothing in it may be changed by the engine's user.
    writable = [path for path in host.path.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert writable == []


@pytest.mark.parametrize("leave", ["half", "file", "link", "mark of another schema", "dead interpreter"])
def test_interrupted_environment_is_built_again(host, unbuilt, leave, tmp_path):
    host.root.mkdir(parents=True, exist_ok=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "keep").write_text("x")
    if leave == "half":
        (host.path / "lib").mkdir(parents=True)
        (host.path / "stale").write_text("x")
    elif leave == "file":
        host.path.write_text("x")
    elif leave == "link":
        host.path.symlink_to(elsewhere)
    else:
        (host.path / "bin").mkdir(parents=True)
        (host.path / "bin" / "python").symlink_to("/nowhere" if leave == "dead interpreter" else sys.executable)
        (host.path / ".complete").write_text(json.dumps({"schema": 1 if leave == "dead interpreter" else 9}))
    assert host.probe()["found"] == "incomplete"
    host.build()
    assert host.probe()["found"] == "complete"
    assert not (host.path / "stale").exists()
    assert (elsewhere / "keep").is_file()


def test_interpreter_that_the_engines_user_may_not_run(host, monkeypatch):

    def refuse(*_words, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(venvs.subprocess, "run", refuse)
    with pytest.raises(venvs.VenvError, match="engine's user may not run"):
        venvs.verify(host.path, venvs.parse_requirements(host.text), {}, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": {"imports": ["no_such_module"]}}, "checking the packages failed"),
        ({"check": {"command": ["-c", "raise SystemExit(3)"]}}, r"checking the command line failed \(exit status 3\)"),
        ({"check": {"command": ["-c", "pass"]}}, "checking the command line failed"),
    ],
)
def test_environment_that_fails_its_check_is_not_complete(host, uncompiled, options, message):
    with pytest.raises(venvs.VenvError, match=message):
        host.build(**options)
    assert host.probe()["found"] == "incomplete"
    # The wheels stay: the next run sends nothing again.
    assert list(host.wheels.glob("*.whl"))


def test_wheels_that_bring_a_toolkit_are_laid_out_as_one(tmp_path):
    """As callers of nvcc expect it: lib64, and libcudart.so without a number."""
    brought = tmp_path / "lib/python3.11/site-packages/nvidia/cu13"
    for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudadevrt.a"):
        (brought / name).parent.mkdir(parents=True, exist_ok=True)
        (brought / name).write_text(name)
    home = venvs.link_toolkit(tmp_path)
    assert home == tmp_path / "cuda"
    seen = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}
    assert seen["lib64/libcudart.so"] == seen["lib64/libcudart.so.13"] == "lib/libcudart.so.13"
    assert seen["lib64/libcudadevrt.a"] == "lib/libcudadevrt.a"
    for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc"):
        assert (home / name).read_text() == name
    # None of it names the place where it was made.
    assert not [path for path in home.rglob("*") if path.is_symlink() and os.readlink(path).startswith("/")]


def test_wheels_without_a_toolkit_make_none(tmp_path):
    (tmp_path / "lib/python3.11/site-packages/nvidia/cu13/lib").mkdir(parents=True)
    assert venvs.link_toolkit(tmp_path) is None
    assert not (tmp_path / "cuda").exists()


def test_command_line_is_asked_in_the_given_environment(host, uncompiled):
    code = "import os, sys; print(os.environ['X']); sys.exit(os.environ['HOME'] == '/root')"
    host.build(check={"command": ["-c", code], "environment": {"X": 1}})
    assert host.probe()["found"] == "complete"


def test_tampered_wheel_is_refused(host, uncompiled):
    wheel = next(host.wheels.glob("alpha-*.whl"))
    make_wheel(host.wheels, "alpha", body="x = 2\n")
    assert wheel.is_file()
    with pytest.raises(venvs.VenvError, match="not the one that the lock names"):
        host.build()
    assert host.probe()["found"] == "incomplete"


def test_pip_is_checked_before_it_runs(host):
    next(host.wheels.glob("pip-*.whl")).write_bytes(b"not pip")
    with pytest.raises(venvs.VenvError, match="no pip wheel"):
        host.build()


def test_missing_wheel_is_named(host, uncompiled):
    next(host.wheels.glob("alpha-*.whl")).unlink()
    with pytest.raises(venvs.VenvError, match="alpha"):
        host.build()


def test_settings_around_pip_do_not_matter(host, uncompiled, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "target"))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('loaded')")
    host.build(check={"imports": ["alpha"]})
    assert not (tmp_path / "target").exists()


def test_second_builder_finds_the_work_done(host, unbuilt):
    first = host.build()
    host.wheels.mkdir(parents=True)
    assert host.build() == first


def test_stale_wheels_of_others_go(host, unbuilt):
    stale, fresh = host.cache / "stale", host.cache / "fresh"
    for folder in (stale, fresh):
        folder.mkdir()
    old = time.time() - 2 * venvs.STALE_WHEELS
    os.utime(stale, (old, old))
    host.build()
    assert not stale.exists()
    assert fresh.exists()


def test_installed_size_counts_bytecode(tmp_path):
    wheel = make_wheel(tmp_path, "alpha", body="x = 1\n" * 1000)
    size, files = venvs.installed_size([wheel])
    assert 12000 <= size <= 14000
    assert files == 5


def test_free_space_of_a_directory_that_is_not_there_yet(tmp_path):
    size, inodes = venvs.free_space(tmp_path / "a" / "b")
    assert size > 0
    assert inodes != 0


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "cannot be run on this host"),
        ("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'venv'\" >&2; exit 1\n", "install python3-venv"),
        ("#!/bin/sh\nexit 3\n", "no output"),
    ],
)
def test_unusable_interpreter_names_the_variable(tmp_path, script, message):
    python = tmp_path / "python"
    if script:
        python.write_text(script)
        python.chmod(0o755)
    with pytest.raises(venvs.VenvError, match=message) as raised:
        venvs.find_interpreter(str(python))
    assert "sglang_venv_python" in str(raised.value)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying after connection broken by\nERROR: No matching distribution found", "does not answer"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "not the one that the lock names"),
        ("ERROR: No matching distribution found for x==1", "no file for this host's Python"),
    ],
)
def test_tools_words_are_explained(output, sentence):
    assert sentence in venvs.explain(output)


# Names are drawn, so that no other process of the machine mentions them: pruning spares what a running one names.
def environment(root, name, completed_at="2026-11-30T00:00:00.000000Z", interpreter="/usr/bin/python3"):
    """A complete environment, as far as its mark goes."""
    (root / name / "bin").mkdir(parents=True)
    mark = {"schema": 1, "id": name, "completed_at": completed_at, "interpreter": interpreter}
    (root / name / ".complete").write_text(json.dumps(mark))
    return root / name


@pytest.mark.parametrize("where", ["unit", "release", "state", "running"])
def test_prune_spares_what_is_named_anywhere(tmp_path, where):
    root = tmp_path / "sglang" / "venvs"
    named, spare = environment(root, secrets.token_hex(8)), environment(root, secrets.token_hex(8))
    unit = tmp_path / "sglang-main-tp8.service"
    unit.write_text(f"ExecStart={named}/bin/python\n" if where == "unit" else "")
    started = None
    if where == "release":
        path = tmp_path / "sglang" / "main" / "releases" / "7" / "release.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"venv": str(named)}))
    elif where == "state":
        path = tmp_path / "sglang" / "main" / "state" / "last_good.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"venv": str(named)}))
    elif where == "running":
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(named)])
    try:
        assert venvs.prune(root, 0, [], [unit]) == [spare.name]
    finally:
        if started:
            started.kill()
            started.wait()
    assert named.is_dir()
    assert not spare.exists()


def test_prune_keeps_the_newest_and_drops_the_interrupted(tmp_path):
    root = tmp_path / "venvs"
    one, two, three, four, cut = sorted(secrets.token_hex(8) for _ in range(5))
    for number, name in enumerate((one, two, three, four), 1):
        environment(root, name, f"2026-11-0{number}T00:00:00.000000Z")
    (root / cut / "lib").mkdir(parents=True)
    (root / "notes").mkdir()  # nothing of ours
    assert venvs.unused(root, 2, [one], []) == [two, cut]
    assert (root / cut).is_dir(), "asking removes nothing"
    assert venvs.prune(root, 2, [one], []) == [two, cut]
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == sorted([one, three, four, "notes"])


def test_a_brought_interpreter_goes_with_its_last_environment(tmp_path):
    root = tmp_path / "venvs"
    used, unused = (root / f".python-{secrets.token_hex(8)}" for _ in range(2))
    for folder in (used, unused):
        (folder / "bin").mkdir(parents=True)
    name = secrets.token_hex(8)
    environment(root, name, interpreter=f"{used}/bin/python3")
    assert venvs.prune(root, 2, [], []) == [unused.name]
    assert venvs.prune(root, 0, [], []) == [used.name, name]


def archive_of(folder, target):
    with tarfile.open(target, "w:gz") as packed:
        packed.add(folder, arcname="python")
    return target, venvs.sha256(target)


@pytest.fixture
def interpreter_folder(tmp_path):
    """A folder with bin/python3 that answers, as an unpacked build of CPython has it."""
    folder = tmp_path / "made"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3.99").write_text("#!/bin/sh\necho 3.99.1\n")
    (folder / "bin" / "python3.99").chmod(0o775)
    (folder / "bin" / "python3").symlink_to("python3.99")
    return folder


def test_interpreter_is_unpacked_whole_and_once(tmp_path, interpreter_folder):
    archive, digest = archive_of(interpreter_folder, tmp_path / "python.tar.gz")
    root = tmp_path / "venvs"
    (root / f".python-{digest[:16]}.partial" / "half").mkdir(parents=True)  # of a run that was killed
    python = venvs.unpack_interpreter(archive, root, digest)
    assert python == venvs.brought_interpreter(root, digest)
    assert venvs.find_interpreter(str(python)).version == "3.99.1"
    assert [path.name for path in root.iterdir() if path.is_dir()] == [f".python-{digest[:16]}"]
    assert python.resolve().stat().st_mode & 0o777 == 0o755
    assert venvs.unpack_interpreter(archive, root, digest) == python


def test_interpreter_of_another_hash_or_without_one_is_refused(tmp_path, interpreter_folder):
    archive, digest = archive_of(interpreter_folder, tmp_path / "python.tar.gz")
    with pytest.raises(venvs.VenvError, match="sglang_venv_python_sha256"):
        venvs.unpack_interpreter(archive, tmp_path / "venvs", "0" * 64)
    (interpreter_folder / "bin" / "python3").unlink()
    archive, digest = archive_of(interpreter_folder, tmp_path / "other.tar.gz")
    with pytest.raises(venvs.VenvError, match="holds no bin/python3"):
        venvs.unpack_interpreter(archive, tmp_path / "venvs", digest)
    assert not venvs.brought_interpreter(tmp_path / "venvs", digest).exists()


@pytest.mark.parametrize(
    "member",
    [
        {"name": "../outside"},
        {"name": "/outside"},
        {"name": "python/link", "type": tarfile.SYMTYPE, "linkname": "../../outside"},
        {"name": "python/hard", "type": tarfile.LNKTYPE, "linkname": "../outside"},
        {"name": "python/pipe", "type": tarfile.FIFOTYPE},
    ],
)
def test_archives_that_lead_outside_are_refused(tmp_path, member):
    archive = tmp_path / "bad.tar"
    with tarfile.open(archive, "w") as packed:
        about = tarfile.TarInfo(member["name"])
        about.type, about.linkname = member.get("type", tarfile.REGTYPE), member.get("linkname", "")
        packed.addfile(about)
    (tmp_path / "target").mkdir()
    with pytest.raises(venvs.VenvError, match=r"leads out of its folder|is no file"):
        venvs.unpack(archive, tmp_path / "target")
    assert not (tmp_path / "outside").exists()
