"""Drafters that do not fit their target: what this project says of each, and what the real SGLang does with it.

Five end its start, after the target's weights were read; with three it starts and says nothing, or a warning.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass

import controller
import engine
import pytest
import starts

sys.path.insert(0, str(controller.ROOT / "rehearsal"))
import models

UNIT = "sglang-main-single.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
READY = "The server is fired up and ready to roll!"


@dataclass(frozen=True)
class Case:
    """A drafter of rehearsal/models.py."""

    refused: str  # by drafter_check, with both values
    crash: str = ""  # the exception that ends SGLang, empty where it starts
    phase: str = ""  # in which it ends
    warning: str = ""  # what SGLang logs where it starts


BAD = {
    "hidden-size": Case(
        "the drafter's hidden_size is 32, the target's 64",
        crash="ValueError: DFLASH target_hidden feature dim mismatch. Expected shape [N, 96]",
        phase="warmup",
    ),
    "layer-id": Case(
        "the drafter reads the target's layer 9 (target_layer_ids [0, 1, 9]), but the target has 4 layers, 0 to 3",
        crash="ValueError: DFLASH target_layer_ids contains an out-of-range layer id. "
        "target_layer_ids[2]=9, target_num_layers=4",
        phase="dist_init",
    ),
    "k-mismatch": Case(
        "fc.weight has the shape [64, 128], but 3 target layers of hidden size 64 need [64, 192]",
        crash="ValueError: DFLASH fc.weight shape mismatch",
        phase="weights",
    ),
    "mask-token": Case(
        "the drafter's mask_token_id is 512, outside the target's vocabulary of 512",
        crash="ValueError: DFLASH mask_token_id is outside the target vocab size. mask_token_id=512, vocab_size=512",
        phase="kv_cache",
    ),
    "architecture": Case(
        "the drafter's architecture is NoSuchDraftModel, SGLang 0.5.23 runs DFlashDraftModel",
        crash="ValueError: Cannot find model module. 'NoSuchDraftModel' is not a registered model",
        phase="weights",
    ),
    "num-target-layers": Case(
        "the drafter was made for a target of 36 layers, this one has 4",
        warning="Draft config num_target_layers=36 differs from runtime target num_hidden_layers=4",
    ),
    "block-size": Case(
        "sglang_drafter_block_size is 8, but the drafter was made for another: its configuration says 4",
        warning="DFLASH block size mismatch: using speculative_num_draft_tokens=8 but draft config block_size=4",
    ),
    "fc-missing": Case("fc.weight (shape [64, 192]) is not in the drafter's 24 tensors"),
}
REPOS = models.build(bad=True)


def folder(repo):
    """Where a repository lies on the host."""
    return f"{engine.ROOT}/models/{repo.replace('/', '--')}/{models.revision_of(REPOS[repo])}"


def test_every_bad_drafter_is_tried():
    assert set(BAD) == set(models.BAD_DRAFTERS)


def test_all_are_refused_before_anything_is_touched(host):
    """Each as the drafter of an instance of its own, in one run; its weights come to the host, and nothing starts."""
    serving = engine.show(host, UNIT, "InvocationID")
    wanted = [
        {
            "name": what, "port": 31000 + number, "drafter_model": models.BAD_PREFIX + what,
            "drafter_revision": models.revision_of(REPOS[models.BAD_PREFIX + what]),
        }
        for number, what in enumerate(BAD)
    ]
    settings = json.dumps({"sglang_instances": wanted})
    output = " ".join(controller.play(__file__, "deploy-dflash.yml", "-e", settings, rc=2).split())
    for what, case in BAD.items():
        drafter = re.escape(folder(models.BAD_PREFIX + what))
        said = re.search(rf"The drafter {drafter} of instance {what} does not fit(.*?)\(model_weights_drafter", output)
        assert said, (what, output)
        assert case.refused in said[1].replace("\\n", "").replace("''", "'"), (what, said[1])
    assert engine.sudo(host, "ls /etc/systemd/system | grep ^sglang-").split() == [UNIT]
    assert engine.show(host, UNIT, "InvocationID") == serving


@pytest.fixture
def started(host):
    """Starts the role's unit with another drafter in its command line; the unit is as it was afterwards."""
    kept = engine.sudo(host, f"cat {UNIT_FILE}")
    assert kept.count(folder(models.DRAFTER)) == 1

    def start(repo):
        # That it drafts nothing is the gate's finding, in a scenario of its own; here it is SGLang that is asked.
        text = kept.replace(folder(models.DRAFTER), folder(repo))
        text = re.sub(r"--min-accept-length \S+", "--min-accept-length 1.0", text)
        engine.sudo(host, f"printf %s {shlex.quote(text)} > {UNIT_FILE} && systemctl daemon-reload")
        return starts.watch(host, starts.ACTIVE, starts.FAILED, before=restart(), unit=UNIT, seconds=150)

    yield start
    engine.sudo(host, f"systemctl stop {UNIT}; printf %s {shlex.quote(kept)} > {UNIT_FILE} && systemctl daemon-reload")


def restart():
    """As a person would."""
    return (f"systemctl reset-failed {UNIT} || true", f"systemctl restart --no-block {UNIT}")


def lines(host, invocation):
    """What the unit printed in one start."""
    return engine.sudo(host, f"journalctl --no-pager --all -o cat _SYSTEMD_INVOCATION_ID={invocation}")


@pytest.mark.parametrize("what", [what for what, case in BAD.items() if case.crash])
def test_sglang_dies_of_it_and_the_report_says_why(host, started, what):
    known = starts.reports(host)
    rows = started(models.BAD_PREFIX + what)
    assert rows[-1]["ActiveState"] == "failed", rows
    # Nothing that a second start would mend.
    assert rows[-1]["NRestarts"] == "0", rows
    text = lines(host, rows[0]["InvocationID"])
    assert BAD[what].crash in text, text[-4000:]
    report = starts.newest_report(host, known)
    crash = report["crash"]
    assert (crash["verdict"], crash["cause"]) == ("crashed", "drafter_mismatch"), crash
    assert f"{crash['exception']['type']}: {crash['exception']['message']}".startswith(BAD[what].crash), crash
    assert [remedy["id"] for remedy in crash["remedies"]][:1] == ["matching_drafter"], crash
    # Wrong layers are found before the load, a wrong hidden size in the first batch, with the port bound.
    assert crash["phase"] == BAD[what].phase, crash


@pytest.mark.parametrize("what", [what for what, case in BAD.items() if not case.crash])
def test_sglang_serves_with_it_as_if_nothing_were_wrong(host, started, what):
    rows = started(models.BAD_PREFIX + what)
    assert rows[-1]["ActiveState"] == "active", rows
    text = lines(host, rows[0]["InvocationID"])
    assert READY in text
    assert "Traceback" not in text
    assert BAD[what].warning in text
    assert folder(models.BAD_PREFIX + what) in text
    answer = engine.generate(host, "One, two, three,", 16)
    assert answer["meta_info"]["completion_tokens"] == 16
    assert answer["meta_info"]["spec_accept_length"] >= 1.0
