"""A plan as a page for the terminal, with the lines that the picture shows too, and as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.checkpoints.quantised import file_bytes, weights_in_words
from megarl.config.episode import EpisodeConfig
from megarl.placement.flex_dispatcher import is_flex
from megarl.plan.adapter_sizes import adapters_in_words
from megarl.plan.memory_parts import PARTS
from megarl.plan.model_size import ModelSize
from megarl.plan.phased_rollout import PhasedRollout
from megarl.plan.run_plan import RunPlan, Slot
from megarl.printable import printable
from megarl.types.json_objects import JsonObject

_PLAIN_WIDTH = 130  # of a file or a pipe, where rich would otherwise fold lines at 80
_HEADS = {"activations": "activa-\ntions", "optimizer": "opti-\nmizer"}


def title(plan: RunPlan) -> str:
    """The recipe in one line."""
    size = plan.sizes["policy"]
    recipe = plan.recipe
    model = f"{amount(size.parameters / 1e9)} B parameters"
    if size.shape.num_experts:
        model += f" ({amount(size.active_parameters / 1e9)} B active)"
    nodes = f"{plan.num_nodes} node{'s' * (plan.num_nodes > 1)}"
    where = f"{recipe.placement.gpus} {plan.hardware.name} in {nodes}"
    if recipe.placement.spare_nodes:
        where += f", and {recipe.placement.spare_nodes} spare"
    return f"{recipe.run.name}: {recipe.algorithm.name}, {model}, on {where}"


def reward_result(plan: RunPlan) -> str:
    """Whether it fits, in one line."""
    phase = plan.memory.peak_phase
    share = plan.memory.peak_bytes / plan.hardware.memory_bytes
    fills = f"{share:.0%} of a GPU in {phase}, its fullest phase"
    if not plan.fits:
        return f"does not fit: {fills}"
    return f"fits: {fills}; {amount(plan.step.total_s)} s a step (an estimate)"


def parallel_sizes(models: Iterable[str], size: ModelSize) -> str:
    """The names of models that have one layout, and its axes, in one line."""
    layout = size.layout
    words = f"{_joined(models)}: tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"
    if layout.max_cp > 1:
        words += f", rows over up to {layout.max_cp} of dp"
    if layout.vpp > 1:
        words += f" (vpp {layout.vpp})"
    if size.shape.num_experts:
        words += f", experts etp {layout.etp} x ep {layout.ep} x edp {layout.edp}"
    return words


def engines(plan: RunPlan) -> str:
    """The engines in one line."""
    if servers := plan.recipe.rollout.engine.external:
        return (
            f"{len(servers)} SGLang servers of others, on none of these slots: {', '.join(servers)}"
        )
    engine = plan.engine
    words = f"{engine.count} of tp {engine.tp}, ep {engine.ep}"
    if engine.dp > 1:
        words += f", dp {engine.dp}"
    if engine.deepep:
        words += ", experts by DeepEP"
    kind = engine.precision.in_words(plan.recipe.model.dtype)
    return f"{words} in {kind} on slots {spans(range(engine.first, engine.end))}"


def amount(value: float) -> str:
    """A number with three digits, or with all before the decimal point: 1,339 42.1 3.01 0.305 0."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    if digits < 6:
        return f"{value:,.{digits}f}"
    return f"{value:.1e}"


def _gigabytes(num_bytes: float) -> str:
    return amount(num_bytes / 1e9)


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
    for part in (_placement, _memory, _batch, _rollout, _reshard, _experts, _step):
        if part is _experts and not plan.experts:
            continue
        console.print()
        console.print(part(plan))


def _placement(plan: RunPlan) -> RenderableType:
    per_node = plan.recipe.placement.gpus_per_node
    table = empty_table("who sits where", "models", "stage", "nodes", "GPU slots", "decoder layers")
    lines = []
    for models in plan.same_placement():
        size = plan.sizes[models[0]]
        for stage, slots in enumerate(size.stage_slots()):
            nodes = sorted({slot // per_node for slot in slots})
            places = (spans(numbers) for numbers in (nodes, slots, size.layers(stage)))
            table.add_row(_joined(models), str(stage), *places)
        lines.append(parallel_sizes(models, size))
    policy = plan.sizes["policy"]
    if policy.model.facts:
        lines.append(f"model.path: {weights_in_words(policy.shape, policy.model.facts)}")
    if policy.lora:
        lines.append(f"lora: {adapters_in_words(policy.shape, policy.lora)}")
    lines.append(f"engines: {engines(plan)}")
    if more := plan.recipe.rollout.engine.most - plan.engine.count:
        further = range(plan.engine.end, plan.engine.end + more * plan.engine.tp)
        lines.append(
            f"further engines: up to {more} on slots {spans(further)}, idle until megarl engines asks for them"
        )
    if plan.spare_nodes:
        lines.append(
            f"spare nodes: {spans(plan.spare_nodes)}, idle until one replaces a node that died"
        )
    return Group(table, *map(text, lines))


def _memory(plan: RunPlan) -> RenderableType:
    """GB of the fullest GPU in each phase."""
    memory = plan.memory
    tables = {phase: parts.by_name() for phase, parts in memory.device.items()}
    used = [part for part in PARTS if any(parts[part] for parts in tables.values())]
    names = [_HEADS.get(part, part.replace("_", "\n")) for part in used]
    table = empty_table("memory of the fullest GPU, GB", "phase", *names, "total", "share")
    for phase, parts in tables.items():
        total = memory.device[phase].total_bytes
        share = total / memory.capacity_bytes
        style = "bold" if phase == memory.peak_phase else ""
        if share > 1:
            style = "bold red"
        row = [amount(round(parts[part] / 1e9, 2)) for part in used]
        table.add_row(phase, *row, _gigabytes(total), f"{share:.0%}", style=style)
    card = f"{plan.hardware.name} has {_gigabytes(memory.capacity_bytes)} GB"
    slot = memory.fullest_slot[memory.peak_phase]
    purposes = [
        f"{name.replace('_', ' ')} {_gigabytes(size)}" for name, size in memory.host.items()
    ]
    host = f"{_gigabytes(memory.host_bytes)} of {_gigabytes(memory.host_capacity_bytes)} GB"
    return Group(
        table,
        text(f"{card}; {memory.peak_phase} takes most, on slot {slot}"),
        text(f"the fullest node's host holds {host}: {', '.join(purposes)}"),
    )


def _batch(plan: RunPlan) -> RenderableType:
    samples = plan.samples
    table = empty_table(
        "what a step trains on",
        "model",
        "updates",
        "DP\nranks",
        "sequen-\nces",
        "tokens",
        "micro-\nbatches",
        "if all were\nlongest",
        "bubble",
        "balance",
    )
    for model, share in plan.shares.items():
        table.add_row(
            model.replace("_", " "),
            str(share.updates),
            str(share.dp),
            amount(share.sequences),
            amount(share.tokens),
            amount(share.micro_batches),
            f"{amount(share.tokens_full)} in {amount(share.micro_batches_full)}",
            f"{share.bubble:.0%}",
            f"{share.balance:.0%}",
        )
    words = f"{samples.prompts:,} prompts make {samples.num_trained:,} samples"
    if samples.drawn_prompts != samples.prompts:
        words += f", {samples.drawn_prompts:,} prompts drawn"
    if saved := plan.shares["policy"].saved_prompts:
        words += f"; {saved:.0%} of them share the prompt of another (train.share_prefixes)"
    mean = f"{samples.lengths.mean():,.0f} tokens in the mean (assumed)"
    return Group(
        table,
        text(f"{words}; {mean}, {samples.longest:,} at most"),
        text("sequences, tokens and micro-batches are of one rank and one update"),
        *(text(line, style="yellow") for line in plan.advice),
    )


def _rollout(plan: RunPlan) -> RenderableType:
    if plan.recipe.rollout.engine.external:
        return text("the rollout: on GPUs of others, whose memory and time are not in this plan")
    rollout = plan.rollout
    cache = plan.memory.kv
    rows = {
        "tokens in its KV cache": f"{cache.tokens:,}",
        "sequences at once, all at the longest": f"{cache.concurrency_longest:,}",
        "sequences at once, as long as they run": f"{cache.concurrency_mean:,}",
        "sequences of a step": f"{cache.wanted:,}",
        "sequences at once, as SGLang admits them": f"{rollout.running:,}",
        "times that a sequence is retracted from a full cache": f"{rollout.retracted:,}",
        "their tokens read again, over the responses' tokens": f"{rollout.again_share:.1%}",
        "tokens a second, all engines": amount(rollout.tokens_per_s),
    }
    longest = "the longest response"
    if plan.recipe.episode and rollout.longest:
        longest = "the longest episode"
        rows |= _episode_rows(plan, plan.recipe.episode)
    if plan.phases:
        longest = "the most tokens that a phase adds"
        rows |= _phase_rows(plan.phases)
    table = _facts("what an engine holds", rows)
    if not rollout.longest:  # nothing is sampled
        return table
    alone = f"{longest} alone, {rollout.longest:,} tokens one after the other: {amount(rollout.alone_s)} s"
    return Group(table, text(f"{alone} of the rollout's {amount(rollout.total_s)} s"))


def _episode_rows(plan: RunPlan, episode: EpisodeConfig) -> dict[str, str]:
    turns = plan.samples.turns
    count = plan.engine.count
    rollout = plan.rollout
    rows = {
        "turns of an episode, mean (assumed) and maximum": f"{amount(turns.mean)}, {turns.most}",
        "observation tokens of an episode, mean (assumed)": amount(turns.observed_tokens),
        "seconds between its turns, without the tools' own": amount(rollout.turns_s),
        "seconds of the longest, at most, without the tools' own": amount(rollout.longest_s(count)),
        "worker processes of tools, all engines": f"{count * episode.workers:,}",
    }
    if load := plan.tool_load:
        calls = f"{load.calls:,.0f}, {amount(load.calls_per_s(rollout.total_s))}"
        rows["turns of a step that call tools (assumed), and a second"] = calls
        every = f"every call used its whole {load.call_s:g} s ({load.limit})"
        rows[f"cores of tools, if {every}"] = amount(load.cores(rollout.total_s))
    return rows


def _phase_rows(phases: PhasedRollout) -> dict[str, str]:
    ages = f"{amount(phases.token_mean)}, {phases.token_max}; never more than {phases.bound}"
    return {
        "phases of a step": amount(phases.phases),
        "open sequences in a phase": f"{phases.open_sequences:,}",
        "their tokens at its end": f"{phases.open_tokens:,}",
        "earlier phases' tokens read again, over the responses'": f"{phases.again_share:.1%}",
        "seconds to read them again": amount(phases.again_s),
        "versions by which tokens are stale, mean and maximum": ages,
    }


def _reshard(plan: RunPlan) -> RenderableType:
    reshard = plan.reshard
    if plan.recipe.rollout.engine.external:
        return text(
            f"a reshard: files, which every server reads: {amount(reshard.expected_s)} s expected"
        )
    lora = plan.sizes["policy"].lora
    table = empty_table("a reshard, GB of one GPU", "", "mean", "max")
    rows = {
        "engine's adapters" if lora and lora.in_slots else "engine weights": reshard.dest_bytes,
        "from the own GPU": reshard.local_bytes,
        "in over NVLink": reshard.nvlink_bytes,
        "in over the fabric": reshard.fabric_in_bytes,
        "out over the fabric": reshard.fabric_out_bytes,
        "gathering everything would bring": reshard.gather_everything_bytes,
    }
    for name, spread in rows.items():
        table.add_row(name, _gigabytes(spread.mean), _gigabytes(spread.max))
    seconds = f"{amount(reshard.expected_s)} s expected, {amount(reshard.bound_s)} s at least"
    rounds = f"{reshard.rounds} rounds of {plan.recipe.reshard.round_bytes / 1e6:,.0f} MB"
    gathering = f"gathering everything: {amount(reshard.gather_bound_s)} s at best"
    return Group(table, text(f"{seconds}, in {rounds}; {gathering}"))


def _experts(plan: RunPlan) -> RenderableType:
    names = {"alltoall": "all-to-all", "flex": "flex (DeepEP)"}
    sent = plan.experts
    table = empty_table(
        "tokens to experts and back, GB that a GPU sends", "", *(names[name] for name in sent)
    )
    table.add_row("over NVLink", *(_gigabytes(by.nvlink_bytes) for by in sent.values()))
    table.add_row("over the fabric", *(_gigabytes(by.fabric_bytes) for by in sent.values()))
    own = names["flex" if is_flex(plan.recipe.train) else "alltoall"]
    words = f"of the policy in a forward pass over a step's samples; the recipe uses {own}"
    return Group(table, text(words))


def _step(plan: RunPlan) -> RenderableType:
    table = empty_table("a step, seconds", "phase", "s", "share", "of what")
    rollout = plan.rollout
    step = plan.step
    details: dict[str, dict[str, float]] = {
        "train" if role == "policy" else role: {
            name.removesuffix("_s").replace("_", " "): seconds
            for name, seconds in vars(times).items()
        }
        for role, times in plan.learning.items()
    }
    lines = []
    if rollout.beside_s:
        phase = f"a phase of {amount(rollout.mean_beside_s)} s is sampled by the weights before"
        lines.append(f"beside {amount(step.learning_s)} s of training {phase}")
    else:
        details["rollout"] = {
            "reading prompts": rollout.prefill_s,
            "between turns": rollout.turns_s,
            "its last half-empty stretch": rollout.tail_s,
        }
    for phase, seconds in step.by_phase().items():
        parts = details.get(phase, {}).items()
        of_what = ", ".join(f"{name} {amount(part_s)}" for name, part_s in parts if part_s)
        table.add_row(phase, amount(seconds), f"{seconds / step.total_s:.0%}", of_what)
    table.add_row("all", amount(step.total_s), "", "", style="bold")
    for what, wait_s in {"sample": plan.engines_wait_s, "train": plan.ranks_wait_s}.items():
        if wait_s:
            lines.append(f"GPUs that only {what} wait {amount(wait_s)} s of a step")
    lines.append(losses(plan))
    words = "An estimate from the hardware's table, which no run on GPUs has been held against yet: docs/plan.md."
    if not plan.fits:
        words += " It means little before the recipe fits."
    return Group(table, *map(text, lines), text(words, style="dim"))


def losses(plan: RunPlan) -> str:
    """The seconds that are lost with each part that may die, in one line."""
    cost = plan.losses
    words = f"seconds lost besides the start of processes: with an engine {amount(cost.engine_s)}"
    if cost.rank_s is not None and cost.node_s is not None:
        words += f"; with a rank {amount(cost.rank_s)}, with a node {amount(cost.node_s)}"
        words += f", from {cost.source}"
    if cost.restart_s is not None:
        words += f"; with the whole run {amount(cost.restart_s)}"
    return words


def _joined(models: Iterable[str]) -> str:
    return " and ".join(models).replace("_", " ")


_FOLDED = ("of what", "engines", "training ranks")  # columns of words


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
        folds = column in _FOLDED
        table.add_column(
            column, justify="right" if place and not folds else "left", no_wrap=not folds
        )
    return table


def _facts(title: str, rows: Mapping[str, str]) -> Table:
    table = empty_table(title, "", "")
    for row in rows.items():
        table.add_row(*row)
    return table


def text(words: str, style: str = "") -> Text:
    return Text(printable(words), style=style)


def page(plan: RunPlan) -> str:
    """The report as it suits stdout."""
    return rendered(lambda console: show(plan, console))


def rendered(shows: Callable[[Console], None]) -> str:
    """What is printed, in colours and as wide as a terminal, or plain and of a fixed width."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    with console.capture() as capture:
        shows(console)
    return capture.get().rstrip("\n")


def plan_json(plan: RunPlan) -> JsonObject:
    """Values of json's own types alone; docs/plan.md lists the keys."""
    samples = plan.samples
    policy = plan.sizes["policy"]
    memory = plan.memory
    return {
        "name": plan.recipe.run.name,
        "fits": plan.fits,
        "errors": [vars(error) for error in plan.errors],
        "hardware": plan.hardware.model_dump(),
        "model": {
            "parameters": policy.parameters,
            "active_parameters": policy.active_parameters,
            "file_bytes": file_bytes(policy.shape, policy.model.facts)
            if policy.model.facts
            else None,
        },
        "ranks": [_slot_json(slot) for slot in plan.slots],
        "spare_nodes": list(plan.spare_nodes),
        "memory": {
            **{name: value for name, value in vars(memory).items() if name not in ("errors", "kv")},
            "peak_phase": memory.peak_phase,
            "device": {
                phase: asdict(of) | {"total_bytes": of.total_bytes}
                for phase, of in memory.device.items()
            },
            "host_bytes": memory.host_bytes,
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
        "experts": {name: asdict(sent) for name, sent in plan.experts.items()},
        "learning": {role: asdict(times) for role, times in plan.learning.items()},
        "step": asdict(plan.step) | {"total_s": plan.step.total_s},
        "losses": asdict(plan.losses),
    }


def _episodes_json(plan: RunPlan) -> JsonObject:
    load = plan.tool_load
    rollout_s = plan.rollout.total_s
    tools = None
    if load and rollout_s:
        tools = asdict(load) | {
            "calls_per_s": load.calls_per_s(rollout_s),
            "cores": load.cores(rollout_s),
        }
    return asdict(plan.samples.turns) | {"tools": tools}


def _phases_json(phases: PhasedRollout) -> JsonObject:
    values = asdict(phases)
    del values["time"]  # it is `rollout`
    return values


def _slot_json(slot: Slot) -> JsonObject:
    values = asdict(slot)
    ranks = values.pop("ranks")
    return values | ranks
