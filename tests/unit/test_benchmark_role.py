"""What a benchmark refuses before it touches a host, and the module that measures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import configurations
import pytest
import sglang_benchmark
import yaml
from ansible.errors import AnsibleFilterError
from ansible.module_utils.testing import patch_module_args
from dflash_fleet import bench
from plugins import load

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "sglang_benchmark"
filters = load("filter_plugins/sglang_bench.py")
REQUEST = {**configurations.BASE, "version": "0.5.20", "build": "cuda", "profile": "ep8", "drafter": "dflash",
           "instance": "main"}  # fmt: skip


def planned(*candidates: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = filters.candidates([REQUEST], list(candidates), "main", "gpu-01", "r1")
    return found


def test_the_defaults_can_be_measured() -> None:
    wanted = yaml.safe_load((ROLE / "defaults/main.yml").read_text())["sglang_benchmark_candidates"]
    found = planned(*wanted)
    names = [item["context"]["candidate"] for item in found]
    assert names == ["tp8+dflash", "tp8", "ep8+dflash", "ep8", "ep4+dflash", "ep4"]
    assert [item["context"]["order"] for item in found] == list(range(6))


def test_the_prompts_are_many_and_short_enough_for_a_small_model() -> None:
    found = bench.prompts_of((ROLE / "files/prompts.txt").read_text())
    assert len(found) == len(set(found)) >= 30
    assert max(map(len, found)) < 160


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([], "the list is empty"),
        ([{"profile": "tp9"}, {"profil": "tp8"}], r"tp9: .*'tp9' is unknown.*number 2: .*the key 'profil'"),
        ([{"profile": "tp8"}, {"profile": "tp8"}], "two candidates are called tp8[+]dflash"),
        ([{"profile": "pp8"}], "pp8: "),
    ],
)
def test_all_that_cannot_work_is_said_at_once(candidates: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(AnsibleFilterError, match=expected):
        planned(*candidates)


def test_an_unknown_instance_is_named() -> None:
    with pytest.raises(AnsibleFilterError, match="b is not deployed here; write one of main"):
        filters.candidates([REQUEST], [{"profile": "tp8"}], "b", "gpu-01", "r1")


def host_state(**more: Any) -> dict[str, Any]:
    """What sglang_state says of a host that can be measured."""
    engine = {"name": "sglang", "version": "0.5.20", "build": "cuda"}
    whole = {"complete": True}
    main = {"serving": True, "condition": "serving", "trial": None, "release": {"engine": engine}, **more}
    return {
        "instances": {"main": main},
        "models": {
            "moonshotai--Kimi-K2.6": {"a" * 40: whole}, "SubSir--Kimi-K2.6-DFlash-tmp-long": {"b" * 40: whole},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (host_state(), []),
        (host_state(serving=False, condition="failed", trial={"release_id": "x"}), []),
        (host_state(serving=False, condition="failed"), ["main is failed: deploy it first"]),
        ({"instances": {}}, ["instance main is not on the host"]),
        (host_state(release={"engine": {"version": "0.5.11", "build": "cuda"}}), ["the host runs SGLang 0.5.11"]),
        ({**host_state(), "models": {}}, ["moonshotai/Kimi-K2.6 aaaaaaaaaaaa", "SubSir/Kimi-K2.6-DFlash-tmp-long"]),
    ],
)
def test_what_a_host_lacks(state: dict[str, Any], expected: list[str]) -> None:
    found = filters.missing(planned({"profile": "tp8"}), state, "main")
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected)), found


@pytest.fixture
def server() -> Any:
    """Answers /generate with three tokens, and every fifth request with an error."""
    asked: list[dict[str, Any]] = []
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            with one_at_a_time:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                number = len(asked)
            self.send_response(503 if number % 5 == 0 else 200)
            self.end_headers()
            for count in (1, 3):
                meta = {"prompt_tokens": 2, "completion_tokens": count}
                self.wfile.write(b"data: " + json.dumps({"text": "x" * count, "meta_info": meta}).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.asked = asked  # type: ignore[attr-defined]
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def call(server: Any, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(check: bool = False, **more: Any) -> dict[str, Any]:
        wish = {"url": f"http://127.0.0.1:{server.server_address[1]}", "model": "m", "concurrency": 2, "requests": 10,
                "repeats": 2, "prompts": ["a", "b"], "_ansible_check_mode": check, **more}  # fmt: skip
        with patch_module_args(wish), pytest.raises(SystemExit):
            sglang_benchmark.main()
        result: dict[str, Any] = json.loads(capfd.readouterr().out)
        return result

    return run


def test_the_module_measures_and_counts_errors(server: Any, call: Callable[..., Any]) -> None:
    result = call(max_tokens=3)
    assert result["changed"] is False
    assert [(run["requests"], run["ok"], run["errors"], run["output_tokens"]) for run in result["runs"]] == [
        (10, 8, 2, 24), (10, 8, 2, 24),
    ]  # fmt: skip
    assert any("HTTP 503" in reason for reason in result["runs"][0]["reasons"])
    # Two at a time: which of a pair comes first is nobody's to say.
    assert sorted(body["text"] for body in server.asked) == ["a"] * 10 + ["b"] * 10
    assert server.asked[0]["sampling_params"] == {"max_new_tokens": 3, "ignore_eos": True, "temperature": 0}


def test_warm_up_is_not_counted(server: Any, call: Callable[..., Any]) -> None:
    assert len(call(warmup=4, repeats=1, lengths="natural")["runs"]) == 1
    assert len(server.asked) == 14
    assert "ignore_eos" not in server.asked[-1]["sampling_params"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"concurrency": 0}, "concurrency: 0 is less than 1"),
        ({"prompts": []}, "prompts is empty"),
        ({"url": "gpu-01"}, "not an address"),
        ({"generator": "bench_serving"}, "python"),
        ({"generator": "bench_serving", "python": "/bin/false", "tokenizer": "/"}, "has no SGLang that could measure"),
    ],
)
def test_the_module_refuses(call: Callable[..., Any], more: dict[str, Any], expected: str) -> None:
    result = call(**more)
    assert result["failed"] is True
    assert expected in result["msg"]


def test_check_mode_asks_nothing(server: Any, call: Callable[..., Any]) -> None:
    assert "runs" not in call(check=True)
    assert server.asked == []
