"""What a search found, as a table with the overlays to paste, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Console, RenderableType

from megarl.config.loading import overlay_yaml
from megarl.placement.flex_dispatcher import is_flex
from megarl.placement.recomputation import recomputed_parts
from megarl.plan.estimate import Need, needs_of
from megarl.plan.layer_time import overlaps_of
from megarl.plan.layout_search import SearchResult
from megarl.plan.report import amount, empty_table, engines, parallel_sizes, rendered, text, title
from megarl.plan.run_plan import RunPlan
from megarl.types.json_objects import JsonObject

_NEEDS: Mapping[Need, str] = {
    "fp8": "fp8, TIS",
    "fp8_cache": "fp8 cache",
    "fp8_training": "fp8 training",
    "deepep": "DeepEP",
    "draft": "drafts",
    "offload": "AdamW on the host",
    "moments": "moments in bf16",
}
_NOT_TRIED = {
    "engine": "engines of other dense, head or sglang keys, or on other GPUs",
    "train": "fixed cp above the recipe's, etp, recomputation by stage, ranks of their own for a critic",
}


def search_page(result: SearchResult) -> str:
    """The table and the overlays, as they suit stdout."""
    return rendered(lambda console: _show(result, console))


def _show(result: SearchResult, console: Console) -> None:
    console.print(text(title(result.own), style="bold"))
    console.print(_seconds(result))
    console.print(_layouts(result))
    for line in _remarks(result):
        console.print(text(line))
    for row in result.best.values():
        console.print()
        seconds = f"{amount(row.plan.step.total_s)} s a step"
        where = seconds if row.overlay else "the recipe's layout"
        console.print(text(f"# {where}, {_needed(row.plan)}", style="bold cyan"))
        console.print(text(overlay_yaml(row.overlay).rstrip() or "# no overlay is needed"))


def _rows(result: SearchResult) -> list[tuple[str, RunPlan]]:
    """(what it needs, plan), the recipe's own first."""
    return [("the recipe", result.own), *((_needed(row.plan), row.plan) for row in result.found)]


def _seconds(result: SearchResult) -> RenderableType:
    table = empty_table(
        "the best layouts",
        "needs",
        "",
        "s a step",
        "of the recipe's",
        "rollout",
        "train",
        "GB of a GPU",
        "of a host",
        "sequences at once",
    )
    for number, (words, plan) in enumerate(_rows(result)):
        memory = plan.memory
        table.add_row(
            words if plan.fits else f"{words}: does not fit",
            str(number),
            amount(plan.step.total_s),
            f"{plan.step.total_s / result.own.step.total_s:.0%}",
            amount(plan.rollout.total_s),
            amount(plan.step.train_s),
            amount(memory.peak_bytes / 1e9),
            amount(memory.host_bytes / 1e9),
            f"{memory.kv.concurrency_mean:,} of {memory.kv.wanted:,}",
            style="" if plan.fits else "bold red",
        )
    return table


def _layouts(result: SearchResult) -> RenderableType:
    table = empty_table("", "", "engines", "training ranks")
    for number, (_, plan) in enumerate(_rows(result)):
        table.add_row(str(number), _engine_words(plan), _train_words(plan))
    return table


def _remarks(result: SearchResult) -> list[str]:
    plan = result.own
    capacity = plan.memory.capacity_bytes / 1e9
    host = plan.memory.host_capacity_bytes / 1e9
    engines_tried, trains_tried = result.tried
    counts = {"engine layouts": engines_tried, "training layouts": trains_tried}
    tried = [f"{count} {what}" for what, count in counts.items() if count]
    not_tried = [words for side, words in _NOT_TRIED.items() if result.side in (side, "both")]
    return [
        f"{plan.hardware.name} has {amount(capacity)} GB, a host {amount(host)} GB; each row leaves 5 % of both free",
        f"{' and '.join(tried)} without a fault were tried, and not {'; '.join(not_tried)}",
        "seconds are estimates that no run on GPUs has been held against: docs/plan.md says what they leave out",
    ]


def _needed(plan: RunPlan) -> str:
    needs = needs_of(plan.recipe)
    return ", ".join(words for need, words in _NEEDS.items() if need in needs) or "nothing else"


def _engine_words(plan: RunPlan) -> str:
    engine = plan.engine
    words = f"{engine.count} x tp {engine.tp}, ep {engine.ep}, dp {engine.dp}"
    share = plan.recipe.rollout.engine.sglang.get("mem_fraction_static")
    return words if share is None else f"{words}, {share} of memory"


def _train_words(plan: RunPlan) -> str:
    layout = plan.sizes["policy"].layout
    train = plan.recipe.train
    virtual = f", vpp {layout.vpp}" if layout.vpp > 1 else ""
    context = f", cp {layout.cp_words}" if layout.cp_words else ""
    stages = [recomputed_parts(train, stage) for stage in range(layout.pp)]
    counts = Counter(part for parts in stages for part in parts)
    words = [
        part if count == layout.pp else f"{part} on {count} of {layout.pp}"
        for part, count in sorted(counts.items())
    ]
    again = " + ".join(words) or "nothing"
    if len(words) > 2:  # the overlay names them
        again = f"{len(words)} parts of layers"
    deepep = " flex" if is_flex(train) else ""
    sizes = f"tp {layout.tp}, pp {layout.pp}{virtual}, ep {layout.ep}{deepep}{context}"
    overlap = "".join(
        f", {name.replace('_', ' ')} hidden" for name in sorted(overlaps_of(train.megatron))
    )
    return f"{sizes}; {train.tokens_per_micro_batch:,} tokens, {again} recomputed{overlap}"


def search_json(result: SearchResult) -> JsonObject:
    """Values of json's own types alone; docs/plan.md lists the keys."""
    recipe_row = _row_json(result.own)
    rows = [_row_json(row.plan) | {"overlay": row.overlay} for row in result.found]
    tried = dict(zip(("engines_tried", "trains_tried"), result.tried, strict=True))
    return {"side": result.side, **tried, "own": recipe_row, "found": rows}


def _row_json(plan: RunPlan) -> JsonObject:
    memory = plan.memory
    return {
        "needs": sorted(needs_of(plan.recipe)),
        "fits": plan.fits,
        "step_s": plan.step.total_s,
        "rollout_s": plan.step.rollout_s,
        "train_s": plan.step.train_s,
        "gpu_bytes": memory.peak_bytes,
        "host_bytes": memory.host_bytes,
        "concurrency": memory.kv.concurrency_mean,
        "engines": engines(plan),
        "training": parallel_sizes(["policy"], plan.sizes["policy"]),
    }
