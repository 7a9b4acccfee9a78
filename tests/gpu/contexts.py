"""A process that imports megarl, and may then use the GPU."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch


class Importer:
    """Nothing is imported yet but torch."""

    def load(self, modules: Sequence[str]) -> bool:
        """Import modules; whether that made a context on the GPU."""
        for name in modules:
            importlib.import_module(name)
        return torch.cuda.is_initialized()

    def use(self) -> None:
        self._kept = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
