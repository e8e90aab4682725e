"""What goes wrong, and what a person is told: bad input, a taken port, a killed rank, a host that is away.

Each test runs the advertised command against the scenario's two hosts. Those that need a certain host name it.
"""

from __future__ import annotations

import json
import re
import time

import controller
import engine
import pytest

UNIT = "sglang-main-ep8.service"
FIRST, SECOND = "rehearsal-01", "rehearsal-02"


def host(name):
    return controller.scenario_host(__file__, name)


def rehearse(failures, pace=0.05):
    """Set what the hosts' rehearsal engines do from now on."""
    config = {"rehearsal_config": {"pace": pace, "failures": failures}}
    controller.play(__file__, "rehearsal/prepare.yml", "-e", json.dumps(config))


def recap(output, name):
    """The counts of a host in Ansible's recap."""
    line = re.search(rf"^{name}\s+: (.*)$", output, re.M)
    assert line, output
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line[1])}


BAD_INPUT = [
    pytest.param("sglang_profile", ["-e", "sglang_profile=tp9"], id="unknown profile"),
    pytest.param("sglang_profile", ["-e", "sglang_profile=pp8"], id="pipeline with a drafter"),
    pytest.param("sglang_drafter_model", ["-e", "sglang_drafter_model="], id="no drafter named"),
    pytest.param("sglang_port", ["-e", "sglang_port=70000"], id="port out of range"),
    pytest.param("sglang_model_revision", ["-e", "sglang_model_revision=main"], id="a branch is no revision"),
    pytest.param("sglang_cuda_graph", ["-e", "sglang_cuda_graph=on-ish"], id="unknown word for graphs"),
    pytest.param("sglang_host", ["-e", "sglang_host=0.0.0.0"], id="open to everyone without a key"),
    pytest.param("gpu_host_min_free_gb", ["-e", "gpu_host_min_free_gb=1000000"], id="not enough disk"),
]


@pytest.mark.parametrize(("variable", "arguments"), BAD_INPUT)
def test_bad_input_stops_before_anything_is_touched(variable, arguments):
    before = engine.show(host(FIRST), UNIT, "InvocationID")
    output = controller.deploy(__file__, *arguments, rc=2)
    assert variable in output
    for name in (FIRST, SECOND):
        counts = recap(output, name)
        assert counts["changed"] == 0, output
        assert counts["failed"] == 1, output
    assert engine.show(host(FIRST), UNIT, "InvocationID") == before


def test_a_port_of_another_process_is_named():
    on = host(FIRST)
    engine.sudo(on, "systemd-run --unit=other-server --collect python3 -m http.server 30777 --bind 127.0.0.1")
    time.sleep(1)
    try:
        output = controller.deploy(__file__, "-l", FIRST, "-e", "sglang_port=30777", rc=2)
    finally:
        engine.sudo(on, "systemctl stop other-server")
    assert "sglang_port" in output
    assert "30777" in output
    assert "python3" in output
    assert recap(output, FIRST)["changed"] == 0


def wait_for_log(on, text, before, seconds=120):
    """Wait until the start after the invocation `before` has printed something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        invocation = engine.show(on, UNIT, "InvocationID")
        if invocation != before:
            lines = on.run(f"journalctl --no-pager -o cat _SYSTEMD_INVOCATION_ID={invocation}")
            if text in lines.stdout:
                return
        time.sleep(0.2)
    raise AssertionError(f"{text!r} was not printed within {seconds} s")


@pytest.mark.parametrize(
    ("moment", "line", "release"),
    [("loading", "Load weight begin", "0.5.20"), ("settling", "fired up and ready to roll", "0.5.23")],
)
def test_a_killed_rank_ends_the_play_for_its_host_alone(moment, line, release):
    on, other = host(FIRST), host(SECOND)
    rehearse([], pace=0.15)
    before = engine.show(on, UNIT, "InvocationID")
    wanted = ("-e", f"sglang_version={release}", "-e", "sglang_wait_settle=20")
    run = controller.start(__file__, "deploy-dflash.yml", *wanted)
    try:
        wait_for_log(on, line, before)
        rank = engine.sudo(on, "pgrep -f '^sglang::scheduler_TP3'").strip()
        engine.sudo(on, f"kill -9 {rank}")
        killed = time.monotonic()
    finally:
        # Whatever happens here, the next test must not find this play still at work.
        output, _ = run.communicate(timeout=400)
    assert run.returncode == 2, output
    first, second = recap(output, FIRST), recap(output, SECOND)
    assert first["failed"] == 1, output
    assert second["failed"] == 0, output
    # The other host went on to the end, on the new release.
    assert engine.release(other)["engine"]["version"] == release
    assert other.service(UNIT).is_running
    # The diagnosis: who was killed, and that it was no exception of the engine.
    assert re.search(r"TP3|scheduler_3|Rank 3|rank 3", output), output
    assert "SIGKILL" in output or "9/KILL" in output or "-9" in output
    # Its own last good release serves again; a first deployment would have left it stopped.
    assert time.monotonic() - killed < 120
    assert "rolled back" in output
    assert on.service(UNIT).is_running
    assert engine.release(on)["engine"]["version"] == "0.5.11"


def test_a_last_good_release_that_does_not_come_back_is_told():
    """Neither release loads any more; the host ends down, and a person learns of both."""
    on = host(FIRST)
    good = engine.state(on, "last_good.json")["release_id"]
    rehearse([{"kind": "weights_corrupt"}])
    try:
        output = controller.deploy(__file__, "-e", "sglang_version=0.5.20", "-l", FIRST, rc=2)
    finally:
        rehearse([])
    assert "its last good release did not come back:" in output
    assert output.count("SafetensorError") >= 2
    (row,) = re.findall(rf"^{FIRST} +main +sglang 0.5.20.* failed .*$", output, re.M)
    assert "crashed in weights: " in row
    assert "; its last good release did not come back: crashed in weights: " in row
    starts = engine.sudo(on, "cat /var/lib/sglang/main/state/starts.jsonl").splitlines()
    assert [json.loads(line)["outcome"] for line in starts[-2:]] == ["crashed", "crashed"]
    assert json.loads(starts[-1])["release_id"] == good == engine.state(on, "last_good.json")["release_id"]
    assert not on.service(UNIT).is_running

    controller.deploy(__file__)
    assert on.service(UNIT).is_running


def test_an_unreachable_host_is_reported_and_the_others_go_on():
    controller.fleet(__file__, "exec", SECOND, "--", "ip", "link", "set", "eth0", "down")
    try:
        output = controller.deploy(__file__, "-e", "sglang_version=0.5.20", rc=4)
    finally:
        controller.fleet(__file__, "exec", SECOND, "--", "ip", "link", "set", "eth0", "up")
    assert recap(output, FIRST)["failed"] == 0
    assert recap(output, SECOND)["unreachable"] == 1
    assert engine.release(host(FIRST))["engine"]["version"] == "0.5.20"
    assert re.search(rf"{SECOND} \(10\.\d+\.\d+\.\d+\) was not reached", output)
    assert re.search(rf"ansible-playbook deploy-dflash.yml .*-l {SECOND}", output)
