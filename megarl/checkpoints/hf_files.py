"""The tensors of a Hugging Face checkpoint by name: which file holds each, and lazy access to them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.model.families.wrapper import StackPlace, Wrapper
from megarl.model.hf_values import read_json
from megarl.types import UserError
from megarl.types.json_objects import JsonObject


def tensor_files(path: str | Path, stem: str = "model") -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it (one `<stem>.safetensors`, or several with an index).

    Raises UserError: neither file is there, the index is unreadable or names a missing file.
    """
    folder = Path(path)
    index = folder / f"{stem}.safetensors.index.json"
    single = folder / f"{stem}.safetensors"
    if index.exists():
        names = read_json(index).get("weight_map", {})
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise UserError(
                str(index),
                "weight_map does not map tensors to files",
                "download the checkpoint again",
            )
        missing = sorted({file for file in names.values() if not (folder / file).exists()})
        if missing:
            raise UserError(
                str(index), f"names missing files: {', '.join(missing)}", "download them"
            )
        return {name: folder / file for name, file in names.items()}
    if not single.exists():
        raise UserError(
            str(single), "no such file", "set model.path to a folder with safetensors weights"
        )
    with _opened(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


def header(file: Path) -> tuple[JsonObject, int]:
    """By name, the data type, the shape and the place of each tensor; and the byte from which places count."""
    with file.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(8), "little")
        content = json.loads(stream.read(num_bytes))
    content.pop("__metadata__", None)
    return content, 8 + num_bytes


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(
            str(file), f"is not a safetensors file ({error})", "download it again"
        ) from None


class StackSlices:
    """What a slice object of safetensors has, of an expert's matrix inside a tensor of all experts."""

    def __init__(self, tensor: Any, place: StackPlace) -> None:
        self._tensor = tensor
        self._place = place

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def get_shape(self) -> list[int]:
        _, rows, cols = self._tensor.get_shape()
        return [rows // self._place.parts, cols]

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        rows, cols = at
        item = slice(self._place.item, self._place.item + 1)
        first = self._place.part * self.get_shape()[0]
        return self._tensor[item, slice(first + rows.start, first + rows.stop), cols].squeeze(0)


class Slices:
    """Lazy access to a checkpoint's tensors; every file is opened once, on first use.

    wrapper: the form of the files, where it is not that of a language model alone. Names are those of the latter.
    """

    def __init__(
        self,
        path: str | Path,
        stack: ExitStack,
        stem: str = "model",
        wrapper: Wrapper | None = None,
    ) -> None:
        self.path = Path(path)
        self.stack = stack
        self.wrapper = wrapper
        self.files = tensor_files(path, stem)
        if wrapper:
            self.files = {wrapper.from_files(name): file for name, file in self.files.items()}
        self.open: dict[Path, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.files or (isinstance(name, str) and self._place_of(name) is not None)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor which is there."""
        place = self._place_of(name)
        return self.files[place.stack if place else name]

    def get(self, name: str) -> Any:
        """The tensor's slice object; only what is indexed is read. Raises UserError where there is none."""
        if place := self._place_of(name):
            tensor = self._get(place.stack)
            if place.item < tensor.get_shape()[0]:
                return StackSlices(tensor, place)
        return self._get(name)

    def _place_of(self, name: str) -> StackPlace | None:
        """Where a tensor of all experts has one that is not in the files by itself."""
        if not self.wrapper or name in self.files:
            return None
        place = self.wrapper.stack_place(name)
        return place if place and place.stack in self.files else None

    def _get(self, name: str) -> Any:
        file = self.files.get(name)
        if self.wrapper:
            name = self.wrapper.in_files(name)
        if file is None:
            raise UserError(
                str(self.path), f"the checkpoint has no tensor {name}", "use a complete checkpoint"
            )
        if file not in self.open:
            self.open[file] = self.stack.enter_context(_opened(file))
        try:
            return self.open[file].get_slice(name)
        except SafetensorError:
            raise UserError(
                str(file), f"does not hold {name}", "download the checkpoint again"
            ) from None
