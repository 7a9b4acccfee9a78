"""Adapters (LoRA) as a folder in PEFT's format: written from a run's checkpoint, and read where a run begins with them.

Facts from PEFT 0.21 (tuners/lora): a layer computes W x + (lora_alpha / r) B A x; `rank_pattern` has other ranks by
regular expressions of the layers' names, of which the first that fits counts. Each routed expert is a layer, by the
checkpoint's names of its weights; for classes of transformers 5, which stack experts, PEFT converts them
(utils/transformers_weight_conversion.py): gate and up become one layer of twice the rank, and it takes all layers with
the experts' names for experts. So DeepSeek's shared experts and dense layers lose theirs in such a class. Of stacked
experts it loads adapters of down, or of gate, up and down: without down it loads none of gate and up, and says nothing;
with one of gate and up it raises an error for the whole folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from megarl.checkpoints.hf_files import Slices
from megarl.checkpoints.hf_import import load_hf
from megarl.model.adapter_config import CONFIG, OF_EACH_EXPERT, OF_EXPERTS
from megarl.model.families import name_in_files
from megarl.model.hf_values import read_json
from megarl.model.lora_pairs import LoraSize, factor_name, leaf_of, weight_of
from megarl.model.shape import SCORE, ModelShape
from megarl.model.tensors import STACK
from megarl.resharding import lora_map
from megarl.resharding.shards import Shard
from megarl.types import UserError
from megarl.types.json_objects import JsonObject
from megarl.types.listed import ErrorIterator, listed
from megarl.types.tensors import NamedTensors

STEM = "adapter_model"
_PREFIX = "base_model.model."
_MLP = ("gate_proj", "up_proj", "down_proj")
_LOADED_OF_EXPERTS = (frozenset({"down_proj"}), frozenset(_MLP))
_HINT = "name adapters that fit the recipe, change the recipe, or set it to null to go on after a checkpoint"
# Variants of LoRA that megarl does not compute, with the value that stands for none of them.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "kasa_config": None,
    "arrow_config": None,
    "alpha_pattern": {},
    "modules_to_save": None,
    "target_parameters": None,
}
# PEFT's names of a classifier's head, of which megarl's models have `score`
HEADS = ("classifier", "score")
# initialisations that change the base
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def write(factors: NamedTensors, shape: ModelShape, size: LoraSize, base: str, out: Path) -> None:
    """Write whole factors, by their names in `lora_pairs`; `out` gets its name when all is there.

    base: the path of the model to which they belong.
    """
    unfinished = out.with_name(out.name + ".unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)  # left by one that was interrupted
    unfinished.mkdir()
    named = {
        _in_files(shape, name): factor.contiguous() for name, factor in sorted(factors.items())
    }
    save_file(named, unfinished / f"{STEM}.safetensors", metadata={"format": "pt"})
    config = json.dumps(_config(factors, size, base), indent=2)
    (unfinished / CONFIG).write_text(config, encoding="utf-8")
    unfinished.rename(out)


def _config(factors: Collection[str], size: LoraSize, base: str) -> JsonObject:
    ranks = {}
    if any(".experts." in name for name in factors) and size.expert_rank != size.rank:
        each = size.expert_rank
        ranks = {OF_EACH_EXPERT: each, r".*\.experts\.gate_up_proj": 2 * each, OF_EXPERTS: each}
    # else PEFT would give them some, which are 0
    of_experts = None if size.expert_rank else OF_EXPERTS
    return {
        **_PLAIN,
        "base_model_name_or_path": base,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": size.rank,
        "lora_alpha": size.alpha,
        "lora_dropout": 0.0,
        "rank_pattern": ranks,
        "target_modules": sorted({leaf_of(weight_of(name)) for name in factors}),
        "exclude_modules": of_experts,
    }


def lost_in_transformers(factors: Collection[str]) -> str | None:
    """The first weight whose adapter transformers 5 loses where it stacks a model's experts; None: there is none.

    They are those outside routed experts with the names of the experts' layers, and those of experts, unless each
    expert has adapters of its down projection alone or of all three projections.
    """
    weights = sorted(map(weight_of, factors))
    of_experts = [weight for weight in weights if ".mlp.experts." in weight]
    if of_experts and {leaf_of(weight) for weight in of_experts} not in _LOADED_OF_EXPERTS:
        return of_experts[0]
    if not of_experts and not any(".shared_experts." in weight for weight in weights):
        return None
    return next(
        (weight for weight in weights if leaf_of(weight) in _MLP and weight not in of_experts), None
    )


def check(path: str, shape: ModelShape, size: LoraSize) -> list[UserError]:
    """Errors of a folder as the adapters that a recipe asks for; reads only the files' headers.

    For a shape with scores it must have a head as well, as PEFT writes one beside the adapters of a classifier.
    """
    sizes = _sizes(shape, size)
    heads = ()
    if shape.num_labels:
        sizes = sizes | {SCORE: (shape.num_labels, shape.hidden_size)}
        heads = HEADS
    try:
        if errors := _config_errors(Path(path) / CONFIG, size, heads):
            return errors
        with ExitStack() as stack:
            in_files = {_in_files(shape, name): extent for name, extent in sizes.items()}
            return _tensor_errors(Slices(path, stack, STEM), in_files)
    except UserError as error:
        return [UserError("lora.path", f"{error.where}: {error.problem}", _HINT)]


def _tensor_errors(
    slices: Slices, extents_by_name: Mapping[str, tuple[int, int]]
) -> list[UserError]:
    """Factors that are missing or too many, by their layers, or have another extent than the recipe's."""
    errors = []
    for names, verb in (
        (extents_by_name.keys() - slices.files.keys(), "lacks"),
        (slices.files.keys() - extents_by_name.keys(), "has"),
    ):
        if names:
            layers = ", ".join(
                sorted(
                    {
                        leaf_of(weight_of(factor) if ".lora_" in factor else factor)
                        for factor in names
                    }
                )
            )
            problem = (
                f"{slices.path} {verb} weights of {layers} ({min(names)}, {len(names)} in all)"
            )
            errors.append(
                UserError("lora.path", problem, "set lora.targets and lora.experts as it has them")
            )
    for name in sorted(extents_by_name.keys() & slices.files.keys()):
        file_extent = tuple(slices.get(name).get_shape())
        if file_extent != extents_by_name[name]:
            problem = (
                f"{name} of {slices.path} is {list(file_extent)}, not {list(extents_by_name[name])}"
            )
            hint = "set lora.experts as it has it, or name adapters of this model"
            return [*errors, UserError("lora.path", problem, hint)]
    return errors


@listed
def _config_errors(file: Path, size: LoraSize, heads: Collection[str]) -> ErrorIterator:
    config = read_json(file)
    if heads and set(config.get("modules_to_save") or ()) <= {*heads}:
        config["modules_to_save"] = None
    for key, plain in _PLAIN.items():
        if (config.get(key) or plain) != plain:  # PEFT writes [] for None
            yield UserError("lora.path", f"{file} has {key} {json.dumps(config[key]):.60}", _HINT)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_WEIGHTS):
        problem = f"{file} has init_lora_weights {start}, for which PEFT changes the base's weights"
        yield UserError(
            "lora.path", problem, "let PEFT convert them to adapters of the unchanged base"
        )
    for key, recipe_value, name in (
        ("r", size.rank, "lora.rank"),
        ("lora_alpha", size.alpha, "lora.alpha"),
    ):
        if config.get(key) != recipe_value:
            problem = f"{recipe_value:g}, and {file} has {key} {config.get(key)}"
            yield UserError(name, problem, f"set it to {config.get(key)}, or leave lora.path out")


def _sizes(shape: ModelShape, size: LoraSize) -> dict[str, tuple[int, int]]:
    """Every factor of the whole model with its extent."""
    extents_by_name = {}
    for stack, (items, rows, cols) in lora_map.adapted_weights(shape, size).items():
        rank = size.rank_of(STACK in stack)
        for name in map(stack.format, range(items)):
            extents_by_name |= {
                factor_name(name, "A"): (rank, cols),
                factor_name(name, "B"): (rows, rank),
            }
    return extents_by_name


def load(path: str, shape: ModelShape, shards: Sequence[Shard], factors: NamedTensors) -> None:
    """Fill a rank's factors with the boxes that `shards` name. Raises UserError naming a missing tensor."""
    named = [shard._replace(name=_in_files(shape, shard.name)) for shard in shards]
    load_hf(path, named, factors, STEM)


def load_head(path: str, shape: ModelShape, shards: Sequence[Shard], params: NamedTensors) -> None:
    """Fill the score head, where this rank has it, of the weights that `shards` name."""
    heads = [shard for shard in shards if shard.name == SCORE]
    load(path, shape, heads, {shard.param: params[shard.param] for shard in heads})


def _in_files(shape: ModelShape, name: str) -> str:
    """PEFT's name of a factor or a head."""
    return _PREFIX + name_in_files(shape, name)
