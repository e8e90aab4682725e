"""The switch, with a systemd that only answers: what it predicts, what it refuses, what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sglang_release
from ansible.module_utils.testing import patch_module_args
from dflash_fleet import state

UNIT, OTHER = "sglang-main-ep8.service", "sglang-main-tp8.service"
TEXT = "# Managed by dflash-fleet.\n[Service]\nExecStart=/bin/true\n"
REFUSAL = "error: argument --page-size: invalid int value: 'x'"
# Answers as systemd does for a unit that starts at once; notes every command that would change something.
SYSTEMCTL = """#!/bin/sh
case $1 in
show) echo ActiveState=$(cat {0}/active 2>/dev/null || echo inactive); echo SubState=running; echo UnitFileState=enabled
      echo LoadState=loaded; echo InvocationID=$(cat {0}/invocation 2>/dev/null) ;;
list-units) cat {0}/running 2>/dev/null ;;
list-jobs) if [ -e {0}/again ]; then rm {0}/again; echo ours > {0}/invocation; echo 7 unit restart running
           else echo 7 unit start running; fi ;;
*) echo "$@" >> {0}/asked
   if [ $1 = restart ]; then echo active > {0}/active; date +%N > {0}/invocation; fi ;;
esac
exit 0
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> state.Layout:
    layout = state.Layout(tmp_path / "sglang", tmp_path / "etc", tmp_path / "units")
    (layout.units / "multi-user.target.wants").mkdir(parents=True)
    layout.venv("v").mkdir(parents=True)
    layout.venv_mark("v").write_text("{}")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("systemctl", SYSTEMCTL.format(tmp_path)), ("systemd-analyze", "#!/bin/sh\nexit 0\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(sglang_release.states, "Layout", lambda root: layout)
    for name in ("set_owner_if_different", "set_group_if_different"):
        monkeypatch.setattr(sglang_release.AnsibleModule, name, lambda *_: False)
    return layout


@pytest.fixture
def call(host: state.Layout, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the module for the wish of these tests."""

    def run(check: bool = False, **more: Any) -> dict[str, Any]:
        wish = {
            "root": str(host.root), "instance": "main", "unit": UNIT, "unit_text": TEXT, "_ansible_check_mode": check,
            "release": {"venv": str(host.venv("v")), "engine": {"version": "0.5.20", "build": "rehearsal"}},
        }  # fmt: skip
        given = {name: value for name, value in {**wish, **more}.items() if value is not None}
        with patch_module_args(given), pytest.raises(SystemExit):
            sglang_release.main()
        result: dict[str, Any] = json.loads(capfd.readouterr().out)
        return result

    return run


def asked(tmp_path: Path) -> list[str]:
    file = tmp_path / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_what_is_predicted_is_what_happens(host: state.Layout, call: Callable[..., Any], tmp_path: Path) -> None:
    host.unit_file(OTHER).write_text(TEXT)
    host.boot_link(OTHER).symlink_to(host.unit_file(OTHER))
    (tmp_path / "running").write_text(f"{OTHER} loaded active running engine\n")
    predicted = call(check=True)
    assert asked(tmp_path) == []
    assert not host.instance("main").exists()
    done = call()
    assert done["changes"] == predicted["changes"]
    assert predicted["changes"] == [
        str(host.release_dir("main", done["id"])), str(host.unit_file(OTHER)), str(host.boot_link(OTHER)), OTHER,
        str(host.unit_file(UNIT)), str(host.current("main")), str(host.etc_link("main")), str(host.boot_link(UNIT)),
        UNIT,
    ]  # fmt: skip
    assert not host.unit_file(OTHER).exists()
    # The old engine is stopped before the new one is asked to start.
    assert asked(tmp_path).index(f"stop {OTHER}") < asked(tmp_path).index(f"restart --no-block {UNIT}")


def test_a_start_by_systemd_that_ours_stops_first_is_not_ours(call: Callable[..., Any], tmp_path: Path) -> None:
    """The engine had crashed, and Restart= came a moment before our job: that start ends before it has begun."""
    (tmp_path / "again").touch()
    result = call()
    assert (tmp_path / "invocation").read_text().strip() == result["invocation_id"] == "ours"


def test_an_unchanged_wish_changes_nothing(host: state.Layout, call: Callable[..., Any], tmp_path: Path) -> None:
    call()
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))
    before = asked(tmp_path)
    assert (call(check=True)["changed"], call()["changed"], asked(tmp_path)) == (False, False, before)


@pytest.mark.parametrize("what", ["etc link", "boot link", "release"])
def test_small_drift_is_mended_without_a_restart(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path, what: str
) -> None:
    identity = call()["id"]
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))
    drifted = {
        "etc link": host.etc_link("main"),
        "boot link": host.boot_link(UNIT),
        "release": host.release_json("main", identity),
    }[what]
    drifted.unlink()
    before = asked(tmp_path)
    # This start has passed its gate: it is not gated again for this, so its link for boot has to come from here.
    host.state("main").mkdir()
    invocation = (tmp_path / "invocation").read_text().strip()
    state.write_state(host.ready("main"), {"invocation_id": invocation})
    result = call()
    assert (result["changed"], result["restarted"]) == (True, False)
    assert len(result["changes"]) == 1
    assert asked(tmp_path) == [*before, *([f"enable {UNIT}"] if what == "boot link" else [])]
    assert what == "boot link" or drifted.exists() or drifted.is_symlink()


def test_an_engine_whose_unit_file_is_gone_is_still_stopped(call: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "running").write_text(f"{OTHER} not-found active running {OTHER}\n")
    assert OTHER in call()["changes"]
    assert f"stop {OTHER}" in asked(tmp_path)


def test_a_link_for_boot_without_its_unit_goes(host: state.Layout, call: Callable[..., Any]) -> None:
    call()
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))
    host.boot_link(OTHER).symlink_to(host.unit_file(OTHER))
    done = call()
    assert (done["changes"], done["restarted"]) == ([str(host.boot_link(OTHER))], False)
    assert not host.boot_link(OTHER).is_symlink()


@pytest.mark.parametrize("check", [False, True])
def test_what_the_engine_refuses_touches_nothing(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    monkeypatch.setattr(sglang_release.parser_check, "ask", lambda *_, **__: REFUSAL)
    result = call(check=check, arguments=["--page-size", "x"])
    assert result["failed"]
    assert result["msg"].startswith("sglang_extra_args")
    assert result["refused"] == REFUSAL
    assert asked(tmp_path) == []
    assert not host.instance("main").exists()


def test_the_engine_is_asked_once_per_release(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[str] = []
    monkeypatch.setattr(sglang_release.parser_check, "ask", lambda python, *_, **__: times.append(python) or "")
    for _ in range(2):
        call(arguments=["--tp-size", "8"])
    assert len(times) == 1
    assert times[0].endswith("/venvs/v/bin/python")


def test_prediction_where_the_environment_is_not_built_yet(
    host: state.Layout, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.venv_mark("v").unlink()
    monkeypatch.setattr(sglang_release.parser_check, "ask", lambda *_, **__: pytest.fail("nobody is there to ask"))
    assert call(check=True, arguments=["--tp-size", "8"])["changed"]


def test_staged_is_written_and_not_switched_to(host: state.Layout, call: Callable[..., Any], tmp_path: Path) -> None:
    result = call(state="staged")
    assert (result["changed"], result["changes"]) == (True, [str(host.release_dir("main", result["id"]))])
    assert host.release_json("main", result["id"]).exists()
    assert not host.current("main").is_symlink()
    assert asked(tmp_path) == []
    assert call(state="staged")["changed"] is False
    assert call()["id"] == result["id"]


PP8 = "sglang-main-pp8.service"


def beside(host: state.Layout, *units: str, text: str = TEXT) -> dict[str, Any]:
    """Profiles on standby as the role gives them."""
    release = {"venv": str(host.venv("v")), "engine": {"version": "0.5.20", "build": "rehearsal"}}
    return {"standby": [{"unit": unit, "unit_text": text, "release": {**release, "unit": unit}} for unit in units]}


def test_units_of_further_profiles_are_installed_and_not_enabled(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path
) -> None:
    wish = beside(host, OTHER, PP8, UNIT)  # the one that is switched to is passed over
    predicted = call(check=True, **wish)
    done = call(**wish)
    assert done["changes"] == predicted["changes"]
    staged = {path.parent.name: path.name for path in host.releases("main").glob("*/sglang-*")}
    assert sorted(staged.values()) == sorted([UNIT, OTHER, PP8])
    assert {str(host.unit_file(unit)) for unit in (UNIT, OTHER, PP8)} < set(done["changes"])
    assert sorted(path.name for path in host.units.glob("*.service")) == sorted([UNIT, OTHER, PP8])
    begun = [line for line in asked(tmp_path) if line.startswith(("enable", "start", "restart"))]
    assert begun == [f"restart --no-block {UNIT}"]
    assert state.read_standby(host, "main") == {unit: identity for identity, unit in staged.items() if unit != UNIT}
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))
    assert not call(**wish)["changed"]


def test_a_profile_comes_and_goes_without_a_restart(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path
) -> None:
    call(**beside(host, OTHER))
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))
    begun = len(asked(tmp_path))
    for wish in (beside(host, PP8), beside(host, PP8, text=TEXT + "# newer\n"), {}):
        predicted = call(check=True, **wish)
        done = call(**wish)
        assert done["changes"] == predicted["changes"]
        assert not done["restarted"]
        assert str(host.unit_file(PP8)) in done["changes"]
        assert host.unit_file(PP8).exists() == bool(wish)
    assert not host.unit_file(OTHER).exists()
    assert not [line for line in asked(tmp_path)[begun:] if line.startswith(("stop", "restart"))]
    assert state.read_standby(host, "main") == {}


@pytest.mark.parametrize("how", ["running", "enabled"])
def test_a_profile_on_standby_that_holds_the_gpus_or_the_boot_gives_way(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    wish = beside(host, OTHER)
    call(**wish)
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))
    if how == "running":
        (tmp_path / "running").write_text(f"{OTHER} loaded active running engine\n")
    else:
        host.boot_link(OTHER).symlink_to(host.unit_file(OTHER))
    predicted = call(check=True, **wish)
    done = call(**wish)
    assert done["changes"] == predicted["changes"] == (
        [OTHER, UNIT] if how == "running" else [str(host.boot_link(OTHER))]
    )
    assert done["restarted"] == (how == "running")
    assert host.unit_file(OTHER).read_text() == TEXT
    assert not host.boot_link(OTHER).is_symlink()
    assert (f"stop {OTHER}" in asked(tmp_path)) == (how == "running")


def test_a_return_leaves_profiles_on_standby_installed(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path
) -> None:
    first = call()
    call(unit=OTHER, unit_text=NEWER, **beside(host, PP8))
    back = call(unit=UNIT, unit_text=None, release=None, release_id=first["id"])
    assert sorted(path.name for path in host.units.glob("*.service")) == sorted([UNIT, PP8])
    assert str(host.unit_file(OTHER)) in back["changes"]
    assert not [line for line in back["changes"] if PP8 in line]


def test_a_trial_of_a_profile_on_standby_leaves_its_unit_as_it_was(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path
) -> None:
    first = call(**beside(host, OTHER))
    call(unit=OTHER, unit_text=NEWER, trial=True)
    assert host.unit_file(OTHER).read_text() == NEWER
    assert host.unit_file(UNIT).exists()
    back = call(unit=UNIT, unit_text=None, release=None, release_id=first["id"])
    assert str(host.unit_file(OTHER)) in back["changes"]
    assert host.unit_file(OTHER).read_text() == TEXT
    call(state="good", gate={"invocation_id": "x"})
    assert set(state.read_standby(host, "main").values()) < {path.name for path in host.releases("main").iterdir()}
    assert not call(**beside(host, OTHER))["restarted"]


def test_releases_on_standby_are_not_pruned_and_not_counted(host: state.Layout, call: Callable[..., Any]) -> None:
    call(**beside(host, OTHER, PP8))
    kept = set(state.read_standby(host, "main").values())
    for number in range(4):
        call(unit_text=TEXT + f"# {number}\n", keep=2, **beside(host, OTHER, PP8))
    left = {path.name for path in host.releases("main").iterdir()}
    assert kept < left
    assert len(left - kept) == 2


def test_a_profile_on_standby_that_the_engine_refuses_touches_nothing(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"--page-size": REFUSAL}
    monkeypatch.setattr(sglang_release.parser_check, "ask", lambda _, words, *__, **___: said.get(words[0], ""))
    wish = beside(host, OTHER)
    wish["standby"][0]["arguments"] = ["--page-size", "x"]
    result = call(arguments=["--tp-size", "8"], **wish)
    assert result["failed"]
    assert result["refused"] == REFUSAL
    assert asked(tmp_path) == []
    assert not host.instance("main").exists()


NEWER = TEXT + "LimitNOFILE=2048\n"


def test_a_change_of_the_unit_alone_waits_for_the_next_start(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path
) -> None:
    first = call()
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))  # as after a gate that was passed
    begun = len(asked(tmp_path))
    wish = {"unit_text": NEWER, "restart_on_unit_change": False}
    predicted = call(check=True, **wish)
    assert predicted["pending"]
    assert predicted["changed"]
    assert not predicted["restarted"]
    assert "next start" in predicted["diff"]["after_header"]
    assert host.unit_file(UNIT).read_text() == TEXT
    done = call(**wish)
    assert done["changes"] == predicted["changes"]
    assert UNIT not in done["changes"], "no start was predicted"
    assert host.unit_file(UNIT).read_text() == NEWER
    assert state.read_current(host, "main") == done["id"] != first["id"]
    assert asked(tmp_path)[begun:] == ["daemon-reload"]
    again = call(**wish)
    assert not again["changed"]
    assert not again["pending"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"restart_on_unit_change": True}, id="asked for"),
        pytest.param({"release": {"engine": {"version": "0.5.23", "build": "rehearsal"}}}, id="engine"),
    ],
)
def test_anything_else_restarts(call: Callable[..., Any], more: dict[str, Any]) -> None:
    call()
    done = call(**{"unit_text": NEWER, "restart_on_unit_change": False, **more})
    assert done["restarted"]
    assert not done["pending"]


def test_a_unit_that_was_edited_on_the_host_is_restarted(host: state.Layout, call: Callable[..., Any]) -> None:
    """Nobody knows with which text the engine runs then."""
    call()
    host.unit_file(UNIT).write_text(TEXT + "CPUQuota=1%\n")
    assert call(restart_on_unit_change=False)["restarted"]
    host.unit_file(UNIT).write_text(TEXT + "CPUQuota=2%\n")
    assert call(unit_text=NEWER, restart_on_unit_change=False)["restarted"]


def test_an_engine_that_is_down_is_started_with_the_new_unit(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    call()
    (tmp_path / "active").write_text("failed\n")
    assert call(unit_text=NEWER, restart_on_unit_change=False)["restarted"]


def test_a_start_that_nobody_recorded_is_told(host: state.Layout, call: Callable[..., Any], tmp_path: Path) -> None:
    """As a run leaves it that died while it waited for the gate."""
    first = call()
    assert not call()["recorded"]
    host.state("main").mkdir()
    state.write_state(host.ready("main"), {"invocation_id": (tmp_path / "invocation").read_text().strip()})
    assert call()["recorded"]
    state.write_state(host.ready("main"), {"invocation_id": "of the start before the reboot"})
    state.write_state(host.last_good("main"), {"release_id": first["id"], "unit": UNIT})
    assert call()["recorded"]


def test_a_trial_keeps_what_ran_and_leaves_nothing_behind(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path
) -> None:
    before = call()["id"]
    call(state="good", gate={"invocation_id": (tmp_path / "invocation").read_text().strip()})
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))
    good = host.last_good("main").read_text()
    trials = [call(trial=True, keep=1, unit=OTHER, unit_text=f"{TEXT}# {number}\n")["id"] for number in range(3)]
    noted = state.read_state(host.trial("main"))
    assert noted is not None
    assert (noted["release_id"], noted["unit"], noted["releases"]) == (before, UNIT, [before])
    assert state.read_current(host, "main") == trials[-1]
    assert host.last_good("main").read_text() == good
    # A boot in the middle brings back what ran before, and nothing is pruned.
    assert host.boot_link(UNIT).is_symlink()
    assert host.unit_file(UNIT).exists()
    assert {path.name for path in host.releases("main").iterdir()} == {before, *trials}
    found = state.read_instance(host, "main", [])
    assert found["previous_good"] == {"release_id": before, "unit": UNIT}

    call(release_id=before, unit_text=None, release=None)
    assert host.trial("main").exists(), "not over before what runs again has passed its gate"
    call(state="good", gate={"invocation_id": (tmp_path / "invocation").read_text().strip()})
    assert not host.trial("main").exists()
    assert [path.name for path in host.releases("main").iterdir()] == [before]
    assert not host.unit_file(OTHER).exists()


def test_a_trial_of_what_runs_ends_without_a_restart(
    host: state.Layout, call: Callable[..., Any], tmp_path: Path
) -> None:
    before = call()["id"]
    gate = {"invocation_id": (tmp_path / "invocation").read_text().strip()}
    call(state="good", gate=gate)
    host.boot_link(UNIT).symlink_to(host.unit_file(UNIT))
    assert call(trial=True)["restarted"] is False
    assert call(release_id=before, unit_text=None, release=None)["restarted"] is False
    assert call(state="good", gate=gate)["changed"] is True
    assert not host.trial("main").exists()


def test_a_trial_needs_something_to_return_to(host: state.Layout, call: Callable[..., Any]) -> None:
    result = call(trial=True)
    assert result["failed"] is True
    assert "no current release" in result["msg"]
    assert not host.releases("main").exists()
