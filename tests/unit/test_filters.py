"""The filters of role sglang, and the plan as people read it."""

from __future__ import annotations

from typing import Any

import configurations
import pytest
from ansible.errors import AnsibleFilterError
from dflash_fleet import ladder, plan
from plugins import load

filters = load("filter_plugins/sglang.py")

VARIABLES: dict[str, Any] = {
    "sglang_version": "0.5.11",
    "sglang_build": "cuda",
    "sglang_profile": "ep8",
    "sglang_drafter": "dflash",
    "sglang_cuda_graph": True,
    "sglang_model": "moonshotai/Kimi-K2.6",
    "sglang_model_revision": "a" * 40,
    "sglang_drafter_model": "SubSir/Kimi-K2.6-DFlash-tmp-long",
    "sglang_drafter_revision": "b" * 40,
    "sglang_drafter_block_size": 8,
    "sglang_host": "127.0.0.1",
    "sglang_port": 30000,
    "sglang_extra_args": {"watchdog-timeout": 900},
    "sglang_environment": {"NCCL_P2P_LEVEL": "SYS"},
    "sglang_root": "/var/lib/sglang",
    "sglang_instances": [],
    "sglang_api_key": "",
}
CANARY = "canary-3f9a"


def test_scalars_describe_main() -> None:
    (request,) = filters.sglang_requests(VARIABLES)
    assert request["instance"] == "main"
    assert request["block_size"] == 8
    result = filters.sglang_resolve(request)
    assert result["unit"] == "sglang-main-ep8.service"
    assert result["cuda_graph"]["requested"] == "enabled"
    assert result["model"]["path"] == "/var/lib/sglang/models/moonshotai--Kimi-K2.6/" + "a" * 40


def test_instances_take_what_they_leave_out_from_the_scalars() -> None:
    instances = [
        {"name": "a", "profile": "tp4", "gpus": [0, 1, 2, 3], "extra_args": {"page-size": 16}},
        {
            "name": "b",
            "profile": "tp4",
            "gpus": [4, 5, 6, 7],
            "port": 30001,
            "drafter": "none",
            "drafter_block_size": 4,
        },
    ]
    requests = filters.sglang_requests(
        {**VARIABLES, "sglang_instances": instances, "sglang_profiles": {"tp4": {"tp": 4}}}
    )
    assert filters.sglang_validate(requests) == []
    first, second = filters.sglang_resolve_all(requests, {"b": {"sglang_mem_fraction_static": 0.8}})
    assert first["unit"] == "sglang-a-tp4.service"
    assert first["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "--watchdog-timeout 900" in first["lines"]
    assert "--page-size 16" in first["lines"]
    assert (second["port"], second["drafter"]["algorithm"], second["degraded"]) == (30001, None, True)
    assert not first["degraded"]


@pytest.mark.parametrize(
    ("instances", "words"),
    [
        ("a", "not a list of mappings"),
        (["a"], "not a list of mappings"),
        ([{"name": "a", "profil": "tp8"}], "did you mean profile?"),
        ([{"name": "a", "block_size": 8}], "drafter_block_size"),
        ([{"name": "a"}, {"name": "a", "port": 30001}], "two instances are called a"),
        ([{"name": "a", "gpus": [0, 1]}], "needs 8"),
    ],
)
def test_bad_instances(instances: Any, words: str) -> None:
    problems = filters.sglang_validate(filters.sglang_requests({**VARIABLES, "sglang_instances": instances}))
    assert any(words in problem for problem in problems), problems
    assert all(problem.startswith("sglang_instances") for problem in problems)


def test_further_profiles_are_requests_of_their_own() -> None:
    """With the instance's variables, but for what a mapping says; the one that runs is not listed twice."""
    wanted = {**VARIABLES, "sglang_standby_profiles": ["tp8", "ep8", {"profile": "pp8", "drafter": "none"}]}
    requests = filters.sglang_requests(wanted)
    assert filters.sglang_validate(requests) == []
    (result,) = filters.sglang_resolve_all(requests)
    assert [other["unit"] for other in result["standby"]] == ["sglang-main-tp8.service", "sglang-main-pp8.service"]
    tp8, pp8 = result["standby"]
    assert tp8["drafter"]["algorithm"] == "DFLASH"
    assert pp8["drafter"]["algorithm"] is None
    assert (tp8["port"], tp8["model"]) == (result["port"], result["model"])
    alone = filters.sglang_resolve(filters.sglang_requests(VARIABLES)[0])
    assert ladder.release_record(result, "/venv", "") == ladder.release_record(alone, "/venv", "")
    text = filters.sglang_plan({"gpu-01": {"resolved": [result], "problems": [], "asked": False}})
    assert "sglang-main-pp8.service: pp8, graphs enabled" in text


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (["pp8"], "sglang_standby_profiles: pp8: "),
        (["tp9"], "sglang_standby_profiles: tp9: "),
        (["tp8", {"profile": "tp8"}], "tp8 is listed twice"),
        ("tp8", "sglang_standby_profiles is not a list"),
        ([7], "7 names no profile"),
        ([{"drafter": "none"}], "names no profile"),
        ([{"profile": "tp8", "port": 30001}], "may have no port"),
        ([{"profile": "tp8", "name": "b"}], "may have no name"),
        ([{"profile": "tp8", "drafte": "none"}], "unknown key 'drafte'"),
    ],
)
def test_bad_further_profiles(listed: Any, words: str) -> None:
    found = filters.sglang_validate(filters.sglang_requests({**VARIABLES, "sglang_standby_profiles": listed}))
    assert any(words in text for text in found), found
    assert len(found) == len(set(found))


def test_a_further_profile_over_the_gpus_of_a_neighbour_conflicts_with_it() -> None:
    """Two TP4, and one TP8 over both in the first one's place."""
    tp4 = {"tp4": {"tp": 4}}
    instances = [
        {"name": "a", "profile": "tp4", "gpus": [0, 1, 2, 3],
         "standby_profiles": [{"profile": "tp8", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]}]},
        {"name": "b", "profile": "tp4", "gpus": [4, 5, 6, 7], "port": 30001},
    ]  # fmt: skip
    wanted = {**VARIABLES, "sglang_profiles": tp4, "sglang_instances": instances}
    requests = filters.sglang_requests(wanted)
    assert filters.sglang_validate(requests) == []
    a, b = resolved = filters.sglang_resolve_all(requests)
    (both,) = a["standby"]
    conflicts = load("filter_plugins/sglang_service.py").conflicts
    found = {one["unit"]: conflicts(one, resolved, tp4) for one in (a, b, both)}
    assert "sglang-b-tp4.service" in found["sglang-a-tp8.service"]
    assert "sglang-a-tp8.service" in found["sglang-b-tp4.service"]
    assert "sglang-b-tp4.service" not in found["sglang-a-tp4.service"]
    assert "sglang-a-tp4.service" in found["sglang-a-tp8.service"]
    assert not [unit for one, units in found.items() for unit in units if unit == one]


def test_problems_of_several_instances_say_whose_they_are() -> None:
    instances = [{"name": "a", "port": 0, "gpus": list(range(8))}, {"name": "b", "gpus": list(range(8, 16))}]
    problems = filters.sglang_validate(filters.sglang_requests({**VARIABLES, "sglang_instances": instances}))
    assert problems == ["sglang_port: 0 is not a port; write a number from 1 to 65535, e.g. 30000 (instance a)"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("-" + CANARY, "dash"),
        (CANARY + " x", "blanks"),
        (CANARY + "\n", "blanks"),
        ("é" + CANARY, "blanks"),
        (12345, "not text"),
    ],
)
def test_bad_keys_are_refused_without_showing_them(key: Any, words: str) -> None:
    requests = filters.sglang_requests({**VARIABLES, "sglang_api_key": key})
    problems = filters.sglang_validate(requests)
    assert [problem for problem in problems if problem.startswith("sglang_api_key") and words in problem]
    assert CANARY not in repr(requests)
    assert CANARY not in repr(problems)


@pytest.mark.parametrize(
    ("fallbacks", "words"),
    [
        (["disable_cuda_graphs"], "did you mean disable_cuda_graph?"),
        ("disable_cuda_graph", "list"),
        (["upgrade_sglang"], "write sglang_version: 0.5.20 yourself, which installs it before the switch"),
        (["more_gpus"], "waits for a person"),
    ],
)
def test_unknown_fallbacks(fallbacks: Any, words: str) -> None:
    problems = filters.sglang_validate(filters.sglang_requests({**VARIABLES, "sglang_fallbacks": fallbacks}))
    assert len(problems) == 1
    assert problems[0].startswith("sglang_fallbacks")
    assert words in problems[0]


def test_problem_text_names_the_variables_first() -> None:
    requests = filters.sglang_requests({**VARIABLES, "sglang_profile": "pp8", "sglang_port": 0})
    lines = filters.sglang_problem_text(filters.sglang_validate(requests)).splitlines()
    assert lines[0] == "Nothing was touched. To be corrected in the inventory: sglang_port, sglang_profile"
    assert len(lines) == 3


def test_key_never_leaves_the_filter() -> None:
    requests = filters.sglang_requests({**VARIABLES, "sglang_api_key": CANARY, "sglang_host": "192.0.2.11"})
    assert requests[0]["api_key_set"] is True
    assert CANARY not in repr(requests)
    assert CANARY not in repr(filters.sglang_resolve_all(requests))


def test_key_set_can_be_said_instead() -> None:
    assert filters.sglang_requests(VARIABLES, api_key_set=True)[0]["api_key_set"] is True


def test_resolve_refuses_in_words() -> None:
    (request,) = filters.sglang_requests({**VARIABLES, "sglang_profile": "pp8"})
    with pytest.raises(AnsibleFilterError, match="sglang_profile: a pipeline cannot run with a drafter"):
        filters.sglang_resolve(request)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (210.4, "3:30"),
        (3722, "1:02:02"),
        ("65", "1:05"),
        (None, "-"),
        ("", "-"),
        ("soon", "-"),
        (-1, "-"),
        (True, "-"),
        (float("inf"), "-"),
        (float("nan"), "-"),
    ],
)
def test_duration(seconds: Any, text: str) -> None:
    assert plan.duration(seconds) == text


def test_table() -> None:
    rows = [{"host": "gpu-01", "ok": True, "n": 3}, {"host": "gpu-100", "note": "two\nlines", "n": 12}]
    assert plan.table(rows, ["host", ["n", "number"], "ok", "note"]) == (
        "host     number  ok   note\ngpu-01        3  yes  -\ngpu-100      12  -    two lines"
    )
    assert plan.table([], ["host"]) == "host"


# --- the plan -------------------------------------------------------------------------------------------------------


def host(**changes: Any) -> dict[str, Any]:
    requests = filters.sglang_requests({**VARIABLES, **changes})
    problems = filters.sglang_validate(requests)
    return {
        "resolved": [] if problems else filters.sglang_resolve_all(requests),
        "problems": problems,
        "asked": False,
        "state": {},
    }


def test_plan_answers_the_incident() -> None:
    text = filters.sglang_plan({"gpu-01": host()})
    assert "now       not asked" in text
    assert "KNOWN TO FAIL  SGLang before 0.5.13 cannot replay CUDA graphs for DFLASH with expert parallelism" in text
    places = [
        text.index(words)
        for words in ("1. sglang_version: 0.5.20", "2. sglang_profile: tp8", "3. sglang_cuda_graph: disabled")
    ]
    assert places == sorted(places)
    assert "\n                  --ep-size 8 \\\n" in text


def test_plan_groups_equal_hosts() -> None:
    key = {"sglang_api_key": "k-1"}
    hosts = {f"gpu-{number:03d}": host(sglang_host=f"192.0.2.{number}", **key) for number in range(1, 101)}
    hosts["odd-01"] = host(sglang_profile="tp8", sglang_host="192.0.2.200", **key)
    text = filters.sglang_plan(hosts)
    assert text.count("command") == 2
    assert "gpu-001, gpu-002, ... gpu-100 (100 hosts)" in text
    assert "--host <each host's own address>" in text
    assert "--host 192.0.2.200" in text


def test_plan_shows_problems_per_host() -> None:
    text = filters.sglang_plan({"a": host(sglang_profile="pp8"), "b": host()})
    assert "cannot be deployed; nothing was touched" in text
    assert "sglang_profile: a pipeline cannot run with a drafter" in text


def state(condition: str = "serving", **overrides: Any) -> dict[str, Any]:
    """What sglang_state says of a host that serves VARIABLES, by a recorded fallback where there are overrides."""
    (request,) = filters.sglang_requests(VARIABLES)
    result = filters.sglang_resolve(request, overrides)
    rung = {
        "key": ladder.key_of(request, "580.105.08"),
        "remedy": "disable_cuda_graph",
        "set": overrides,
        "cause": "cuda_graph_replay_failure",
    }
    return {
        "main": {
            "condition": condition,
            "release": ladder.release_record(result, "/var/lib/sglang/venvs/0123456789abcdef", ""),
            "unit": result["unit"],
            "ready": {"seconds": 210.4},
            "rungs": [rung] if overrides else [],
        }
    }


DEGRADED = {"sglang_cuda_graph": "disabled"}


def test_plan_says_what_changes_and_how_long_it_took() -> None:
    facts = {
        "sglang_version": "0.5.20",
        "sglang_profile": "tp8",
        "sglang_plan_state": {"state": {"instances": state("degraded", **DEGRADED)}},
    }
    text = filters.sglang_plan(filters.sglang_plan_hosts(["gpu-01"], {"gpu-01": facts}, VARIABLES))
    assert "now       sglang-main-ep8.service, SGLang 0.5.11, degraded" in text
    assert "release: 0.5.11 -> 0.5.20" in text
    assert "profile: ep8 -> tp8" in text
    assert "CUDA graphs: disabled -> enabled" in text
    assert "a restart follows (the last good start took 3:30)" in text
    assert "recorded fallback disable_cuda_graph (sglang_cuda_graph: disabled) for cuda_graph_replay_failure" in text


def test_plan_of_a_host_where_someone_started_another_profile() -> None:
    """The inventory's release is current, and a deployment restarts all the same."""
    found = state()
    other = filters.sglang_resolve({**filters.sglang_requests(VARIABLES)[0], "profile": "tp8"})
    record = ladder.release_record(other, "/var/lib/sglang/venvs/0123456789abcdef", "")
    found["main"].update(unit=other["unit"], by_hand={"unit": other["unit"], "release_id": "r0", "release": record})
    facts = {"sglang_plan_state": {"state": {"instances": found}}}
    text = filters.sglang_plan(filters.sglang_plan_hosts(["gpu-01"], {"gpu-01": facts}, VARIABLES))
    assert "now       sglang-main-tp8.service, SGLang 0.5.11, serving, started by hand" in text
    assert "profile: tp8 -> ep8" in text
    assert "a restart follows" in text


@pytest.mark.parametrize(("fallbacks", "changes"), [(["disable_cuda_graph"], False), ([], True)])
def test_plan_begins_with_the_recorded_rung_that_the_inventory_still_lists(fallbacks: list[str], changes: bool) -> None:
    facts = {
        "sglang_plan_state": {"state": {"instances": state("degraded", **DEGRADED)}},
        "sglang_fallbacks": fallbacks,
    }
    text = filters.sglang_plan(filters.sglang_plan_hosts(["a"], {"a": facts}, {**VARIABLES, "sglang_fallbacks": []}))
    assert ("a restart follows" in text) is changes
    assert ("--disable-cuda-graph" in text) is not changes
    assert ("warning   degraded: sglang_cuda_graph is disabled instead of enabled" in text) is not changes


def test_plan_of_an_unchanged_and_of_a_fresh_host() -> None:
    assert "none in release, profile" in filters.sglang_plan({"a": {**host(), "asked": True, "state": state()}})
    assert "first deployment" in filters.sglang_plan({"a": {**host(), "asked": True, "state": {}}})


def test_plan_hosts_take_defaults_and_facts() -> None:
    facts = {
        "a": {"sglang_profile": "pp8", "unrelated": 1, "sglang_plan_state": {"state": {"instances": {"main": {}}}}},
        "b": {"sglang_port": 30001},
    }
    found = filters.sglang_plan_hosts(["a", "b"], facts, VARIABLES)
    assert filters.sglang_plan_problems(found) == ["a"]
    assert (found["a"]["asked"], found["a"]["state"]) == (True, {"main": {}})
    assert found["b"]["asked"] is False
    assert found["b"]["resolved"][0]["port"] == 30001


@pytest.mark.parametrize(
    ("answer", "now"),
    [
        ({"unreachable": True, "msg": "Failed to connect"}, "not asked (does not answer)"),
        ({"failed": True, "msg": "may not be\nread"}, "not asked (may not be read)"),
        ({"skipped": True, "msg": "Conditional"}, "not asked"),
    ],
)
def test_plan_of_a_host_that_said_nothing(answer: dict[str, Any], now: str) -> None:
    text = filters.sglang_plan(filters.sglang_plan_hosts(["a"], {"a": {"sglang_plan_state": answer}}, VARIABLES))
    assert f"now       {now}\n" in text
    assert "--ep-size 8" in text


def test_a_host_finds_its_place_among_the_nodes_of_an_engine() -> None:
    hosts = {"a": {"ansible_host": "10.0.0.1"}, "b": {}, "c": {"ansible_host": "fd00::1"}}
    assert filters.sglang_place(["a", "b"], "b", hosts, 20000) == {
        "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:20000",
    }  # fmt: skip
    assert filters.sglang_place(["c", "a"], "c", hosts, 1)["dist_init_addr"] == "[fd00::1]:1"
    assert filters.sglang_place([], "a", hosts, 1) == {}
    # A host that is not among them, or one named twice, is refused by the check that follows.
    for nodes in (["a"], ["a", "b", "b"]):
        place = filters.sglang_place(nodes, "b", hosts, 1)
        problems = filters.sglang_validate(filters.sglang_requests(VARIABLES, place=place))
        assert any("makes no sense" in problem for problem in problems)


def test_changes_name_both_values() -> None:
    (result,) = filters.sglang_resolve_all(filters.sglang_requests(VARIABLES))
    assert plan.changes(result, {**result, "port": 30001}) == ["port: 30001 -> 30000"]


def test_filters_are_all_registered() -> None:
    assert {name for name in vars(filters) if name.startswith("sglang_")} == set(filters.FilterModule().filters())


def test_golden_base_is_the_incident() -> None:
    """The example request of the other tests is the one the filters build."""
    (request,) = filters.sglang_requests(VARIABLES)
    assert {key: request[key] for key in ("profile", "drafter", "version")} == {
        key: configurations.INCIDENT[key] for key in ("profile", "drafter", "version")
    }


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(
            {"facts": {"gpus": {"list": [{"memory_total_bytes": 96 * 10**9}] * 8}}}, "GPUs of 96 GB", id="told"
        ),
        pytest.param({"facts": {"gpus": {"list": []}}}, "memory of the GPUs: not asked", id="none found"),
        pytest.param({"skipped": True}, "memory of the GPUs: not asked", id="not asked"),
        pytest.param({"unreachable": True, "msg": "no route"}, "memory of the GPUs: not asked", id="no answer"),
    ],
)
def test_plan_compares_with_the_memory_of_the_hosts_gpus(answer: dict[str, Any], said: str) -> None:
    facts = {"sglang_plan_state": {"state": {"instances": {}}}, "sglang_plan_gpus": answer}
    assert said in filters.sglang_plan(filters.sglang_plan_hosts(["a"], {"a": facts}, VARIABLES))
