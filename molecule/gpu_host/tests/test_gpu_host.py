"""The driver's packages on a host: pinned, held, safe from what upgrades by itself; reboots only where allowed.

nvidia-smi's output is recorded and the packages hold no driver; apt, dpkg, modinfo, modprobe, needrestart, journald and
unattended-upgrades are the real ones.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
import time

import controller
import pytest
from faults import sh

CONVERGE = "molecule/gpu_host/converge.yml"
DRIVER = ["libcuda1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-open", "nvidia-persistenced"]
FIRST, LATER = "580.105.08", "580.173.02"


def release(host, package="nvidia-open"):
    return sh(host, f"dpkg-query -W -f '${{Version}}' {package}").removesuffix("-1")


def held(host):
    return sh(host, "apt-mark showhold").split()


def name(host):
    return host.backend.host


def converge(host, *arguments, rc=0):
    return controller.play(__file__, CONVERGE, "-l", f"localhost,{name(host)}", *arguments, rc=rc)


def publish_later(host):
    """The repository gets a newer release of the branch, and a newer container toolkit."""
    source = "/etc/apt/sources.list.d/dflash-fleet-nvidia.sources"
    sh(host, f"sed -i -E 's#^(URIs: .*/debian-1[23])/$#\\1-late/#' {source}")
    sh(host, "apt-get -q update")


def test_newest_of_the_branch_is_installed_and_held(host):
    assert {release(host, package) for package in DRIVER} == {FIRST}
    assert held(host) == DRIVER
    policy = sh(host, "apt-cache policy nvidia-open")
    assert "Candidate: 580.105.08-1" in policy
    assert "595.84-1 500" in policy  # a newer branch is there and not taken


def test_module_runs_and_nvidia_smi_answers(host):
    assert sh(host, "modinfo -F version nvidia").strip() == FIRST
    assert FIRST in host.file("/proc/driver/nvidia/version").content_string
    assert sh(host, "nvidia-smi --query-gpu=name --format=csv").count("RTX PRO 6000") == 8
    assert host.service("nvidia-persistenced").is_running
    assert host.service("nvidia-persistenced").is_enabled
    assert "blacklist nouveau" in host.file("/etc/modprobe.d/dflash-fleet-nouveau.conf").content_string


def test_journal_is_kept_and_capped_and_nothing_of_it_was_lost(host):
    sh(host, "journalctl --sync")
    assert sh(host, "ls /var/log/journal/*/system.journal")
    settings = sh(host, "systemd-analyze cat-config systemd/journald.conf")
    assert settings.rindex("Storage=persistent") > settings.rindex("Storage=volatile")
    assert "SystemMaxUse=200M" in settings
    lines = [int(line.split()[1]) for line in sh(host, "journalctl -u talker -o cat -g '^line '").splitlines()]
    assert lines[-1] > 20
    # Some may be from before the file was there; from the first one on, none is missing.
    assert lines == list(range(lines[0], lines[-1] + 1))


def test_upgrades_take_what_is_not_held_only(host):
    publish_later(host)
    sh(host, "apt-get -q -y install nvidia-container-toolkit=1.17.8-1")
    output = sh(host, "DEBIAN_FRONTEND=noninteractive apt-get -q -y dist-upgrade")
    assert release(host, "nvidia-container-toolkit") == "1.18.0"  # the upgrade was a real one
    assert {release(host, package) for package in DRIVER} == {FIRST}
    assert "kept back" in output


def test_unattended_upgrades_do_not_take_the_driver_even_without_the_hold(host):
    publish_later(host)
    sh(host, "apt-get -q -y --allow-downgrades install nvidia-container-toolkit=1.17.8-1")
    sh(host, "echo 'Unattended-Upgrade::Origins-Pattern:: \"origin=NVIDIA\";' > /etc/apt/apt.conf.d/99test")
    sh(host, f"apt-mark unhold {' '.join(DRIVER)}")
    try:
        # apt itself would take it now: without this line the test proves nothing.
        assert f"Inst nvidia-open [{FIRST}-1] ({LATER}-1" in sh(host, "apt-get -s dist-upgrade")
        sh(host, "unattended-upgrade")
    finally:
        sh(host, f"apt-mark hold {' '.join(DRIVER)}")
        sh(host, "rm /etc/apt/apt.conf.d/99test")
    assert {release(host, package) for package in DRIVER} == {FIRST}


def test_a_lost_hold_is_put_back(host):
    sh(host, "apt-mark unhold nvidia-open")
    output = converge(host, "--check")
    assert re.search(rf"{name(host)} .*changed=2", output), output  # the hold, and the repository's address of above
    assert held(host) == sorted(set(DRIVER) - {"nvidia-open"})
    converge(host)
    assert held(host) == DRIVER


def test_needrestart_leaves_engines_alone(host):
    sh(host, "cp /bin/sleep /usr/local/bin/outdated")
    for unit in ("sglang-main-tp8", "other"):
        sh(host, f"systemd-run --unit={unit} --collect /usr/local/bin/outdated infinity")
    show = "systemctl show -P MainPID"
    before = {unit: sh(host, f"{show} {unit}") for unit in ("sglang-main-tp8", "other")}
    try:
        # As an upgrade does: the file that runs is gone, another one is in its place.
        sh(host, "cp /bin/sleep /usr/local/bin/outdated.new && mv /usr/local/bin/outdated.new /usr/local/bin/outdated")
        output = sh(host, "needrestart -r a -l 2>&1")
        after = {unit: sh(host, f"{show} {unit}") for unit in before}
        assert after["other"] != before["other"], output  # needrestart was at work
        assert after["sglang-main-tp8"] == before["sglang-main-tp8"], output
    finally:
        sh(host, "systemctl stop sglang-main-tp8 other")


def test_a_running_driver_is_not_replaced_without_leave_to_reboot(host):
    output = converge(host, "-e", "gpu_host_driver_version=580.65.06", rc=2)
    assert f"driver {FIRST} is running, and 580.65.06 needs a reboot" in output
    assert "gpu_host_driver_reboot" in output
    assert release(host) == FIRST
    converge(host)  # the pin of before


def test_a_branch_that_the_repository_lacks_is_named(host):
    output = converge(host, "-e", "gpu_host_driver_branch=615", "-e", "gpu_host_driver_reboot=true", rc=2)
    assert "apt has no branch 615 of" in output
    assert "gpu_host_driver_branch" in output
    assert release(host) == FIRST
    converge(host)


def test_a_key_of_somebody_else_is_refused(host):
    sh(host, "mv /usr/share/keyrings/dflash-fleet-nvidia.gpg /root/kept.gpg")
    wrong = {
        "gpu_host_driver_fingerprints": ["EB693B3035CD5710E231E123A4B469963BF863CC"],
        "gpu_host_driver_reboot": True,
        "gpu_host_driver_version": "580.65.06",
    }
    try:
        output = converge(host, "-e", json.dumps(wrong), rc=2)
    finally:
        sh(host, "mv /root/kept.gpg /usr/share/keyrings/dflash-fleet-nvidia.gpg")
    assert "fingerprint" in output
    assert "EB693B3035CD5710E231E123A4B469963BF863CC" in output
    assert release(host) == FIRST
    converge(host)


def test_debians_own_packages_are_refused_with_the_reason(host):
    output = converge(host, "-e", "gpu_host_driver_source=distribution", rc=2)
    assert re.search(r"gpu_host_driver_source distribution has no driver for CUDA 13 on\s+debian-1", output)


def test_protection_is_weakened_only_by_variables(host):
    files = {
        "/etc/modprobe.d/dflash-fleet-nvidia.conf": "options nvidia NVreg_RegistryDwords=\"ForceP2P=0x11;",
        "/etc/default/grub.d/50-dflash-fleet.cfg": "iommu=pt",
        "/etc/systemd/system/dflash-fleet-acs-off.service": "ECAP_ACS+6.w=0000",
    }
    for path in files:
        assert not host.file(path).exists
    asked = {"gpu_host_iommu": "passthrough", "gpu_host_acs_off": True, "gpu_host_force_p2p": True}
    output = converge(host, "-e", json.dumps(asked), rc=2)
    # The kernel of this host was not booted that way, and nobody allowed a reboot.
    assert re.search(r"command line lacks iommu=pt \(gpu_host_iommu\): this\s+host needs a reboot", output)
    for path, text in files.items():
        assert text in host.file(path).content_string
    assert "dflash-fleet-acs-off.service" in sh(host, "systemctl show -P Wants multi-user.target")
    converge(host)
    for path in files:
        assert not host.file(path).exists
    assert "dflash-fleet-acs-off.service" not in sh(host, "systemctl show -P Wants multi-user.target")


OPEN = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
http.server.HTTPServer(("0.0.0.0", 30007), Handler).serve_forever()
"""


def test_an_engine_that_anyone_may_use_is_a_finding(host):
    """Somebody's own, under another name, on a port that the inventory does not know; the firewall is left as it is."""
    row = f"open engine 30007  {name(host)}"
    assert row not in controller.play(__file__, "playbooks/preflight.yml", "-l", name(host))
    sh(host, f"mkdir -p /opt/handmade && printf %s {shlex.quote(OPEN)} > /opt/handmade/sglang.launch_server")
    sh(host, "systemd-run --unit=handmade --collect python3 /opt/handmade/sglang.launch_server")
    try:
        sh(host, "timeout 20 sh -c 'until ss -ltn | grep -q :30007; do sleep 0.1; done' ")
        output = controller.play(__file__, "playbooks/preflight.yml", "-l", name(host))
        assert row in output
        assert "0.0.0.0 answers without a key (handmade.service)" in output
        # A deployment shows no table, and says this all the same.
        output = " ".join(converge(host).split())
        assert "open engine 30007: 0.0.0.0 answers without a key (handmade.service): set sglang_api_key" in output
    finally:
        sh(host, "systemctl stop handmade; rm -r /opt/handmade")
    assert "open engine" not in converge(host)


def state(name):
    """What the container runtime says about a host."""
    command = [sys.executable, str(controller.ROOT / "rehearsal/fleet.py"), "status", "molecule_gpu_host", "--json"]
    # Not everything is up: that is its exit status as well, and what is asked here.
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return next(one["state"] for one in json.loads(output)["hosts"] if one["host"] == name)


def rebooting(host, play):
    """Run `play` while the host, which stops for good when it shuts down, is switched on again; returns its output."""
    done = threading.Event()
    reboots = []

    def switch_on():
        while not done.wait(0.5):
            if state(name(host)) not in ("running", "stopping"):
                reboots.append(time.monotonic())
                controller.fleet(__file__, "reboot", name(host))

    thread = threading.Thread(target=switch_on)
    thread.start()
    try:
        return play(), len(reboots)
    finally:
        done.set()
        thread.join()


# An engine with a request to answer; it writes down whether the host was still up when it was asked to end.
ENGINE = """
import signal, subprocess, sys, time
def end(*_):
    time.sleep(2)
    state = subprocess.run(["systemctl", "is-system-running"], capture_output=True, text=True).stdout.strip()
    with open("/var/lib/handmade", "a") as log:
        print(state, file=log)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
while True:
    time.sleep(1)
"""
ENGINE_UNIT = """[Service]
ExecStart=/usr/bin/python3 /opt/handmade/engine.py
KillMode=mixed
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture
def engine(host):
    """A unit that is enabled, as a deployed engine's is; its file of endings."""
    sh(host, f"mkdir -p /opt/handmade && printf %s {shlex.quote(ENGINE)} > /opt/handmade/engine.py")
    sh(host, f"printf %s {shlex.quote(ENGINE_UNIT)} > /etc/systemd/system/sglang-main-tp8.service")
    sh(host, "systemctl daemon-reload")
    sh(host, "systemctl enable --now sglang-main-tp8")
    yield "/var/lib/handmade"
    sh(host, "systemctl disable --now sglang-main-tp8")
    sh(host, "rm -rf /etc/systemd/system/sglang-main-tp8.service /opt/handmade /var/lib/handmade")
    sh(host, "systemctl daemon-reload")


def test_another_module_than_the_installed_one_is_noticed_and_rebooted_away(host, engine):
    publish_later(host)
    names = " ".join(f"{package}={LATER}-1" for package in DRIVER)
    # Somebody upgrades by hand; from here on every program on the GPUs fails.
    sh(host, f"DEBIAN_FRONTEND=noninteractive apt-get -q -y --allow-change-held-packages install {names}")
    with host.sudo():
        assert host.run("nvidia-smi").rc == 18
    output = converge(host, rc=2)
    words = f"{FIRST} is loaded, {LATER} is installed: this host needs a reboot".split()
    assert re.search(r"\s+".join(map(re.escape, words)), output), output
    assert FIRST in host.file("/proc/driver/nvidia/version").content_string
    assert host.service("sglang-main-tp8").is_running  # nothing was stopped where nothing was allowed
    assert not host.file(engine).exists
    output, reboots = rebooting(host, lambda: converge(host, "-e", "gpu_host_driver_reboot=true"))
    assert reboots == 1
    # It ended by itself while the host was up, and is back.
    assert host.file(engine).content_string.strip() in ("running", "degraded")
    assert host.service("sglang-main-tp8").is_running
    assert LATER in host.file("/proc/driver/nvidia/version").content_string
    assert sh(host, "nvidia-smi --query-gpu=name --format=csv").count("RTX PRO 6000") == 8
    assert held(host) == DRIVER
    # The journal of before the reboot is still there.
    assert len(sh(host, "journalctl --list-boots").splitlines()) >= 2


def test_going_back_to_an_exact_release_reboots_once_and_checks(host):
    exact = ["-e", "gpu_host_driver_reboot=true", "-e", "gpu_host_driver_version=580.65.06"]
    output, reboots = rebooting(host, lambda: converge(host, *exact))
    assert reboots == 1, output
    assert {release(host, package) for package in DRIVER} == {"580.65.06"}
    assert "580.65.06" in host.file("/proc/driver/nvidia/version").content_string
    output, reboots = rebooting(host, lambda: converge(host, *exact))
    assert reboots == 0
    assert re.search(rf"{name(host)} .*changed=0", output), output


@pytest.mark.parametrize("missing", ["/usr/bin/nvidia-smi"])
def test_a_tool_that_is_gone_is_a_finding(host, missing):
    sh(host, f"mv {missing} {missing}.away")
    try:
        output = converge(host, "-e", "gpu_host_driver_install=false", rc=2)
    finally:
        sh(host, f"mv {missing}.away {missing}")
    assert "nvidia-smi: not found" in output
