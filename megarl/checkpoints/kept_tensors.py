"""The tensors of a checkpoint that training leaves as they are, such as a vision tower: copied byte for byte."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from megarl.checkpoints.hf_files import header, tensor_files
from megarl.model.families import family_of
from megarl.model.shape import ModelShape
from megarl.types.json_objects import JsonObject

_CHUNK_BYTES = 16 << 20


def prefixes(shape: ModelShape) -> tuple[str, ...]:
    """The beginnings of the names of the tensors that are copied."""
    wrapper = family_of(shape).wrapper
    return wrapper.untrained_prefixes if wrapper else ()


def names_by_file(path: str, shape: ModelShape) -> dict[Path, list[str]]:
    """The copied tensors of a checkpoint by their file, both in order. Raises as `tensor_files`."""
    names: dict[Path, list[str]] = defaultdict(list)
    if of_copied := prefixes(shape):
        for name, file in sorted(tensor_files(path).items(), key=lambda item: (item[1], item[0])):
            if name.startswith(of_copied):
                names[file].append(name)
    return dict(names)


def copy(source: Path, names: Sequence[str], file: Path) -> None:
    """Write a safetensors file with some tensors of another; holds a few megabytes at once."""
    tensors, start = header(source)
    places = [tensors[name]["data_offsets"] for name in names]
    new_header: JsonObject = {"__metadata__": {"format": "pt"}}
    written = 0
    for name, (first, last) in zip(names, places, strict=True):
        offsets = [written, written + last - first]
        new_header[name] = {**tensors[name], "data_offsets": offsets}
        written += last - first
    encoded = json.dumps(new_header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at multiples of 8 bytes
    with source.open("rb") as stream, file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for first, last in places:
            stream.seek(start + first)
            _copy_bytes(stream, out, last - first)


def _copy_bytes(stream: BinaryIO, out: BinaryIO, num_bytes: int) -> None:
    while num_bytes:
        chunk = stream.read(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            raise OSError(f"{stream.name} ends inside a tensor")
        out.write(chunk)
        num_bytes -= len(chunk)
