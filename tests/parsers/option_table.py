"""Write module_utils/dflash_fleet/release_options.py from the SGLang wheels themselves.

    python tests/parsers/option_table.py [--wheels DIR] [--check] [RELEASE ...]

Makes the table anew for the releases it has, and for those named here as well: the next release is this one command.
Fetches each release's wheel (7 to 39 MB, without its dependencies) with pip and reads its option declarations from
the source: `parser.add_argument(...)` calls, and from 0.5.14 on the annotated fields that SGLang turns into options.
Nothing of SGLang is imported, so this needs neither torch nor a GPU. test_real_parsers.py compares the result
with the real parsers where they are installed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "module_utils" / "dflash_fleet" / "release_options.py"
sys.path.insert(0, str(TARGET.parent))

import release_options  # noqa: E402

# What the table has now; a release named on the command line is added to it, in its place.
RELEASES = list(release_options.RELEASES)
SWITCH_ACTIONS = ("store_true", "store_false", "store_const", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction",
                  "DeprecatedAction", "BooleanOptionalAction", "help", "version")  # fmt: skip


def fetch(release: str, folder: Path) -> Path:
    """The release's wheel in `folder`, downloaded unless it is there."""
    found = sorted(folder.glob(f"sglang-{release}-*.whl"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        target = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
        platform = ["--platform", "manylinux_2_34_x86_64", "--only-binary=:all:"]
        subprocess.run([*command, *target, *platform, f"sglang=={release}"], check=True)
        found = sorted(folder.glob(f"sglang-{release}-*.whl"))
    return found[0]


def sources(wheel: Path) -> Iterator[ast.Module]:
    """The files of a wheel that declare options of the server."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name == "sglang/srt/server_args.py" or (
                name.startswith("sglang/srt/arg_groups/fields/") and name.endswith(".py")
            ):
                yield ast.parse(archive.read(name))


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((word.value for word in call.keywords if word.arg == name), None)


def _action(node: ast.expr | None) -> str:
    if node is None:
        return "store"
    return _text(node) or (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "store"))


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_switch(call: ast.Call, action: str) -> bool:
    return action in SWITCH_ACTIONS and _keyword(call, "nargs") is None


def declared(wheel: Path) -> dict[str, bool]:
    """Every long option of a release's server, without its dashes -> whether it is a bare switch."""
    found: dict[str, bool] = {}
    for tree in sources(wheel):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                action = _action(_keyword(node, "action"))
                for option in filter(None, map(_text, node.args)):
                    if option.startswith("--"):
                        found.update(_named(option[2:], action, _is_switch(node, action)))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.update(_field(node))
    return found


def _named(name: str, action: str, switch: bool) -> dict[str, bool]:
    """An option, and its opposite where argparse makes one."""
    return {name: switch, **({f"no-{name}": True} if action == "BooleanOptionalAction" else {})}


def _field(node: ast.AnnAssign) -> dict[str, bool]:
    """Options of one annotated field, `name: A[type, "help" | Arg(...)] = default`; one with neither has no option."""
    note = node.annotation
    if not (isinstance(note, ast.Subscript) and getattr(note.value, "id", "") == "A"):
        return {}
    kind, *parts = note.slice.elts if isinstance(note.slice, ast.Tuple) else [note.slice]
    if not any(_text(part) or (isinstance(part, ast.Call) and getattr(part.func, "id", "") == "Arg") for part in parts):
        return {}
    names = [node.target.id.replace("_", "-")] if isinstance(node.target, ast.Name) else []
    switch, action = ast.unparse(kind) in ("bool", "Optional[bool]"), ""
    for part in parts:
        if not isinstance(part, ast.Call) or getattr(part.func, "id", "") != "Arg":
            continue
        if _is_true(_keyword(part, "no_cli")):
            return {}
        flag = _keyword(part, "cli_name")
        if flag is not None and _text(flag):
            names = [str(_text(flag)).lstrip("-")]
        aliases = _keyword(part, "aliases")
        if isinstance(aliases, (ast.List, ast.Tuple)):
            names += [alias.lstrip("-") for alias in filter(None, map(_text, aliases.elts))]
        if _keyword(part, "action") is not None:
            action = _action(_keyword(part, "action"))
            switch = action in SWITCH_ACTIONS
    found: dict[str, bool] = {}
    for name in names:
        found.update(_named(name, action, switch))
    return found


def spans(present: list[bool], releases: list[str]) -> list[tuple[str, str]]:
    """Runs of releases in which an option is present, as (first, last)."""
    runs: list[tuple[str, str]] = []
    start: str | None = None
    for index, here in enumerate([*present, False]):
        if here and start is None:
            start = releases[index]
        elif not here and start is not None:
            runs.append((start, releases[index - 1]))
            start = None
    return runs


def render(tables: dict[str, dict[str, bool]]) -> str:
    """The text of release_options.py."""
    releases = list(tables)
    names: set[str] = set().union(*tables.values())
    lines = [
        '"""Options of `python -m sglang.launch_server` by release, read from the released packages.',
        "",
        "Generated by tests/parsers/option_table.py; do not edit. Spans: (first release, last release).",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "# fmt: off",
        "RELEASES: tuple[str, ...] = (",
        *[f'    "{release}",' for release in releases],
        ")",
        "",
        "OPTIONS: dict[str, tuple[tuple[str, str], ...]] = {",
    ]
    for name in sorted(names):
        runs = spans([name in tables[release] for release in releases], releases)
        text = ", ".join(f'("{first}", "{last}")' for first, last in runs)
        lines.append(f'    "{name}": ({text},),')
    lines += ["}", "", "#: Bare switches: options without a value.", "SWITCHES: frozenset[str] = frozenset(("]
    switches = [name for name in sorted(names) if all(table[name] for table in tables.values() if name in table)]
    lines += [f'    "{name}",' for name in switches]
    lines += ["))", "# fmt: on", ""]
    return "\n".join(lines)


def order(release: str) -> tuple[int, ...]:
    """Sort key: 0.5.12 before 0.5.12.post1 before 0.5.13."""
    return tuple(int(number) for number in re.findall(r"\d+", release))


def main() -> int:
    """Entry point: 1 with --check where the committed table differs."""
    cache = Path(os.environ.get("DFLASH_FLEET_CACHE", Path.home() / ".cache" / "dflash-fleet"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=cache / "sglang-wheels", help="folder of the wheels")
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("releases", nargs="*", default=RELEASES, help="releases to add to those of the table")
    args = parser.parse_args()
    releases = sorted({*RELEASES, *args.releases}, key=order)
    text = render({release: declared(fetch(release, args.wheels)) for release in releases})
    if args.check:
        same = TARGET.read_text(encoding="utf-8") == text
        print("release_options.py is current" if same else "release_options.py differs from the released packages")
        return 0 if same else 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}: {text.count('((')} options in {len(releases)} releases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
