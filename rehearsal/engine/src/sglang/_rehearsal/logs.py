"""Log lines in the real shapes, each marked as a rehearsal.

The mark ` [rehearsal]` ends every message. Exceptions and tracebacks stay exact: diagnosis compares them.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
import time
from typing import Any

SUFFIX = " [rehearsal]"

log = logging.getLogger("sglang.srt.rehearsal")
_uvicorn = logging.getLogger("uvicorn.error")
_access = logging.getLogger("uvicorn.access")


def configure_logger(server_args: Any, prefix: str = "") -> None:
    """Formats as the real function of this name does.

    A formatter that SGLANG_LOGGING_CONFIG_PATH brings finds the rank in this frame's local `prefix`, which is why
    the name of the function and of its argument must stay.
    """
    path = os.environ.get("SGLANG_LOGGING_CONFIG_PATH")
    if path:
        if not os.path.exists(path):
            raise Exception(f"Setting SGLANG_LOGGING_CONFIG_PATH from env with {path} but it does not exist!")
        with open(path, encoding="utf-8") as stream:
            logging.config.dictConfig(json.load(stream))
        return
    basic(server_args.log_level, prefix)


def basic(level: str, prefix: str = "") -> None:
    """The built-in format; the main process has it before its arguments are resolved."""
    ms = ".%(msecs)03d" if os.environ.get("SGLANG_LOG_MS", "").lower() in ("1", "true", "yes", "y") else ""
    logging.basicConfig(
        level=getattr(logging, str(level).upper(), logging.INFO),
        format=f"[%(asctime)s{ms}{prefix}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )


def info(text: str) -> None:
    log.info("%s%s", text, SUFFIX)


def warning(text: str) -> None:
    log.warning("%s%s", text, SUFFIX)


def error(text: str) -> None:
    log.error("%s%s", text, SUFFIX)


def exact(text: str) -> None:
    """An exception's record: unmarked, because its words are evidence."""
    log.error("%s", text)


def raw(text: str) -> None:
    """What no logger writes: progress bars, the C++ side. One write."""
    sys.stderr.flush()
    os.write(2, text.encode())


class _UvicornFormatter(logging.Formatter):
    """`[time] INFO:     text`: uvicorn pads the level to nine characters."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = record.levelname + ":"
        return f"[{stamp}] {level:<9} {record.getMessage()}"


def configure_uvicorn(level: str) -> None:
    """The web server has handlers of its own: errors go to stderr, the access log to stdout."""
    for logger, stream in ((_uvicorn, sys.stderr), (_access, sys.stdout)):
        handler = logging.StreamHandler(stream)
        handler.setFormatter(_UvicornFormatter())
        logger.handlers = [handler]
        logger.propagate = False
        logger.disabled = False
        logger.setLevel(getattr(logging, str(level).upper(), logging.INFO))


def uvicorn(text: str, level: int = logging.INFO) -> None:
    _uvicorn.log(level, "%s%s", text, SUFFIX)


def access(text: str) -> None:
    _access.info("%s%s", text, SUFFIX)
