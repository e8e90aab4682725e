"""`--config FILE.yaml`: its keys become options in front of the command line, by the rules of each release.

Only the YAML that such a file needs is read (one mapping of scalars, lists and mappings of scalars): the engine has
no dependencies. Scalars follow YAML 1.1, as the real merger's reader does.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from . import releases
from .options import Row

_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = ("", "~", "null", "Null", "NULL")


def _scalar(text: str) -> Any:
    """One plain or quoted scalar."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return json.loads(text)
    if text in _NULL:
        return None
    if text.lower() in _BOOL and text in (text.lower(), text.upper(), text.capitalize()):
        return _BOOL[text.lower()]
    if re.fullmatch(r"[-+]?0[0-7_]+", text):
        return int(text.replace("_", ""), 8)
    if re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", text):
        return int(text.replace("_", ""))
    if re.fullmatch(r"[-+]?([0-9][0-9_]*)\.[0-9_]*([eE][-+][0-9]+)?", text):
        return float(text.replace("_", ""))
    return text


def _uncomment(line: str) -> str:
    """The line without a trailing comment (a # after a blank, outside quotes)."""
    quote = ""
    for index, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (index == 0 or line[index - 1] in " :[{,"):
            quote = char
        elif char == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


def _flow(text: str) -> Any:
    """A value on one line: flow list, flow mapping or scalar."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [_scalar(part) for part in _split(inner)] if inner else []
    if text.startswith("{") and text.endswith("}"):
        result = {}
        for part in _split(text[1:-1]):
            if part.strip():
                key, value = _pair(part.strip())
                result[key] = _flow(value)
        return result
    return _scalar(text)


def _split(text: str) -> list[str]:
    """Splits at commas outside quotes and brackets."""
    parts, depth, quote, start = [], 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _pair(text: str) -> tuple[str, str]:
    match = re.match(r"""("(?:[^"\\]|\\.)*"|'[^']*'|[^:]+?)\s*:(?:\s+(.*)|$)""", text)
    if not match:
        raise ValueError(f"cannot read this line of the config file: {text.split(':')[0]!r}")
    return str(_scalar(match.group(1))), match.group(2) or ""


def read(path: str) -> dict[str, Any]:
    """The file as a mapping; the errors are the real merger's."""
    suffix = os.path.splitext(path)[1]
    if suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"Config file must be YAML format, got: {suffix}")
    if not os.path.exists(path):
        raise ValueError(f"Config file not found: {path}")
    with open(path, encoding="utf-8") as stream:
        lines = [_uncomment(line.rstrip("\n")).rstrip() for line in stream]
    result: dict[str, Any] = {}
    index = 0
    lines = [line for line in lines if line.strip() and line.strip() != "---"]
    while index < len(lines):
        line = lines[index]
        if line[0].isspace() or line.startswith("- "):
            raise ValueError("Config file must contain a dictionary at root level")
        key, value = _pair(line)
        index += 1
        block = []
        while index < len(lines) and (lines[index][0].isspace() or lines[index].startswith("- ")):
            block.append(lines[index].strip())
            index += 1
        if block and not value:
            if all(item.startswith("- ") for item in block):
                result[key] = [_scalar(item[2:]) for item in block]
            else:
                result[key] = {k: _flow(v) for k, v in map(_pair, block)}
        else:
            result[key] = _flow(" ".join([value, *block]))
    return result


def _keys(row: Row) -> list[str]:
    """The names under which the merger knows an option."""
    names = [row.dest]
    if releases.key(releases.RELEASE) >= releases.key("0.5.23"):
        names += [flag.lstrip("-").replace("-", "_") for flag in row.flags]
    return names


# The names that the real merger's error gives the actions it cannot fill from a file.
ACTION_NAMES = {
    "bool": "BooleanOptionalAction",
    "lora": "LoRAPathAction",
    "deprecated": "DeprecatedAction",
    "deprecated_true": "DeprecatedStoreTrueAction",
    "const": "DeprecatedStoreConstAction",
    "alias": "DeprecatedAliasStoreAction",
}


def merge(argv: list[str], table: list[Row]) -> list[str]:
    """argv with the file's keys in front; the command line wins because it comes later."""
    # "--config=FILE" is taken for granted by the real test and then ignored; so it is here.
    places = [i for i, word in enumerate(argv) if word == "--config"]
    if not places:
        return argv
    if len(places) > 1:
        raise ValueError("Multiple config files specified! Only one allowed.")
    at = places[0]
    if at == len(argv) - 1:
        raise ValueError("No config file specified after --config flag!")
    newest = releases.key(releases.RELEASE) >= releases.key("0.5.23")

    def fillable(row: Row) -> bool:
        # Since 0.5.23 a retired option that takes one value can stand in the file.
        return row.kind in ("store", "true") or (newest and row.kind == "alias" and not row.nargs)

    flags = {name for row in table if row.kind == "true" for name in _keys(row)}
    usable = {name for row in table if fillable(row) for name in _keys(row)} if newest else set()
    refused = {name: row for row in table if not fillable(row) for name in _keys(row) if name not in usable}
    words: list[str] = []
    for name, value in read(argv[at + 1]).items():
        plain = name.replace("-", "_")
        if plain in refused:
            action = ACTION_NAMES[refused[plain].kind]
            raise ValueError(f"Unsupported config option '{plain}' with action '{action}'")
        if isinstance(value, bool):
            if plain in flags:
                words += [f"--{name}"] if value else []
            else:
                words += [f"--{name}", str(value).lower()]
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        elif isinstance(value, dict) and releases.key(releases.RELEASE) >= releases.key("0.5.14"):
            words += [f"--{name}", json.dumps(value)]
        else:
            words += [f"--{name}", str(value)]
    return words + argv[:at] + argv[at + 2 :]
