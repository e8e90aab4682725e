"""The page of a benchmark: complete in itself, well formed, nothing unescaped, and marked where it is a rehearsal."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from dflash_fleet import bench_page, choice
from test_choice import INCIDENT, records

STATISTICS = {"mean": 10.0, "p50": 9.0, "p90": 15.0, "p99": 20.0}


def measured(**more: Any) -> list[dict[str, Any]]:
    """Records with everything that a page shows."""
    whole = {
        "at": "2026-11-30T10:00:00.000000Z", "gpu": "RTX PRO 6000", "gpus": 8, "driver": "580.65.06",
        "engine": {"name": "sglang", "version": "0.5.20", "build": "cuda"},
        "model": {"name": "moonshotai/Kimi-K2.6", "revision": "a" * 40},
        "drafter_model": {"name": "SubSir/Kimi-K2.6-DFlash-tmp-long", "revision": "b" * 40},
        "arguments": ["-m", "sglang.launch_server", "--tp-size", "8", "--served-model-name", "<k&r>"],
        "known_issues": ["dflash_ep_replay"], "itl_ms": STATISTICS, "e2e_ms": STATISTICS, "request_tps": STATISTICS,
        "engine_log": {"kv_tokens": 500000},
    }  # fmt: skip
    return records(INCIDENT, **{**whole, **more})


class Page(HTMLParser):
    """Counts what is there, and sees that elements end where they should."""

    VOID = {"meta", "link", "br"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href") and value and value[0] != "#"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def images() -> dict[str, dict[str, bytes]]:
    return bench_page.plots(measured(), ("svg", "png"))


def test_there_is_a_plot_of_everything_that_was_measured(images: dict[str, dict[str, bytes]]) -> None:
    assert list(images) == ["throughput", "per_request", "ttft", "itl", "e2e", "accept", "memory"]
    for kinds in images.values():
        ElementTree.fromstring(kinds["svg"])
        assert kinds["png"].startswith(b"\x89PNG")
    shown = images["throughput"]["svg"].decode()
    for name in INCIDENT:
        assert name in shown, "text is text"


def test_a_page_needs_nothing_else(images: dict[str, dict[str, bytes]]) -> None:
    page = Page(bench_page.page([measured()], "throughput", [images]))
    assert page.links == ["data:,"]
    assert "ep4, 1531 tok/s at 256" in page.text
    assert "<k&r>" in page.text, "escaped in the source, as it is for a reader"
    assert "REHEARSAL" not in page.text
    assert "8 x RTX PRO 6000, driver 580.65.06" in page.text
    assert "dflash_ep_replay" in page.text


def test_ids_of_several_images_do_not_clash(images: dict[str, dict[str, bytes]]) -> None:
    found: dict[str, str] = {}
    for name, kinds in images.items():
        for identity in set(re.findall(r'<clipPath id="([^"]+)"', kinds["svg"].decode())):
            assert found.setdefault(identity, name) == name


def test_a_rehearsal_says_so_on_page_and_plot() -> None:
    played = measured(rehearsal=True)
    drawn = bench_page.plots(played)
    page = bench_page.page([played], "latency", [drawn])
    assert "REHEARSAL" in Page(page).text
    assert all("[rehearsal]" in kinds["svg"].decode() for kinds in drawn.values())


def test_without_the_library_the_page_has_its_tables() -> None:
    page = Page(bench_page.page([measured()], {"concurrency": 16}, [{}]))
    assert "16 streams at once: ep4" in page.text
    assert "<svg" not in page.text


def test_what_was_not_measured_has_no_line() -> None:
    lines = bench_page.series(choice.curves(measured()), lambda record: record["accept_length"])
    assert list(lines) == ["ep8+dflash, graphs disabled"]
