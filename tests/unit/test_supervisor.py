"""The supervisor: it becomes the engine, refuses a taken port, and keeps the key out of argv and environment."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CANARY = 'sk-canary-"quoted": 0123'
# What the engine sees: its arguments and environment, as JSON.
ENGINE = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getpid()]))"


@pytest.fixture
def installed(tmp_path):
    """The supervisor as role sglang_service lays it out."""
    folder = tmp_path / "0.0.1"
    folder.mkdir()
    (folder / "supervisor.py").write_text((ROOT / "module_utils/dflash_fleet/supervisor.py").read_text())
    (folder / "dflash_fleet").symlink_to(ROOT / "module_utils/dflash_fleet")
    return folder / "supervisor.py"


def run(supervisor, *arguments, **environment):
    """Run it under the interpreter and options of the unit; returns the process and its PID."""
    command = [
        sys.executable,
        "-I",
        str(supervisor),
        *arguments,
        "--",
        sys.executable,
        "-c",
        ENGINE,
        "--model-path",
        "/m",
    ]
    process = subprocess.Popen(
        command,
        env={"PATH": os.environ["PATH"], **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(timeout=30)
    return process, out, err


def test_it_becomes_the_engine(installed):
    process, out, _ = run(installed)
    arguments, _, pid = json.loads(out)
    assert arguments == ["--model-path", "/m"]
    assert pid == process.pid


def test_a_taken_port_is_refused_before_the_load(installed):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process, out, err = run(installed, "--host", "127.0.0.1", "--port", str(port))
    assert process.returncode == 78
    assert out == ""
    assert f"('127.0.0.1', {port}): address already in use" in err


def test_a_free_port_is_left_free(installed):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process, out, _ = run(installed, "--host", "127.0.0.1", "--port", str(port))
    assert process.returncode == 0
    assert json.loads(out)[0] == ["--model-path", "/m"]


def test_the_key_is_in_a_private_file_only(installed, tmp_path):
    credentials, runtime = tmp_path / "credentials", tmp_path / "run"
    credentials.mkdir()
    runtime.mkdir()
    (credentials / "api_key").write_text(CANARY + "\n")
    process, out, err = run(installed, CREDENTIALS_DIRECTORY=str(credentials), RUNTIME_DIRECTORY=str(runtime))
    assert process.returncode == 0, err
    arguments, environment, _ = json.loads(out)
    config = runtime / "engine.yaml"
    assert arguments[-2:] == ["--config", str(config)]
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert config.read_text() == f"api-key: {json.dumps(CANARY)}\n"
    assert "canary" not in out + err
    # The engine's own log is formatted by the redacting formatter.
    logging_config = json.loads(Path(environment["SGLANG_LOGGING_CONFIG_PATH"]).read_text())
    assert logging_config["version"] == 1
    assert environment["DFLASH_FLEET_REDACT_FILE"] == str(credentials / "api_key")
    assert str(installed.parent) in environment["PYTHONPATH"]


def test_where_systemd_listens_a_prober_speaks_and_the_engine_cannot(installed, tmp_path):
    """The prober finds no such unit here and says so: by the socket, in one line, while the engine has gone its way."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        process, out, err = run(
            installed, "--unit", "sglang-nobody-ep8.service", "--port", "0",
            NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="1000000", WATCHDOG_PID="1",
        )  # fmt: skip
        assert process.returncode == 0, err
        _, environment, pid = json.loads(out)
        assert pid == process.pid
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(environment)
        assert listener.recv(4096).decode().startswith("STATUS=the prober failed (BusError")
    assert "Traceback" not in err


def test_without_systemd_there_is_no_prober(installed):
    process, _, err = run(installed, "--unit", "sglang-nobody-ep8.service", "--port", "0")
    assert (process.returncode, err) == (0, "")
