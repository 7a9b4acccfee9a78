"""The settings of each member of an exchange, as JSON: layouts, the rendezvous store, and the weights to map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.device import Address
from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.expert_places import Places
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.memory_handles import SourceHandles
from megarl.resharding.verify import VerifyMode
from megarl.types import UserError
from megarl.types.json_objects import JsonObject


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

    def to_json(self) -> JsonObject:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Session:
        """The session of which `to_json` made this, also after JSON has made lists of its tuples."""
        from pydantic import TypeAdapter  # absent where the exchange alone is tested

        return TypeAdapter(Session).validate_python(content)


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
        self,
        engine: int,
        version: int,
        attempt: int,
        first: bool,
        steps: Sequence[str],
        places: Places | None = None,
    ) -> JsonObject:
        """The JSON object that engine `engine` passes to `weight_loader.load` in each of its processes.

        attempt: unique in a run. first: include the sessions, which an engine needs at its first attempt and whenever
        training ranks have shared new parameters. steps: as of `reshard_steps`. "models" in the message: for
        how many models SGLang calls `load`. places: of the experts, from this version on; None: as numbered.
        """
        members = self.engines[engine]
        message: JsonObject = {
            "run_id": members[0].run_id,
            "version": version,
            "attempt": attempt,
            "models": 2 if members[0].engine.draft else 1,
            "steps": list(steps),
            "places": places,
        }
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
        session = replace(common, member=slot)
        place = engine.member(slot)
        if place is None:
            trainers[slot] = session
            continue
        if slot < num_ranks:
            session = replace(session, source=handles[slot])
        engine_number, tp_rank = place
        engines[engine_number][tp_rank] = session
    return Sessions(engines, trainers)
