"""Versions compare as people expect, and options are spelled as each release wants them."""

from __future__ import annotations

import random

import pytest
from dflash_fleet import release_options, releases


def test_versions_compare() -> None:
    order = ["0.5.9", "0.5.11rc1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.20", "0.6.0", "1.0.0"]
    shuffled = random.Random(1).sample(order, len(order))
    assert sorted(shuffled, key=releases.parse_version) == order


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0.5.11", "0.5.11"),
        ("0.5.12.post1", "0.5.12.post1"),
        ("0.5.20+rehearsal", "0.5.20"),
        (" 0.5.23 ", "0.5.23"),
        ("0.5.13rc2", "0.5.13rc2"),
    ],
)
def test_version_text(text: str, shown: str) -> None:
    assert str(releases.parse_version(text)) == shown


@pytest.mark.parametrize("text", ["", "latest", "0.5", "v0.5.20", "0.5.20.1", "0.5.x", "None"])
def test_not_a_version(text: str) -> None:
    with pytest.raises(ValueError, match="is not an SGLang release"):
        releases.parse_version(text)


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.5.11", "0.5.11"),
        ("0.5.12.post7", "0.5.12.post1"),
        ("0.5.23", "0.5.23"),
        ("0.7.0", "0.5.23"),
        ("0.5.13rc1", "0.5.12.post1"),
    ],
)
def test_nearest_known_release(version: str, nearest: str) -> None:
    assert releases.nearest(version) == nearest


# What the parsers were seen to take (by hand, from `--help` of each release).
@pytest.mark.parametrize(
    ("version", "name", "flag"),
    [
        ("0.5.11", "cuda-graph-max-bs", "--cuda-graph-max-bs"),
        ("0.5.13", "cuda-graph-max-bs-decode", "--cuda-graph-max-bs"),
        ("0.5.14", "cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
        ("0.5.20", "cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
        ("0.5.23", "cuda-graph-bs", "--cuda-graph-bs-decode"),
        ("0.5.11", "speculative-draft-window-size", "--speculative-dflash-draft-window-size"),
        ("0.5.12", "speculative-dflash-draft-window-size", "--speculative-draft-window-size"),
        ("0.5.12.post1", "disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph"),
        ("0.5.23", "disable-piecewise-cuda-graph", "--disable-prefill-cuda-graph"),
        ("0.5.23", "--tp-size", "--tp-size"),
        ("0.5.18", "speculative-draft-kv-cache-dtype", "--speculative-draft-kv-cache-dtype"),
        ("0.9.0", "attn-dp-size", "--attn-dp-size"),
    ],
)
def test_option_for(version: str, name: str, flag: str) -> None:
    assert releases.option_for(version, name) == flag


@pytest.mark.parametrize(
    ("version", "name", "available"),
    [
        ("0.5.17", "speculative-draft-kv-cache-dtype", "it exists in 0.5.18 and later"),
        ("0.5.21", "attn-dp-size", "it exists in 0.5.22 and later"),
        ("0.5.20", "enforce-piecewise-cuda-graph", "it exists in 0.5.11 to 0.5.19"),
        ("0.5.23", "no-such-option", "no release from 0.5.11 to 0.5.23 has it"),
    ],
)
def test_option_that_a_release_lacks(version: str, name: str, available: str) -> None:
    with pytest.raises(releases.UnsupportedOption) as error:
        releases.option_for(version, name)
    assert error.value.available == available
    assert name in str(error.value)
    assert version in str(error.value)


@pytest.mark.parametrize("state", ["enabled", "disabled", "decode_only", "prefill_disabled"])
@pytest.mark.parametrize("version", release_options.RELEASES)
def test_graph_options_exist_in_their_release(version: str, state: str) -> None:
    options = releases.graph_options(version, state)
    assert bool(options) == (state != "enabled")
    for flag, value in options:
        assert releases.has_option(version, flag[2:])
        assert releases.takes_value(flag[2:]) == (value is not None)


def test_graph_state_must_be_known() -> None:
    with pytest.raises(ValueError, match="unknown state"):
        releases.graph_options("0.5.20", "auto")


def test_moved_options_cover_every_release_once() -> None:
    for name in releases.MOVED:
        for version in release_options.RELEASES:
            assert releases.has_option(version, releases.option_for(version, name)[2:]), (name, version)


def test_table_spans_are_ordered_and_known() -> None:
    for name, spans in release_options.OPTIONS.items():
        places = [release_options.RELEASES.index(release) for span in spans for release in span]
        assert places == sorted(places), name
    assert set(release_options.OPTIONS) >= release_options.SWITCHES
