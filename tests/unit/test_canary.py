"""The first hosts of a rollout against those that were not touched."""

from __future__ import annotations

from typing import Any

import pytest
from dflash_fleet import canary, metrics


def looks(
    requests: float = 100, aborted: float = 0, accept: float | None = 3.4, speed: float = 90.0, running: float = 4
) -> list[dict[str, Any]]:
    """Three looks at an instance that has answered so much in between."""
    return [
        {
            "requests": 500 + requests * step / 2,
            "aborted": 7 + aborted * step / 2,
            "accept_length": accept,
            "tokens_per_second": speed * running,
            "running": running,
            "queued": 0,
        }
        for step in range(3)
    ]


def test_figures_are_of_the_time_between_the_looks() -> None:
    found = canary.figures(looks(requests=90, aborted=10, running=3))
    assert found == {"requests": 90, "error_rate": 0.1, "accept_length": pytest.approx(3.4), "tokens_per_second": 90.0}


def test_an_idle_or_silent_instance_has_no_figures() -> None:
    nothing = {"requests": 0, "error_rate": None, "accept_length": None, "tokens_per_second": None}
    assert canary.figures([]) == nothing
    assert canary.figures([{"error": "refused"}] * 3) == nothing
    assert canary.figures(looks(requests=0, running=0)) == nothing


def test_a_counter_begins_with_its_first_event() -> None:
    found = canary.figures([{"running": 0, "requests": None}, {"running": 1, "requests": 30, "aborted": 10}])
    assert (found["requests"], found["error_rate"]) == (30, 0.25)


def test_counters_that_fell_belong_to_another_start() -> None:
    assert canary.figures([{"requests": 900}, {"requests": 3}])["requests"] == 0


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (looks(), None),
        (looks(aborted=2), None),
        (looks(aborted=3), "2.9% of its requests are aborted, of other hosts' 0.0%"),
        (looks(accept=2.9), None),
        (looks(accept=2.8), "accept length 2.80, of other hosts 3.40"),
        (looks(accept=None), None),
        (looks(speed=64), None),
        (looks(speed=60), "tokens per second of a request 60.00, of other hosts 90.00"),
        (looks(requests=19, accept=1.0), None),
    ],
)
def test_limits(first: list[dict[str, Any]], words: str | None) -> None:
    expected = {"main": [words]} if words else {}
    assert canary.compare({"main": first}, [looks(), looks(), looks(accept=9.0, speed=10)]) == expected


def test_without_traffic_elsewhere_there_is_nothing_to_compare_with() -> None:
    assert canary.compare({"main": looks(accept=1.0)}, [looks(requests=0)]) == {}
    assert canary.compare({"main": looks(accept=1.0)}, []) == {}


def test_an_inventory_sets_limits_and_leaves_some_out() -> None:
    bad = {"main": looks(accept=1.0, speed=10)}
    assert canary.compare(bad, [looks()], {"accept_length": None, "tokens_per_second": 0.9}) == {}
    assert len(canary.compare(bad, [looks()])["main"]) == 2


@pytest.mark.parametrize(("wanted", "word"), [({"speed": 1}, "'speed' is none of"), ({"requests": "x"}, "no number")])
def test_limits_that_cannot_be_read(wanted: dict[str, Any], word: str) -> None:
    with pytest.raises(canary.LimitError, match=word):
        canary.compare({}, [], wanted)


def test_both_sides_are_told() -> None:
    first, other = canary.text({"gpu-01 main": looks()}, {"gpu-02 main": []})
    assert first == "first batch  gpu-01 main: 100 requests, errors 0.0%, accept length 3.40, 90.0 tokens/s for each"
    assert other.startswith("not touched  gpu-02 main: 0 requests, errors -")


def test_the_engine_counts_requests_for_it() -> None:
    text = 'sglang:num_requests_total{model_name="k"} 12.0\nsglang:num_aborted_requests_total{model_name="k"} 2.0\n'
    assert {key: metrics.live(text)[key] for key in ("requests", "aborted")} == {"requests": 12.0, "aborted": 2.0}
