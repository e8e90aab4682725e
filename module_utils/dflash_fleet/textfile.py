"""Files for the textfile collector of Prometheus' node_exporter: the text format, and a write of the whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

#: (name, kind, help, samples as (labels, value)).
Family = tuple[str, str, str, "list[tuple[Mapping[str, Any], float]]"]


def escaped(value: Any) -> str:
    """A label's value as it stands between the quotes."""
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def render(families: Iterable[Family]) -> str:
    """The exposition text. Whole numbers are written as such, times to the millisecond."""
    lines = []
    for name, kind, text, samples in families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            inner = ",".join(f'{key}="{escaped(labels[key])}"' for key in sorted(labels))
            number = str(value) if isinstance(value, int) else f"{value:.3f}"
            lines.append(f"{name}{{{inner}}} {number}" if inner else f"{name} {number}")
    return "\n".join([*lines, ""])


def write(folder: str | os.PathLike[str], name: str, text: str) -> None:
    """Replace one file whole, readable for everybody."""
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            os.fchmod(out.fileno(), 0o644)
        os.replace(temporary, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
