"""Who holds the GPUs' memory in each phase. The phases follow one another in a ring; each change of hands is here.

| phase   | trainer                            | engines               |
|---------|------------------------------------|-----------------------|
| rollout | parameters                         | weights and KV cache  |
| train   | parameters, gradients, optimizer   | nothing               |
| reshard | parameters                         | weights               |

This is so on GPUs that both sides use. On a GPU that only trains, or only samples, nobody waits for the memory: its
side keeps all of it in every phase, which saves moving the optimizer to the host and back, and engines their pauses.
"""

from __future__ import annotations

from typing import Literal, Protocol

from megarl.types import Metrics

Phase = Literal["rollout", "train", "reshard"]


class TrainerMemory(Protocol):
    def offload(self) -> None:
        """Give gradients and optimizer state back."""
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


class Lender:
    """Moves the shared memory from phase to phase; after start-up both sides hold theirs as in `rollout`."""

    def __init__(self, trainer: TrainerMemory, engines: EngineMemory) -> None:
        self._trainer, self._engines = trainer, engines
        self.phase: Phase = "rollout"
        self._seen: Metrics = {}

    def lend(self, phase: Phase) -> None:
        """Enter a phase: whoever gives does so before the other takes. Raises RuntimeError on a phase out of order."""
        if phase == self.phase:
            return
        self._seen[f"memory/before_{phase}_bytes"] = self._trainer.held_bytes()
        match (self.phase, phase):
            case ("rollout", "train"):
                self._engines.release_memory()
                self._trainer.onload()
            case ("train", "reshard"):
                self._trainer.offload()
                self._engines.resume_weights()
            case ("reshard", "rollout"):
                self._engines.resume_cache()
            case _:
                raise RuntimeError(f"GPU memory cannot pass from the {self.phase} phase to {phase}")
        self.phase = phase
        self._seen[f"memory/after_{phase}_bytes"] = self._trainer.held_bytes()

    def readings(self) -> Metrics:
        """What training ranks held before and after each change of hands since the last time this was asked."""
        seen, self._seen = self._seen, {}
        return seen
