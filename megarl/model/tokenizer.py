"""The tokenizer of a checkpoint and its chat template, loaded without what transformers imports beside them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from megarl.printable import first_line
from megarl.types import UserError

OWN_TOKENIZER = "give model.path the tokenizer that its weights were trained with"
_FACTORY = "transformers.models.auto.auto_factory"
_DOCSTRINGS = "transformers.utils.auto_docstring"


def load_auto_tokenizer(path: str) -> Any:
    """AutoTokenizer's tokenizer of a checkpoint folder; raises whatever its parsers raise."""
    with _without_docstrings():
        with _without_mixin():
            from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


@contextmanager
def _without_docstrings() -> Iterator[None]:
    """Leave configurations undocumented: their docstrings name model classes, for which all models are imported."""
    importlib.import_module(_DOCSTRINGS)
    docstrings = sys.modules[_DOCSTRINGS]  # the package has a function of this name
    with mock.patch.object(docstrings, "auto_class_docstring", lambda documented, **_: documented):
        yield


@contextmanager
def _without_mixin() -> Iterator[None]:
    """Import AutoTokenizer without the mixin that makes models of remote code generate, which megarl never loads.

    Its import brings torch._dynamo and accelerate, most of the seconds. Later imports get the mixin itself.
    """
    if _FACTORY in sys.modules:
        yield
        return
    generation = importlib.import_module("transformers.generation")
    with mock.patch.dict(vars(generation), {"GenerationMixin": type("GenerationMixin", (), {})}):
        yield


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint folder. Raises UserError(model.path) when it cannot be loaded."""
    if not Path(path).is_dir():
        raise UserError(
            "model.path", f"{path} is not a folder", "give the folder of a HF checkpoint"
        )
    try:
        tokenizer = load_auto_tokenizer(path)
        if not tokenizer("a")["input_ids"]:
            # transformers makes an empty tokenizer from config.json alone
            raise ValueError("no tokenizer files")
        return tokenizer
    except Exception as error:  # a broken file raises whatever its parser raises
        problem = f"{path} has no usable tokenizer ({first_line(error)})"
        raise UserError("model.path", problem, "add its tokenizer files") from error


def token_outside_vocabulary(
    tokenizer: Any, token_ids: Iterable[int], vocab_size: int
) -> str | None:
    """A description of the largest of token_ids where it is outside a vocabulary of vocab_size; else None."""
    largest = max(token_ids, default=0)
    if largest < vocab_size:
        return None
    text = tokenizer.convert_ids_to_tokens(largest)
    return f"token {largest} ({text!r}), and the ids of the model's {vocab_size} tokens end at {vocab_size - 1}"


def chat_text(tokenizer: Any, prompt: Any, response: str) -> tuple[str, bool]:
    """(a prompt with a response as text, whether the tokenizer has to add special tokens to it).

    Applies the chat template if there is one. Raises ValueError for chat messages without a template, and what the
    template raises.
    """
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError("it is chat messages, and there is no chat template")
        return prompt + response, True
    answered = [*chat_messages(prompt), {"role": "assistant", "content": response}]
    return tokenizer.apply_chat_template(answered, tokenize=False), False


def chat_ids(tokenizer: Any, prompt: Any, response: str) -> list[int]:
    """The token ids of `chat_text`."""
    text, special = chat_text(tokenizer, prompt, response)
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def chat_messages(prompt: Any) -> list[Mapping[str, Any]]:
    """The prompt as chat messages. Keys with a null value are left out: parquet adds them to messages without them."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [
        {key: value for key, value in message.items() if value is not None} for message in prompt
    ]
