"""A checkpoint that has more parts than a language model: where the language model is in it, and in which form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megarl.model.families.layouts import STACK


class StackPlace(NamedTuple):
    """The place of an expert's matrix in a tensor of the files [experts, rows of all parts, columns].

    stack: its name, as `Wrapper.from_files` gives it. part: the number of this one, of `parts`, in an expert's rows.
    """

    stack: str
    item: int
    part: int
    parts: int


@dataclass(frozen=True, eq=False)
class Wrapper:
    """The form of a checkpoint with a language model and other parts, such as a vision tower.

    config_key: the key of config.json with the language model's values. own_prefix, prefix: begin the names of its
    tensors in a checkpoint without other parts, and in this one. untrained_prefixes: begin the names of the other
    parts' tensors, which exports copy from the source. stacks: tensors with the matrices of all experts of a layer, one
    part of an expert below the other; the names are those inside a layer. without_tower: values of config.json with
    which SGLang serves text alone. tower_params: elements of the other parts that each rank of an engine holds even so.
    """

    config_key: str
    own_prefix: str
    prefix: str
    untrained_prefixes: tuple[str, ...] = ()
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_tower: Mapping[str, Any] = field(default_factory=dict)
    tower_params: int = 0

    def in_files(self, name: str) -> str:
        """The name that a tensor of the language model has in the files."""
        if name.startswith(self.own_prefix):
            return self.prefix + name.removeprefix(self.own_prefix)
        return name

    def from_files(self, name: str) -> str:
        """Undo `in_files`; the names of other parts stay."""
        if name.startswith(self.prefix):
            return self.own_prefix + name.removeprefix(self.prefix)
        return name

    def stack_of(self, name: str) -> tuple[str, list[str]] | None:
        """(A stack, all its parts), given the name of one part of all experts; None: they are in no stack."""
        for stack, parts in self.stacks.items():
            for part in parts:
                if name.endswith(f".{part}"):
                    layer = name.removesuffix(part)
                    return layer + stack, [layer + each for each in parts]
        return None

    def stack_place(self, name: str) -> StackPlace | None:
        """Where files with stacks have the tensor of one expert; None: as a tensor of its own."""
        for stack, parts in self.stacks.items():
            for number, part in enumerate(parts):
                pattern = re.escape(part).replace(re.escape(STACK), "([0-9]+)")
                if match := re.search(rf"(?<=\.){pattern}$", name):
                    return StackPlace(
                        name[: match.start()] + stack, int(match[1]), number, len(parts)
                    )
        return None
