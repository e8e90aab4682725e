"""The installed engine's parser is asked before a switch; here the rehearsal engine's."""

from __future__ import annotations

import sys
from pathlib import Path

import configurations
import pytest
from dflash_fleet import parser_check, profiles, venvs

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "rehearsal" / "engine" / "src"


@pytest.fixture(autouse=True)
def as_ourselves(monkeypatch):
    """A checkout in root's home cannot be read by the engine's user; the drop itself is tested on a host."""
    monkeypatch.setattr(venvs, "run_as", lambda user, home: {})


def argv(version, **more):
    return profiles.resolve({**configurations.INCIDENT, "version": version, **more})["argv"][2:]


def rehearse(version, arguments, **more):
    environment = {"PYTHONPATH": str(ENGINE), "REHEARSAL_RELEASE": version}
    return parser_check.ask(sys.executable, arguments, environment, **more)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.23"])
def test_a_resolved_configuration_is_taken(version):
    assert rehearse(version, argv(version)) == ""


REFUSALS = [
    pytest.param(["--attention-backend", "warp9"], "invalid choice: 'warp9'", "sglang_attention_backend", id="choice"),
    pytest.param(["--no-such-option", "1"], "unrecognized arguments", "sglang_extra_args", id="unknown"),
    pytest.param(["--tp-size", "eight"], "invalid int value", "sglang_profile", id="number"),
    pytest.param(["--pp", "2"], "ambiguous option", "", id="ambiguous"),
]


@pytest.mark.parametrize(("words", "said", "variable"), REFUSALS)
def test_a_refusal_is_the_parsers_last_line(words, said, variable):
    answer = rehearse("0.5.20", [*argv("0.5.20"), *words])
    assert said in answer
    assert "\n" not in answer
    assert parser_check.variable_for(answer).startswith(variable)
    text = parser_check.refusal(answer, {"version": "0.5.20", "build": "rehearsal"})
    assert "SGLang 0.5.20 (rehearsal) on this host refuses" in text
    assert "what runs goes on running" in text


def test_resolution_runs_where_the_model_is_there(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    words = ["--model-path", str(tmp_path), "--tp-size", "8", "--ep-size", "3"]
    assert rehearse("0.5.20", words) == ""
    said = rehearse("0.5.20", words, resolve=True)
    assert said == "ValueError: tp_size 8 must be divisible by ep_size 3"
    assert parser_check.variable_for(said) == "sglang_profile"


def test_an_environment_without_an_engine_is_a_refusal():
    said = parser_check.ask(sys.executable, [], {"PYTHONPATH": "/nowhere"})
    assert "sglang" in said
    assert "No such file" in parser_check.ask("/nowhere/bin/python", [], {})


def test_a_parser_that_hangs_is_not_waited_for_forever(tmp_path):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("import time; time.sleep(60)")
    assert "did not answer" in parser_check.ask(sys.executable, [], {"PYTHONPATH": str(tmp_path)}, limit=0.5)


def test_an_engine_that_dies_at_import_is_a_refusal():
    assert parser_check.verdict("", "x\nlibcuda.so.1: cannot open\n", 1) == (
        "its parser ended with status 1: libcuda.so.1: cannot open"
    )
