"""SGLang's own load tool and ours on the same server: requests, tokens and errors agree exactly.

Run by `make test-faults` (tests/scenarios/test_real_parsers.py). How near their rates are is measured, not tested:
benchmarks/load_tools.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import load_tools

RELEASES = ("0.5.11", "0.5.23")  # the tool under its old name, and under its new one
REQUESTS, TOKENS = 48, 40


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[load_tools.Bench]:
    """A rehearsal engine with a drafter, and what both tools need."""
    packages = load_tools.packages(*RELEASES)
    with load_tools.server(tmp_path_factory.mktemp("engine")) as url:
        yield load_tools.Bench(url, packages, load_tools.tokenizer(tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("lengths", ["fixed", "natural"])
def test_both_generators_say_the_same(bench: load_tools.Bench, release: str, lengths: str) -> None:
    ours, theirs = (
        bench.measure(generator, release, lengths=lengths, requests=REQUESTS, tokens=TOKENS)
        for generator in ("client", "bench_serving")
    )
    assert theirs["generator"] == "bench_serving"
    exact = ("requests", "ok", "errors")
    assert {name: ours[name] for name in exact} == {name: theirs[name] for name in exact}
    assert ours["ok"] == REQUESTS
    if lengths == "fixed":
        assert ours["output_tokens"] == theirs["output_tokens"] == REQUESTS * TOKENS
    assert set(ours) == set(theirs)
    for found in (ours, theirs):
        assert all(found[name] > 0 for name in ("output_throughput", "request_throughput"))
        assert all(found[name]["mean"] > 0 for name in ("ttft_ms", "itl_ms", "e2e_ms", "tpot_ms"))
