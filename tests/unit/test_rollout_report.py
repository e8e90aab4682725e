"""What a rollout's report makes of its events, and how they come from what Ansible says."""

from __future__ import annotations

import html.parser
import json
from typing import Any

import plugins
import pytest
from dflash_fleet import rollout_record, rollout_report

summary = plugins.load("callback_plugins/sglang_summary.py")

RELEASE = {"profile": "ep8", "engine": {"name": "sglang", "version": "0.5.20"}, "drafter": {"name": "dflash"}}
READY = {"outcome": "ready", "seconds": 131.0, "unit": "sglang-main-ep8.service", "phases": [], "crash": None,
         "smoke": {"accept_length": 3.4, "tokens_per_second": 80.0}}  # fmt: skip
CRASHED = {**READY, "outcome": "crashed", "phase": "warmup", "seconds": 12.0, "smoke": None,
           "crash": {"cause": "gpu_oom", "summary": "out of memory\nmore"}}  # fmt: skip


class Run:
    """One run of Ansible with a clock that a test moves."""

    def __init__(self, folder, hosts=("a", "b", "c"), batches=(1, 2), identity="r1", continues=(), wall=1000.0):
        self.seconds = 5.0
        self.recorder = rollout_record.Recorder(clock=lambda: self.seconds, wall=lambda: wall)
        self.recorder.playbook = "deploy-dflash.yml"
        for host in hosts:
            self.task(host, "sglang_state", result={"state": {"instances": {
                "main": {"current": "old", "condition": "serving", "release": RELEASE}}}})  # fmt: skip
        plan = {"id": identity, "folder": str(folder / identity), "hosts": list(hosts), "batches": list(batches),
                "continues": list(continues), "user": "anna", "controller": "ctl"}  # fmt: skip
        self.facts(hosts[0], sglang_rollout=plan)

    def task(self, host, action, role="", name="t", result: Any = None, took=0.0) -> None:
        self.recorder.task_begins(host, action, role, name)
        self.seconds += took
        self.recorder.task_ends(host, action, result or {})

    def facts(self, host: str, **facts: Any) -> None:
        self.task(host, "ansible.builtin.set_fact", result={"ansible_facts": facts})

    def turn(self, host: str, *gates: dict[str, Any]) -> None:
        self.task(host, "gpu_facts", "gpu_host", took=2)
        self.task(host, "sglang_release", "sglang_service", took=1,
                  result={"id": "new", "previous": "old", "release": RELEASE, "invocation_id": "1"})  # fmt: skip
        for gate in gates:
            self.task(host, "sglang_wait", "sglang_service", took=gate["seconds"], result=gate)

    def end(self, **lines: dict[str, Any]) -> dict[str, Any]:
        self.recorder.ends(lines, lambda hosts: "ansible-playbook x -l " + ",".join(hosts))
        self.recorder.flush()
        return self.recorder.report()


def line(word: str) -> dict[str, Any]:
    return {"main": {"state": word, "engine": "sglang 0.5.20", "profile": "ep8", "note": ""}}


def by_host(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {host["host"]: host for host in report["hosts"]}


def whole(tmp_path) -> Run:
    run = Run(tmp_path)
    run.recorder.turn_begins()
    run.turn("a", READY)
    run.facts("a", sglang_had_turn=True)
    return run


def test_a_whole_rollout(tmp_path):
    run = whole(tmp_path)
    run.recorder.turn_begins()
    for host in ("b", "c"):
        run.turn(host, READY)
        run.facts(host, sglang_had_turn=True)
    report = run.end(a=line("serving"), b=line("serving"), c=line("serving"))
    assert report["outcome"] == "done"
    assert report["counts"] == {"done": 3}
    assert report["rerun"] is None
    assert (report["rollout"], report["user"], report["controller"]) == ("r1", "anna", "ctl")
    first = by_host(report)["a"]
    assert [(bar["phase"], bar["begin"], bar["end"]) for bar in first["bars"]] == [
        ("host", 0, 2), ("switch", 2, 3), ("load", 3, 134),
    ]  # fmt: skip
    assert first["seconds"] == 134
    assert first["instances"]["main"]["before"]["release"] == "old"
    assert first["instances"]["main"]["after"] == {
        "release": "new", "engine": "sglang 0.5.20", "profile": "ep8+dflash",
    }  # fmt: skip
    assert [(batch["number"], batch["of"], batch["hosts"]) for batch in report["batches"]] == [
        (1, 2, ["a"]), (2, 2, ["b", "c"]),
    ]  # fmt: skip
    assert by_host(report)["c"]["batch"] == 2


def test_a_failure_a_fallback_and_who_waits(tmp_path):
    run = Run(tmp_path, batches=(2, 1))
    run.recorder.turn_begins()
    run.turn("a", CRASHED, READY)
    run.facts("a", __sglang_service_attempts=[{"overrides": {"sglang_cuda_graph": "disabled"}}])
    run.facts("a", sglang_had_turn=True)
    run.turn("b", CRASHED)
    run.task("b", "sglang_release", "sglang_service", "return | Switch to the release", took=9)
    run.facts("b", sglang_failure={"task": "give_up | End this host", "message": ["b: died", "and more"]})
    run.facts("b", sglang_had_turn=True)
    assert run.recorder.turn_begins() == 0, "no batch begins after a failure"
    report = run.end(a=line("degraded"), b=line("rolled back"), c=line("waiting"))
    hosts = by_host(report)
    assert {name: host["outcome"] for name, host in hosts.items()} == {
        "a": "degraded", "b": "rolled back", "c": "waiting",
    }  # fmt: skip
    assert report["outcome"] == "failed"
    assert hosts["a"]["fallback"] == "sglang_cuda_graph: disabled"
    assert hosts["a"]["causes"] == hosts["b"]["causes"] == ["gpu_oom"]
    assert hosts["b"]["failure"]["message"] == "b: died"
    assert hosts["b"]["bars"][-1]["phase"] == "return"
    assert report["rerun"] == "ansible-playbook x -l b,c"
    assert len(report["batches"]) == 1
    text = rollout_report.markdown(report)
    assert "crashed in warmup after 0:12: gpu\\_oom; ready after 2:11 (sglang\\_cuda\\_graph: disabled)" in text
    assert "    ansible-playbook x -l b,c" in text


def test_a_host_that_is_away_is_named_with_its_address(tmp_path):
    run = Run(tmp_path, batches=(3,))
    run.recorder.turn_begins()
    run.task("a", "gpu_facts", "gpu_host", took=1)
    run.recorder.unreachable("a", "192.0.2.7", "no route\nmore")
    for host in "bc":
        run.turn(host, READY)
        run.facts(host, sglang_had_turn=True)
    report = run.end(b=line("serving"), c=line("serving"))
    found = by_host(report)["a"]
    assert found["outcome"] == "unreachable"
    assert found["unreachable"] == {"address": "192.0.2.7", "message": "no route"}
    assert report["rerun"].endswith("-l a")
    assert found["bars"] == [{"phase": "host", "begin": 0, "end": 1, "cut": False}]


def test_a_killed_rollout_is_told_by_the_one_that_continues_it(tmp_path):
    killed = whole(tmp_path)
    killed.recorder.turn_begins()
    killed.task("b", "sglang_wait", "sglang_service", took=7)
    killed.recorder.flush()  # and no more
    alone = rollout_report.build(rollout_record.read(tmp_path / "r1"))
    assert (alone["outcome"], alone["ended_at"]) == ("running", None)
    assert alone["counts"] == {"at work": 1, "waiting": 1, "done": 1}

    with (tmp_path / "r1" / rollout_record.EVENTS).open("a") as stream:
        stream.write('{"schema": 1, "event": "enter", "ho')  # the write that the kill cut off
    rerun = Run(tmp_path, identity="r2", continues=["r1"], wall=1500.0)
    assert rerun.recorder.end_earlier() == [tmp_path / "r1"]
    assert rerun.recorder.end_earlier() == [], "once"
    old = rollout_report.build(rollout_record.read(tmp_path / "r1"))
    assert (old["outcome"], old["continued_by"]) == ("interrupted", "r2")
    assert by_host(old)["b"]["outcome"] == "cut short"
    assert by_host(old)["b"]["bars"][-1]["cut"]

    rerun.recorder.turn_begins()
    rerun.facts("a", sglang_had_turn=True)
    for host in "bc":
        rerun.turn(host, READY)
        rerun.facts(host, sglang_had_turn=True)
    report = rerun.end(a=line("serving"), b=line("serving"), c=line("serving"))
    assert report["outcome"] == "done"
    assert [run["rollout"] for run in report["runs"]] == ["r1", "r2"]
    assert [run["outcome"] for run in report["runs"]] == ["interrupted", "ended"]
    bars = by_host(report)["b"]["bars"]
    assert bars[0]["cut"]
    assert not bars[-1]["cut"]
    assert bars[1]["begin"] >= 500 > bars[0]["end"]
    assert "continues r1" in rollout_report.markdown(report)


def test_a_host_that_failed_before_its_turn_is_not_called_waiting(tmp_path):
    run = Run(tmp_path, hosts=("a",), batches=(1,))
    run.task("b", "sglang_state", result={"state": {"instances": {}}})
    run.recorder.turn_begins()
    run.turn("a", READY)
    run.facts("a", sglang_had_turn=True)
    run.recorder.ends({"a": line("serving")}, "-l ".join, {"b": "failed: sglang_profile is no profile"})
    found = by_host(run.recorder.report())["b"]
    assert found["outcome"] == "failed"
    assert found["failure"]["message"] == "failed: sglang_profile is no profile"


def test_waiting_for_others_is_not_work(tmp_path):
    run = Run(tmp_path, batches=(3,))
    run.recorder.turn_begins()
    for host in "abc":
        run.recorder.task_begins(host, "sglang_wait", "sglang_service", "t")
    for host in "abc":
        run.seconds += 10
        run.recorder.task_ends(host, "sglang_wait", READY)
    for host in "abc":
        run.task(host, "sglang_release", "sglang_service", took=1)
    bars = {name: host["bars"][0] for name, host in by_host(run.end()).items()}
    assert {name: bar["end"] - bar["begin"] for name, bar in bars.items()} == {"a": 10, "b": 20, "c": 30}


def test_what_did_not_last_its_soak_is_rolled_back(tmp_path):
    run = Run(tmp_path)
    run.recorder.turn_begins()
    run.turn("a", READY)
    run.task("a", "ansible.builtin.pause", "", "soak | Let the first batch serve for a while", took=15)
    run.task("a", "sglang_wait", "sglang_service", "return | Wait until it serves", READY, took=9)
    run.facts("a", sglang_failure={"task": "return_failed | End this host", "message": "a: main crashed"})
    run.facts("a", sglang_had_turn=True)
    found = by_host(run.end(a=line("serving"), b=line("waiting"), c=line("waiting")))["a"]
    assert found["outcome"] == "rolled back"
    assert [bar["phase"] for bar in found["bars"]] == ["host", "switch", "load", "soak", "return"]


def test_a_forecast_is_no_switch(tmp_path):
    run = Run(tmp_path)
    run.recorder.turn_begins()
    run.task("a", "sglang_release", "sglang_service", result={"id": "new", "previous": "old", "release": RELEASE})
    assert by_host(run.end())["a"]["instances"]["main"]["after"] is None


def test_a_phase_of_skipped_tasks_is_no_bar(tmp_path):
    run = whole(tmp_path)
    run.recorder.task_begins("a", "ansible.builtin.pause", "", "soak | Let the first batch serve for a while")
    run.task("a", "sglang_release", "sglang_service", took=1)
    assert [bar["phase"] for bar in by_host(run.end())["a"]["bars"]] == ["host", "switch", "load", "switch"]


def test_a_clock_that_was_set_back_turns_no_bar_around(tmp_path):
    killed = whole(tmp_path)
    killed.recorder.flush()
    rerun = Run(tmp_path, identity="r2", continues=["r1"], wall=10.0)
    rerun.recorder.turn_begins()
    rerun.turn("b", READY)
    report = rerun.end()
    for host in report["hosts"]:
        for bar in host["bars"]:
            assert 0 <= bar["begin"] <= bar["end"] <= report["seconds"]


def test_the_wall_clock_may_jump_while_it_runs(tmp_path):
    walls = iter([1000.0, 9e9])
    run = Run(tmp_path)
    run.recorder = rollout_record.Recorder(clock=lambda: run.seconds, wall=lambda: next(walls))
    first = run.recorder._now()
    run.seconds += 3
    assert rollout_report.moment(run.recorder._now()) - rollout_report.moment(first) == 3


HOSTILE = '</title><script>alert(1)</script><img src=x onerror=alert(2)>|`*[x](javascript:y)"\'&amp;'


class Tags(html.parser.HTMLParser):
    """Every element and attribute of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.found += [tag, *(name for name, _ in attrs)]

    def handle_data(self, data):
        self.text += data


def test_hostile_words_stay_words(tmp_path):
    run = Run(tmp_path, hosts=(HOSTILE, "b"), batches=(2,), identity="r1")
    run.recorder.plan["hosts"][0] = HOSTILE
    run.recorder.turn_begins()
    run.turn(HOSTILE, {**CRASHED, "crash": {"cause": HOSTILE, "summary": HOSTILE}})
    run.facts(HOSTILE, sglang_failure={"task": HOSTILE, "message": HOSTILE})
    run.recorder.unreachable("b", HOSTILE, HOSTILE)
    report = {**run.end(b={"main": {"state": HOSTILE, "note": HOSTILE}}), "rerun": HOSTILE, "user": HOSTILE,
              "rollout": HOSTILE, "outcome": HOSTILE}  # fmt: skip
    page = Tags()
    page.feed(summary.render(report))
    assert not {"script", "img", "onerror", "a", "href"} & set(page.found)
    assert page.text.count(HOSTILE) >= 8, "and are shown"
    table = rollout_report.markdown(report).split("\n\n    ")[0]
    assert "<script" not in table.replace("\\<", "")
    rows = [row for row in table.splitlines() if row.startswith("|")]
    bars = {row.replace("\\|", "").count("|") for row in rows if "batch" not in row and " of " not in row}
    assert bars <= {len(rollout_report.COLUMNS) + 1, 4}


def test_the_page_needs_no_other_and_shows_every_bar(tmp_path):
    run = whole(tmp_path)
    report = run.end(a=line("serving"))
    text = summary.render(report)
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("<rect") == 3
    assert "a: load and gate, 131.0 s" in text
    picture = rollout_report.picture(report)
    assert all(bar["x"] + bar["width"] <= picture["width"] for bar in picture["bars"])
    assert len(picture["ticks"]) <= 11


def test_all_three_forms_are_written(tmp_path):
    run = whole(tmp_path)
    run.recorder.flush()
    summary.write(run.recorder.folder, run.recorder.report())
    assert sorted(path.name for path in run.recorder.folder.iterdir()) == [
        "events.jsonl", "rollout.html", "rollout.json", "rollout.md",
    ]  # fmt: skip
    document = json.loads((run.recorder.folder / "rollout.json").read_text())
    assert document["schema"] == 1
    assert document["outcome"] == "running"


def test_a_run_that_is_no_rollout_leaves_nothing(tmp_path):
    recorder = rollout_record.Recorder()
    recorder.task_begins("a", "sglang_state", "", "x")
    recorder.task_ends("a", "sglang_state", {"state": {"instances": {}}})
    recorder.ends({}, str)
    recorder.flush()
    assert recorder.folder is None
    assert recorder.turn_begins() == 0


@pytest.mark.parametrize(
    ("action", "role", "task", "phase"),
    [
        ("sglang_wait", "sglang_service", "sglang_service : start | Wait until it serves", "load"),
        ("sglang_wait", "sglang_service", "sglang_service : return | Wait until it serves", "return"),
        ("ansible.builtin.pause", "", "soak | Let the first batch serve for a while", "soak"),
        ("systemd_service", "sglang_service", "sglang_service : give_up | Stop what cannot serve", "return"),
        ("sglang_state", "sglang_service", "sglang_service : join_instance | Ask", "join"),
        ("sglang_metrics", "", "soak_look | Look", "soak"),
        ("ansible.builtin.debug", "", "begin | Say who takes a turn when", None),
        ("hf_snapshot", "model_weights", "model_weights : fetch | Fetch", "weights"),
    ],
)
def test_phases(action, role, task, phase):
    assert rollout_report.phase_of(action, role, task) == phase
