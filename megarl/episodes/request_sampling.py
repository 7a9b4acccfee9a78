"""What an agent's request may say about how the model is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.environments.agents.chat import ChatRefused, ChatRequest


@dataclass(frozen=True)
class PolicySampling:
    """The recipe's own sampling of training samples: rollout.temperature and rollout.top_p.

    A sample's logprobs are trained at this temperature, so that a request cannot change it.
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def check(self, request: ChatRequest, temperature: float, top_p: float) -> None:
        """temperature, top_p: with which the episode is sampled, which is another in evaluations. Raises ChatRefused.

        An agent that names the recipe's values is right in evaluations, too.
        """
        for name, asked, values in (
            ("temperature", request.temperature, (self.temperature, temperature)),
            ("top_p", request.top_p, (self.top_p, top_p)),
        ):
            if asked is not None and asked not in values:
                raise ChatRefused(_words(name, asked, self, values[1]), name)


def _words(name: str, asked: float, policy: PolicySampling, current: float) -> str:
    trained = getattr(policy, name)
    if current == trained:
        here = ""
    else:
        here = f" ({current:g} in this episode)"
    why = "the policy is trained on the probabilities with which it is sampled"
    hint = f"leave the field out, or set rollout.{name} to {asked:g}"
    return f"{name} {asked:g} is refused: rollout.{name} is {trained:g}{here}, and {why}; {hint}"
