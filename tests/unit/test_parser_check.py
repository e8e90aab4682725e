"""The installed engine's parser is asked before a switch; here the rehearsal engine's."""

from __future__ import annotations

import sys
from pathlib import Path

import configurations
import pytest
from dflash_fleet import parser_check, profile_checks, profiles, venvs

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


#: Every option that a variable, a profile or we ourselves put on a command line, with the variable that changes it.
GRAPHS = (
    "disable-cuda-graph", "disable-piecewise-cuda-graph", "disable-prefill-cuda-graph", "cuda-graph-backend-decode",
    "cuda-graph-backend-prefill",
)  # fmt: skip
FREE_OPTIONS = (
    "moe-a2a-backend", "kv-cache-dtype", "enable-mixed-chunk", "cuda-graph-max-bs", "cuda-graph-bs",
    "cuda-graph-max-bs-decode", "cuda-graph-bs-decode", "speculative-draft-window-size",
    "speculative-dflash-draft-window-size", "speculative-draft-kv-cache-dtype", "speculative-num-steps",
    "speculative-eagle-topk", "log-level", "uvicorn-access-log-exclude-prefixes", "watchdog-timeout",
    "max-total-tokens", "sleep-on-idle",
)  # fmt: skip
VARIABLES = {
    "model-path": "sglang_model",
    "served-model-name": "sglang_served_model_name",
    "trust-remote-code": "sglang_trust_remote_code",
    "host": "sglang_host",
    "port": "sglang_port",
    "device": "sglang_build",
    **dict.fromkeys(("tp-size", "pp-size", "ep-size", "dp-size"), "sglang_profile"),
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr"), "sglang_nodes"),
    "speculative-algorithm": "sglang_drafter",
    "speculative-draft-model-path": "sglang_drafter_model",
    "speculative-num-draft-tokens": "sglang_drafter_block_size",
    **dict.fromkeys(GRAPHS, "sglang_cuda_graph"),
    "attention-backend": "sglang_attention_backend",
    "mem-fraction-static": "sglang_mem_fraction_static",
    "context-length": "sglang_context_length",
    "max-running-requests": "sglang_max_running_requests",
    "reasoning-parser": "sglang_reasoning_parser",
    "tool-call-parser": "sglang_tool_call_parser",
    "enable-metrics": "sglang_enable_metrics",
    **dict.fromkeys(FREE_OPTIONS, profile_checks.FREE),
}


def test_every_option_of_every_configuration_has_its_variable():
    rendered = {
        word[2:]
        for version in configurations.RELEASES
        for _, words in configurations.command_lines(version)
        for word in words
        if word.startswith("--")
    }
    assert rendered == set(VARIABLES)


@pytest.mark.parametrize(("option", "variable"), VARIABLES.items())
def test_the_variable_behind_a_refused_option(option, variable):
    """In a parser's words, in a resolution's, and beside another option that is given too or is not."""
    words = ["--tp-size", "8", "--page-size", "16", f"--{option}", "7"]
    field = option.replace("-", "_")
    if "_" not in field:  # in a sentence, "port" may be just a word
        field = f"--{option}"
    for said in (
        f"launch_server.py: error: argument --{option}: invalid value: '7'",
        f"ValueError: --{option} must be >= --page-size (16).",
        f"ValueError: {field} must be divisible by page_size, got 7",
        f"ValueError: --quantization is needed where --{option} is 7",
    ):
        assert parser_check.variable_for(said, words) == variable, said


def test_eagle3_tokens_are_no_block():
    words = ["--speculative-algorithm", "EAGLE3", "--speculative-num-draft-tokens", "9"]
    assert parser_check.variable_for("argument --speculative-num-draft-tokens: 9", words) == profile_checks.FREE


@pytest.mark.parametrize("version", configurations.RELEASES)
def test_a_draft_window_below_the_block_is_an_extra_argument(version, tmp_path):
    """Up to 0.5.11 it is called otherwise; the message compares it with the block, which is a variable's."""
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
    (tmp_path / "target" / "config.json").write_text('{"architectures": ["KimiK25ForConditionalGeneration"]}')
    (tmp_path / "drafter" / "config.json").write_text('{"architectures": ["DFlashDraftModel"], "block_size": 8}')
    paths = {"model_path": str(tmp_path / "target"), "drafter_path": str(tmp_path / "drafter"), "profile": "tp8"}
    words = argv(version, **paths, extra_args={"speculative-draft-window-size": 4})
    said = rehearse(version, words, resolve=True)
    assert "window_size=4" in said
    assert parser_check.variable_for(said, words) == profile_checks.FREE
    assert parser_check.refusal(said, {"version": version}, words).startswith("sglang_extra_args")


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
