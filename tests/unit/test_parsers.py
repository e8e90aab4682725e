"""Every rendered configuration is accepted by its release's parser: the rehearsal engine's, and SGLang's own.

SGLang's own need an environment of 2 GB and run where DFLASH_FLEET_REAL_PARSERS names releases (or `all`):
`python tests/parsers/environment.py` prepares it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import configurations
import pytest
from dflash_fleet import profiles, release_options, releases

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "rehearsal" / "engine" / "src"
sys.path.insert(0, str(ROOT / "tests" / "parsers"))

environment = importlib.import_module("environment")

WANTED = os.environ.get("DFLASH_FLEET_REAL_PARSERS", "").replace(",", " ").split()
REAL = list(release_options.RELEASES) if WANTED == ["all"] else WANTED


def command_lines(version: str) -> list[tuple[str, list[str]]]:
    """(title, options) of every configuration that the resolver does not refuse."""
    found = []
    for title, request in [*configurations.matrix(version), *configurations.overlays(version)]:
        with contextlib.suppress(profiles.ConfigError):
            found.append((title, profiles.resolve(request)["argv"][2:]))
    assert len(found) > 60
    return found


@pytest.fixture(scope="module")
def rehearsal() -> Any:
    if not (ENGINE / "sglang" / "_rehearsal" / "options.py").exists():
        pytest.skip("no rehearsal engine")
    # Below its parent package: `sglang` itself may be something else in this process.
    sys.path.insert(0, str(ENGINE / "sglang"))
    try:
        return importlib.import_module("_rehearsal.options")
    finally:
        sys.path.remove(str(ENGINE / "sglang"))


@pytest.mark.parametrize("version", release_options.RELEASES)
def test_rehearsal_parser_accepts_every_configuration(rehearsal: Any, version: str) -> None:
    parser = rehearsal.build(version)
    for title, argv in command_lines(version):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(argv)
        except SystemExit:
            pytest.fail(f"{version}, {title}: {said.getvalue()[-300:]}\n{argv}")
        assert "deprecated" not in said.getvalue(), (version, title, said.getvalue())


@pytest.mark.parametrize("version", REAL or ["none"])
def test_real_parser(version: str) -> None:
    """The option table is the parser's, and the parser takes every configuration without a word about deprecation."""
    if version == "none":
        pytest.skip("DFLASH_FLEET_REAL_PARSERS is not set")
    environment.prepare([version])
    configured = command_lines(version)
    answer = environment.parse(version, [argv for _, argv in configured])
    table = {
        name: name in release_options.SWITCHES for name in release_options.OPTIONS if releases.has_option(version, name)
    }
    assert table == answer["options"]
    for (title, argv), result in zip(configured, answer["results"], strict=True):
        assert result["ok"], f"{version}, {title}: {result['said'][-300:]}\n{argv}"
        assert "deprecated" not in result["said"], (version, title, result["said"])


@pytest.mark.parametrize("version", REAL or ["none"])
def test_real_parser_understands_what_was_meant(version: str) -> None:
    if version == "none":
        pytest.skip("DFLASH_FLEET_REAL_PARSERS is not set")
    environment.prepare([version])
    argv = profiles.resolve({**configurations.INCIDENT, "version": version, "cuda_graph": "disabled"})["argv"][2:]
    parsed = environment.parse(version, [argv])["results"][0]["parsed"]
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
