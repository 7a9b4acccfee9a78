"""Quantised tensors of a checkpoint: checked, and read box by box in the type of a parameter.

Facts from the publishers' own casts, which are equalled to the bit:
- fp8 (inference/kernel.py of DeepSeek-V3, `weight_dequant`): an element in float32, times its tile's scale in float32,
  rounded to bfloat16. `<weight>_scale_inv` is [ceil(rows / 128), ceil(cols / 128)] in float32, or in powers of two
  (UE8M0: float32, or exponents alone).
- int4 (compressed-tensors 0.18, compressors/pack_quantized): element i of a row is 8 less than bits 4 i to 4 i + 3 of
  the row's words in `<weight>_packed` [rows, ceil(cols / 8)]; `<weight>_scale` is [rows, cols / 32] in bfloat16, in
  which the product is computed. In float32 it is exact, so that rounding it gives the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megarl.checkpoints.hf_files import Slices
from megarl.model.families import name_in_files
from megarl.model.hf_config import HfFacts, HfModel
from megarl.model.precision import Precision
from megarl.model.quantisation import FP8_TILE, HINT, INT4_GROUP, Quantisation
from megarl.model.shape import ModelShape
from megarl.model.tensors import aliases, hf_tensors, is_projection, tensors
from megarl.placement.roles import engine_precision
from megarl.resharding.fp8 import FP8, SCALE_SUFFIX
from megarl.resharding.shards import LayoutError, Range, intersect, tiles
from megarl.types import UserError

if TYPE_CHECKING:
    from megarl.config import Recipe

FILE_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
_FP8 = "F8_E4M3"
_INT32 = "I32"
_SCALES = ("F32", "BF16", "F8_E8M0")
_PACKED = "_packed"
_GROUP_SCALE = "_scale"
_UNREAD = ("_zero_point", "_g_idx")
_PER_WORD = 8
_BITS = 4
_OFFSET = 8  # int4 elements in an int32
_STRIP = FP8_TILE  # rows that are computed in float32 at once
Kind = Literal["plain", "fp8", "int4"]


def kind_of(slices: Slices, name: str) -> Kind:
    """The form in which the files have a tensor; a missing tensor counts as plain."""
    if name in slices:
        if slices.get(name).get_dtype() == _FP8:
            return "fp8"
        return "plain"
    if name + _PACKED in slices:
        return "int4"
    return "plain"


def check(slices: Slices, name: str, shape: Sequence[int]) -> None:
    """Raises UserError where a tensor is missing, or has another shape or type than its reader expects, or its scales.

    shape: of the tensor as config.json has it. Reads only the files' headers.
    """
    kind = kind_of(slices, name)
    if kind == "int4":
        _, cols = shape if len(shape) == 2 else (0, 0)
        _has_type(slices, name + _PACKED, (_INT32,))
        _has_shape(slices, name + _PACKED, (shape[0], -(-cols // _PER_WORD)))
        _group_scales(slices, name)
        return
    _has_type(slices, name, (*FILE_DTYPES, _FP8) if len(shape) == 2 else FILE_DTYPES)
    _has_shape(slices, name, shape)
    if kind == "fp8":
        _tile_scales(slices, name)


def _has_type(slices: Slices, name: str, dtypes: Sequence[str]) -> None:
    dtype = slices.get(name).get_dtype()
    if dtype not in dtypes:
        raise UserError(str(slices.file_of(name)), f"{name} is {dtype}", HINT)


def _has_shape(slices: Slices, name: str, shape: Sequence[int]) -> None:
    real = list(slices.get(name).get_shape())
    if real != list(shape):
        problem = f"{name} is {real}, config.json says {list(shape)}"
        raise UserError(
            str(slices.file_of(name)),
            problem,
            "use a checkpoint whose config.json fits its weights",
        )


def fill(plane: Tensor, slices: Slices, name: str, rows: Range, cols: Range) -> bool:
    """Write rows x cols of a quantised tensor into a plane of that size; False where the files have it plain.

    A plane in float8_e4m3fn gets the bytes of the files. Raises UserError as `check` does of the scales, LayoutError
    for such a plane where the files have no such bytes.
    """
    kind = kind_of(slices, name)
    if plane.dtype == FP8:
        if kind != "fp8":
            raise LayoutError(f"{name}: the checkpoint does not have it in fp8")
        plane.copy_(slices.get(name)[slice(*rows), slice(*cols)])
    elif kind == "fp8":
        _fill_fp8(plane, slices, name, rows, cols)
    elif kind == "int4":
        _fill_int4(plane, slices, name, rows, cols)
    return kind != "plain"


def _fill_fp8(plane: Tensor, slices: Slices, name: str, rows: Range, cols: Range) -> None:
    codes = slices.get(name)[slice(*rows), slice(*cols)].to(plane.device)
    scales = (
        _tile_scales(slices, name)[slice(*tiles(rows)), slice(*tiles(cols))]
        .to(plane.device)
        .float()
    )
    of_cols = _spread(scales, cols, FP8_TILE)
    first_tile = tiles(rows)[0]
    for tile, (start, stop) in _strips(rows):
        plane[start:stop].copy_(codes[start:stop].float().mul_(of_cols[tile - first_tile]))


def _fill_int4(plane: Tensor, slices: Slices, name: str, rows: Range, cols: Range) -> None:
    words = cols[0] // _PER_WORD, -(-cols[1] // _PER_WORD)
    groups = cols[0] // INT4_GROUP, -(-cols[1] // INT4_GROUP)
    packed = slices.get(name + _PACKED)[slice(*rows), slice(*words)].to(plane.device)
    scales = _group_scales(slices, name)[slice(*rows), slice(*groups)].to(plane.device)
    shifts = torch.arange(0, _BITS * _PER_WORD, _BITS, dtype=torch.int32, device=plane.device)
    first = cols[0] - words[0] * _PER_WORD
    for _, (start, stop) in _strips(rows):
        bits = (packed[start:stop].unsqueeze(2) >> shifts) & (2**_BITS - 1)
        values = bits.flatten(1)[:, first : first + plane.shape[1]] - _OFFSET
        plane[start:stop].copy_(
            values.float().mul_(_spread(scales[start:stop].float(), cols, INT4_GROUP))
        )


def _strips(rows: Range) -> Iterator[tuple[int, Range]]:
    """The tiles that a range of rows touches, each with its rows, counted from the range's first."""
    for tile in range(*tiles(rows)):
        start, stop = intersect(rows, (tile * _STRIP, (tile + 1) * _STRIP))
        yield tile, (start - rows[0], stop - rows[0])


def _spread(scales: Tensor, cols: Range, width: int) -> Tensor:
    """The scale of each column of a range, from [rows, groups of `width` columns that the range touches]."""
    first = cols[0] % width
    return scales.repeat_interleave(width, dim=1)[:, first : first + cols[1] - cols[0]]


def _tile_scales(slices: Slices, name: str) -> Any:
    rows, cols = slices.get(name).get_shape()
    shape = [-(-rows // FP8_TILE), -(-cols // FP8_TILE)]
    return _scales(slices, name + SCALE_SUFFIX, shape, f"for tiles of {FP8_TILE} x {FP8_TILE}")


def _group_scales(slices: Slices, name: str) -> Any:
    for suffix in _UNREAD:
        if name + suffix in slices:
            raise UserError(str(slices.file_of(name + suffix)), f"has {name}{suffix}", HINT)
    rows, words = slices.get(name + _PACKED).get_shape()
    shape = [rows, -(-words * _PER_WORD // INT4_GROUP)]
    return _scales(slices, name + _GROUP_SCALE, shape, f"for groups of {INT4_GROUP}")


def _scales(slices: Slices, name: str, shape: Sequence[int], what: str) -> Any:
    """The slice object of the scales. Raises UserError: not there, another type or shape."""
    scales = slices.get(name)
    _has_type(slices, name, _SCALES)
    if scales.get_shape() != list(shape):
        problem = f"{name} is {scales.get_shape()}; {what} it would be {list(shape)}"
        raise UserError(str(slices.file_of(name)), problem, HINT)
    return scales


def fp8_checkpoint(recipe: Recipe, model: HfModel) -> str | None:
    """The checkpoint whose fp8 tiles are the engines' frozen weights, which they read from it; None: there is none.

    Where a projection is not published in tiles, or scales are to be powers of two, engines do not read any: all are
    quantised anew as the run starts.
    """
    is_frozen = recipe.lora is not None and recipe.lora.sync == "adapters"
    if (
        not is_frozen
        or recipe.rollout.engine.weights != "fp8"
        or model.facts is None
        or model.facts.quantisation is None
    ):
        return None
    precision = engine_precision(recipe)
    has_published_scales = precision.scales == "exact"
    if has_published_scales and _are_tiles(model.facts.quantisation, model.shape, precision):
        return recipe.model.path
    return None


@cache
def _are_tiles(quantisation: Quantisation, shape: ModelShape, precision: Precision) -> bool:
    """Whether the weights of the decoder that engines have in fp8 are published in tiles."""
    decoder = replace(shape, num_mtp_layers=0)
    return quantisation.kind == "fp8" and all(
        quantisation.covers(name_in_files(shape, name))
        for name in hf_tensors(decoder)
        if not precision.is_plain(decoder, name)
    )


def weights_in_words(shape: ModelShape, facts: HfFacts) -> str:
    """The type and the bytes of a checkpoint's weights, from its config.json alone."""
    return f"weights in {facts.quantisation or facts.dtype}, {file_bytes(shape, facts) / 1e9:,.2f} GB to read"


def file_bytes(shape: ModelShape, facts: HfFacts) -> int:
    """Bytes of all tensors of a checkpoint with their scales."""
    quantisation = facts.quantisation
    repeated = dict.fromkeys(tensors(shape), 1)
    for original in aliases(shape).values():
        repeated[original] += 1
    total = 0
    for name, (items, rows, cols) in tensors(shape).items():
        in_files = name_in_files(shape, name).format(0)
        if quantisation and is_projection(name) and quantisation.covers(in_files):
            item_bytes = _quantised_bytes(rows, cols, quantisation)
        else:
            if name.endswith("e_score_correction_bias"):
                dtype = "float32"
            else:
                dtype = facts.dtype
            item_bytes = rows * cols * getattr(torch, dtype).itemsize
        total += repeated[name] * items * item_bytes
    return total


def _quantised_bytes(rows: int, cols: int, quantisation: Quantisation) -> int:
    if quantisation.kind == "fp8":
        return rows * cols + 4 * -(-rows // FP8_TILE) * -(-cols // FP8_TILE)
    shape_bytes = 2 * 4  # `<weight>_shape`
    return 4 * rows * -(-cols // _PER_WORD) + 2 * rows * -(-cols // INT4_GROUP) + shape_bytes
