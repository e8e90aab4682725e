#!/usr/bin/python3
"""Start the SGLang engine of a unit: check what a load of minutes would only find out at its end, then exec it.

Usage (in ExecStart=): supervisor.py [--host ADDRESS --port N --unit UNIT ...] -- PYTHON -m sglang.launch_server ...
                        supervisor.py probe OPTIONS...    the prober that it starts beside the engine
                        supervisor.py report OPTIONS...   the reporter of ExecStopPost=
                        supervisor.py measure OPTIONS...  what the host says to Prometheus

* The port is checked first: an engine that cannot bind it says so only after the whole load, and then prints its
  ready line all the same, because its warm-up asked the other server (seen in SGLang 0.5.23).
* An API key comes from the systemd credential `api_key` (LoadCredential=, systemd.exec(5)) and goes to the engine in a
  0600 file given by `--config FILE` (two words: `--config=FILE` is silently ignored by every release). No release
  redacts the key in its log, so the engine's logging is configured with a formatter that does.

* Where systemd listens (Type=notify), a prober is started as a detached child: it says when the engine is ready, how
  far it is, and that it still generates (module `prober`).

Then the engine replaces this process (execve), so that systemd's main process is the engine. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EX_CONFIG = 78  # sysexits.h; systemd.exec(5) names it CONFIG


def port_holder(host: str, port: int) -> OSError | None:
    """The error that an engine would get for binding host:port now, or None when the port is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return None
        except OSError as error:
            return error


def write_private(path: Path, text: str) -> None:
    """Write text to a file that was never readable by anyone else."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text)


def with_api_key(command: list[str], environment: dict[str, str]) -> list[str]:
    """The command and environment for an engine with an API key; unchanged where the unit has no such credential."""
    credentials = environment.get("CREDENTIALS_DIRECTORY")
    key_file = Path(credentials, "api_key") if credentials else None
    if key_file is None or not key_file.is_file():
        return command
    runtime = Path(environment["RUNTIME_DIRECTORY"].split(":")[0])
    config = runtime / "engine.yaml"
    # A JSON string is a double-quoted YAML scalar: nothing in the key can turn into another YAML type.
    write_private(config, f"api-key: {json.dumps(key_file.read_text(encoding='utf-8').strip())}\n")

    sys.path.insert(0, str(HERE))
    from dflash_fleet import redacting_logs

    logging_config = runtime / "logging.json"
    write_private(logging_config, json.dumps(redacting_logs.logging_config()))
    environment["SGLANG_LOGGING_CONFIG_PATH"] = str(logging_config)
    environment["DFLASH_FLEET_REDACT_FILE"] = str(key_file)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), environment.get("PYTHONPATH")]))
    return [*command, "--config", str(config)]


def start_prober(options: list[str], environment: dict[str, str]) -> None:
    """Start the prober as nobody's child, so that an engine that ends its children does not end it, nor wait for it.

    Its output goes to the engine's own streams: only so can it make journald store an unfinished progress bar.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    # From here on nothing may return into the engine's start, whatever happens.
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.execve(sys.executable, [sys.executable, "-I", str(Path(__file__).resolve()), "probe", *options], environment)
    finally:
        os._exit(1)


def main(arguments: list[str]) -> int:
    """Check the port, add the key, start the prober, become the engine."""
    if arguments[:1] == ["probe"]:
        sys.path.insert(0, str(HERE))
        from dflash_fleet import prober

        return prober.main(arguments[1:])
    if arguments[:1] == ["report"]:
        sys.path.insert(0, str(HERE))
        from dflash_fleet import reports

        return reports.main(arguments[1:])
    if arguments[:1] == ["measure"]:
        sys.path.insert(0, str(HERE))
        from dflash_fleet import measures

        return measures.main(arguments[1:])
    own, command = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    options = dict(zip(own[::2], own[1::2]))
    host, port = options.get("--host", ""), int(options.get("--port", "0"))
    if port:
        error = port_holder(host, port)
        if error is not None:
            print(f"[Errno {error.errno}] error while attempting to bind on address ('{host}', {port}): "
                  f"{(error.strerror or '').lower()}; the engine was not started", file=sys.stderr, flush=True)
            return EX_CONFIG
    environment = dict(os.environ)
    command = with_api_key(command, environment)
    if options.get("--unit") and "NOTIFY_SOCKET" in environment:
        start_prober(own, dict(os.environ))
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        environment.pop(name, None)  # the prober speaks for the engine; a library in it must not
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
