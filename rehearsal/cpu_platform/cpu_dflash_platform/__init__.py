"""Out-of-tree SGLang platform: the CPU engine, plus what a DFLASH drafter needs (rehearsals and tests only).

Found by SGLang through the entry-point group `sglang.srt.platforms`. Nothing of the package `sglang` is changed on
disk, and none of its draft, verify or accept code is replaced. Written against 0.5.23.
"""

from __future__ import annotations

import copy
import os
from typing import Any

BACKEND = "torch_native"


def activate() -> str | None:
    """Entry point: the platform's class, or None where the CPU engine was not asked for."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return None
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices

    add_draft_attention_backend_choices([BACKEND])
    return "cpu_dflash_platform.platform:CpuDflashPlatform"


def register_backend() -> None:
    """Replace torch_native, under its own name, by a subclass that can verify a drafted block."""
    import torch
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class TorchNativeSpec(TorchNativeAttnBackend):
        """torch_native that takes a verify pass for what it is: an extend by the drafted tokens of each request."""

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Any:
            if forward_batch.forward_mode.is_target_verify():
                drafted = forward_batch.spec_info.draft_token_num
                verify = copy.copy(forward_batch)
                verify.extend_prefix_lens = forward_batch.seq_lens
                verify.extend_seq_lens = torch.full_like(forward_batch.seq_lens, drafted)
                verify.seq_lens = forward_batch.seq_lens + drafted
                forward_batch = verify
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    register_attention_backend(BACKEND)(TorchNativeSpec)


def table_qk_norm_rope_(
    qkv: Any,
    positions: Any,
    q_weight: Any,
    k_weight: Any,
    cos_sin: Any,
    q_heads: int,
    k_heads: int,
    dim: int,
    eps: float,
) -> None:
    """In torch what SGLang's Triton kernel of this name does: RMS norm of q and k, then neox rotation, in place."""
    import torch

    width = (q_heads + k_heads) * dim
    x = qkv[:, :width].float().view(-1, q_heads + k_heads, dim)
    weight = torch.cat([q_weight.float().expand(q_heads, dim), k_weight.float().expand(k_heads, dim)])
    # The kernel rounds to bfloat16 between norm and rotation; without it the drafts differ in the last bit.
    x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight).to(torch.bfloat16).float()
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, -1)
    a, b = x.chunk(2, -1)
    qkv[:, :width] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).reshape(-1, width).to(qkv.dtype)
