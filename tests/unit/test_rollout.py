"""The order of a rollout."""

from __future__ import annotations

import pytest
import yaml
from dflash_fleet import rollout
from plugins import ROOT


@pytest.mark.parametrize(
    ("hosts", "wanted", "sizes"),
    [
        (1, rollout.BATCHES, [1]),
        (3, rollout.BATCHES, [1, 1, 1]),
        (100, rollout.BATCHES, [1, 10, 25, 64]),
        (12, rollout.BATCHES, [1, 1, 3, 7]),
        (7, [2], [2, 2, 2, 1]),
        (5, ["50%"], [2, 2, 1]),
        (0, rollout.BATCHES, []),
    ],
)
def test_sizes(hosts, wanted, sizes):
    assert rollout.sizes(hosts, wanted) == sizes


@pytest.mark.parametrize("wanted", [[0], ["0%"], [-1], ["110%"], ["all"], [True], [], [1, "x"], [1.5], {}, None])
def test_what_is_no_batch_is_refused_with_the_variable(wanted):
    with pytest.raises(rollout.BatchError, match="sglang_rollout_batches"):
        rollout.check(wanted)


def test_the_first_host_says_the_batches():
    facts = {"a": {"sglang_rollout_batches": [2, "50%"]}, "b": {}}
    assert rollout.batches(["a", "b"], facts) == [2, "50%"]
    assert rollout.batches(["b", "a"], facts) == list(rollout.BATCHES)
    assert rollout.batches([], facts) == list(rollout.BATCHES)


def test_the_default_is_the_roles():
    defaults = yaml.safe_load((ROOT / "roles/sglang/defaults/main.yml").read_text())
    assert tuple(defaults["sglang_rollout_batches"]) == rollout.BATCHES


def test_failures():
    facts = {"a": {"sglang_failure": {"message": "x"}}, "b": {}}
    assert rollout.failures(["a", "b"], facts) == ["a"]


def test_the_text_says_who_comes_when():
    hosts = [f"gpu-{number}" for number in range(12)]
    facts = {key: {} for key in hosts}
    assert rollout.plan_text(hosts, facts) == "12 hosts in 4 batches of 1, 1, 3, 7; a batch with a failure is the last"
    assert rollout.plan_text(hosts[:1], facts) == "1 host at once"
