"""Stand-in for SGLang's kernel package, which exists for CUDA only: its names, and three functions that DFLASH calls.

SGLang imports many names from here and, with the torch_native attention backend on a CPU, calls none of them but those
below. Anything else raises when it is called, not when it is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"  # the release that SGLang 0.5.23 asks for


def copy_all_layer_kv_cache_cpu(data_ptrs: Any, strides: Any, tgt_loc: Any, src_loc: Any) -> None:
    """Copy rows of every layer's KV buffer from src_loc to tgt_loc; strides are bytes per row."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist()):
        # All rows are read before one is written: the two sets may overlap.
        rows = [ctypes.string_at(base + row * stride, stride) for row in sources]
        for row, content in zip(targets, rows):
            ctypes.memmove(base + row * stride, content, stride)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, pool_len: Any
) -> None:
    """Write newly allocated cache slots into each request's row, positions start to end."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[offset : offset + count].to(req_to_token.dtype)
        offset += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, pool_len: Any
) -> None:
    """The way back: read each request's cache slots, positions start to end, into one flat tensor."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        count = last - first
        out_cache_loc[offset : offset + count] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        offset += count


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: no CUDA or AMX kernels on this machine")

    missing.__name__ = name
    return missing
