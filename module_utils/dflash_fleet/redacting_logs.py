"""Keeps the API key out of what SGLang logs, and changes nothing else about it.

Every SGLang release prints its arguments, key included, as its first line (0.5.20 and later also the whole command).
The one switch it has is SGLANG_LOGGING_CONFIG_PATH: a JSON file for logging.config.dictConfig, which then replaces its
own set-up in every process. `logging_config()` is that file's content; its formatter writes what SGLang would have
written, the rank's prefix included, less the secrets of the file named by DFLASH_FLEET_REDACT_FILE (one a line).

This module is imported by the engine's interpreter through PYTHONPATH, so it uses the standard library alone and
nothing of this package. Read against SGLang 0.5.11 to 0.5.23: `configure_logger(server_args, prefix)` is the same in
all of them.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shlex
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import Any
from urllib.parse import quote

SECRETS_VARIABLE = "DFLASH_FLEET_REDACT_FILE"
MASK = "***"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def spellings(secret: str) -> list[str]:
    """The ways in which a secret appears in a log: as it is, in a repr, in JSON, in a shell command, in a URL."""
    found = {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], shlex.quote(secret), quote(secret, safe="")}
    found.add(json.dumps(secret, ensure_ascii=False)[1:-1])
    # Longest first: a quoted spelling holds the plain one, and half of it would stay behind.
    return sorted(found, key=len, reverse=True)


def read_secrets(path: str | None) -> list[str]:
    """The spellings to hide. A file that is named and cannot be read stops the engine: better than a key in the log."""
    if not path:
        return []
    with open(path, encoding="utf-8") as stream:
        secrets = [line.strip() for line in stream]
    return sorted({one for secret in secrets if secret for one in spellings(secret)}, key=len, reverse=True)


class Redactor:
    """Replaces secrets in text."""

    def __init__(self, secrets: list[str]) -> None:
        self.secrets = secrets

    def __call__(self, text: str) -> str:
        for secret in self.secrets:
            if secret in text:
                text = text.replace(secret, MASK)
        return text


def caller_settings(frame: FrameType | None) -> tuple[str, str | None]:
    """`prefix` and log level of the configure_logger call that we are inside of; ("", None) outside of one."""
    while frame is not None:
        if frame.f_code.co_name == "configure_logger" and "server_args" in frame.f_locals:
            level = getattr(frame.f_locals["server_args"], "log_level", None)
            return str(frame.f_locals.get("prefix") or ""), level if isinstance(level, str) else None
        frame = frame.f_back
    return "", None


class RedactingFormatter(logging.Formatter):
    """SGLang's line format with the secrets replaced. A factory for dictConfig ("()"): made anew in each process."""

    def __init__(self, secrets_file: str | None = None) -> None:
        prefix, level = caller_settings(sys._getframe(1))
        milliseconds = (
            ".%(msecs)03d" if os.environ.get("SGLANG_LOG_MS", "").lower() in ("true", "1", "yes", "y") else ""
        )
        # A percent sign in the prefix is text, not a field.
        prefix = prefix.replace("%", "%%")
        super().__init__(f"[%(asctime)s{milliseconds}{prefix}] %(message)s", DATE_FORMAT)
        self.redact = Redactor(read_secrets(secrets_file or os.environ.get(SECRETS_VARIABLE)))
        _do_what_dictconfig_skips(level)
        if self.redact.secrets:
            _guard_other_ways_out(self.redact)

    def formatException(self, ei: Any) -> str:  # the name is logging
        # The result is cached in the record, where another handler would take it from.
        return self.redact(super().formatException(ei))

    def format(self, record: logging.LogRecord) -> str:
        return self.redact(super().format(record))


def _do_what_dictconfig_skips(level: str | None) -> None:
    """The rest of SGLang's configure_logger, which returns early when a configuration file is given."""
    # The JSON names no level for the root logger, so this one stays.
    logging.getLogger().setLevel(getattr(logging, (level or "info").upper(), logging.INFO))
    if multiprocessing.parent_process() is not None:
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    flashinfer = getattr(sys.modules.get("flashinfer.jit.core"), "logger", None)
    if isinstance(flashinfer, logging.Logger):
        flashinfer.setLevel(logging.ERROR)


def _guard_other_ways_out(redact: Redactor) -> None:
    """Handlers with formatters of their own (uvicorn's access log) and uncaught exceptions, once in a process."""
    if getattr(logging.Handler.format, "redacts", False):
        return
    plain_format = logging.Handler.format

    def redacted_format(self: logging.Handler, record: logging.LogRecord) -> str:
        return redact(plain_format(self, record))

    redacted_format.redacts = True  # type: ignore[attr-defined]
    logging.Handler.format = redacted_format  # type: ignore[method-assign]

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(redact("".join(traceback.format_exception(kind, value, trace))))

    def thread_excepthook(raised: Any) -> None:
        if raised.exc_type is SystemExit:
            return
        name = raised.thread.name if raised.thread else threading.get_ident()
        text = "".join(traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback))
        sys.stderr.write(redact(f"Exception in thread {name}:\n{text}"))

    # Only where nobody else has set one: a program's own hook may do more than print.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = excepthook
    if threading.excepthook is getattr(threading, "__excepthook__", threading.excepthook):
        threading.excepthook = thread_excepthook


def logging_config(module: str = "dflash_fleet.redacting_logs") -> dict[str, Any]:
    """What SGLANG_LOGGING_CONFIG_PATH should hold, as JSON; `module` is this file's name on the engine's PYTHONPATH."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"sglang": {"()": f"{module}.RedactingFormatter"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "sglang", "stream": "ext://sys.stderr"}},
        # No level here: the formatter takes it from the engine's own --log-level.
        "root": {"handlers": ["stderr"]},
        "loggers": {
            "httpx": {"level": "WARNING"},
            "httpcore": {"level": "WARNING"},
            "huggingface_hub": {"handlers": [], "propagate": True},
        },
    }
