"""The platform class itself; apart from the entry point because its base class imports most of SGLang."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

from cpu_dflash_platform import BACKEND, register_backend, table_qk_norm_rope_


class CpuDflashPlatform(CpuSRTPlatform):
    """The CPU platform, which may speculate with DFLASH."""

    # SGLang refuses DFLASH on its own CPU platform by name; an out-of-tree platform is asked instead.
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return BACKEND

    def init_backend(self) -> None:
        register_backend()
        import sglang.kernels.ops.attention.table_qk_norm_rope as kernels

        kernels.table_qk_norm_rope_ = table_qk_norm_rope_
        # A CPU has no streams: record_stream has no kernel there, and nothing is asynchronous, so it may do nothing.
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("record_stream", lambda _self, _stream: None, "CPU")

        def current_stream(_device: Any = None) -> torch.Stream:
            return torch.Stream(device="cpu")

        torch.cpu.current_stream = current_stream
