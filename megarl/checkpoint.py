"""HF checkpoints of the Qwen3-MoE family: the model's integers, a check of the files, the way into a rank's shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.resharding.shards import VOCAB_TENSORS, Shard, rectangle, verify_params
from megarl.resharding.tensors import model_tensors
from megarl.types import ModelShape, UserFault

ARCHITECTURE = "Qwen3MoeForCausalLM"
INTEGER_KEYS = {  # ModelShape's field -> the key of config.json; newer transformers write the second expert key
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "moe_ffn_size": ("moe_intermediate_size",),
}
REQUIRED_VALUES = {  # variants that no weight map describes
    "tie_word_embeddings": False,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def model_shape(path: str | Path) -> ModelShape:
    """Read `config.json` of a checkpoint folder. Raises UserFault: no file, another architecture, a missing key."""
    file = Path(path) / "config.json"
    config = _read_json(file)
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise UserFault(str(file), f"architectures is {architectures}", f"use a {ARCHITECTURE} checkpoint")
    for key, wanted in REQUIRED_VALUES.items():
        if config.get(key, wanted) != wanted:
            problem = f"{key} is {json.dumps(config[key])}"
            raise UserFault(str(file), problem, f"use a checkpoint where it is {json.dumps(wanted)}")
    values = {field: _integer(file, config, keys) for field, keys in INTEGER_KEYS.items()}
    return ModelShape(**values)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserFault(str(file), "no such file", "set model.path to a Hugging Face checkpoint folder") from None
    except (OSError, ValueError) as error:
        raise UserFault(str(file), f"cannot be read ({error})", "download or export the checkpoint again") from None
    if not isinstance(content, dict):
        raise UserFault(str(file), "is not a JSON object", "download or export the checkpoint again")
    return content


def _integer(file: Path, config: Mapping[str, Any], keys: Sequence[str]) -> int:
    value = next((config[key] for key in keys if key in config), None)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problem = "is missing" if value is None else f"is {value!r}"
    raise UserFault(str(file), f"{keys[0]} {problem}", "write it as a positive integer")


def tensor_files(path: str | Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it (one `model.safetensors`, or several with an index).

    Raises UserFault: neither file is there, the index is unreadable or names a missing file.
    """
    folder = Path(path)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = _read_json(index).get("weight_map", {})
        missing = sorted({file for file in names.values() if not (folder / file).exists()})
        if missing:
            raise UserFault(str(index), f"names missing files: {', '.join(missing)}", "download them")
        return {name: folder / file for name, file in names.items()}
    if not single.exists():
        raise UserFault(str(single), "no such file", "set model.path to a folder with safetensors weights")
    with _open(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


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


def check_hf(path: str | Path, shape: ModelShape) -> list[UserFault]:
    """Names and shapes of the checkpoint against `config.json`, from the files' headers alone.

    One fault for each kind of mend, naming its first tensor and counting the others: a wrong width is wrong in every
    layer.
    """
    found: list[UserFault] = []
    try:
        with ExitStack() as stack:
            slices = _Slices(path, stack)
            for name, wanted in model_tensors(shape).items():
                found += _tensor_faults(slices, name, wanted)
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
        real = tuple(slices.get(name).get_shape())
    except UserFault as fault:
        return [fault]
    if real == wanted:
        return []
    problem = f"{name} is {list(real)}, config.json says {list(wanted)}"
    return [UserFault(str(slices.files[name]), problem, "use a checkpoint whose config.json fits its weights")]


def load_hf(path: str | Path, shards: Sequence[Shard], params: Mapping[str, torch.Tensor]) -> None:
    """Fill `params` (name -> parameter, any float dtype) in place with the rectangles that `shards` name.

    Only the needed slices are read. Vocabulary padding rows become zero. Raises LayoutError when the parameters are not
    those that the shards describe, UserFault naming a missing tensor.
    """
    verify_params(shards, params)
    with ExitStack() as stack, torch.no_grad():
        slices = _Slices(path, stack)
        for shard in shards:
            param = params[shard.param]
            if shard.name in VOCAB_TENSORS:
                param.zero_()
            if shard.area:
                rectangle(param, shard.at, shard.num_rows, shard.num_cols).copy_(_read(slices, shard))


def _read(slices: _Slices, shard: Shard) -> torch.Tensor:
    tensor = slices.get(shard.name)
    (row, row_end), (col, col_end) = shard.rows, shard.cols
    if len(tensor.get_shape()) == 1:
        return tensor[row:row_end].unsqueeze(1)
    return tensor[row:row_end, col:col_end]
