"""What the host knows without Ansible: systemd's own view of loads, serving, a crash and a boot."""

from __future__ import annotations

import json
import re
import shlex
import tempfile

import controller
import engine
import starts

UNIT = starts.UNIT
SETTINGS = f"@{controller.ROOT}/molecule/readiness/vars/settings.yml"
WEBHOOK = "canary-5f0c2a"  # the secret part of sglang_service_webhook
WEBHOOK_LOG = "/run/webhook/posted"

# Takes reports on the host. Called with `slow` it goes on answering for minutes, a byte at a time.
WEBHOOK_SERVER = f"""
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open("{WEBHOOK_LOG}", "ab") as out:
            out.write(self.path.encode() + b" " + body + b"\\n")
        if sys.argv[1:] == ["slow"]:
            for _ in range(1200):
                self.wfile.write(b"H"); time.sleep(0.25)
        self.send_response(204); self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 9099), Handler).serve_forever()
"""
# What every server of the OpenAI API has, no more: it stands for vLLM.
OPENAI_SERVER = """
import http.server, json, time
time.sleep(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({"data": [{"id": "other-model"}]} if self.path == "/v1/models" else {})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"usage": {"completion_tokens": asked["max_tokens"]}})
http.server.ThreadingHTTPServer(("127.0.0.1", 8001), Handler).serve_forever()
"""


def name_of(host):
    return starts.name_of(host)


def wait_module(host, *more, **arguments):
    """`sglang_wait` over SSH, as a person would call it: what it returned."""
    arguments = json.dumps({"fail": False, **arguments})
    output = controller.module(__file__, name_of(host), "sglang_wait", arguments, *more)
    return json.loads(re.search(r"\{.*\}", output, re.S)[0])


def serve(host, unit, text, *arguments):
    """Run a Python program as a unit of the host."""
    engine.sudo(host, f"mkdir -p /run/webhook; printf %s {shlex.quote(text)} > /run/{unit}.py")
    engine.sudo(host, f"systemd-run --unit={unit} --collect python3 /run/{unit}.py {' '.join(arguments)}")


def fleet_status(name):
    """The row of a host on the screen of playbooks/status.yml, as data."""
    output = controller.play(__file__, "playbooks/status.yml", "-l", name, "-e", "format=json")
    text = re.search(r"^\{$.*?^\}$", output, re.M | re.S)
    assert text, output
    return json.loads(text[0])["instances"][0]


def gate(host):
    return engine.read_json(host, "/run/sglang-main/gate.json")


@starts.together
def test_the_unit_is_ready_because_its_prober_says_so(host):
    assert engine.show(host, UNIT, "Type") == "notify"
    assert host.service(UNIT).is_running
    assert engine.show(host, UNIT, "StatusText").startswith("serving: ready in ")
    command = engine.sudo(host, f"tr '\\0' ' ' < /proc/{engine.show(host, UNIT, 'MainPID')}/cmdline")
    assert "-m sglang.launch_server" in command
    found = gate(host)
    assert found["outcome"] == "ready"
    assert found["invocation_id"] == engine.show(host, UNIT, "InvocationID")
    assert found["smoke"]["accept_length"] > 1.1
    # The deployment took this verdict: it did not generate a second time.
    assert engine.state(host, "ready.json")["accept_length"] == found["smoke"]["accept_length"]
    prober = engine.sudo(host, f"tr '\\0' ' ' < /proc/{found['pid']}/cmdline")
    assert "supervisor.py probe" in prober
    assert engine.sudo(host, f"stat -c %U /proc/{found['pid']}").strip() == "sglang"


@starts.together
def test_a_slow_load_is_activating_with_progress_and_a_blocking_start_ends_at_the_gate(host):
    starts.set_pace(host, {"kind": "slow", "at": "weights", "factor": 2}, pace=0.05)
    rows = starts.restart(host, {"ActiveState": "active"})
    loading = [row for row in rows if row["ActiveState"] == "activating"]
    assert {row["SubState"] for row in loading} == {"start"}
    texts = [row["StatusText"] for row in loading]
    assert any(re.match(r"weights: \d/8 ranks", text) for text in texts), texts
    assert any(re.search(r"\d %", text) for text in texts), texts
    assert rows[-1]["StatusText"].startswith("serving: ready in")
    assert rows[-1]["NRestarts"] == "0"
    # The text for a person shows the same.
    assert re.search(r"Status: .serving: ready in", engine.sudo(host, f"systemctl status --no-pager {UNIT}"))
    # Nobody but the supervisor gated this start, and the fleet's screen knows it.
    assert engine.state(host, "ready.json")["invocation_id"] != rows[-1]["InvocationID"]
    row = fleet_status(name_of(host))
    assert row["state"] == "serving"
    assert row["accept_length"] > 1.1
    starts.set_pace(host)
    engine.sudo(host, f"systemctl stop {UNIT}")
    engine.sudo(host, f"systemctl reset-failed {UNIT} || true; systemctl start {UNIT}")
    assert engine.sudo(host, f"systemctl is-active {UNIT}").strip() == "active"


@starts.together
def test_a_second_deployment_believes_the_verdict(host):
    before = engine.show(host, UNIT, "InvocationID")
    output = controller.deploy(__file__, "-l", name_of(host), "-e", SETTINGS)
    assert engine.show(host, UNIT, "InvocationID") == before
    assert re.search(rf"^{name_of(host)}\s+: .*\bchanged=0\b", output, re.M), output


@starts.together
def test_who_waits_sees_the_load_move(host):
    """`poll: once` and `systemctl status` during a load, and the lines of the play that waits for it."""
    starts.set_pace(host, pace=0.1)
    engine.sudo(host, f"systemctl stop {UNIT}; systemctl reset-failed {UNIT} || true")
    progress = ("-e", "sglang_wait_progress=always")
    waiting = controller.start(__file__, "deploy-dflash.yml", "-l", name_of(host), "-e", SETTINGS, *progress)
    loading = f"until systemctl show -p StatusText {UNIT} | grep -q weights; do sleep 0.1; done"
    engine.sudo(host, f"timeout 60 sh -c '{loading}'")
    once = wait_module(host, unit=UNIT, port=30000, ranks=8, poll="once")
    assert (once["finished"], once["ready"], once["outcome"]) == (False, False, None)
    assert once["phase"] in ("weights", "kv_cache", "graph_capture")
    status = engine.as_root(host, f"systemctl status --no-pager {UNIT}").stdout
    assert re.search(r"Active: activating \(start\)", status), status
    assert engine.as_root(host, f"systemctl is-active {UNIT}").stdout.strip() == "activating"
    output, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, output
    lines = re.findall(rf"^{name_of(host)}  +(\d):(\d\d)  (\w+)(.*)$", output, re.M)
    seen = [phase for _minutes, _seconds, phase, _rest in lines]
    assert "weights" in seen, output
    assert seen[-1] == "ready", output
    order = ["launch", "dist_init", "weights", "kv_cache", "graph_capture", "warmup", "serving", "ready"]
    assert [order.index(phase) for phase in seen] == sorted(order.index(phase) for phase in seen), seen
    # A line a change of phase, or every ten seconds.
    at = [60 * int(minutes) + int(seconds) for minutes, seconds, _phase, _rest in lines]
    assert all(seen[i] != seen[i - 1] or at[i] - at[i - 1] >= 9 for i in range(1, len(seen))), output
    assert any(re.search(r"about \d:\d\d left", rest) for *_, rest in lines), output
    starts.set_pace(host)


@starts.together
def test_without_root_it_says_what_it_lacks(host):
    found = wait_module(host, "--become", "--become-user", "nobody", unit=UNIT, port=30000, ranks=8, drafter=True)
    assert found["outcome"] == "ready", found
    assert found["smoke"]["accept_length"] > 1.1
    assert any(text.startswith("the journal") for text in found["lacks"]), found["lacks"]
    assert wait_module(host, unit=UNIT, port=30000, ranks=8)["lacks"] == []


@starts.together
def test_any_server_of_the_openai_api_can_be_waited_for(host):
    serve(host, "openai-like", OPENAI_SERVER)
    found = wait_module(host, unit="openai-like", port=8001, engine="openai", served_model_name="other-model")
    assert (found["outcome"], found["smoke"]["ok"], found["smoke"]["accept_length"]) == ("ready", 4, None), found
    wrong = wait_module(host, unit="openai-like", port=8001, engine="openai", served_model_name="kimi-k2.6")
    assert (wrong["outcome"], wrong["crash"]["cause"]) == ("crashed", "running_but_dead"), wrong
    assert "other-model" in wrong["reason"]
    engine.sudo(host, "systemctl stop openai-like")


@starts.together
def test_the_limit_on_starts_covers_loads_of_the_longest_wait(host):
    text = engine.sudo(host, f"systemctl cat {UNIT}")
    burst, interval = (int(re.search(rf"^{name}=(\d+)$", text, re.M)[1]) for name in (
        "StartLimitBurst", "StartLimitIntervalSec"))  # fmt: skip
    longest_pause = 120
    assert interval >= burst * (1800 + longest_pause)
    newer = int(engine.sudo(host, "systemctl --version").split()[1]) >= 254
    assert ("RestartMaxDelaySec=120" in text) is newer
    assert engine.sudo(host, f"systemd-analyze verify --man=no {UNIT} 2>&1") == ""


@starts.together
def test_a_stop_leaves_no_report(host):
    known = starts.reports(host)
    engine.sudo(host, f"systemctl stop {UNIT}")
    assert engine.show(host, UNIT, "Result") == "success"
    assert engine.as_root(host, f"systemctl is-active {UNIT}").stdout.strip() == "inactive"
    assert starts.reports(host) == known


@starts.together
def test_a_crash_that_stays_is_reported_and_not_tried_again(host):
    engine.sudo(host, "mkdir -p /var/lib/textfile")
    serve(host, "webhook", WEBHOOK_SERVER)
    known = starts.reports(host)
    starts.set_pace(host, {"kind": "weights_corrupt"})
    # Starts are limited, and each test above has made some.
    engine.sudo(host, f"systemctl stop {UNIT}; systemctl reset-failed {UNIT} || true")
    begun = engine.as_root(host, f"systemctl start {UNIT}")
    assert begun.rc != 0
    engine.sudo(host, f"timeout 30 sh -c 'until systemctl is-failed -q {UNIT}; do sleep 0.2; done'")
    assert engine.show(host, UNIT, "NRestarts") == "0"
    result = engine.show(host, UNIT, "Result")
    assert result in ("signal", "exit-code")
    report = starts.newest_report(host, known)
    assert report["crash"]["cause"] == "weights_corrupt"
    assert report["crash"]["phase"] == "weights"
    assert report["restarts_ended"] is True
    assert report["systemd"]["SERVICE_RESULT"] == result
    assert report["invocation_id"] == engine.show(host, UNIT, "InvocationID")
    metric = engine.sudo(host, "cat /var/lib/textfile/dflash-fleet-main.prom")
    row = r'^dflash_fleet_engine_crashes_total\{cause="weights_corrupt",.*rank="TP\d EP\d".*\} [1-9]\d*$'
    assert re.search(row, metric, re.M), metric
    entry = json.loads(
        engine.sudo(host, "journalctl MESSAGE_ID=5c1e2f0f6a0b4f1d9c7e8a52d3b4960e -n 1 -o json").splitlines()[-1]
    )
    assert entry["DFLASH_FLEET_CAUSE"] == "weights_corrupt"
    assert entry["PRIORITY"] == "3"
    row = fleet_status(name_of(host))
    assert (row["state"], row["last_cause"]) == ("failed", "weights_corrupt")
    assert starts.REPORTS in row["note"]
    with tempfile.TemporaryDirectory() as folder:
        output = controller.play(
            __file__, "playbooks/diagnose.yml", "-l", name_of(host), "-e", f"sglang_reports_dir={folder}"
        )
    assert re.search(rf"weights_corrupt: .*\n?.*\(on the host: {starts.REPORTS}/", output), output
    path, _, body = engine.sudo(host, f"tail -n 1 {WEBHOOK_LOG}").partition(" ")
    told = json.loads(body)
    assert path.endswith(WEBHOOK)
    assert (told["cause"], told["unit"], told["restarts_ended"]) == ("weights_corrupt", UNIT, True)
    assert told["invocation_id"] == report["invocation_id"]
    assert "weights_corrupt" in told["text"]
    engine.sudo(host, "systemctl stop webhook")


@starts.together
def test_a_webhook_that_never_ends_delays_no_start_and_shows_no_key(host):
    engine.sudo(host, f"systemctl reset-failed {UNIT} || true")
    serve(host, "webhook", WEBHOOK_SERVER, "slow")
    engine.sudo(host, f"rm -f {WEBHOOK_LOG} /run/webhook/argv")
    # Every command line of the host at the moment when the report is being sent.
    spy = f"until [ -s {WEBHOOK_LOG} ]; do sleep 0.1; done; cat /proc/[0-9]*/cmdline > /run/webhook/argv"
    engine.sudo(host, f"systemd-run --unit=spy --collect sh -c {shlex.quote(spy)}")
    rows, report = starts.failed_once(host, {"kind": "unknown_exception", "at": "dist_init"})
    engine.sudo(host, "systemctl stop webhook spy 2>/dev/null || true")
    assert report["restarts_ended"] is False
    died = next(row["at"] for row in rows if row["Result"] != "success")
    again = next(row["at"] for row in rows if row["NRestarts"] == "1")
    # 5 s for the webhook, 1 s for the pause, the rest for a busy machine; the reporter's own limit would take 20.
    assert again - died < 17, rows
    argv = engine.sudo(host, "tr '\\0' ' ' < /run/webhook/argv")
    assert "supervisor.py report" in argv
    assert WEBHOOK not in argv
    assert WEBHOOK not in engine.sudo(host, "journalctl --no-pager --all -o json")
    assert "the webhook did not take the report" in engine.journal(host, UNIT) + engine.sudo(
        host, "journalctl --no-pager -o cat -n 400"
    )
    assert engine.sudo(host, f"stat -c '%a %U' {engine.ROOT}/main/credentials/webhook").strip() == "600 root"


@starts.together
def test_after_a_boot_it_serves_and_is_gated_without_ansible(host):
    """And the boot itself does not wait for the load."""
    starts.set_pace(host, pace=0.1)
    engine.sudo(host, f"systemctl reset-failed {UNIT} || true")
    name = name_of(host)
    controller.fleet(__file__, "reboot", name)  # returns when systemd has no job left
    again = controller.scenario_host(__file__, name)
    assert again.run("systemctl is-system-running").stdout.strip() == "running"
    assert engine.sudo(again, f"systemctl is-active {UNIT}").strip() == "active"
    assert gate(again)["invocation_id"] == engine.show(again, UNIT, "InvocationID")
    assert fleet_status(name)["state"] == "serving"

    def moment(unit, what):
        return int(engine.show(again, unit, f"{what}TimestampMonotonic")) / 1e6

    # The load began with the boot, logins and the target came in the middle of it, and systemd called itself
    # `starting` until its end.
    begun, ready = moment(UNIT, "InactiveExit"), moment(UNIT, "ActiveEnter")
    assert ready - begun > 10
    assert moment("multi-user.target", "ActiveEnter") < ready - 5
    assert moment("ssh.service", "ActiveEnter") < ready - 5
    finished = int(engine.sudo(again, "systemctl show -p FinishTimestampMonotonic --value")) / 1e6
    assert finished >= ready
