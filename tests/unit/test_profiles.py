"""Requests become command lines; what cannot work is named with its variable and what to write."""

from __future__ import annotations

import re
import shlex
from typing import Any

import configurations
import pytest
from dflash_fleet import profile_checks, profile_table, profiles, release_options, releases, remedies
from hypothesis import given
from hypothesis import strategies as st

GOOD = {**configurations.BASE, "version": "0.5.20", "profile": "ep8", "drafter": "dflash"}


def options(result: dict[str, Any]) -> dict[str, Any]:
    return dict(result["options"])


def test_incident_command_line() -> None:
    assert profiles.resolve(configurations.INCIDENT)["lines"] == [
        "--model-path /models/kimi-k2.6",
        "--served-model-name kimi-k2.6",
        "--host 127.0.0.1",
        "--port 30000",
        "--tp-size 8",
        "--ep-size 8",
        "--moe-a2a-backend none",
        "--speculative-algorithm DFLASH",
        "--speculative-draft-model-path /models/drafter",
        "--speculative-num-draft-tokens 8",
        "--enable-metrics",
        "--log-level info",
        "--uvicorn-access-log-exclude-prefixes /health /metrics",
        "--watchdog-timeout 600",
    ]


def test_result_shape() -> None:
    result = profiles.resolve(GOOD)
    assert result["unit"] == "sglang-main-ep8.service"
    assert result["engine"] == {"name": "sglang", "version": "0.5.20", "build": "cuda"}
    assert result["parallel"] == {"tp": 8, "pp": 1, "ep": 8, "dp": 1, "ranks": 8}
    assert (result["gpus"], result["host"], result["port"]) == (8, "127.0.0.1", 30000)
    assert result["environment"] == {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    assert result["drafter"]["algorithm"] == "DFLASH"
    assert result["drafter"]["block_size"] == 8
    assert result["argv"][:2] == ["-m", "sglang.launch_server"]
    assert result["cuda_graph"]["effective"] == "enabled"


@pytest.mark.parametrize(
    ("profile", "sizes", "gpus"),
    [
        ("tp8", {"--tp-size": "8"}, 8),
        ("pp8", {"--tp-size": "1", "--pp-size": "8"}, 8),
        ("ep8", {"--tp-size": "8", "--ep-size": "8", "--moe-a2a-backend": "none"}, 8),
        ("ep4", {"--tp-size": "8", "--ep-size": "4", "--moe-a2a-backend": "none"}, 8),
        ("single", {"--tp-size": "1"}, 1),
    ],
)
def test_profiles(profile: str, sizes: dict[str, str], gpus: int) -> None:
    result = profiles.resolve({**GOOD, "profile": profile, "drafter": "none"})
    found = options(result)
    assert {
        flag: found.get(flag)
        for flag in ("--tp-size", "--pp-size", "--ep-size", "--dp-size", "--moe-a2a-backend")
        if flag in found
    } == sizes
    assert result["gpus"] == gpus


@pytest.mark.parametrize("version", release_options.RELEASES)
def test_every_option_is_a_full_name_of_its_release(version: str) -> None:
    for title, request in configurations.everything(version):
        problems = profiles.validate(request)
        if problems:
            assert all(name.startswith("sglang_") and name in text for name, text in problems), title
            continue
        result = profiles.resolve(request)
        flags = [flag for flag, _ in result["options"]]
        assert len(flags) == len(set(flags)), title
        for flag, value in result["options"]:
            assert releases.has_option(version, flag[2:]), (title, flag)
            assert releases.takes_value(flag[2:]) == (value is not None), (title, flag)
        if request["drafter"] == "dflash":
            assert options(result)["--speculative-num-draft-tokens"] == "8", title


def test_resolve_is_pure() -> None:
    request = {**GOOD, "environment": {"A": "1"}, "extra_args": {"page-size": 16}, "gpu_architecture": "sm_120"}
    before = repr(request)
    assert profiles.resolve(request) == profiles.resolve(request)
    assert repr(request) == before


# --- what cannot work -----------------------------------------------------------------------------------------------

BAD = [
    ({"profile": "ep88"}, "sglang_profile", "did you mean ep8?"),
    ({"profile": "tensor"}, "sglang_profile", "tp8, pp8, ep8, ep4, single, auto"),
    ({"profile": "pp8"}, "sglang_profile", "pipeline"),
    ({"profile": "mine", "profiles": {"mine": {"tp": 8, "ep": 3}}}, "sglang_profiles", "does not divide tp 8"),
    ({"profile": "mine", "profiles": {"mine": {"tp": 0}}}, "sglang_profiles", "tp: 0"),
    ({"profile": "mine", "profiles": {"mine": {"tp": True}}}, "sglang_profiles", "tp: True"),
    ({"profile": "mine", "profiles": {"mine": {"tpp": 8}}}, "sglang_profiles", "did you mean tp?"),
    ({"profile": "my-own", "profiles": {"my-own": {"tp": 8}}}, "sglang_profiles", "unit's name"),
    ({"profiles": ["tp8"]}, "sglang_profiles", "mapping"),
    ({"profile": "mine", "profiles": {"mine": {"options": {"tp-size": 4}}}}, "sglang_profiles", "sglang_profile"),
    ({"drafter": "dflsh"}, "sglang_drafter", "did you mean dflash?"),
    ({"drafter_model": "", "drafter_path": ""}, "sglang_drafter_model", "sglang_drafter: none"),
    ({"drafter_model": "a b"}, "sglang_drafter_model", "owner/name"),
    ({"drafter_revision": "main"}, "sglang_drafter_revision", "40 hexadecimal"),
    ({"model": "", "model_path": ""}, "sglang_model", "moonshotai/Kimi-K2.6"),
    ({"model": "../etc/passwd"}, "sglang_model", "owner/name"),
    ({"model_revision": "v1.0"}, "sglang_model_revision", "commit hash"),
    ({"model_revision": "A" * 40}, "sglang_model_revision", "commit hash"),
    ({"model_revision": "", "model_path": ""}, "sglang_model_revision", "is not set"),
    ({"model_path": "models/x"}, "sglang_model", "not absolute"),
    ({"port": 0}, "sglang_port", "1 to 65535"),
    ({"port": 65536}, "sglang_port", "1 to 65535"),
    ({"port": -1}, "sglang_port", "1 to 65535"),
    ({"port": "http"}, "sglang_port", "1 to 65535"),
    ({"port": True}, "sglang_port", "1 to 65535"),
    ({"port": 30000.5}, "sglang_port", "1 to 65535"),
    ({"cuda_graph": "off"}, "sglang_cuda_graph", "auto, enabled, disabled, decode_only, prefill_disabled"),
    ({"cuda_graph": "disable"}, "sglang_cuda_graph", "did you mean disabled?"),
    ({"known_issues": "no"}, "sglang_known_issues", "avoid, warn, ignore"),
    ({"build": "gpu"}, "sglang_build", "cuda"),
    ({"version": "latest"}, "sglang_version", "0.5.23"),
    ({"version": "0.5.10"}, "sglang_version", "0.5.11"),
    ({"host": "0.0.0.0"}, "sglang_host", "every interface"),
    ({"host": "::"}, "sglang_host", "every interface"),
    ({"host": "8.8.8.8"}, "sglang_host", "public"),
    ({"host": "8.8.8.8", "router": True}, "sglang_host", "public"),
    ({"host": "0.0.0.0", "router": True}, "sglang_host", "every interface"),
    ({"host": "10.0.0.5"}, "sglang_host", "sglang_behind_router"),
    ({"host": "gpu-01"}, "sglang_host", "not an IP address"),
    ({"api_key_error": "starts with a dash"}, "sglang_api_key", "dash"),
    ({"served_model_name": "kimi:k2"}, "sglang_served_model_name", "colon"),
    ({"served_model_name": "kimi k2"}, "sglang_served_model_name", "blank"),
    ({"served_model_name": "-kimi"}, "sglang_served_model_name", "dash"),
    ({"block_size": 1}, "sglang_drafter_block_size", "block_size"),
    ({"block_size": "eight"}, "sglang_drafter_block_size", "block_size"),
    ({"mem_fraction_static": 1}, "sglang_mem_fraction_static", "0.9"),
    ({"mem_fraction_static": 90}, "sglang_mem_fraction_static", "0.9"),
    ({"mem_fraction_static": "most"}, "sglang_mem_fraction_static", "0.9"),
    ({"context_length": 0}, "sglang_context_length", "131072"),
    ({"context_length": "128k"}, "sglang_context_length", "131072"),
    ({"max_running_requests": "many"}, "sglang_max_running_requests", "48"),
    ({"trust_remote_code": "maybe"}, "sglang_trust_remote_code", "neither true nor false"),
    ({"reasoning_parser": "kimi k2"}, "sglang_reasoning_parser", "one word"),
    ({"gpu_architecture": "blackwell"}, "sglang_gpu_architecture", "sm_120"),
    ({"instance": "Main"}, "sglang_instances", "a-z"),
    ({"instance": "a_b"}, "sglang_instances", "a-z"),
    ({"instance": "models"}, "sglang_instances", "models"),
    ({"extra_args": ["--x"]}, "sglang_extra_args", "mapping"),
    ({"extra_args": {"kv-cache-dtyp": "auto"}}, "sglang_extra_args", "did you mean kv-cache-dtype?"),
    ({"extra_args": {"kv_cache_dtype": "auto"}}, "sglang_extra_args", "not an option's name"),
    ({"extra_args": {"port": 1}}, "sglang_extra_args", "set sglang_port"),
    ({"extra_args": {"--disable-cuda-graph": True}}, "sglang_extra_args", "set sglang_cuda_graph"),
    ({"extra_args": {"speculative-num-draft-tokens": 4}}, "sglang_extra_args", "set sglang_drafter_block_size"),
    ({"extra_args": {"api-key": "x"}}, "sglang_extra_args", "set sglang_api_key"),
    ({"extra_args": {"admin-api-key": "x"}}, "sglang_extra_args", "process list"),
    ({"extra_args": {"config": "/x"}}, "sglang_extra_args", "supervisor"),
    ({"extra_args": {"skip-server-warmup": True}}, "sglang_extra_args", "never generated"),
    ({"extra_args": {"enable-mixed-chunk": "yes"}}, "sglang_extra_args", "switch"),
    ({"extra_args": {"page-size": True}}, "sglang_extra_args", "takes a value"),
    ({"extra_args": {"dtype": "--x"}}, "sglang_extra_args", "dash"),
    ({"extra_args": {"dtype": "a\nb"}}, "sglang_extra_args", "line break"),
    ({"extra_args": {"dtype": ""}}, "sglang_extra_args", "empty"),
    ({"extra_args": {"attn-dp-size": 2}}, "sglang_extra_args", "0.5.22 and later"),
    ({"environment": ["A=1"]}, "sglang_environment", "mapping"),
    ({"environment": {"1A": "x"}}, "sglang_environment", "variable's name"),
    ({"environment": {"A": "x\ny"}}, "sglang_environment", "one line"),
    ({"environment": {"HF_HUB_OFFLINE": "0"}}, "sglang_environment", "always 1"),
    ({"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "sglang_environment", "sglang_instances"),
    ({"gpus": [0, 1]}, "sglang_instances", "needs 8"),
    ({"gpus": [0, 0, 1, 2, 3, 4, 5, 6]}, "sglang_instances", "distinct"),
    ({"gpus": "0-7"}, "sglang_instances", "list"),
    ({"build": "cpu", "version": "0.5.23"}, "sglang_profile", "cpu build"),
    ({"build": "cpu", "version": "0.5.23", "profile": "single", "drafter": "eagle3"}, "sglang_drafter", "eagle3"),
    ({"overrides": {"sglang_nonsense": 1}}, "sglang_nonsense", "recorded fallback"),
    ({"no_such_key": 1}, "sglang_no_such_key", "no such setting"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "variable", "words"), BAD, ids=[f"{variable}-{index}" for index, (_, variable, _) in enumerate(BAD)]
)
def test_bad_values(change: dict[str, Any], variable: str, words: str) -> None:
    problems = profiles.validate({**GOOD, **change})
    assert [name for name, _ in problems] == [variable], problems
    message = problems[0][1]
    assert variable in message
    assert words in message
    with pytest.raises(profiles.ConfigError) as error:
        profiles.resolve({**GOOD, **change})
    assert (error.value.variable, error.value.message) == (variable, message)


def test_all_problems_at_once() -> None:
    problems = profiles.validate(
        {
            "profile": "ep9",
            "port": 0,
            "drafter": "dflash",
            "cuda_graph": "?",
            "host": "0.0.0.0",
            "version": "x",
            "build": "y",
        }
    )
    assert {name for name, _ in problems} == {
        "sglang_profile", "sglang_port", "sglang_drafter_model", "sglang_model", "sglang_cuda_graph", "sglang_host",
        "sglang_version", "sglang_build",
    }  # fmt: skip


NONSENSE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=9),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@pytest.mark.parametrize("key", ["gpus", "numa_nodes"])
@pytest.mark.parametrize("value", [False, 0, "", {}])
def test_empty_nonsense_is_no_list(key: str, value: Any) -> None:
    problems = profiles.validate({**GOOD, key: value})
    assert [name for name, _ in problems] == ["sglang_instances"]
    assert "is not a list" in problems[0][1]


@given(
    st.dictionaries(
        st.sampled_from(sorted(profile_checks.DEFAULTS)),
        NONSENSE,
    )
)
def test_any_nonsense_is_refused_in_words(change: dict[str, Any]) -> None:
    change.pop("errors", None)
    request = {**GOOD, **change}
    problems = profiles.validate(request)
    assert all(name.startswith("sglang_") and text for name, text in problems) or "overrides" in change
    if problems:
        with pytest.raises(profiles.ConfigError):
            profiles.resolve(request)
    else:
        assert profiles.resolve(request)["unit"].startswith("sglang-")


# --- overlays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "effective"),
    [
        (True, "enabled"),
        (False, "disabled"),
        ("true", "enabled"),
        ("False", "disabled"),
        ("decode_only", "decode_only"),
    ],
)
def test_booleans_stand_for_graphs(value: Any, effective: str) -> None:
    assert profiles.resolve({**GOOD, "cuda_graph": value})["cuda_graph"]["effective"] == effective


@pytest.mark.parametrize(
    ("host", "key", "router"),
    [
        ("127.0.0.1", False, False), ("localhost", False, False), ("::1", False, False), ("10.0.0.5", False, True),
        ("192.0.2.11", True, False), ("0.0.0.0", True, False), ("8.8.8.8", True, False), ("fd00::5", False, True),
    ],
)  # fmt: skip
def test_good_addresses(host: str, key: bool, router: bool) -> None:
    assert profiles.resolve({**GOOD, "host": host, "api_key_set": key, "router": router})["host"] == host


def test_text_from_the_command_line_is_taken() -> None:
    result = profiles.resolve(
        {
            **GOOD,
            "port": "31000",
            "trust_remote_code": "true",
            "mem_fraction_static": "0.9",
            "max_running_requests": "16",
        }
    )
    assert result["port"] == 31000
    assert options(result)["--trust-remote-code"] is None
    assert options(result)["--max-running-requests"] == "16"


def test_low_port_is_warned_about() -> None:
    assert any("below 1024" in text for text in profiles.resolve({**GOOD, "port": 80})["warnings"])


def test_yaml_no_is_no_drafter() -> None:
    assert profiles.resolve({**GOOD, "drafter": False})["drafter"]["algorithm"] is None


def test_paths_follow_from_repository_and_revision() -> None:
    result = profiles.resolve({**GOOD, "model_path": "", "drafter_path": "", "root": "/srv/sglang"})
    assert result["model"]["path"] == "/srv/sglang/models/moonshotai--Kimi-K2.6/" + "a" * 40
    assert result["drafter"]["path"] == "/srv/sglang/models/SubSir--Kimi-K2.6-DFlash-tmp-long/" + "b" * 40


def test_served_name_is_the_repository_unless_given() -> None:
    assert profiles.resolve({**GOOD, "served_model_name": ""})["served_model_name"] == "moonshotai/Kimi-K2.6"


def test_extra_arguments_replace_and_remove() -> None:
    result = profiles.resolve(
        {**GOOD, "extra_args": {"watchdog-timeout": 900, "log-level": None, "--page-size": 16, "cuda-graph-bs": [1, 2]}}
    )
    found = options(result)
    assert found["--watchdog-timeout"] == "900"
    assert "--log-level" not in found
    assert found["--cuda-graph-bs-decode"] == ["1", "2"]
    assert "--cuda-graph-bs-decode 1 2" in result["lines"]
    assert result["argv"][-5:] == ["--page-size", "16", "--cuda-graph-bs-decode", "1", "2"]


def test_mapping_becomes_json() -> None:
    result = profiles.resolve({**GOOD, "extra_args": {"model-loader-extra-config": {"num_threads": 16}}})
    assert options(result)["--model-loader-extra-config"] == '{"num_threads": 16}'
    assert '--model-loader-extra-config "{\\"num_threads\\": 16}"' in result["lines"]


def test_own_profile() -> None:
    own = {"half": {"tp": 4, "ep": 2, "options": {"moe-a2a-backend": "none"}, "environment": {"NCCL_P2P_LEVEL": "SYS"}}}
    result = profiles.resolve({**GOOD, "profile": "half", "profiles": own, "gpus": [4, 5, 6, 7]})
    assert result["unit"] == "sglang-main-half.service"
    assert result["gpus"] == 4
    assert result["environment"]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert result["environment"]["NCCL_P2P_LEVEL"] == "SYS"


def test_auto_profile() -> None:
    result = profiles.resolve({**GOOD, "version": "0.5.23", "build": "cpu", "profile": "auto"})
    assert result["profile"] == "single"
    assert any("auto is single" in text for text in result["warnings"])
    for said, expected in (("", "run playbooks/benchmark.yml"), ("hosts differ", "auto has no answer: hosts differ")):
        with pytest.raises(profiles.ConfigError, match=expected):
            profiles.resolve({**GOOD, "profile": "auto", "measured": said})


def test_cpu_build() -> None:
    result = profiles.resolve({**GOOD, "version": "0.5.23", "build": "cpu", "profile": "single"})
    found = options(result)
    assert found["--device"] == "cpu"
    assert found["--attention-backend"] == "torch_native"
    assert (found["--max-total-tokens"], found["--max-running-requests"]) == ("4096", "4")
    assert result["environment"]["SGLANG_USE_CPU_ENGINE"] == "1"
    assert result["environment"]["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"
    assert (result["gpus"], result["parallel"]["ranks"]) == (0, 1)
    assert not [flag for flag in found if "cuda-graph" in flag]


def test_cpu_build_with_two_ranks_binds_cores() -> None:
    result = profiles.resolve(
        {**GOOD, "version": "0.5.23", "build": "cpu", "profile": "two", "profiles": {"two": {"tp": 2}}}
    )
    assert result["environment"]["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_overrides_come_last_and_are_called_degraded() -> None:
    result = profiles.resolve({**configurations.INCIDENT, "overrides": {"sglang_cuda_graph": "disabled"}})
    assert result["cuda_graph"] == {"requested": "enabled", "effective": "disabled", "reason": "a recorded fallback"}
    assert result["degraded"]
    better = [choice["set"] for choice in result["choices"]]
    assert better == [{"sglang_version": "0.5.20"}, {"sglang_profile": "tp8"}]
    assert result["warnings"][0] == "degraded: sglang_cuda_graph is disabled instead of enabled, by a recorded fallback"
    assert not result["alarms"]


@pytest.mark.parametrize(
    ("overrides", "check"),
    [
        ({"sglang_profile": "tp8"}, lambda r: r["unit"] == "sglang-main-tp8.service"),
        ({"sglang_drafter": "none"}, lambda r: r["drafter"]["algorithm"] is None),
        ({"sglang_version": "0.5.20"}, lambda r: r["engine"]["version"] == "0.5.20"),
        ({"sglang_mem_fraction_static": 0.8}, lambda r: options(r)["--mem-fraction-static"] == "0.8"),
        ({"sglang_drafter_block_size": 16}, lambda r: options(r)["--speculative-num-draft-tokens"] == "16"),
        ({"sglang_environment": {"NCCL_P2P_DISABLE": "1"}}, lambda r: r["environment"]["NCCL_P2P_DISABLE"] == "1"),
        (
            {"sglang_extra_args": {"disable-custom-all-reduce": True}},
            lambda r: "--disable-custom-all-reduce" in options(r),
        ),
    ],
)
def test_any_setting_can_be_overridden(overrides: dict[str, Any], check: Any) -> None:
    result = profiles.resolve({**configurations.INCIDENT, "overrides": overrides})
    assert check(result)
    assert result["degraded"]


def right_for(remedy: remedies.Remedy, version: str) -> bool:
    release = releases.parse_version(version)
    return not (remedy.since and release < releases.parse_version(remedy.since)) and not (
        remedy.before and release >= releases.parse_version(remedy.before)
    )


TAKEN = [
    pytest.param(remedies.REMEDIES[name], version, id=f"{name}-{version}")
    for name in remedies.ids()
    for version in configurations.RELEASES
    if right_for(remedies.REMEDIES[name], version)
]


@pytest.mark.parametrize(("remedy", "version"), TAKEN)
def test_every_automatic_remedy_is_an_override(remedy: remedies.Remedy, version: str) -> None:
    """What the ladder may record can be resolved, on each release for which the remedy is right."""
    numbers = {"sglang_mem_fraction_static": 0.8, "sglang_attention_backend": "triton", "sglang_port": 30001}
    overrides = {
        name: numbers[name] if isinstance(value, str) and value.startswith("{") else value
        for name, value in remedy.set.items()
    }
    request = {**configurations.INCIDENT, "version": version, "overrides": overrides}
    assert profiles.validate(request) == []
    assert profiles.resolve(request)["overrides"] == overrides


def test_an_override_that_changes_nothing_degrades_nothing() -> None:
    assert not profiles.resolve({**configurations.INCIDENT, "overrides": {"sglang_profile": "ep8"}})["degraded"]


# --- several instances ----------------------------------------------------------------------------------------------


def two(**changes: Any) -> list[dict[str, Any]]:
    table = {"tp4": {"tp": 4}}
    first = {**GOOD, "instance": "a", "profile": "tp4", "profiles": table, "gpus": [0, 1, 2, 3], "port": 30000}
    return [first, {**first, "instance": "b", "gpus": [4, 5, 6, 7], "port": 30001, **changes}]


def test_two_instances() -> None:
    assert not profiles.overlaps(two())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"port": 30000}, "both listen on port 30000"),
        ({"port": "30000"}, "both listen on port 30000"),
        ({"gpus": [3, 4, 5, 6]}, "both use GPU 3"),
        ({"gpus": []}, "b has no gpus"),
        ({"instance": "a", "port": 30002}, "two instances are called a"),
    ],
)
def test_instances_may_not_share(changes: dict[str, Any], words: str) -> None:
    found = profiles.overlaps(two(**changes))
    assert any(words in message for _, message in found), found
    assert all(variable == "sglang_instances" for variable, _ in found)


# --- quoting for systemd --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("plain", "plain"),
        ("100%", "100%%"),
        ("$HOME", "$$HOME"),
        ("a b", '"a b"'),
        ('{"a": 1}', '"{\\"a\\": 1}"'),
        ("it's", '"it\'s"'),
        ("back\\slash", "back\\\\slash"),
        (";", '";"'),
        ("", '""'),
    ],
)
def test_systemd_word(word: str, quoted: str) -> None:
    assert profiles.systemd_word(word) == quoted


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=30))
def test_systemd_word_can_be_read_back(word: str) -> None:
    quoted = profiles.systemd_word(word)
    undone = re.sub(r"%%", "%", quoted).replace("$$", "$")
    assert shlex.split(undone) == [word]


def test_tables_hold_together() -> None:
    for name, row in profile_table.PROFILES.items():
        assert set(row) <= set(profile_table.KEYS), name
        assert row["summary"]
    for option in profile_checks.OWNED:
        assert option in release_options.OPTIONS, option


PAIR = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:20000", "profiles": {"tp16": {"tp": 16}}}


@pytest.mark.parametrize("version", configurations.RELEASES)
def test_an_engine_on_two_hosts(version: str) -> None:
    result = profiles.resolve({**configurations.BASE, **PAIR, "version": version, "profile": "tp16"})
    options = dict(result["options"])
    assert options["--nnodes"] == "2"
    assert options["--node-rank"] == "1"
    assert options["--dist-init-addr"] == "10.0.0.1:20000"
    assert (result["parallel"]["ranks"], result["gpus"]) == (16, 8)
    single = dict(profiles.resolve({**configurations.BASE, "version": version})["options"])
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(single)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nnodes": 3, "node_rank": 0, "profile": "tp8"}, "cannot share evenly"),
        ({"node_rank": 2}, "makes no sense"),
        ({"dist_init_addr": ""}, "not the address of the first host"),
        ({"extra_args": {"nnodes": 4}}, "sglang_nodes"),
    ],
)
def test_hosts_that_cannot_share_an_engine(change: dict[str, Any], words: str) -> None:
    found = profiles.validate({**configurations.BASE, **PAIR, "profile": "tp16", **change})
    assert any(words in message for _, message in found), found
