"""Errors of the checkpoints and tokenizers of all models; stand-ins for checkpoints that are not on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.algos import learns_from_answers
from megarl.checkpoints import hf_import, peft
from megarl.config import Recipe
from megarl.data.template_limits import template_error
from megarl.model.families import family_of
from megarl.model.hf_config import end_token_ids
from megarl.model.shape import ModelShape
from megarl.model.tokenizer import (
    OWN_TOKENIZER,
    chat_text,
    load_tokenizer,
    token_outside_vocabulary,
)
from megarl.placement.roles import Role, Roles
from megarl.types import Prompt, UserError
from megarl.types.listed import ErrorIterator, Errors, listed

# positions that SGLang keeps free, and as many as a step verifies: it cuts a longer response short
_SPARE_CONTEXT = 2
_SPARE_AFTER_INPUT = 6  # positions that SGLang keeps free after the tokens of a request


def stand_ins(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """The recipe with stand-ins for what is not on this machine, and the absent files in words, by recipe key.

    The folder model.config stands in for the policy's checkpoint, and the policy's for the other models' checkpoints.
    """
    absent = {}
    changes: dict[str, Any] = {}
    model = recipe.model
    if model.config and not _has_config(model.path):
        absent["model.path"] = (
            f"{model.path}: weights and tokenizer (its shape is from {model.config})"
        )
        model = model.model_copy(update={"path": model.config})
    for key, file in recipe.data.files.items():
        if not Path(file.path).is_file():
            absent[key] = f"{file.path}: the data"
    if recipe.lora and recipe.lora.path and not Path(recipe.lora.path).is_dir():
        absent["lora.path"] = f"{recipe.lora.path}: adapters"
    if (adapters := recipe.reward_model.adapters) and not Path(adapters).is_dir():
        absent["reward_model.adapters"] = f"{adapters}: adapters of the reward model"
    for name in ("critic", "reward_model", "reference"):
        branch = getattr(recipe, name)
        if branch.path and not _has_config(branch.path):
            absent[f"{name}.path"] = f"{branch.path}: another model's folder"
            # without a path there is no reward model
            path = model.path if name == "reward_model" else None
            changes[name] = branch.model_copy(update={"path": path})
    return recipe.model_copy(update=changes | {"model": model}), absent


def _has_config(path: str) -> bool:
    return (Path(path) / "config.json").is_file()


@listed
def tokenizer_errors(tokenizer: Any, shape: ModelShape) -> ErrorIterator:
    """Special tokens that the model's embedding does not have: an answer ends in one, a chat template writes others."""
    if beyond := token_outside_vocabulary(tokenizer, tokenizer.all_special_ids, shape.vocab_size):
        yield UserError("model.path", f"its tokenizer has the special {beyond}", OWN_TOKENIZER)


@listed
def eos_errors(recipe: Recipe, tokenizer: Any) -> ErrorIterator:
    """No token at which the engine ends a response, or another token than the answers are taught to end with."""
    try:
        ends = end_token_ids(recipe.model.path, recipe.model.family)
    except UserError as error:
        yield error
        return
    eos_id = tokenizer.eos_token_id
    teaches = recipe.warm_start.steps or learns_from_answers(recipe.algorithm.name)
    if teaches and eos_id is None:
        yield UserError(
            "model.path",
            "the tokenizer has no end-of-sequence token to teach",
            "give it an eos_token, or learn from rewards alone",
        )
        return
    where = f"{recipe.model.path}/generation_config.json"
    if not ends:
        if eos_id is not None:
            example = f"{eos_id}, the tokenizer's"
        else:
            example = "the number of the token that ends a response"
        yield UserError(
            where,
            "neither it nor config.json has an eos_token_id: no response would end before its longest",
            f"write eos_token_id there: {example}",
        )
    elif teaches and eos_id not in ends:
        known = ", ".join(map(str, sorted(ends)))
        yield UserError(
            where,
            f"answers are taught to end with the tokenizer's token {eos_id}, and engines end responses at {known}",
            f"add {eos_id} to its eos_token_id",
        )


@listed
def loss_errors(recipe: Recipe, shape: ModelShape) -> ErrorIterator:
    """Keys of `train` for parts that the model does not have."""
    train = recipe.train
    of_experts = {
        "aux_loss": train.aux_loss,
        "z_loss": train.z_loss,
        "replay": train.replay != "off",
    }
    for key, is_set in of_experts.items():
        if is_set and not shape.num_experts:
            yield UserError(f"train.{key}", "the model has no experts", f"leave train.{key} out")
    if train.replay == "r3" and "chosen_experts" in family_of(shape).engine_lacks:
        yield UserError(
            "train.replay",
            f"SGLang's class {family_of(shape).architecture} does not record which experts a token went to",
            "set it to r2 or off",
        )
    if train.router_bias_rate and not shape.router_bias:
        yield UserError(
            "train.router_bias_rate",
            "the model's routers have no biases",
            "set it to 0, or use train.aux_loss",
        )
    if train.mtp_loss and not shape.num_mtp_layers:
        key = family_of(shape).mtp.key
        yield UserError(
            "train.mtp_loss",
            f"by its config.json the checkpoint has no multi-token prediction layer ({key})",
            f"set it to 0, or write {key} 1 there if the files have that layer",
        )


@listed
def policy_errors(roles: Roles, *, has_weights: bool = True) -> ErrorIterator:
    """Errors of the policy's checkpoint and the reference's. has_weights: False where only config.json is here."""
    model = roles.policy.model
    if model.known_shape:
        yield from loss_errors(roles.recipe, model.known_shape)
        yield from _reference_errors(roles, model.known_shape)
        if has_weights:
            yield from hf_import.check_hf(model.path, model.known_shape)
    if model.error:
        yield model.error
    if model.facts and "other_dtype" in family_of(model.shape).engine_lacks:
        yield from _type_errors(roles.recipe, model.facts.dtype)
    if model.known_shape:
        yield from _context_errors(roles)


def _type_errors(recipe: Recipe, of_file: str) -> ErrorIterator:
    """SGLang makes a norm of linear attention in the type of config.json, whatever the engine's is."""
    if recipe.model.dtype != of_file:
        problem = f"{recipe.model.dtype}, but SGLang makes norms of linear attention as config.json says: {of_file}"
        hint = f"set it to {of_file}, or change torch_dtype in {recipe.model.path}/config.json"
        yield UserError("model.dtype", problem, hint)


def _context_errors(roles: Roles) -> ErrorIterator:
    """Prompts and responses that are longer together than the model's context."""
    context = roles.policy.model.context_tokens
    longest = roles.recipe.longest_sequence
    spare = max(_SPARE_CONTEXT, 1 + roles.recipe.rollout.engine.draft)
    if roles.recipe.rollout.phase_tokens or roles.recipe.episode:
        spare = max(spare, _SPARE_AFTER_INPUT)  # a request holds what was said so far
    if context is not None and longest > context - spare:
        yield UserError(
            "data.max_prompt_tokens",
            f"with the longest response it makes {longest} tokens, the model's context is {context}",
            f"bring the sum to at most {context - spare}",
        )


def _reference_errors(roles: Roles, shape: ModelShape) -> ErrorIterator:
    """A reference checkpoint of another architecture: its weights take the policy's places in memory."""
    reference = roles.reference
    if reference is None:
        return
    if reference.known_shape is None:
        assert reference.error
        yield UserError(
            reference.error.where.replace("model.path", "reference.path"),
            reference.error.problem,
            reference.error.hint,
        )
    elif reference.known_shape != shape:
        yield UserError(
            "reference.path",
            f"{reference.path} is another model than model.path",
            "name a checkpoint of the same architecture",
        )
    else:
        yield from hf_import.check_hf(reference.path, shape)


@listed
def critic_errors(roles: Roles) -> ErrorIterator:
    """Errors of the critic's checkpoint and ranks; none without a critic."""
    critic = roles.critic
    policy = roles.policy.model
    recipe = roles.recipe
    if critic is None:
        return
    path = critic.model.path
    is_policys = path == policy.path
    errors = _auxiliary_errors(critic, is_known=is_policys)
    yield from errors
    if errors or is_policys or policy.known_shape is None or critic.model.facts is None:
        return
    if (vocab_size := critic.shape.vocab_size) < policy.shape.vocab_size:
        yield UserError(
            "critic.path",
            f"{path} has a vocabulary of {vocab_size}, the policy of {policy.shape.vocab_size}",
            "use a model with the policy's tokenizer",
        )
    longest = recipe.data.max_prompt_tokens + recipe.longest_sample
    if critic.model.facts.max_positions < longest:
        yield UserError(
            "critic.path",
            f"its context is {critic.model.facts.max_positions}, prompt and response may be {longest}",
            "use a model with the policy's context",
        )


def reward_model_errors(roles: Roles, prompts: Sequence[Prompt]) -> Errors:
    """Errors of the reward model's checkpoint, ranks and tokenizer. prompts: the training prompts."""
    role = roles.reward_model
    if role is None:
        return []
    adapters = roles.recipe.reward_model.adapters
    if errors := _auxiliary_errors(role, is_known=adapters is not None):
        return errors
    if adapters:
        errors = _reward_adapter_errors(adapters, role)
        return errors or _scoring_errors("reward_model.adapters", role, prompts)
    if hf_import.without_head(role.model.path):
        problem = f"{role.model.path} has no score.weight: it is a language model"
        hint = "name a sequence classifier with one score"
        return [UserError("reward_model.path", problem, hint)]
    return _scoring_errors("reward_model.path", role, prompts)


@listed
def _scoring_errors(where: str, role: Role, prompts: Sequence[Prompt]) -> ErrorIterator:
    """Errors of the tokenizer and the template with which a reward model reads prompts and responses."""
    try:
        tokenizer = load_tokenizer(role.model.path)
    except UserError as error:
        yield UserError(where, error.problem, error.hint)
        return
    if beyond := token_outside_vocabulary(
        tokenizer, tokenizer.get_vocab().values(), role.shape.vocab_size
    ):
        yield UserError(
            where,
            f"it reads any text, and its tokenizer has {beyond}",
            OWN_TOKENIZER.replace("model.path", where),
        )
        return
    unbounded = template_error(
        tokenizer, [(prompt.id, prompt.messages) for prompt in prompts], response=""
    )
    if unbounded:
        yield UserError(where, unbounded.problem, unbounded.hint)
        return
    for prompt in prompts:
        try:
            chat_text(tokenizer, prompt.messages, "")
        except Exception as raised:  # a template raises whatever its author wrote
            yield UserError(
                where,
                f"{prompt.id}: its tokenizer refuses the prompt: {raised}",
                "mend the messages or the template",
            )
            return


def _reward_adapter_errors(folder: str, role: Role) -> Errors:
    """Errors of a reward model's adapters and head; its tokenizer is the policy's."""
    if not role.lora or role.model.known_shape is None:
        return []
    hint = "name a folder that PEFT has written of a sequence classifier on the policy's model"
    return [
        UserError("reward_model.adapters", error.problem, hint)
        for error in peft.check(folder, role.shape, role.lora)
    ]


def _auxiliary_errors(role: Role, *, is_known: bool) -> Errors:
    """Errors of an auxiliary model's checkpoint and layout.

    is_known: the policy has the same checkpoint, whose errors are reported there.
    """
    if role.model.error and is_known:
        return []
    if role.model.error:
        return [role.renamed(role.model.error)]
    if is_known:
        return role.layout_errors()
    errors = hf_import.check_hf(role.model.path, role.shape)
    return [role.renamed(error) for error in errors] + role.layout_errors()
