"""A training rank of a tiny model on this process's device, built as a run builds it."""

from __future__ import annotations

import hashlib
import random
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch._C._distributed_c10d import HashStore

from megarl import device
from megarl.checkpoints import hf_import
from megarl.model.hf_config import read_model
from megarl.model.lora_pairs import LoraSize, weight_of
from megarl.model.shape import ModelShape
from megarl.parallel import model
from megarl.parallel.packing import PackedRow, unpack
from megarl.parallel.pipeline import Norms
from megarl.parallel.rank_model import RankModel
from megarl.placement.roles import Role, train_layout
from megarl.resharding import lora_map, megatron_map
from megarl.resharding.shards import Shard, verify_params, views
from megarl.training.matrix_parts import matrix_parts
from megarl.types import TrainSequence

LR, DENOMINATOR = 1e-3, 97.0
LONGEST = 40  # tokens of a sequence, at most


def train_keys(**given: Any) -> dict[str, Any]:
    """`train` of a recipe: its defaults, Megatron's own layers allowed, and what is given."""
    return {
        "tp": 1, "pp": 1, "ep": 1, "cp": 1, "vpp": 1, "etp": None, "layers_per_stage": (),
        "lr": LR, "warmup_steps": 0, "lr_schedule": "constant", "lr_end": 0.0, "weight_decay": 0.0, "grad_clip": 1.0,
        "tokens_per_micro_batch": 4096, "updates_per_step": 1, "aux_loss": 0.0, "z_loss": 0.0, "mtp_loss": 0.0,
        "router_bias_rate": 0.0, "replay": "off", "share_prefixes": False, "recompute": {},
        "optimizer_name": "adamw", "optimizer_offload": False, "local_layers": True,
        "megatron": {}, "ddp": {}, "optimizer": {}, "numbers": "plain", "fp8_backward": "dequantised",
    } | given  # fmt: skip


def _lora() -> SimpleNamespace:
    return SimpleNamespace(
        rank=4, experts=2, alpha=6.0, targets=(), sync="merged", rounding="nearest"
    )


def recipe(path: str, dtype: str, has_adapters: bool, gpus: int = 1, **train: Any) -> Any:
    """What a rank's model reads of a recipe; the recipe's own classes need pydantic."""
    return SimpleNamespace(
        run=SimpleNamespace(seed=1, timeout_s=60.0),
        model=SimpleNamespace(path=path, dtype=dtype),
        lora=_lora() if has_adapters else None,
        train=SimpleNamespace(**train_keys(**train)),
        placement=SimpleNamespace(gpus=gpus, train_gpus=None, gpu_of=lambda slot: slot),
        checkpoint=SimpleNamespace(asynchronous=True),
        data=SimpleNamespace(max_prompt_tokens=0),
        longest_sample=LONGEST,
    )


def sequences(count: int, vocab_size: int, longest: int) -> list[TrainSequence]:
    """Random tokens of unequal lengths, half of them learnt from."""
    rng, drawn = np.random.default_rng(3), []
    for _ in range(count):
        length = int(rng.integers(2, longest + 1))
        mask_T = np.arange(length) >= length // 2
        drawn.append(
            TrainSequence(
                token_ids_T=rng.integers(0, vocab_size, length),
                loss_mask_T=mask_T,
                loss_weight_T=mask_T.astype(np.float32),
                advantage_T=(mask_T * rng.normal(size=length)).astype(np.float32),
                engine_logp_T=np.zeros(length, np.float32),
            )
        )
    return drawn


class Rank:
    """Rank `rank` of a world of `gpus` ranks, or its only one, with the weights of the checkpoint in `folder`.

    In float32 unless dtype is given, or in bfloat16 where TransformerEngine runs: it has no attention in float32.
    adapters: of all linear layers, not 0, are trained in place of the weights. meet: the address of the ranks' store.
    """

    def __init__(
        self,
        folder: str,
        dtype: str = "",
        deterministic: bool = False,
        adapters: bool = False,
        rank: int = 0,
        gpus: int = 1,
        meet: Sequence[Any] = (),
        **train: Any,
    ) -> None:
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        dtype = dtype or ("bfloat16" if model.TRANSFORMER_ENGINE else "float32")
        rank_recipe = recipe(folder, dtype, adapters, gpus, **train)
        role = Role("policy", rank_recipe, train_layout(rank_recipe), 0, False, read_model(folder))
        shape, size = role.shape, role.lora
        of_rank = shape, role.layout, rank
        pairs = lora_map.pairs(*of_rank, size, model.TRANSFORMER_ENGINE) if size else ()
        split = megatron_map.split_params(*of_rank, model.TRANSFORMER_ENGINE)
        store = (
            device.join_store(device.Address(*meet), rank_recipe.run.timeout_s)
            if meet
            else HashStore()
        )
        has_muon = rank_recipe.train.optimizer_name == "muon"
        self._rank = RankModel(
            rank,
            role,
            store,
            tp_split_params=split,
            pairs=pairs,
            matrix_parts=matrix_parts(*of_rank, model.TRANSFORMER_ENGINE) if has_muon else (),
        )
        shards = megatron_map.shards(*of_rank, model.TRANSFORMER_ENGINE)
        hf_import.load_hf(folder, shards, self._rank.params())
        if size:
            _set_factors(
                lora_map.shards(*of_rank, size, model.TRANSFORMER_ENGINE),
                shape,
                size,
                self._rank.factors(),
            )
        self._rank.make_optimizer()
        everything = sequences(12, shape.vocab_size, LONGEST)
        batches = [everything[:3], everything[3:8], everything[8:]]
        self._batches = [batch[self._rank.at.dp :: self._rank.layout.dp] for batch in batches]
        if role.layout.max_cp > 1:  # the first row is split over the data-parallel ranks
            self._batches[0] = [replace(each, cp=role.layout.max_cp) for each in batches[0]]
        tokens, learnt = (sum(map(count, everything)) for count in (_num_tokens, _num_learnt))
        self._norms = Norms(DENOMINATOR, tokens, learnt)

    def device(self) -> str:
        return device.DEVICE

    def dispatchers(self) -> list[str]:
        """The classes by which its layers send tokens to experts."""
        modules = [module for chunk in self._rank._unwrapped for module in chunk.modules()]
        found = [getattr(module, "token_dispatcher", None) for module in modules]
        return sorted({type(dispatcher).__name__ for dispatcher in found if dispatcher})

    def logprobs(self) -> list[float]:
        """Of all tokens of this rank's sequences, one behind the other; on the last stage of a pipeline."""

        def keep(row: PackedRow, logp_T: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return logp_T.sum(), unpack(row, logp_T)

        done = self._rank.pipeline.run(self._rows(), keep)
        return [float(logp) for arrays in done.results for array_T in arrays for logp in array_T]

    def logprobs_without_adapters(self) -> list[float]:
        assert self._rank.adapters
        with self._rank.adapters.without():
            return self.logprobs()

    def step(self) -> dict[str, float]:
        """One optimizer step: the loss, the norm of its gradient, and the seconds that it takes.

        The loss is that of this rank's own sequences, 0 before the last stage of a pipeline.
        """

        def loss(
            row: PackedRow, logp_T: torch.Tensor, entropy_T: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            per_token_T = -row.targets.advantage_T * logp_T - 0.01 * entropy_T
            total = torch.where(row.targets.loss_mask_T, per_token_T, 0.0).sum()
            copies = row.cp // self._rank.layout.cp  # ranks that have it
            return total, total.detach() / copies

        started = time.perf_counter()
        self._rank.zero_grad()
        done = self._rank.pipeline.run(self._rows(), loss, norms=self._norms)
        norm = self._rank.step(LR)
        mean_loss = float(sum(done.results)) / DENOMINATOR
        return {"loss": mean_loss, "grad_norm": norm, "seconds": time.perf_counter() - started}

    def offload(self) -> dict[str, Any]:
        """Give memory to an engine; what the device held before and after, and where the optimizer's state is."""
        before, started = device.held_bytes(), time.perf_counter()
        self._rank.offload()
        seconds = time.perf_counter() - started
        states = [moment for moment in self._moments() if moment.dim()]
        return {
            "before_bytes": before,
            "after_bytes": device.held_bytes(),
            "seconds": seconds,
            "on_host": all(state.is_cpu for state in states),
            "pinned": device.DEVICE == "cpu" or all(state.is_pinned() for state in states),
        }

    def onload(self) -> None:
        self._rank.onload()

    def save(self, folder: str) -> None:
        self._rank.save(Path(folder)).finish()

    def load(self, folder: str) -> None:
        self._rank.load(Path(folder))

    def digest(self) -> str:
        """Of the weights and the optimizer's state."""
        digest = hashlib.sha256()
        for tensor in (*self._rank.params().values(), *self._moments()):
            digest.update(
                tensor.detach()
                .cpu()
                .clone()
                .contiguous()
                .flatten()
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        return digest.hexdigest()

    def draws(self) -> list[float]:
        """One number of each generator: Python's, NumPy's, torch's, the device's and Megatron's."""
        with get_cuda_rng_tracker().fork():  # type: ignore[union-attr]
            tracked = torch.rand((), device=device.DEVICE)
        drawn = torch.rand(()), torch.rand((), device=device.DEVICE), tracked
        return [random.random(), float(np.random.rand()), *map(float, drawn)]

    def _rows(self) -> list[PackedRow]:
        return [self._rank.pack(batch) for batch in self._batches]

    def _moments(self) -> Iterator[torch.Tensor]:
        for chained in self._rank.optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:
                for param in group["params"]:
                    state = chained.optimizer.state[param]
                    yield from (
                        state[name] for name in sorted(state) if torch.is_tensor(state[name])
                    )


@torch.no_grad()
def _set_factors(
    shards: Sequence[Shard], shape: ModelShape, size: LoraSize, held: Mapping[str, torch.Tensor]
) -> None:
    """Give every factor B its part of a whole that the tensor's name decides, whichever layers and ranks have it."""
    verify_params(shards, held)
    extents = lora_map.adapted_weights(shape, size)
    for shard in (factor for factor in shards if ".lora_B." in factor.name):
        rows = extents[weight_of(shard.name)][1]
        planes = [
            plane for view in views(held, shard.param, shard.at, shard.size) for plane in view
        ]
        for item, plane in zip(range(*shard.items), planes, strict=True):
            rng = np.random.default_rng(zlib.crc32(shard.name.format(item).encode()))
            whole = rng.normal(size=(rows, plane.shape[1]), scale=0.05).astype(np.float32)
            plane.copy_(torch.from_numpy(whole[slice(*shard.rows)].copy()))


def _num_tokens(sequence: TrainSequence) -> int:
    return len(sequence.token_ids_T)


def _num_learnt(sequence: TrainSequence) -> int:
    return int(sequence.loss_mask_T.sum())
