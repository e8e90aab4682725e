"""A canary key and a canary token must be nowhere but in the two places that need them.

They are looked for in what every process of the hosts shows, in journals, units, temporary files and state, and in what
the playbook prints at its loudest.
"""

from __future__ import annotations

import re

import controller
import engine
import pytest
import yaml

CANARIES = yaml.safe_load((controller.ROOT / "molecule/secrets/canaries.yml").read_text())
KEY, TOKEN = CANARIES["sglang_api_key"], CANARIES["model_weights_token"]
UNITS = {"cpu-01": "sglang-main-single.service", "rehearsal-01": "sglang-main-ep8.service"}
# Where the key has to be: the credential that systemd loads, and what the supervisor makes of it for the engine.
ALLOWED = re.compile(
    r"^(/var/lib/sglang/main/credentials/api_key|/run/credentials/[^/]+/api_key|/run/sglang-main/engine\.yaml)$"
)


def name_of(host):
    return host.ansible.get_variables()["inventory_hostname"]


def test_the_canaries_were_in_use(host):
    """Otherwise nothing below would prove anything."""
    status, _ = engine.request(host, "/v1/models")
    assert status == 401
    status, _ = engine.request(host, "/v1/models", key=KEY)
    assert status == 200
    assert engine.sudo(host, "cat /var/lib/sglang/main/credentials/api_key").strip() == KEY


def test_the_hub_wanted_the_token():
    output = controller.play(
        __file__, "playbooks/fetch-weights.yml", "-l", "rehearsal-01", "-e", "model_weights_token=",
        "-e", "sglang_root=/var/lib/other", rc=2,
    )
    assert "model_weights_token" in output


@pytest.mark.parametrize("secret", [KEY, TOKEN], ids=["key", "token"])
def test_no_process_shows_it(host, secret):
    assert engine.grep(host, secret, "grep -laF -f $P /proc/[0-9]*/cmdline /proc/[0-9]*/environ") == []


@pytest.mark.parametrize("secret", [KEY, TOKEN], ids=["key", "token"])
def test_no_journal_holds_it(host, secret):
    assert engine.grep(host, secret, "journalctl --no-pager --all -o export | grep -acF -f $P") == ["0"]
    # The line in which every release prints its arguments was there to be searched.
    assert "server_args" in engine.journal(host, UNITS[name_of(host)])


@pytest.mark.parametrize("secret", [KEY, TOKEN], ids=["key", "token"])
def test_no_file_holds_it_but_those_that_must(host, secret):
    # The journal is a test of its own.
    places = "/etc /home /opt /root /run /srv /tmp /usr/local /var"
    found = engine.grep(host, secret, f"grep -rlaF -f $P {places} --exclude-dir=journal --exclude-dir=venvs")
    assert [path for path in found if not ALLOWED.match(path)] == []
    assert ("/var/lib/sglang/main/credentials/api_key" in found) is (secret == KEY)


def test_the_files_that_hold_it_are_private(host):
    for path in ("/var/lib/sglang/main/credentials/api_key", "/run/sglang-main/engine.yaml"):
        assert engine.sudo(host, f"stat -c %a {path}").strip() == "600"


def test_systemd_shows_a_name_only(host):
    unit = UNITS[name_of(host)]
    text = engine.sudo(host, f"systemctl show {unit}") + engine.sudo(host, f"systemctl cat {unit}")
    assert KEY not in text
    assert "LoadCredential=api_key:" in text


def test_the_playbook_does_not_print_it_at_its_loudest():
    secrets = f"@{controller.ROOT}/molecule/secrets/canaries.yml"
    changed = ("-e", "sglang_port=30001")
    output = controller.deploy(__file__, "-vvv", "--diff", "-l", "rehearsal-01", "-e", secrets, *changed)
    for secret in (KEY, TOKEN):
        assert secret not in output
