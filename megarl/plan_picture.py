"""A plan as one picture: who sits where, what fills the GPUs in each phase, what a step and a reshard take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megarl.plan import Plan
from megarl.plan_map import Slot
from megarl.plan_report import amount

_WIDTH = 16.0  # inches
_NODES_PER_BAND = 64  # side by side; more nodes go on below
_LABEL_INCHES = 0.62  # a cell as wide as this has room for words
_STAGE_COLOURS = "turbo"
_PART_COLOURS = {
    "weights": "#4059ad", "grads": "#6b9ac4", "optimizer": "#97d8c4", "activations": "#eff2f1", "logits": "#c9cebd",
    "engine_weights": "#f4b942", "kv_cache": "#f2804a", "reshard": "#a4036f", "other": "#8d99ae",
}  # fmt: skip
_PHASE_COLOURS = {
    "rollout": "#f2804a", "score": "#c9cebd", "critic": "#97d8c4", "train": "#4059ad", "reshard": "#a4036f",
    "save": "#8d99ae",
}  # fmt: skip
_OTHER_MODEL, _NOBODY, _ENGINE_EDGE = "#e8e8e8", "#ffffff", "#111111"


def draw(plan: Plan, path: Path) -> None:
    """Write the picture as a PNG."""
    grids = plan.alike()  # one map for all models that lie alike
    bands = -(-plan.num_nodes // _NODES_PER_BAND)
    rows = min(plan.recipe.placement.gpus_per_node, len(plan.slots))
    columns = min(plan.num_nodes, _NODES_PER_BAND)
    cell = min(1.1, (_WIDTH - 1.6) / columns, 4.5 / rows)
    grid_inches = [bands * (rows * cell + 0.35) + 0.45 for _ in grids]
    height = sum(grid_inches) + 5.4
    figure = Figure(figsize=(_WIDTH, height), dpi=110, layout="constrained")
    ratios = [*grid_inches, 5.0]
    outer = figure.add_gridspec(len(ratios), 1, height_ratios=ratios)
    for place, models in enumerate(grids):
        title = " and ".join(models).replace("_", " ")
        _draw_grid(figure.add_subplot(outer[place]), plan, title, models[0], cell)
    below = outer[len(grids)].subgridspec(1, 2, width_ratios=[3, 2])
    _draw_memory(figure.add_subplot(below[0]), plan)
    right = below[1].subgridspec(2, 1)
    _draw_step(figure.add_subplot(right[0]), plan)
    _draw_reshard(figure.add_subplot(right[1]), plan)
    figure.suptitle(f"{plan.title}\n{plan.verdict}", fontsize=13, color="black" if plan.fits else "#b00020")
    FigureCanvasAgg(figure).print_png(path)


def _draw_grid(axes: Any, plan: Plan, title: str, model: str, cell: float) -> None:
    """Nodes from left to right, their GPUs downwards; colour is the pipeline stage, a frame is an engine."""
    per_node = min(plan.recipe.placement.gpus_per_node, len(plan.slots))
    columns = min(plan.num_nodes, _NODES_PER_BAND)
    layout = plan.layouts[model][1]
    colours = _stage_colours(layout.pp)
    for slot in plan.slots:
        column, row = _place(slot, per_node)
        at = slot.ranks.get(model)
        colour = colours[at.pp] if at else _OTHER_MODEL if slot.ranks or slot.engine is not None else _NOBODY
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.4))
        if cell >= _LABEL_INCHES:
            axes.text(column + 0.5, row + 0.5, _label(slot, model), ha="center", va="center", fontsize=7)
    if cell < _LABEL_INCHES:
        _label_stages(axes, plan, model, per_node)
    _frame_engines(axes, plan, per_node)
    bands = -(-plan.num_nodes // _NODES_PER_BAND)
    for band in range(bands):
        for column in range(0, columns, max(1, columns // 16)):
            node = band * _NODES_PER_BAND + column
            if node < plan.num_nodes:
                top = band * (per_node + 1)
                axes.text(column + 0.5, top - 0.15, f"node {node}" if columns <= 16 else node, ha="center", fontsize=7)
    axes.set_xlim(-0.1, columns + 0.1)
    axes.set_ylim(bands * (per_node + 1) - 0.8, -0.9)
    axes.set_aspect("equal")
    axes.axis("off")
    words = f"{title}: {plan.axes_of(model)}. Colours: pipeline stages; frames: engines, {plan.engines_words}"
    axes.set_title(words, fontsize=10, loc="left")


def _stage_colours(count: int) -> list[Any]:
    """Light enough for black words, and neighbours apart."""
    from matplotlib import colormaps

    shades = [colormaps[_STAGE_COLOURS](0.08 + 0.84 * place / max(1, count - 1)) for place in range(count)]
    return [tuple(0.45 * part + 0.55 for part in shade[:3]) for shade in shades]


def _place(slot: Slot, per_node: int) -> tuple[int, int]:
    """Column and row of a slot's cell; a band ends with an empty row."""
    band, column = divmod(slot.node, _NODES_PER_BAND)
    return column, band * (per_node + 1) + slot.gpu


def _label(slot: Slot, model: str) -> str:
    at, words = slot.ranks.get(model), []
    if at:
        words += [f"stage {at.pp}", f"tp {at.tp}  dp {at.dp}", f"ep {at.ep}"]
    if slot.engine is not None:
        words.append(f"engine {slot.engine}.{slot.engine_rank}")
    return "\n".join(words) or "idle"


def _label_stages(axes: Any, plan: Plan, model: str, per_node: int) -> None:
    """The number of each stage in the middle of its first whole run of cells."""
    for stage in plan.stages:
        if stage.model != model:
            continue
        cells = [_place(plan.slots[slot], per_node) for slot in stage.slots]
        row = cells[0][1] // (per_node + 1) * (per_node + 1)
        columns = [column for column, at in cells if at // (per_node + 1) == row // (per_node + 1)]
        rows = [at - row for column, at in cells if column == columns[0]]
        middle = row + (per_node / 2 if len(set(columns)) > 1 else sum(rows) / len(rows) + 0.5)
        x = (min(columns) + max(columns) + 1) / 2
        axes.text(x, middle, str(stage.stage), ha="center", va="center", fontsize=11, fontweight="bold")


def _frame_engines(axes: Any, plan: Plan, per_node: int) -> None:
    for engine in range(plan.engine.count):
        first = plan.engine.first + engine * plan.engine.tp
        boxes: dict[tuple[int, int], list[int]] = {}  # (band, column) -> rows
        for slot in plan.slots[first : first + plan.engine.tp]:
            column, row = _place(slot, per_node)
            boxes.setdefault((row // (per_node + 1), column), []).append(row)
        for (band, column), rows in _joined(boxes):
            width, low, high = column[1] - column[0] + 1, min(rows), max(rows) + 1
            del band
            corner = (column[0] + 0.04, low + 0.04)
            size = width - 0.08, high - low - 0.08
            axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=_ENGINE_EDGE, linewidth=1.6))


def _joined(boxes: dict[tuple[int, int], list[int]]) -> list[tuple[tuple[int, tuple[int, int]], list[int]]]:
    """Neighbouring columns with the same rows as one box: ((band, (first, last column)), rows)."""
    found: list[tuple[tuple[int, tuple[int, int]], list[int]]] = []
    for (band, column), rows in sorted(boxes.items()):
        if found:
            (other, (start, end)), same = found[-1]
            if (other, end, same) == (band, column - 1, rows):
                found[-1] = (band, (start, column)), rows
                continue
        found.append(((band, (column, column)), rows))
    return found


def _draw_memory(axes: Any, plan: Plan) -> None:
    """The fullest GPU of each phase, in parts, against what the card has."""
    phases = list(plan.memory.device)
    bottoms = [0.0] * len(phases)
    for part, colour in _PART_COLOURS.items():
        heights = [getattr(plan.memory.device[phase], f"{part}_bytes") / 1e9 for phase in phases]
        if any(heights):
            label = part.replace("_", " ")
            axes.bar(phases, heights, 0.62, bottoms, color=colour, label=label, edgecolor="#555555", linewidth=0.4)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    capacity = plan.hardware.memory_bytes / 1e9
    for place, total in enumerate(bottoms):
        too_much = total > capacity
        words = amount(total)
        axes.text(place, total + capacity * 0.012, words, ha="center", color="#b00020" if too_much else "black")
    axes.axhline(capacity, color="#b00020", linestyle="--", linewidth=1.3)
    words = f"{plan.hardware.name}: {capacity:.1f} GB"
    axes.text(len(phases) - 0.45, capacity, words, color="#b00020", va="bottom", ha="right", fontsize=9)
    axes.set_ylim(0, max(capacity, *bottoms) * 1.12)
    axes.set_xlim(-0.6, len(phases) - 0.4)
    axes.set_ylabel("GB on the fullest GPU")
    axes.set_title("memory by phase", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_step(axes: Any, plan: Plan) -> None:
    times = {name: getattr(plan.step, f"{name}_s") for name in _PHASE_COLOURS}
    _bars(axes, {name: seconds for name, seconds in times.items() if seconds}, _PHASE_COLOURS, "s")
    axes.set_title(f"a step: {amount(plan.step.total_s)} s (an estimate)", loc="left", fontsize=10)


def _draw_reshard(axes: Any, plan: Plan) -> None:
    found = plan.reshard
    values = {
        "gather everything": found.gather_everything_bytes.max / 1e9,
        "over the fabric": found.fabric_in_bytes.max / 1e9,
        "over NVLink": found.nvlink_bytes.max / 1e9,
        "from the own GPU": found.local_bytes.max / 1e9,
    }
    colours = dict.fromkeys(values, _PHASE_COLOURS["reshard"]) | {"gather everything": "#bbbbbb"}
    _bars(axes, values, colours, "GB")
    words = f"reshard, GB into a GPU: {amount(found.expected_s)} s, at least {amount(found.bound_s)} s"
    axes.set_title(words, loc="left", fontsize=10)


def _bars(axes: Any, values: dict[str, float], colours: dict[str, str], unit: str) -> None:
    names: Sequence[str] = list(values)
    axes.barh(names, list(values.values()), color=[colours[name] for name in names])
    largest = max(values.values(), default=1.0) or 1.0
    for place, value in enumerate(values.values()):
        axes.text(value + largest * 0.01, place, f"{amount(value)} {unit}", va="center", fontsize=8)
    axes.set_xlim(0, largest * 1.18)
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xticks([])
