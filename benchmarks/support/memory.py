"""Memory of a command and its children while it runs: what the controller of a fleet needs."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def children(root: int) -> list[int]:
    """The process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                stat = (path / "stat").read_text()
            except OSError:
                continue  # it has ended meanwhile
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(path.name))
    found, left = [], [root]
    while left:
        pid = left.pop()
        found.append(pid)
        left += parents.get(pid, [])
    return found


def proportional_kib(pid: int) -> int:
    """A process' share of memory; pages that forks share are counted once over all of them."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass  # it has ended meanwhile
    return 0


class Peak(threading.Thread):
    """Looks every so often until it is told to stop; `kib` is the most that was seen."""

    def __init__(self, pid: int, seconds: float = 0.3) -> None:
        super().__init__(daemon=True)
        self.pid, self.seconds, self.kib = pid, seconds, 0
        self.over = threading.Event()

    def run(self) -> None:
        """Look, wait, look again."""
        while not self.over.wait(self.seconds):
            own = os.getpid()
            self.kib = max(self.kib, sum(proportional_kib(pid) for pid in children(self.pid) if pid != own))

    def stop(self) -> float:
        """The most that was seen, in MiB."""
        self.over.set()
        self.join()
        return round(self.kib / 1024, 1)
