"""Hugging Face checkpoints: checking the files, and loading them into a rank's shards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.parallel.hf_config import read_json
from megarl.resharding.shards import STACK, VOCAB_TENSORS, Shard, verify_params, views
from megarl.resharding.tensors import SCORE, hf_tensors, mtp_prefix
from megarl.types import ModelShape, UserFault

_SAMPLED_BYTES = 64 << 10
FILE_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them


def tensor_files(path: str | Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it (one `model.safetensors`, or several with an index).

    Raises UserFault: neither file is there, the index is unreadable or names a missing file.
    """
    folder = Path(path)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = read_json(index).get("weight_map", {})
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise UserFault(str(index), "weight_map does not map tensors to files", "download the checkpoint again")
        missing = sorted({file for file in names.values() if not (folder / file).exists()})
        if missing:
            raise UserFault(str(index), f"names missing files: {', '.join(missing)}", "download them")
        return {name: folder / file for name, file in names.items()}
    if not single.exists():
        raise UserFault(str(single), "no such file", "set model.path to a folder with safetensors weights")
    with _open(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


@cache
def fingerprint(path: str | Path) -> str:
    """Hexadecimal digits that differ between checkpoints, of their files' names, sizes and some of their bytes.

    The beginning, the middle and the end of each file are read once in a process. Raises as `tensor_files`.
    """
    found = hashlib.sha256()
    for file in sorted({*tensor_files(path).values()}):
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for start in (0, size // 2, max(0, size - _SAMPLED_BYTES)):
                content.seek(start)
                found.update(content.read(_SAMPLED_BYTES))
    return found.hexdigest()[:32]


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserFault(str(file), f"is not a safetensors file ({error})", "download it again") from None


class _Slices:
    """Lazy access to a checkpoint's tensors; every file is opened once, on first use."""

    def __init__(self, path: str | Path, stack: ExitStack) -> None:
        self.path, self.stack = Path(path), stack
        self.files = tensor_files(path)
        self.open: dict[Path, Any] = {}

    def get(self, name: str) -> Any:
        """The tensor's slice object; only what is indexed is read."""
        file = self.files.get(name)
        if file is None:
            raise UserFault(str(self.path), f"the checkpoint has no tensor {name}", "use a complete checkpoint")
        if file not in self.open:
            self.open[file] = self.stack.enter_context(_open(file))
        try:
            return self.open[file].get_slice(name)
        except SafetensorError:
            raise UserFault(str(file), f"does not hold {name}", "download the checkpoint again") from None


def without_head(path: str | Path) -> bool:
    """Whether a checkpoint for a critic or reward model has no score head, so that the head starts untrained."""
    return SCORE not in tensor_files(path)


def check_hf(path: str | Path, shape: ModelShape) -> list[UserFault]:
    """Check names and shapes of the checkpoint's tensors against `config.json`, reading only the files' headers.

    A missing score head is no fault. One fault for each mend, which names its first tensor and counts the others: a
    wrong width is wrong in every layer.
    """
    found: list[UserFault] = []
    try:
        with ExitStack() as stack:
            slices = _Slices(path, stack)
            wanted_tensors = hf_tensors(shape)
            if SCORE not in slices.files:
                wanted_tensors.pop(SCORE, None)
            for name, wanted in wanted_tensors.items():
                found += _tensor_faults(slices, name, wanted)
            if not any(name.startswith(mtp_prefix(shape, 0)) for name in slices.files) and shape.num_mtp_layers:
                file = str(Path(path) / "config.json")
                problem = f"num_nextn_predict_layers is {shape.num_mtp_layers}, the files have no such layer"
                return [UserFault(file, problem, "write num_nextn_predict_layers 0, or use a complete checkpoint")]
    except UserFault as fault:
        return [fault]
    by_mend: dict[str, list[UserFault]] = {}
    for fault in found:
        by_mend.setdefault(fault.mend, []).append(fault)
    return [_first_of(faults) for faults in by_mend.values()]


def _first_of(faults: Sequence[UserFault]) -> UserFault:
    first = faults[0]
    more = f" (and {len(faults) - 1} more such tensors)" if len(faults) > 1 else ""
    return UserFault(first.where, first.problem + more, first.mend)


def _tensor_faults(slices: _Slices, name: str, wanted: tuple[int, ...]) -> list[UserFault]:
    try:
        tensor = slices.get(name)
        real = tuple(tensor.get_shape())
    except UserFault as fault:
        return [fault]
    dtype = tensor.get_dtype()
    if dtype not in FILE_DTYPES:
        mend = "use a checkpoint in bfloat16: quantised weights cannot be read without their scales"
        return [UserFault(str(slices.files[name]), f"{name} is {dtype}", mend)]
    if real == wanted:
        return []
    problem = f"{name} is {list(real)}, config.json says {list(wanted)}"
    return [UserFault(str(slices.files[name]), problem, "use a checkpoint whose config.json fits its weights")]


def load_hf(path: str | Path, shards: Sequence[Shard], params: Mapping[str, torch.Tensor]) -> None:
    """Fill `params` (name -> parameter, any float dtype) in place with the boxes that `shards` name.

    Only the needed slices are read. Padding rows of the vocabulary become zero, and so does a missing score head.
    Raises LayoutError when the shards do not describe the parameters, UserFault naming a missing tensor.
    """
    verify_params(shards, params)
    with ExitStack() as stack, torch.no_grad():
        slices = _Slices(path, stack)
        for shard in shards:
            is_new = shard.name == SCORE and SCORE not in slices.files
            if is_new or shard.name in VOCAB_TENSORS:
                params[shard.param].zero_()
            if shard.area and not is_new:
                _fill(slices, shard, params)


def _fill(slices: _Slices, shard: Shard, params: Mapping[str, torch.Tensor]) -> None:
    """Copy a shard item by item, because the files hold each item as a tensor of its own."""
    planes = [plane for view in views(params, shard.param, shard.at, shard.size) for plane in view]
    _, (row, row_end), (col, col_end) = shard.box
    for item, plane in zip(range(*shard.items), planes, strict=True):
        tensor = slices.get(shard.name.format(item) if STACK in shard.name else shard.name)
        is_vector = len(tensor.get_shape()) == 1
        plane.copy_(tensor[row:row_end].unsqueeze(1) if is_vector else tensor[row:row_end, col:col_end])
