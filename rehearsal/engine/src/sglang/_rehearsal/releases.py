"""The releases that can be imitated, and what differs between them, as data.

Each entry of CHANGES names the first release of a behaviour; it was read from the published wheels.
"""

from __future__ import annotations

import os
import re

ORDER: tuple[str, ...] = (
    "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.14", "0.5.15", "0.5.16",
    "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip

# behaviour -> the first release that has it
CHANGES: dict[str, str] = {
    "correct_drafts_names": "0.5.12",  # spec_accepted_drafts became spec_num_correct_drafts, total_retractions num_...
    "draft_slot_skips_none": "0.5.13",  # graph replay no longer copies from a missing source: the incident is over
    "kv_dtype": "0.5.13",  # "KV Cache is allocated. dtype: ..."
    "kill_line": "0.5.13",  # "kill_process_tree called: ..."
    "crash_diagnostics": "0.5.13",  # sleeps before py-spy and core dumps when a child dies
    "overlap_drafter": "0.5.14",  # dflash_worker_v2; all weights first, then all pools, then all graphs
    "graph_roles": "0.5.14",  # "Capture target verify CUDA graph begin."
    "graph_backend": "0.5.16",  # "backend=full, num_tokens_per_req=8" in that line
    "kimi_warmup_image": "0.5.16",
    "draft_config_words": "0.5.16",  # "DFLASH draft config num_target_layers" lost its first word
    "startup_timings": "0.5.17",
    "noise_embed_scale": "0.5.18",  # one more field in the drafter's ready line
    "unified_cache": "0.5.18",  # the prefix cache names itself
    "freeze_gc": "0.5.18",  # the warm-up ends with POST /freeze_gc
    "args_as_dict": "0.5.19",  # server_args={...} instead of ServerArgs(...)
    "clean_exit": "0.5.19",  # a drain ends with exit 0 instead of SIGKILL on itself
    "ready_endpoint": "0.5.20",
    "launch_command": "0.5.20",  # in /server_info
    "init_parallel": "0.5.21",  # "Init parallel begin." instead of "Init torch distributed begin."
    "completion_details": "0.5.23",  # completion_tokens_details in usage
    "graph_bs_at_end": "0.5.22",  # the captured sizes moved from the begin line to the end line
}


def key(version: str) -> tuple[int, ...]:
    """A sortable form: post releases come after their base."""
    match = re.match(r"^(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    if not match:
        raise ValueError(f"not a release: {version!r}")
    return tuple(int(part or 0) for part in match.groups())


def _baked() -> str:
    try:
        from .._release import RELEASE as baked  # written by the build

        return str(baked)
    except ImportError:
        # A source tree on sys.path: tests and development.
        return os.environ.get("REHEARSAL_RELEASE", ORDER[-1])


RELEASE: str = _baked()


def has(behaviour: str, release: str = "") -> bool:
    """Whether the imitated release (or the one given) has this behaviour."""
    return key(release or RELEASE) >= key(CHANGES[behaviour])


def covers(first: str, last: str, release: str = "") -> bool:
    """Whether a table row from `first` to `last` holds for the imitated release."""
    return key(first) <= key(release or RELEASE) <= key(last)


def nearest(release: str = "") -> str:
    """The known release whose tables serve this one (a later post release uses its predecessor's)."""
    wanted = key(release or RELEASE)
    return [name for name in ORDER if key(name) <= wanted][-1]
