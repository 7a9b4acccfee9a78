"""`megarl` with an engine 1 whose log-probabilities are wrong from version WRONG_FROM of the weights on."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from megarl.rollout.worker import RolloutWorker
from megarl.types import Prompt
from megarl.types.sampling import Sampling

WRONG_FROM = 3
ERROR = 1e-2  # of each log-probability
ENGINE = "megarl.rollout.worker:RolloutWorker"


class FaultyWorker(RolloutWorker):
    """An engine as of `RolloutWorker`; what it samples is right, and it says so wrongly."""

    async def sample(self, prompt: Prompt, sampling: Sampling, begun: Any = None) -> Any:
        summary, group = await super().sample(prompt, sampling, begun)
        if self.version() >= WRONG_FROM:
            for sample in group.samples:
                for row in sample.rows:
                    row.engine_logp_T[row.trained_T] -= ERROR
        return summary, group


def main() -> None:
    from megarl.cli import app
    from megarl.cluster.actor import Worker

    start = Worker.start

    def start_faulty(worker: Worker, target: str, *args: Any) -> Any:
        if worker.name == "engine 1" and target == ENGINE:
            target = f"{__spec__.name}:{FaultyWorker.__name__}"
        return start(worker, target, *args)

    with patch.object(Worker, "start", start_faulty):
        app()


if __name__ == "__main__":
    main()
