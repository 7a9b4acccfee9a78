"""Texts that end a response, for engines whose schedulers have no tokenizer (`skip_tokenizer_init`).

With a tokenizer SGLang would end responses at the tokenizer's end token, too, which need not be one of the model's.
Here a scheduler loads it for its first request with such a text, and only decodes with it.

A response ends with the token that completes one of the texts. It is compared with the decoded end of the response
after every token, so that no token is sampled that is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

from megarl.model.tokenizer import load_auto_tokenizer


class StopTextParams(SamplingParams):
    """SGLang's parameters, which take stop texts without the engine's tokenizer."""

    def normalize(self, tokenizer: Any) -> None:
        super().normalize(tokenizer or _Utf8())


class _Utf8:
    """The longest tokenisation of a text: one token for each byte.

    SGLang decodes so many tokens to find the text. A model may write it with more tokens than its tokenizer does.
    """

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        return text.encode()


class StopTextDecoder:
    """In place of a scheduler's tokenizer: it decodes, and names no end token."""

    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path

    def decode(self, ids: Sequence[int]) -> str:
        """As the turn tokenizer decodes a turn, in which the text is looked for again."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    @cached_property
    def _tokenizer(self) -> Any:
        return load_auto_tokenizer(self._model_path)
