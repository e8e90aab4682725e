"""Controller half of the module sglang_venv: the wheelhouse, what of it a host lacks, and sending that.

Sending is done here and not by copy or unarchive: those look at each file of a directory with a module call of its own,
or need the whole wheelhouse once more as one archive on the controller and once more on the host.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleError
from ansible.module_utils.urls import open_url
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_ROOT = Path(__file__).resolve().parents[1]
# A controller-side plugin does not get the project's module_utils the way modules do.
if str(_ROOT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(_ROOT / "module_utils"))

from ansible.module_utils.dflash_fleet import venvs, words

# Wheels are taken over in portions of this size: a killed run loses no more, and a home directory holds no more.
PORTION = 500_000_000
# Files below this size travel together: each file of its own costs a round of the file transfer program.
SMALL = 4_000_000

display = Display()


def _wheels_tool() -> Any:
    """The project's rehearsal/wheels.py as a module."""
    name = "dflash_fleet_wheels"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _ROOT / "rehearsal" / "wheels.py")
        if spec is None or spec.loader is None:
            raise AnsibleError("rehearsal/wheels.py is missing from the project")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        # Standard error of a task is not shown; its progress is.
        sys.modules[name].say = lambda message: display.display(f"controller  {message}")
    return sys.modules[name]


class _House:
    """Where the wheels come from: a folder that was named, or a recipe that makes one."""

    def __init__(self, folder: str | None, recipe: dict[str, Any] | None, index: bool) -> None:
        self.index = index
        self.folder = Path(folder) if folder else None
        self.wheels = _wheels_tool() if recipe else None
        self.house: Any = None
        # Minor version of Python that the wheels are for; "" where each host's own is looked at.
        self.python = ""
        if self.folder is None:
            if recipe is None:
                raise AnsibleError("sglang_venv needs one of: wheelhouse, recipe")
            kind, release = recipe["kind"], str(recipe.get("release") or "")
            self.python = str(recipe.get("python") or "3.11") if kind in ("cpu", "cuda") else ""
            self.house = self.wheels.wheelhouse(kind, release, str(recipe.get("python") or "3.11"))
        elif not (self.folder / "requirements.txt").is_file():
            raise AnsibleError(f"sglang_venv_wheelhouse: there is no {self.folder}/requirements.txt on the controller")

    def requirements(self) -> str:
        if self.folder:
            return (self.folder / "requirements.txt").read_text(encoding="utf-8")
        return str(self.wheels.requirements_text(self.house))

    def files(self) -> dict[str, Path]:
        """The wheels to choose from, made or downloaded now if need be."""
        if self.folder is None and self.index:
            return {wheel.name: wheel for wheel in self.wheels.bootstrap(self.house)}
        folder = self.folder or self.wheels.make(self.house)
        return {wheel.name: wheel for wheel in sorted(folder.glob("*.whl"))}


class ActionModule(ActionBase):
    """Probe, send what is missing, build."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        host = (task_vars or {}).get("inventory_hostname", "?")
        arguments = dict(self._task.args)
        name = str(arguments.get("name", "environment"))
        index = str(arguments.get("index", False)).lower() in ("true", "yes", "1")
        try:
            house = _House(arguments.pop("wheelhouse", None) or None, arguments.pop("recipe", None), index)
            arguments["requirements"] = house.requirements()
            result.update(self._call(arguments, "probe", task_vars))
            if result.get("interpreter") == "absent":
                if self._task.check_mode:
                    return self._tidy(self._predict(arguments, house, result, name))
                failure = self._bring_interpreter(arguments, task_vars)
                if failure:
                    return self._tidy(failure)
                result.pop("interpreter")
                result.update(self._call(arguments, "probe", task_vars))
            if result.get("failed") or result["found"] == "complete":
                return self._tidy(result)
            path = result["path"]
            gone = "".join(f"{os.path.join(os.path.dirname(path), old)}: unused\n" for old in result["pruned"])
            result["diff"] = {
                "before": f"{path}: {result['found']}\n{gone}",
                "after": f"{path}: {name}\n",
                "before_header": "environment",
                "after_header": "environment",
            }
            if house.python and not result["python"].startswith(house.python + "."):
                raise venvs.VenvError(
                    f"sglang_venv_python_version: the lock is for Python {house.python}, but "
                    f"{arguments.get('python', '/usr/bin/python3')} on this host is {result['python']}. Set "
                    "sglang_venv_python to an interpreter of that version, or sglang_venv_python_version to the host's."
                )
            result["changed"] = True
            if self._task.check_mode:
                return self._tidy(result)
            result.update(self._bring(house, arguments, result, host, task_vars))
            if result.get("failed"):
                return self._tidy(result)
            built = self._call(arguments, "build", task_vars)
            if not built.get("failed"):
                built["seconds"] = {**result["seconds"], **built["mark"]["seconds"]}
                built.pop("found", None)  # what was found before this task stays
            result.update(built)
            return self._tidy(result)
        except (venvs.VenvError, AnsibleError, OSError) as error:
            return self._tidy({**result, "failed": True, "changed": False, "msg": f"{name}: {error}"})
        except Exception as error:
            # Errors of rehearsal/wheels.py, whose class exists only once it is loaded.
            tool = sys.modules.get("dflash_fleet_wheels")
            if tool is None or not isinstance(error, tool.WheelError):
                raise
            return self._tidy({**result, "failed": True, "changed": False, "msg": f"{name}: sglang_version: {error}"})

    @staticmethod
    def _predict(arguments: dict[str, Any], house: _House, result: dict[str, Any], name: str) -> dict[str, Any]:
        """Check mode, where the interpreter is not there to be asked: its version is what the lock is for."""
        identity = venvs.venv_id(arguments["requirements"], house.python or "3.11")
        path = f"{arguments.get('root', '/var/lib/sglang/venvs')}/{identity}"
        diff = {"before": f"{path}: absent\n", "after": f"{path}: {name}\n", "before_header": "environment"}
        diff["after_header"] = diff["before_header"]
        return {**result, "changed": True, "found": "absent", "path": path, "id": identity, "diff": diff}

    def _bring_interpreter(self, arguments: dict[str, Any], task_vars: Any) -> dict[str, Any] | None:
        """Send the archive with the interpreter and have it unpacked; the failure, or None."""
        archive = _archive(str(arguments["archive"]), str(arguments.get("archive_sha256") or ""))
        folder = self._make_tmp_path()
        try:
            self._transfer_file(str(archive), self._connection._shell.join_path(folder, archive.name))
            done = self._call(arguments, "interpreter", task_vars, folder)
            return {**done, "changed": False} if done.get("failed") else None
        finally:
            self._remove_tmp_path(folder)

    def _call(self, arguments: dict[str, Any], step: str, task_vars: Any, arrived: str | None = None) -> dict[str, Any]:
        extra = {"step": step, **({"arrived": arrived} if arrived else {})}
        return self._execute_module(module_name="sglang_venv", module_args={**arguments, **extra}, task_vars=task_vars)

    @staticmethod
    def _tidy(result: dict[str, Any]) -> dict[str, Any]:
        # Modules add a file's attributes to every result that has a path.
        added = ("uid", "gid", "owner", "group", "mode", "state", "size", "secontext")
        for name in ("have", "free_bytes", "free_inodes", "adopted", "invocation", "ansible_facts", *added):
            result.pop(name, None)
        return result

    def _bring(
        self, house: _House, arguments: dict[str, Any], found: dict[str, Any], host: str, task_vars: Any
    ) -> dict[str, Any]:
        """Send the wheels that the host lacks; returns seconds and bytes, or the failure."""
        requirements = venvs.parse_requirements(arguments["requirements"])
        files = house.files()
        chosen, missing = venvs.choose_wheels(requirements, files, found["python"])
        if missing and not house.index:
            raise venvs.VenvError(
                f"the wheelhouse has nothing for Python {found['python']} of {', '.join(missing[:5])}"
                + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            )
        wheels = [files[name] for name in chosen if name not in found["have"]]
        sending = sum(wheel.stat().st_size for wheel in wheels)
        size, count = venvs.installed_size(files[name] for name in chosen)
        if found["free_bytes"] < size + sending:
            raise venvs.VenvError(
                f"{found['path']} needs {words.size(size + sending)} and {words.size(found['free_bytes'])} are free"
            )
        if 0 <= found["free_inodes"] < count:
            raise venvs.VenvError(f"{found['path']} needs {count} inodes and {found['free_inodes']} are free")
        started = time.monotonic()
        sent = 0
        for portion in _portions(wheels):
            failure = self._send(portion, arguments, task_vars)
            if failure:
                return failure
            sent += sum(wheel.stat().st_size for wheel in portion)
            if sending > PORTION:
                display.display(f"{host}  wheels  {words.size(sent)} of {words.size(sending)}")
        return {"sent_bytes": sent, "seconds": {"send": round(time.monotonic() - started, 1)}}

    def _send(self, portion: list[Path], arguments: dict[str, Any], task_vars: Any) -> dict[str, Any] | None:
        """Send some wheels and have the module take them over; the failure, or None."""
        folder = self._make_tmp_path()
        try:
            small = [wheel for wheel in portion if wheel.stat().st_size < SMALL]
            if small:
                with tempfile.NamedTemporaryFile(suffix=".tar") as bundle:
                    venvs.bundle(small, Path(bundle.name))
                    self._transfer_file(bundle.name, self._connection._shell.join_path(folder, "small.tar"))
            for wheel in portion:
                if wheel not in small:
                    self._transfer_file(str(wheel), self._connection._shell.join_path(folder, wheel.name))
            done = self._call(arguments, "adopt", task_vars, folder)
            return {**done, "changed": False} if done.get("failed") else None
        finally:
            self._remove_tmp_path(folder)


def _archive(source: str, digest: str) -> Path:
    """The interpreter's archive on the controller: the file that was named, or the one fetched once by its hash."""
    if len(digest) != 64:
        raise AnsibleError("sglang_venv_python_sha256: an archive needs its SHA-256 (64 hex digits)")
    if "://" not in source:
        found = Path(source).expanduser()
        if not found.is_file():
            raise AnsibleError(f"sglang_venv_python_archive: there is no {source} on the controller")
        _check_hash(source, found, digest)
        return found
    return _fetched(source, digest)


def _check_hash(source: str, file: Path, digest: str) -> None:
    known = venvs.sha256(file)
    if known != digest:
        raise AnsibleError(f"sglang_venv_python_sha256: {source} has the SHA-256 {known}, wanted is {digest}")


def _fetched(source: str, digest: str) -> Path:
    """The archive from its address, kept by the hash that it should have; a file with another one is not kept as it."""
    tool = _wheels_tool()
    folder = tool.cache_dir() / "pythons" / digest
    found = folder / (source.split("?")[0].rstrip("/").rpartition("/")[2] or "archive")
    # Hosts of a batch ask at the same moment: one fetches, the others find it.
    with tool.locked(folder.with_name(digest + ".lock")):
        if found.is_file() and venvs.sha256(found) == digest:
            return Path(found)
        display.display(f"controller  fetching {source}")
        folder.mkdir(parents=True, exist_ok=True)
        partial = found.with_name("." + found.name)
        try:
            with open_url(source, timeout=60) as answer, partial.open("wb") as out:
                shutil.copyfileobj(answer, out, 1 << 20)
            _check_hash(source, partial, digest)
            os.replace(partial, found)
        except OSError as problem:
            raise AnsibleError(f"sglang_venv_python_archive: {source} cannot be fetched: {problem}")
        finally:
            partial.unlink(missing_ok=True)
    return Path(found)


def _portions(wheels: list[Path]) -> list[list[Path]]:
    """Largest first, in groups of about PORTION bytes."""
    groups: list[list[Path]] = []
    room = 0
    for wheel in sorted(wheels, key=os.path.getsize, reverse=True):
        size = wheel.stat().st_size
        if not groups or size > room:
            groups.append([])
            room = PORTION
        groups[-1].append(wheel)
        room -= size
    return groups
