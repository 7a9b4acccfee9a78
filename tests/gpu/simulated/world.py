"""All ranks of a world on simulated GPUs, each in a process of its own, over gloo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megarl import device
from megarl.placement.train_layout import TrainLayout
from tests.gpu.child import TIMEOUT_S, Child
from tests.gpu.rank import LONGEST

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"weight_decay": 0.1, "aux_loss": 0.02, "z_loss": 1e-3},
    "deepseek-v3": {"weight_decay": 0.1, "mtp_loss": 0.1, "router_bias_rate": 1e-3},
}
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # its compiler knows no such tensors
    "CUDA_VISIBLE_DEVICES": "",  # also where there is a GPU
    "MEGARL_DEVICE": "",
}
# Megatron's Triton kernels, which need a GPU.
WITHOUT_TRITON = {"moe_permute_fusion": False, "apply_rope_fusion": False}


class World:
    """The ranks' processes, which end with the block that started them."""

    def __init__(self, ranks: list[Child]) -> None:
        self._ranks = ranks

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """What the method returns on each rank, where it is collective."""
        for rank in self._ranks:
            rank.request(method, **arguments)
        return [rank.reply(timeout_s=2 * TIMEOUT_S) for rank in self._ranks]


def axes(layout: TrainLayout) -> dict[str, Any]:
    """The layout as keys of the recipe's `train`."""
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "cp": "auto" if layout.max_cp > 1 else layout.cp,
        "tokens_per_micro_batch": -(-LONGEST // layout.max_cp),
        "etp": layout.expert_tp or None,
        "layers_per_stage": layout.stage_layers,
    }


@contextmanager
def world(
    path: Path, gpus: int, megatron: Mapping[str, Any] | None = None, **given: Any
) -> Iterator[World]:
    """A world of simulated ranks; megatron: options beside those that such a rank needs; given: of SimulatedRank."""
    store = device.host_store(TIMEOUT_S)
    needed = WITHOUT_TRITON if "deepseek" in path.name else {"moe_permute_fusion": False}
    with ExitStack() as stack:
        children = [
            Child(
                "tests.gpu.simulated.rank:SimulatedRank",
                ENVIRONMENT,
                fresh=True,
                folder=str(path),
                rank=rank,
                gpus=gpus,
                meet=list(device.address_of(store)),
                megatron={**needed, **(megatron or {})},
                **given,
            )
            for rank in range(gpus)
        ]
        yield World([stack.enter_context(child) for child in children])
