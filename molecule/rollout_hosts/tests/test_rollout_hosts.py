"""What can happen to a host in the middle of a rollout. One plain rerun then ends where an undisturbed run ends."""

from __future__ import annotations

import re
import time
from pathlib import Path

import controller
import engine
import pytest
import starts
from rollouts import UNIT, Faults, read_until, row

# A dead host is noticed in seconds, not minutes: the rest of the run is what is looked at here.
PATIENCE = {"sglang_wait_away": 10, "ansible_ssh_extra_args": "-o ServerAliveInterval=3 -o ServerAliveCountMax=3"}
FLEET = Faults(__file__, sglang_rollout_batches=["100%"], **PATIENCE)
TWO_BATCHES = {"sglang_rollout_batches": [1, "100%"]}
HOSTS = FLEET.names
FIRST, SECOND, THIRD, FOURTH = HOSTS


@pytest.fixture(scope="module", autouse=True)
def known():
    for name in HOSTS:
        FLEET.fail_where(name)
    FLEET.learn()


def drop_in(name, *lines):
    """Change the unit as an administrator does; without lines, take that back."""
    folder, text = f"/etc/systemd/system/{UNIT}.d", "\\n".join(["[Service]", *lines, ""])
    change = f"mkdir -p {folder} && printf '{text}' > {folder}/fault.conf" if lines else f"rm -r {folder}"
    engine.sudo(FLEET.host(name), f"{change} && systemctl daemon-reload")


def disturbed(marker, disturb, **more):
    """A rollout to the present wish in which something happens at a line with the marker: its output and exit code."""
    run = FLEET.begin(*FLEET.arguments(**more))
    text = read_until(run, marker)
    disturb()
    output, _ = run.communicate(timeout=400)
    return text + output, run.returncode


def test_off_before_its_turn():
    """Host powered off before its turn: the others go on, it is named with the command that finishes it."""
    FLEET.turn()
    output, code = disturbed("rollout  batch 1 of 2", lambda: FLEET.power_off(THIRD), **TWO_BATCHES)
    assert code == 4, output
    assert {FLEET.length(name) for name in (FIRST, SECOND, FOURTH)} == {FLEET.length_wanted}
    assert "unreachable" in row(output, THIRD)
    assert re.search(rf"this finishes the rest:\n  ansible-playbook deploy-dflash.yml .*-l {THIRD} ", output)
    FLEET.power_on(THIRD)
    assert FLEET.length(THIRD) != FLEET.length_wanted, "nothing of it was touched"
    FLEET.rerun("-l", THIRD)


def test_off_during_its_turn():
    """Host powered off during its turn, alone in its batch: no other host is touched."""
    FLEET.turn()
    before = FLEET.invocations(*HOSTS[1:])
    output, code = disturbed("start | Wait until", lambda: FLEET.power_off(FIRST), **TWO_BATCHES)
    assert code == 4, output
    assert FLEET.invocations(*HOSTS[1:]) == before
    for name in HOSTS[1:]:
        assert "waiting" in row(output, name)
    assert re.search(rf"-l {','.join(HOSTS)}", output), "all that is left to do"
    FLEET.power_on(FIRST)
    output = FLEET.rerun()
    assert "continues rollout" in output, "the end of that run never came, so it gave no host back"


def test_off_after_its_turn():
    """Host powered off after its turn: it comes back with what it was given."""
    FLEET.turn()
    output, code = disturbed("rollout  batch 2 of 2", lambda: FLEET.power_off(FIRST), **TWO_BATCHES)
    assert code == 2, output
    assert f"{FIRST} had its turn and does not answer any more" in output
    assert re.search(rf"-l {FIRST} ", output)
    FLEET.power_on(FIRST)
    assert set(FLEET.lengths().values()) == {FLEET.length_wanted}
    before = FLEET.invocations()
    FLEET.rerun()
    assert FLEET.invocations() == before, "what serves is left alone"


def test_network_cut_while_loading():
    """Network cut (ip link down) while it loads, for 20 s: the same run goes on."""
    FLEET.turn()
    starts.set_pace(FLEET.host(SECOND), pace=0.1)

    def cut():
        FLEET.inside(SECOND, "ip", "link", "set", "eth0", "down")
        time.sleep(20)
        FLEET.inside(SECOND, "ip", "link", "set", "eth0", "up")

    more = {"sglang_wait_away": 120, "sglang_wait_progress": "always"}
    output, code = disturbed("start | Wait until", cut, **more)
    assert code == 0, output
    FLEET.ends_as_if_nothing_had_happened()
    FLEET.fail_where(SECOND)


@pytest.mark.parametrize("marker", ["TASK [sglang_service", "start | Wait until"])
def test_disk_full(marker):
    """Disk full at {marker!r}: that host fails, the others finish."""
    FLEET.turn()
    fill = ("sh", "-c", f"dd if=/dev/zero of={engine.ROOT}/filler bs=64k 2>/dev/null; true")
    output, code = disturbed(marker, lambda: FLEET.inside(FOURTH, *fill))
    assert code == 2, output
    assert "No space left on device" in output
    assert {FLEET.length(name) for name in HOSTS[:3]} == {FLEET.length_wanted}
    assert engine.show(FLEET.host(FOURTH), UNIT, "ActiveState") == "active", "it goes on with what it has"
    FLEET.inside(FOURTH, "rm", f"{engine.ROOT}/filler")
    FLEET.rerun()


def test_journal_rotated_and_rate_limited():
    """Journal rotated, vacuumed and rate-limited while it loads."""
    FLEET.turn()
    starts.set_pace(FLEET.host(SECOND), pace=0.1)
    drop_in(SECOND, "LogRateLimitIntervalSec=5s", "LogRateLimitBurst=4")
    rotate = ("journalctl", "--rotate", "--vacuum-time=1s")
    output, code = disturbed("start | Wait until", lambda: FLEET.inside(SECOND, *rotate))
    assert code == 0, output
    assert "Suppressed" in engine.sudo(FLEET.host(SECOND), "journalctl -o cat -u systemd-journald --since -5min")
    drop_in(SECOND)
    FLEET.fail_where(SECOND)
    FLEET.rerun()


def test_clock_jumps():
    """The host's clock jumps back and forth by a year while it loads."""
    FLEET.turn()
    host = FLEET.host(FIRST)
    library = Path(controller.ROOT, "molecule/shared/other_time.py")
    folder = engine.sudo(host, "python3 -c 'import site; print(site.getsitepackages()[0])'").strip()
    controller.module(__file__, FIRST, "ansible.builtin.copy", f"src={library} dest={folder}/ mode=0644")
    engine.sudo(host, f"echo import {library.stem} > {folder}/{library.stem}.pth")

    def jump(days):
        engine.sudo(host, f"echo {days * 86400} > /etc/other-time.new && mv /etc/other-time.new /etc/other-time")

    jump(-365)
    show = "import time; print(int(time.time()), int(time.monotonic()))"
    wall, monotonic, real, uptime, _ = engine.sudo(host, f'python3 -I -c "{show}"; date +%s; cat /proc/uptime').split()
    assert abs(int(real) - 365 * 86400 - int(wall)) < 10, "the wall clock of modules and supervisor does jump"
    assert abs(float(uptime) - int(monotonic)) < 10, "and only that one"
    starts.set_pace(host, pace=0.1)

    def jumps():
        for days in (365, -3, 30):
            jump(days)
            time.sleep(3)

    output, code = disturbed("start | Wait until", jumps)
    assert code == 0, output
    ready = engine.state(host, "ready.json")
    # An hour is far from both: a load of seconds, and the days by which the wall clock went.
    assert 1 < ready["seconds"] < 3600, "durations are of the monotonic clock"
    assert all(0 <= phase["seconds"] < 3600 for phase in ready["phases"] if phase["seconds"] is not None)
    engine.sudo(host, f"rm {folder}/{library.stem}.pth /etc/other-time")
    FLEET.fail_where(FIRST)
    FLEET.rerun()


def test_turns_bad_a_minute_after_its_gate():
    """Engine that turns bad one minute after its gate: it is started again, and status tells why."""
    FLEET.turn()
    condition = {"context_length": FLEET.length_wanted}
    dies = {"kind": "gpu_oom", "at": "serving", "after": 60, "when": condition, "once": True}
    starts.set_pace(FLEET.host(SECOND), dies, pace=0.02)
    FLEET.deploy(*FLEET.arguments())
    FLEET.fail_where(SECOND)  # for the next start; this one knows its end
    FLEET.until(SECOND, "NRestarts", "1", 120)
    FLEET.until(SECOND, "ActiveState", "active")
    line = FLEET.status()[SECOND]
    assert (line["state"], line["restarts"], line["last_cause"]) == ("serving", 1, "gpu_oom")
    FLEET.rerun()
