"""What an exchange moves: the weights, into which adapters may be merged, or the factors of adapters on their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch

from megarl.model.lora_pairs import LoraSize, split_factors
from megarl.placement.expert_places import Places
from megarl.resharding import fp8, lora_slots, megatron_map, sglang_map
from megarl.resharding.lora_merge import Merge
from megarl.resharding.lora_scaling import Scaling
from megarl.resharding.session import Session
from megarl.resharding.shards import (
    LayoutError,
    Part,
    Shard,
    cells,
    first_of,
    shape_as_stack,
    verify_params,
)
from megarl.types.tensors import NamedTensors

PayloadName = Literal["weights", "factors"]
# read: engines read the frozen weights from the checkpoint
ReshardStep = PayloadName | Literal["read"]
Params = NamedTensors
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Weights:
    """One member's view of the weights, with the session's adapters merged into them unless they are sent alone.

    sources: its own parameters. source_parts, target_parts: the shards of all members. transform: computes what is sent
    from the parameters; None: they are sent as they are. check: raises LayoutError where the maps do not describe this
    member's parameters. begin: call it before the exchange of a version. kept_share: as of `Merge`, else None.
    """

    def __init__(self, session: Session, params: Params) -> None:
        """params: of this member's training rank, with the factors of its adapters; empty where it has none."""
        self._session = session
        self._places: Places | None = None
        self.sources, self._factors = split_factors(params)

    def place(self, places: Places | None) -> bool:
        """Let the engines' experts have these places from the next exchange on; whether they had others before."""
        if places == self._places:
            return False
        self._places = places
        for parts in ("source_parts", "target_parts"):
            self.__dict__.pop(parts, None)
        return True

    @cached_property
    def source_parts(self) -> list[Part]:
        return fp8.with_scales(self._unscaled_parts, self.target_parts)

    @cached_property
    def _unscaled_parts(self) -> list[Part]:
        s = self._session
        return megatron_map.parts(s.shape, s.train, s.transformer_engine)

    @cached_property
    def target_parts(self) -> list[Part]:
        return sglang_map.parts(self._session.shape, self._session.engine, self._places)

    @cached_property
    def transform(self) -> Merge | None:
        """Raises LayoutError where the factors are not those of the map."""
        s = self._session
        if s.lora is None or s.lora.in_slots or s.member >= s.train.world_size:
            return None
        return Merge.of_rank(
            s.lora, s.shape, s.train, s.member, s.transformer_engine, self._factors
        )

    def check(self, targets: Params) -> None:
        s = self._session
        verify_params(held(self._unscaled_parts, s.member), self.sources)
        _check_sources(self.sources)
        if self.transform and s.engine.fp8:
            raise LayoutError("adapters are not merged into the weights of fp8 engines")
        target_shards = held(self.target_parts, s.member)
        verify_params(target_shards, targets)
        _check_dtypes(target_shards, targets, s.dtype)

    def begin(self, version: int) -> None:
        if self.transform:
            self.transform.begin(version)

    def kept_share(self) -> float | None:
        if self.transform:
            return self.transform.kept_share()
        return None


class Factors:
    """One member's view of the adapters' factors, which go into SGLang's adapter slots; members as of `Weights`."""

    def __init__(self, session: Session, params: Params) -> None:
        """params: of this member's training rank; empty where it has none."""
        assert session.lora
        self._session = session
        self._size = session.lora
        _, self.sources = split_factors(params)

    @cached_property
    def source_parts(self) -> list[Part]:
        s = self._session
        return lora_slots.source_parts(s.shape, s.train, self._size, s.transformer_engine)

    @cached_property
    def target_parts(self) -> list[Part]:
        return lora_slots.target_parts(self._session.shape, self._session.engine, self._size)

    @cached_property
    def transform(self) -> Scaling:
        return Scaling(self._size)

    def check(self, targets: Params) -> None:
        """The engine may have adapter slots beside those of the map, which stay 0."""
        s = self._session
        verify_params(held(self.source_parts, s.member), self.sources)
        _check_sources(self.sources)
        if at := s.engine.member(s.member):
            self._check_slots(targets, at[1], s)
        _check_dtypes(held(self.target_parts, s.member), targets, s.dtype)

    def _check_slots(self, targets: Params, tp_rank: int, session: Session) -> None:
        wrong = []
        for name, size in lora_slots.slot_sizes(
            session.shape, session.engine, tp_rank, self._size
        ).items():
            if name not in targets:
                wrong.append(f"{name}: SGLang has no such slot")
            elif shape_as_stack(name, targets[name].shape) != size:
                wrong.append(
                    f"{name}: the map needs {list(size)}, SGLang has {list(targets[name].shape)}"
                )
            elif not targets[name].is_contiguous():
                wrong.append(f"{name}: the slot is not contiguous in memory")
        if wrong:
            raise LayoutError(
                f"the map of adapters and SGLang's slots differ: {first_of(sorted(wrong))}"
            )

    def place(self, places: Places | None) -> bool:
        """Adapters of experts have no slots of their own in placed engines, which preflight refuses."""
        return False

    def begin(self, version: int) -> None:
        pass

    def kept_share(self) -> None:
        return None


Payload = Weights | Factors


def make_payload(name: PayloadName, session: Session, params: Params) -> Payload:
    if name == "weights":
        return Weights(session, params)
    return Factors(session, params)


def reshard_steps(
    size: LoraSize | None, *, has_weights: bool, from_files: bool = False
) -> list[ReshardStep]:
    """What a reshard does, in this order.

    has_weights: the engines have the frozen weights of an earlier one. from_files: they read these themselves.
    """
    if size is None or not size.in_slots:
        return ["weights"]
    if has_weights:
        return ["factors"]
    return ["read" if from_files else "weights", "factors"]


def exchanged(steps: Sequence[ReshardStep]) -> list[PayloadName]:
    """The payloads that members exchange in these steps."""
    return [step for step in steps if step != "read"]


def held(parts: Sequence[Part], member: int) -> list[Shard]:
    """The shards of one member."""
    return [shard for part in parts if member in part.members for shard in part.shards]


def _check_sources(sources: Params) -> None:
    for name, param in sources.items():
        if param.dtype not in SOURCE_DTYPES:
            raise LayoutError(f"{name}: training weights in {param.dtype} have no map")


def _check_dtypes(target_shards: Sequence[Shard], targets: Params, dtype: str) -> None:
    for shard in target_shards:
        brings = shard.dtype or dtype
        for name, _ in cells(shard):
            if targets[name].dtype != getattr(torch, brings):
                raise LayoutError(f"{name} is {targets[name].dtype}, the exchange brings {brings}")
