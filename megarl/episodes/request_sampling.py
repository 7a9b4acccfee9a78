"""What an agent's request may say about how the model is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.environments.agents.chat import ChatRefused, ChatRequest
from megarl.types.sampling import Sampling


@dataclass(frozen=True)
class PolicySampling:
    """The recipe's own sampling of training samples: rollout.temperature and rollout.top_p.

    A sample's logprobs are trained at this temperature, so that a request cannot change it.
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def check(self, request: ChatRequest, sampling: Sampling) -> None:
        """sampling: of the episode, which has another temperature in evaluations. Raises ChatRefused.

        An agent that names the recipe's values is right in evaluations, too.
        """
        for name in ("temperature", "top_p"):
            asked = getattr(request, name)
            trained = getattr(self, name)
            current = getattr(sampling, name)
            if asked is None or asked in (trained, current):
                continue
            here = ""
            if current != trained:
                here = f" ({current:g} in this episode)"
            raise ChatRefused(
                f"{name} {asked:g} is refused: rollout.{name} is {trained:g}{here}, and the policy is trained on the"
                f" probabilities with which it is sampled; leave the field out, or set rollout.{name} to {asked:g}",
                name,
            )
