"""Draw docs/architecture.svg, the rooms of megarl and what they import, from the source: draw_architecture.py

The rooms stand on the floors of `FLOORS`; tests/test_imports.py reads the same table and refuses imports that do not go
down. Of all imports the picture shows those that do not follow from others: where A imports B and B imports C, an
arrow from A to C is left out. Boxes are placed as Sugiyama, Tagawa and Toda do it (1981): an arrow that passes a floor
has a place there, floors are ordered by the mean of their neighbours, then shifted towards them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megarl"
PICTURE = ROOT / "docs" / "architecture.svg"
# Highest floor first: a room imports from lower floors alone. A room is a package of megarl/, or a module in it.
FLOORS: list[dict[str, str]] = [
    {"cli": "the command line"},
    {"commands": "what each command does", "doctor": "is this machine fit to train?"},
    {"report": "a run as one page"},
    {"controller": "the training loop", "plan": "memory and time without a GPU"},
    {
        "fleet": "engines, ranks, who has the memory",
        "preflight": "checks before any process starts",
    },
    {"recovery": "what dies is started anew"},
    {
        "rollout": "SGLang engines, reward functions",
        "training": "one rank: credit, batches, updates",
    },
    {
        "checkpoints": "Hugging Face files, run snapshots",
        "episodes": "the turns of an episode as tokens",
    },
    {
        "environments": "tools, games, agents, endpoint",
        "parallel": "Megatron-Core",
        "resharding": "from Megatron's shards to SGLang's",
    },
    {
        "cluster": "actors, network cards",
        "data": "files, prompts, streams of prompts",
        "placement": "layouts and roles",
        "samples": "the buffer, sums, sample files",
        "tracking": "records, curves",
    },
    {
        "algos": "advantages and losses",
        "config": "the recipe tree",
        "diagnosis": "why a run hangs or lacks memory",
        "disk": "faults of a disk",
        "isolation": "worker processes, the sandbox",
        "model": "family, config.json, tokenizer",
        "numerics": "outputs of layers, compared",
    },
    {"cpu": "Megatron and SGLang without a GPU", "types": "the nouns that cross rooms"},
    {
        "collector": "garbage collection, paused",
        "device": "CPU or GPU, decided once",
        "fp8": "codes, scales, exact products",
        "printable": "foreign text, escaped",
        "spelling": "did you mean",
        "timeline": "what each process did when",
    },
]
# told in the rooms that import them
LIBRARIES = {"megatron": "Megatron-Core", "ray": "Ray", "sglang": "SGLang"}
BOX_WIDTH, BOX_HEIGHT, FLOOR_HEIGHT, DIFF, MARGIN = 258, 52, 92, 22, 24
LANE_WIDTH = 12  # of an arrow that passes a floor
SWEEPS = 12
STYLE = """
  text { font-family: Helvetica, Arial, sans-serif; fill: #1b2733 }
  .room { font-size: 16px; font-weight: bold } .what { font-size: 12.5px; fill: #4a5a6a }
  .library { font-size: 11.5px; fill: #a4036f; text-anchor: end }
  rect { fill: #eef3f8; stroke: #4059ad } .door { fill: #fbeaf4; stroke: #a4036f }
  path { fill: none; stroke: #7d8ea0; stroke-width: 1.4 } marker path { fill: #7d8ea0; stroke: none }
"""

Node = str | tuple[str, str, int]  # a room, or an arrow (from, to) where it passes a floor


@dataclass(frozen=True)
class Edge:
    start: Node
    end: Node


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The package or module of megarl/ in which a module lies; "" for megarl itself."""
    return (module.split(".") + [""])[1]


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or lies in it."""
    return name == package or name.startswith(f"{package}.")


@cache
def imports(path: Path, *, lazy: bool = True) -> tuple[str, ...]:
    """Dotted names that a file imports (`a.b.c` for `from a.b import c`); lazy: also those inside functions."""
    return tuple(_imports(path, lazy))


def _imports(path: Path, lazy: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = (
        ast.walk(tree) if lazy else (node for statement in tree.body for node in _at_top(statement))
    )
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_top(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _at_top(child)


@cache
def own_modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of megarl."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def own_imports(path: Path, *, lazy: bool = True) -> set[str]:
    """The modules of megarl that a file imports."""
    modules = own_modules()
    names = {name for name in imports(path, lazy=lazy) if within(name, "megarl")}
    return {name if name in modules else name.rpartition(".")[0] for name in names}


def room_imports() -> dict[str, set[str]]:
    """Room -> the other rooms that its modules import."""
    imports_by_room: dict[str, set[str]] = {room: set() for floor in FLOORS for room in floor}
    for module, path in own_modules().items():
        if room := room_of(module):
            imports_by_room[room] |= {room_of(name) for name in own_imports(path)} - {room, ""}
    return imports_by_room


def shown(graph: Mapping[str, set[str]]) -> list[Edge]:
    """The imports that do not follow from others: the transitive reduction."""

    @cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(graph[room]).union(*(reached(other) for other in graph[room]))

    return [
        Edge(room, other)
        for room in sorted(graph)
        for other in sorted(graph[room])
        if not any(other in reached(between) for between in graph[room])
    ]


def with_lanes(edges: Sequence[Edge]) -> tuple[list[list[Node]], list[list[Edge]]]:
    """The nodes of each floor, and each arrow as its pieces from floor to floor."""
    floors: list[list[Node]] = [[*rooms] for rooms in FLOORS]
    floor_of = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    paths = []
    for edge in edges:
        assert isinstance(edge.start, str) and isinstance(edge.end, str)
        passed = range(floor_of[edge.start] + 1, floor_of[edge.end])
        lanes: list[Node] = [(edge.start, edge.end, floor) for floor in passed]
        for floor, lane in zip(passed, lanes, strict=True):
            floors[floor].append(lane)
        stops = [edge.start, *lanes, edge.end]
        paths.append([Edge(start, end) for start, end in zip(stops, stops[1:], strict=False)])
    return floors, paths


def width(node: Node) -> int:
    return BOX_WIDTH if isinstance(node, str) else LANE_WIDTH


def place(floors: list[list[Node]], pieces: Sequence[Edge]) -> dict[Node, float]:
    """Every node's centre: floors are sorted by the mean of each node's neighbours, then nodes moved as near as fits.

    Sweeps go down and up in turn; a node looks at the floor that the sweep comes from, in the last two at both.
    """
    above: dict[Node, list[Node]] = {node: [] for nodes in floors for node in nodes}
    below: dict[Node, list[Node]] = {node: [] for nodes in floors for node in nodes}
    for piece in pieces:
        above[piece.end].append(piece.start)
        below[piece.start].append(piece.end)
    centre: dict[Node, float] = {}
    for nodes in floors:
        centre |= _apart(nodes, dict.fromkeys(nodes, 0.0))
    for sweep in range(SWEEPS):
        is_down, is_last = sweep % 2 == 0, sweep >= SWEEPS - 2
        for nodes in floors if is_down else reversed(floors):
            wanted_centres = {}
            for node in nodes:
                near = (
                    above[node] + below[node]
                    if is_last
                    else above[node]
                    if is_down
                    else below[node]
                )
                wanted_centres[node] = (
                    sum(centre[other] for other in near) / len(near) if near else centre[node]
                )
            if not is_last:
                nodes.sort(key=lambda node: wanted_centres[node])
            centre |= _apart(nodes, wanted_centres)
    return centre


def _apart(nodes: Sequence[Node], wanted_centres: Mapping[Node, float]) -> dict[Node, float]:
    """Centres in this order, a gap between all boxes, with the least sum of squared distances from the wanted ones.

    Isotonic regression by pooling neighbours that violate the order (Ayer et al., 1955), on centres less offsets.
    """
    offsets, offset = [], 0.0
    for index, node in enumerate(nodes):
        offset += (width(nodes[index - 1]) + width(node)) / 2 + DIFF if index else 0.0
        offsets.append(offset)
    pools: list[tuple[float, int]] = []  # mean, number of nodes
    for node, offset in zip(nodes, offsets, strict=True):
        mean, count = wanted_centres[node] - offset, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return {node: mean + offset for node, mean, offset in zip(nodes, means, offsets, strict=True)}


def libraries_of(room: str) -> str:
    """The names of the libraries whose door the room is."""
    names = {
        name.split(".")[0]
        for module, path in own_modules().items()
        if room_of(module) == room
        for name in imports(path)
    }
    return ", ".join(LIBRARIES[name] for name in sorted(names & LIBRARIES.keys()))


def drawing() -> str:
    """The picture as SVG: the same bytes on every machine."""
    floors, paths = with_lanes(shown(room_imports()))
    centre = place(floors, [piece for path in paths for piece in path])
    left = min(centre[node] - width(node) / 2 for node in centre) - MARGIN
    x = {node: round(centre[node] - left) for node in centre}
    y = {
        node: MARGIN + number * FLOOR_HEIGHT
        for number, nodes in enumerate(floors)
        for node in nodes
    }
    right = max(x[node] + width(node) // 2 for node in x) + MARGIN
    bottom = 2 * MARGIN + (len(floors) - 1) * FLOOR_HEIGHT + BOX_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom}" width="{right}" height="{bottom}">',
        f"<style>{STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker>',
        f'<rect width="{right}" height="{bottom}" style="fill: #ffffff; stroke: none"/>',
        *(_arrow(path, x, y) for path in paths),
        *(
            _box(room, what, x[room] - BOX_WIDTH // 2, y[room])
            for floor in FLOORS
            for room, what in floor.items()
        ),
        "</svg>\n",
    ]
    return "\n".join(lines)


def _arrow(path: Sequence[Edge], x: Mapping[Node, int], y: Mapping[Node, int]) -> str:
    """A curve between floors, a straight line where it passes one."""
    start = path[0].start
    parts = [f"M{x[start]} {y[start] + BOX_HEIGHT}"]
    for piece in path:
        top, end = y[piece.start] + BOX_HEIGHT, y[piece.end]
        middle = (top + end) // 2
        parts.append(f"C{x[piece.start]} {middle} {x[piece.end]} {middle} {x[piece.end]} {end}")
        if piece is not path[-1]:
            parts.append(f"V{end + BOX_HEIGHT}")
    return f'<path d="{" ".join(parts)}" marker-end="url(#tip)"/>'


def _box(room: str, what: str, left: int, top: int) -> str:
    libraries = libraries_of(room)
    name = room + ("/" if (PACKAGE / room).is_dir() else ".py")
    kind = "door" if libraries else "plain"
    return (
        f'<rect class="{kind}" x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7"/>'
        f'<text class="room" x="{left + 12}" y="{top + 21}">{name}</text>'
        f'<text class="library" x="{left + BOX_WIDTH - 10}" y="{top + 20}">{libraries}</text>'
        f'<text class="what" x="{left + 12}" y="{top + 41}">{what}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} is written")
