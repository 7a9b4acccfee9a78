"""Keep the first layers of a model, to try a large model on few GPUs: its shapes are right, its answers are not.

    .venv/bin/python scripts/keep_layers.py models/DeepSeek-V3 models/first-layers --layers 4

Reads only the tensors that are kept, file by file. Without weights in MODEL, config.json alone is written.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from megarl.checkpoints.hf_files import tensor_files
from megarl.model.hf_values import read_json
from megarl.types import UserError

INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TEXT = "text_config"  # the language model's part, where there is a vision tower, too


def keep_layers(model: Path, out: Path, num_layers: int) -> None:
    """Write the folder `out`, which must not exist. Raises UserError."""
    config = read_json(model / "config.json")
    most = config.get(_TEXT, config)["num_hidden_layers"]
    if not 0 < num_layers <= most:
        problem = f"{num_layers} of {most} layers"
        raise UserError("--layers", problem, f"give a number from 1 to {most}")
    if out.exists():
        raise UserError(str(out), "it is there already", "name another folder")
    has_weights = any((model / name).is_file() for name in (INDEX, "model.safetensors"))
    files = tensor_files(model) if has_weights else {}
    out.mkdir(parents=True)
    (out / "config.json").write_text(
        json.dumps(shortened(config, num_layers), indent=2) + "\n", encoding="utf-8"
    )
    if files:
        _copy_weights(files, out, num_layers)
        _copy_others(model, out)


def shortened(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """A config.json of the first layers, without multi-token prediction."""
    if _TEXT in config:
        return {**config, _TEXT: shortened(config[_TEXT], num_layers)}
    short_config: dict[str, Any] = {**config, "num_hidden_layers": num_layers}
    if "num_nextn_predict_layers" in short_config:
        short_config["num_nextn_predict_layers"] = 0
    if short_config.get("layer_types"):
        short_config["layer_types"] = short_config["layer_types"][:num_layers]
    if "max_window_layers" in short_config:
        short_config["max_window_layers"] = min(num_layers, short_config["max_window_layers"])
    return short_config


def _copy_weights(files: Mapping[str, Path], out: Path, num_layers: int) -> None:
    """One file for each that holds something of it, and their index."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for file in sorted(set(files.values())):
        names = [
            name for name, place in files.items() if place == file and _is_kept(name, num_layers)
        ]
        if not names:
            continue
        with safe_open(str(file), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in names}
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file.name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if set(weight_map.values()) != {"model.safetensors"}:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _is_kept(name: str, num_layers: int) -> bool:
    layer = _LAYER.search(name)
    return layer is None or int(layer[1]) < num_layers


def _copy_others(model: Path, out: Path) -> None:
    """The tokenizer's files, and what else lies beside the weights."""
    for path in model.iterdir():
        is_weights = path.suffix == ".safetensors" or path.name in (INDEX, "config.json")
        if path.is_file() and not is_weights:
            shutil.copyfile(path, out / path.name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--layers", type=int, required=True, help="how many, from the first")
    args = parser.parse_args()
    try:
        keep_layers(args.model, args.out, args.layers)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
