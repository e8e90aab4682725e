"""The cause table is sound, and users can add to it."""

# ruff: noqa: E501  (patterns are read in one piece)
from __future__ import annotations

import re

import pytest
from dflash_fleet import causes
from growth import is_linear

VOCABULARY = """cuda_graph_capture_failed, cuda_graph_capture_oom, cuda_graph_custom_allreduce, cuda_graph_replay_failure,
cuda_illegal_memory_access, cuda_device_side_assert, cuda_init_failed, cuda_home_invalid, cuda_toolkit_missing,
cuda_toolkit_too_old, driver_too_old, driver_library_mismatch, unsupported_gpu_architecture, gpu_xid_hardware,
gpu_xid_application_fault, gpu_fallen_off_bus, gpu_oom, gpu_oom_weights, gpu_memory_busy, kv_pool_too_small,
host_oom_killer, host_memory_limit, hicache_host_memory, unified_memory_exhausted, disk_full, nccl_collective_timeout,
nccl_error, nccl_shm_too_small, native_segfault, native_segfault_nccl, native_abort, jit_compile_failed, triton_ptxas_mismatch,
missing_system_library, package_mismatch, speculative_worker_bug, speculative_unsupported_model,
speculative_version_mismatch, speculative_missing_draft_path, speculative_disaggregation_unsupported,
speculative_grammar_incompatible, drafter_mismatch, weights_corrupt, missing_model_file, trust_remote_code_required, hf_auth_gated,
hf_not_found, network_transfer_failed, unknown_argument, unsupported_flag_combination, port_in_use, permission_denied,
executable_missing, scheduler_watchdog_timeout, scheduler_hang, running_but_dead, health_check_false_negative,
health_probe_overload, warmup_failed_proxy, start_timeout, engine_core_failed, none, unknown"""


def test_vocabulary_is_fixed() -> None:
    assert set(causes.CAUSES) == {name.strip() for name in VOCABULARY.replace("\n", " ").split(",")}


def test_rows_name_known_causes_once_and_compile() -> None:
    rows = causes.all_rows()
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert row.cause in causes.CAUSES
        assert row.why
        assert row.pattern or row.type or row.frames or row.raised_in
        for pattern in (row.pattern, row.type, row.frames, row.raised_in, row.unless, row.unless_frames):
            re.compile(pattern)


def test_xids_have_one_kind() -> None:
    assert causes.xid_kind(79) == "fallen_off"
    for code in (48, 63, 64, 94, 95, 119, 120):
        assert causes.xid_kind(code) == "hardware"
    for code in (13, 31, 43):
        assert causes.xid_kind(code) == "application"
    assert causes.xid_kind(45) == "cleanup"
    assert causes.xid_kind(9999) == "other"


@pytest.mark.parametrize(
    "words", ["a", "nvcc ", "cc'", " :/", "ninja/x'", "/dev/shm", "common_ops", "graph_runner", "DFLASH "]
)
def test_patterns_take_linear_time(words: str) -> None:
    def search(size: int) -> None:
        text = words * (size // len(words))
        for row in causes.all_rows():
            for pattern in (row.pattern, row.frames, row.unless):
                if pattern:
                    causes.search(pattern, text)

    assert is_linear(search, 5000, times=16)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "x"}, "needs a cause"),
        ({"id": "x", "cause": "y"}, "needs a cause and one of"),
        ({"id": "x", "cause": "y", "pattern": "("}, "not a regular expression"),
        ({"id": "x", "cause": "y", "pattern": "z", "colour": "red"}, "unknown key colour"),
        ({"id": "x", "cause": "y", "pattern": "z", "scope": "moon"}, "scope must be"),
    ],
)
def test_bad_user_rows_are_named(row: dict[str, str], message: str) -> None:
    with pytest.raises(causes.CauseError, match=message):
        causes.user_rows([row])


def test_user_row() -> None:
    row = causes.user_rows([{"id": "x", "cause": "y", "pattern": "z", "phases": ["serving"]}])[0]
    assert (row.id, row.cause, row.pattern, row.phases, row.scope) == ("x", "y", "z", ("serving",), "exception")


def test_documentation_is_written_from_the_tables() -> None:
    from pathlib import Path

    page = Path(__file__).resolve().parents[2] / "docs" / "causes.md"
    assert page.read_text() == causes.document(), "run: PYTHONPATH=module_utils python -m dflash_fleet.causes > docs/causes.md"
