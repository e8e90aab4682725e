"""Every rendered configuration is accepted by its release's parser as the rehearsal engine plays it.

SGLang's own parsers are asked in tests/parsers/test_real_parsers.py.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import configurations
import pytest
from dflash_fleet import release_options

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "rehearsal" / "engine" / "src"


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
    for title, argv in configurations.command_lines(version):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(argv)
        except SystemExit:
            pytest.fail(f"{version}, {title}: {said.getvalue()[-300:]}\n{argv}")
        assert "deprecated" not in said.getvalue(), (version, title, said.getvalue())
