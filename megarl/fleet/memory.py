"""Who holds the GPUs' memory in each phase. The phases follow one another in a ring; each change of hands is here.

| phase   | trainer                            | engines               |
|---------|------------------------------------|-----------------------|
| rollout | parameters                         | weights and KV cache  |
| train   | parameters, gradients, optimizer   | nothing               |
| reshard | parameters                         | weights               |

A critic and a reward model have phases of their own, `critic` and `score`, beside `train`: whoever computes holds all
of its model, and beside it there are the trainer's parameters alone.

This is so on GPUs that both sides use. On a GPU that only trains, or only samples, nobody waits for the memory: its
side keeps all of it in every phase, which saves moving the optimizer to the host and back, and engines their pauses.
"""

from __future__ import annotations

from typing import Literal, Protocol

from megarl.types import Metrics

Phase = Literal["rollout", "score", "critic", "train", "reshard"]


class RanksMemory(Protocol):
    def offload(self) -> None:
        """Give gradients and optimizer state back, and parameters that no engine maps."""
        ...

    def onload(self) -> None:
        """Take them again."""
        ...

    def held_bytes(self) -> int:
        """Of the device's memory, by the rank that holds most; on CPU, of the host's."""
        ...


class EngineMemory(Protocol):
    def release_memory(self) -> None:
        """Give weights and KV cache back; the weights' contents are lost."""
        ...

    def resume_weights(self) -> None: ...

    def resume_cache(self) -> None: ...


class MemoryScheduler:
    """Moves the shared memory from phase to phase; after start-up all sides hold theirs as in `rollout`."""

    def __init__(
        self,
        trainer: RanksMemory,
        engines: EngineMemory,
        critic: RanksMemory | None = None,
        reward_model: RanksMemory | None = None,
    ) -> None:
        self._engines = engines
        self._trainer = trainer
        named = {"train": trainer, "critic": critic, "score": reward_model}
        self._computing = {name: ranks for name, ranks in named.items() if ranks is not None}
        self.phase: Phase = "rollout"
        self._seen: Metrics = {}

    def hand_over(self, phase: Phase) -> None:
        """Enter a phase: whoever gives does so before the other takes. Raises RuntimeError on a phase out of order.

        From a rollout into computing phases, of these through `reshard` into the next rollout.
        """
        if phase == self.phase:
            return
        reader = self._computing.get(phase, self._trainer)
        self._seen[f"memory/before_{phase}_bytes"] = reader.held_bytes()
        takes, gives = self._computing.get(phase), self._computing.get(self.phase)
        if takes and (gives or self.phase == "rollout"):
            gives.offload() if gives else self._engines.release_memory()
            takes.onload()
        elif gives and phase == "reshard":
            gives.offload()
            self._engines.resume_weights()
        elif (self.phase, phase) == ("reshard", "rollout"):
            self._engines.resume_cache()
        else:
            raise RuntimeError(f"GPU memory cannot pass from the {self.phase} phase to {phase}")
        self.phase = phase
        self._seen[f"memory/after_{phase}_bytes"] = reader.held_bytes()

    def readings(self) -> Metrics:
        """What ranks held before and after each change of hands since the last time this was asked."""
        seen, self._seen = self._seen, {}
        return seen
