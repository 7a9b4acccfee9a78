"""The text of tokens by their ids."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from megarl.model.tokenizer import load_tokenizer
from megarl.types import UserError


class TokenTexts:
    """The text of each token by its id; where the run's tokenizer is gone, the ids, and a line of `notes`."""

    def __init__(self, model_path: str) -> None:
        self.notes: list[str] = []
        self._texts: dict[int, str] = {}
        self._tokenizer: Any = None
        try:
            self._tokenizer = _tokenizer_of(model_path)
        except UserError as error:
            self.notes.append(f"tokens are shown by their numbers: {error}")

    def of(self, token_ids: Iterable[int]) -> list[str]:
        return [self._text(token_id) for token_id in token_ids]

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            text = f"[{token_id}]"
            if self._tokenizer is not None:
                text = self._tokenizer.decode([token_id])
            self._texts[token_id] = text
        return self._texts[token_id]


@cache
def _tokenizer_of(model_path: str) -> Any:
    return load_tokenizer(model_path)
