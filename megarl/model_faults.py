"""What keeps the models of a recipe from being trained as it says, known from their folders alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl import checkpoint
from megarl.algos import has_critic, has_reference
from megarl.config import Recipe
from megarl.parallel.hf_config import hf_facts, model_shape, scorer_shape
from megarl.parallel.placement import critic_recipe, reward_recipe, train_layout
from megarl.rollout.prompts import conversation, load_tokenizer
from megarl.types import ModelShape, UserFault

Faults = list[UserFault]


def loss_faults(recipe: Recipe, shape: ModelShape) -> Faults:
    """Keys of `train` that speak of parts which the model does not have."""
    train, faults = recipe.train, []
    of_experts = {"aux_loss": train.aux_loss, "z_loss": train.z_loss, "replay": train.replay != "off"}
    for key in [key for key, is_set in of_experts.items() if is_set and not shape.num_experts]:
        problem, mend = "the model has no experts", f"leave train.{key} out"
        faults.append(UserFault(f"train.{key}", problem, mend))
    if train.router_bias_rate and not shape.router_bias:
        problem, mend = "the model's routers have no biases", "set it to 0, or use train.aux_loss"
        faults.append(UserFault("train.router_bias_rate", problem, mend))
    if train.mtp_loss and not shape.num_mtp_layers:
        problem = "the checkpoint has no multi-token prediction layers"
        faults.append(UserFault("train.mtp_loss", problem, "set it to 0"))
    return faults


def reference_faults(recipe: Recipe, shape: ModelShape) -> Faults:
    """Its weights take the places of the policy's."""
    path = recipe.reference.path
    if path is None or not has_reference(recipe.algorithm, recipe.reference.use):
        return []
    try:
        other = model_shape(path)
    except UserFault as fault:
        return [fault]
    if other != shape:
        problem, mend = f"{path} is another model than model.path", "name a checkpoint of the same architecture"
        return [UserFault("reference.path", problem, mend)]
    return checkpoint.check_hf(path, shape)


def critic_faults(recipe: Recipe) -> Faults:
    """Of the critic's checkpoint and ranks, where the algorithm has one."""
    if not has_critic(recipe.algorithm.name):
        return []
    own = critic_recipe(recipe)
    return _scorer_faults(own, "critic", is_new=own.model.path == recipe.model.path)


def reward_model_faults(recipe: Recipe, row: Mapping[str, Any] | None) -> Faults:
    """Of the reward model's checkpoint, ranks and tokenizer, where there is one; row: one of the training data."""
    path = recipe.reward_model.path
    if path is None:
        return []
    faults = _scorer_faults(reward_recipe(recipe), "reward_model", is_new=False)
    if faults:
        return faults
    if checkpoint.without_head(path):
        problem = f"{path} has no score.weight: it is a language model"
        return [UserFault("reward_model.path", problem, "name a sequence classifier with one score")]
    try:
        tokenizer = load_tokenizer(path)
    except UserFault as fault:
        return [UserFault("reward_model.path", fault.problem, fault.mend)]
    if row is None:
        return []
    try:
        conversation(tokenizer, row[recipe.data.prompt], "")
    except Exception as error:  # a template raises whatever its author wrote
        mend = "mend the messages or the template"
        return [UserFault("reward_model.path", f"its chat template refuses the first prompt: {error}", mend)]
    return []


def _scorer_faults(own: Recipe, branch: str, is_new: bool) -> Faults:
    """own: the recipe of the scorer's ranks. is_new: what is wrong with its checkpoint is told elsewhere."""
    path = own.model.path
    try:
        shape = scorer_shape(path)
        hf_facts(path)
    except UserFault as fault:
        return [] if is_new else [fault]
    faults = [] if is_new else checkpoint.check_hf(path, shape)
    return faults + [_renamed(fault, branch) for fault in train_layout(own).faults(shape)]


def _renamed(fault: UserFault, branch: str) -> UserFault:
    """A fault of the policy's keys as one of those that stand for them."""
    words = {"placement.gpus": f"{branch}.ranks.gpus", "train.": f"{branch}.ranks."}

    def own(text: str) -> str:
        for policy, ours in words.items():
            text = text.replace(policy, ours)
        return text

    return UserFault(own(fault.where), own(fault.problem), own(fault.mend))
