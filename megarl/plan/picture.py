"""A plan as a picture: the placement, the GPUs' memory in each phase, the seconds of a step and of a reshard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megarl.placement.roles import RoleName
from megarl.plan.memory_parts import PARTS
from megarl.plan.report import amount, engines, parallel_sizes, reward_result, title
from megarl.plan.run_plan import RunPlan, Slot

_WIDTH_INCHES = 16.0
_MOST_ROWS = 8  # so many nodes at most are rows, with words in every cell
_MOST_COLUMNS = 64  # of more nodes, so many stand side by side
_STAGE_COLOURS = "turbo"
_PART_COLOURS = (  # of memory_parts.PARTS
    "#4059ad",
    "#6b9ac4",
    "#97d8c4",
    "#eff2f1",
    "#c9cebd",
    "#f4b942",
    "#f2804a",
    "#a4036f",
    "#8d99ae",
)
_PHASE_COLOURS = {
    "rollout": "#f2804a",
    "score": "#c9cebd",
    "critic": "#97d8c4",
    "train": "#4059ad",
    "ahead": "#f4b942",
    "reshard": "#a4036f",
    "save": "#8d99ae",
}
_OTHERS = "#e8e8e8"
_IDLE = "#ffffff"
_FRAME = "#111111"
_RED = "#b00020"


@dataclass(frozen=True)
class _Grid:
    """How slots become cells. down: a row is a node; else nodes stand side by side, in bands of `_MOST_COLUMNS`."""

    down: bool
    num_nodes: int
    per_node: int

    @property
    def bands(self) -> int:
        if self.down:
            return 1
        return -(-self.num_nodes // _MOST_COLUMNS)

    @property
    def columns(self) -> int:
        if self.down:
            return self.per_node
        return min(self.num_nodes, _MOST_COLUMNS)

    @property
    def rows(self) -> int:
        """Of all bands, with an empty one between two."""
        if self.down:
            return self.num_nodes
        return self.bands * (self.per_node + 1) - 1

    @property
    def cell_inches(self) -> tuple[float, float]:
        """Width and height."""
        if self.down:
            return min(2.6, _WIDTH_INCHES * 0.9 / self.columns), 0.72
        wide = min(1.1, _WIDTH_INCHES * 0.93 / self.columns)
        return wide, min(0.5, wide)

    def boxes(self, slots: range) -> list[tuple[float, float, float, float]]:
        """(left, top, width, height) of a run of slots, joined over neighbouring nodes of equal rows."""
        parts: list[list[int]] = []  # [first node, last node, first GPU, last GPU]
        for node in range(slots.start // self.per_node, (slots.stop - 1) // self.per_node + 1):
            start = node * self.per_node
            low = max(slots.start, start) - start
            high = min(slots.stop, start + self.per_node) - 1 - start
            joins = (
                bool(parts)
                and parts[-1][1:] == [node - 1, low, high]
                and (self.down or node % _MOST_COLUMNS)
            )
            if joins:
                parts[-1][1] = node
            else:
                parts.append([node, node, low, high])
        return [self._box(*part) for part in parts]

    def _box(self, first: int, last: int, low: int, high: int) -> tuple[float, float, float, float]:
        if self.down:
            return low, first, high - low + 1, last - first + 1
        band, column = divmod(first, _MOST_COLUMNS)
        return column, band * (self.per_node + 1) + low, last - first + 1, high - low + 1


def draw(plan: RunPlan, path: Path) -> None:
    """Write the picture as a PNG."""
    per_node = min(plan.recipe.placement.gpus_per_node, len(plan.slots))
    grid = _Grid(plan.num_nodes <= _MOST_ROWS, plan.num_nodes, per_node)
    groups = plan.same_placement()  # a map for each group
    heights = [*[grid.rows * grid.cell_inches[1] + 0.75] * len(groups), 2.4, 2.4]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.6), dpi=110, layout="constrained")
    maps = [[place, place] for place in range(len(groups))]
    places = [*maps, ["memory", "step"], ["memory", "reshard"]]
    axes = figure.subplot_mosaic(places, height_ratios=heights, width_ratios=[3, 2])
    for place, models in enumerate(groups):
        _draw_grid(axes[place], plan, grid, models)
    _draw_memory(axes["memory"], plan)
    _draw_step(axes["step"], plan)
    _draw_reshard(axes["reshard"], plan)
    words = f"{title(plan)}\n{reward_result(plan)}"
    figure.suptitle(words, fontsize=13, color="black" if plan.fits else _RED)
    FigureCanvasAgg(figure).print_png(path)


def _draw_grid(axes: Any, plan: RunPlan, grid: _Grid, models: Sequence[RoleName]) -> None:
    """A colour for each pipeline stage of `models`, which have one layout; a frame for each engine."""
    model = models[0]
    size = plan.sizes[model]
    colours = _stage_colours(size.layout.pp)
    for slot in plan.slots:
        at = slot.ranks.get(model)
        if at:
            colour = colours[at.pp]
        elif slot.ranks or slot.engine is not None:
            colour = _OTHERS
        else:
            colour = _IDLE
        ((left, top, *_),) = grid.boxes(range(slot.slot, slot.slot + 1))
        axes.add_patch(
            Rectangle((left, top), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.5)
        )
        if grid.down:
            _write(axes, left + 0.5, top + 0.5, _label(slot, model), fontsize=8)
    for stage, slots in enumerate(size.stage_slots() if not grid.down else ()):
        left, top, width, height = max(grid.boxes(slots), key=lambda box: box[2] * box[3])
        behind = {"facecolor": colours[stage], "edgecolor": "none", "boxstyle": "round,pad=0.15"}
        middle = left + width / 2, top + height / 2
        _write(axes, *middle, str(stage), fontsize=11, fontweight="bold", bbox=behind, zorder=3)
    layout = plan.engine
    for first in range(layout.first, layout.end, layout.tp):
        for left, top, width, height in grid.boxes(range(first, first + layout.tp)):
            corner = (left + 0.03, top + 0.03)
            sides = (width - 0.06, height - 0.06)
            axes.add_patch(Rectangle(corner, *sides, fill=False, edgecolor=_FRAME, linewidth=1.8))
    _name_nodes(axes, grid)
    wide, high = grid.cell_inches
    axes.set_xlim(-0.75 if grid.down else -0.1, grid.columns + 0.1)
    axes.set_ylim(grid.rows + 0.1, -0.1 if grid.down else -0.75)
    axes.set_aspect(high / wide, anchor="W")
    axes.axis("off")
    key = f"colours and numbers: pipeline stages; frames: engines, {engines(plan)}"
    axes.set_title(f"{parallel_sizes(models, size)}.   {key}", fontsize=10, loc="left")


def _write(axes: Any, x: float, y: float, words: str, **style: Any) -> None:
    axes.text(x, y, words, ha="center", va="center", **style)


def _name_nodes(axes: Any, grid: _Grid) -> None:
    if grid.down:
        for node in range(grid.num_nodes):
            axes.text(-0.08, node + 0.5, f"node {node}", ha="right", va="center", fontsize=9)
        return
    every = max(1, grid.columns // 16)
    for node in range(0, grid.num_nodes, every):
        band, column = divmod(node, _MOST_COLUMNS)
        words = f"node {node}" if column == 0 else str(node)
        axes.text(column + 0.1, band * (grid.per_node + 1) - 0.15, words, fontsize=8)


def _stage_colours(count: int) -> list[Any]:
    """Light enough for black words, and neighbours apart."""
    from matplotlib import colormaps

    shades = [
        colormaps[_STAGE_COLOURS](0.08 + 0.84 * place / max(1, count - 1)) for place in range(count)
    ]
    return [tuple(0.45 * part + 0.55 for part in shade[:3]) for shade in shades]


def _label(slot: Slot, model: RoleName) -> str:
    at = slot.ranks.get(model)
    words = []
    if at:
        words.append(f"stage {at.pp}  tp {at.tp}  dp {at.dp}")
        words.append(f"ep {at.ep}  etp {at.etp}  edp {at.edp}")
    if slot.engine is not None:
        words.append(f"engine {slot.engine}, rank {slot.engine_rank}")
    return "\n".join(words) or ("" if slot.ranks else "idle")


def _draw_memory(axes: Any, plan: RunPlan) -> None:
    """The parts of the fullest GPU in each phase, and the card's memory."""
    phases = list(plan.memory.device)
    tables = [parts.by_name() for parts in plan.memory.device.values()]
    bottoms = np.zeros(len(phases))
    for part, colour in zip(PARTS, _PART_COLOURS, strict=True):
        heights = np.array([table[part] / 1e9 for table in tables])
        if heights.any():
            bars = axes.bar(
                phases, heights, 0.62, bottoms, color=colour, edgecolor="#555555", linewidth=0.4
            )
            bars.set_label(part.replace("_", " "))
        bottoms += heights
    capacity = plan.hardware.memory_bytes / 1e9
    for place, total in enumerate(bottoms):
        colour = _RED if total > capacity else "black"
        axes.text(place, total + capacity * 0.012, amount(total), ha="center", color=colour)
    axes.axhline(capacity, color=_RED, linestyle="--", linewidth=1.3)
    words = f"{plan.hardware.name}: {capacity:.1f} GB"
    behind = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0}
    end = len(phases) - 0.45
    axes.text(
        end, capacity * 1.01, words, color=_RED, va="bottom", ha="right", fontsize=9, bbox=behind
    )
    axes.set_ylim(0, max(capacity, *bottoms) * 1.12)
    axes.set_xlim(-0.6, len(phases) - 0.4)
    axes.set_ylabel("GB on the fullest GPU")
    axes.set_title("memory by phase", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_step(axes: Any, plan: RunPlan) -> None:
    step = plan.step.by_phase()
    _bars(axes, step, [_PHASE_COLOURS[phase] for phase in step], "s")
    axes.set_title(f"a step: {amount(plan.step.total_s)} s (an estimate)", loc="left", fontsize=10)


def _draw_reshard(axes: Any, plan: RunPlan) -> None:
    reshard = plan.reshard
    values = {
        "gather everything": reshard.gather_everything_bytes.max / 1e9,
        "over the fabric": reshard.fabric_in_bytes.max / 1e9,
        "over NVLink": reshard.nvlink_bytes.max / 1e9,
        "from the own GPU": reshard.local_bytes.max / 1e9,
    }
    _bars(axes, values, ["#bbbbbb", *[_PHASE_COLOURS["reshard"]] * 3], "GB")
    seconds = f"{amount(reshard.expected_s)} s, at least {amount(reshard.bound_s)} s"
    axes.set_title(f"reshard, GB into a GPU: {seconds}", loc="left", fontsize=10)


def _bars(axes: Any, values: dict[str, float], colours: list[str], unit: str) -> None:
    bars = axes.barh(list(values), list(values.values()), color=colours)
    labels = [f"{amount(value)} {unit}" for value in values.values()]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_xlim(0, (max(values.values()) or 1.0) * 1.18)
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xticks([])
