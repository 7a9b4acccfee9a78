"""Loads tokenizers without what transformers imports beside them and no tokenizer needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
