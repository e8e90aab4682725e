"""Defaults, argument specs, docs/variables.md and the roles' pages say the same. UPDATE_DOCS=1 writes them anew."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dflash_fleet import profile_checks
from plugins import load as load_plugin

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "variables.md"
PAGES = ROOT / "docs" / "roles"
ROLES = sorted(path.parents[1].name for path in ROOT.glob("roles/*/meta/argument_specs.yml"))
DEPLOYMENT = ["sglang", "gpu_host", "sglang_venv", "model_weights", "sglang_service"]
ORDER = sorted(ROLES, key=lambda role: (DEPLOYMENT.index(role) if role in DEPLOYMENT else len(DEPLOYMENT), role))


def load(role: str, path: str) -> Any:
    file = ROOT / "roles" / role / path
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None


def defaults(role: str) -> dict[str, Any]:
    return load(role, "defaults/main.yml") or {}


def options(role: str, entry: str = "main") -> dict[str, dict[str, Any]]:
    return load(role, "meta/argument_specs.yml")["argument_specs"][entry].get("options") or {}


def comments(role: str) -> dict[str, str]:
    """The comment above each default."""
    found: dict[str, str] = {}
    block: list[str] = []
    for line in (ROOT / "roles" / role / "defaults" / "main.yml").read_text(encoding="utf-8").splitlines():
        name = re.match(r"(\w+):", line)
        if line.startswith("# "):
            block.append(line[2:])
        elif name:
            found[name.group(1)] = " ".join(block)
            block = []
        elif not line.strip():
            block = []
    return found


def value(default: Any) -> str:
    if default is None or default == "":
        return "(empty)"
    return "`" + yaml.safe_dump(default, default_flow_style=True, width=1000).removesuffix("...\n").strip() + "`"


def plain(text: str) -> str:
    """Ansible's markup of a description as Markdown."""
    return re.sub(r"\b[COVM]\((.*?)\)", r"`\1`", text)


def table(role: str) -> list[str]:
    """The role's variables as lines of Markdown."""
    out = ["| variable | default | meaning |", "|---|---|---|"]
    for name, option in options(role).items():
        text = option["description"]
        text = plain(" ".join(text if isinstance(text, list) else [text]))
        cells = [f"`{name}`", value(option.get("default")), text]
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return out


def role_page(role: str) -> str:
    """The page of a role: its table of variables is made, the rest is written by hand, at first from the specs."""
    path = PAGES / f"{role}.md"
    rows = table(role) if options(role) else ["No variables."]
    if not path.exists():
        spec = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]
        text = spec.get("description") or []
        parts = [f"# Role {role}", spec["short_description"].rstrip(".") + "."]
        parts += [plain(part) for part in ([text] if isinstance(text, str) else text)]
        return "\n\n".join([*parts, "## Variables", "\n".join(rows)]) + "\n"
    before, heading, after = path.read_text(encoding="utf-8").partition("\n## Variables\n")
    lines = after.lstrip("\n").splitlines()
    rest = lines[sum(1 for _ in itertools.takewhile(lambda line: line.startswith(("|", "No variables.")), lines)) :]
    return "\n".join([f"{before}{heading}", *rows, *rest]) + "\n"


def page() -> str:
    out = [
        "# Variables",
        "",
        "Made from the roles' `defaults/main.yml` and `meta/argument_specs.yml`, by",
        "`UPDATE_DOCS=1 pytest tests/unit/test_argument_specs.py`. The product's own variables stand in role `sglang`.",
    ]
    for role in ORDER:
        spec = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]
        out += ["", f"## {role}", "", spec["short_description"].rstrip(".") + ".", ""]
        if not options(role):
            out.append("No variables.")
            continue
        out += table(role)
    out += [
        "",
        "## Keys of an instance",
        "",
        "An item of `sglang_instances` may set, in place of the host's value:",
        "",
    ]
    out.append(", ".join(f"`{key}`" for key in instance_keys()) + ".")
    return "\n".join(out) + "\n"


def instance_keys() -> list[str]:
    filters = load_plugin("filter_plugins/sglang.py")
    names = ["name", "state", *filters.INSTANCE_ONLY, *filters.PER_INSTANCE]
    return ["drafter_block_size" if name == "block_size" else name for name in names]


@pytest.mark.parametrize("role", ROLES)
def test_specs_and_defaults_agree(role: str) -> None:
    specified = {name: option.get("default") for name, option in options(role).items() if not option.get("required")}
    assert specified == defaults(role)


@pytest.mark.parametrize("role", ROLES)
def test_every_option_is_described_and_prefixed(role: str) -> None:
    for name, option in options(role).items():
        assert name.startswith(role + "_"), name
        assert option.get("type"), name
        assert option.get("description"), name


@pytest.mark.parametrize("role", [role for role in ROLES if (ROOT / "roles" / role / "defaults" / "main.yml").exists()])
def test_every_default_has_a_comment(role: str) -> None:
    assert not [name for name, text in comments(role).items() if not text]


def test_every_entry_point_of_role_sglang_takes_the_same_variables() -> None:
    entries = load("sglang", "meta/argument_specs.yml")["argument_specs"]
    files = {path.stem for path in (ROOT / "roles" / "sglang" / "tasks").glob("*.yml")}
    assert set(entries) == files
    assert all(entry["options"] == entries["main"]["options"] for entry in entries.values())


def test_the_key_is_never_logged() -> None:
    assert options("sglang")["sglang_api_key"]["no_log"] is True


def test_resolution_knows_the_variables() -> None:
    """Every variable that the filters read exists, and every setting of a request can be set from an inventory."""
    read = set(load("sglang", "vars/main.yml")["__sglang_variables"])
    assert read <= set(defaults("sglang"))
    internal = {"model_path", "drafter_path", "api_key_set", "api_key_error", "measured", "overrides", "errors"}
    for key in set(profile_checks.DEFAULTS) - internal:
        assert profile_checks.variable_of(key) in defaults("sglang"), key


@pytest.mark.parametrize("role", ROLES)
def test_page_of_the_role_is_current(role: str) -> None:
    """UPDATE_DOCS=1 makes the page of a new role, and the table of variables anew."""
    text, path = role_page(role), PAGES / f"{role}.md"
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"docs/roles/{role}.md is missing"
    assert path.read_text(encoding="utf-8") == text


def test_page_is_current() -> None:
    text = page()
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text
