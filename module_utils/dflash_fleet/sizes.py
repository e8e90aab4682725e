"""What a configuration takes on a GPU and on a disk, estimated from sizes that are known; pure.

Bytes are decimal (1 GB is 10^9). Nothing is guessed: a size that neither the host nor the inventory knows is `None`,
and the text says "not known".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import state, words

GB = 1_000_000_000

#: The shapes of KV caches (`state.cache_shape`) of models that a plan should know before they are on a host: the target
#: has MLA, 576 values in each of 61 layers, the same on every tensor-parallel rank.
KNOWN_CACHES: dict[str, dict[str, int]] = {
    "kimi-k2": {"layers": 61, "shared": 576},
    "kimi-k2 drafter": {"layers": 6, "heads": 8, "values": 256},
}


def _cache(name: str, revision: str, drafter: bool, models: Mapping[str, Any]) -> Mapping[str, int] | None:
    """The shape of a model's KV cache: from its config.json on the host, else from the table."""
    found = (models.get(state.model_dirname(name)) or {}).get(revision) or {}
    family = next((known for known in KNOWN_CACHES if known in name.lower()), "")
    return found.get("cache") or KNOWN_CACHES.get(family + (" drafter" if drafter else ""))


def _cache_bytes(shape: Mapping[str, int], tp: int, pp: int, width: int) -> int:
    """Bytes of one token on the rank that holds most: whole heads, and the longest stage's layers."""
    per_layer = shape.get("shared") or max(1, -(-shape["heads"] // tp)) * shape["values"]
    return -(-shape["layers"] // pp) * per_layer * width


def kv_bytes_per_token(result: Mapping[str, Any], models: Mapping[str, Any] | None = None) -> int | None:
    """Bytes of one token in the KV pool of each GPU, the drafter's among them; None where a model is not known."""
    parallel = result["parallel"]
    width = 1 if str(option(result, "--kv-cache-dtype") or "").startswith("fp8") else 2
    total = 0
    for what, name, revision in _repositories(result):
        drafter = what == "drafter"
        shape = _cache(name, revision, drafter, models or {})
        if shape is None or (drafter and result["drafter"]["name"] == "eagle3"):
            return None
        # A drafter has no stages, and its pool stays in bfloat16.
        total += _cache_bytes(shape, parallel["tp"], 1 if drafter else parallel["pp"], 2 if drafter else width)
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
    weights: float | None = 0
    for what, name, revision in _repositories(result):
        total = model_bytes(name, revision, host.get("models") or {}, host.get("sizes") or {})
        over = parallel["tp"] if what == "drafter" else share
        weights = None if weights is None or total is None else weights + total / over
        parts.append(f"{what} {'not known' if total is None else 'about ' + words.size(total / over)}")
    token = kv_bytes_per_token(result, host.get("models") or {})
    if token is None:
        parts.append("KV pool not known")
    else:
        text = f"KV pool {token} bytes a token"
        context = option(result, "--context-length")
        if context and str(context).isdigit():
            text += f" ({words.size(token * int(context))} for one context of {context})"
        parts.append(text)
    fraction = option(result, "--mem-fraction-static")
    where = "on each GPU" if result["gpus"] else "on the host, each rank"
    limit = f"; weights and KV pool may take {float(fraction):.0%}" if fraction else ""
    lines = [f"{where}: {', '.join(parts)}{limit}"]
    return [*lines, *_fit(result, host, weights, token, float(fraction) if fraction else None)]


def _fit(
    result: Mapping[str, Any], host: Mapping[str, Any], weights: float | None, token: int | None, fraction: float | None
) -> list[str]:
    """What the host's own GPUs have, against what they should hold."""
    if not result["gpus"]:
        return []
    gpus = host.get("gpu_bytes")
    if gpus is None:
        return ["memory of the GPUs: not asked"]
    mine = [gpus[index] for index in result["gpu_ids"] or range(result["gpus"]) if index < len(gpus)]
    if len(mine) < result["gpus"]:
        return [f"NOT ENOUGH: {len(gpus)} GPUs on the host, {result['gpus']} wanted"]
    least = min(mine)
    if weights is None:
        return [f"GPUs of {words.size(least)}"]
    room = least * (fraction or 1) - weights
    if room <= 0:
        return [f"NOT ENOUGH: {words.size(weights)} of weights on GPUs of {words.size(least)}"]
    left = f"GPUs of {words.size(least)}: {'' if fraction else 'at most '}{words.size(room)} left for the KV pool"
    return [left + (f", {room / token:.0f} tokens" if token else "")]


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
    listed = ", ".join(f"{what} {words.size(size)}" for what, size in coming)
    needed = sum(size for _, size in coming if size is not None)
    lines = [f"{'needs' if host.get('asked') else 'takes'} {listed}"]
    free = host.get("free_bytes")
    if free is not None and needed > free:
        lines.append(f"NOT ENOUGH: {words.size(free)} free, {words.size(needed)} needed")
    return lines
