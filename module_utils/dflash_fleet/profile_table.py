"""The profiles: how a model is spread over a host's GPUs. Data only; `profiles.py` turns a row into a command line.

Keys of a row, the same for `sglang_profiles` in group_vars (all but `summary` optional, sizes default to 1):

  summary      one line for people
  tp pp ep dp  tensor, pipeline, expert and data parallel sizes; ep divides tp (SGLang itself checks that only for some
               checkpoints). A host needs tp x pp x dp GPUs, with attention data parallelism tp x pp
  options      further options of the engine, `{option: value}`; true for a bare switch
  environment  variables of the engine's environment
"""

from __future__ import annotations

from typing import Any

#: `--moe-a2a-backend none` is SGLang's default, written out because any other backend silently forces ep back to tp.
PROFILES: dict[str, dict[str, Any]] = {
    "tp8": {
        "summary": "tensor parallel over 8 GPUs: the fastest single stream",
        "tp": 8,
    },
    "pp8": {
        "summary": "pipeline of 8 GPUs, one stage each: no drafter (DFLASH wants pp 1), least traffic between GPUs",
        "pp": 8,
    },
    "ep8": {
        "summary": "8 GPUs, each with its own eighth of the experts: high throughput at high concurrency",
        "tp": 8,
        "ep": 8,
        "options": {"moe-a2a-backend": "none"},
    },
    "ep4": {
        "summary": "4 expert groups of 2 GPUs each: the highest peak measured on 8 PCIe GPUs",
        "tp": 8,
        "ep": 4,
        "options": {"moe-a2a-backend": "none"},
    },
    "single": {
        "summary": "one device: small models, and the CPU demo",
        "tp": 1,
    },
}

KEYS: tuple[str, ...] = ("summary", "tp", "pp", "ep", "dp", "options", "environment")

#: What each drafter needs on the command line besides its path; extra arguments may replace these.
#: EAGLE3's three numbers are set together: SGLang refuses some of them without the others.
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {"algorithm": "DFLASH", "options": {}},
    "eagle3": {
        "algorithm": "EAGLE3",
        "options": {"speculative-num-steps": "3", "speculative-eagle-topk": "1", "speculative-num-draft-tokens": "4"},
    },
    "none": {"algorithm": None, "options": {}},
}

#: What a kind of build adds. The limits of `cpu` keep its KV pool from taking the host's memory (15 GB without).
BUILDS: dict[str, dict[str, Any]] = {
    "cuda": {"options": {}, "environment": {}},
    "rehearsal": {"options": {}, "environment": {}},
    "cpu": {
        "options": {
            "device": "cpu",
            "attention-backend": "torch_native",
            "max-running-requests": "4",
            "max-total-tokens": "4096",
            # An idle scheduler otherwise polls with most of a core.
            "sleep-on-idle": True,
        },
        "environment": {
            "SGLANG_USE_CPU_ENGINE": "1",
            # A dead engine otherwise waits 65 s for dumps that a CPU process cannot give.
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        },
    },
}

#: Every engine gets these; the weights are on the host before it starts, so it never asks the hub.
ENVIRONMENT: dict[str, str] = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

#: Rest of the command line, replaceable by extra arguments. Probes of /health and /metrics stay out of the journal.
OPTIONS: dict[str, Any] = {
    "log-level": "info",
    "uvicorn-access-log-exclude-prefixes": ["/health", "/metrics"],
    "watchdog-timeout": "600",
}
