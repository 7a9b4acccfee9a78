"""A plan as a page for the terminal, with the lines that the picture shows too, and as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.checkpoints.quantised import file_bytes, weights_in_words
from megarl.config.episode import EpisodeConfig
from megarl.plan.adapter_sizes import adapters_in_words
from megarl.plan.memory_parts import PARTS
from megarl.plan.model_size import ModelSize
from megarl.plan.phased_rollout import PhasedRollout
from megarl.plan.run_plan import RunPlan, Slot
from megarl.printable import printable

_PLAIN_WIDTH = 130  # of a file or a pipe, where rich would otherwise fold lines at 80
_HEADS = {"activations": "activa-\ntions", "optimizer": "opti-\nmizer"}


def title(plan: RunPlan) -> str:
    """The recipe in one line."""
    size = plan.sizes["policy"]
    recipe = plan.recipe
    if size.shape.num_experts:
        active = f" ({amount(size.active_parameters / 1e9)} B active)"
    else:
        active = ""
    model = f"{amount(size.parameters / 1e9)} B parameters{active}"
    if plan.num_nodes > 1:
        nodes = f"{plan.num_nodes} nodes"
    else:
        nodes = "1 node"
    where = f"{recipe.placement.gpus} {plan.hardware.name} in {nodes}"
    return f"{recipe.run.name}: {recipe.algorithm.name}, {model}, on {where}"


def reward_result(plan: RunPlan) -> str:
    """Whether it fits, in one line."""
    phase = plan.memory.peak_phase
    fullest = plan.memory.device[phase].total_bytes / plan.hardware.memory_bytes
    fills = f"{fullest:.0%} of a GPU in {phase}, its fullest phase"
    if not plan.fits:
        return f"does not fit: {fills}"
    return f"fits: {fills}; {amount(plan.step.total_s)} s a step (an estimate)"


def parallel_sizes(models: Iterable[str], size: ModelSize) -> str:
    """The names of models that have one layout, and its axes, in one line."""
    layout = size.layout
    dense = f"tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"
    virtual = f" (vpp {layout.vpp})" if layout.vpp > 1 else ""
    if size.shape.num_experts:
        experts = f", experts etp {layout.etp} x ep {layout.ep} x edp {layout.edp}"
    else:
        experts = ""
    return f"{_joined(models)}: {dense}{virtual}{experts}"


def engines(plan: RunPlan) -> str:
    """The engines in one line."""
    engine = plan.engine
    if plan.engine.fp8:
        kind = "fp8"
    else:
        kind = plan.recipe.model.dtype
    dp = f", dp {engine.dp}" if engine.dp > 1 else ""
    dp += ", experts by DeepEP" * engine.deepep
    slots = spans(range(engine.first, engine.end))
    return f"{engine.count} of tp {engine.tp}, ep {engine.ep}{dp} in {kind} on slots {slots}"


def amount(value: float) -> str:
    """A number with three digits, or with all before the decimal point: 1,339 42.1 3.01 0.305 0."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    if digits < 6:
        return f"{value:,.{digits}f}"
    return f"{value:.1e}"


def spans(numbers: Iterable[int]) -> str:
    """Rising numbers as "0-3, 8, 10-11"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"


def show(plan: RunPlan, console: Console) -> None:
    """Print the whole report."""
    console.print(text(title(plan), style="bold"))
    console.print(text(reward_result(plan), style="green" if plan.fits else "bold red"))
    for part in (
        _placement(plan),
        _memory(plan),
        _batch(plan),
        _rollout(plan),
        _reshard(plan),
        _step(plan),
    ):
        console.print()
        console.print(part)


def _placement(plan: RunPlan) -> RenderableType:
    per_node = plan.recipe.placement.gpus_per_node
    table = empty_table("who sits where", "models", "stage", "nodes", "GPU slots", "decoder layers")
    lines = []
    for models in plan.same_placement():
        size = plan.sizes[models[0]]
        for stage in size.pipeline_stages():
            nodes = sorted({slot // per_node for slot in stage.slots})
            table.add_row(
                _joined(models),
                str(stage.stage),
                spans(nodes),
                spans(stage.slots),
                spans(stage.layers),
            )
        lines.append(text(parallel_sizes(models, size)))
    policy = plan.sizes["policy"]
    if policy.model.facts:
        lines.append(text(f"model.path: {weights_in_words(policy.shape, policy.model.facts)}"))
    if policy.lora:
        lines.append(text(f"lora: {adapters_in_words(policy.shape, policy.lora)}"))
    return Group(table, *lines, text(f"engines: {engines(plan)}"))


def _memory(plan: RunPlan) -> RenderableType:
    """GB of the fullest GPU in each phase."""
    found = plan.memory
    capacity = plan.hardware.memory_bytes
    used = [part for part in PARTS if any(parts.by_name()[part] for parts in found.device.values())]
    names = [_HEADS.get(part, part.replace("_", "\n")) for part in used]
    table = empty_table("memory of the fullest GPU, GB", "phase", *names, "total", "share")
    for phase, parts in found.device.items():
        share = parts.total_bytes / capacity
        if share > 1:
            style = "bold red"
        elif phase == found.peak_phase:
            style = "bold"
        else:
            style = ""
        row = [amount(round(parts.by_name()[part] / 1e9, 2)) for part in used]
        table.add_row(phase, *row, amount(parts.total_bytes / 1e9), f"{share:.0%}", style=style)
    slot = found.fullest_slot[found.peak_phase]
    words = f"{plan.hardware.name} has {amount(capacity / 1e9)} GB; {found.peak_phase} takes most, on slot {slot}"
    purposes = ", ".join(
        f"{name.replace('_', ' ')} {amount(value / 1e9)}" for name, value in found.host.items()
    )
    host = f"{amount(found.host_bytes / 1e9)} of {amount(found.host_capacity_bytes / 1e9)} GB: {purposes}"
    return Group(table, text(words), text(f"the fullest node's host holds {host}"))


def _batch(plan: RunPlan) -> RenderableType:
    samples = plan.samples
    table = empty_table("what a step trains on", "model", "updates", "DP\nranks", "sequen-\nces", "tokens",
                   "micro-\nbatches", "if all were\nlongest", "bubble", "balance")  # fmt: skip
    for model, share in plan.shares.items():
        table.add_row(
            model.replace("_", " "), str(share.updates), str(share.dp), amount(share.sequences), amount(share.tokens),
            amount(share.micro_batches), f"{amount(share.tokens_full)} in {amount(share.micro_batches_full)}",
            f"{share.bubble:.0%}", f"{share.balance:.0%}",
        )  # fmt: skip
    if samples.drawn_prompts != samples.prompts:
        drawn = f"{samples.drawn_prompts:,} prompts drawn"
    else:
        drawn = ""
    words = f"{samples.prompts:,} prompts make {samples.num_trained:,} samples{f', {drawn}' if drawn else ''}; "
    mean = (
        f"{samples.lengths.mean():,.0f} tokens in the mean (assumed), {samples.longest:,} at most"
    )
    lines = [
        text(words + mean),
        text("sequences, tokens and micro-batches are of one rank and one update"),
    ]
    return Group(table, *lines, *(text(line, style="yellow") for line in plan.advice))


def _rollout(plan: RunPlan) -> RenderableType:
    found = plan.rollout
    cache = plan.memory.kv
    table = empty_table("what an engine holds", "", "")
    table.add_row("tokens in its KV cache", f"{cache.tokens:,}")
    table.add_row("sequences at once, all at the longest", f"{cache.concurrency_longest:,}")
    table.add_row("sequences at once, as long as they run", f"{cache.concurrency_mean:,}")
    table.add_row("sequences of a step", f"{cache.wanted:,}")
    table.add_row("sequences at once, as SGLang admits them", f"{found.running:,}")
    table.add_row("times that a sequence is retracted from a full cache", f"{found.retracted:,}")
    table.add_row("their tokens read again, over the responses' tokens", f"{found.again_share:.1%}")
    table.add_row("tokens a second, all engines", amount(found.tokens_per_s))
    if plan.phases:
        _add_phases(table, plan.phases)
    if not found.longest:  # nothing is sampled
        return table
    if plan.recipe.episode:
        _add_episodes(table, plan, plan.recipe.episode)
    if plan.recipe.episode:
        whole = "the longest episode"
    else:
        whole = "the longest response"
    if plan.phases:
        longest = "the most tokens that a phase adds"
    else:
        longest = whole
    alone = (
        f"{longest} alone, {found.longest:,} tokens one after the other: {amount(found.alone_s)} s"
    )
    return Group(table, text(f"{alone} of the rollout's {amount(found.total_s)} s"))


def _add_episodes(table: Table, plan: RunPlan, episode: EpisodeConfig) -> None:
    turns = plan.samples.turns
    count = plan.engine.count
    table.add_row(
        "turns of an episode, mean (assumed) and maximum", f"{amount(turns.mean)}, {turns.most}"
    )
    table.add_row("observation tokens of an episode, mean (assumed)", amount(turns.observed_tokens))
    table.add_row("seconds between its turns, without the tools' own", amount(plan.rollout.turns_s))
    table.add_row(
        "seconds of the longest, at most, without the tools' own",
        amount(plan.rollout.longest_s(count)),
    )
    table.add_row("worker processes of tools, all engines", f"{count * episode.workers:,}")
    load = plan.tool_load
    rollout_s = plan.rollout.total_s
    if load:
        per_s = amount(load.calls_per_s(rollout_s))
        table.add_row(
            "turns of a step that call tools (assumed), and a second", f"{load.calls:,.0f}, {per_s}"
        )
        every = f"cores of tools, if every call used its whole {load.call_s:g} s ({load.limit})"
        table.add_row(every, amount(load.cores(rollout_s)))


def _add_phases(table: Table, found: PhasedRollout) -> None:
    ages = f"{amount(found.token_mean)}, {found.token_max}; never more than {found.bound}"
    table.add_row("phases of a step", amount(found.phases))
    table.add_row("open sequences in a phase", f"{found.open_sequences:,}")
    table.add_row("their tokens at its end", f"{found.open_tokens:,}")
    table.add_row(
        "earlier phases' tokens read again, over the responses'", f"{found.again_share:.1%}"
    )
    table.add_row("seconds to read them again", amount(found.again_s))
    table.add_row("versions by which tokens are stale, mean and maximum", ages)


def _reshard(plan: RunPlan) -> RenderableType:
    found = plan.reshard
    lora = plan.sizes["policy"].lora
    if lora and lora.in_slots:
        what = "engine's adapters"
    else:
        what = "engine weights"
    table = empty_table("a reshard, GB of one GPU", "", "mean", "max")
    rows = {
        what: found.dest_bytes,
        "from the own GPU": found.local_bytes,
        "in over NVLink": found.nvlink_bytes,
        "in over the fabric": found.fabric_in_bytes,
        "out over the fabric": found.fabric_out_bytes,
        "gathering everything would bring": found.gather_everything_bytes,
    }
    for name, spread in rows.items():
        table.add_row(name, amount(spread.mean / 1e9), amount(spread.max / 1e9))
    rounds = f"in {found.rounds} rounds of {plan.recipe.reshard.round_bytes / 1e6:,.0f} MB"
    words = f"{amount(found.expected_s)} s expected, {amount(found.bound_s)} s at least, {rounds}"
    return Group(
        table, text(f"{words}; gathering everything: {amount(found.gather_bound_s)} s at best")
    )


def _step(plan: RunPlan) -> RenderableType:
    table = empty_table("a step, seconds", "phase", "s", "share", "of what")
    rollout = plan.rollout
    details = dict[str, dict[str, float]]()
    if not rollout.beside_s:
        details["rollout"] = {
            "reading prompts": rollout.prefill_s,
            "between turns": rollout.turns_s,
            "its last half-empty stretch": rollout.tail_s,
        }
    for role, times in plan.learning.items():
        phase = "train" if role == "policy" else role
        details[phase] = {
            key.removesuffix("_s").replace("_", " "): spent for key, spent in asdict(times).items()
        }
    for phase, seconds in plan.step.by_phase().items():
        parts = ", ".join(
            f"{name} {amount(value)}" for name, value in details.get(phase, {}).items() if value
        )
        table.add_row(phase, amount(seconds), f"{seconds / plan.step.total_s:.0%}", parts)
    table.add_row("all", amount(plan.step.total_s), "", "", style="bold")
    lines = []
    if rollout.beside_s:
        beside = amount(rollout.mean_beside_s)
        learning = amount(plan.step.learning_s)
        lines.append(
            text(
                f"beside {learning} s of training a phase of {beside} s is sampled by the weights before"
            )
        )
    waits = {"sample": plan.engines_wait_s, "train": plan.ranks_wait_s}
    lines += [
        text(f"GPUs that only {what} wait {amount(spent)} s of a step")
        for what, spent in waits.items()
        if spent
    ]
    words = "An estimate from the hardware's table, which no run on GPUs has been held against yet: docs/plan.md."
    if not plan.fits:
        words += " It means little before the recipe fits."
    return Group(table, *lines, text(words, style="dim"))


def _joined(models: Iterable[str]) -> str:
    return " and ".join(models).replace("_", " ")


def empty_table(title: str, *columns: str) -> Table:
    """Heads have their line ends, so that a page of 80 columns need not cut figures; columns of words may be folded."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold cyan",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for place, column in enumerate(columns):
        folds = column == "of what"
        table.add_column(
            column, justify="right" if place and not folds else "left", no_wrap=not folds
        )
    return table


def text(words: str, style: str = "") -> Text:
    return Text(printable(words), style=style)


def page(plan: RunPlan) -> str:
    """The report as it suits stdout."""
    return rendered(lambda console: show(plan, console))


def rendered(shows: Callable[[Console], None], width: int = _PLAIN_WIDTH) -> str:
    """What is printed, in colours and as wide as a terminal, or plain and of a fixed width."""
    terminal = Console()
    if terminal.is_terminal:
        console = terminal
    else:
        console = Console(width=width)
    with console.capture() as capture:
        shows(console)
    return capture.get().rstrip("\n")


def plan_json(plan: RunPlan) -> dict[str, Any]:
    """Values of json's own types alone; docs/plan.md lists the keys."""
    samples = plan.samples
    policy = plan.sizes["policy"]
    memory = plan.memory
    return {
        "name": plan.recipe.run.name,
        "fits": plan.fits,
        "errors": [
            {"where": error.where, "problem": error.problem, "hint": error.hint}
            for error in plan.errors
        ],
        "hardware": plan.hardware.model_dump(),
        "model": {
            "parameters": policy.parameters,
            "active_parameters": policy.active_parameters,
            "file_bytes": file_bytes(policy.shape, policy.model.facts)
            if policy.model.facts
            else None,
        },
        "ranks": [_slot_json(slot) for slot in plan.slots],
        "memory": {
            "capacity_bytes": memory.capacity_bytes,
            "peak_phase": memory.peak_phase,
            "device": {
                phase: asdict(of) | {"total_bytes": of.total_bytes}
                for phase, of in memory.device.items()
            },
            "fullest_slot": memory.fullest_slot,
            "slot_bytes": memory.slot_bytes,
            "host": memory.host,
            "host_bytes": memory.host_bytes,
            "host_capacity_bytes": memory.host_capacity_bytes,
        },
        "batch": {
            "prompts": samples.prompts,
            "drawn_prompts": samples.drawn_prompts,
            "samples": samples.num_trained,
            "tokens": int(samples.lengths.sum()),
            "longest_tokens": samples.longest,
            "mean_response_share": plan.response_share,
            "models": {role: asdict(share) for role, share in plan.shares.items()},
            "advice": list(plan.advice),
        },
        "kv": asdict(memory.kv),
        "rollout": asdict(plan.rollout) | {"beside_s": plan.rollout.mean_beside_s},
        "phases": _phases_json(plan.phases) if plan.phases else None,
        "episodes": _episodes_json(plan) if plan.recipe.episode else None,
        "waits": {"engines_s": plan.engines_wait_s, "ranks_s": plan.ranks_wait_s},
        "reshard": asdict(plan.reshard),
        "learning": {role: asdict(times) for role, times in plan.learning.items()},
        "step": asdict(plan.step) | {"total_s": plan.step.total_s},
    }


def _episodes_json(plan: RunPlan) -> dict[str, Any]:
    load = plan.tool_load
    rollout_s = plan.rollout.total_s
    tools = None
    if load and rollout_s:
        tools = asdict(load) | {
            "calls_per_s": load.calls_per_s(rollout_s),
            "cores": load.cores(rollout_s),
        }
    return asdict(plan.samples.turns) | {"tools": tools}


def _phases_json(phases: PhasedRollout) -> dict[str, Any]:
    values = asdict(phases)
    del values["time"]  # it is `rollout`
    return values


def _slot_json(slot: Slot) -> dict[str, Any]:
    values = asdict(slot)
    ranks = values.pop("ranks")
    return values | ranks
