"""The guard of an update: between the backward pass and the optimizer's step all ranks look for silent faults.

Weights that several ranks hold were equal when the optimizer made them, and so were gradients that an all-reduce gave
to several ranks (placement/replicas.py). A bit that has changed since shows in a checksum, and the ranks that the
majority does not support are named. The comparison is before the step, because the step overwrites all replicas but
one: here the weights are those that the gradient was computed with. A fault in the step itself, of the rank that steps
on a number, is not seen: all replicas get its result.

Numbers that are not finite are found on every rank by itself, before gradients are added up (parallel/finiteness.py).
Then no rank takes the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.device import DEVICE
from megarl.parallel import groups
from megarl.parallel.rank_model import RankModel
from megarl.parallel.replicas import Replicated
from megarl.placement.replicas import (
    DENSE,
    DENSE_WHOLE,
    EXPERT_GRADIENTS,
    EXPERTS,
    EXPERTS_WHOLE,
    GRADIENTS,
    Disagreement,
    disagreements,
    outvoted,
)
from megarl.placement.train_layout import TrainLayout
from megarl.training.tensor_sums import sum_of_all, tensor_sum
from megarl.types import FaultMember, SilentFault
from megarl.types.faults import FaultKind
from megarl.types.tensors import NamedTensors

_WHAT = {
    DENSE: "weights",
    DENSE_WHOLE: "weights",
    EXPERTS: "weights of experts",
    EXPERTS_WHOLE: "weights of experts",
    GRADIENTS: "gradients",
    EXPERT_GRADIENTS: "gradients of experts",
}


class UpdateGuard:
    """Looks at one rank's update, together with the guards of all ranks.

    every: updates from one comparison of replicas to the next; None: none but to explain numbers that are not finite.
    """

    def __init__(self, model: RankModel, layout: TrainLayout, every: int | None) -> None:
        self._model = model
        self._layout = layout
        self._every = every
        self._updates = 0

    def check(self) -> None:
        """Raises SilentFault on all ranks if any has a fault; collective, before the optimizer's step."""
        is_due = self._every is not None and self._updates % self._every == 0
        self._updates += 1
        try:
            is_finite = groups.all_agree(self._model.finiteness.all_finite())
            if is_due and is_finite:
                self._compare(self._model.replicated_weights() | self._model.replicated_gradients())
            if not is_finite:
                self._compare(self._model.replicated_weights())
                raise self._not_finite()
        finally:
            self._model.finiteness.reset()

    def _compare(self, replicated: Replicated) -> None:
        """Raises SilentFault where tensors differ from those of other ranks."""
        if self._layout.world_size == 1:
            return
        sums = torch.stack([sum_of_all(tensors.values()) for tensors in replicated.values()])
        table_RK = groups.gathered(sums).tolist()
        for place, kind in enumerate(replicated):
            found = disagreements(kind, self._layout, [row[place] for row in table_RK])
            if found:
                raise self._differing(found, replicated[kind])

    def _differing(self, found: Sequence[Disagreement], tensors: NamedTensors) -> SilentFault:
        """The fault of replicas that disagree on these tensors; which tensor, and whose, is asked for here."""
        count = max(number for (number,) in groups.gathered(torch.tensor([len(tensors)])).tolist())
        sums = torch.zeros(count, dtype=torch.int64, device=DEVICE)
        for number, tensor in enumerate(tensors.values()):
            sums[number] = tensor_sum(tensor)
        table_RN = groups.gathered(sums).tolist()
        first = found[0]
        wrong: set[int] = set()
        differing = []
        for number in range(count):
            outvoted_here = outvoted({rank: table_RN[rank][number] for rank in first.ranks})
            if outvoted_here:
                wrong.update(outvoted_here)
                differing.append(number)
        names = [*tensors]
        text = ""
        if self._model.rank == first.ranks[0] and differing:
            text = names[differing[0]]
        name = groups.told(text, first.ranks[0])
        others = sorted({*first.ranks} - wrong)
        what = f"differed in {_WHAT[first.kind]} from each other"
        if others:
            what = f"differed in {_WHAT[first.kind]} from the replicas on ranks {_listed(others)}"
        what += f" ({name})"
        if len(differing) > 1:
            what += f" and {len(differing) - 1} more"
        return _fault("replicas", what, sorted(wrong) or first.wrong)

    def _not_finite(self) -> SilentFault:
        """The fault of the ranks on which a number was not finite before it was on others."""
        (place, predicate) = self._model.finiteness.first()
        places = [row[0] for row in groups.gathered(torch.tensor([place])).tolist()]
        first = min(places)
        ranks = [rank for rank, other in enumerate(places) if other == first]
        what = groups.told(predicate, ranks[0])
        is_local = not self._is_everywhere(ranks)
        if not is_local:
            what += "; all data-parallel ranks did, as where a rate (train.lr) is too high"
            if self._layout.max_cp == self._layout.dp:
                what += ", or where one has a fault in a row that train.cp: auto splits over all"
        elif len(ranks) > 1:
            what += "; they share these numbers, and the fault is of one of them"
        return _fault("not_finite", what, ranks, is_local=is_local)

    def _is_everywhere(self, ranks: Sequence[int]) -> bool:
        """Whether these are all of several data-parallel ranks, whatever rows they have."""
        layout = self._layout
        return 1 < layout.dp == len({layout.coords(rank).dp for rank in ranks})


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _fault(
    kind: FaultKind, what: str, ranks: Sequence[int], *, is_local: bool = True
) -> SilentFault:
    return SilentFault(kind, what, [FaultMember(rank) for rank in ranks], is_local)
