"""The architecture, read from the source: which room may import which, and which rooms import an outside library.

The floor plan is the table FLOORS of scripts/draw_architecture.py, from which docs/architecture.svg is drawn.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.count_code import assigns_several
from scripts.draw_architecture import (
    FLOORS,
    PACKAGE,
    PICTURE,
    drawing,
    imports,
    module_name,
    own_imports,
    own_modules,
    room_of,
    within,
)

SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_ALONE = 6  # modules that lie in no room
REACH = {  # room -> the only rooms that it may import, where floors alone would allow more
    "controller": {
        "algos",
        "checkpoints",
        "cluster",
        "config",
        "data",
        "disk",
        "fleet",
        "model",
        "placement",
        "printable",
        "recovery",
        "samples",
        "timeline",
        "tracking",
        "training",
        "types",
    },
    "model": {"device", "disk", "fp8", "printable", "types"},
    "resharding": {"collector", "device", "fp8", "model", "placement", "timeline", "types"},
}
IMPORTERS = {  # room -> the only rooms that may import it
    "parallel": {"cli", "commands", "plan", "preflight", "training"},
}
THIRD_PARTY_OF_ALGOS = {"torch"}
DOORS = {  # library -> the only places that import it
    "ray": {
        "megarl.cluster.ray_session",
        "megarl.cluster.actor",
        "megarl.cluster.calls",
        "megarl.cluster.failures",
        "megarl.cluster.fetching",
        "megarl.cluster.hang_evidence",
        "megarl.cluster.local_ray",
        "megarl.cluster.node_slots",
        "megarl.cluster.pulses",
    },
    "sglang": {
        "megarl.rollout.sglang",
        "megarl.episodes.call_parsers",
        "megarl.cpu.sglang_patches",
        "megarl.cpu.sglang_attention",
        "megarl.cpu.sglang_fp8",
    },
    "msgspec": {"megarl.rollout"},
    "aiohttp": {"megarl.environments.endpoint"},
    "megatron.core.parallel_state": {"megarl.parallel.groups"},
    "megatron": {"megarl.parallel", "megarl.cpu.megatron_patches"},
    "transformer_engine": {"megarl.parallel"},
    "typer": {"megarl.cli"},
    "rich": {
        "megarl.plan.search_report",
        "megarl.tracking.run_log",
        "megarl.plan.report",
        "megarl.tracking.loss_table",
        "megarl.tracking.progress",
    },
    "tensorboard": {"megarl.tracking.trackers.tensorboard_file"},
    "wandb": {"megarl.tracking.trackers.wandb_run"},
    "mlflow": {"megarl.tracking.trackers.mlflow_run"},
    "matplotlib": {"megarl.tracking.curve", "megarl.plan.picture"},
    "plotly": {"megarl.report.page"},
    "pydantic": {
        "megarl.config",
        "megarl.controller.resuming",
        "megarl.environments.runtime.tools",
        "megarl.environments.endpoint.request_fields",
        "megarl.parallel.option_values",
        "megarl.resharding.peer_copy",
        "megarl.resharding.session",
    },
    "bm25s": {"megarl.environments.search"},
    "tenacity": {"megarl.isolation.service"},
    "yaml": {"megarl.config", "megarl.tracking.trackers"},
}
STANDARD = {"__future__", "collections", "dataclasses", "typing", "math", "functools", "itertools"}


def floor_of(room: str) -> int:
    """Floors from the top: an import goes to a larger number."""
    (floor,) = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    return floor


def test_the_reader_sees_what_it_should(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        "import a.b\nif True:\n    from c import d\ndef f():\n    import e\nclass G:\n    import h\n"
    )
    assert set(imports(source)) == {"a.b", "c.d", "e", "h"}
    assert set(imports(source, lazy=False)) == {"a.b", "c.d", "h"}


def test_every_room_is_on_a_floor() -> None:
    rooms = {room_of(module_name(path)) for path in SOURCES} - {""}
    assert rooms == set().union(*FLOORS)


def test_the_picture_is_drawn_from_these_imports() -> None:
    assert PICTURE.read_text(encoding="utf-8") == drawing(), (
        "run python scripts/draw_architecture.py"
    )


def test_few_modules_lie_in_no_room() -> None:
    assert len({*PACKAGE.glob("*.py")} - {PACKAGE / "__init__.py"}) <= MOST_ALONE


def test_importing_the_package_costs_nothing() -> None:
    assert imports(PACKAGE / "__init__.py") == ()


def test_imports_go_down() -> None:
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in SOURCES
        for name in own_imports(path)
        if not may_import(room_of(module_name(path)), room_of(name))
    ]
    assert wrong == []


def may_import(room: str, other: str) -> bool:
    if other in {room, ""}:
        return True
    is_reached = other in REACH.get(room, {other}) and room in IMPORTERS.get(other, {room})
    return floor_of(other) > floor_of(room) and is_reached


def test_every_library_has_its_door() -> None:
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in SOURCES
        for name in imports(path)
        for library, doors in DOORS.items()
        if within(name, library) and not any(within(module_name(path), door) for door in doors)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "algos").glob("*.py")), ids=module_name)
def test_algos_is_tensors_and_nouns_alone(path: Path) -> None:
    for name in imports(path):
        is_own = within(name, "megarl.algos") or within(name, "megarl.types")
        assert is_own or name.split(".")[0] in THIRD_PARTY_OF_ALGOS | STANDARD, (
            f"{path.name} imports {name}"
        )


def test_there_is_no_import_cycle() -> None:
    """Not even through imports inside functions."""
    graph = {module: own_imports(path) - {module} for module, path in own_modules().items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_two_classes_share_a_name() -> None:
    modules_by_class = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                modules_by_class[node.name].append(module_name(path))
    assert {name: modules for name, modules in modules_by_class.items() if len(modules) > 1} == {}


def test_files_functions_and_nesting_stay_small() -> None:
    assert [f"{path}: {found}" for path in SOURCES for found in _too_large(path)] == []


def _too_large(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if text.count("\n") > 500:
        yield f"{text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > 60:
                yield f"{node.name} has {lines} lines"
            if _depth(node) >= 5:
                yield f"{node.name} nests {_depth(node)} deep"


def test_a_statement_says_one_thing() -> None:
    """No tuple assignment of unrelated values, no conditional in another, no dictionary made for arguments."""
    wrong = [
        f"{path}:{getattr(node, 'lineno', 0)}: {found}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for found in _says_more(node)
    ]
    assert wrong == []


def _says_more(node: ast.AST) -> Iterator[str]:
    if assigns_several(node):
        yield "give each name its value in a statement of its own"
    if isinstance(node, ast.IfExp):
        inner = [other for child in ast.iter_child_nodes(node) for other in ast.walk(child)]
        if any(isinstance(other, ast.IfExp) for other in inner):
            yield "a nested conditional"
    if isinstance(node, ast.Call):
        unpacked = [keyword.value for keyword in node.keywords if keyword.arg is None]
        if any(isinstance(value, ast.Dict) for value in unpacked):
            yield "name the arguments"
    for name in _asked_again(node):
        yield f"{name} is assigned in a comprehension's condition"


def _asked_again(node: ast.AST) -> Iterator[str]:
    """Names that a comprehension assigns in a condition and needs in what it yields."""
    if not isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        return
    yielded = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    used = {
        other.id for value in yielded for other in ast.walk(value) if isinstance(other, ast.Name)
    }
    for condition in [test for part in node.generators for test in part.ifs]:
        for other in ast.walk(condition):
            if isinstance(other, ast.NamedExpr) and other.target.id in used:
                yield other.target.id


def _depth(node: ast.AST) -> int:
    """How deep for, while, if, with and try nest below a node; elif is no deeper than its if."""
    blocks = ast.For | ast.AsyncFor | ast.While | ast.If | ast.With | ast.AsyncWith | ast.Try
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, _depth(child) + (isinstance(child, blocks) and not chained))
    return deepest


@pytest.mark.slow
def test_the_controller_imports_no_model_library() -> None:
    """It passes references: what only ranks, engines and tokenizers need would take seconds of its start."""
    program = "import sys, megarl.controller.loop; print({'megatron', 'sglang', 'transformers'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"
