"""Everything that can be known before a process is started, told at once, and the inputs that were read to know it."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from megarl.algos import ALGORITHMS, has_critic, hyperparameters_of, learns_from_answers
from megarl.checkpoints import hf_import
from megarl.cluster.visible_gpus import device_faults
from megarl.config import Recipe
from megarl.device import DEVICE
from megarl.parallel.hf_config import hf_facts, model_shape
from megarl.parallel.layout import FP8_TILE, EngineLayout, TrainLayout
from megarl.parallel.placement import auxiliary_slots, engine_layout, node_faults, slot_faults, train_layout
from megarl.preflight.data import read_data
from megarl.preflight.environment import cluster_faults
from megarl.preflight.evaluation import eval_faults
from megarl.preflight.layout import reshard_faults
from megarl.preflight.lengths import budgets, length_faults
from megarl.preflight.models import critic_faults, loss_faults, reference_faults, reward_model_faults, tokenizer_faults
from megarl.preflight.rewards import reward_faults
from megarl.preflight.rules import rule_faults
from megarl.preflight.samples import sample_faults
from megarl.preflight.sampling import sampling_faults
from megarl.preflight.secrets import secret_faults
from megarl.preflight.stop_tokens import eos_faults
from megarl.preflight.values import is_writable, value_faults
from megarl.rollout.prompts import PromptStream, load_tokenizer
from megarl.rollout.sample_file import SampleFile, open_samples
from megarl.rollout.sglang.arguments import latent_cache_faults, sglang_faults
from megarl.rollout.token_cache import TokenCache
from megarl.tracking.progress import progress_bar
from megarl.types import Metrics, ModelShape, Prompt, UserFault, UserFaults

T = TypeVar("T")
Faults = list[UserFault]
_SPARE_CONTEXT = 2  # positions that SGLang keeps free: it cuts a longer response short


@dataclass(frozen=True)
class Inputs:
    """What a run reads from disk: an endless stream of training prompts, and each evaluation set, cut to its limit.

    notes, metrics: what is to be said of the data at the start, and its numbers for the record of step 0.
    """

    tokenizer: Any
    prompts: PromptStream
    eval_sets: Mapping[str, Sequence[Prompt]]
    notes: Sequence[str] = ()
    metrics: Metrics = field(default_factory=dict)


class _NoTokenizer:
    """In place of a tokenizer that cannot be loaded, so that the data's own faults are told too."""

    chat_template, eos_token_id = "", 0

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: object) -> str:
        return ""

    def __call__(self, text: str | Sequence[str], **_: object) -> Mapping[str, Any]:
        return {"input_ids": [0] if isinstance(text, str) else [[0] for _ in text]}


def check(recipe: Recipe, *, learns: bool = True) -> Inputs:
    """Read and check all that a recipe names; learns: or samples alone. Raises UserFaults with all that is to mend."""
    faults = device_faults() + cluster_faults(recipe.placement)
    inputs = _read(recipe, faults, TokenCache.of_user(), learns=learns)
    if faults or inputs is None:
        raise UserFaults(faults)
    return inputs


def faults_elsewhere(recipe: Recipe, device: str, absent: Container[str]) -> Faults:
    """All that is to mend, as far as it can be known on another machine than the run's.

    device: that the run is meant for. absent: keys that name files which are not here; model.path must be a folder with
    the model's config.json even so. Where the data is not here its prompts are taken to be as long as they may be.
    """
    faults: Faults = []
    _read(recipe, faults, TokenCache.of_user(writes=False), device=device, absent=absent)
    return faults


def _read(
    recipe: Recipe,
    faults: Faults,
    cache: TokenCache | None,
    *,
    learns: bool = True,
    device: str = DEVICE,
    absent: Container[str] = (),
) -> Inputs | None:
    """The inputs, where the training data could be read; what is wrong with the recipe is added to `faults`."""
    faults += _run_faults(recipe, learns, device)
    faults += _layout_faults(recipe, device)
    faults += _checkpoint_faults(recipe, has_weights="model.path" not in absent)
    faults += _sglang_faults(recipe)
    faults += _megatron_faults(recipe, device)
    tokenizer = _NoTokenizer()
    if "model.path" not in absent and Path(recipe.model.path).is_dir():  # else the checkpoint's own fault says it
        loaded = _attempt(faults, lambda: load_tokenizer(recipe.model.path))
        tokenizer = loaded or tokenizer
    shape = _attempt([], lambda: model_shape(recipe.model.path))  # without one its fault is told already
    if shape and not isinstance(tokenizer, _NoTokenizer):
        faults += tokenizer_faults(tokenizer, shape) or eos_faults(recipe, tokenizer)
    vocab_size = shape.vocab_size if shape else None
    data = read_data(recipe, tokenizer, progress_bar, vocab_size=vocab_size, absent=absent, cache=cache)
    faults += data.faults
    is_whole = all(where in data.train or where in absent for where in recipe.data.train_files)
    train = data.train_prompts if is_whole else []  # what is wrong with a file says nothing about the others' rows
    eval_sets = {name: file.prompts[: recipe.evaluation.of(name).max_prompts] for name, file in data.eval_sets.items()}
    if is_whole:
        is_here = len(data.train) == len(recipe.data.train)
        unknown = [] if is_here else [Prompt("", "", (0,) * recipe.data.max_prompt_tokens, "")]
        faults += length_faults(recipe, tokenizer, [*train, *unknown], cache, vocab_size)
    faults += reward_faults(recipe, [*train, *(prompt for prompts in eval_sets.values() for prompt in prompts)])
    if "critic.path" not in absent:
        faults += critic_faults(recipe)
    if "reward_model.path" not in absent:
        faults += reward_model_faults(recipe, train)
    return Inputs(tokenizer, data.stream(recipe), eval_sets, data.notes, data.metrics) if train else None


def check_samples(recipe: Recipe, path: Path) -> SampleFile:
    """The same for training on samples of a file, where no engine, prompt or reward has a part."""
    faults: Faults = []
    shape = _attempt([], lambda: model_shape(recipe.model.path))
    faults += device_faults() + _run_faults(recipe) + cluster_faults(recipe.placement)
    faults += _train_layout_faults(recipe, shape or _shape_that_fits(train_layout(recipe), engine_layout(recipe)))
    faults += _checkpoint_faults(recipe)
    faults += _megatron_faults(recipe)
    faults += critic_faults(recipe)
    faults += _unused_faults(recipe, "a file's samples are trained on as they are")
    if learns_from_answers(recipe.algorithm.name):
        problem = f"{recipe.algorithm.name} learns from the data's answers, not from samples"
        faults.append(UserFault("algorithm.name", problem, "leave --from-samples out, or name another"))
    samples = _attempt(faults, lambda: open_samples(path))
    if samples and shape:
        context = None if faults else _config(recipe).get("max_position_embeddings")
        row = ALGORITHMS.get(recipe.algorithm.name)
        wants = (row.greedy_baseline, row.needs_group) if row else (False, False)
        faults += sample_faults(samples, recipe, shape, context, budgets(recipe), *wants)
    if samples is None or faults:
        raise UserFaults(faults)
    return samples


def check_convert(recipe: Recipe) -> None:
    """The same for writing a run's weights as a Hugging Face checkpoint, where only training ranks have a part."""
    faults: Faults = []
    shape = _attempt(faults, lambda: model_shape(recipe.model.path))
    if shape:
        faults += _train_layout_faults(recipe, shape) + hf_import.check_hf(recipe.model.path, shape)
    faults += _megatron_faults(recipe) + device_faults() + cluster_faults(recipe.placement)
    if faults:
        raise UserFaults(faults)


def check_rollout(recipe: Recipe, out: Path) -> Inputs:
    """The same for sampling into a file without training."""
    faults = _unused_faults(recipe, "samples are made with the weights of model.path")
    if out.exists() or not is_writable(out.absolute().parent):
        problem = "it is there already" if out.exists() else f"{out.absolute().parent} is not a folder to write to"
        faults.append(UserFault(f"--out {out}", problem, "name another file"))
    inputs = _attempt(faults, lambda: check(recipe, learns=False))
    if inputs is None or faults:
        raise UserFaults(faults)
    return inputs


def _unused_faults(recipe: Recipe, reason: str) -> Faults:
    """Keys whose part of a run is left out where only one side of it takes place."""
    unused = {"warm_start.steps": (recipe.warm_start.steps, "0"), "checkpoint.every": (recipe.checkpoint.every, "null")}
    if recipe.algorithm.name in ALGORITHMS:
        rules = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
        unused["algorithm.dynamic_sampling"] = (rules.dynamic_sampling, "false")
    told = [(key, value, none) for key, (value, none) in unused.items() if value]
    return [UserFault(key, f"{value}, but {reason}", f"set it to {none}") for key, value, none in told]


def _attempt(faults: Faults, read: Callable[[], T]) -> T | None:
    """The value, or None when a fault kept it from being read."""
    try:
        return read()
    except UserFault as fault:
        faults.append(fault)
    except UserFaults as several:
        faults += several.faults
    return None


def _run_faults(recipe: Recipe, learns: bool = True, device: str = DEVICE) -> Faults:
    faults = value_faults(recipe, device) + secret_faults(recipe)
    for name in dict.fromkeys(recipe.run.trackers):  # each is the name of its client's package
        if importlib.util.find_spec(name) is None:
            mend = "pip install 'megarl[trackers]' or leave it out"
            faults.append(UserFault("run.trackers", f"{name} is not installed", mend))
    if recipe.algorithm.name not in ALGORITHMS:
        problem, mend = f"{recipe.algorithm.name!r} is no algorithm", f"choose from {', '.join(ALGORITHMS)}"
        faults.append(UserFault("algorithm.name", problem, mend))
    return faults + rule_faults(recipe, learns=learns) + sampling_faults(recipe) + eval_faults(recipe)


def _layout_faults(recipe: Recipe, device: str) -> Faults:
    """Both layouts against the model and the GPUs, and the batch against the data-parallel ranks."""
    layout, engines = train_layout(recipe), engine_layout(recipe)
    known = _attempt([], lambda: model_shape(recipe.model.path))
    shape = known or _shape_that_fits(layout, engines)
    faults = _train_layout_faults(recipe, shape)
    on_cpu = device == "cpu"  # where fp8 itself is the fault, not the tiles that it cuts
    engine_faults = replace(engines, fp8=engines.fp8 and not on_cpu).faults(shape, recipe.placement.gpus)
    if not engine_faults:
        engine_faults = engines.cpu_faults(shape) if on_cpu else engines.gpu_faults(shape)
    beside = auxiliary_slots(recipe, has_critic(recipe.algorithm.name))
    slots = slot_faults(recipe.placement.gpus, layout, engines, beside)
    if recipe.placement.network == "nodes" or not on_cpu:  # else all slots are one machine's in any case
        slots += node_faults(recipe, beside)
    batch = batch_faults(recipe)
    if faults or engine_faults or slots or known is None:
        return faults + engine_faults + slots + batch
    return reshard_faults(recipe, known, layout, engines) + batch


def _train_layout_faults(recipe: Recipe, shape: ModelShape) -> Faults:
    faults = train_layout(recipe).faults(shape)
    if recipe.placement.train_gpus:  # then that is the key which says how many ranks there are
        wheres = {"placement.gpus": "placement.train_gpus"}
        faults = [UserFault(wheres.get(one.where, one.where), one.problem, one.mend) for one in faults]
    return faults


def _shape_that_fits(layout: TrainLayout, engines: EngineLayout) -> ModelShape:
    """A model that every axis divides: without a checkpoint the layouts can still be held against the GPUs."""
    size = FP8_TILE * math.lcm(layout.tp, layout.pp, layout.ep, engines.tp, engines.ep)
    return ModelShape(size, size, size, size, size, size, size, size, size)


def batch_faults(recipe: Recipe) -> Faults:
    """More updates than a step has samples."""
    rollout, updates = recipe.rollout, recipe.train.updates_per_step
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    given = {"rollout.prompts_per_step x samples_per_prompt": samples}
    if learns_from_answers(recipe.algorithm.name):
        given = {"rollout.prompts_per_step": rollout.prompts_per_step}
    if recipe.warm_start.steps:
        given["warm_start.sequences_per_step"] = recipe.warm_start.sequences_per_step
    few = {name: count for name, count in given.items() if count < updates}
    mend = f"set it to at most {min(given.values())}"
    return [UserFault("train.updates_per_step", f"{updates} is more than {n} = {c}", mend) for n, c in few.items()]


def _checkpoint_faults(recipe: Recipe, has_weights: bool = True) -> Faults:
    faults: Faults = []
    shape = _attempt(faults, lambda: model_shape(recipe.model.path))
    if shape is None:
        return faults
    faults += loss_faults(recipe, shape) + reference_faults(recipe, shape)
    if has_weights:
        faults += hf_import.check_hf(recipe.model.path, shape)
    if _attempt(faults, lambda: hf_facts(recipe.model.path)) is None:
        return faults
    longest = recipe.data.max_prompt_tokens + recipe.longest_response
    context = _config(recipe).get("max_position_embeddings", longest + _SPARE_CONTEXT)
    if longest > context - _SPARE_CONTEXT:
        problem = f"with the longest response it makes {longest} tokens, the model's context is {context}"
        mend = f"bring the sum to at most {context - _SPARE_CONTEXT}"
        faults.append(UserFault("data.max_prompt_tokens", problem, mend))
    return faults


def _config(recipe: Recipe) -> dict[str, Any]:
    return json.loads((Path(recipe.model.path) / "config.json").read_text(encoding="utf-8"))


def _sglang_faults(recipe: Recipe) -> Faults:
    faults: Faults = []
    arguments, shape = recipe.rollout.engine.sglang, _attempt([], lambda: model_shape(recipe.model.path))
    faults += _attempt(faults, lambda: sglang_faults(arguments)) or []
    return faults + (latent_cache_faults(arguments) if shape and shape.mla else [])


def _megatron_faults(recipe: Recipe, device: str = DEVICE) -> Faults:
    """Of Megatron's own options, where the recipe sets any: importing Megatron takes seconds."""
    if not (recipe.train.megatron or recipe.train.ddp or recipe.train.optimizer):
        return []
    from megarl.parallel.refusals import megatron_faults

    shape = _attempt([], lambda: model_shape(recipe.model.path))
    return megatron_faults(recipe, shape, train_layout(recipe), device)
