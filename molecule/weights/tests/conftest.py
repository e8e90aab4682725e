"""A second hub, for what goes wrong."""

from __future__ import annotations

import sys
import threading

import controller
import faults
import mirror
import pytest

sys.dont_write_bytecode = True


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """Two revisions of a model of three shards, behind a gate, at an address that the host reaches."""
    host = controller.scenario_host(__file__, mirror.HOST)
    address = faults.sh(host, "hostname -I").split()[0].rsplit(".", 1)[0] + ".1"
    served = mirror.Mirror(tmp_path_factory.mktemp("mirror"), address)
    threading.Thread(target=served.server.serve_forever, args=(0.1,), daemon=True).start()
    yield served
    served.server.shutdown()


@pytest.fixture(autouse=True)
def _nothing_wrong(hub):
    hub.wrong()
