"""The page of a benchmark in a real browser: no error on its console, nothing fetched, no wider than its window."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in ("module_utils", "rehearsal", "tests/unit"):
    sys.path.insert(0, str(ROOT / folder))

import fleet  # noqa: E402 - found by the lines above
from dflash_fleet import bench_page  # noqa: E402
from test_bench_page import measured  # noqa: E402

pytestmark = pytest.mark.faults

# What the page itself has said, and what it is really as wide as; printed where the browser logs its console.
PROBE = """<script>
addEventListener('load', () => {
  console.info('WIDTH ' + document.documentElement.scrollWidth + ' OF ' + innerWidth);
  console.info('FETCHED ' + performance.getEntriesByType('resource').length);
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    """Debian's Chromium; installed where it is missing, as the tests' other tools are."""
    if shutil.which("chromium") is None:
        fleet.apt_install(["chromium"])
    found = shutil.which("chromium")
    assert found
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = measured(rehearsal=True)
    path = tmp_path_factory.mktemp("page") / "index.html"
    text = bench_page.page([records], "throughput", [bench_page.plots(records)])
    path.write_text(text.replace("</head>", PROBE + "</head>"))
    return path


def opened(browser: str, page: Path, width: int) -> list[str]:
    """What the console says of a page in a window of a width."""
    shot = page.with_name(f"{width}.png")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent}/profile", f"--window-size={width},1200", f"--screenshot={shot}"]
    run = subprocess.run([*command, f"file://{page}"], capture_output=True, text=True, timeout=120, check=True)
    assert shot.stat().st_size > 10_000, "an empty page makes a small picture"
    return re.findall(r'CONSOLE.*?\] "?(.*?)"?, source:', run.stderr)


@pytest.mark.parametrize("width", [500, 1200])
def test_it_opens_without_an_error(browser: str, page: Path, width: int) -> None:
    said = opened(browser, page, width)
    assert said == [f"WIDTH {width} OF {width}", "FETCHED 0"], said


def test_an_error_would_be_seen(browser: str, tmp_path: Path) -> None:
    """The check itself can fail."""
    broken = tmp_path / "index.html"
    filler = "".join(f"<p>{number}</p>" for number in range(200))
    broken.write_text(f"<html><body>{filler}<script>nothing()</script></body></html>")
    assert "Uncaught ReferenceError: nothing is not defined" in opened(browser, broken, 900)
