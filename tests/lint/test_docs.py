"""The site builds without a warning, every page is found from its first one, and commands in pages name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES]
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / words[0]), *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_site_builds_and_its_links_hold(tmp_path: Path) -> None:
    """mkdocs.yml is strict: a link to a page or heading that is not there is a failure."""
    done = run("mkdocs", "build", "--site-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    built = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    built -= {Path("404"), Path("search")}
    # A README is the first page of its folder.
    wanted = {path.relative_to(DOCS).with_suffix("") for path in PAGES}
    assert built == {path.with_name("index") if path.name == "README" else path for path in wanted}


def test_the_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    assert run("mkdocs", "build", "--site-dir", str(tmp_path)).returncode == 0
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=.(https?://[^\"' >]+)", page.read_text())
        assert loaded == [], page


def test_every_page_is_linked_from_the_first() -> None:
    """The menu of the site follows the files; docs/index.md says what each is for."""
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall((DOCS / "index.md").read_text())}
    missing = [name(page) for page in PAGES if page != DOCS / "index.md" and page.resolve() not in linked]
    assert missing == [], f"docs/index.md does not name {', '.join(missing)}"


@pytest.mark.parametrize("text", TEXTS, ids=name)
def test_relative_links_lead_somewhere(text: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(text.read_text()) if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in links if not (text.parent / link).exists()] == []


# Commands ---------------------------------------------------------------------------------------------------------
def known_variables() -> set[str]:
    """Variables of roles and those that playbooks read, which a command line may set."""
    found: set[str] = set()
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            found |= set(entry.get("options") or {})
    for path in (ROOT / "playbooks").rglob("*.yml"):
        found |= set(re.findall(r"\b[a-z_]{3,}\b", path.read_text()))
    return found


COMMAND = re.compile(r"(?:^|`)((?:ansible-playbook|dflash-fleet|make|python rehearsal/) ?[^`\n]*)", re.M)
COMMANDS = [
    (name(text), line.split("  ")[0].strip()) for text in TEXTS for line in COMMAND.findall(text.read_text())
]
VARIABLES = known_variables()
PLAYBOOKS = {path.stem for path in (ROOT / "playbooks").glob("*.yml")} - {"deploy-dflash"} | {"deploy", "exec"}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("text", "line"), COMMANDS, ids=lambda value: value)
def test_command_names_what_exists(text: str, line: str) -> None:
    """Playbooks, variables, make targets. That the README's commands work is scenario test_readme's."""
    words = line.split()
    if words[0] == "make" and len(words) > 1:
        assert words[1] in TARGETS, line
    if words[0] == "dflash-fleet" and len(words) > 1 and words[1] != "--help":
        assert words[1] in PLAYBOOKS, line
    if words[0] == "python":
        assert (ROOT / words[1]).exists(), line
    for word in words[1:]:
        if re.fullmatch(r"[\w/.-]+\.ya?ml", word) and words[0] == "ansible-playbook":
            assert (ROOT / word).exists(), line
    for variable in re.findall(r"-e '?([a-z_]+)=", line):
        assert variable in VARIABLES, f"{line}: nobody reads {variable}"


# Changes ----------------------------------------------------------------------------------------------------------
def test_fragments_of_the_changelog_are_taken() -> None:
    """Each file of changes/ is of a kind that towncrier knows, and its text reaches the draft."""
    kinds = re.findall(r'^directory = "(added|changed|fixed)"', (ROOT / "pyproject.toml").read_text(), re.M)
    draft = run("towncrier", "build", "--draft", "--version", "0.0.0")
    assert draft.returncode == 0, draft.stderr
    fragments = [path for path in (ROOT / "changes").iterdir() if path.name != ".gitignore"]
    for path in fragments:
        assert re.fullmatch(rf".+\.({'|'.join(kinds)})\.md", path.name), path.name
        assert path.read_text().strip() in draft.stdout, path.name
