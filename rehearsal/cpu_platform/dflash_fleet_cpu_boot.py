"""Runs at interpreter start (through the .pth file beside it) when SGLANG_USE_CPU_ENGINE is 1.

torchvision on the package index is a CUDA build: beside a CPU torch its import fails because two operators were never
declared. Declaring their schemas before anybody imports it is enough; nothing here calls them.

torch takes seconds to import, and every interpreter of the environment passes here (pip, a version check, the resource
tracker). So the schemas are declared at the moment torchvision is looked for, not at start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _DeclareSchemas(MetaPathFinder):
    """Finds nothing: it only notices that torchvision is about to be imported, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for name in ("nms", "qnms"):
                torch.library.define(
                    "torchvision::" + name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _DeclareSchemas())
