"""`python -m sglang.launch_server`: the entry point that units use."""

from __future__ import annotations

import sys
import warnings

if __name__ == "__main__":
    warnings.warn(
        "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint."
        " [rehearsal]",
        UserWarning,
        stacklevel=1,
    )
    from ._rehearsal.parent import run

    sys.exit(run(sys.argv[1:]))
