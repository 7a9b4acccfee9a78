"""A fault of which no process dies: wrong numbers, and the ranks or the engine that computed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.printable import one_line

FaultKind = Literal["replicas", "not_finite", "engine"]


@dataclass(frozen=True)
class FaultMember:
    """A training rank or an engine. number: its rank in its Megatron world, or the engine's number.

    The controller adds what only it knows: name ("training rank 3"), gpus (their numbers on the node), and node (host
    name and address).
    """

    number: int
    name: str = ""
    gpus: tuple[int, ...] = ()
    node: str = ""

    def __str__(self) -> str:
        name = self.name or f"rank {self.number}"
        if not self.node:
            return name
        if len(self.gpus) == 1:
            gpus = f"GPU {self.gpus[0]}"
        else:
            gpus = f"GPUs {self.gpus[0]} to {self.gpus[-1]}"
        return f"{name} ({gpus} of {self.node})"


class SilentFault(Exception):
    """Numbers of a step are wrong, though every process works; the CLI prints it as one line and exits with 1.

    kind: replicas that differ; a loss, gradient or log-probability that is not finite; an engine whose
    log-probabilities are not the trainer's. what: a sentence's predicate, of the members. is_local: False where every
    data-parallel rank has the fault, so that it comes from the recipe or the data rather than from a component. The
    controller adds the step, and may_repeat: the recipe wants the step repeated rather than the run ended. The weights
    may have changed since the step began.
    """

    def __init__(
        self,
        kind: FaultKind,
        what: str,
        members: Sequence[FaultMember],
        is_local: bool = True,
        step: int | None = None,
        may_repeat: bool = False,
    ) -> None:
        # all arguments, so that it survives pickling between processes
        super().__init__(kind, what, members, is_local, step, may_repeat)
        self.kind: FaultKind = kind
        self.what = what
        self.members = tuple(members)
        self.is_local = is_local
        self.step = step
        self.may_repeat = may_repeat

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}: "
        listed = [str(member) for member in self.members]
        if len(listed) > 1:
            listed = [", ".join(listed[:-1]), listed[-1]]
        return one_line(f"{step}{' and '.join(listed)} {self.what}")

    def located(self, members: Mapping[int, FaultMember]) -> SilentFault:
        """The same fault with what the controller knows of its members, by their numbers."""
        known = [members.get(member.number, member) for member in self.members]
        return SilentFault(
            self.kind, self.what, known, self.is_local, self.step, may_repeat=self.may_repeat
        )

    def in_step(self, step: int, *, may_repeat: bool) -> SilentFault:
        """The same fault with the step in which it was found. A fault that is not local is never repeated."""
        return SilentFault(
            self.kind,
            self.what,
            self.members,
            self.is_local,
            step,
            may_repeat=may_repeat and self.is_local,
        )
