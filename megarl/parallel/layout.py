"""Rank arithmetic of the training world and of the engines: the part of the model that each rank holds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megarl.types import ModelShape, UserFault

CPU_FFN_MULTIPLE = 32  # on CPU SGLang needs a multiple of it for each rank's slice of an MLP's or expert's width
VOCAB_MULTIPLE = 64  # rows that SGLang pads the vocabulary to
FP8_TILE = 128  # rows and columns of a weight that share one scale


def divisors(number: int) -> list[int]:
    """All positive divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest(wanted: int, valid: list[int]) -> str:
    """The nearest valid values below and above `wanted`, as text for an error message."""
    below = [v for v in valid if v <= wanted][-1:]
    above = [v for v in valid if v > wanted][:1]
    return " or ".join(str(v) for v in below + above) or "no value fits"


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
    """

    world_size: int
    tp: int
    pp: int
    ep: int
    cp: int = 1
    vpp: int = 1
    expert_tp: int = 0
    stage_layers: tuple[int, ...] = ()

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
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a world of {self.world_size}")
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
        return 2 * self.cp if self.cp > 1 else 1

    def layers(self, pp_rank: int, num_layers: int, chunk: int = 0) -> range:
        """The global layer numbers (from 0) of one model chunk of a pipeline stage."""
        stage = chunk * self.pp + pp_rank
        if self.stage_layers:
            start = sum(self.stage_layers[:stage])
            return range(start, start + self.stage_layers[stage])
        per_stage = num_layers // (self.pp * self.vpp)
        return range(stage * per_stage, (stage + 1) * per_stage)

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding over all TP ranks: Megatron pads to a multiple of 128 x TP."""
        multiple = 128 * self.tp
        return -(-vocab_size // multiple) * multiple

    def faults(self, shape: ModelShape) -> list[UserFault]:
        """Faults of sizes that this layout does not divide, in the model and in the world."""
        found = self._tp_faults(shape) + self._stage_faults(shape)
        dense = self.tp * self.cp * self.pp
        if self.world_size % dense:
            axes = ("tp", "pp") if self.cp == 1 else ("tp", "cp", "pp")
            mend = f"set it to a multiple of {dense}, or lower {' or '.join(f'train.{axis}' for axis in axes)}"
            product = " x ".join(f"train.{axis}" for axis in axes)
            problem = f"{self.world_size} GPUs are not a multiple of {product} = {dense}"
            found.append(UserFault("placement.gpus", problem, mend))
        return found + (self._expert_faults(shape) if shape.num_experts else self._no_expert_faults())

    def _tp_faults(self, shape: ModelShape) -> list[UserFault]:
        valid = [tp for tp in divisors(shape.num_heads) if not replace(self, tp=tp)._tp_problems(shape)]
        mend = f"set train.tp to {nearest(self.tp, valid)}"
        return [UserFault("train.tp", f"{self.tp} {problem}", mend) for problem in self._tp_problems(shape)]

    def _tp_problems(self, shape: ModelShape) -> list[str]:
        """Descriptions of the sizes that the TP ranks do not divide."""
        sizes = {"the attention heads": shape.num_heads}
        if shape.num_dense_layers:
            sizes["the width of a dense layer"] = shape.ffn_size
        if shape.num_mtp_layers:
            sizes["the hidden size, which multi-token prediction's projection cuts"] = shape.hidden_size
        if shape.num_shared_experts:
            sizes["the shared experts' width"] = shape.num_shared_experts * shape.moe_ffn_size
        if shape.num_experts and self.ep == 1:
            sizes["the experts' width"] = shape.moe_ffn_size
        found = [f"does not divide {what} ({size})" for what, size in sizes.items() if size % self.tp]
        kv_heads = shape.num_kv_heads
        if shape.mla or kv_heads % self.tp == 0:
            return found
        fused = (shape.num_heads + 2 * kv_heads) * shape.head_dim  # cut inside a group of heads (attention.py)
        if self.tp % kv_heads:
            found.append(f"neither divides nor is a multiple of the key/value heads ({kv_heads})")
        elif shape.num_heads % self.tp == 0 and fused % self.tp:
            found.append(f"does not divide the rows of the fused query, key and value ({fused})")
        return found

    def _stage_faults(self, shape: ModelShape) -> list[UserFault]:
        if self.vpp > 1 and self.pp == 1:
            return [UserFault("train.vpp", f"{self.vpp} needs a pipeline", "set train.vpp to 1 or raise train.pp")]
        stages, layers = self.pp * self.vpp, shape.num_layers
        if self.stage_layers:
            good = len(self.stage_layers) == stages and sum(self.stage_layers) == layers
            if good and min(self.stage_layers) >= 0 and 0 not in self.stage_layers[1:-1]:
                return []
            problem = f"{list(self.stage_layers)} are not {stages} numbers that make {layers} layers, or a 0 is inside"
            mend = f"write {stages} numbers, one for each of train.pp x train.vpp stages, whose sum is {layers}"
            return [UserFault("train.layers_per_stage", problem, mend)]
        if layers % stages == 0:
            return []
        product = f"{self.pp}" if self.vpp == 1 else f"train.pp x train.vpp = {stages}"
        problem = f"{product} does not divide the layers ({layers})"
        if self.vpp > 1 and layers % self.pp == 0:
            mend = f"set train.vpp to {nearest(self.vpp, divisors(layers // self.pp))}"
            return [UserFault("train.vpp", problem, mend)]
        valid = [pp for pp in divisors(layers) if layers % (pp * self.vpp) == 0]
        mend = f"set train.pp to {nearest(self.pp, valid or divisors(layers))}"
        return [UserFault("train.pp", problem, mend if valid else f"{mend} and train.vpp to 1")]

    def _expert_faults(self, shape: ModelShape) -> list[UserFault]:
        found = []
        problem = self._ep_problem(shape)
        if problem:
            found.append(UserFault("train.ep", problem, self._ep_mend(shape)))
        if self.ep == 1 and self.etp != self.tp:
            problem = f"{self.etp} with train.ep 1: Megatron sums the experts' gradients as if it were train.tp"
            found.append(UserFault("train.etp", problem, f"set train.etp to {self.tp}"))
        elif self.ep > 1 and shape.moe_ffn_size % self.etp:
            problem = f"{self.etp} does not divide the experts' width ({shape.moe_ffn_size})"
            mend = f"set train.etp to {nearest(self.etp, divisors(shape.moe_ffn_size))}"
            found.append(UserFault("train.etp", problem, mend))
        return found

    def _ep_mend(self, shape: ModelShape) -> str:
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
        ranks = f"{self.ep}" if self.etp == 1 else f"{self.ep} x train.etp ({self.etp})"
        return f"{ranks} does not divide the {stage} ranks of a pipeline stage"

    def _no_expert_faults(self) -> list[UserFault]:
        sizes = {"ep": self.ep, "etp": self.expert_tp}
        return [
            UserFault(f"train.{axis}", f"{size}, but the model has no experts", f"set train.{axis} to 1")
            for axis, size in sizes.items()
            if size > 1
        ]


@dataclass(frozen=True)
class EngineLayout:
    """`count` engines of `tp` ranks each; engine e uses the slots [first + e * tp, first + (e + 1) * tp).

    Inside an engine SGLang splits the experts `ep` ways and each expert's width tp / ep ways. With dp > 1 (SGLang's
    DP attention) each of `dp` groups of tp / dp ranks holds the whole attention. fp8: weights in 128 x 128 tiles with
    scales. first: 0 if engines share the training slots, the training world's size if they have slots of their own.
    """

    count: int
    tp: int
    ep: int
    dp: int = 1
    fp8: bool = False
    first: int = 0

    @property
    def end(self) -> int:
        """One past the last slot."""
        return self.first + self.count * self.tp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp

    def member(self, slot: int) -> tuple[int, int] | None:
        """(engine, TP rank) of a GPU slot; None where there is no engine."""
        return divmod(slot - self.first, self.tp) if self.first <= slot < self.end else None

    def faults(self, shape: ModelShape, gpus: int) -> list[UserFault]:
        """Faults of sizes that the engines do not divide, in the model, on the GPUs and, with fp8, in tiles."""
        found = []
        if self.end > gpus:
            problem = f"{self.count} engines of {self.tp} ranks end at GPU {self.end}, there are {gpus}"
            fits = (gpus - self.first) // self.tp
            mend = f"set it to {fits}" if fits > 0 else f"set rollout.engine.tp to at most {gpus - self.first}"
            found.append(UserFault("rollout.engine.count", problem, mend))
        for key, size in (("ep", self.ep), ("dp", self.dp)):
            if self.tp % size:
                mend = f"set rollout.engine.{key} to {nearest(size, divisors(self.tp))}"
                problem = f"{size} does not divide rollout.engine.tp ({self.tp})"
                found.append(UserFault(f"rollout.engine.{key}", problem, mend))
        if self.dp > 1 and not shape.num_experts:
            problem = f"{self.dp}: SGLang has DP attention for models with experts alone"
            found.append(UserFault("rollout.engine.dp", problem, "set rollout.engine.dp to 1"))
        if shape.num_experts % self.ep:
            valid = [ep for ep in divisors(self.tp) if shape.num_experts % ep == 0]
            mend = f"set rollout.engine.ep to {nearest(self.ep, valid)}"
            problem = f"{self.ep} does not divide the experts ({shape.num_experts})"
            found.append(UserFault("rollout.engine.ep", problem, mend))
        if self.tp % self.ep or self.tp % self.dp:
            return found
        return found + self._model_faults(shape)

    def _model_faults(self, shape: ModelShape) -> list[UserFault]:
        """Faults of the model's sizes; requires that `ep` and `dp` divide the ranks."""
        problems = self._cut_problems(shape) or (self._tile_problems(shape) if self.fp8 else [])
        if not problems:
            return []
        sizes = range(1, max(shape.num_heads, self.tp) * self.dp + 1)
        layouts = [replace(self, tp=tp, ep=math.gcd(self.ep, tp), dp=math.gcd(self.dp, tp)) for tp in sizes]
        fits = [new for new in layouts if not new._cut_problems(shape) and not (new.fp8 and new._tile_problems(shape))]
        same_axes = [new.tp for new in fits if (new.ep, new.dp) == (self.ep, self.dp)]
        mend = f"set rollout.engine.tp to {nearest(self.tp, same_axes or [new.tp for new in fits])}"
        if not same_axes:
            mend += ", and rollout.engine.ep and dp to divisors of it"
        if self.fp8:
            mend += ", or rollout.engine.fp8 to false"
        return [UserFault("rollout.engine.tp", problem, mend) for problem in problems]

    def _cut_problems(self, shape: ModelShape) -> list[str]:
        """Descriptions of the model's sizes that the ranks do not divide."""
        ranks, kv_heads, found = self.attention_tp, shape.num_kv_heads, []
        if shape.num_heads % ranks:
            found.append(f"{ranks} does not divide the attention heads ({shape.num_heads})")
        if not shape.mla and kv_heads % ranks and ranks % kv_heads:
            found.append(f"{ranks} neither divides nor is a multiple of the key/value heads ({kv_heads})")
        for width, parts, what in self._widths(shape):
            if width % parts:
                found.append(f"{parts} does not divide the width of {what} ({width})")
        of_an_expert = self.tp if shape.mla else self.moe_tp  # as models/deepseek_v2.py and models/qwen3_moe.py count
        if shape.num_experts and of_an_expert > shape.num_experts:
            found.append(f"{of_an_expert} ranks are more than the experts ({shape.num_experts}), which SGLang refuses")
        return found

    def _widths(self, shape: ModelShape) -> list[tuple[int, int, str]]:
        """(intermediate width, ranks that split it, name) of each kind of MLP."""
        shared = shape.num_shared_experts * shape.moe_ffn_size
        found = [
            (shape.ffn_size if shape.num_dense_layers else 0, self.tp, "a dense layer"),
            (shape.moe_ffn_size if shape.num_experts else 0, self.moe_tp, "an expert"),
            (shared, self.tp, "the shared experts"),
        ]
        return [row for row in found if row[0]]

    def _tile_problems(self, shape: ModelShape) -> list[str]:
        """Descriptions of shards whose boundary is inside a 128 x 128 tile, whose scale would belong to two ranks."""
        mla, heads = shape.mla, shape.num_heads // self.attention_tp
        if mla:
            rows = {"q_b_proj": heads * (mla.nope_dim + mla.rope_dim), "o_proj": heads * mla.v_dim}
            rows |= {"kv_b_proj": heads * (mla.nope_dim + mla.v_dim), "q_a_proj": mla.q_lora_rank or 0}
        else:
            kv_heads = max(1, shape.num_kv_heads // self.attention_tp)
            rows = {"q_proj": heads * shape.head_dim, "k_proj": kv_heads * shape.head_dim}
        rows |= {what: width // parts for width, parts, what in self._widths(shape)}
        return [
            f"a rank's {size} of {what} cut a tile of {FP8_TILE}" for what, size in rows.items() if size % FP8_TILE
        ]

    def gpu_faults(self, shape: ModelShape) -> list[UserFault]:
        """Faults on a GPU, where SGLang pads the vocabulary regardless of the number of ranks."""
        rows = -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if rows % self.tp == 0:
            return []
        problem = f"{self.tp} does not divide the padded vocabulary ({rows})"
        return [UserFault("rollout.engine.tp", problem, f"set it to {nearest(self.tp, divisors(rows))}")]

    def cpu_faults(self, shape: ModelShape) -> list[UserFault]:
        """Faults on CPU: sizes that SGLang would pad (update_config.py), which no checkpoint has weights for."""
        found = []
        kv_heads = shape.num_heads if shape.mla else shape.num_kv_heads
        if self.fp8:
            problem = "SGLang's kernels for fp8 weights need a GPU"
            found.append(UserFault("rollout.engine.fp8", problem, "set rollout.engine.fp8 to false"))
        if kv_heads % self.tp:
            problem = f"{self.tp} does not divide the key/value heads ({kv_heads}), which an engine on CPU needs"
            mend = f"set rollout.engine.tp to {nearest(self.tp, divisors(kv_heads))}"
            found.append(UserFault("rollout.engine.tp", problem, mend))
        widths = {width: what for width, _, what in self._widths(shape) if what != "the shared experts"}
        for width, what in widths.items():
            if width % (self.tp * CPU_FFN_MULTIPLE):
                valid = [d for d in divisors(width) if width % (d * CPU_FFN_MULTIPLE) == 0]
                problem = f"the width {width} of {what} over {self.tp} is not a multiple of 32, as it must be on CPU"
                mend = f"set rollout.engine.tp to {nearest(self.tp, valid)}, or use a model with wider layers"
                found.append(UserFault("rollout.engine.tp", problem, mend))
        return found
