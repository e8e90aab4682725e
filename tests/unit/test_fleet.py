"""The pure parts of rehearsal/fleet.py: apt's sources, specifications, flags, addresses, the inventory."""

from __future__ import annotations

import base64
import importlib.util
import ipaddress
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def load_fleet() -> ModuleType:
    """rehearsal/ is a folder of programs, not a package."""
    spec = importlib.util.spec_from_file_location("rehearsal_fleet", ROOT / "rehearsal" / "fleet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fleet = load_fleet()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_FLEET_CACHE", str(tmp_path / "cache"))


# --------------------------------------------------------------------------------------------------------------------
# apt


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("deb http://m.example/debian bookworm main", ("http://m.example/debian", ("bookworm",), ("main",), "", False)),
        (
            "  deb [arch=amd64 signed-by=/k.gpg] https://m.example/debian/ trixie main contrib # comment",
            ("https://m.example/debian/", ("trixie",), ("main", "contrib"), "/k.gpg", False),
        ),
        ("deb [ trusted=yes ] file:/srv/debian sid main", ("file:/srv/debian", ("sid",), ("main",), "", True)),
        ("deb-src http://m.example/debian bookworm main", None),
        ("# deb http://m.example/debian bookworm main", None),
        ("", None),
        ("deb http://m.example/only-an-address", None),
    ],
)
def test_one_line_sources(line: str, expected: tuple[Any, ...] | None) -> None:
    found = fleet.parse_one_line(line)
    assert found == ([fleet.AptSource(*expected)] if expected else [])


DEB822 = """\
# first comment
Types: deb deb-src
URIs: http://a.example/debian http://b.example/debian
# a comment inside a stanza does not end it
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://src.example/debian
Suites: bookworm
Components: main
\t
types: deb
uris: https://key.example/debian
suites: trixie
components: main
signed-by:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 AQID
 =abcd
 -----END PGP PUBLIC KEY BLOCK-----
"""


def test_deb822_sources() -> None:
    found = fleet.parse_deb822(DEB822)
    assert [source.uri for source in found] == [
        "http://a.example/debian",
        "http://b.example/debian",
        "https://key.example/debian",
    ]
    assert found[0].suites == ("bookworm", "bookworm-updates")
    assert found[0].components == ("main", "contrib")
    assert found[2].signed_by.startswith("-----BEGIN")


def test_sources_are_read_from_both_formats_and_nothing_else(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text("deb http://one.example/debian bookworm main\n")
    (parts / "b.sources").write_text(
        "Types: deb\nURIs: http://two.example/debian\nSuites: bookworm\nComponents: main\n"
    )
    (parts / "a.list").write_text("deb http://three.example/debian bookworm main\n")
    (parts / "c.list.bak").write_text("deb http://ignored.example/debian bookworm main\n")
    uris = [source.uri for source in fleet.read_apt_sources(tmp_path)]
    assert uris == ["http://one.example/debian", "http://three.example/debian", "http://two.example/debian"]
    assert fleet.read_apt_sources(tmp_path / "nowhere") == []


ARCHIVE = fleet.AptSource("http://m.example/debian", ("bookworm", "bookworm-updates"), ("main",), fleet.DEBIAN_KEYRING)
SECURITY = fleet.AptSource("http://m.example/debian-security", ("bookworm-security",), ("main",), fleet.DEBIAN_KEYRING)
FOREIGN = fleet.AptSource("https://vendor.example/apt", ("bookworm",), ("main",), "/usr/share/keyrings/vendor.gpg")
FOREIGN_DEBIAN = fleet.AptSource("https://vendor.example/linux/debian", ("bookworm",), ("stable",), "")
TRIXIE = fleet.AptSource("http://other.example/debian", ("trixie",), ("main",), fleet.DEBIAN_KEYRING)
PRIVATE = fleet.AptSource("https://mirror.corp.example/debian", ("bookworm",), ("main",), "/etc/apt/keyrings/corp.gpg")


@pytest.mark.parametrize(
    ("sources", "debian", "expected"),
    [
        ([FOREIGN, SECURITY, ARCHIVE], "bookworm", ARCHIVE),
        ([FOREIGN_DEBIAN, SECURITY, ARCHIVE], "trixie", ARCHIVE),  # a mirror carries the other releases too
        ([ARCHIVE, TRIXIE], "trixie", TRIXIE),
        ([ARCHIVE, TRIXIE], "bookworm", ARCHIVE),
        ([FOREIGN, PRIVATE], "bookworm", PRIVATE),
    ],
)
def test_mirror_is_the_one_debian_comes_from(sources: list[Any], debian: str, expected: Any) -> None:
    assert fleet.choose_mirror(sources, debian) == expected


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [SECURITY, FOREIGN_DEBIAN],
        [fleet.AptSource("http://archive.example/ubuntu", ("noble",), ("main",))],
        [fleet.AptSource("cdrom:[Debian]/", ("bookworm",), ("main",))],
    ],
)
def test_no_mirror_says_what_to_set(sources: list[Any]) -> None:
    with pytest.raises(fleet.FleetError, match=r"DFLASH_FLEET_MIRROR .* DFLASH_FLEET_BASE_IMAGE"):
        fleet.choose_mirror(sources, "bookworm")


def test_keyrings(tmp_path: Path) -> None:
    key = b"\x99\x01\x02 a key"
    body = base64.b64encode(key).decode()
    armored = f"-----BEGIN PGP PUBLIC KEY BLOCK-----\nVersion: x\n\n{body}\n=abcd\n-----END PGP-----"
    binary, text = tmp_path / "k.gpg", tmp_path / "k.asc"
    binary.write_bytes(key)
    text.write_text(armored)

    def source(signed_by: str, trusted: bool = False) -> Any:
        return fleet.AptSource("http://m.example/debian", ("bookworm",), ("main",), signed_by, trusted)

    assert fleet.keyring_for(source("", trusted=True), tmp_path) is None
    assert fleet.keyring_for(source(""), tmp_path) == Path(fleet.DEBIAN_KEYRING)
    assert fleet.keyring_for(source("0123456789ABCDEF"), tmp_path) == Path(fleet.DEBIAN_KEYRING)
    assert fleet.keyring_for(source(str(binary)), tmp_path) == binary
    for signed_by in (str(text), armored, armored.replace("\n\n", "\n.\n")):
        assert fleet.keyring_for(source(signed_by), tmp_path).read_bytes() == key


def test_addresses_are_shown_without_passwords() -> None:
    assert fleet.without_password("https://user:secret@m.example/debian") == "https://m.example/debian"


# --------------------------------------------------------------------------------------------------------------------
# Flags


def machine(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "hybrid_cgroups": False,
        "file_limit": 1048576,
        "process_limit": -1,
        "may_raise_limits": True,
        "capabilities": (1 << 41) - 1,
        "apparmor": False,
        "selinux": False,
    }
    return fleet.Machine(**{**values, **changes})


def test_flags_of_an_ordinary_machine() -> None:
    flags = fleet.run_flags("podman", machine())
    assert "--systemd=always" in flags
    assert "--cap-add=SYS_ADMIN" in flags
    assert "--cgroupns=private" in flags
    assert not [flag for flag in flags if flag.startswith(("--ulimit", "--security-opt"))]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"may_raise_limits": False, "file_limit": 20000}, ["--ulimit=nofile=20000:20000"]),
        ({"may_raise_limits": False, "file_limit": -1, "process_limit": 9000}, ["--ulimit=nproc=9000:9000"]),
        ({"may_raise_limits": False, "file_limit": -1, "process_limit": 96365}, ["--ulimit=nproc=32768:32768"]),
        ({"may_raise_limits": False, "file_limit": -1}, []),
        ({"may_raise_limits": True, "file_limit": 20000}, []),
        ({"apparmor": True}, ["--security-opt=apparmor=unconfined"]),
        ({"selinux": True}, ["--security-opt=label=disable"]),
    ],
)
def test_quirks_change_flags(changes: dict[str, Any], expected: list[str]) -> None:
    flags = fleet.run_flags("podman", machine(**changes))
    assert [flag for flag in flags if flag.startswith(("--ulimit", "--security-opt"))] == expected


def test_only_capabilities_that_the_machine_has() -> None:
    flags = fleet.run_flags("podman", machine(capabilities=1 << fleet.CAPABILITIES["SYS_ADMIN"]))
    assert [flag for flag in flags if flag.startswith("--cap-add")] == ["--cap-add=SYS_ADMIN"]


def test_docker_gets_what_podman_does_by_itself() -> None:
    flags = fleet.run_flags("docker", machine())
    assert {"--tmpfs=/run", "--env=container=docker"} <= set(flags)
    assert "--systemd=always" not in flags


def test_this_machine_can_be_read() -> None:
    assert isinstance(fleet.look_at_machine(), fleet.Machine)


# --------------------------------------------------------------------------------------------------------------------
# Specifications


def host(**changes: Any) -> dict[str, Any]:
    return {"name": "a-01", "image": "bookworm", "groups": ["g"], **changes}


def test_a_full_specification() -> None:
    spec = fleet.check_spec(
        {
            "hub": {"repos": "/srv/repos"},
            "vars": {"x": 1},
            "hosts": [
                host(memory="4g", tmpfs={"/var/lib/sglang": "64m"}, vars={"y": [1, 2]}),
                host(name="b", image="cpu", debian="trixie", user="ops", sudo_password_env="SECRET"),
                {"name": "c"},
            ],
        }
    )
    assert spec.hub
    assert spec.hub_repos == "/srv/repos"
    first, second, third = spec.hosts
    assert (first.debian, first.memory, first.tmpfs) == ("bookworm", "4g", (("/var/lib/sglang", "64m"),))
    assert (second.image, second.debian, second.user) == ("cpu", "trixie", "ops")
    assert (third.image, third.groups, third.user) == ("bookworm", (), "root")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "mapping with the key hosts"),
        ([], "mapping with the key hosts"),
        ({"hosts": []}, "at least one host"),
        ({"host": []}, "unknown key 'host'"),
        ({"hosts": [host()], "hub": "yes"}, "hub has to be"),
        ({"hosts": [host()], "hub": {"port": 1}}, "hub: unknown key 'port'"),
        ({"hosts": [host()], "vars": []}, "vars has to be"),
        ({"hosts": ["a"]}, "host 1: expected a mapping"),
        ({"hosts": [{"image": "cpu"}]}, "host 1: expected a mapping with a name"),
        ({"hosts": [host(name="A_1")]}, "host 'A_1'"),
        ({"hosts": [host(name="hub")]}, "host 'hub'"),
        ({"hosts": [host(), host()]}, "'a-01' is there twice"),
        ({"hosts": [host(size=1)]}, "host a-01: unknown key 'size'"),
        ({"hosts": [host(image="a/b")]}, "host a-01: image 'a/b'"),
        ({"hosts": [host(debian="sid")]}, "host a-01: debian 'sid'"),
        ({"hosts": [host(debian="trixie")]}, "host a-01: debian 'trixie'"),
        ({"hosts": [host(groups="g")]}, "host a-01: groups"),
        ({"hosts": [host(groups=["a-b"])]}, "host a-01: groups"),
        ({"hosts": [host(user="Bad User")]}, "host a-01: user"),
        ({"hosts": [host(memory="lots")]}, "host a-01: memory"),
        ({"hosts": [host(tmpfs={"var": "1m"})]}, "host a-01: tmpfs"),
        ({"hosts": [host(vars=[1])]}, "host a-01: vars"),
        ({"hosts": [host(sudo_password="x")]}, "host a-01: give at most one"),
        ({"hosts": [host(user="ops", sudo_password="x", sudo_password_env="y")]}, "host a-01: give at most one"),
    ],
)
def test_bad_specifications_name_the_key(data: Any, message: str) -> None:
    with pytest.raises(fleet.FleetError) as caught:
        fleet.check_spec(data, "demo.yml")
    assert str(caught.value).startswith("demo.yml: ")
    assert message in str(caught.value)


def test_specifications_from_files(tmp_path: Path) -> None:
    data = {"hosts": [host()]}
    (tmp_path / "a.json").write_text(json.dumps(data))
    (tmp_path / "a.yml").write_text(yaml.safe_dump(data))
    assert fleet.load_spec(tmp_path / "a.json") == fleet.load_spec(tmp_path / "a.yml")
    (tmp_path / "bad.yml").write_text("hosts: [")
    for name in ("bad.yml", "missing.yml"):
        with pytest.raises(fleet.FleetError, match=name):
            fleet.load_spec(tmp_path / name)


@pytest.mark.parametrize("path", sorted((ROOT / "rehearsal" / "hosts").glob("*.yml")), ids=lambda path: path.name)
def test_the_projects_own_specifications(path: Path) -> None:
    assert fleet.load_spec(path).hosts


def test_shape_follows_what_a_container_is_made_from() -> None:
    def shape(**changes: Any) -> str:
        return fleet.check_spec({"hosts": [host(**changes)]}).hosts[0].shape()

    assert shape() == shape(groups=["other"], vars={"a": 1})
    assert len({shape(), shape(memory="1g"), shape(user="ops"), shape(image="trixie"), shape(tmpfs={"/x": "1m"})}) == 5


@pytest.mark.parametrize("name", ["demo", "molecule_default", "a1"])
def test_fleet_names(name: str) -> None:
    assert fleet.check_fleet_name(name) == name


@pytest.mark.parametrize("name", ["", "a-b", "Demo", "1a", "a" * 31, "a/b", "../x"])
def test_bad_fleet_names(name: str) -> None:
    # With a hyphen, fleet a-b with host c and fleet a with host b-c would share a container's name.
    with pytest.raises(fleet.FleetError, match="fleet name"):
        fleet.check_fleet_name(name)


# --------------------------------------------------------------------------------------------------------------------
# Addresses

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
vpn0\t0000D50A\t00000000\t0001\t0\t0\t0\t0080FFFF\t0\t0\t0
"""


def test_free_subnets_keep_clear_of_routes() -> None:
    # The last route is 10.213.0.0/17.
    found = list(fleet.free_subnets("demo", ROUTES))
    assert len(found) == 128
    assert all(subnet.subnet_of(ipaddress.ip_network("10.213.128.0/17")) for subnet in found)
    assert next(fleet.free_subnets("demo", "")) != next(fleet.free_subnets("other", ""))


def test_hosts_keep_their_addresses() -> None:
    subnet = ipaddress.ip_network("10.213.4.0/24")
    first = fleet.assign_addresses(subnet, ["a", "b"], {})
    assert first == {"a": "10.213.4.10", "b": "10.213.4.11"}
    assert fleet.assign_addresses(subnet, ["new", "b"], {"b": first["b"]}) == {"new": "10.213.4.10", "b": first["b"]}
    assert fleet.hardware_address("10.213.4.10") == "02:df:0a:d5:04:0a"


@pytest.mark.parametrize(
    "entry",
    [
        {"subnets": [{"subnet": "10.213.4.0/24", "gateway": "10.213.4.1"}]},  # podman
        {"IPAM": {"Config": [{"Subnet": "10.213.4.0/24"}]}},  # docker
    ],
)
def test_subnet_of_either_runtime(entry: dict[str, Any]) -> None:
    assert str(fleet.network_subnet(entry)) == "10.213.4.0/24"


# --------------------------------------------------------------------------------------------------------------------
# Inventory


def render(spec: dict[str, Any], endpoint: str = "") -> dict[str, Any]:
    checked = fleet.check_spec(spec)
    addresses = {entry.name: f"10.213.4.{number}" for number, entry in enumerate(checked.hosts, start=10)}
    text = fleet.render_inventory(fleet.Fleet("demo"), checked, addresses, endpoint)
    assert text.startswith("# Written by rehearsal/fleet.py for the fleet demo;")
    return dict(yaml.safe_load(text)["all"])


def test_inventory() -> None:
    everything = render(
        {"vars": {"x": 1}, "hosts": [host(vars={"y": 2}), host(name="b", groups=["g", "h"])]}, "http://10.213.4.2:8080"
    )
    assert everything["vars"] == {"model_weights_endpoint": "http://10.213.4.2:8080", "x": 1}
    assert {name: list(group["hosts"]) for name, group in everything["children"].items()} == {
        "g": ["a-01", "b"],
        "h": ["b"],
    }
    first = everything["hosts"]["a-01"]
    assert (first["ansible_host"], first["ansible_user"], first["y"]) == ("10.213.4.10", "root", 2)
    assert "ansible_become" not in first
    words = shlex.split(first["ansible_ssh_common_args"])
    assert "StrictHostKeyChecking=yes" in words
    assert words[::2] == ["-o"] * (len(words) // 2)
    control = next(word for word in words if word.startswith("ControlPath="))
    # ssh expands %C to 40 characters and adds 17 while it connects; a socket's path holds 104 at the least.
    assert len(control.removeprefix("ControlPath=").replace("%C", "c" * 40)) + 17 <= 104


def test_inventory_without_hub_has_no_endpoint() -> None:
    assert "vars" not in render({"hosts": [host()]})


def test_ordinary_user_and_generated_password() -> None:
    entry = render({"hosts": [host(user="ops")]})["hosts"]["a-01"]
    assert "ansible_become" not in entry
    checked = fleet.check_spec({"hosts": [host(user="ops")]}).hosts[0]
    password = fleet.sudo_password(fleet.Fleet("demo"), checked)
    assert len(password) > 20
    assert fleet.sudo_password(fleet.Fleet("demo"), checked) == password
    kept = fleet.password_file(fleet.Fleet("demo"), checked)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert str(kept) in entry["ansible_become_password"]
    assert password not in json.dumps(entry)


def test_given_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("from-file\n")
    monkeypatch.setenv("FLEET_TEST_PASSWORD", "from-env")
    given = {
        "sudo_password": ("from-spec", "from-spec"),
        "sudo_password_env": ("FLEET_TEST_PASSWORD", "from-env"),
        "sudo_password_file": (str(tmp_path / "password"), "from-file"),
    }
    for key, (value, expected) in given.items():
        spec = {"hosts": [host(user="ops", **{key: value})]}
        assert fleet.sudo_password(fleet.Fleet("demo"), fleet.check_spec(spec).hosts[0]) == expected
        # Whoever gives a password hands it to Ansible in their own way, such as a vault.
        entry = render(spec)["hosts"]["a-01"]
        assert "ansible_become_password" not in entry
        assert expected not in json.dumps(entry)
    monkeypatch.delenv("FLEET_TEST_PASSWORD")
    with pytest.raises(fleet.FleetError, match="FLEET_TEST_PASSWORD, which is not set"):
        fleet.sudo_password(
            fleet.Fleet("demo"),
            fleet.check_spec({"hosts": [host(user="ops", sudo_password_env="FLEET_TEST_PASSWORD")]}).hosts[0],
        )


def test_blanks_in_the_cache_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_FLEET_CACHE", str(tmp_path / "with blank"))
    entry = render({"hosts": [host()]})["hosts"]["a-01"]
    words = shlex.split(entry["ansible_ssh_common_args"])
    assert f'UserKnownHostsFile="{tmp_path}/with blank/fleets/demo/known_hosts"' in words


@pytest.mark.parametrize(
    ("given", "expected"), [("inv", "inv/hosts.yml"), ("inv/hosts.yml", "inv/hosts.yml"), ("a/b.yaml", "a/b.yaml")]
)
def test_inventory_is_a_folder_or_a_file(given: str, expected: str, tmp_path: Path) -> None:
    assert fleet.inventory_file(tmp_path / given) == tmp_path / expected


# --------------------------------------------------------------------------------------------------------------------
# The rest


def test_container_as_both_runtimes_describe_it() -> None:
    entry = {
        "Name": "/demo-a",  # docker puts a slash before it
        "State": {"Status": "running", "Running": True},
        "Config": {
            "Image": "localhost/dflash-fleet-host:bookworm-0",
            "Labels": {fleet.LABEL: "demo", fleet.LABEL_HOST: "a", fleet.LABEL_ADDRESS: "10.213.4.10"},
        },
    }
    found = fleet.Container.from_inspect(entry)
    assert (found.name, found.host, found.role, found.running) == ("demo-a", "a", "host", True)


def test_image_reference_follows_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("packages.txt", "setup.sh", "boot.sh"):
        (tmp_path / name).write_text((fleet.HOST_FILES / name).read_text())
    monkeypatch.setattr(fleet, "HOST_FILES", tmp_path)
    before = fleet.image_reference("bookworm")
    assert before.startswith("localhost/dflash-fleet-host:bookworm-")
    assert before != fleet.image_reference("trixie")
    (tmp_path / "packages.txt").write_text("# a comment\n" + (tmp_path / "packages.txt").read_text())
    assert fleet.image_reference("bookworm") == before
    (tmp_path / "boot.sh").write_text("exit 1\n")
    assert fleet.image_reference("bookworm") != before


class Host:
    """A host that answers the sandbox check the way a good or a broken one does."""

    def __init__(self, enforced: bool) -> None:
        self.enforced = enforced
        self.secret = ""

    def __call__(self, *command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        text = " ".join(command)
        self.secret = stdin or self.secret
        code, out, err = 0, "", ""
        if "ProtectSystem=strict" in text and "touch" in text and self.enforced:
            code, err = 1, "touch: cannot touch '/usr/x': Read-only file system"
        elif "CREDENTIALS_DIRECTORY" in text:
            out = f"daemon\n{self.secret}" if self.enforced else "daemon\n"
        elif "cat /run/" in text or "setpriv" in text:
            code = 1
        elif "PrivateNetwork" in text or "SystemCallFilter" in text:
            code = int(self.enforced == ("SystemCallFilter" in text))
        return subprocess.CompletedProcess(command, code, out, err)


def test_sandbox_check_tells_enforced_from_ignored() -> None:
    good = fleet.check_sandbox(Host(enforced=True), "s3cret")
    assert all(row["ok"] for row in good)
    broken = {row["check"]: row["ok"] for row in fleet.check_sandbox(Host(enforced=False), "s3cret")}
    assert broken["ProtectSystem=strict: /usr is read-only to root"] is False
    assert broken["LoadCredential: readable by the unit's user"] is False


def test_errors_are_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert fleet.main(["up", "demo", "--spec", str(tmp_path / "none.yml"), "--inventory", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("fleet.py: cannot read the fleet's specification")
    assert captured.out == ""


def test_an_inventory_of_somebody_else_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all: {}\n")
    (tmp_path / "spec.yml").write_text(yaml.safe_dump({"hosts": [host()]}))
    assert fleet.main(["up", "demo", "--spec", str(tmp_path / "spec.yml"), "--inventory", str(tmp_path)]) == 1
    assert "was not written for the fleet demo" in capsys.readouterr().err
    assert (tmp_path / "hosts.yml").read_text() == "all: {}\n"
