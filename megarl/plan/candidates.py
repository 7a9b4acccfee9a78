"""The layouts that a search tries: overlays of a recipe, each valid by the errors that a plan would tell. Pure.

Training's `tp` stays inside a node. `cp`, for sequences that do not fit otherwise, is only lowered from the recipe's,
or `auto`, where a rank has a half or a quarter of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.config.loading import overlaid
from megarl.model.shape import ModelShape
from megarl.placement.overlaps import PLAIN_EXCHANGE
from megarl.placement.recomputation import ladder, recompute_keys, recomputed_parts
from megarl.placement.roles import resolve, train_layout
from megarl.placement.train_layout import TrainLayout, divisors
from megarl.plan.fit import RANKS_OF_LONGEST, are_valid, split_budget
from megarl.plan.optimizer_memory import smaller_states
from megarl.training.flops import layers_beside

Overlay = dict[str, Any]
# of rollout.engine.sglang.mem_fraction_static, and the recipe's own
FRACTIONS = (0.7, 0.75, 0.8, 0.85, 0.9)
FP8_CACHE = {"kv_cache_dtype": "fp8_e4m3"}  # of rollout.engine.sglang
# of train: what its products are of, plain and as in fp8 engines; then backward passes are in fp8, too, which is faster
PLAIN_NUMBERS = {"numbers": "plain"}
FP8_NUMBERS = {"numbers": "engine", "fp8_backward": "fp8"}
MOST_DRAFTS = 1  # a second one changes the estimate by less than its error, and takes memory
# of an engine: larger ones wait longer for one another, and nobody has published one
MOST_RANKS = 128
MOST_EXPERT_RANKS = 64  # of training's ep: more would exchange more over the network
# virtual stages of a pipeline rank: each more sends every micro-batch round the pipeline once more
MOST_CHUNKS = 4
# layers of the fullest pipeline rank over those of the mean one, or its work with what the last rank has besides
MOST_UNEVEN = 1.1


def engine_overlays(recipe: Recipe, hardware: Hardware) -> Iterator[Overlay]:
    """Every valid layout of as many engine GPUs as the recipe's: count, tp, dp, ep, fp8, experts' exchange, drafts.

    Beside weights in fp8 also a cache in fp8, but not of latent attention, which computes as long as it reads.

    ep is the largest that the model allows, since no estimate favours another: experts stay whole. Dense layers and
    output layer have the default of their number of groups. Without `FRACTIONS`, which `with_fraction` lays over.
    """
    engine = recipe.rollout.engine
    node = recipe.placement.gpus_per_node
    total = engine.count * engine.tp
    shape = resolve(recipe).policy.shape
    if hardware.fp8_flops or engine.weights == "fp8":
        types = (False, True)
    else:
        types = (False,)
    if shape.num_mtp_layers:
        drafts = sorted({*range(MOST_DRAFTS + 1), engine.draft})
    else:
        drafts = (0,)
    varies_cache = not (shape.mla or "kv_cache_dtype" in engine.sglang)
    for tp in [tp for tp in divisors(total) if tp <= MOST_RANKS]:
        if node % tp and tp % node:
            continue
        for dp, fp8, draft in product(divisors(tp) if shape.num_experts else [1], types, drafts):
            for experts in ("gather", "deepep") if dp > 1 else ("gather",):
                sizes = {
                    "count": total // tp,
                    "tp": tp,
                    "dp": dp,
                    "weights": "fp8" if fp8 else "plain",
                    "experts": experts,
                    "draft": draft,
                }
                yield from _with_largest_ep(recipe, shape, sizes)
                if fp8 and varies_cache:
                    yield from _with_largest_ep(recipe, shape, sizes | {"sglang": FP8_CACHE})


def with_fraction(recipe: Recipe, overlay: Overlay) -> Iterator[Overlay]:
    """An engine layout with each share of memory, the smallest first; the recipe's own may be SGLang's default."""
    recipe_fraction = recipe.rollout.engine.sglang.get("mem_fraction_static")
    if recipe_fraction is None:
        yield overlay
    for fraction in sorted(
        {*FRACTIONS, *([recipe_fraction] if recipe_fraction is not None else [])}
    ):
        engine = overlay["rollout"]["engine"]
        sglang = engine.get("sglang", {}) | {"mem_fraction_static": fraction}
        yield {**overlay, "rollout": {"engine": {**engine, "sglang": sglang}}}


def train_overlays(recipe: Recipe) -> Iterator[Overlay]:
    """Every valid parallel layout of as many training GPUs as the recipe's. What it computes is in `train_variants`.

    With the plainest exchange with experts: `with_exchange` lays others over.
    """
    recipe = overlaid(recipe, {"train": {"megatron": PLAIN_EXCHANGE}})
    recipe_layout = train_layout(recipe)
    shape = resolve(recipe).policy.shape
    experts = [ep for ep in divisors(shape.num_experts or 1) if ep <= MOST_EXPERT_RANKS]
    extra_layers = layers_beside(shape, trains_mtp=recipe.train.mtp_loss > 0)
    for tp, cp in product(divisors(recipe.placement.gpus_per_node), divisors(recipe_layout.cp)):
        stage_ranks = divisors(recipe_layout.world_size // (tp * cp))
        pipelines = [(pp, vpp) for pp in stage_ranks for vpp in _chunk_counts(shape, pp)]
        for (pp, vpp), ep in product(pipelines, experts):
            stages = _stage_layers(recipe_layout, shape, pp, vpp, extra_layers)
            if stages is None:
                continue
            overlay = {
                "train": {
                    "tp": tp,
                    "pp": pp,
                    "vpp": vpp,
                    "ep": ep,
                    "cp": cp,
                    "layers_per_stage": list(stages),
                }
            }
            if are_valid(resolve(overlaid(recipe, overlay))):
                yield overlay


def train_variants(recipe: Recipe, overlay: Overlay) -> Iterator[Overlay]:
    """A parallel layout with each token budget, with ever more recomputation, and with AdamW's state on each side.

    A budget is at least one longest sequence, or with `cp: auto` a part of it.
    """
    train = recipe.train
    sizes = overlay["train"]
    align = 2 * sizes["cp"] if sizes["cp"] > 1 else 1
    least = -(-recipe.longest_sequence // align) * align
    budgets = sorted({least, train.tokens_per_micro_batch, 2 * train.tokens_per_micro_batch})
    rows: list[tuple[int | str, int]] = [
        (sizes["cp"], budget) for budget in budgets if budget >= least
    ]
    if sizes["cp"] == 1:
        splits = [("auto", split_budget(recipe, ranks)) for ranks in RANKS_OF_LONGEST]
        rows += [row for row in splits if _takes_row(recipe, overlay, *row)]
    roles = resolve(recipe)
    # the critic's ranks read the same key
    num_stages = max(sizes["pp"], *(role.layout.pp for role in roles.models.values()))
    own = {recomputed_parts(train, stage) for stage in range(num_stages)}
    others = [parts for parts in ladder(roles.policy.shape) if own != {parts}]
    recomputes = [{}, *(recompute_keys(train, parts, num_stages) for parts in others)]
    for cp, budget in rows:
        for recompute in recomputes:
            for state in _optimizer_states(recipe):
                values: dict[str, Any] = {"cp": cp, "tokens_per_micro_batch": budget}
                values |= PLAIN_NUMBERS
                yield {**overlay, "train": {**sizes, **values, **state, **recompute}}


def _takes_row(recipe: Recipe, overlay: Overlay, cp: int | str, budget: int) -> bool:
    """Whether the ranks of a parallel layout, and the heads of the models' linear attention, divide by such rows."""
    row = {"cp": cp, "tokens_per_micro_batch": budget}
    roles = resolve(overlaid(recipe, {**overlay, "train": {**overlay["train"], **row}}))
    return not any(role.layout_errors() for role in roles.models.values())


def _optimizer_states(recipe: Recipe) -> Iterator[Overlay]:
    """Where AdamW's state is, and in which types, as keys of `train`; on the GPU it is smaller than by default."""
    has_muon = recipe.train.optimizer_name == "muon"
    if recipe.lora or has_muon or recipe.model.dtype != "bfloat16":
        yield {"optimizer_offload": False}
        return
    yield {"optimizer_offload": True}
    for options in smaller_states(recipe):
        yield {"optimizer_offload": False, "optimizer": options}


def with_exchange(overlay: Overlay, options: Mapping[str, bool | str | None]) -> Overlay:
    """A variant of training with another exchange with experts, also where it is refused. options: of overlaps.py."""
    train = overlay["train"]
    return {**overlay, "train": {**train, "megatron": {**train.get("megatron", {}), **options}}}


def in_fp8(recipe: Recipe, overlay: Overlay) -> Overlay:
    """A variant of training that multiplies what fp8 engines multiply; kv_b_proj of latent attention stays plain."""
    variant = {**overlay, "train": {**overlay["train"], **FP8_NUMBERS}}
    plain = recipe.precision.plain
    if resolve(recipe).policy.shape.mla and "kv_b_proj" not in plain:
        variant["precision"] = {"plain": [*plain, "kv_b_proj"]}
    return variant


def changes(overlay: Overlay, tree: Mapping[str, Any]) -> Overlay:
    """The keys of an overlay that change a recipe; tree: the recipe in json's own types."""
    changed: Overlay = {}
    for key, value in overlay.items():
        if isinstance(value, dict):
            inside = changes(value, tree.get(key) or {})
            changed |= {key: inside} if inside else {}
        elif tree.get(key) != value:
            changed[key] = value
    return changed


def _with_largest_ep(recipe: Recipe, shape: ModelShape, sizes: dict[str, Any]) -> Iterator[Overlay]:
    """One overlay, or none if no ep is valid; fp8 with the correction of the samples' other probabilities."""
    tp = sizes["tp"]
    ep_sizes = [ep for ep in divisors(tp) if (shape.num_experts or 1) % ep == 0]
    for ep in [tp] if sizes["experts"] == "deepep" else reversed(ep_sizes):
        overlay: Overlay = {"rollout": {"engine": {**sizes, "ep": ep}}}
        if sizes["weights"] == "fp8" and not recipe.algorithm.corrects_engine:
            overlay["algorithm"] = {"rollout_correction": "tis"}
        if are_valid(resolve(overlaid(recipe, overlay))):
            yield overlay
            return


def _chunk_counts(shape: ModelShape, pp: int) -> list[int]:
    """The numbers of virtual stages that are tried for each of so many pipeline ranks."""
    if pp == 1:
        return [1]
    most = min(MOST_CHUNKS, shape.num_layers // pp)
    return list(range(1, most + 1))


def _stage_layers(
    recipe_layout: TrainLayout, shape: ModelShape, pp: int, vpp: int, extra_layers: float
) -> tuple[int, ...] | None:
    """layers_per_stage of pp x vpp stages: the recipe's own, or even, or some shorter by a layer; None: too uneven.

    extra_layers: what the last pipeline rank computes besides, in layers. The last stage may have no layer at all.
    """
    stages = pp * vpp
    layers = shape.num_layers
    if (pp, vpp) == (recipe_layout.pp, recipe_layout.vpp):
        return recipe_layout.stage_layers
    if stages > layers:
        return None
    most = -(-layers // stages)
    tried = [
        _shortened(pp, vpp, longest, longest * stages - layers, extra_layers)
        for longest in (most, most + 1)
    ]
    stage_layers, work = min(tried, key=lambda plan: plan[1])
    if len({*stage_layers}) == 1:
        return ()
    fullest = max(sum(stage_layers[rank::pp]) for rank in range(pp))
    if fullest * pp <= MOST_UNEVEN * layers or work * pp <= MOST_UNEVEN * (layers + extra_layers):
        return stage_layers
    return None


def _shortened(
    pp: int, vpp: int, most: int, num_missing: int, extra_layers: float
) -> tuple[tuple[int, ...], float]:
    """Stages of `most` layers, of which the pipeline rank with the most work gives one away, so many times.

    With the work of the fullest rank, in layers.
    """
    last = pp * vpp - 1
    stage_layers = [most] * (last + 1)
    stage_work = [*stage_layers[:last], most + extra_layers]
    for _ in range(num_missing):
        rank_work = [sum(stage_work[rank::pp]) for rank in range(pp)]
        can_give = [
            stage
            for stage, layers in enumerate(stage_layers)
            if layers > 1 or (layers and stage == last)
        ]
        # of equals the last one, whose activations wait for the fewest micro-batches
        giver = max(can_give, key=lambda stage: (rank_work[stage % pp], stage_work[stage], stage))
        stage_layers[giver] -= 1
        stage_work[giver] -= 1
    return tuple(stage_layers), max(sum(stage_work[rank::pp]) for rank in range(pp))
