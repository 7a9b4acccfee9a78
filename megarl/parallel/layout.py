"""Pure rank arithmetic of both sides: which part of the model each training rank and each engine slot holds."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.types import ModelShape, UserFault

CPU_FFN_MULTIPLE = 32  # of each rank's slice of an expert, in SGLang on CPU


def divisors(number: int) -> list[int]:
    """All positive divisors in rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest(wanted: int, valid: list[int]) -> str:
    """The one or two valid values around `wanted`, as words for an error message."""
    below = [v for v in valid if v <= wanted][-1:]
    above = [v for v in valid if v > wanted][:1]
    return " or ".join(str(v) for v in below + above) or "no value fits"


@dataclass(frozen=True)
class RankCoords:
    """One training rank on Megatron's two grids: (tp, dp, pp) of the dense part, (etp, ep, edp, pp) of the experts."""

    rank: int
    tp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class TrainLayout:
    """Tensor, pipeline and expert parallel sizes over `world_size` training ranks (Megatron order tp-cp-ep-dp-pp)."""

    world_size: int
    tp: int
    pp: int
    ep: int

    @property
    def etp(self) -> int:
        """Ranks that split one expert: Megatron 0.16.1 loses expert gradients at TP > 1, EP 1, ETP 1."""
        return self.tp if self.ep == 1 else 1

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.pp * self.etp * self.ep)

    def coords(self, rank: int) -> RankCoords:
        """Where `rank` sits; the rightmost axis of the order varies slowest."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a world of {self.world_size}")
        return RankCoords(
            rank=rank,
            tp=rank % self.tp,
            dp=rank // self.tp % self.dp,
            pp=rank // (self.tp * self.dp),
            etp=rank % self.etp,
            ep=rank // self.etp % self.ep,
            edp=rank // (self.etp * self.ep) % self.edp,
        )

    def layers(self, pp_rank: int, num_layers: int) -> range:
        """The global layer numbers (from 0) that a pipeline stage holds."""
        per_stage = num_layers // self.pp
        return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding over all TP ranks: Megatron pads to a multiple of 128 x TP."""
        multiple = 128 * self.tp
        return -(-vocab_size // multiple) * multiple

    def faults(self, shape: ModelShape) -> list[UserFault]:
        """Everything that this layout does not divide, in the model and in the world."""
        found = []

        def check(axis: str, size: int, number: int, what: str, valid: list[int]) -> None:
            if number % size:
                mend = f"set train.{axis} to {nearest(size, valid)}"
                found.append(UserFault(f"train.{axis}", f"{size} does not divide {what} ({number})", mend))

        heads = [d for d in divisors(shape.num_kv_heads) if shape.num_heads % d == 0]
        check("tp", self.tp, shape.num_heads, "the attention heads", heads)
        check("tp", self.tp, shape.num_kv_heads, "the key/value heads", heads)
        if self.etp > 1:
            check("tp", self.etp, shape.moe_ffn_size, "the experts' width", divisors(shape.moe_ffn_size))
        check("ep", self.ep, shape.num_experts, "the experts", divisors(shape.num_experts))
        check("pp", self.pp, shape.num_layers, "the layers", divisors(shape.num_layers))
        return found + self._world_faults()

    def _world_faults(self) -> list[UserFault]:
        dense = self.tp * self.pp
        if self.world_size % dense:
            mend = f"set it to a multiple of {dense}, or lower train.tp or train.pp"
            problem = f"{self.world_size} GPUs are not a multiple of train.tp x train.pp = {dense}"
            return [UserFault("placement.gpus", problem, mend)]
        stage = self.world_size // self.pp
        if stage % (self.etp * self.ep):
            problem = f"{self.ep} does not divide the {stage} ranks of a pipeline stage"
            return [UserFault("train.ep", problem, f"set train.ep to {nearest(self.ep, divisors(stage))}")]
        return []


@dataclass(frozen=True)
class EngineLayout:
    """`count` engines of `tp` ranks each; engine e sits on the slots [e * tp, (e + 1) * tp).

    Inside an engine SGLang splits the experts `ep` ways and each expert's width tp / ep ways.
    """

    count: int
    tp: int
    ep: int

    @property
    def slots(self) -> int:
        return self.count * self.tp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    def member(self, slot: int) -> tuple[int, int] | None:
        """(engine, its TP rank) on a GPU slot; None where the slot only trains."""
        return divmod(slot, self.tp) if slot < self.slots else None

    def faults(self, shape: ModelShape, gpus: int) -> list[UserFault]:
        """Everything that the engines do not divide, in the model and on the GPUs."""
        found = []

        def fault(key: str, problem: str, mend: str) -> None:
            found.append(UserFault(f"rollout.engine.{key}", problem, mend))

        if self.slots > gpus:
            problem = f"{self.count} engines of {self.tp} ranks need {self.slots} GPUs, placement.gpus is {gpus}"
            fits = gpus // self.tp
            fault("count", problem, f"set it to {fits}" if fits else f"set rollout.engine.tp to at most {gpus}")
        if shape.num_heads % self.tp:
            mend = f"set rollout.engine.tp to {nearest(self.tp, divisors(shape.num_heads))}"
            fault("tp", f"{self.tp} does not divide the attention heads ({shape.num_heads})", mend)
        kv_heads = shape.num_kv_heads
        if kv_heads % self.tp and self.tp % kv_heads:
            valid = [d for d in divisors(shape.num_heads) if kv_heads % d == 0 or d % kv_heads == 0]
            problem = f"{self.tp} neither divides nor is a multiple of the key/value heads ({kv_heads})"
            fault("tp", problem, f"set rollout.engine.tp to {nearest(self.tp, valid)}")
        if shape.num_experts % self.ep:
            mend = f"set rollout.engine.ep to {nearest(self.ep, divisors(shape.num_experts))}"
            fault("ep", f"{self.ep} does not divide the experts ({shape.num_experts})", mend)
        if self.tp % self.ep:
            mend = f"set rollout.engine.ep to {nearest(self.ep, divisors(self.tp))}"
            fault("ep", f"{self.ep} does not divide rollout.engine.tp ({self.tp})", mend)
        elif shape.moe_ffn_size % self.moe_tp:
            problem = f"tp/ep = {self.moe_tp} does not divide an expert's width ({shape.moe_ffn_size})"
            fault("tp", problem, "raise rollout.engine.ep or lower rollout.engine.tp")
        return found

    def cpu_faults(self, shape: ModelShape) -> list[UserFault]:
        """What SGLang would pad on CPU: padding has no source in a checkpoint, so it is refused (update_config.py)."""
        found = []
        width, kv_heads = shape.moe_ffn_size, shape.num_kv_heads
        if kv_heads % self.tp:
            problem = f"{self.tp} does not divide the key/value heads ({kv_heads}), which an engine on CPU needs"
            mend = f"set rollout.engine.tp to {nearest(self.tp, divisors(kv_heads))}"
            found.append(UserFault("rollout.engine.tp", problem, mend))
        if width % (self.tp * CPU_FFN_MULTIPLE):
            valid = [d for d in divisors(max(1, width // CPU_FFN_MULTIPLE)) if width % (d * CPU_FFN_MULTIPLE) == 0]
            problem = f"an expert's width {width} over {self.tp} is not a multiple of 32, which an engine on CPU needs"
            mend = f"set rollout.engine.tp to {nearest(self.tp, valid)}, or use a model with wider experts"
            found.append(UserFault("rollout.engine.tp", problem, mend))
        return found
