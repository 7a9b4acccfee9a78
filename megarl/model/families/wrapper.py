"""A checkpoint that has more parts than a language model: where the language model is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Wrapper:
    """The form of a checkpoint with a language model and other parts, such as a vision tower.

    config: the key of config.json with the language model's values. names: how the names of its tensors begin in a
    checkpoint without other parts, and in this one. kept: how the names of the other parts' tensors begin, which are
    not trained and are the same in exports. without_tower: values of config.json with which SGLang serves text alone.
    held_params: of the other parts, those that each rank of an engine has even so, at most.
    """

    config: str
    names: tuple[str, str]
    kept: tuple[str, ...] = ()
    without_tower: Mapping[str, Any] = field(default_factory=dict)
    held_params: int = 0

    def in_files(self, name: str) -> str:
        """The name that a tensor of the language model has in the files."""
        own, wrapped = self.names
        if name.startswith(own):
            return wrapped + name.removeprefix(own)
        return name

    def from_files(self, name: str) -> str:
        """Undo `in_files`; the names of other parts stay."""
        own, wrapped = self.names
        if name.startswith(wrapped):
            return own + name.removeprefix(wrapped)
        return name
