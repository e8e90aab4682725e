"""The command line of the imitated release, built from data/options.tsv.

The table holds every option of every release from 0.5.11 to 0.5.23 with the releases that have it, so that unknown,
moved and ambiguous options are refused in the way and words of the real parser.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from typing import Any, Callable, NamedTuple

from . import releases

TABLE = os.path.join(os.path.dirname(__file__), "data", "options.tsv")

# Up to 0.5.13 the parser's names differ from the fields they fill.
FIELD_OF_DEST: dict[str, str] = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
}


class Row(NamedTuple):
    """One line of the table."""

    first: str
    last: str
    kind: str  # store, true, bool, lora, alias, const, deprecated, deprecated_true
    flags: list[str]
    dest: str
    type: str
    nargs: str
    choices: list[str]
    required: bool
    default: Any
    instead: str  # what the real parser recommends in its deprecation warning


def rows(release: str = "") -> list[Row]:
    """The options that this release has, in the parser's order."""
    return _rows(releases.nearest(release))


@functools.cache
def _rows(release: str) -> list[Row]:
    found = []
    with open(TABLE, encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("#"):
                continue
            f = line.rstrip("\n").split("\t")
            if not releases.covers(f[0], f[1], release):
                continue
            choices = f[7].split("|") if f[7] else []
            flags = f[3].split(",")
            found.append(Row(f[0], f[1], f[2], flags, f[4], f[5], f[6], choices, bool(f[8]), json.loads(f[9]), f[10]))
    return found


def size(text: str) -> int:
    """A count with an optional suffix: 128k, 1M."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    if text and text[-1] in units:
        return int(float(text[:-1]) * units[text[-1]])
    return int(text)


size.__name__ = "human_readable_int"  # argparse names the type in its error

TYPES: dict[str, Callable[[str], Any]] = {"": str, "int": int, "float": float, "size": size, "json": json.loads}


def _warn(option: str, instead: str) -> None:
    # No logging is configured while arguments are parsed: the real warning has no prefix either.
    hint = f" Use '{instead}' instead." if instead else ""
    text = f"'{option}' is deprecated and will be removed in a future release.{hint}"
    sys.stderr.write(f"\033[1;33m{text}\033[0m [rehearsal]\n")


class _Deprecated(argparse.Action):
    """Any of the retired spellings: warns, then stores."""

    def __init__(self, option_strings: list[str], dest: str, row: Row | None = None, **kw: Any) -> None:
        self.row = row
        super().__init__(option_strings, dest, **kw)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert self.row is not None
        _warn(option_string or self.option_strings[0], self.row.instead)
        if self.row.kind == "alias":
            setattr(namespace, self.dest, values)
        elif self.row.kind == "deprecated_true":
            setattr(namespace, self.dest, True)
        elif self.row.kind == "const":
            # "--disable-piecewise-cuda-graph" means "--cuda-graph-backend-prefill=disabled": the value is in the hint.
            value: Any = self.row.instead.partition("=")[2] or True
            setattr(namespace, self.dest, value)


def build(release: str = "") -> argparse.ArgumentParser:
    """The parser of the imitated release."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    for row in rows(release):
        kw: dict[str, Any] = {"dest": row.dest, "default": row.default, "help": argparse.SUPPRESS}
        if row.kind == "true":
            parser.add_argument(*row.flags, action="store_true", **kw)
            continue
        if row.kind == "bool":
            parser.add_argument(*row.flags, action=argparse.BooleanOptionalAction, **kw)
            continue
        takes_value = row.kind in ("store", "alias", "lora") or bool(row.choices)
        if takes_value:
            kw["type"] = TYPES[row.type]
            if row.choices:
                kw["choices"] = [TYPES[row.type](choice) for choice in row.choices]
            if row.nargs:
                kw["nargs"] = row.nargs
        if row.required:
            kw["required"] = True
        if row.kind == "store":
            # Help is not suppressed here: usage and --help list what a person can set.
            kw["help"] = None
            parser.add_argument(*row.flags, **kw)
        else:
            if not takes_value:
                kw["nargs"] = 0
            parser.add_argument(*row.flags, action=_Deprecated, row=row, **kw)
    return parser
