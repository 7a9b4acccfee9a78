"""What samples the turns of an episode in place of an engine; subclasses say which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.types import Sample
from tests.samples.responses import response


class ScriptedSampler:
    """completed: of each conversation that has ended, its name and the tokens of prompt and response."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.completed: list[tuple[str, int, int]] = []

    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        return None

    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        self.completed.append((conversation, prompt_tokens, response_tokens))

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def sample(
        self, context_ids: Sequence[int], ids: Sequence[int], *, finished: bool, **more: Any
    ) -> Sample:
        """A turn; more: as of `response`."""
        logp_T = np.full(len(ids), -1.0, np.float32)
        arguments: dict[str, Any] = {"engine_logp_T": logp_T, "version": 3} | more
        return response(
            context_ids, np.array(ids), text=self.text(ids), finished=finished, **arguments
        )
