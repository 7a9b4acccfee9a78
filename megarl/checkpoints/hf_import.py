"""Hugging Face checkpoints: checking the files, and loading them into a rank's shards."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoints import quantised
from megarl.checkpoints.hf_files import Slices, tensor_files
from megarl.model.families import family_of, mtp_prefix
from megarl.model.families.wrapper import Wrapper
from megarl.model.shape import SCORE, ModelShape
from megarl.model.tensors import STACK, hf_tensors
from megarl.resharding.shards import VOCAB_TENSORS, Shard, verify_params, views
from megarl.types import UserError
from megarl.types.tensors import NamedTensors

_SAMPLED_BYTES = 64 << 10


@cache
def fingerprint(path: str | Path) -> str:
    """Hexadecimal digits that differ between checkpoints, of their files' names, sizes and some of their bytes.

    The beginning, the middle and the end of each file are read once in a process. Raises as `tensor_files`.
    """
    digest = hashlib.sha256()
    for file in sorted({*tensor_files(path).values()}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for start in (0, size // 2, max(0, size - _SAMPLED_BYTES)):
                content.seek(start)
                digest.update(content.read(_SAMPLED_BYTES))
    return digest.hexdigest()[:32]


def without_head(path: str | Path) -> bool:
    """Whether a checkpoint for a critic or reward model has no score head, so that the head starts untrained."""
    return SCORE not in tensor_files(path)


def check_hf(path: str | Path, shape: ModelShape) -> list[UserError]:
    """Check names and shapes of the checkpoint's tensors against `config.json`, reading only the files' headers.

    A missing score head is no error. One error for each mend, which names its first tensor and counts the others: a
    wrong width is wrong in every layer.
    """
    by_hint: dict[str, list[UserError]] = defaultdict(list)
    try:
        with ExitStack() as stack:
            slices = Slices(path, stack, wrapper=family_of(shape).wrapper)
            has_mtp = any(name.startswith(mtp_prefix(shape, 0)) for name in slices.files)
            if shape.num_mtp_layers and not has_mtp:
                key = family_of(shape).mtp.key
                problem = f"{key} is {shape.num_mtp_layers}, the files have no such layer"
                hint = f"write {key} 0, or use a complete checkpoint"
                return [UserError(str(Path(path) / "config.json"), problem, hint)]
            for error in _tensor_errors(slices, shape):
                by_hint[error.hint].append(error)
    except UserError as error:
        return [error]
    return [_first_of(errors) for errors in by_hint.values()]


def _tensor_errors(slices: Slices, shape: ModelShape) -> Iterator[UserError]:
    for name, file_shape in hf_tensors(shape).items():
        try:
            if name != SCORE or SCORE in slices:
                quantised.check(slices, name, file_shape)
        except UserError as error:
            yield error


def _first_of(errors: Sequence[UserError]) -> UserError:
    first, *others = errors
    more = f" (and {len(others)} more such tensors)" if others else ""
    return UserError(first.where, first.problem + more, first.hint)


def load_hf(
    path: str | Path,
    shards: Sequence[Shard],
    params: NamedTensors,
    stem: str = "model",
    wrapper: Wrapper | None = None,
) -> None:
    """Fill `params` (name -> parameter, any float dtype) in place with the boxes that `shards` name.

    Only the needed slices are read; quantised weights are dequantised, whatever tiles a box cuts. Parameters in
    float8_e4m3fn, an fp8 engine's, get the bytes of the files, and shards of scales the files' scales. Padding rows of
    the vocabulary become zero, and so does a missing score head. Raises LayoutError when the shards do not describe the
    parameters, UserError naming a tensor that is missing or has another type. stem: of the files' names. wrapper: the
    family's.
    """
    verify_params(shards, params)
    with ExitStack() as stack, torch.no_grad():
        slices = Slices(path, stack, stem, wrapper)
        for shard in shards:
            is_new = shard.name == SCORE and SCORE not in slices.files
            if is_new or shard.name in VOCAB_TENSORS:
                params[shard.param].zero_()
            if shard.area and not is_new:
                _fill(slices, shard, params)


def _fill(slices: Slices, shard: Shard, params: NamedTensors) -> None:
    """Copy a shard item by item, because the files hold each item as a tensor of its own."""
    planes = [plane for view in views(params, shard.param, shard.at, shard.size) for plane in view]
    _, rows, cols = shard.box
    for item, plane in zip(range(*shard.items), planes, strict=True):
        if STACK in shard.name:
            name = shard.name.format(item)
        else:
            name = shard.name
        if quantised.fill(plane, slices, name, rows, cols):
            continue
        tensor = slices.get(name)
        plane.copy_(_plane(tensor, slice(*rows), slice(*cols)))


def _plane(tensor: Any, rows: slice, cols: slice) -> Tensor:
    """The rows and columns of a tensor of the files; norms have one dimension, convolutions over time three."""
    dims = len(tensor.get_shape())
    if dims == 1:
        return tensor[rows].unsqueeze(1)
    if dims == 3:
        return tensor[rows, :, cols].squeeze(1)
    return tensor[rows, cols]
