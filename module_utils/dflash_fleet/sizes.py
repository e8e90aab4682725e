"""What a configuration takes on a GPU and on a disk, estimated from sizes that are known; pure.

Bytes are decimal (1 GB is 10^9). Nothing is guessed: a size that neither the host nor the inventory knows is `None`,
and the text says "not known".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import state

GB = 1_000_000_000

#: KV cache of a target, bytes of one token in bfloat16 on a rank that holds all its layers. Kimi K2 has MLA: 576 values
#: in each of 61 layers, the same on every tensor-parallel rank.
TARGET_KV = {"kimi-k2": 576 * 61 * 2}
#: KV cache of a DFlash drafter: layers, key/value heads, values of a head's key and value together.
DRAFTER_KV = {"kimi-k2": (6, 8, 256)}


def _family(model: str) -> str:
    return next((name for name in TARGET_KV if name in model.lower()), "")


def kv_bytes_per_token(result: Mapping[str, Any]) -> int | None:
    """Bytes of one token in the KV pool of each GPU, the drafter's among them; None for a model not known here."""
    family = _family(str(result["model"]["name"]))
    parallel, drafter = result["parallel"], result["drafter"]
    if not family or drafter["name"] == "eagle3":
        return None
    width = 1 if str(option(result, "--kv-cache-dtype") or "").startswith("fp8") else 2
    total = TARGET_KV[family] * width // 2 // parallel["pp"]
    if drafter["algorithm"]:
        layers, heads, values = DRAFTER_KV[family]
        total += layers * max(1, heads // parallel["tp"]) * values * 2
    return total


def option(result: Mapping[str, Any], flag: str) -> Any:
    """The value of an option of the command line, or None."""
    return next((value for name, value in result["options"] if name == flag), None)


def model_bytes(name: str, revision: str, models: Mapping[str, Any], sizes_gb: Mapping[str, Any]) -> int | None:
    """Size of a repository: what lies on the host, else what the inventory says."""
    found = (models.get(state.model_dirname(name)) or {}).get(revision) or {}
    if found.get("complete") and found.get("bytes"):
        return int(found["bytes"])
    try:
        return int(float(sizes_gb[name]) * GB)
    except (KeyError, TypeError, ValueError):
        return None


def gigabytes(count: float | None) -> str:
    """`6.5 GB`, `610 GB`, `not known`."""
    if count is None:
        return "not known"
    amount = count / GB
    return f"{amount:.0f} GB" if amount >= 20 else f"{amount:.1f} GB" if amount >= 0.1 else f"{count / 1e6:.1f} MB"


def _repositories(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, repository, revision) of target and drafter."""
    found = [("weights", str(result["model"]["name"]), str(result["model"]["revision"]))]
    if result["drafter"]["algorithm"]:
        found.append(("drafter", str(result["drafter"]["model"]), str(result["drafter"]["revision"])))
    return found


def memory(result: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    """Lines about the memory of each GPU (of the host, on the cpu build)."""
    parallel = result["parallel"]
    # Experts, heads and stages are all shared out over tp x pp; data-parallel replicas hold a whole copy each.
    share = parallel["tp"] * parallel["pp"]
    parts = []
    for what, name, revision in _repositories(result):
        total = model_bytes(name, revision, host.get("models") or {}, host.get("sizes") or {})
        over = parallel["tp"] if what == "drafter" else share
        parts.append(f"{what} {'not known' if total is None else 'about ' + gigabytes(total / over)}")
    token = kv_bytes_per_token(result)
    if token is None:
        parts.append("KV pool not known")
    else:
        text = f"KV pool {token} bytes a token"
        context = option(result, "--context-length")
        if context and str(context).isdigit():
            text += f" ({gigabytes(token * int(context))} for one context of {context})"
        parts.append(text)
    fraction = option(result, "--mem-fraction-static")
    where = "on each GPU" if result["gpus"] else "on the host, each rank"
    limit = f"; weights and KV pool may take {float(fraction):.0%}" if fraction else ""
    return [f"{where}: {', '.join(parts)}{limit}"]


def disk(result: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    """Lines about what has to come to the host's disk; what is free is compared where the host was asked."""
    models, venvs = host.get("models") or {}, host.get("venvs") or {}
    engine = result["engine"]
    coming: list[tuple[str, int | None]] = []
    for _, name, revision in _repositories(result):
        there = ((models.get(state.model_dirname(name)) or {}).get(revision) or {}).get("complete")
        if name and not there:
            coming.append((name, model_bytes(name, revision, models, host.get("sizes") or {})))
    built = any(
        venv.get("complete")
        and str(venv.get("version") or "").split("+")[0] == engine["version"]
        and venv.get("build") in (None, engine["build"])
        for venv in venvs.values()
    )
    if not built:
        size = (host.get("venv_sizes") or {}).get(engine["build"])
        coming.append((f"environment of SGLang {engine['version']}", None if size is None else int(float(size) * GB)))
    if not coming:
        return ["nothing to fetch"] if host.get("asked") else []
    listed = ", ".join(f"{what} {gigabytes(size)}" for what, size in coming)
    needed = sum(size for _, size in coming if size is not None)
    lines = [f"{'needs' if host.get('asked') else 'takes'} {listed}"]
    free = host.get("free_bytes")
    if free is not None and needed > free:
        lines.append(f"NOT ENOUGH: {gigabytes(free)} free, {gigabytes(needed)} needed")
    return lines
