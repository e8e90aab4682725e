"""rehearsal/wheels.py: choosing wheels for a host, building ours, and publishing a wheelhouse whole."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dflash_fleet import venvs

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("wheels_under_test", ROOT / "rehearsal" / "wheels.py")
wheels = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = wheels
SPEC.loader.exec_module(wheels)

LOCKS = sorted((ROOT / "roles/sglang_venv/files/locks").glob("*.txt"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_FLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_wheel(folder: Path, name: str, version: str = "1.0", tag: str = "py3-none-any", body: str = "") -> Path:
    path = folder / f"{name}-{version}-{tag}.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", body or "x = 1\n")
        archive.writestr(
            f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{name}-{version}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
    return path


def lock_of(tmp_path: Path, *made: Path) -> Path:
    lines = []
    for wheel in made:
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name}=={version} --hash=sha256:{venvs.sha256(wheel)}\n")
    lock = tmp_path / "test-py3.txt"
    lock.write_text("".join(lines))
    return lock


@pytest.fixture
def offline(monkeypatch):
    """pip download that copies from a folder, and says what it was asked for."""
    asked = []

    def install(source: Path) -> list[list[str]]:
        def fake(*arguments: str) -> str:
            listing = Path(arguments[arguments.index("-r") + 1])
            target = Path(arguments[arguments.index("-d") + 1])
            wanted = venvs.parse_requirements(listing.read_text())
            asked.append([requirement.name for requirement in wanted])
            for requirement in wanted:
                for wheel in source.glob(f"{requirement.name}-{requirement.version}-*.whl"):
                    (target / wheel.name).write_bytes(wheel.read_bytes())
            return ""

        monkeypatch.setattr(wheels, "pip", fake)
        return asked

    return install


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_are_pinned_hashed_and_bootstrap_themselves(lock):
    requirements = venvs.parse_requirements(lock.read_text())
    names = [requirement.name for requirement in requirements]
    assert names == sorted(set(names))
    assert "pip" in names
    first = lock.read_text().splitlines()[0]
    # The header says how the file is made, and the file's own name follows from that.
    assert first.endswith(f"by: python rehearsal/wheels.py lock {wheels.lock_arguments(lock.name)}")
    assert "/" not in first.replace("rehearsal/wheels.py", "")


@pytest.mark.parametrize(
    ("lock", "arguments"),
    [
        ("sglang-0.5.20-cuda-cp311.txt", "cuda 0.5.20 --python 3.11"),
        ("sglang-0.5.12.post1-cuda-cp312.txt", "cuda 0.5.12.post1 --python 3.12"),
        ("sglang-0.5.23-cpu-cp311.txt", "cpu 0.5.23 --python 3.11"),
        ("hf-client-py3.txt", "hf-client"),
        ("pip-py3.txt", "pip"),
    ],
)
def test_lock_names_and_arguments_belong_together(lock, arguments):
    assert wheels.lock_arguments(lock) == arguments
    words = arguments.split()
    release = words[1] if len(words) > 1 else ""
    python = words[3] if len(words) > 3 else "3.11"
    assert wheels.lock_name(words[0], release, python) == lock


@pytest.mark.parametrize("lock", [path for path in LOCKS if "-cuda-" in path.name], ids=lambda path: path.name)
def test_locks_bring_one_release_of_the_cuda_toolkit(lock):
    """nvcc refuses the headers of another release than its own, and links with the runtime that torch loads."""
    versions = {one.name: one.version for one in venvs.parse_requirements(lock.read_text())}
    parts = ["nvcc", "crt", "runtime", "cccl", "nvrtc"]
    releases = {".".join(versions[f"nvidia-cuda-{part}"].split(".")[:2]) for part in parts}
    releases.add(".".join(versions["nvidia-nvvm"].split(".")[:2]))
    assert releases == {"13.0"}
    assert "ninja" in versions


def test_engine_locks_hold_the_engine_and_no_local_build_for_gpus():
    for lock in LOCKS:
        if not lock.name.startswith("sglang-0."):  # not the router's, nor the hub client's
            continue
        release = lock.name.split("-")[1]
        versions = {one.name: one.version for one in venvs.parse_requirements(lock.read_text())}
        assert versions["sglang"] == release
        assert versions["torch"].endswith("+cpu") == ("-cpu-" in lock.name)


def test_wheelhouse_is_published_whole_and_left_alone_when_current(tmp_path, cache, offline):
    source = tmp_path / "source"
    lock = lock_of(tmp_path, make_wheel(source, "alpha"), make_wheel(source, "beta"))
    asked = offline(source)
    house = wheels.Wheelhouse("test", lock, ("3.11",))
    folder = wheels.make(house)
    assert folder == cache / "wheelhouses" / "test"
    assert sorted(path.name for path in folder.glob("*.whl")) == [
        "alpha-1.0-py3-none-any.whl",
        "beta-1.0-py3-none-any.whl",
    ]
    assert venvs.parse_requirements((folder / "requirements.txt").read_text()) == venvs.parse_requirements(
        lock.read_text()
    )
    inode = folder.stat().st_ino
    assert wheels.make(house) == folder
    assert folder.stat().st_ino == inode
    assert asked == [["alpha", "beta"]]


def test_changed_lock_downloads_only_what_is_new(tmp_path, cache, offline):
    source = tmp_path / "source"
    alpha, beta = make_wheel(source, "alpha"), make_wheel(source, "beta")
    asked = offline(source)
    house = wheels.Wheelhouse("test", lock_of(tmp_path, alpha, beta), ("3.11",))
    wheels.make(house)
    lock_of(tmp_path, alpha, make_wheel(source, "beta", "2.0"))
    folder = wheels.make(house)
    assert asked == [["alpha", "beta"], ["beta"]]
    assert (folder / "beta-2.0-py3-none-any.whl").is_file()
    assert not (folder / "beta-1.0-py3-none-any.whl").exists()
    assert [path.name for path in (cache / "wheelhouses").iterdir() if path.is_dir()] == ["test"]


def test_wheelhouse_with_a_lost_file_is_made_again(tmp_path, cache, offline):
    source = tmp_path / "source"
    lock = lock_of(tmp_path, make_wheel(source, "alpha"))
    asked = offline(source)
    house = wheels.Wheelhouse("test", lock, ("3.11",))
    (wheels.make(house) / "alpha-1.0-py3-none-any.whl").unlink()
    assert (wheels.make(house) / "alpha-1.0-py3-none-any.whl").is_file()
    assert len(asked) == 1  # from the pool


def test_download_left_by_a_killed_run_is_kept_and_a_stranger_is_not(tmp_path, cache, offline):
    source = tmp_path / "source"
    alpha, beta = make_wheel(source, "alpha"), make_wheel(source, "beta")
    staging = cache / "wheels" / ".incoming"
    staging.mkdir(parents=True)
    (staging / alpha.name).write_bytes(alpha.read_bytes())
    (staging / "gamma-1.0-py3-none-any.whl").write_bytes(b"half")
    asked = offline(source)
    wheels.make(wheels.Wheelhouse("test", lock_of(tmp_path, alpha, beta), ("3.11",)))
    assert asked == [["beta"]]
    assert not list(staging.glob("*.whl"))


def test_each_python_gets_its_own_file(tmp_path, cache, offline):
    source = tmp_path / "source"
    files = [
        make_wheel(source, "alpha", tag=f"cp{minor}-cp{minor}-linux_x86_64", body=str(minor)) for minor in (311, 313)
    ]
    lock = tmp_path / "test-py3.txt"
    lock.write_text("alpha==1.0" + "".join(f" --hash=sha256:{venvs.sha256(one)}" for one in files) + "\n")
    offline(source)
    folder = wheels.make(wheels.Wheelhouse("test", lock, ("3.11", "3.13")))
    assert len(list(folder.glob("*.whl"))) == 2


def test_missing_lock_names_the_command(tmp_path, cache):
    with pytest.raises(wheels.WheelError, match=r"wheels\.py lock cuda 0\.5\.99 --python 3\.11"):
        wheels.make(wheels.wheelhouse("cuda", "0.5.99", "3.11"))


def test_local_build_that_no_index_has_is_explained(tmp_path, cache, monkeypatch):
    lock = tmp_path / "test-py3.txt"
    lock.write_text(f"torch==2.13.0+cpu --hash=sha256:{'0' * 64}\n")

    def refuse(*_arguments: str) -> str:
        raise wheels.WheelError("No matching distribution found")

    monkeypatch.setattr(wheels, "pip", refuse)
    with pytest.raises(wheels.WheelError, match="PIP_FIND_LINKS"):
        wheels.make(wheels.Wheelhouse("test", lock, ("3.11",)))


def test_platforms_are_those_of_glibc_2_34_and_older():
    options = wheels.platform_options("3.11")
    assert "manylinux_2_34_x86_64" in options
    assert "manylinux_2_31_x86_64" in options
    assert "manylinux_2_35_x86_64" not in options
    assert options[options.index("--python-version") + 1] == "3.11"


def test_our_wheels_are_the_same_bytes_each_time(cache, tmp_path, monkeypatch):
    digests = []
    for round_ in ("one", "two"):
        monkeypatch.setenv("DFLASH_FLEET_CACHE", str(tmp_path / round_))
        wheel = wheels.build(ROOT / "rehearsal" / "cpu_platform", {})
        digests.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
        assert wheel.parent.name == digests[-1]
    assert digests[0] == digests[1]


def test_cpu_platform_wheel_has_what_each_part_needs(cache):
    with zipfile.ZipFile(wheels.build(ROOT / "rehearsal" / "cpu_platform", {})) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {"sgl_kernel/__init__.py", "cpu_dflash_platform/__init__.py", "cpu_dflash_platform/platform.py"} <= set(
        names
    )
    # At the top, or Python does not read it; and not sitecustomize, which Debian's own would hide.
    assert "dflash_fleet_cpu_boot.pth" in names
    assert not [name for name in names if "sitecustomize" in name]
    assert "[sglang.srt.platforms]\ncpu_dflash = cpu_dflash_platform:activate" in entry_points


@pytest.mark.parametrize(("engine", "loaded"), [("1", True), ("0", False), (None, False)])
def test_boot_acts_only_for_the_cpu_engine(engine, loaded):
    folder = ROOT / "rehearsal" / "cpu_platform"
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"}
    if engine is not None:
        environment["SGLANG_USE_CPU_ENGINE"] = engine
    code = (
        f"import site, sys; site.addsitedir({str(folder)!r});"
        "print('dflash_fleet_cpu_boot' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True)
    assert done.stdout.split() == [str(loaded), "False"]


def test_rehearsal_wheel_says_which_release_it_stands_in_for(cache):
    house = wheels.wheelhouse("rehearsal", "0.5.11", "3.11")
    wheel = wheels.build(house.projects[0], house.environment)
    assert wheels.requirement_of(wheel).version == "0.5.11+rehearsal"
    assert "sglang==0.5.11+rehearsal" in wheels.requirements_text(house)


def test_command_line_errors_are_one_sentence(cache, capsys):
    assert wheels.main(["cuda", "0.5.99"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("wheels: there is no lock file")
    assert "Traceback" not in captured.err


def test_last_line_is_the_folder(tmp_path, cache, offline, monkeypatch, capsys):
    source = tmp_path / "source"
    lock = lock_of(tmp_path, make_wheel(source, "alpha"))
    offline(source)
    monkeypatch.setattr(wheels, "wheelhouse", lambda *_: wheels.Wheelhouse("test", lock, ("3.11",)))
    assert wheels.main(["hf-client"]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((folder / ".complete").read_text())["wheels"] == ["alpha-1.0-py3-none-any.whl"]
