"""Where things lie on a host, what the state files hold, and how actual compares with desired.

Pure but for the few functions that read or write one named file. `Layout` is the one place that knows paths; modules,
roles' tasks (through `sglang_state`) and the supervisor all ask it.

State files of an instance (directory `state/`), each a JSON object with `"schema": 1`:

ready.json      written when a start has passed its gate, replaced by the next one that does:
                {schema, unit, invocation_id, release_id, ready_at, degraded, seconds, smoke: {accept_length,
                 tokens_per_second, ...}, phases: [...]}
last_good.json  {schema, release_id, unit, recorded_at}: the release to return to when no rung holds
rungs.json      {schema, rungs: [...]}, see `record_rung`
standby.json    {schema, units: {unit: release id}}: further profiles whose units are installed and not enabled
starts.jsonl    one JSON object a line, {schema, unit, invocation_id, release_id, started_at, outcome, seconds, phase,
                 cause, summary, remedy}: every start that a gate watched, with its end

Files of the host, in `state/` below the root: rollout.json (module lock) and deployed.json (module deployed).

Only `unit` and `invocation_id` of ready.json are relied on here; the rest is shown where it is there. Seconds are
floats, times ISO 8601 UTC with microseconds.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1

# How a document of an older schema becomes one of the next: by the older number, a function of file name and document.
# Whoever raises SCHEMA adds the step here, and the older files to tests/fixtures/state.
Migration = Callable[[str, dict[str, Any]], dict[str, Any]]
MIGRATIONS: dict[int, Migration] = {}

# Directories of the root that are not instances, so no instance may be called so.
RESERVED = ("venvs", "models", "cache", "home", "state")
INSTANCE_NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,62}$")
REVISION = re.compile(r"^[0-9a-f]{40}$")
UNIT_GLOB = "sglang-*.service"

# A start that this many bytes of starts.jsonl cannot hold does not exist (one line is about 400 bytes).
_TAIL_BYTES = 65536


class StateError(Exception):
    """A state file that this version cannot read; the message names the file."""


# ---------------------------------------------------------------------------------------------------------------------
# Paths


class Layout:
    """Every path of a host. `root` holds venvs, models and instances; the others are fixed by systemd and the FHS."""

    def __init__(
        self,
        root: str | os.PathLike[str] = "/var/lib/sglang",
        etc: str | os.PathLike[str] = "/etc/sglang",
        units: str | os.PathLike[str] = "/etc/systemd/system",
        programs: str | os.PathLike[str] = "/usr/local/lib/dflash-fleet",
    ) -> None:
        self.root = Path(root)
        self.etc = Path(etc)
        self.units = Path(units)
        self.programs = Path(programs)

    # -- shared by all instances
    def venvs(self) -> Path:
        """Directory of all virtual environments."""
        return self.root / "venvs"

    def venv(self, lock_hash: str) -> Path:
        """One virtual environment, named by the first 16 hex digits of its lock's hash."""
        return self.venvs() / lock_hash

    def venv_python(self, lock_hash: str) -> Path:
        """The interpreter that a unit starts."""
        return self.venv(lock_hash) / "bin" / "python"

    def venv_mark(self, lock_hash: str) -> Path:
        """The file that is written last: without it the environment is unfinished."""
        return self.venv(lock_hash) / ".complete"

    def models(self) -> Path:
        """Directory of all models."""
        return self.root / "models"

    def model(self, repo: str, revision: str) -> Path:
        """A published revision: it exists whole or not at all."""
        return self.models() / model_dirname(repo) / revision

    def model_partial(self, repo: str, revision: str) -> Path:
        """Where a revision is collected before its atomic rename."""
        return self.models() / model_dirname(repo) / (revision + ".partial")

    def model_manifest(self, repo: str, revision: str) -> Path:
        """What a published revision holds."""
        return self.model(repo, revision) / ".dflash-fleet.json"

    def program(self, version: str) -> Path:
        """Code of ours on the host: supervisor.py, dflash_fleet/, engine/."""
        return self.programs / version

    def unit_file(self, unit: str) -> Path:
        """The unit as systemd reads it (a copy of the release's)."""
        return self.units / unit

    def boot_link(self, unit: str) -> Path:
        """The link that starts a unit at boot, as `systemctl enable` makes it."""
        return self.boot_links() / unit

    def boot_links(self) -> Path:
        """Directory of those links."""
        return self.units / "multi-user.target.wants"

    def host_state(self) -> Path:
        """Directory of the state files that belong to the host, not to an instance."""
        return self.root / "state"

    def rollout_lock(self) -> Path:
        """Who works on this host."""
        return self.host_state() / "rollout.json"

    def deployed(self) -> Path:
        """What the last whole deployment left behind."""
        return self.host_state() / "deployed.json"

    # -- one instance
    def instance(self, name: str) -> Path:
        """Everything that belongs to one instance."""
        return self.root / check_instance(name)

    def releases(self, name: str) -> Path:
        """Directory of an instance's releases."""
        return self.instance(name) / "releases"

    def release_dir(self, name: str, release_id: str) -> Path:
        """One release: unit and release.json, never changed after it is written."""
        return self.releases(name) / release_id

    def release_json(self, name: str, release_id: str) -> Path:
        """What a release is made of (venv, revisions, profile)."""
        return self.release_dir(name, release_id) / "release.json"

    def release_unit(self, name: str, release_id: str, unit: str) -> Path:
        """The release's own copy of its unit."""
        return self.release_dir(name, release_id) / unit

    def current(self, name: str) -> Path:
        """Symbolic link to the release in use: the only switch."""
        return self.instance(name) / "current"

    def current_target(self, release_id: str) -> str:
        """What `current` points to (relative, so that the root can be looked at from elsewhere)."""
        return f"releases/{release_id}"

    def etc_link(self, name: str) -> Path:
        """Symbolic link in /etc that shows an administrator the current release."""
        return self.etc / check_instance(name)

    def credentials(self, name: str) -> Path:
        """Directory of secrets that the unit loads with LoadCredential=."""
        return self.instance(name) / "credentials"

    def api_key(self, name: str) -> Path:
        """The engine's key."""
        return self.credentials(name) / "api_key"

    def state(self, name: str) -> Path:
        """Directory of the state files."""
        return self.instance(name) / "state"

    def trial(self, name: str) -> Path:
        """What ran before a switch for a while: there until it is over."""
        return self.state(name) / "trial.json"

    def last_good(self, name: str) -> Path:
        """The release to return to."""
        return self.state(name) / "last_good.json"

    def rungs(self, name: str) -> Path:
        """Fallbacks that worked, with what they were needed for."""
        return self.state(name) / "rungs.json"

    def ready(self, name: str) -> Path:
        """The start that last passed its gate."""
        return self.state(name) / "ready.json"

    def starts(self, name: str) -> Path:
        """History of starts."""
        return self.state(name) / "starts.jsonl"

    def standby(self, name: str) -> Path:
        """Which units of further profiles are installed, with their releases."""
        return self.state(name) / "standby.json"

    def reports(self, name: str) -> Path:
        """Crash reports, one directory each, named by time."""
        return self.state(name) / "reports"


def check_instance(name: str) -> str:
    """The name, or StateError: it becomes a directory and a part of unit names."""
    if not INSTANCE_NAME.match(name) or name in RESERVED:
        raise StateError(
            f"sglang_instances: {name!r} cannot name an instance: small letters, digits, - and _, "
            f"not {', '.join(RESERVED)}"
        )
    return name


def model_dirname(repo: str) -> str:
    """`org/name` as one directory name; the hub allows no `--` in either part, so no two names meet."""
    return repo.replace("/", "--")


def instance_of_unit(unit: str, instances: Iterable[str]) -> str | None:
    """Which instance a unit `sglang-<instance>-<profile>.service` belongs to: the longest name that fits, or None."""
    best: str | None = None
    for name in instances:
        if unit.startswith(f"sglang-{name}-") and (best is None or len(name) > len(best)):
            best = name
    return best


# ---------------------------------------------------------------------------------------------------------------------
# Files


def now_utc(timestamp: float | None = None) -> str:
    """ISO 8601 UTC with microseconds (of `timestamp`, seconds since 1970, or of now)."""
    if timestamp is None:
        moment = datetime.datetime.now(datetime.timezone.utc)
    else:
        moment = datetime.datetime.fromtimestamp(timestamp, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def check_schema(document: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document, brought to the present schema, else StateError naming file and schema.

    What is read is migrated in memory; the file follows when it is written next, so that a look changes nothing.
    """
    if not isinstance(document, dict):
        raise StateError(f"{path}: holds {type(document).__name__} where a JSON object belongs; move the file away")
    found = document.get("schema")
    while found != SCHEMA and isinstance(found, int) and found in MIGRATIONS:
        found += 1
        document = {**MIGRATIONS[found - 1](os.path.basename(path), document), "schema": found}
    if found != SCHEMA:
        raise StateError(
            f"{path}: schema {found!r} is not known to this dflash-fleet, which reads schema {SCHEMA}; "
            "run the version that wrote it, or move the file away"
        )
    return document


def read_state(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """A state file, or None where there is none. StateError for damage or another schema; PermissionError as it is."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        document = json.loads(text)
    except ValueError as problem:
        # State files are replaced whole, so this is no half-written file but damage that someone should look at.
        raise StateError(f"{path}: is not JSON ({problem}); move the file away")
    return check_schema(document, path)


def write_state(path: str | os.PathLike[str], data: Mapping[str, Any], mode: int = 0o640) -> None:
    """Replace a state file whole: a reader sees the old or the new one, also after a power cut."""
    target = Path(path)
    text = json.dumps({"schema": SCHEMA, **data}, indent=2, sort_keys=True) + "\n"
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        # The directory's owner and group are the instance's: the file follows them where we may give it away.
        owner = target.parent.stat()
        if os.geteuid() == 0:
            os.chown(temporary, owner.st_uid, owner.st_gid)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def append_start(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Add a line to starts.jsonl with one write, so that two writers cannot mix."""
    line = json.dumps({"schema": SCHEMA, **record}, sort_keys=True) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
    try:
        # A power cut can have left half a line: begin on a fresh one.
        size = os.fstat(handle).st_size
        if not ends_with_newline(path, size):
            line = "\n" + line
        os.write(handle, line.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def ends_with_newline(path: str | os.PathLike[str], size: int) -> bool:
    """Whether the next line can be appended as it is; so it can where there is none yet."""
    if not size:
        return True
    with open(path, "rb") as stream:
        stream.seek(size - 1)
        return stream.read(1) == b"\n"


def read_starts(path: str | os.PathLike[str], last: int = 3) -> list[dict[str, Any]]:
    """The newest `last` starts, oldest of them first. A line cut off by a power cut is passed over."""
    try:
        with open(path, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            size = stream.tell()
            stream.seek(max(0, size - _TAIL_BYTES))
            raw = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return []
    lines = raw.split(b"\n")
    if size > _TAIL_BYTES:
        lines = lines[1:]
    found: list[dict[str, Any]] = []
    for line in reversed(lines):
        if len(found) == last:
            break
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError:
            continue
        found.append(check_schema(document, path))
    return found[::-1]


# ---------------------------------------------------------------------------------------------------------------------
# Fallback rungs

RUNG_KEY = (
    "engine_version",
    "driver",
    "drafter_revision",
    "profile",
    "drafter",
    "cuda_graph_requested",
    "model_revision",
)


def rung_key(
    *,
    engine_version: str,
    driver: str | None,
    drafter_revision: str | None,
    profile: str,
    drafter: str | None,
    cuda_graph_requested: str | None,
    model_revision: str | None,
) -> dict[str, str]:
    """What a fallback was needed for. None (no driver on a CPU host, no drafter) is stored as an empty string."""
    return {
        "engine_version": engine_version,
        "driver": driver or "",
        "drafter_revision": drafter_revision or "",
        "profile": profile,
        "drafter": drafter or "none",
        "cuda_graph_requested": cuda_graph_requested or "",
        "model_revision": model_revision or "",
    }


def matching_rung(
    rungs: Mapping[str, Any] | Iterable[Mapping[str, Any]] | None, key: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The newest recorded rung for exactly this key, or None.

    Every part must agree: another engine release, driver or drafter revision may have mended the cause, and another
    profile or wish is another question, so the better configuration is tried again there.
    """
    entries: Iterable[Any] = []
    if isinstance(rungs, Mapping):
        entries = rungs.get("rungs") or []
    elif rungs is not None:
        entries = rungs
    wanted = {part: str(key.get(part) or "") for part in RUNG_KEY}
    best: dict[str, Any] | None = None
    for entry in entries:
        recorded = entry.get("key") or {}
        same = all(str(recorded.get(part) or "") == wanted[part] for part in RUNG_KEY)
        if same and (best is None or str(entry.get("recorded_at", "")) >= str(best.get("recorded_at", ""))):
            best = dict(entry)
    return best


def record_rung(
    rungs: Mapping[str, Any] | None,
    key: Mapping[str, Any],
    *,
    remedy: str,
    set: Mapping[str, Any],
    cause: str,
    unit: str,
    seconds_to_ready: float | None,
    recorded_at: str | None = None,
) -> dict[str, Any]:
    """rungs.json with this rung added (pass it to write_state); one for the same key is replaced.

    `remedy` is the last remedy taken; `set` holds the variables of every rung in effect, so that it alone brings the
    host back to what worked.
    """
    clean = {part: str(key.get(part) or "") for part in RUNG_KEY}
    kept = [entry for entry in (rungs or {}).get("rungs", []) if entry.get("key") != clean]
    kept.append(
        {
            "key": clean,
            "remedy": remedy,
            "set": dict(set),
            "cause": cause,
            "unit": unit,
            "recorded_at": recorded_at or now_utc(),
            "seconds_to_ready": seconds_to_ready,
        }
    )
    return {"schema": SCHEMA, "rungs": kept}


# ---------------------------------------------------------------------------------------------------------------------
# Reading the directories


def list_dirs(path: Path) -> list[str]:
    """Names of the directories in `path`, sorted, hidden ones left out; none where it does not exist."""
    try:
        with os.scandir(path) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_venvs(layout: Layout) -> dict[str, dict[str, Any]]:
    """Virtual environments by lock hash; one without its mark was interrupted and is not complete."""
    found: dict[str, dict[str, Any]] = {}
    for name in list_dirs(layout.venvs()):
        mark = read_json(layout.venv_mark(name))
        details = mark or {}
        engine = details.get("engine")
        version = details.get("version")
        build = details.get("build")
        if isinstance(engine, Mapping):  # {name, version, build} is read as well as three keys
            version = engine.get("version", version)
            build = engine.get("build", build)
            engine = engine.get("name")
        found[name] = {
            "complete": mark is not None,
            "engine": engine,
            "version": version,
            "build": build,
            "python": details.get("python"),
            "cuda_toolkit": details.get("cuda_toolkit"),
        }
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object of another owner (no schema of ours), or None where it is missing or damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def read_models(layout: Layout) -> dict[str, dict[str, dict[str, Any]]]:
    """Models by directory name and revision: complete when the manifest is there and each file has its size."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for dirname in list_dirs(layout.models()):
        revisions: dict[str, dict[str, Any]] = {}
        folder = layout.models() / dirname
        for name in list_dirs(folder):
            revision, partial = (name[: -len(".partial")], True) if name.endswith(".partial") else (name, False)
            if not REVISION.match(revision):
                continue
            if partial:
                # Published and still being collected again: the published one counts.
                revisions.setdefault(revision, {"complete": False, "bytes": 0, "files": 0, "damaged": []})
            else:
                revisions[revision] = read_model(folder / name)
        if revisions:
            found[dirname] = revisions
    return found


def read_model(path: Path) -> dict[str, Any]:
    """One revision, judged by its manifest with a stat a file (no content is read)."""
    manifest = read_json(path / ".dflash-fleet.json")
    if manifest is None:
        return {"complete": False, "bytes": 0, "files": 0, "damaged": []}
    total = 0
    sizes = manifest_sizes(manifest)
    damaged = []
    for name, size in sizes.items():
        try:
            actual = os.stat(path / name).st_size
        except OSError:
            damaged.append(name)
            continue
        total += actual
        if size is not None and actual != size:
            damaged.append(name)
    found = {"complete": not damaged, "bytes": total, "files": len(sizes), "damaged": sorted(damaged)[:10]}
    shape = cache_shape(read_json(path / "config.json") or {})
    return {**found, "cache": shape} if shape else found


def cache_shape(config: Mapping[str, Any]) -> dict[str, int] | None:
    """What a model's config.json says about its KV cache; None where it says too little.

    `layers` that attend, and for one token in one of them: `shared` values that every tensor-parallel rank holds (MLA),
    or `heads` key/value heads of `values` values each, key and value together. Layers with a sliding window count
    whole, so for those it is the most that the cache takes.
    """
    inner = config.get("text_config")  # of a multimodal model
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config

    def whole(name: str) -> int:
        value = text.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    kinds = text.get("layer_types")
    layers = whole("num_hidden_layers")
    if isinstance(kinds, list):
        layers = sum(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not layers:
        return None
    if whole("kv_lora_rank"):
        return {"layers": layers, "shared": whole("kv_lora_rank") + whole("qk_rope_head_dim")}
    queries = whole("num_attention_heads")
    values = whole("head_dim") or (whole("hidden_size") // queries if queries else 0)
    heads = whole("num_key_value_heads") or queries
    return {"layers": layers, "heads": heads, "values": 2 * values} if heads and values else None


def manifest_sizes(manifest: Mapping[str, Any]) -> dict[str, int | None]:
    """File sizes of a manifest: `files` is {path: {size}} or [{path, size}]."""
    files = manifest.get("files") or {}
    pairs: Iterable[tuple[Any, Any]]
    pairs = files.items() if isinstance(files, Mapping) else ((entry.get("path"), entry) for entry in files)
    return {str(name): (entry.get("size") if isinstance(entry, Mapping) else None) for name, entry in pairs if name}


def list_instances(layout: Layout) -> list[str]:
    """Instances found under the root: directories with releases or state in them."""
    return [
        name
        for name in list_dirs(layout.root)
        if name not in RESERVED
        and INSTANCE_NAME.match(name)
        and (layout.releases(name).is_dir() or layout.state(name).is_dir() or layout.current(name).is_symlink())
    ]


def read_current(layout: Layout, name: str) -> str | None:
    """The id of the release that `current` points to, also when that directory is gone; None without the link."""
    try:
        return os.path.basename(os.readlink(layout.current(name)))
    except OSError:
        return None


def read_last_report(layout: Layout, name: str) -> str | None:
    """The newest report's path (their names are times)."""
    names = [entry for entry in list_dirs(layout.reports(name)) if not entry.startswith(".")]
    return str(layout.reports(name) / names[-1]) if names else None


def release_unit(layout: Layout, name: str, release_id: str) -> str | None:
    """The unit that a release brings."""
    return next((path.name for path in sorted(layout.release_dir(name, release_id).glob("sglang-*.service"))), None)


def read_instance(layout: Layout, name: str, units: list[dict[str, Any]]) -> dict[str, Any]:
    """What is on the host for one instance; `units` are its units as systemd sees them."""
    current = read_current(layout, name)
    release = read_state(layout.release_json(name, current)) if current else None
    begun = main_unit({"units": units, "release": release})
    by_hand = read_by_hand(layout, name, begun, release)
    ready = read_state(layout.ready(name))
    rungs = read_state(layout.rungs(name))
    starts = read_starts(layout.starts(name), last=100)
    from . import reports, verdict  # they stand on this module

    gate = verdict.read(verdict.path_of(name))
    if begun and (ready or {}).get("invocation_id") != begun["invocation_id"]:
        # A start that no Ansible watched (a reboot, a restart at night): the supervisor's gate has.
        own = verdict.ready_record(gate, begun["invocation_id"])
        if own is not None:
            overrides = ((by_hand or {}).get("release") or release or {}).get("overrides")
            ready = {**own, "release_id": (by_hand or {}).get("release_id", current), "degraded": bool(overrides)}
    facts = {
        "current": current,
        "release": release,
        "by_hand": by_hand,
        "releases": [release for release in list_dirs(layout.releases(name)) if not release.startswith(".")],
        "units": units,
        "ready": ready,
        "gate": gate,
        "last_good": read_state(layout.last_good(name)),
        "rungs": (rungs or {}).get("rungs", []),
        "trial": read_state(layout.trial(name)),
        "last_starts": starts[-3:],
        "last_report": read_last_report(layout, name),
        "report": reports.read_last(layout.reports(name)),
    }
    facts["release_units"] = {identity: release_unit(layout, name, identity) for identity in facts["releases"]}
    facts["previous_good"] = previous_good(facts, starts)
    facts.update(condition(facts))
    return facts


def read_standby(layout: Layout, name: str) -> dict[str, str]:
    """Units of further profiles that are installed, with the releases they are of."""
    return dict((read_state(layout.standby(name)) or {}).get("units") or {})


def release_of_unit(layout: Layout, name: str, unit: str) -> tuple[str, dict[str, Any]] | None:
    """(id, release.json) of the release that an installed unit is of: the current one, or one on standby."""
    for identity in (read_current(layout, name), read_standby(layout, name).get(unit)):
        release = read_state(layout.release_json(name, identity)) if identity else None
        if identity and release and release.get("unit") == unit:
            return identity, release
    return None


def read_by_hand(
    layout: Layout, name: str, unit: Mapping[str, Any] | None, release: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """{unit, release_id, release} of a profile on standby that someone started instead of the current one."""
    if unit is None or release is None or unit["name"] == release.get("unit"):
        return None
    found = release_of_unit(layout, name, unit["name"])
    return {"unit": unit["name"], "release_id": found[0], "release": found[1]} if found else None


# ---------------------------------------------------------------------------------------------------------------------
# Judging


def condition(instance: Mapping[str, Any]) -> dict[str, Any]:
    """In one word how an instance is: {serving, degraded, condition, unit, since}.

    serving     the active unit's invocation is the one that passed its gate
    degraded    it serves with a fallback in effect
    starting    active, but this invocation has not passed a gate (yet)
    restarting  systemd waits before it starts a crashed engine again
    stopping    on its way down
    failed      dead, and not because someone stopped it
    stopped     not running, nothing wrong
    absent      nothing was ever installed
    """
    ready = instance.get("ready") or {}
    units: list[dict[str, Any]] = list(instance.get("units") or [])
    unit = main_unit(instance)
    release = instance.get("release") or {}
    serving = bool(
        unit
        and unit["active_state"] == "active"
        and unit["invocation_id"]
        and unit["invocation_id"] == ready.get("invocation_id")
    )
    # The gate's own word first; a release made by a fallback carries the variables that the fallback set.
    degraded = serving and bool(ready.get("degraded", release.get("overrides")))
    if unit is None:
        word = "stopped" if instance.get("current") or units else "absent"
    elif serving:
        word = "degraded" if degraded else "serving"
    else:
        word = unit_word(unit)
    return {
        "serving": serving,
        "degraded": degraded,
        "condition": word,
        "unit": unit["name"] if unit else None,
        "since": unit["since"] if unit else None,
    }


def previous_good(instance: Mapping[str, Any], starts: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The release to return to, {release_id, unit}: the last one that served, is not the current one and is still kept.

    During a trial it is what ran before, whatever is current. `starts` is the history, oldest first.
    """
    trial = instance.get("trial")
    if trial and trial["release_id"] in (instance.get("releases") or []):
        return {"release_id": trial["release_id"], "unit": trial["unit"]}
    last_good = instance.get("last_good") or {}
    served = [start for start in starts if start.get("outcome") == "ready"]
    for found in [last_good, *reversed(served)]:
        identity = found.get("release_id")
        if identity and identity != instance.get("current") and identity in (instance.get("releases") or []):
            return {"release_id": identity, "unit": found.get("unit")}
    return None


def main_unit(instance: Mapping[str, Any]) -> dict[str, Any] | None:
    """The unit that stands for the instance: the running one, else the current release's, else the last that failed."""
    units: list[dict[str, Any]] = list(instance.get("units") or [])
    wanted = (instance.get("release") or {}).get("unit")
    alive = [unit for unit in units if unit["active_state"] in ("active", "activating", "reloading", "deactivating")]
    for unit in alive:
        if unit["name"] == wanted:
            return unit
    if alive:
        return alive[0]
    for unit in units:
        if unit["name"] == wanted:
            return unit
    failed = [unit for unit in units if unit["active_state"] == "failed"]
    return failed[0] if failed else (units[0] if units else None)


def gate_accept_length(ready: Mapping[str, Any]) -> float | None:
    """What the gate saw, from an instance's ready.json, which has it at the top or below `smoke`."""
    return ready.get("accept_length") or (ready.get("smoke") or {}).get("accept_length")


def unit_word(unit: Mapping[str, Any]) -> str:
    """How a unit is that is not known to serve."""
    if unit["load_state"] == "not-found" and unit["active_state"] == "inactive":
        return "absent"
    if unit["sub_state"] == "auto-restart":
        return "restarting"
    if unit["active_state"] in ("active", "activating", "reloading"):
        return "starting"
    if unit["active_state"] == "deactivating":
        return "stopping"
    if unit["active_state"] == "failed":
        return "stopped" if unit["stop_asked"] else "failed"
    return "stopped"


def difference(role: str, what: str, actual: str | None, desired: str) -> dict[str, str]:
    """One row of `differences`."""
    return {"role": role, "what": what, "actual": actual or "absent", "desired": desired}


def differences(state: Mapping[str, Any], desired: Mapping[str, Any]) -> list[dict[str, str]]:
    """What must change on the host, by role, in the order of a deployment; empty when it is as desired."""
    rows: list[dict[str, str]] = []
    for lock_hash in desired.get("venvs") or []:
        venv = state["venvs"].get(lock_hash)
        if venv is None or not venv["complete"]:
            rows.append(difference("sglang_venv", f"environment {lock_hash}", venv and "incomplete", "complete"))
    for wanted in desired.get("models") or []:
        revision = (state["models"].get(model_dirname(wanted["repo"])) or {}).get(wanted["revision"])
        if revision is None or not revision["complete"]:
            actual = None
            if revision is not None:
                damaged = ", ".join(revision["damaged"])
                actual = f"damaged: {damaged}" if damaged else "incomplete"
            rows.append(difference("model_weights", f"{wanted['repo']} {wanted['revision'][:12]}", actual, "complete"))
    for name, wanted in sorted((desired.get("releases") or {}).items()):
        rows.extend(instance_differences(name, state["instances"].get(name), wanted))
    return rows


def instance_differences(
    name: str, instance: Mapping[str, Any] | None, wanted: Mapping[str, Any]
) -> list[dict[str, str]]:
    """The share of one instance in `differences`."""
    role = "sglang_service"
    actual = instance or {"units": [], "current": None, "release": None}
    rows: list[dict[str, str]] = []
    release_id = wanted.get("release_id")
    if release_id and actual["current"] != release_id:
        rows.append(difference(role, f"{name}: release", actual["current"], str(release_id)))
    elif release_id and actual["release"] is None:
        rows.append(difference(role, f"{name}: release", f"{release_id} without release.json", str(release_id)))
    unit_name = wanted.get("unit")
    if not unit_name:
        return rows
    unit = next((entry for entry in actual["units"] if entry["name"] == unit_name), None)
    if unit is None or unit["load_state"] == "not-found":
        rows.append(difference(role, f"{name}: unit {unit_name}", None, "installed and active"))
    else:
        if unit["active_state"] != "active":
            rows.append(difference(role, f"{name}: unit {unit_name}", unit_text(unit), "active"))
        elif not (actual.get("serving") and actual.get("unit") == unit_name):
            rows.append(difference(role, f"{name}: {unit_name}", "active, this start not gated", "serving"))
        if unit["enabled"] not in ("enabled", "enabled-runtime"):
            rows.append(difference(role, f"{name}: unit {unit_name} at boot", unit["enabled"] or "disabled", "enabled"))
        if unit.get("need_daemon_reload"):
            rows.append(difference(role, f"{name}: unit {unit_name}", "changed on disk, not reloaded", "reloaded"))
    for other in actual["units"]:
        if other["name"] == unit_name:
            continue
        if other["active_state"] not in ("inactive", "failed"):
            rows.append(difference(role, f"{name}: unit {other['name']}", unit_text(other), "inactive"))
        if other["enabled"] in ("enabled", "enabled-runtime"):
            rows.append(difference(role, f"{name}: unit {other['name']} at boot", other["enabled"], "disabled"))
    return rows


def unit_text(unit: Mapping[str, Any]) -> str:
    """`failed (signal)`, `activating (auto-restart)`: as systemctl status words it."""
    detail = unit["result"] if unit["active_state"] == "failed" else unit["sub_state"]
    return f"{unit['active_state']} ({detail})"
