"""The settings of each member of an exchange, as JSON: layouts, the rendezvous store, and the weights to map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.device import Address
from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import MlaShape, ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.memory_handles import SourceHandles
from megarl.resharding.verify import VerifyMode
from megarl.types import UserError


@dataclass(frozen=True)
class Session:
    """The settings of one member. A member is a GPU slot with a training rank, an engine rank, or both.

    meet: the rendezvous store. dtype: torch's name ("float32"). source: None where the member is the training rank
    itself, or its slot has no training rank.
    """

    meet: Address
    run_id: str
    shape: ModelShape
    train: TrainLayout
    engine: EngineLayout
    transformer_engine: bool
    dtype: str
    round_bytes: int
    timeout_s: float
    gpus_per_node: int
    verify: VerifyMode
    member: int = 0
    source: SourceHandles | None = None
    lora: LoraSize | None = None  # adapters that an exchange merges or sends
    fp8_checkpoint: str | None = None  # from which fp8 engines read the frozen weights

    @property
    def num_members(self) -> int:
        return max(self.train.world_size, self.engine.end)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Session:
        fields = dict(content)
        fields["shape"] = _shape_from_json(content["shape"])
        fields["train"] = TrainLayout(**_with_tuple(content["train"], "stage_layers"))
        fields["meet"] = Address(*content["meet"])
        fields["engine"] = EngineLayout(**content["engine"])
        if content["lora"]:
            fields["lora"] = LoraSize(**_with_tuple(content["lora"], "targets"))
        if content["source"]:
            fields["source"] = SourceHandles.from_json(content["source"])
        return Session(**fields)


def _shape_from_json(content: Mapping[str, Any]) -> ModelShape:
    fields = dict(content)
    if fields["mla"]:
        fields["mla"] = MlaShape(**fields["mla"])
    return ModelShape(**fields)


def _with_tuple(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields, with a tuple in place of the list that JSON has for one of them."""
    fields = dict(content)
    fields[name] = tuple(fields[name])
    return fields


@dataclass(frozen=True)
class PublishedRank:
    """What an engine process needs to map a training rank's parameters.

    transformer_engine: whether their names are those of TransformerEngine's layers.
    """

    source: SourceHandles
    transformer_engine: bool


@dataclass(frozen=True)
class Sessions:
    """The sessions of all members: engines[e][tp_rank], and trainers[rank] for GPUs without an engine."""

    engines: tuple[dict[int, Session], ...]
    trainers: dict[int, Session]

    def engine_message(
        self, engine: int, version: int, attempt: int, first: bool, steps: Sequence[str]
    ) -> dict[str, Any]:
        """The JSON object that engine `engine` passes to `weight_loader.load` in each of its processes.

        attempt: unique in a run. first: include the sessions, which an engine needs at its first attempt and whenever
        training ranks have shared new parameters. steps: as of `reshard_steps`. "models" in the message: for
        how many models SGLang calls `load`.
        """
        members = self.engines[engine]
        message: dict[str, Any] = {
            "run_id": members[0].run_id,
            "version": version,
            "attempt": attempt,
        }
        message |= {"models": 2 if members[0].engine.draft else 1, "steps": list(steps)}
        if first:
            message["sessions"] = {
                str(tp_rank): session.to_json() for tp_rank, session in members.items()
            }
        return message


def sessions(common: Session, handles: Sequence[SourceHandles]) -> Sessions:
    """The sessions of one run, from what they have in common; handles[rank]: the parameters of training rank `rank`.

    Raises UserError where there is a gap of slots between the training ranks and the engines.
    """
    engine = common.engine
    num_ranks = common.train.world_size
    if engine.first > num_ranks:
        problem = f"the engines begin at GPU {engine.first}, the training ranks end at {num_ranks}"
        raise UserError("placement", problem, f"let the engines begin at GPU {num_ranks} or before")
    engines: tuple[dict[int, Session], ...] = tuple({} for _ in range(engine.count))
    trainers: dict[int, Session] = {}
    for slot in range(common.num_members):
        if at := engine.member(slot):
            if slot < num_ranks:
                source = handles[slot]
            else:
                source = None
            engines[at[0]][at[1]] = replace(common, member=slot, source=source)
        else:
            trainers[slot] = replace(common, member=slot)
    return Sessions(engines, trainers)
