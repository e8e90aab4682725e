"""Tokens on paper: how many a verify accepts, how fast steps go, and the text that is plainly none."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field

from .server_args import Plan
from .settings import Settings

TEXT = (
    "[rehearsal] this text was made without a model by the rehearsal engine of dflash-fleet ; it means nothing and "
    "only counts tokens ."
)
WORDS = TEXT.split()

NATURAL_LENGTH = (48, 160)  # tokens after which a request ends by itself, unless told to go on

# (drafter, graphs, kind) -> tokens per second at one stream, and at very many. Measured in the incident where it says
# so; the others are of the same make and only for rehearsals.
SPEED: dict[tuple[bool, bool, str], tuple[float, float]] = {
    (False, True, "tp"): (97.9, 1310.0),  # 97.9 measured
    (False, True, "ep4"): (93.0, 1531.0),  # peak measured
    (False, True, "ep8"): (90.0, 1493.0),  # peak measured
    (False, False, "tp"): (26.0, 1000.0),  # 26 measured
    (False, False, "ep4"): (25.0, 1160.0),
    (False, False, "ep8"): (24.0, 1130.0),
    (True, True, "tp"): (168.0, 1180.0),
    (True, True, "ep4"): (150.0, 1240.0),
    (True, True, "ep8"): (146.0, 1215.0),
    (True, False, "tp"): (83.0, 1050.0),
    (True, False, "ep4"): (86.0, 1160.0),
    (True, False, "ep8"): (86.0, 1146.0),  # both measured
    (False, True, "pp"): (22.0, 820.0),
    (False, False, "pp"): (9.0, 560.0),
}


def speed(plan: Plan, settings: Settings, streams: int) -> float:
    """Tokens per second of the whole server with this many streams."""
    kind = "pp" if plan.pp > 1 else "tp" if plan.ep == 1 else "ep8" if plan.ep == plan.tp else "ep4"
    single, peak = SPEED[(plan.speculative and kind != "pp", plan.decode_graphs, kind)]
    single = settings.throughput.get("single", single)
    peak = max(settings.throughput.get("peak", max(peak, single)), single)
    # Saturating growth through (1, single) towards peak.
    half = peak / single - 1
    return peak * streams / (streams + half) if half > 0 else peak


class Acceptance:
    """Draws tokens per verify so that their mean is the accept length asked for."""

    def __init__(self, mean: float, block: int) -> None:
        self.block = max(1, block)
        self.mean = min(max(mean, 1.0), float(self.block))
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            # Each further position is right with this chance: 1 + p + p^2 + ... tokens a verify.
            if sum(middle**k for k in range(self.block)) < self.mean:
                low = middle
            else:
                high = middle
        self.chance = high

    def draw(self, dice: random.Random) -> int:
        """Tokens of one verify, the bonus token counted."""
        tokens = 1
        while tokens < self.block and dice.random() < self.chance:
            tokens += 1
        return tokens


@dataclass
class Request:
    """One request on rank 0."""

    rid: str
    prompt: int
    limit: int
    ignore_eos: bool
    seed: int = 0
    done: int = 0
    verifies: int = 0
    drafts: int = 0  # correct drafts of finished verifies
    histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(zlib.crc32(self.rid.encode()) ^ self.seed)
        self.natural = self.dice.randrange(*NATURAL_LENGTH)

    @property
    def end(self) -> int:
        return self.limit if self.ignore_eos else min(self.limit, self.natural)

    @property
    def reason(self) -> str:
        return "length" if self.end == self.limit else "stop"

    def advance(self, acceptance: Acceptance, speculative: bool) -> int:
        """One decode step; returns the tokens it gives."""
        tokens = acceptance.draw(self.dice) if speculative else 1
        tokens = min(tokens, self.end - self.done)
        self.done += tokens
        if speculative:
            self.verifies += 1
            self.drafts += tokens - 1
            while len(self.histogram) < tokens:
                self.histogram.append(0)
            self.histogram[tokens - 1] += 1
        return tokens


def word(index: int) -> str:
    """The token at this place of an answer."""
    return ("" if index == 0 else " ") + WORDS[index % len(WORDS)]


def text(start: int, count: int) -> str:
    return "".join(word(index) for index in range(start, start + count))


def count_tokens(content: object) -> int:
    """A prompt's length on paper: four characters a token, a picture as many as the real tower makes of it."""
    if isinstance(content, str):
        return max(1, (len(content) + 3) // 4)
    if isinstance(content, list):
        if content and all(isinstance(item, int) for item in content):
            return len(content)
        return sum(count_tokens(item) for item in content) or 1
    if isinstance(content, dict):
        if content.get("type") == "image_url":
            return 324
        return count_tokens(content.get("text") or content.get("content") or "")
    return 1
