"""Everything that can be known before a process is started, told at once, and the inputs that were read to know it.

A recipe's roles are resolved once, and every command runs the checks that `CHECKS` lists for it over them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from megarl.algos import ALGORITHMS, hyperparameters_of, learns_from_answers
from megarl.checkpoints import hf_import
from megarl.cluster.visible_gpus import device_errors
from megarl.config import Recipe
from megarl.data.inputs import Inputs, read_data
from megarl.data.tokens import TokenCache
from megarl.device import DEVICE
from megarl.disk import output_error
from megarl.episodes.demonstrations import demonstrations
from megarl.model.tokenizer import load_tokenizer
from megarl.parallel.optional_imports import layers_error, transformer_engine_problem
from megarl.placement.roles import Roles, resolve
from megarl.preflight.argument_checks import argument_errors
from megarl.preflight.data_checks import budget_errors, length_errors, sample_file_errors
from megarl.preflight.episode_checks import demonstration_errors, key_errors, read_episode
from megarl.preflight.external_checks import external_errors, server_errors
from megarl.preflight.hyperparameter_checks import (
    eval_errors,
    hyperparameter_errors,
    sampling_errors,
)
from megarl.preflight.layout_checks import (
    batch_errors,
    engine_errors,
    layout_errors,
    node_errors,
    shape_or_stand_in,
    slot_errors,
)
from megarl.preflight.limit_checks import limit_errors, secret_errors
from megarl.preflight.lora_checks import adapter_errors, cpu_errors, lora_errors, sharing_errors
from megarl.preflight.machine_checks import attention_errors, cluster_errors
from megarl.preflight.model_checks import (
    critic_errors,
    eos_errors,
    loss_errors,
    policy_errors,
    reward_model_errors,
    tokenizer_errors,
)
from megarl.preflight.number_checks import number_errors
from megarl.preflight.optimizer_checks import muon_errors
from megarl.preflight.phase_checks import phase_errors
from megarl.preflight.prefix_checks import prefix_errors
from megarl.preflight.reward_checks import reward_errors
from megarl.rollout.sglang.arguments import latent_cache_errors, sglang_errors
from megarl.rollout.sglang.drafts import draft_errors
from megarl.rollout.sglang.expert_maps import place_errors
from megarl.samples.parquet import SampleFile, open_samples
from megarl.tracking.progress import progress_bar
from megarl.types import Prompt, UserError, UserErrors
from megarl.types.listed import ErrorIterator, Errors

Command = Literal[
    "train", "dry run", "plan", "rollout", "train from samples", "convert", "compare layers"
]


@dataclass(frozen=True)
class _Case:
    """A recipe to check, in its roles. device: of the run. absent: keys whose files are not on this machine."""

    command: Command
    roles: Roles
    device: str = DEVICE
    absent: Container[str] = ()

    @property
    def recipe(self) -> Recipe:
        return self.roles.recipe


class _NoTokenizer:
    """In place of a tokenizer that cannot be loaded, so that the data's own errors are told too."""

    chat_template = ""
    eos_token_id = 0

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: object) -> str:
        return ""

    def __call__(self, text: str | Sequence[str], **_: object) -> Mapping[str, Any]:
        return {"input_ids": [0] if isinstance(text, str) else [[0] for _ in text]}


def check(recipe: Recipe) -> Inputs:
    """Read and check everything that a training run needs. Raises UserErrors with every error."""
    return _check_inputs(_Case("train", resolve(recipe)), [])


def check_rollout(recipe: Recipe, out: Path) -> Inputs:
    """The same for sampling into a file without training."""
    error = output_error(out, "--out")
    roles = resolve(recipe, learns=False)
    return _check_inputs(_Case("rollout", roles), [error] if error else [])


def check_samples(recipe: Recipe, path: Path) -> SampleFile:
    """The same for training on the samples of a file, which uses no engine, prompt or reward."""
    roles = resolve(recipe)
    errors = _errors(_Case("train from samples", roles))
    try:
        samples = open_samples(path)
    except UserError as error:
        raise UserErrors([*errors, error]) from None
    if roles.policy.model.known_shape:
        errors += sample_file_errors(samples, roles)
    _refuse(errors)
    return samples


def check_convert(recipe: Recipe) -> None:
    """The same for writing a run's weights as a Hugging Face checkpoint, which uses training ranks alone."""
    _refuse(_errors(_Case("convert", resolve(recipe, learns=False))))


def check_compare_layers(roles: Roles, *, has_engine: bool) -> None:
    """The same for comparing outputs of layers, which reads no data. has_engine: else with training ranks alone.

    External engines are refused, because nothing of megarl runs in them.
    """
    errors = _errors(_Case("compare layers" if has_engine else "convert", roles))
    if has_engine and roles.recipe.rollout.engine.external:
        problem = "the layers of an external engine cannot be recorded"
        errors.append(UserError("rollout.engine.external", problem, "use --against rank"))
    _refuse(errors)


def errors_elsewhere(
    roles: Roles, device: str, absent: Container[str]
) -> tuple[Errors, Sequence[str]]:
    """(every error that can be known on another machine than the run's, notes on its episodes).

    device: of the run. absent: keys that name files which are not here; model.path must be a folder with
    the model's config.json even so. Absent training data counts as one prompt of the longest length.
    """
    case = _Case("dry run", roles, device, absent)
    _, errors, notes = _read(case, TokenCache.of_user(writes=False))
    return _errors(case) + errors, notes


def plan_errors(roles: Roles) -> Errors:
    """Everything that keeps a recipe from being planned, as far as that can be known without its data and a GPU.

    Layouts are checked as on GPUs; the recipe is one of `stand_ins`.
    """
    return _errors(_Case("plan", roles, device="cuda"))


def _check_inputs(case: _Case, errors: Errors) -> Inputs:
    inputs, of_data, _ = _read(case, TokenCache.of_user())
    _refuse(errors + _errors(case) + of_data)
    assert inputs, "training data that cannot be read is a fault"
    return inputs


def _refuse(errors: Errors) -> None:
    if errors:
        raise UserErrors(errors)


def _errors(case: _Case) -> Errors:
    return [error for errors_of in CHECKS[case.command] for error in errors_of(case)]


def _environment(case: _Case) -> ErrorIterator:
    yield from device_errors()
    if case.command != "rollout":
        yield from attention_errors()
    yield from cluster_errors(case.recipe.placement)
    if case.command in ("train", "rollout"):
        yield from server_errors(case.roles)


def _keys(case: _Case) -> ErrorIterator:
    """Errors of values that can be judged without any file but placement.hardware."""
    recipe = case.recipe
    yield from limit_errors(recipe, case.device)
    yield from secret_errors(recipe)
    for name in dict.fromkeys(recipe.run.trackers):  # each is the name of its client's package
        if importlib.util.find_spec(name) is None:
            hint = "pip install 'megarl[trackers]' or leave it out"
            yield UserError("run.trackers", f"{name} is not installed", hint)
    yield from hyperparameter_errors(recipe, learns=case.command != "rollout")
    if case.command in ("train", "dry run"):
        yield from phase_errors(case.roles)
    yield from sampling_errors(recipe)
    yield from eval_errors(recipe)


def _checkpoints(case: _Case) -> Errors:
    return policy_errors(case.roles, has_weights="model.path" not in case.absent)


def _weights(case: _Case) -> Errors:
    """Errors of the policy's layout and checkpoint, for ranks that only load weights."""
    policy = case.roles.policy
    if policy.model.known_shape:
        return policy.layout_errors() + hf_import.check_hf(policy.model.path, policy.shape)
    return [policy.model.error] if policy.model.error else []


def _lora(case: _Case) -> ErrorIterator:
    yield from lora_errors(case.roles)
    yield from sharing_errors(case.roles)
    if case.device == "cpu":
        yield from cpu_errors(case.roles)
    if "lora.path" not in case.absent:
        yield from adapter_errors(case.roles)


def _critic(case: _Case) -> Errors:
    return [] if "critic.path" in case.absent else critic_errors(case.roles)


def _sglang(case: _Case) -> ErrorIterator:
    yield from external_errors(case.roles)
    if case.recipe.rollout.engine.external:
        return
    arguments = case.recipe.rollout.engine.sglang
    shape = case.roles.policy.model.known_shape
    try:
        yield from sglang_errors(arguments)
    except UserError as error:
        yield error
    if shape and shape.mla:
        yield from latent_cache_errors(arguments)
    yield from draft_errors(case.recipe)
    yield from place_errors(case.recipe)


def _megatron(case: _Case) -> Errors:
    """Errors of Megatron's own options, checked where the recipe sets any: importing Megatron takes seconds.

    They are those of the policy's ranks, and of other models the overlaps, which depend on their layouts.
    """
    if not case.recipe.train.passes_options:
        return []
    from megarl.parallel.refusals import megatron_errors

    return megatron_errors(case.roles.policy, case.device) + case.roles.overlap_errors()


def _layers(case: _Case) -> Errors:
    """The error of ranks that have no layers for model.dtype on GPUs.

    Where this machine has no GPU, the run's machines are assumed to have TransformerEngine, as the lock does; with
    train.local_layers they may use either, and nothing is refused.
    """
    train = case.recipe.train
    is_here = DEVICE == "cuda"
    if case.device != "cuda" or (train.local_layers and not is_here):
        return []
    problem = transformer_engine_problem() if is_here else ""
    error = layers_error(
        problem,
        local_layers=train.local_layers,
        dtype=case.recipe.model.dtype,
        share_prefixes=train.share_prefixes,
    )
    return [error] if error else []


def _planned(case: _Case) -> ErrorIterator:
    """Errors of what a plan computes with: lengths, layouts, batches. Of an unknown algorithm nothing more is said."""
    recipe = case.recipe
    roles = case.roles
    if recipe.algorithm.name not in ALGORITHMS:
        return
    yield from key_errors(recipe)
    longest = recipe.data.max_prompt_tokens + recipe.longest_sample
    of_sample = "episode.max_tokens" if recipe.episode else "rollout.max_response_tokens"
    for role in roles.models.values():
        yield from budget_errors(role, longest, f"data.max_prompt_tokens and {of_sample} together")
        yield from [role.model.error] if role.model.error else role.layout_errors()
    yield from roles.overlap_errors()
    shape = roles.policy.model.known_shape
    if shape:
        yield from engine_errors(roles, shape, case.device)
        yield from slot_errors(roles)
        yield from node_errors(roles)
        yield from batch_errors(recipe)
        yield from loss_errors(recipe, shape)


def _only_sampling(case: _Case) -> ErrorIterator:
    recipe = case.recipe
    reason = "samples are made with the weights of model.path"
    yield from _unused(recipe, reason)
    if recipe.lora and recipe.lora.path:
        yield UserError(
            "lora.path",
            f"{recipe.lora.path}, but {reason}",
            "leave it out, and sample with the merged model, which megarl convert writes",
        )


def _only_training(case: _Case) -> ErrorIterator:
    yield from _unused(case.recipe, "a file's samples are trained on as they are")
    name = case.recipe.algorithm.name
    if learns_from_answers(name):
        yield UserError(
            "algorithm.name",
            f"{name} learns from the data's answers, not from samples",
            "leave --from-samples out, or name another",
        )


def _unused(recipe: Recipe, reason: str) -> ErrorIterator:
    """Keys that ask for what a command leaves out which samples alone or trains alone."""
    name = recipe.algorithm.name
    draws_again = name in ALGORITHMS and hyperparameters_of(name, recipe.algorithm).dynamic_sampling
    for key, value, unset in (
        ("warm_start.steps", recipe.warm_start.steps, "0"),
        ("checkpoint.every", recipe.checkpoint.every, "null"),
        ("rollout.phase_tokens", recipe.rollout.phase_tokens, "null"),
        ("rollout.ahead", recipe.rollout.ahead, "0"),
        ("algorithm.dynamic_sampling", draws_again, "false"),
    ):
        if value:
            yield UserError(key, f"{value}, but {reason}", f"set it to {unset}")


# The checks of each command, in the order in which their errors are told. Those of the data follow (`_read`).
_BOTH_SIDES = (
    _keys,
    lambda case: layout_errors(case.roles, case.device),
    _checkpoints,
    _sglang,
    _megatron,
    _lora,
    lambda case: muon_errors(case.recipe),
    lambda case: prefix_errors(case.roles),
    lambda case: number_errors(case.roles),
)
CHECKS: Mapping[Command, tuple[Callable[[_Case], Iterable[UserError]], ...]] = {
    "train": (_environment, _layers, *_BOTH_SIDES),
    "dry run": (
        _layers,
        *_BOTH_SIDES,
        lambda case: argument_errors(case.roles, case.device, case.absent),
    ),
    "plan": (
        lambda case: hyperparameter_errors(case.recipe),
        lambda case: sampling_errors(case.recipe),
        lambda case: phase_errors(case.roles),
        lambda case: lora_errors(case.roles),
        lambda case: muon_errors(case.recipe),
        lambda case: prefix_errors(case.roles),
        lambda case: number_errors(case.roles),
        lambda case: external_errors(case.roles),
        _planned,
    ),
    "rollout": (_only_sampling, _environment, *_BOTH_SIDES),
    "train from samples": (
        _environment,
        _layers,
        _keys,
        lambda case: case.roles.policy.layout_errors(shape_or_stand_in(case.roles)),
        _checkpoints,
        _megatron,
        _lora,
        lambda case: muon_errors(case.recipe),
        lambda case: prefix_errors(case.roles),
        lambda case: number_errors(case.roles),
        _critic,
        _only_training,
    ),
    "convert": (_weights, _layers, _megatron, _lora, _environment),
    "compare layers": (_environment, _layers, *_BOTH_SIDES),
}


def _read(case: _Case, cache: TokenCache | None) -> tuple[Inputs | None, Errors, Sequence[str]]:
    """The inputs, None where the training data could not be read, the errors of all data and what it meets, and the
    notes on episodes.

    What it meets is the tokenizer, the lengths, the rewards, the critic and the reward model.
    """
    recipe = case.recipe
    roles = case.roles
    absent = case.absent
    tokenizer, errors = _tokenizer(case)
    is_known = not errors and not isinstance(tokenizer, _NoTokenizer)
    episode = read_episode(recipe, tokenizer if is_known else None, prepares=case.device == DEVICE)
    errors += episode.errors
    shape = roles.policy.model.known_shape
    vocab_size = shape.vocab_size if shape else None
    data = read_data(
        recipe,
        tokenizer,
        vocab_size=vocab_size,
        absent=absent,
        tools=episode.tools,
        cache=cache,
        bar=progress_bar,
    )
    errors += data.errors
    is_whole = all(where in data.train or where in absent for where in recipe.data.train_files)
    # what is wrong with a file says nothing about the others' rows
    train = data.train_prompts if is_whole else []
    eval_sets = {
        name: file.prompts[: recipe.evaluation.of(name).max_prompts]
        for name, file in data.eval_sets.items()
    }
    if is_whole:
        prompts = list(train)
        if len(data.train) < len(recipe.data.train):  # a file that is not here
            prompts.append(Prompt("", "", (0,) * recipe.data.max_prompt_tokens, ""))
        learns = case.command != "rollout"
        errors += length_errors(roles, tokenizer, prompts, cache, vocab_size, learns=learns)
    errors += demonstration_errors(recipe, episode, train)
    scored = [*train, *chain.from_iterable(eval_sets.values())]
    errors += reward_errors(recipe, scored, has_own=episode.has_reward)
    errors += _critic(case)
    if "reward_model.path" not in absent and "reward_model.adapters" not in absent:
        errors += reward_model_errors(roles, train)
    if not train:
        return None, errors, episode.notes
    inputs = Inputs(
        prompts=data.stream(recipe),
        eval_sets=eval_sets,
        demonstrate=demonstrations(tokenizer, episode.turn_tokenizer, recipe.data.messages),
        notes=[*episode.notes, *data.notes],
        metrics=data.metrics,
    )
    return inputs, errors, episode.notes


def _tokenizer(case: _Case) -> tuple[Any, Errors]:
    """The policy's tokenizer, or a stand-in where it cannot be loaded; a folder that is not there is told elsewhere."""
    path = case.recipe.model.path
    shape = case.roles.policy.model.known_shape
    if "model.path" in case.absent or not Path(path).is_dir():
        return _NoTokenizer(), []
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        return _NoTokenizer(), [error]
    if shape is None:
        return tokenizer, []
    return tokenizer, tokenizer_errors(tokenizer, shape) or eos_errors(case.recipe, tokenizer)
