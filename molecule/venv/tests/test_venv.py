"""Environments on a host without a route out: whatever interrupts an installation, the next run ends as a clean one."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import controller
import faults
import pytest
from faults import background, sh

sys.path.insert(0, str(controller.ROOT / "rehearsal"))
import hub
import models

CONVERGE = "molecule/venv/converge.yml"
ROOT = "/var/lib/sglang"
VENVS = f"{ROOT}/venvs"
# Bytecode and the mark hold times.
TIMES = r"\.pyc$|^\.complete$"


def tree(host, folder):
    return faults.tree(host, folder, TIMES)


def install(*arguments, rc=0, **settings):
    return controller.play(__file__, CONVERGE, "-e", json.dumps(settings), *arguments, rc=rc)


def environments(host):
    """{release: folder} of the engines' complete environments."""
    found = {}
    for text in re.findall(r"\{.*?\n\}", sh(host, f"sh -c 'cat {VENVS}/*/.complete'"), re.S):
        mark = json.loads(text)
        if mark["version"]:  # the hub client's has none
            found[mark["version"].split("+")[0]] = f"{VENVS}/{mark['id']}"
    return found


def changed(output):
    return faults.changed(output, "host-12")


def test_engine_answers(host):
    folder = environments(host)["0.5.11"]
    assert "--speculative-algorithm" in sh(host, f"{folder}/bin/python -m sglang.launch_server --help")


@pytest.mark.parametrize("moment", ["made", "installing", "before the mark"])
def test_killed_installation_ends_as_a_clean_one(host, moment):
    folder = environments(host)["0.5.11"]
    clean = tree(host, folder)
    sh(host, f"rm -rf {folder}")
    waiting = {
        "made": f"test -e {folder}/pyvenv.cfg",
        "installing": f"ls {folder}/lib/python3*/site-packages/*",
        "before the mark": f"ls {folder}/lib/python3*/site-packages/sglang/__pycache__",
    }[moment]
    # When that is there, everything of the installation dies at once: the module and what it runs.
    background(host, "killer", f"while ! {waiting} >/dev/null 2>&1; do sleep 0.01; done\npkill -9 -f python\n")
    controller.play(__file__, CONVERGE, rc=None)
    assert not host.file(f"{folder}/.complete").exists, "the kill came too late to prove anything"
    output = install()
    assert changed(output) == 1
    assert tree(host, folder) == clean


def test_upgrade_and_back_leave_the_other_environment_alone(host):
    first = environments(host)["0.5.11"]
    before, mark = tree(host, first), sh(host, f"cat {first}/.complete")
    assert changed(install(sglang_version="0.5.20")) == 1
    both = environments(host)
    assert set(both) == {"0.5.11", "0.5.20"}
    assert both["0.5.20"] != first
    assert tree(host, first) == before
    # Back: it is still there, so there is nothing to install.
    assert changed(install(sglang_version="0.5.11")) == 0
    assert sh(host, f"cat {first}/.complete") == mark


def test_disk_that_is_too_small_is_told_beforehand(host):
    sh(host, "mkdir -p /mnt/small && mount -t tmpfs -o size=3m tmpfs /mnt/small")
    try:
        output = install(sglang_root="/mnt/small", rc=2)
        assert re.search(r"/mnt/small/venvs/\w+ needs .* and .* are free", output), output
        assert sh(host, "find /mnt/small -type f") == ""
    finally:
        sh(host, "umount /mnt/small")


def test_disk_that_fills_up_in_between_leaves_what_is_there(host):
    old = environments(host)["0.5.11"]
    running = "sglang-canary"
    sh(host, "mkdir -p /mnt/full && mount -t tmpfs -o size=120m tmpfs /mnt/full")
    try:
        assert changed(install(sglang_root="/mnt/full")) == 1
        (first,) = sh(host, "ls -d /mnt/full/venvs/*/.complete").split()
        folder = os.path.dirname(first)
        before = tree(host, folder)
        sh(host, f"systemd-run --unit={running} --collect {folder}/bin/python -c 'import time; time.sleep(600)'")
        pid = sh(host, f"systemctl show -P MainPID {running}")
        # As soon as the second environment is begun, somebody else takes the rest of the disk.
        begun = "[ $(ls -d /mnt/full/venvs/*/pyvenv.cfg | wc -l) -gt 1 ]"
        background(host, "filler", f"while ! {begun}; do sleep 0.01; done\ncat /dev/zero > /mnt/full/filler\n")
        output = install(sglang_root="/mnt/full", sglang_version="0.5.20", rc=2)
        assert "disk is full" in output or "No space left on device" in output, output
        assert tree(host, folder) == before
        assert sh(host, f"systemctl show -P MainPID {running}") == pid
        # With room again, the same command goes through, and the interrupted half is gone.
        sh(host, "rm /mnt/full/filler")
        assert changed(install(sglang_root="/mnt/full", sglang_version="0.5.20")) == 1
        assert len(sh(host, "ls -d /mnt/full/venvs/*/.complete").split()) == 2
        assert len(sh(host, "ls -d /mnt/full/venvs/*/").split()) == 2
    finally:
        with host.sudo():
            host.run(f"systemctl stop {running} filler")
        sh(host, "umount /mnt/full")
    assert environments(host)["0.5.11"] == old


def test_pruning_spares_what_units_and_releases_name(host):
    install(sglang_version="0.5.20")
    folders = environments(host)
    release = f"{ROOT}/main/releases/1/release.json"
    sh(host, f"mkdir -p {os.path.dirname(release)} {VENVS}/0123456789abcdef")  # the last is an interrupted one
    sh(host, f"echo '{{\"venv\": \"{folders['0.5.11']}\"}}' > {release}")
    try:
        output = install(sglang_version="0.5.23", sglang_venv_keep=0)
        assert changed(output) == 1
        left = environments(host)
        assert set(left) == {"0.5.11", "0.5.23"}
        assert not host.file(f"{VENVS}/0123456789abcdef").exists
        # Named by nothing any more, it goes with the next installation.
        sh(host, f"rm -r {ROOT}/main")
        unit = "/etc/systemd/system/sglang-main-tp8.service"
        sh(host, f"printf '[Service]\\nExecStart={left['0.5.23']}/bin/python -V\\n' > {unit}")
        install(sglang_version="0.5.20", sglang_venv_keep=0)
        assert set(environments(host)) == {"0.5.20", "0.5.23"}
    finally:
        sh(host, f"rm -rf {ROOT}/main /etc/systemd/system/sglang-main-tp8.service")
        install()


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The interpreter that runs this test as a relocatable archive; the host has another version of its own."""
    home = Path(sys.base_prefix)
    target = tmp_path_factory.mktemp("python") / "python.tar.gz"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    skipped = re.compile(r"/(test|tests|idlelib|ensurepip|site-packages|__pycache__|config-[^/]*|tkinter)(/|$)|\.a$")
    tree = target.with_name("tree")
    for part in ("bin", "lib"):
        (tree / part).mkdir(parents=True)
    # A build with a shared library names its place; relocatable ones name it from where they are.
    program = (home / "bin" / f"python{version}").read_bytes()
    place = f"{home}/lib".encode()
    program = program.replace(place + b"\0", b"$ORIGIN/../lib".ljust(len(place), b"\0") + b"\0")
    (tree / "bin" / f"python{version}").write_bytes(program)
    (tree / "bin" / f"python{version}").chmod(0o755)
    (tree / "bin/python3").symlink_to(f"python{version}")
    for library in (home / "lib").glob("libpython*.so*"):
        shutil.copy(library, tree / "lib", follow_symlinks=False)

    def needed(entry):
        return None if skipped.search("/" + entry.name) else entry

    with tarfile.open(target, "w:gz", compresslevel=1) as packed:
        packed.add(tree, "python")
        packed.add(home / "lib" / f"python{version}", f"python/lib/python{version}", filter=needed)
    return target


def test_interpreter_from_an_address_that_only_the_controller_reaches(host, archive):
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    mirror = serve(archive.parent)
    address = f"http://127.0.0.1:{mirror.server_address[1]}/{archive.name}"
    wanted = {"sglang_venv_python_archive": address, "sglang_venv_python_sha256": digest}
    wanted["sglang_venv_python"] = "/nowhere"
    predicted = install("--check", sglang_version="0.5.23", **wanted)
    assert changed(predicted) == 1 or "0.5.23" in environments(host)
    output = install("--diff", **wanted, sglang_root="/var/lib/brought")
    assert changed(output) == 1
    (mark,) = sh(host, "ls -d /var/lib/brought/venvs/*/.complete").split()
    made = json.loads(sh(host, f"cat {mark}"))
    assert made["interpreter"] == f"/var/lib/brought/venvs/.python-{digest[:16]}/bin/python3"
    assert made["python"] == sys.version.split()[0]
    assert sh(host, "/usr/bin/python3 -V") != f"Python {made['python']}\n"
    assert "--model-path" in sh(host, f"{os.path.dirname(mark)}/bin/python -m sglang.launch_server --help")
    # By anybody, for the engine's user is one.
    nobody = "setpriv --reuid=nobody --regid=nogroup --clear-groups"
    sh(host, f"{nobody} {os.path.dirname(mark)}/bin/python -c 'import sglang'")
    assert changed(install(**wanted, sglang_root="/var/lib/brought")) == 0
    # It is in the controller's cache from now on.
    mirror.shutdown()
    mirror.server_close()
    assert changed(install(**wanted, sglang_root="/var/lib/brought-again")) == 1


def test_interpreter_with_another_hash_is_refused(host, archive):
    output = install(
        sglang_venv_python_archive=str(archive), sglang_venv_python_sha256="0" * 64, sglang_root="/var/lib/wrong", rc=2
    )
    assert "sglang_venv_python_sha256" in output
    assert not host.file("/var/lib/wrong").exists


class Proxy(threading.Thread):
    """An HTTP proxy with CONNECT on the fleet's network that knows two names nobody else knows; it writes down each."""

    def __init__(self, address, names):
        super().__init__(daemon=True)
        self.names, self.asked = names, []
        self.socket = socket.create_server((address, 0))
        self.url = f"http://{address}:{self.socket.getsockname()[1]}"

    def run(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        head = b""
        while b"\r\n\r\n" not in head:
            more = connection.recv(65536)
            if not more:
                return
            head += more
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        name = target.split(":")[0] if method == "CONNECT" else target.split("/")[2].split(":")[0]
        self.asked.append((method, target))
        if name not in self.names:
            connection.sendall(b"HTTP/1.1 502 Unknown\r\nContent-Length: 0\r\n\r\n")
            connection.close()
            return
        # A client that refuses the certificate hangs up.
        hung_up = contextlib.suppress(ConnectionError)
        with hung_up, contextlib.closing(connection), socket.create_connection(self.names[name]) as there:
            if method == "CONNECT":
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                path = "/" + target.split("/", 3)[3]
                head = head.replace(target.encode(), path.encode(), 1)
                there.sendall(re.sub(rb"(?i)\r\n(proxy-)?connection:[^\r]*", b"", head).replace(
                    b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            while True:
                ready, _, _ = select.select([connection, there], [], [], 30)
                if not ready:
                    return
                for one in ready:
                    data = one.recv(65536)
                    if not data:
                        return
                    (there if one is connection else connection).sendall(data)


def serve(folder, context=None):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, directory=str(folder), **options)

        def log_message(self, *_arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def outside(tmp_path, host):
    """An index, an apt repository and a hub with certificates of a private authority, and a proxy as the only way."""
    (tmp_path / "san").write_text("subjectAltName=DNS:index.test,DNS:apt.test,DNS:hub.test\n")
    request = ["req", "-newkey", "rsa:2048", "-nodes"]
    openssl(
        tmp_path, *request, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
        "-subj", "/CN=Private authority",
        "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign",
    )
    openssl(tmp_path, *request, "-keyout", "index.key", "-out", "index.csr", "-subj", "/CN=index.test")
    openssl(
        tmp_path, "x509", "-req", "-in", "index.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
        "-out", "index.pem", "-days", "2", "-extfile", "san",
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "index.pem", tmp_path / "index.key")
    cache = Path(os.environ.get("DFLASH_FLEET_CACHE") or "~/.cache/dflash-fleet").expanduser()
    for wheel in (cache / "wheelhouses/hf-client").glob("*.whl"):
        project = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        folder = tmp_path / "www/simple" / project
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, folder / wheel.name)
        links = "".join(f'<a href="{one.name}">{one.name}</a>' for one in sorted(folder.glob("*.whl")))
        (folder / "index.html").write_text(f"<html><body>{links}</body></html>")
    built = tmp_path / "package"
    (built / "DEBIAN").mkdir(parents=True)
    os.chmod(built, 0o755)
    (built / "DEBIAN/control").write_text(
        "Package: through-the-proxy\nVersion: 1\nArchitecture: all\n"
        "Maintainer: tests <t@example.invalid>\nDescription: test\n"
    )
    (tmp_path / "apt").mkdir()
    subprocess.run(["dpkg-deb", "--build", str(built), str(tmp_path / "apt")], check=True, capture_output=True)
    listing = subprocess.run(["dpkg-scanpackages", "-m", "."], cwd=tmp_path / "apt", check=True, capture_output=True)
    (tmp_path / "apt/Packages").write_bytes(listing.stdout)
    index, apt = serve(tmp_path / "www", context), serve(tmp_path / "apt", context)
    models.write(tmp_path / "repositories", {models.TARGET: models.build()[models.TARGET]})
    weights = hub.serve(tmp_path / "repositories")
    weights.socket = context.wrap_socket(weights.socket, server_side=True)
    threading.Thread(target=weights.serve_forever, daemon=True).start()
    address = sh(host, "hostname -I").split()[0].rsplit(".", 1)[0] + ".1"
    there = {"index.test": index, "apt.test": apt, "hub.test": weights}
    proxy = Proxy(address, {name: server.server_address for name, server in there.items()})
    proxy.start()
    proxy.certificate = tmp_path / "ca.pem"
    yield proxy
    proxy.socket.close()
    for server in there.values():
        server.shutdown()
    sh(host, "rm -f /usr/local/share/ca-certificates/dflash-fleet.crt && update-ca-certificates --fresh")


def through(proxy, **more):
    """The variables of the way out."""
    return {"sglang_http_proxy": proxy.url, "sglang_https_proxy": proxy.url, **more}


def reached(proxy):
    """What was asked for since the last time."""
    asked = {target for method, target in proxy.asked if method == "CONNECT"}
    proxy.asked.clear()
    return asked


def test_pip_goes_through_the_proxy_and_trusts_the_private_authority(host, outside):
    sh(host, "printf '[global]\\nindex-url = https://index.test/simple\\n' > /etc/pip.conf")
    settings = {"sglang_root": "/var/lib/proxied", "sglang_venv_index": "index"}
    play = "molecule/venv/client.yml"
    try:
        # Without the authority the certificate is refused, and without the proxy there is no way at all.
        output = controller.play(__file__, play, "-e", json.dumps(through(outside, **settings)), rc=2)
        assert re.search("certificate|CERTIFICATE", output), output
        output = controller.play(__file__, play, "-e", json.dumps(settings), rc=2)
        assert "package index does not answer" in output or "No matching distribution" in output, output
        reached(outside)
        trusted = through(outside, **settings, sglang_ca_certificate=str(outside.certificate))
        controller.play(__file__, play, "-e", json.dumps(trusted))
        assert reached(outside) == {"index.test:443"}
        (mark,) = sh(host, "ls -d /var/lib/proxied/venvs/*/.complete").split()
        sh(host, f"{os.path.dirname(mark)}/bin/python -c 'import huggingface_hub'")
    finally:
        sh(host, "rm -f /etc/pip.conf")


def test_apt_goes_through_the_proxy_and_trusts_the_private_authority(host, outside):
    sh(host, "echo 'deb [trusted=yes] https://apt.test/ ./' > /etc/apt/sources.list.d/proxied.list")
    settings = {"sglang_venv_packages": {"cpu": [], "cuda": [], "rehearsal": ["through-the-proxy"]}}
    try:
        output = install(**through(outside, **settings), rc=2)
        assert "through-the-proxy" in output
        assert reached(outside) == {"apt.test:443"}
        assert not host.package("through-the-proxy").is_installed
        install(**through(outside, **settings, sglang_ca_certificate=str(outside.certificate)))
        assert reached(outside) == {"apt.test:443"}
        assert host.package("through-the-proxy").is_installed
    finally:
        sh(host, "rm -f /etc/apt/sources.list.d/proxied.list; dpkg --purge through-the-proxy; true")


def test_the_hub_client_goes_through_the_proxy_and_trusts_the_private_authority(host, outside):
    revision = models.revision_of(models.build()[models.TARGET])
    settings = {
        "sglang_model": models.TARGET, "sglang_model_revision": revision, "sglang_drafter": "none",
        "model_weights_endpoint": "https://hub.test", "gpu_host_model_sizes_gb": {},
    }
    play = "molecule/venv/weights.yml"
    folder = f"{ROOT}/models/{models.TARGET.replace('/', '--')}/{revision}"
    try:
        output = controller.play(__file__, play, "-e", json.dumps(through(outside, **settings)), rc=2)
        assert re.search("certificate|CERTIFICATE", output), output
        assert reached(outside) == {"hub.test:443"}
        controller.play(__file__, play, "-e", json.dumps(settings), rc=2)
        assert reached(outside) == set()
        assert not host.file(folder).exists
        trusted = through(outside, **settings, sglang_ca_certificate=str(outside.certificate))
        controller.play(__file__, play, "-e", json.dumps(trusted))
        assert reached(outside) == {"hub.test:443"}
        sha = hashlib.sha256(models.build()[models.TARGET]["model.safetensors"]).hexdigest()
        assert sh(host, f"sha256sum {folder}/model.safetensors").split()[0] == sha
    finally:
        sh(host, f"rm -rf {ROOT}/models")
