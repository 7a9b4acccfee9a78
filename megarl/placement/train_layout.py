"""Rank arithmetic of the training world: the part of the model that each rank holds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megarl.model.families import family_of
from megarl.model.shape import ModelShape
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed


def divisors(number: int) -> list[int]:
    """All positive divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest(value: int, valid: list[int]) -> str:
    """The nearest valid values below and above `value`, as text for an error message."""
    below = [v for v in valid if v <= value][-1:]
    above = [v for v in valid if v > value][:1]
    return " or ".join(str(v) for v in below + above) or "no value fits"


def fewest_ranks(tokens: int, per_rank: int) -> int:
    """The fewest ranks, a power of two, that have room for so many tokens, with room for `per_rank` each."""
    return 1 << (max(1, -(-tokens // per_rank)) - 1).bit_length()


@dataclass(frozen=True)
class RankCoords:
    """A training rank's coordinates on Megatron's two grids: (tp, cp, dp, pp) of dense layers, (etp, ep, edp, pp)."""

    rank: int
    tp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int
    cp: int = 0


@dataclass(frozen=True)
class TrainLayout:
    """Parallel sizes over `world_size` training ranks (Megatron's order tp-cp-ep-dp-pp).

    vpp: virtual stages (model chunks) of each pipeline rank. expert_tp: ranks that split one expert; 0: see `etp`.
    stage_layers: decoder layers of each of the pp x vpp virtual stages, in the order of the layers; (): all equal.
    max_cp: with `train.cp: auto`, where cp is 1, the most data-parallel ranks that split one row among them, a power of
    two; each row is split over as few as hold it.
    """

    world_size: int
    tp: int
    pp: int
    ep: int
    cp: int = 1
    vpp: int = 1
    expert_tp: int = 0
    stage_layers: tuple[int, ...] = ()
    max_cp: int = 1

    @property
    def etp(self) -> int:
        """Ranks that split one expert: Megatron 0.16.1 loses expert gradients at TP > 1, EP 1, ETP 1."""
        return self.expert_tp or (self.tp if self.ep == 1 else 1)

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.pp * self.etp * self.ep)

    def coords(self, rank: int) -> RankCoords:
        """The coordinates of `rank`; the rightmost axis of the order varies slowest."""
        return RankCoords(
            rank=rank,
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // (self.tp * self.cp * self.dp),
            etp=rank % self.etp,
            ep=rank // self.etp % self.ep,
            edp=rank // (self.etp * self.ep) % self.edp,
        )

    @property
    def tokens_align(self) -> int:
        """Sequence lengths are padded to a multiple of this: each CP rank holds two equal chunks of a sequence."""
        most = max(self.cp, self.max_cp)
        return 2 * most if most > 1 else 1

    @property
    def cp_words(self) -> str:
        """The context-parallel ranks of a row, in words; "" where there is one."""
        if self.max_cp > 1:
            return f"auto, up to {self.max_cp}"
        return str(self.cp) if self.cp > 1 else ""

    @property
    def batch_multiple(self) -> int:
        """A step's micro-batches are a multiple of this: an interleaved pipeline takes `pp` at a time."""
        return self.pp if self.vpp > 1 else 1

    @property
    def bubble_micro_batches(self) -> float:
        """The pipeline's bubble, in micro-batches' time: while it fills and drains (Narayanan et al. 2021, 2.2)."""
        return (self.pp - 1) / self.vpp

    def virtual_stages(self, pp_rank: int) -> range:
        """The numbers of a pipeline stage's model chunks among all virtual stages, in the order of the layers."""
        return range(pp_rank, self.pp * self.vpp, self.pp)

    def layers(self, pp_rank: int, num_layers: int, chunk: int = 0) -> range:
        """The global layer numbers (from 0) of one model chunk of a pipeline stage."""
        stage = self.virtual_stages(pp_rank)[chunk]
        if self.stage_layers:
            start = sum(self.stage_layers[:stage])
            return range(start, start + self.stage_layers[stage])
        per_stage = num_layers // (self.pp * self.vpp)
        return range(stage * per_stage, (stage + 1) * per_stage)

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding over all TP ranks: Megatron pads to a multiple of 128 x TP."""
        return math.ceil(vocab_size / (128 * self.tp)) * 128 * self.tp

    def errors(self, shape: ModelShape) -> list[UserError]:
        """Errors of sizes that this layout does not divide, in the model and in the world."""
        errors = self._tp_errors(shape) + self._stage_errors(shape) + self._cp_errors(shape)
        dense = self.tp * self.cp * self.pp
        if self.world_size % dense:
            if self.cp == 1:
                axes = ("tp", "pp")
            else:
                axes = ("tp", "cp", "pp")
            hint = f"set it to a multiple of {dense}, or lower {' or '.join(f'train.{axis}' for axis in axes)}"
            product = " x ".join(f"train.{axis}" for axis in axes)
            problem = f"{self.world_size} GPUs are not a multiple of {product} = {dense}"
            errors.append(UserError("placement.gpus", problem, hint))
        elif self.dp % self.max_cp:
            needed = f"auto splits the longest sample over {self.max_cp} ranks"
            problem = f"{needed}, which do not divide the {self.dp} data-parallel ranks"
            hint = "raise train.tokens_per_micro_batch, or lower train.tp or train.pp"
            errors.append(UserError("train.cp", problem, hint))
        return errors + (
            self._expert_errors(shape) if shape.num_experts else self._no_expert_errors()
        )

    def _cp_errors(self, shape: ModelShape) -> list[UserError]:
        """Linear attention shares out a TP rank's key heads over the context-parallel ranks."""
        cp = max(self.cp, self.max_cp)
        if shape.delta is None or shape.delta.num_key_heads // self.tp % cp == 0:
            return []
        heads = shape.delta.num_key_heads // self.tp
        problem = f"{cp} does not divide the {heads} key heads of linear attention on a TP rank"
        hint = f"set train.cp to {nearest(cp, divisors(max(heads, 1)))}, or lower train.tp"
        return [UserError("train.cp", problem, hint)]

    def _tp_errors(self, shape: ModelShape) -> list[UserError]:
        valid = [
            tp for tp in divisors(shape.num_heads) if not replace(self, tp=tp)._tp_problems(shape)
        ]
        hint = f"set train.tp to {nearest(self.tp, valid)}"
        return [
            UserError("train.tp", f"{self.tp} {problem}", hint)
            for problem in self._tp_problems(shape)
        ]

    def _tp_problems(self, shape: ModelShape) -> list[str]:
        """Descriptions of the sizes that the TP ranks do not divide."""
        sizes = {"the attention heads": shape.num_heads}
        if shape.num_dense_layers:
            sizes["the width of a dense layer"] = shape.ffn_size
        if shape.num_mtp_layers:
            sizes["the hidden size, which multi-token prediction's projection cuts"] = (
                shape.hidden_size
            )
        if shape.num_shared_experts:
            sizes["the shared experts' width"] = shape.num_shared_experts * shape.moe_ffn_size
        if shape.num_experts and self.ep == 1:
            sizes["the experts' width"] = shape.moe_ffn_size
        if shape.delta:
            sizes["linear attention's key heads"] = shape.delta.num_key_heads
        problems = [
            f"does not divide {what} ({size})" for what, size in sizes.items() if size % self.tp
        ]
        kv_heads = shape.num_kv_heads
        if shape.mla or kv_heads % self.tp == 0:
            return problems
        if family_of(shape).has_wide_norms:
            what = "as the norm over all of them needs"
            return [*problems, f"does not divide the key/value heads ({kv_heads}), {what}"]
        # cut inside a group of heads (attention.py)
        fused = (shape.num_heads + 2 * kv_heads) * shape.head_dim
        if self.tp % kv_heads:
            problems.append(
                f"neither divides nor is a multiple of the key/value heads ({kv_heads})"
            )
        elif shape.num_heads % self.tp == 0 and fused % self.tp:
            problems.append(f"does not divide the rows of the fused query, key and value ({fused})")
        return problems

    def _stage_errors(self, shape: ModelShape) -> list[UserError]:
        if self.vpp > 1 and self.pp == 1:
            return [
                UserError(
                    "train.vpp",
                    f"{self.vpp} needs a pipeline",
                    "set train.vpp to 1 or raise train.pp",
                )
            ]
        stages = self.pp * self.vpp
        layers = shape.num_layers
        if self.stage_layers:
            good = len(self.stage_layers) == stages and sum(self.stage_layers) == layers
            if good and min(self.stage_layers) >= 0 and 0 not in self.stage_layers[1:-1]:
                return []
            problem = f"{list(self.stage_layers)} are not {stages} numbers that make {layers} layers, or a 0 is inside"
            hint = f"write {stages} numbers, one for each of train.pp x train.vpp stages, whose sum is {layers}"
            return [UserError("train.layers_per_stage", problem, hint)]
        if layers % stages == 0:
            return []
        if self.vpp == 1:
            product = f"{self.pp}"
        else:
            product = f"train.pp x train.vpp = {stages}"
        problem = f"{product} does not divide the layers ({layers})"
        if self.vpp > 1 and layers % self.pp == 0:
            hint = f"set train.vpp to {nearest(self.vpp, divisors(layers // self.pp))}"
            return [UserError("train.vpp", problem, hint)]
        valid = [pp for pp in divisors(layers) if layers % (pp * self.vpp) == 0]
        hint = f"set train.pp to {nearest(self.pp, valid or divisors(layers))}"
        return [UserError("train.pp", problem, hint if valid else f"{hint} and train.vpp to 1")]

    @listed
    def _expert_errors(self, shape: ModelShape) -> ErrorIterator:
        problem = self._ep_problem(shape)
        if problem:
            yield UserError("train.ep", problem, self._ep_hint(shape))
        if self.ep == 1 and self.etp != self.tp:
            problem = f"{self.etp} with train.ep 1: Megatron sums the experts' gradients as if it were train.tp"
            yield UserError("train.etp", problem, f"set train.etp to {self.tp}")
        elif self.ep > 1 and shape.moe_ffn_size % self.etp:
            problem = f"{self.etp} does not divide the experts' width ({shape.moe_ffn_size})"
            hint = f"set train.etp to {nearest(self.etp, divisors(shape.moe_ffn_size))}"
            yield UserError("train.etp", problem, hint)

    def _ep_hint(self, shape: ModelShape) -> str:
        sizes = divisors(shape.num_experts)
        valid = [ep for ep in sizes[1:] if not replace(self, ep=ep)._ep_problem(shape)]
        if self.expert_tp in (0, self.tp):
            valid = [1, *valid]  # one EP rank needs an ETP that is TP
        if valid:
            return f"set train.ep to {nearest(self.ep, valid)}"
        valid = [ep for ep in sizes if not replace(self, ep=ep, expert_tp=0)._ep_problem(shape)]
        return f"set train.ep to {nearest(self.ep, valid)} and leave out train.etp"

    def _ep_problem(self, shape: ModelShape) -> str:
        """A description of a size that the EP ranks do not divide; "" if none, or if the dense axes do not fit."""
        if shape.num_experts % self.ep:
            return f"{self.ep} does not divide the experts ({shape.num_experts})"
        stage = self.world_size // self.pp
        if self.world_size % (self.tp * self.cp * self.pp) or stage % (self.etp * self.ep) == 0:
            return ""
        if self.etp == 1:
            ranks = f"{self.ep}"
        else:
            ranks = f"{self.ep} x train.etp ({self.etp})"
        return f"{ranks} does not divide the {stage} ranks of a pipeline stage"

    def _no_expert_errors(self) -> list[UserError]:
        sizes = {"ep": self.ep, "etp": self.expert_tp}
        return [
            UserError(
                f"train.{axis}", f"{size}, but the model has no experts", f"set train.{axis} to 1"
            )
            for axis, size in sizes.items()
            if size > 1
        ]
