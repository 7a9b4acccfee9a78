"""The pages that list messages, keys, metrics, layouts and commands: each of these is what the code has."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from megarl.cli import app
from megarl.config.loading import load_recipe
from megarl.config.reference import recipe_keys
from megarl.data.files import answer_of, column
from tests.report.runs import a_run
from tests.test_docs import DOCS, PAGES, ROOT, blocks

BRANCHES = (
    "run|model|data|algorithm|warm_start|reward|rollout|episode|evaluation|train|lora|reference|critic|reward_model"
    "|checkpoint|reshard|placement"
)
KEY = re.compile(rf"`((?:{BRANCHES})\.[a-z_0-9.]*[a-z_0-9])")
PASSED_THROUGH = re.compile(r"(?:train\.(?:megatron|ddp|optimizer)|rollout\.engine\.sglang)\.\w+")
METRIC = re.compile(r"`((?:[a-z]+)/[a-z_0-9]+)`")
# A message begins like this, as the rest is of the values; what is shorter would be found anywhere.
SHORTEST = 6


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_says_first_what_one_gets(page: Path) -> None:
    title, beginning, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ") and beginning.startswith("You get")


@cache
def printed_texts() -> tuple[str, ...]:
    """Every string of megarl that is no docstring; NUL stands for a value that is formatted into it."""
    texts = []
    for module in sorted((ROOT / "megarl").rglob("*.py")):
        tree = ast.parse(module.read_text(encoding="utf-8"))
        parts = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                values = [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
                texts.append("".join(map(str, values)))
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in parts
            ):
                texts.append(node.value)
    return tuple(texts)


def messages() -> list[str]:
    """The first cells of the tables of docs/troubleshooting.md."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)


def is_printed(message: str) -> bool:
    """Whether one text of the source has the fixed parts of a message in their order."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip(" ,;:.()")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in printed_texts())


def test_each_message_is_printed_somewhere() -> None:
    found = messages()
    assert len(found) > 50 and len(set(found)) == len(found)
    assert [message for message in found if len(message.strip(". ")) < SHORTEST] == []
    assert [message for message in found if not is_printed(message)] == []
    assert not is_printed("a ... that nobody has ever written"), "the search can fail"


@cache
def keys() -> frozenset[str]:
    return frozenset(recipe_keys())


@pytest.mark.parametrize(
    "name", ["data", "faq", "index", "layouts", "peers", "troubleshooting", "tuning"]
)
def test_each_key_exists(name: str) -> None:
    """Of peers.md those of the second column: the first has the peers' own."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    if name == "peers":
        text = "\n".join(re.findall(r"^\|.*\|(.*)\|$", text, re.MULTILINE))
    named = {key for key in KEY.findall(text) if not PASSED_THROUGH.fullmatch(key)}
    own_names = {"data.eval.math", "data.eval.math500"}  # of evaluation sets
    branches = {key.rpartition(".")[0] for key in keys()}
    assert named - keys() - branches - own_names == set()


def test_each_metric_of_the_tuning_page_is_recorded() -> None:
    """The code has its name, whole or without its room, or another page describes it."""
    text = (DOCS / "tuning.md").read_text(encoding="utf-8")
    others = [page for page in DOCS.glob("*.md") if page.name != "tuning.md"]
    described = set(METRIC.findall("\n".join(page.read_text("utf-8") for page in others)))
    metrics = set(METRIC.findall(text))
    assert len(metrics) > 30
    texts = set(printed_texts())
    unknown = {metric for metric in metrics if not {metric, metric.partition("/")[2]} & texts}
    assert unknown - described == set()


def test_the_layouts_that_are_shown_are_those_of_the_recipes() -> None:
    text = (DOCS / "layouts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.*?) \| (\d+) of (.*?) \|$", text, re.MULTILINE)
    assert len(rows) >= 4
    for name, gpus, train, count, engine in rows:
        recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [])
        assert recipe.placement.gpus == int(gpus) and recipe.rollout.engine.count == int(count)
        for branch, shown in ((recipe.train, train), (recipe.rollout.engine, engine)):
            sizes = {axis: int(size) for axis, size in map(str.split, shown.split(", "))}
            held = {
                axis: getattr(branch, axis)
                for axis in ("tp", "pp", "ep", "vpp", "dp")
                if hasattr(branch, axis)
            }
            assert {axis: size for axis, size in held.items() if size != 1} == sizes, name


def commands() -> list[str]:
    """The lines that begin with megarl in plain blocks of all pages, but for forms with brackets and printed lines."""
    fences = [
        block
        for page in PAGES
        for language, block in re.findall(
            r"^ *```(\w*)\n(.*?)^ *```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
        if language in ("", "bash")
    ]
    lines = [
        line.split("#")[0].split(">")[0].strip() for block in fences for line in block.splitlines()
    ]
    return [line for line in lines if re.match(r"megarl [a-z-]+( [^\[]*)?$", line)]


def test_the_commands_that_only_read_are_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help with keys, and the page of a run; what plans, trains or asks a cluster has tests of its own."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "runs").mkdir()
    for name in ("quickstart", "reverse", "a", "b"):
        a_run(tmp_path / "made", f"run.name={name}").rename(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    executed = [
        command
        for command in dict.fromkeys(commands())
        if re.match(r"megarl (explain|schema|report)\b", command)
        and not re.search("--watch|FILE", command)
    ]
    assert len(executed) > 8
    for command in executed:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)
    assert (tmp_path / "runs" / "a" / "comparison.html").is_file()


def test_each_command_is_taken_by_the_command_line() -> None:
    """Its options and arguments are read, and the recipe that it names is loaded with its overlays and keys."""
    group = get_command(app)
    assert isinstance(group, TyperGroup) and len(commands()) > 25
    for command in commands():
        name, *arguments = shlex.split(command)[1:]
        group.commands[name].make_context(name, list(arguments))
        recipes = [
            word for word in arguments if word.startswith("recipes/") and word.endswith(".yaml")
        ]
        keys_over = [word for word in arguments if re.match(r"[a-z_.]+=", word)]
        if recipes and "train.pp=3" not in keys_over:  # which docs/running.md shows for its errors
            first, *overlays = [str(ROOT / recipe) for recipe in recipes]
            assert load_recipe(first, [*overlays, *keys_over]).run.steps


def test_the_help_of_the_tuning_page_is_given() -> None:
    (block,) = [block for block in blocks("tuning.md", "") if "megarl explain" in block]
    (line,) = [line for line in block.splitlines() if line.startswith("megarl explain ")]
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0 and "Partial rollout" in done.output


def test_data_and_a_reward_of_verl_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row as verl prepares it, and a reward that gets verl's four arguments."""
    (tmp_path / "verl.yaml").write_text(*blocks("peers.md", "yaml"))
    data = load_recipe(ROOT / "recipes" / "quickstart.yaml", [str(tmp_path / "verl.yaml")]).data
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0},
    }
    assert data.prompt in row and answer_of(column(row, data.answer, ""), data.answer) == "3"
    (tmp_path / "my_rewards.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth and extra_info['index'] == 0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}
    (reward,) = blocks("peers.md")
    exec(compile(reward, "docs/peers.md", "exec"), names)
    assert names["score"]("3", "3", row) == 1.0
