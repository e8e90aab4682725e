"""The formatter that keeps keys out of SGLang's log: the same lines, less the secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_fleet import redacting_logs

FILE = Path(redacting_logs.__file__)
KEY = "CANARY\"key$1 'with/x%41\\é"

# What SGLang does in each process (srt/utils/common.py, the same from 0.5.11 to 0.5.23), then what programs do with it.
ENGINE = """
import json, logging, logging.config, os, sys, threading
def configure_logger(server_args, prefix=""):
    if path := os.getenv("SGLANG_LOGGING_CONFIG_PATH"):
        logging.config.dictConfig(json.load(open(path)))
        return
    ms = ".%(msecs)03d" if os.getenv("SGLANG_LOG_MS") else ""
    format = f"[%(asctime)s{ms}{prefix}] %(message)s"
    level = getattr(logging, server_args.log_level.upper())
    logging.basicConfig(level=level, format=format, datefmt="%Y-%m-%d %H:%M:%S", force=True)
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
class Args:
    log_level = os.environ.get("LEVEL", "info")
key = open(os.environ["KEY_FILE"], encoding="utf-8").read().strip()
logging.getLogger("already").setLevel(logging.DEBUG)
configure_logger(Args(), prefix=" TP3 EP3")
log = logging.getLogger("sglang.srt.entrypoints.engine")
log.debug("debug line")
log.info("server_args=%s", {"api_key": key})
log.info(f"api_key={key!r} json={json.dumps(key)} plain=" + key)
log.warning("half %s", key[:6])
logging.getLogger("already").info("an existing logger speaks")
logging.getLogger("httpx").info("not this")
try:
    raise ValueError("wrong key " + key)
except ValueError:
    log.exception("caught")
"""


def run(tmp_path: Path, code: str, redact: bool = True, **environment: str) -> list[str]:
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n", encoding="utf-8")
    folder = tmp_path / "dflash_fleet"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").touch()
    (folder / FILE.name).write_text(FILE.read_text())
    environment["KEY_FILE"] = str(key_file)
    if redact:
        config = tmp_path / "logging.json"
        config.write_text(json.dumps(redacting_logs.logging_config()))
        environment |= {"SGLANG_LOGGING_CONFIG_PATH": str(config), "DFLASH_FLEET_REDACT_FILE": str(key_file)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def stamped(line: str) -> str:
    """A line with its time replaced: [2026-11-30 01:02:03 TP0] text."""
    return "[T" + line[20:] if line[:3] == "[20" else line


@pytest.mark.parametrize("environment", [{}, {"LEVEL": "debug"}, {"LEVEL": "warning"}])
def test_same_lines_less_the_key(tmp_path, environment):
    plain = [stamped(line) for line in run(tmp_path, ENGINE, redact=False, **environment)]
    redacted = [stamped(line) for line in run(tmp_path, ENGINE, **environment)]
    assert any("CANARY" in line for line in plain)
    spelled = redacting_logs.Redactor(redacting_logs.spellings(KEY))
    assert redacted == [spelled(line) for line in plain]
    for line in redacted:
        assert 'CANARY"' not in line
        assert "CANARY\\" not in line
    # No more than the secret goes: its first letters alone are no secret.
    assert "[T TP3 EP3] half CANARY" in redacted


def test_milliseconds_when_asked(tmp_path):
    line = run(tmp_path, ENGINE, SGLANG_LOG_MS="1")[0]
    assert line[20] == "."
    assert line[24:].startswith(" TP3 EP3] ")


def test_other_handlers_and_uncaught_exceptions_are_covered(tmp_path):
    code = ENGINE + (
        "access = logging.StreamHandler()\n"
        "access.setFormatter(logging.Formatter('ACCESS %(message)s'))\n"
        "other = logging.getLogger('uvicorn.access'); other.addHandler(access); other.propagate = False\n"
        "other.info('GET /?key=%s', __import__('urllib.parse').parse.quote(key, safe=''))\n"
        "t = threading.Thread(target=lambda: 1 / len(key[99:]) if False else (_ for _ in ()).throw(KeyError(key)))\n"
        "t.start(); t.join()\n"
        "raise RuntimeError(key)\n"
    )
    lines = run(tmp_path, code)
    assert "ACCESS GET /?key=***" in lines
    assert "RuntimeError: ***" in lines
    assert any(line.startswith("KeyError: ") and "***" in line for line in lines)
    assert any(line.startswith("Exception in thread Thread-1") for line in lines)
    assert not [line for line in lines if "CANARY" in line and "half" not in line]


def test_named_but_unreadable_file_stops_the_engine(tmp_path):
    lines = run(
        tmp_path, "import os; os.unlink(os.environ['KEY_FILE'])\n" + ENGINE.replace("key = open", "key = 'x' #")
    )
    assert not any("server_args" in line for line in lines)
    assert "FileNotFoundError" in "".join(lines) or "ValueError" in "".join(lines)


def test_without_secrets_only_the_format_is_ours(monkeypatch):
    monkeypatch.delenv("DFLASH_FLEET_REDACT_FILE", raising=False)
    assert redacting_logs.read_secrets(None) == []
    assert redacting_logs.caller_settings(sys._getframe()) == ("", None)


def test_several_secrets_longest_first(tmp_path):
    (tmp_path / "keys").write_text("abc\n\nabcdef\n")
    redact = redacting_logs.Redactor(redacting_logs.read_secrets(str(tmp_path / "keys")))
    assert redact("abcdef abc xabcx") == "*** *** x***x"


def test_spellings_of_a_plain_key():
    assert redacting_logs.spellings("sk-abc_123") == ["sk-abc_123"]


def test_config_is_json_and_disables_nothing():
    config = json.loads(json.dumps(redacting_logs.logging_config("redacting_logs")))
    assert config["disable_existing_loggers"] is False
    assert config["formatters"]["sglang"]["()"] == "redacting_logs.RedactingFormatter"
    assert "level" not in config["root"]


def test_imports_nothing_of_the_package():
    # The engine's interpreter has only this file on its path.
    code = f"import runpy; runpy.run_path({str(FILE)!r})['logging_config']()"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
