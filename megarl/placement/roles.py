"""The models and engines of a run, resolved once from its recipe: whose checkpoint, which layout, which GPU slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from megarl.algos import ALGORITHMS, AUXILIARY_MODELS, has_critic, has_reference
from megarl.model.adapter_config import adapter_keys
from megarl.model.hf_config import HfModel, read_model
from megarl.model.lora_pairs import LoraSize
from megarl.model.precision import Format, Precision
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.flex_dispatcher import flex_errors
from megarl.placement.overlaps import overlap_errors, without_unused
from megarl.placement.recomputation import without_lacking
from megarl.placement.train_layout import TrainLayout, fewest_ranks
from megarl.types import UserError

Phase = Literal["rollout", "score", "critic", "train", "reshard"]


if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.models import LoraConfig, RanksConfig

RoleName = Literal["policy", "critic", "reward_model"]


def train_layout(recipe: Recipe) -> TrainLayout:
    """The training ranks; rank r is on slot r."""
    train = recipe.train
    placement = recipe.placement
    cp = train.cp
    max_cp = 1
    if cp == "auto":
        cp = 1
        # each rank has two chunks of the same length
        room = max(2, train.tokens_per_micro_batch // 2 * 2)
        max_cp = fewest_ranks(recipe.data.max_prompt_tokens + recipe.longest_sample, room)
    return TrainLayout(
        placement.train_gpus or placement.gpus,
        train.tp,
        train.pp,
        train.ep,
        cp=cp,
        max_cp=max_cp,
        vpp=train.vpp,
        expert_tp=train.etp or 0,
        stage_layers=train.layers_per_stage,
    )


def lora_size(lora: LoraConfig | None, shape: ModelShape | None) -> LoraSize | None:
    """The adapters of a model of this shape; None where its weights themselves are trained.

    shape: None where config.json cannot be read, which other checks report.
    """
    if lora is None:
        return None
    return LoraSize(
        lora.rank, _expert_rank(lora, shape), lora.alpha, lora.targets, lora.rounding, lora.sync
    )


def _expert_rank(lora: LoraConfig, shape: ModelShape | None) -> int:
    """The rank of the adapters in each routed expert.

    By default the rank of other layers over the number of experts that a token is sent to, so that a token meets as
    large a share of adapters among weights in experts as elsewhere ("LoRA Without Regret", Thinking Machines 2025).
    """
    if lora.experts is not None:
        return lora.experts
    return max(1, lora.rank // max(1, shape.experts_per_token if shape else 0))


def trains_merged(recipe: Recipe) -> bool:
    """Whether the policy's weights are the sums with its adapters, rounded, that engines get.

    In float32 rounding loses nothing that matters, and the sums are made as they are sent.
    """
    return (
        recipe.lora is not None and recipe.lora.sync == "merged" and recipe.model.dtype != "float32"
    )


def sent_lora(recipe: Recipe, shape: ModelShape) -> LoraSize | None:
    """The adapters that training ranks merge or send; None also where they are in the weights already."""
    if trains_merged(recipe):
        return None
    return lora_size(recipe.lora, shape)


def reference_copy(recipe: Recipe) -> str | None:
    """The checkpoint of whose weights the policy's ranks keep a copy, for KL terms; None: they need none.

    With adapters the frozen weights are the reference, and need no copy.
    """
    if not has_reference(recipe.algorithm, recipe.reference.use):
        return None
    path = recipe.reference.path or recipe.model.path
    if recipe.lora and path == recipe.model.path:
        return None
    return path


def is_reporting_rank(layout: TrainLayout, rank: int) -> bool:
    """Whether this rank reports for all ranks with the same samples: the first of the last pipeline stage."""
    at = layout.coords(rank)
    return (at.tp, at.cp, at.pp) == (0, 0, layout.pp - 1)


def engine_precision(recipe: Recipe) -> Precision:
    """The formats of the engines' weights: the contract that both sides of a reshard read."""
    return precision_of(recipe, recipe.rollout.engine.weights)


def precision_of(recipe: Recipe, weights: Format) -> Precision:
    """The same with other formats of the weights that do not stay plain, as an exported checkpoint may have them."""
    precision = recipe.precision
    scales = precision.scales or ("powers_of_two" if recipe.train.numbers == "engine" else "exact")
    return Precision(weights, precision.plain_last_layers, precision.plain, scales)


def engine_layout(recipe: Recipe) -> EngineLayout:
    """The engines of the run, from slot `first` on; none where others have started them."""
    engine = recipe.rollout.engine
    whole_dense = engine.dense == "whole" or (engine.dense is None and engine.dp > 1)
    deepep = engine.experts == "deepep"
    precision = engine_precision(recipe)
    return EngineLayout(
        0 if engine.external else engine.count,
        engine.tp,
        engine.ep,
        engine.dp,
        precision,
        recipe.placement.first_engine_gpu,
        whole_dense=whole_dense,
        # Whole ones are more work where tokens are gathered, but in fp8 others would cut tiles.
        whole_shared=deepep or (whole_dense and precision.quantises("shared_experts")),
        group_head=engine.head == "group" or (engine.head is None and engine.dp > 1),
        deepep=deepep,
        draft=engine.draft,
    )


def shared_slots(sides: Iterable[range]) -> frozenset[int]:
    """The slots that are in several of the ranges: their processes take turns with the memory."""
    seen: set[int] = set()
    shared: set[int] = set()
    for side in sides:
        shared |= seen & set(side)
        seen |= set(side)
    return frozenset(shared)


@dataclass(frozen=True)
class Role:
    """One model and its training ranks, which sit on the slots from `first_slot` on.

    recipe: as these ranks read it, with their checkpoint and parallel sizes in the policy's keys. has_scores: the model
    has one score per token, not logits.
    """

    name: RoleName
    recipe: Recipe
    layout: TrainLayout
    first_slot: int
    has_scores: bool
    model: HfModel

    @property
    def shape(self) -> ModelShape:
        """Raises UserError where the checkpoint's config.json could not be read."""
        return self.model.shape

    @property
    def lora(self) -> LoraSize | None:
        """The adapters that are trained in place of the weights."""
        return lora_size(self.recipe.lora, self.model.known_shape)

    @property
    def shares_weights(self) -> bool:
        """Whether it computes with the policy's frozen weights, beside adapters and a head of its own."""
        return self.name != "policy" and self.recipe.lora is not None

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.layout.world_size)

    @property
    def branch(self) -> str:
        """The branch of the recipe with the parallel sizes and the micro-batches of these ranks."""
        if self.name == "policy":
            return "train"
        return f"{self.name}.ranks"

    @property
    def trains(self) -> bool:
        return self.name != "reward_model"

    def renamed(self, error: UserError) -> UserError:
        """An error of the policy's keys with the keys that this role has instead."""
        if self.name == "policy":
            of_its_own = error.where == "placement.gpus" and self.recipe.placement.train_gpus
            if of_its_own:
                return UserError("placement.train_gpus", error.problem, error.hint)
            return error
        texts = [error.where, error.problem, error.hint]
        keys = {
            "placement.gpus": f"{self.branch}.gpus",
            "train.": f"{self.branch}.",
            "model.path": f"{self.name}.path",
        }
        for policy_key, own_key in keys.items():
            texts = [text.replace(policy_key, own_key) for text in texts]
        return UserError(*texts)

    def overlap_errors(self) -> list[UserError]:
        """The overlaps of exchanges and products, and the exchanges by DeepEP, that its ranks may not have."""
        dtype = self.recipe.model.dtype
        shape = self.model.known_shape
        train = self.recipe.train
        gpus_per_node = self.recipe.placement.gpus_per_node
        return [
            *overlap_errors(train, shape, self.layout, dtype, self.branch),
            *flex_errors(train, shape, self.layout, self.slots, gpus_per_node, self.branch),
        ]

    def layout_errors(self, shape: ModelShape | None = None) -> list[UserError]:
        """What the layout does not divide, by this role's keys; shape: in place of that of a checkpoint not here."""
        errors = [self.renamed(error) for error in self.layout.errors(shape or self.shape)]
        if self.name == "reward_model" and self.recipe.train.cp == "auto":
            problem = "auto, but each rank of a reward model scores samples of its own"
            hint = "set it to 1, and reward_model.ranks.tokens_per_micro_batch to the longest chat"
            errors.append(UserError("reward_model.ranks.cp", problem, hint))
        return errors


@dataclass(frozen=True)
class Roles:
    """Every model and the engines of a recipe. reference: where the policy is compared with a checkpoint of its own."""

    recipe: Recipe
    policy: Role
    critic: Role | None
    reward_model: Role | None
    reference: HfModel | None
    engines: EngineLayout

    @property
    def models(self) -> dict[RoleName, Role]:
        """The models with ranks by name, the policy first."""
        return {role.name: role for role in (self.policy, self.critic, self.reward_model) if role}

    def overlap_errors(self) -> list[UserError]:
        """Those of all models; several may have the same."""
        return [error for role in self.models.values() for error in role.overlap_errors()]

    @property
    def most_engines(self) -> EngineLayout:
        """With those that may be asked for while the run goes on."""
        most = self.recipe.rollout.engine.max_count or self.engines.count
        return replace(self.engines, count=most)

    @property
    def engine_slots(self) -> range:
        return range(self.engines.first, self.engines.end)

    @property
    def shared_slots(self) -> frozenset[int]:
        """The slots on which several models or engines sit, and take turns with the memory."""
        return shared_slots([self.engine_slots, *(role.slots for role in self.models.values())])

    @property
    def unshared_engines(self) -> list[int]:
        """The engines that share no GPU with other models, and can sample while the ranks learn."""
        return self.engines.engines_without(self.shared_slots)

    @property
    def num_training_slots(self) -> int:
        """Slots of a run without engines: those of the policy's and of the critic's ranks."""
        return max(role.slots.stop for role in (self.policy, self.critic) if role)

    @property
    def num_members(self) -> int:
        """Slots that take part in a reshard: those of the policy's ranks and of the engines."""
        return max(self.policy.layout.world_size, self.engines.end)


def resolve(recipe: Recipe, *, learns: bool = True) -> Roles:
    """The roles of a recipe. A checkpoint that cannot be read is in `Role.model.error`, and nothing is raised.

    learns: without training there is no critic, and the policy's ranks keep no reference.
    """
    critic = reward_model = reference = None
    if learns and has_critic(recipe.algorithm.name):
        critic = _critic(recipe)
    if recipe.reward_model.path or recipe.reward_model.adapters:
        reward_model = _reward_model(recipe)
    if recipe.reference.path and has_reference(recipe.algorithm, recipe.reference.use):
        reference = read_model(recipe.reference.path, recipe.model.family)
    policy = _role("policy", recipe if learns else _only_loading(recipe), 0, has_scores=False)
    return Roles(recipe, policy, critic, reward_model, reference, engine_layout(recipe))


def _only_loading(recipe: Recipe) -> Recipe:
    """The recipe of ranks that get a checkpoint's weights: without a reference, and adapters to begin with.

    They have no rows, so that `train.cp: auto` asks for no number of data-parallel ranks.
    """
    algorithm = recipe.algorithm.model_copy(update={"kl_coefficient": 0.0})
    lora = recipe.lora and recipe.lora.model_copy(update={"path": None})
    train = recipe.train
    if train.cp == "auto":
        train = train.model_copy(update={"cp": 1})
    return recipe.model_copy(
        update={
            "reference": type(recipe.reference)(),
            "algorithm": algorithm,
            "lora": lora,
            "train": train,
        }
    )


def _critic(recipe: Recipe) -> Role:
    critic = recipe.critic
    train_keys = critic.model_dump(
        include={"lr", "warmup_steps", "lr_schedule", "lr_end"}, exclude_none=True
    )
    critic_recipe = _auxiliary_recipe(
        recipe, critic.path or recipe.model.path, critic.ranks, train_keys
    )
    if critic.shares_weights and recipe.lora:
        critic_recipe = critic_recipe.model_copy(
            update={"lora": recipe.lora.model_copy(update={"path": None})}
        )
    has_scores = AUXILIARY_MODELS[ALGORITHMS[recipe.algorithm.name].critic].has_scores
    return _role("critic", critic_recipe, critic.ranks.first_gpu, has_scores=has_scores)


def _reward_model(recipe: Recipe) -> Role:
    reward_model = recipe.reward_model
    path = reward_model.path or recipe.model.path
    reward_recipe = _auxiliary_recipe(recipe, path, reward_model.ranks, {})
    if reward_model.path:  # with adapters alone it computes with the policy's layers
        model = reward_recipe.model.model_copy(update={"rope_scaling": None})
        reward_recipe = reward_recipe.model_copy(update={"model": model})
    if reward_model.adapters and recipe.lora:
        keys = adapter_keys(reward_model.adapters)
        lora = recipe.lora.model_copy(update={**keys, "path": reward_model.adapters})
        reward_recipe = reward_recipe.model_copy(update={"lora": lora})
    return _role("reward_model", reward_recipe, reward_model.ranks.first_gpu, has_scores=True)


def _role(name: RoleName, recipe: Recipe, first_slot: int, *, has_scores: bool) -> Role:
    model = read_model(
        recipe.model.path,
        recipe.model.family,
        has_scores=has_scores,
        rope_scaling=recipe.model.rope_values,
    )
    if name != "policy" and model.known_shape:
        # the keys name parts of the policy's layers and its exchanges, of which this model may lack some
        train = without_lacking(recipe.train, model.known_shape)
        train = without_unused(
            train, model.known_shape, train_layout(recipe), trains=name != "reward_model"
        )
        recipe = recipe.model_copy(update={"train": train})
    return Role(name, recipe, train_layout(recipe), first_slot, has_scores, model)


def _auxiliary_recipe(
    recipe: Recipe, path: str, ranks: RanksConfig, train_keys: dict[str, Any]
) -> Recipe:
    """The recipe as the ranks of an auxiliary model read it: its own values in the policy's keys."""
    sizes = {
        key: value
        for key, value in ranks
        if value is not None and key in type(recipe.train).model_fields
    }
    train = recipe.train.model_copy(
        update={**sizes, **train_keys, "mtp_loss": 0.0, "replay": "off", "numbers": "plain"}
    )
    gpus = ranks.gpus or train_layout(recipe).world_size
    placement = recipe.placement.model_copy(
        update={"gpus": gpus, "train_gpus": None, "first_engine_gpu": 0}
    )
    model = recipe.model.model_copy(update={"path": path, "config": None})
    return recipe.model_copy(
        update={
            "model": model,
            "train": train,
            "lora": None,
            "placement": placement,
            "reference": type(recipe.reference)(),
        }
    )
