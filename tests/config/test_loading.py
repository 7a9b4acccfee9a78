"""The recipe: what it accepts, and what it says about what it does not."""

from __future__ import annotations

import pickle
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config.loading import load_recipe, overlaid
from megarl.types import UserError, UserErrors

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
LONGEST = ROOT / "recipes" / "vapo_deepseek671b.yaml"
# The user's own keys live below these.
FREE_NAMES = {"train.megatron", "rollout.engine.sglang", "data.eval", "reward.arguments"}


def errors_of(path: Path, *overrides: str) -> tuple[UserError, ...]:
    with pytest.raises(UserErrors) as caught:
        load_recipe(path, overrides)
    return caught.value.errors


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = QUICKSTART.read_text()
    assert text.count(old) >= 1, old
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_load_and_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "again.yaml").write_text(recipe.dump_yaml())
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_recipe_is_frozen() -> None:
    recipe = load_recipe(QUICKSTART)
    with pytest.raises(Exception, match="frozen"):
        recipe.train.lr = 1.0  # type: ignore[misc]


def test_overrides_are_applied_in_order_and_typed_as_yaml() -> None:
    names = ["run.name=a", "run.name=b", "data.eval={x: y.jsonl}", "data.eval.z=w.jsonl"]
    passed = ["train.megatron.moe_aux_loss_coeff=1e-3", "rollout.engine.sglang.page_size=16"]
    recipe = load_recipe(QUICKSTART, [*names, *passed, "run.trackers=[]"])
    assert recipe.run.name == "b"
    assert [*recipe.data.eval] == ["x", "z"]
    assert recipe.run.trackers == ()
    assert recipe.train.megatron == {"moe_aux_loss_coeff": 1e-3}
    assert recipe.rollout.engine.sglang == {"page_size": 16}


# --- one wrong letter --------------------------------------------------------------------------------------------


def keys_of(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict) and f"{prefix}{key}" not in FREE_NAMES:
            yield from keys_of(value, f"{prefix}{key}.")


def misspellings(word: str, rng: random.Random) -> set[str]:
    """One letter of each kind of slip: replaced, dropped, doubled-in, swapped; never the word itself or nothing."""
    letters = string.ascii_lowercase + "_"
    at = rng.randrange(len(word))
    slips = {
        word[:at] + rng.choice(letters) + word[at + 1 :],
        word[:at] + word[at + 1 :],
        word[:at] + rng.choice(letters) + word[at:],
        word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :] if at else word[0] + word,
    }
    return slips - {word, ""}


def rename(tree: dict[str, Any], path: str, name: str) -> dict[str, Any]:
    """A copy of the tree in which the last key of `path` is called `name`, at the same place."""
    head, _, rest = path.partition(".")
    if rest:
        return {**tree, head: rename(tree[head], rest, name)}
    return {(name if key == head else key): value for key, value in tree.items()}


def siblings(tree: dict[str, Any], path: str) -> set[str]:
    for key in path.split(".")[:-1]:
        tree = tree.get(key, {})
    return set(tree)


def suggested(error: UserError) -> list[str]:
    return error.hint.removeprefix("did you mean ").removesuffix("?").split(" or ")


@pytest.mark.parametrize(
    ("recipe_path", "way"),
    [(QUICKSTART, "override"), pytest.param(LONGEST, "yaml", marks=pytest.mark.slow)],
    ids=["override", "yaml"],
)
def test_every_key_misspelt_by_one_letter_is_refused_with_the_right_key(
    recipe_path: Path, way: str, tmp_path: Path
) -> None:
    tree = yaml.safe_load(recipe_path.read_text())
    whole = load_recipe(recipe_path).model_dump()
    keys = dict.fromkeys([*keys_of(tree), *keys_of(whole)])
    rng = random.Random(7)
    right = 0
    first = 0
    total = 0
    for path in keys:
        section, _, name = path.rpartition(".")
        for slip in misspellings(name, rng):
            wrong = f"{section}.{slip}".lstrip(".")
            if way == "override":
                if slip in siblings(whole, path):
                    continue  # it is another key's right name
                tail = ".x=1" if path in FREE_NAMES else "=1"
                errors = errors_of(recipe_path, f"{wrong}{tail}")
                assert errors[0].where == f"override {wrong}{tail}"
            else:
                if slip in siblings(tree, path) or path not in set(keys_of(tree)):
                    continue
                written = tmp_path / "recipe.yaml"
                written.write_text(yaml.safe_dump(rename(tree, path, slip), sort_keys=False))
                errors = errors_of(written)
                line = int(errors[0].where.removeprefix(f"{written}:"))
                assert slip in written.read_text().splitlines()[line - 1]
            assert errors[0].problem == f"unknown key {wrong}"
            total += 1
            right += path in suggested(errors[0])
            first += path == suggested(errors[0])[0]
    assert total > 2 * len(keys if way == "override" else list(keys_of(tree)))
    assert right >= 0.95 * total, f"{right} of {total}"
    assert first >= 0.9 * total, f"{first} of {total} first"


def test_a_misspelt_required_key_is_told_once(tmp_path: Path) -> None:
    errors = errors_of(edited(tmp_path, "placement:", "placment:"))
    assert [str(error).split(": ", 1)[1] for error in errors] == [
        "unknown key placment; did you mean placement?"
    ]


def test_files_of_data_are_paths_or_branches(tmp_path: Path) -> None:
    train = "data.train=[a.jsonl, {path: b.jsonl, weight: 2, prompt: ask}]"
    recipe = load_recipe(QUICKSTART, [train, "data.eval.x={path: c.jsonl, answer: a.b}"])
    assert {key: file.path for key, file in recipe.data.files.items()} == {
        "data.train.0": "a.jsonl",
        "data.train.1": "b.jsonl",
        "data.eval.arith": "data/eval.jsonl",
        "data.eval.x": "c.jsonl",
    }
    assert (recipe.data.train[1].weight, recipe.data.train[1].prompt) == (2.0, "ask")
    assert list(load_recipe(QUICKSTART).data.train_files) == ["data.train"]
    (tmp_path / "again.yaml").write_text(recipe.dump_yaml())
    assert load_recipe(tmp_path / "again.yaml") == recipe
    errors = errors_of(
        QUICKSTART, "data.train=[{path: b.jsonl, wieght: 2}, 7, {path: c, weight: 0}]"
    )
    assert [str(error).partition("]: ")[2] for error in errors] == [
        "unknown key data.train.0.wieght; did you mean data.train.0.weight?",
        "data.train.1 is 7; write a path, or a branch with path, prompt and answer",
        "data.train.2.weight is 0; it should be greater than or equal to 0.000000001",
    ]
    (error,) = errors_of(QUICKSTART, "data.eval.x={path: c.jsonl, anwser: b}")
    assert error.hint == "did you mean data.eval.x.answer?"
    for none in ("''", "[]", "{path: a.jsonl}"):
        (error,) = errors_of(QUICKSTART, f"data.train={none}")
        assert error.hint == "write a path, or a list of files with path and weight"


def test_a_key_in_the_wrong_section_is_found_in_the_right_one() -> None:
    (error,) = errors_of(QUICKSTART, "placement.samples_per_prompt=4")
    assert error.hint == "did you mean rollout.samples_per_prompt?"


def test_a_key_like_no_other_lists_the_keys_there() -> None:
    (error,) = errors_of(QUICKSTART, "placement.machines=2")
    assert error.hint.startswith(
        "the keys there are gpus, train_gpus, first_engine_gpu, gpus_per_node"
    )


# --- wrong values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.tp=two", "train.tp is 'two'; write a whole number"),
        ("train.tp=2.5", "train.tp is 2.5; write a whole number"),
        ("train.tp=true", "train.tp is True; write a whole number"),
        ("train.cp=all", "train.cp is 'all'; write auto, or a whole number from 1 to 65536"),
        (
            "critic.ranks.cp=0",
            "critic.ranks.cp is 0; write auto, or a whole number from 1 to 65536",
        ),
        ("train.tp=0", "train.tp is 0; it should be greater than or equal to 1"),
        ("train.lr=fast", "train.lr is 'fast'; write a number"),
        ("train.lr=.nan", "train.lr is nan; it should be a finite number"),
        ("run.name=7", "run.name is 7; write text, in quotes when it reads as a number"),
        (
            "run.name=../up",
            "run.name is '../up'; write letters, digits, dots, dashes and underscores, a ",
        ),
        (
            "data.train=",
            "data.train is None; write a path, or a list of files with path and weight",
        ),
        ("data.eval=[a]", "data.eval is ['a']; write a mapping of keys there"),
        (
            "data.eval.x=3",
            "data.eval.x is 3; write a path, or a branch with path, prompt and answer",
        ),
        ("model.dtype=fp8", "model.dtype is 'fp8'; it should be 'float32' or 'bfloat16'"),
        (
            "run.trackers=[neptune]",
            "run.trackers.0 is 'neptune'; it should be 'tensorboard', 'wandb' or 'mlflow'",
        ),
        ("train=3", "train is 3; write a mapping of keys there"),
        (
            "rollout.samples_per_prompt=0",
            "rollout.samples_per_prompt is 0; it should be greater than or equal to 1",
        ),
        (
            "rollout.temperature=0",
            "rollout.temperature is 0; it should be greater than or equal to 0.01",
        ),
        ("lonely", "not of the form a.b=c; write for example train.lr=1e-4"),
        ("train..lr=1", "not of the form a.b=c; write for example train.lr=1e-4"),
        ("train.lr=[", "'[' is not a YAML value; put text in quotes"),
    ],
)
def test_a_bad_override_says_what_to_write(override: str, says: str) -> None:
    (error,) = errors_of(QUICKSTART, override)
    assert error.where == f"override {override}"
    assert str(error).startswith(f"override {override}: {says}")


def test_a_bad_value_in_the_file_names_its_line(tmp_path: Path) -> None:
    path = edited(tmp_path, "  pp: 2", "  pp: two")
    line = 1 + path.read_text().splitlines().index("  pp: two")
    (error,) = errors_of(path)
    assert str(error) == f"{path}:{line}: train.pp is 'two'; write a whole number"


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    path = edited(tmp_path, f"steps: {load_recipe(QUICKSTART).run.steps}, ", "")
    errors = errors_of(path, "train.tq=2", "model.dtype=int8", "rollout.top_p=2", "oops")
    assert sorted(error.problem for error in errors) == [
        "model.dtype is 'int8'",
        "not of the form a.b=c",
        "rollout.top_p is 2",
        "run.steps is missing",
        "unknown key train.tq",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: {name: a", "recipe.yaml:1: not valid YAML"),
        ("- a\n- b\n", "recipe.yaml: the file is not a mapping"),
        ("", "recipe.yaml: run is missing; add run"),
        ("run: {}\nrun: {}\n", "recipe.yaml:2: run is written twice; keep one of the two"),
        ("run: &a {name: *a}\n", "recipe.yaml:1: an alias stands inside of what it names"),
        ("1: {}\n", "recipe.yaml:1: 1 "),
    ],
)
def test_a_broken_file_is_one_clear_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    error_text = "\n".join(map(str, errors_of(tmp_path / "recipe.yaml")))
    assert says in error_text


# --- overlays ----------------------------------------------------------------------------------------------------


def overlay(tmp_path: Path, text: str, name: str = "overlay.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_overlays_and_overrides_are_applied_in_order_key_by_key(tmp_path: Path) -> None:
    first = overlay(
        tmp_path, "train: {tp: 4, lr: 5e-6}\nrun: {trackers: []}\nevaluation: {every: 7}\n"
    )
    second = overlay(tmp_path, "train: {tp: 8, megatron: {a: 1}}\n", "second.yml")
    recipe = load_recipe(
        QUICKSTART, ["train.lr=1.0", first, "train.tp=2", second, "train.megatron.b=2"]
    )
    assert (recipe.train.tp, recipe.train.lr, recipe.train.pp) == (8, 5e-6, 2)
    assert recipe.train.megatron == {"a": 1, "b": 2}
    assert recipe.run.trackers == ()
    assert (recipe.evaluation.every, recipe.evaluation.max_prompts) == (7, 256)


def test_an_overlay_replaces_a_leaf_by_a_mapping_and_lists_whole(tmp_path: Path) -> None:
    text = (
        "checkpoint: {every: 3}\ntrain: {pp: 2, layers_per_stage: [3]}\ncritic: {ranks: {tp: 1}}\n"
    )
    path = overlay(tmp_path, text)
    recipe = load_recipe(QUICKSTART, ["train.layers_per_stage=[1,3]", "checkpoint=null", path])
    assert recipe.train.layers_per_stage == (3,)
    assert (recipe.checkpoint.every, recipe.critic.ranks.tp) == (3, 1)


def test_null_takes_a_named_entry_out_and_sets_any_other_key_to_null(tmp_path: Path) -> None:
    more = overlay(
        tmp_path, "data: {eval: {hard: hard.jsonl}}\nevaluation: {sets: {hard: {samples: 4}}}\n"
    )
    less = overlay(
        tmp_path, "data: {eval: {arith: null}}\nreward: {arguments: {scale: null}}\n", "less.yaml"
    )
    recipe = load_recipe(QUICKSTART, [more, less])
    assert [*recipe.data.eval] == ["hard"]
    assert recipe.reward.arguments == {"scale": None}
    recipe = load_recipe(
        QUICKSTART, [more, "data.eval.hard=null", "evaluation.sets=null", "checkpoint.every=null"]
    )
    assert [*recipe.data.eval] == ["arith"]
    assert (recipe.evaluation.sets, recipe.checkpoint.every) == ({}, None)
    recipe = load_recipe(QUICKSTART, ["data.eval=null", more])
    assert [*recipe.data.eval] == ["hard"]
    quickstart = load_recipe(QUICKSTART)
    assert overlaid(quickstart, {"data": {"eval": {"arith": None}}}).data.eval == {}


def test_a_name_of_the_users_own_may_contain_dots(tmp_path: Path) -> None:
    """Null takes it out, and a fault below it is told as any other."""
    score = "{function: megarl.rollout.rewards.math:score, arguments: {scale: 1}}"
    more = overlay(tmp_path, f"reward: {{by_source: {{math.dapo: {score}, code: {score}}}}}\n")
    less = overlay(
        tmp_path,
        "reward: {by_source: {math.dapo: null, code: {arguments: {scale: null}}}}\n",
        "less.yaml",
    )
    recipe = load_recipe(QUICKSTART, [more, less])
    assert [*recipe.reward.by_source] == ["code"]
    assert recipe.reward.by_source["code"].arguments == {"scale": None}
    text = "reward:\n  by_source:\n    math.dapo:\n      functon: x\n      arguments: {fast: on}\n    gone.now: null\n"
    path = overlay(tmp_path, text, "wrong.yaml")
    lines = sorted(str(error) for error in errors_of(QUICKSTART, more, path))
    assert [line.partition(" ")[0] for line in lines] == [f"{path}:4:", f"{path}:5:", f"{path}:6:"]
    assert lines[0].endswith(
        "unknown key reward.by_source.math.dapo.functon; did you mean reward.by_source.math.dapo.function?"
    )
    assert "on is true in YAML 1.1" in lines[1]
    assert (
        "reward.by_source.gone.now is null, which takes it out, and there is no such entry"
        in lines[2]
    )


def test_null_for_a_name_that_is_not_there_is_an_error_where_it_is_written(tmp_path: Path) -> None:
    path = overlay(tmp_path, "data:\n  eval:\n    arth: null\n")
    lines = [str(error) for error in errors_of(QUICKSTART, path, "evaluation.sets.no=null")]
    assert lines == [
        f"{path}:3: data.eval.arth is null, which takes it out, and there is no such entry; did you mean arith?",
        "override evaluation.sets.no=null: evaluation.sets.no is null, which takes it out, and there is no such entry; "
        "leave the line out",
    ]


def test_an_overlays_errors_name_its_lines(tmp_path: Path) -> None:
    path = overlay(tmp_path, "train:\n  tpp: 3\n  lr: fast\nrollot: {}\n")
    lines = [str(error) for error in errors_of(QUICKSTART, path, "train.epp=1")]
    assert sorted(lines) == [
        f"{path}:2: unknown key train.tpp; did you mean train.tp or train.pp or train.vpp?",
        f"{path}:3: train.lr is 'fast'; write a number",
        f"{path}:4: unknown key rollot; did you mean rollout?",
        "override train.epp=1: unknown key train.epp; did you mean train.pp or train.ep or train.vpp?",
    ]


def test_several_broken_overlays_are_told_at_once_beside_the_recipes_own_errors(
    tmp_path: Path,
) -> None:
    broken, gone = overlay(tmp_path, "train: [\n"), str(tmp_path / "gone.yaml")
    twice = overlay(tmp_path, "run: {steps: 1, steps: 2}\n", "twice.yaml")
    lines = [str(error) for error in errors_of(QUICKSTART, broken, gone, twice, "train.tp=x")]
    starts = (
        f"{broken}:",
        f"{gone}: cannot be read",
        f"{twice}:1: run.steps is written twice",
        "override train.tp=x:",
    )
    for start in starts:
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    assert len(lines) == 4


def test_a_renamed_key_is_refused_unless_it_is_off_as_in_the_recipe_of_an_earlier_run() -> None:
    recipe = load_recipe(QUICKSTART)
    assert load_recipe(QUICKSTART, ["algorithm.process_scale=null"]) == recipe
    with pytest.raises(
        UserErrors, match=r"algorithm\.process_scale; it is called algorithm\.prime_beta"
    ):
        load_recipe(QUICKSTART, ["algorithm.process_scale=0.1"])
    assert load_recipe(QUICKSTART, ["rollout.engine.fp8=false"]) == recipe
    named = r"rollout\.engine\.fp8; it is called rollout\.engine\.weights \(plain or fp8\) now"
    with pytest.raises(UserErrors, match=named):
        load_recipe(QUICKSTART, ["rollout.engine.fp8=true"])
