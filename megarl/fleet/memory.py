"""Which models hold the GPUs' memory in each phase. Phases follow one another in a ring; every hand-over is here.

| phase   | trainer                            | engines               |
|---------|------------------------------------|-----------------------|
| rollout | parameters                         | weights and KV cache  |
| train   | parameters, gradients, optimizer   | nothing               |
| reshard | parameters                         | weights               |

A critic computes in a phase `critic` and a reward model in a phase `score`, as the trainer does in `train`: the model
that computes holds all of its memory, and the trainer keeps its parameters.

This is so on GPUs that training and engines share. On a GPU that only trains or only samples, nothing waits for the
memory: its models keep all of it in every phase, so that the optimizer is not moved and engines are not paused.
"""

from __future__ import annotations

from typing import Protocol

from megarl.placement.roles import Phase
from megarl.types import Metrics


class RanksMemory(Protocol):
    def offload(self) -> None:
        """Release gradients and optimizer state, and parameters that no engine maps."""
        ...

    def onload(self) -> None:
        """Allocate them again, with their contents."""
        ...

    def held_bytes(self) -> int:
        """Device memory of the rank that holds most; on CPU, host memory."""
        ...


class EngineMemory(Protocol):
    def release_memory(self) -> None:
        """Release weights and KV cache.

        The weights' contents are lost, but where engines keep them on the host (`lora.sync: adapters`).
        """
        ...

    def resume_weights(self) -> None: ...

    def resume_cache(self) -> None: ...


class MemoryScheduler:
    """Hands the shared memory over from phase to phase; after start-up the phase is `rollout`."""

    def __init__(
        self,
        trainer: RanksMemory,
        engines: EngineMemory,
        critic: RanksMemory | None = None,
        reward_model: RanksMemory | None = None,
    ) -> None:
        self._engines = engines
        self._trainer = trainer
        self._computing: dict[Phase, RanksMemory | None] = {
            "train": trainer,
            "critic": critic,
            "score": reward_model,
        }
        self.phase: Phase = "rollout"

    def take_back(self) -> None:
        """Have the engines release the memory, for ranks that are rebuilt and come onloaded; the phase is `train` then.

        The other ranks are offloaded by the caller, whatever they hold.
        """
        if self.phase == "reshard":
            self._engines.resume_cache()
        if self.phase in ("rollout", "reshard"):
            self._engines.release_memory()
        self.phase = "train"

    def onload_for(self, phase: Phase) -> Metrics:
        """Enter a phase: memory is released before it is allocated.

        From `rollout` a computing phase may follow, or further ones, then `reshard` and the next `rollout`. Returns the
        bytes that the phase's ranks hold before and after; nothing where the phase is entered already. Raises
        RuntimeError on a phase out of order.
        """
        if phase == self.phase:
            return {}
        entering = self._computing.get(phase)
        leaving = self._computing.get(self.phase)
        observed = entering or self._trainer
        before = observed.held_bytes()
        if entering and leaving:
            leaving.offload()
            entering.onload()
        elif entering and self.phase == "rollout":
            self._engines.release_memory()
            entering.onload()
        elif leaving and phase == "reshard":
            leaving.offload()
            self._engines.resume_weights()
        elif (self.phase, phase) == ("reshard", "rollout"):
            self._engines.resume_cache()
        else:
            raise RuntimeError(f"GPU memory cannot pass from the {self.phase} phase to {phase}")
        self.phase = phase
        return {
            f"memory/before_{phase}_bytes": before,
            f"memory/after_{phase}_bytes": observed.held_bytes(),
        }
