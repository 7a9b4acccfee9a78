"""What keeps the models of a recipe from being trained as it says, known from their folders alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.algos import ALGORITHMS, has_critic, has_reference
from megarl.checkpoints import hf_import
from megarl.config import Recipe
from megarl.parallel.hf_config import auxiliary_shape, hf_facts, model_shape, scorer_shape
from megarl.parallel.placement import critic_recipe, reward_recipe, train_layout
from megarl.rollout.prompts import OWN_TOKENIZER, chat_text, load_tokenizer, token_outside_vocabulary
from megarl.rollout.template_check import template_fault
from megarl.types import ModelShape, Prompt, UserFault

Faults = list[UserFault]


def tokenizer_faults(tokenizer: Any, shape: ModelShape) -> Faults:
    """Special tokens that the model's embedding does not have: an answer ends in one, a chat template writes others."""
    if beyond := token_outside_vocabulary(tokenizer, tokenizer.all_special_ids, shape.vocab_size):
        return [UserFault("model.path", f"its tokenizer has the special {beyond}", OWN_TOKENIZER)]
    return []


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
    return hf_import.check_hf(path, shape)


def critic_faults(recipe: Recipe) -> Faults:
    """Of the critic's checkpoint and ranks, where the algorithm has one."""
    if not has_critic(recipe.algorithm.name):
        return []
    own, says = critic_recipe(recipe), ALGORITHMS[recipe.algorithm.name].critic
    is_policys = own.model.path == recipe.model.path
    faults = _faults_beside(own, "critic", says, is_known=is_policys)
    if faults or is_policys:
        return faults
    try:
        vocab_size = model_shape(recipe.model.path).vocab_size
    except UserFault:
        return []  # told of the policy
    if (known := auxiliary_shape(own.model.path, says).vocab_size) < vocab_size:
        problem = f"{own.model.path} has a vocabulary of {known}, the policy of"
        faults.append(UserFault("critic.path", f"{problem} {vocab_size}", "use a model with the policy's tokenizer"))
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    if hf_facts(own.model.path).max_positions < longest:
        problem = f"its context is {hf_facts(own.model.path).max_positions}, prompt and response may be {longest}"
        faults.append(UserFault("critic.path", problem, "use a model with the policy's context"))
    return faults


def reward_model_faults(recipe: Recipe, prompts: Sequence[Prompt]) -> Faults:
    """Of the reward model's checkpoint, ranks and tokenizer, where there is one; prompts: those to train on."""
    path = recipe.reward_model.path
    if path is None:
        return []
    faults = _faults_beside(reward_recipe(recipe), "reward_model", "values", is_known=False)
    if faults:
        return faults
    if hf_import.without_head(path):
        problem = f"{path} has no score.weight: it is a language model"
        return [UserFault("reward_model.path", problem, "name a sequence classifier with one score")]
    try:
        tokenizer = load_tokenizer(path)
    except UserFault as fault:
        return [UserFault("reward_model.path", fault.problem, fault.mend)]
    if beyond := token_outside_vocabulary(tokenizer, tokenizer.get_vocab().values(), scorer_shape(path).vocab_size):
        mend = OWN_TOKENIZER.replace("model.path", "reward_model.path")
        return [UserFault("reward_model.path", f"it reads any text, and its tokenizer has {beyond}", mend)]
    unbounded = template_fault(tokenizer, [(prompt.id, prompt.messages) for prompt in prompts], response="")
    if unbounded:
        return [renamed(unbounded, "reward_model")]
    for prompt in prompts:
        try:
            chat_text(tokenizer, prompt.messages, "")
        except Exception as error:  # a template raises whatever its author wrote
            mend = "mend the messages or the template"
            return [UserFault("reward_model.path", f"{prompt.id}: its tokenizer refuses the prompt: {error}", mend)]
    return []


def _faults_beside(own: Recipe, branch: str, says: str, is_known: bool) -> Faults:
    """own: the recipe of its ranks. is_known: what is wrong with its checkpoint is told elsewhere."""
    path = own.model.path
    try:
        shape = auxiliary_shape(path, says)
        hf_facts(path)
    except UserFault as fault:
        return [] if is_known else [renamed(fault, branch)]
    faults = [] if is_known else hf_import.check_hf(path, shape)
    return [renamed(fault, branch) for fault in faults + train_layout(own).faults(shape)]


def renamed(fault: UserFault, branch: str) -> UserFault:
    """A fault of the policy's keys as one of those that stand for them."""
    words = {
        "placement.gpus": f"{branch}.ranks.gpus",
        "train.": f"{branch}.ranks.",
        "model.path": f"{branch}.path",
    }

    def own(text: str) -> str:
        for policy, ours in words.items():
            text = text.replace(policy, ours)
        return text

    return UserFault(own(fault.where), own(fault.problem), own(fault.mend))
