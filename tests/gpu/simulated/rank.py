"""A training rank of a tiny model on the simulated GPU: with TransformerEngine's layers where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from tests.gpu.simulated import cuda

cuda.install()

import tests.gpu.rank as of_device  # noqa: E402 - megarl decides for the GPU when it is imported
from megarl.cpu.megatron_patches import send_to_experts_without_deepep  # noqa: E402
from megarl.model.lora_pairs import is_factor  # noqa: E402
from megarl.parallel import model, rank_model  # noqa: E402

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None


class SimulatedRank(of_device.Rank):
    """As its base. In float32 too: TransformerEngine's own attention, which refuses it, is replaced, as is DeepEP.

    has_engines_attributes: the attributes for TP are first set as TransformerEngine 2.14 leaves them, where it is not
    there to do so.
    """

    def __init__(self, has_engines_attributes: bool = False, **given: Any) -> None:
        torch.set_num_threads(1)
        if HAS_ENGINE:
            _prepare_engine()
        if has_engines_attributes:
            _set_as_the_engine()
        send_to_experts_without_deepep()
        super().__init__(**given)

    def has_engine(self) -> bool:
        return model.TRANSFORMER_ENGINE

    def calls(self) -> dict[str, int]:
        """How often each of TransformerEngine's kernels was called."""
        from tests.gpu.simulated import kernels

        return dict(kernels.CALLS)

    def weights(self) -> dict[str, list[Any]]:
        """Of each weight that is trained: a sum of its content, and both attributes for Megatron's sums over TP."""
        facts = {}
        for name, param in self._rank._unwrapped[0].named_parameters():
            if not is_factor(name):
                names = ("tensor_model_parallel", "sequence_parallel")
                attributes = [bool(getattr(param, attribute, False)) for attribute in names]
                facts[name] = [param.detach().double().sum().item(), *attributes]
        return facts


def _prepare_engine() -> None:
    """Import what calls the kernels, then replace these."""
    import megatron.core.optimizer.clip_grads  # noqa: F401

    from tests.gpu.simulated import kernels

    kernels.install()
    model.select_layers = lambda *_, **__: None


def _set_as_the_engine() -> None:
    set_tp_attributes = rank_model.set_tp_attributes

    def set_after_the_engine(chunks: Any, *given: Any) -> None:
        for param_name, param in (
            (name, param) for chunk in chunks for name, param in chunk.named_parameters()
        ):
            if ".experts." in param_name:
                param.tensor_model_parallel = False
            elif "_down_proj." in param_name:
                param.tensor_model_parallel = True
        set_tp_attributes(chunks, *given)

    rank_model.set_tp_attributes = set_after_the_engine
