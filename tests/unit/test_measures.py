"""What a host says of itself: the text that Prometheus reads, and what counts as drift."""

from __future__ import annotations

import os
import stat

import pytest
from dflash_fleet import deployed, hostfacts, measures, state, supervisor, textfile
from prometheus_client import parser

UNIT = {
    "name": "sglang-main-ep8.service", "load_state": "loaded", "active_state": "active", "sub_state": "running",
    "n_restarts": 2, "invocation_id": "ab" * 16, "enabled": "enabled", "need_daemon_reload": False,
}  # fmt: skip


def read(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def facts(**change):
    return {
        "condition": "serving", "serving": True, "current": "0a1b2c3d4e5f", "units": [UNIT],
        "release": {"unit": UNIT["name"], "engine": {"name": "sglang", "version": "0.5.20", "build": "cuda"},
                    "profile": "ep8", "drafter": {"name": "dflash"}},
        "ready": {"seconds": 131.5, "smoke": {"accept_length": 3.4}}, **change,
    }  # fmt: skip


def test_what_is_said_of_an_instance():
    found = read(textfile.render(measures.families({"main": facts()}, ["/etc/x"], ("/srv", 5, 10), 1764460800.5)))
    label = ("instance_name", "main")
    assert found["dflash_fleet_instance_state", label, ("state", "serving")] == 1
    assert found["dflash_fleet_instance_state", label, ("state", "failed")] == 0
    assert sum(value for name, value in found.items() if name[0] == "dflash_fleet_instance_state") == 1
    assert found["dflash_fleet_instance_restarts_total", label] == 2
    assert found["dflash_fleet_instance_ready_seconds", label] == 131.5
    assert found["dflash_fleet_instance_gate_accept_length", label] == 3.4
    assert found["dflash_fleet_free_bytes", ("path", "/srv")] == 5
    assert found["dflash_fleet_drift_paths",] == 1
    assert found["dflash_fleet_measured_timestamp_seconds",] == 1764460800.5
    (info,) = [name for name in found if name[0] == "dflash_fleet_instance_info"]
    assert {("engine_version", "0.5.20"), ("release_id", "0a1b2c3d4e5f"), ("unit", UNIT["name"])} < set(info[1:])


def test_states_are_those_that_the_host_knows():
    """Every word of state.condition has its series, so that none is missing when it comes."""
    words = {"serving", "degraded", "starting", "restarting", "stopping", "failed", "stopped", "absent"}
    assert set(measures.CONDITIONS) == words
    assert all(f"\n    {word} " in state.condition.__doc__ for word in words)


def test_a_dead_instance_says_nothing_of_its_last_start():
    dead = facts(condition="failed", serving=False)
    found = read(textfile.render(measures.families({"a": dead}, None, ("/", 1, 2), 1)))
    names = {name[0] for name in found}
    assert "dflash_fleet_instance_ready_seconds" not in names
    assert "dflash_fleet_instance_gate_accept_length" not in names
    assert "dflash_fleet_drift_paths" not in names


def test_labels_are_escaped():
    text = textfile.render([("x", "gauge", "help", [({"a": 'q"\\\n'}, 1)])])
    assert read(text) == {("x", ("a", 'q"\\\n')): 1.0}


def test_what_counts_as_drift():
    layout = state.Layout("/data/sglang")
    changes = [
        "main", "kernel", "/var/lib/dpkg/status", "/sys/module/nvidia/version",
        "/data/sglang/models/a--b/0123",
        "/data/sglang/main/current", "/etc/systemd/system/sglang-main-ep8.service.d/x.conf",
        "/usr/local/lib/dflash-fleet/0.1.0/supervisor.py", "/etc/modprobe.d/nvidia.conf",
    ]  # fmt: skip
    assert measures.drifted(changes, layout) == changes[5:]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A root with one instance and a record of its deployment; systemd says that it runs."""
    layout = state.Layout(tmp_path / "root", tmp_path / "etc", tmp_path / "units", tmp_path / "programs")
    (layout.root / "main" / "releases").mkdir(parents=True)
    layout.host_state().mkdir()
    monkeypatch.setattr(hostfacts, "show_units", lambda names=(): ([], None))
    monkeypatch.setattr(state, "Layout", lambda root: layout)
    folder = tmp_path / "textfile"
    folder.mkdir()
    return layout, folder


def arguments(layout, folder):
    return ["--root", str(layout.root), "--textfile", str(folder)]


def test_the_file_is_whole_readable_and_of_now(host):
    layout, folder = host
    state.write_state(layout.deployed(), {"digest": "d", "instances": {}, "entries": deployed.entries(layout)})
    assert measures.main(arguments(layout, folder)) == 0
    (file,) = folder.iterdir()
    assert file.name == "dflash-fleet.prom"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    found = read(file.read_text())
    assert found["dflash_fleet_instance_state", ("instance_name", "main"), ("state", "absent")] == 1


def test_a_file_changed_by_hand_is_drift(host):
    layout, folder = host
    unit = layout.units / "sglang-main-ep8.service"
    unit.parent.mkdir()
    unit.write_text("as deployed")
    state.write_state(layout.deployed(), {"digest": "d", "instances": {}, "entries": deployed.entries(layout)})
    before = deployed.entries(layout)
    assert measures.main(arguments(layout, folder)) == 0
    calm = read((folder / measures.FILE).read_text())["dflash_fleet_drift_paths",]
    unit.write_text("as somebody likes it better")
    assert measures.main(arguments(layout, folder)) == 0
    assert str(unit) in before
    assert read((folder / measures.FILE).read_text())["dflash_fleet_drift_paths",] == calm + 1 == 1


def test_counters_of_instances_that_are_gone_go_too(host):
    layout, folder = host
    for name in ("main", "gone"):
        (folder / f"dflash-fleet-{name}.prom").write_text("")
    (folder / "apt.prom").write_text("")
    assert measures.main(arguments(layout, folder)) == 0
    assert sorted(os.listdir(folder)) == ["apt.prom", "dflash-fleet-main.prom", "dflash-fleet.prom"]


def test_a_host_that_cannot_be_read_leaves_the_old_file(host, monkeypatch, capsys):
    layout, folder = host
    (folder / measures.FILE).write_text("old")
    monkeypatch.setattr(hostfacts, "show_units", lambda names=(): ([], "no bus"))
    # As the timer's service calls it.
    assert supervisor.main(["measure", *arguments(layout, folder)]) == 1
    assert (folder / measures.FILE).read_text() == "old"
    assert "no bus" in capsys.readouterr().err
    assert os.listdir(folder) == [measures.FILE]
