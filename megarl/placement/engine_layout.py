"""Rank arithmetic of the engines: the part of the model that each rank of SGLang holds. Pure."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace

from megarl.model.families import family_of
from megarl.model.precision import PLAIN, Precision
from megarl.model.quantisation import FP8_TILE
from megarl.model.shape import ModelShape
from megarl.placement.train_layout import divisors, nearest
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

# on CPU SGLang needs a multiple of it for each rank's slice of an MLP's or expert's width
CPU_FFN_MULTIPLE = 32
_SHARED = "the shared experts"
VOCAB_MULTIPLE = 64  # rows that SGLang pads the vocabulary to


@dataclass(frozen=True)
class EngineLayout:
    """`count` engines of `tp` ranks each; engine e uses the slots [first + e * tp, first + (e + 1) * tp).

    Inside an engine SGLang splits the experts `ep` ways and each expert's width tp / ep ways. With dp > 1 (SGLang's
    DP attention) each of `dp` groups of tp / dp ranks holds the whole attention. precision: the formats of the weights.
    first: 0 if engines share the training slots, the training world's size if they have slots of their own.
    whole_dense, whole_shared: each rank holds the dense layers, the shared experts whole; group_head: each of the dp
    groups holds the whole output layer; otherwise all ranks split them. deepep: tokens get to their experts by DeepEP.
    draft: tokens that the MTP layer drafts for each step of the model (speculative decoding).
    """

    count: int
    tp: int
    ep: int
    dp: int = 1
    precision: Precision = PLAIN
    first: int = 0
    whole_dense: bool = False
    whole_shared: bool = False
    group_head: bool = False
    deepep: bool = False
    draft: int = 0

    @property
    def fp8(self) -> bool:
        """Whether weights are in tiles of 128 x 128 with scales."""
        return self.precision.weights == "fp8"

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

    @property
    def dense_ranks(self) -> int:
        """Ranks that split a dense layer."""
        return 1 if self.whole_dense else self.tp

    @property
    def head_ranks(self) -> int:
        """Ranks that split the output layer."""
        if self.group_head:
            return self.attention_tp
        return self.tp

    def shared_ranks(self, shape: ModelShape) -> int:
        """Ranks that split the shared experts."""
        is_whole = self.deepep or (self.whole_shared and not family_of(shape).splits_shared)
        return 1 if is_whole else self.tp

    def member(self, slot: int) -> tuple[int, int] | None:
        """(engine, TP rank) of a GPU slot; None where there is no engine."""
        if self.first <= slot < self.end:
            return divmod(slot - self.first, self.tp)
        return None

    def engines_without(self, slots: Container[int]) -> list[int]:
        """The engines that have none of these slots."""
        sizes = enumerate(range(self.first, self.end, self.tp))
        return [
            engine
            for engine, first in sizes
            if not any(slot in slots for slot in range(first, first + self.tp))
        ]

    @listed
    def errors(self, shape: ModelShape, gpus: int) -> ErrorIterator:
        """Errors of sizes that the engines do not divide, in the model, on the GPUs and, with fp8, in tiles."""
        if self.end > gpus:
            problem = (
                f"{self.count} engines of {self.tp} ranks end at GPU {self.end}, there are {gpus}"
            )
            fits = (gpus - self.first) // self.tp
            if fits > 0:
                hint = f"set it to {fits}"
            else:
                hint = f"set rollout.engine.tp to at most {gpus - self.first}"
            yield UserError("rollout.engine.count", problem, hint)
        for key, size in (("ep", self.ep), ("dp", self.dp)):
            if self.tp % size:
                hint = f"set rollout.engine.{key} to {nearest(size, divisors(self.tp))}"
                problem = f"{size} does not divide rollout.engine.tp ({self.tp})"
                yield UserError(f"rollout.engine.{key}", problem, hint)
        yield from self._dp_errors()
        yield from self._class_errors(shape)
        yield from self._draft_errors(shape)
        if self.dp > 1 and not shape.num_experts:
            problem = f"{self.dp}: SGLang has DP attention for models with experts alone"
            yield UserError("rollout.engine.dp", problem, "set rollout.engine.dp to 1")
        if shape.num_experts % self.ep:
            valid = [ep for ep in divisors(self.tp) if shape.num_experts % ep == 0]
            hint = f"set rollout.engine.ep to {nearest(self.ep, valid)}"
            problem = f"{self.ep} does not divide the experts ({shape.num_experts})"
            yield UserError("rollout.engine.ep", problem, hint)
        if self.tp % self.ep or self.tp % self.dp:
            return
        if shape.delta and self.fp8:
            problem = "SGLang's linear attention has projections that 128 x 128 tiles do not fit"
            yield UserError(
                "rollout.engine.weights", problem, "set rollout.engine.weights to plain"
            )
        yield from self._precision_errors(shape)
        yield from self._model_errors(shape)

    @listed
    def _precision_errors(self, shape: ModelShape) -> ErrorIterator:
        """Weights that are to stay plain, which the model does not have or SGLang does not keep apart.

        Engines without fp8 do not read them, but an export in fp8 does.
        """
        last = self.precision.plain_last_layers
        where = "precision.plain_last_layers"
        if last >= shape.num_layers:
            problem = f"{last} are all of the model's {shape.num_layers} layers"
            yield UserError(where, problem, f"set it to {shape.num_layers - 1} or less")
        if last and self.deepep and self.fp8:
            problem = (
                f"{last}, but SGLang's DeepEP sends tokens to the experts of all layers in fp8"
            )
            yield UserError(where, problem, "set it to 0, or rollout.engine.experts to gather")
        has_kind = {"kv_b_proj": bool(shape.mla), "shared_experts": bool(shape.num_shared_experts)}
        for kind in self.precision.plain:
            if not has_kind[kind]:
                yield UserError("precision.plain", f"the model has no {kind}", f"remove {kind}")

    @listed
    def _dp_errors(self) -> ErrorIterator:
        """Errors of what SGLang has for DP attention alone, and of DeepEP."""
        keys = (
            ("dense", "whole", "cut", self.whole_dense),
            ("head", "group", "engine", self.group_head),
        )
        for key, value, other, is_set in keys:
            if is_set and self.dp == 1:
                problem = f"{value} needs DP attention, and rollout.engine.dp is 1"
                hint = f"set rollout.engine.{key} to {other}, or dp to 2 or more"
                yield UserError(f"rollout.engine.{key}", problem, hint)
        if self.deepep and (self.ep != self.tp or not self.whole_dense):
            problem = "deepep needs DP attention, whole dense layers, and experts that are not split inside"
            hint = f"set rollout.engine.ep to {self.tp}, dp to 2 or more and dense to whole, or experts to gather"
            yield UserError("rollout.engine.experts", problem, hint)

    def _class_errors(self, shape: ModelShape) -> ErrorIterator:
        """Errors of what SGLang's class of the family lacks."""
        lacks = family_of(shape).engine_lacks
        of = f"SGLang's {shape.family} has no"
        if self.dp > 1 and "dp" in lacks:
            yield UserError("rollout.engine.dp", f"{self.dp}: {of} DP attention", "set it to 1")
        if self.deepep and "deepep" in lacks:
            yield UserError("rollout.engine.experts", f"{of} DeepEP", "set it to gather")
        if self.group_head and "group_head" in lacks:
            problem = f"group: {of} output layer for each group"
            yield UserError("rollout.engine.head", problem, "set it to engine")

    def _draft_errors(self, shape: ModelShape) -> list[UserError]:
        """A model that SGLang cannot draft for: it needs one multi-token prediction (MTP) layer, with experts."""
        if not self.draft or (shape.num_mtp_layers == 1 and shape.num_experts):
            return []
        number = shape.num_mtp_layers or "no"
        problem = f"{self.draft}, but the model has {number} multi-token prediction layers, and SGLang drafts with one"
        return [
            UserError(
                "rollout.engine.draft",
                problem,
                f"set it to 0, or use a checkpoint with one such layer ({family_of(shape).mtp.key} of its config.json)",
            )
        ]

    def _model_errors(self, shape: ModelShape) -> list[UserError]:
        """Errors of the model's sizes; requires that `ep` and `dp` divide the ranks."""
        problems = self._cut_problems(shape) or (self._tile_problems(shape) if self.fp8 else [])
        if not problems:
            return []
        sizes = range(1, max(shape.num_heads, self.tp) * self.dp + 1)
        layouts = [
            replace(self, tp=tp, ep=math.gcd(self.ep, tp), dp=math.gcd(self.dp, tp)) for tp in sizes
        ]
        fits = [
            new
            for new in layouts
            if not new._cut_problems(shape) and not (new.fp8 and new._tile_problems(shape))
        ]
        same_axes = [new.tp for new in fits if (new.ep, new.dp) == (self.ep, self.dp)]
        hint = f"set rollout.engine.tp to {nearest(self.tp, same_axes or [new.tp for new in fits])}"
        if not same_axes:
            hint += ", and rollout.engine.ep and dp to divisors of it"
        if self.fp8:
            hint += ", or rollout.engine.weights to plain"
        return [UserError("rollout.engine.tp", problem, hint) for problem in problems]

    def _cut_problems(self, shape: ModelShape) -> list[str]:
        """Descriptions of the model's sizes that the ranks do not divide."""
        ranks = self.attention_tp
        kv_heads = shape.num_kv_heads
        problems = []
        if shape.num_heads % ranks:
            problems.append(f"{ranks} does not divide the attention heads ({shape.num_heads})")
        if not shape.mla and kv_heads % ranks and ranks % kv_heads:
            problems.append(
                f"{ranks} neither divides nor is a multiple of the key/value heads ({kv_heads})"
            )
        if shape.delta and shape.delta.num_key_heads % ranks:
            heads = shape.delta.num_key_heads
            problems.append(f"{ranks} does not divide linear attention's key heads ({heads})")
        for width, parts, what in self._widths(shape):
            if width % parts:
                problems.append(f"{parts} does not divide the width of {what} ({width})")
        # as models/deepseek_v2.py and models/qwen3_moe.py count
        of_an_expert = self.tp if shape.mla else self.moe_tp
        if shape.num_experts and of_an_expert > shape.num_experts:
            problems.append(
                f"{of_an_expert} ranks are more than the experts ({shape.num_experts}), which SGLang refuses"
            )
        return problems

    def _widths(self, shape: ModelShape) -> list[tuple[int, int, str]]:
        """(intermediate width, ranks that split it, name) of each kind of MLP."""
        shared = shape.num_shared_experts * shape.moe_ffn_size
        widths = [
            (shape.ffn_size if shape.num_dense_layers else 0, self.dense_ranks, "a dense layer"),
            (shape.moe_ffn_size if shape.num_experts else 0, self.moe_tp, "an expert"),
            (shared, self.shared_ranks(shape), _SHARED),
        ]
        return [row for row in widths if row[0]]

    def _tile_problems(self, shape: ModelShape) -> list[str]:
        """Descriptions of shards whose boundary is inside a 128 x 128 tile, whose scale would belong to two ranks."""
        mla = shape.mla
        heads = shape.num_heads // self.attention_tp
        if mla:
            rows = {"q_b_proj": heads * (mla.nope_dim + mla.rope_dim), "o_proj": heads * mla.v_dim}
            rows["q_a_proj"] = mla.q_lora_rank or 0
            if self.precision.quantises("kv_b_proj"):
                rows["kv_b_proj"] = heads * (mla.nope_dim + mla.v_dim)
        else:
            kv_heads = max(1, shape.num_kv_heads // self.attention_tp)
            rows = {"q_proj": heads * shape.head_dim, "k_proj": kv_heads * shape.head_dim}
        widths = {what: width // parts for width, parts, what in self._widths(shape)}
        if not self.precision.quantises("shared_experts"):
            widths.pop(_SHARED, None)
        rows |= widths
        return [
            f"a rank's {size} of {what} cut a tile of {FP8_TILE}"
            for what, size in rows.items()
            if size % FP8_TILE
        ]

    def gpu_errors(self, shape: ModelShape) -> list[UserError]:
        """Errors on a GPU, where SGLang pads the vocabulary regardless of the number of ranks."""
        rows = -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if rows % self.head_ranks == 0:
            return []
        problem = f"{self.head_ranks} does not divide the padded vocabulary ({rows})"
        return [
            UserError("rollout.engine.tp", problem, f"set it to {nearest(self.tp, divisors(rows))}")
        ]

    @listed
    def cpu_errors(self, shape: ModelShape) -> ErrorIterator:
        """Errors on CPU: sizes that SGLang would pad (update_config.py), which no checkpoint has weights for."""
        if shape.mla:
            kv_heads = shape.num_heads
        else:
            kv_heads = shape.num_kv_heads
        if self.deepep:
            yield UserError("rollout.engine.experts", "DeepEP needs GPUs", "set it to gather")
        if shape.indexer:
            problem = f"SGLang's indexer of {shape.family} has kernels for GPUs alone"
            hint = "here its plan, dry run, weight maps, imports and exports work; sample on GPUs"
            yield UserError("rollout.engine", problem, hint)
        if self.draft:
            problem = (
                f"{self.draft}, but on CPU SGLang verifies drafts greedily whatever the temperature"
            )
            yield UserError("rollout.engine.draft", problem, "set it to 0")
        if kv_heads % self.tp:
            problem = f"{self.tp} does not divide the key/value heads ({kv_heads}), which an engine on CPU needs"
            hint = f"set rollout.engine.tp to {nearest(self.tp, divisors(kv_heads))}"
            yield UserError("rollout.engine.tp", problem, hint)
        widths = {width: what for width, _, what in self._widths(shape) if what != _SHARED}
        for width, what in widths.items():
            if width % (self.tp * CPU_FFN_MULTIPLE):
                valid = [d for d in divisors(width) if width % (d * CPU_FFN_MULTIPLE) == 0]
                problem = f"the width {width} of {what} over {self.tp} is not a multiple of 32, as it must be on CPU"
                hint = f"set rollout.engine.tp to {nearest(self.tp, valid)}, or use a model with wider layers"
                yield UserError("rollout.engine.tp", problem, hint)
