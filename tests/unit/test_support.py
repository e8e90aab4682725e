"""What role sglang_service installs on a host works there by itself: whatever one of its modules imports is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sglang_support


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files as the module would write them."""
    folder = tmp_path_factory.mktemp("support")
    for name, module in sglang_support.FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Path(str(module.__file__)).read_text())
    return folder


@pytest.mark.parametrize("name", sorted(part.__name__.rpartition(".")[2] for part in sglang_support.PARTS))
def test_every_part_is_imported_from_what_is_installed(installed: Path, name: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(installed)!r}); import dflash_fleet.{name}"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
