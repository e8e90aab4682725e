"""SGLang's own parsers: the table of options is theirs, and they take every configuration that the resolver renders.

Needs an environment of 2 GB, so these are no unit tests: `make real-parsers` runs them for every release, and
`make test-faults` for those at which options moved (DFLASH_FLEET_REAL_PARSERS names releases, or `all`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in ("module_utils", "tests/unit", "tests/parsers"):
    sys.path.insert(0, str(ROOT / folder))

import configurations  # noqa: E402
import environment  # noqa: E402
from dflash_fleet import parser_check, profiles, release_options, releases, venvs  # noqa: E402

WANTED = os.environ.get("DFLASH_FLEET_REAL_PARSERS", "").replace(",", " ").split()
REAL = list(release_options.RELEASES) if WANTED == ["all"] else WANTED or list(configurations.RELEASES)


def argv(version: str, graphs: str) -> list[str]:
    """The incident's command line."""
    words: list[str] = profiles.resolve({**configurations.INCIDENT, "version": version, "cuda_graph": graphs})["argv"]
    return words[2:]


@pytest.mark.parametrize("version", REAL)
def test_parser_has_the_tables_options_and_takes_every_configuration(version: str) -> None:
    """The option table is the parser's, and the parser takes every configuration without a word about deprecation."""
    environment.prepare([version])
    configured = configurations.command_lines(version)
    answer = environment.parse(version, [argv for _, argv in configured])
    table = {
        name: name in release_options.SWITCHES for name in release_options.OPTIONS if releases.has_option(version, name)
    }
    assert table == answer["options"]
    for (title, argv), result in zip(configured, answer["results"], strict=True):
        assert result["ok"], f"{version}, {title}: {result['said'][-300:]}\n{argv}"
        assert "deprecated" not in result["said"], (version, title, result["said"])


@pytest.mark.parametrize("version", REAL)
def test_real_parser_understands_what_was_meant(version: str) -> None:
    environment.prepare([version])
    parsed = environment.parse(version, [argv(version, "disabled")])["results"][0]["parsed"]
    sizes = [
        parsed.get(short, parsed.get(long))
        for short, long in (("tp_size", "tensor_parallel_size"), ("ep_size", "expert_parallel_size"))
    ]
    assert sizes == ["8", "8"]
    assert parsed["speculative_algorithm"] == "'DFLASH'"
    assert parsed["speculative_num_draft_tokens"] == "8"
    assert parsed["uvicorn_access_log_exclude_prefixes"] == "['/health', '/metrics']"
    if releases.parse_version(version) < releases.parse_version("0.5.14"):
        assert (parsed["disable_cuda_graph"], parsed["disable_piecewise_cuda_graph"]) == ("True", "True")
    else:
        assert (parsed["cuda_graph_backend_decode"], parsed["cuda_graph_backend_prefill"]) == (
            "'disabled'",
            "'disabled'",
        )


# The test environment has one transformers for all releases; on a host each has the one it was made for.
OLDER = """
from transformers.models.auto import configuration_auto
mapping = configuration_auto._LazyConfigMapping
register = mapping.register
mapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)
"""


@pytest.mark.parametrize("version", REAL)
def test_the_check_before_a_switch_asks_it(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venvs, "run_as", lambda user, home: {})  # the drop to the engine's user is tested on a host
    environment.prepare([version])
    (tmp_path / "sitecustomize.py").write_text(OLDER)
    variables = {"PYTHONPATH": f"{environment.tree(version)}:{tmp_path}", "SGLANG_USE_CPU_ENGINE": "1"}
    python = str(environment.PYTHON)
    assert parser_check.ask(python, argv(version, "disabled"), variables) == ""
    said = parser_check.ask(python, [*argv(version, "enabled"), "--attention-backend", "warp9"], variables)
    assert "invalid choice: 'warp9'" in said
    assert parser_check.variable_for(said) == "sglang_attention_backend"
