"""Values that no run can use: refused by key, before anything is started. Needs no engine and no training rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.preflight.limit_checks import limit_errors
from megarl.preflight.model_checks import eos_errors
from megarl.types import UserErrors
from tests.parallel import checkpoints

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    return [f"run.dir={tmp_path / 'runs'}"]


def refused(*overrides: str) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        load_recipe(QUICKSTART, overrides)
    return [f"{error.problem}; {error.hint}" for error in caught.value.errors]


# --- single values, refused with the file and line, or the override ----------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.seed=123456789012345678901234567", "it should be less than or equal to 2147483647"),
        (f"run.name={'a' * 300}", "write at most 100 characters"),
        (
            "run.name=../evil",
            "write letters, digits, dots, dashes and underscores, a letter or a digit first",
        ),
        (
            "data.eval={../evil: a}",
            "write letters, digits, dots, dashes and underscores, a letter or a digit first",
        ),
        (f"run.dir={'a' * 300}", "write at most 255 bytes between slashes, and 4095 in all"),
        (f"data.train={'ab/' * 2000}", "write at most 255 bytes between slashes, and 4095 in all"),
        (f"data.eval.x={'ä' * 128}", "write at most 255 bytes between slashes, and 4095 in all"),
        (
            "run.timeout_s=0.001",
            "write 5 or more: no engine and no training rank starts within less",
        ),
        ("run.timeout_s=1e30", "it should be less than or equal to 604800"),
        ("reward.timeout_s=1e-300", "it should be greater than or equal to 0.01"),
        ("reward.memory_mb=1000000000000", "it should be less than or equal to 16777216"),
        ("reward.workers=100000", "it should be less than or equal to 1024"),
        ("reward.penalty=-1e300", "it should be greater than or equal to -1000000"),
        ("train.lr=1e99", "it should be less than or equal to 10"),
        ("warm_start.lr=0", "it should be greater than or equal to"),
        ("train.weight_decay=1e300", "it should be less than or equal to 1000000"),
        ("train.grad_clip=1e-300", "it should be greater than or equal to"),
        ("train.tp=1000000", "it should be less than or equal to 65536"),
        ("rollout.temperature=1e-300", "it should be greater than or equal to 0.01"),
        ("rollout.top_p=1e-300", "it should be greater than or equal to"),
        ("evaluation.temperature=1e-300", "write 0 (greedy), or a number from 0.01 to 100"),
        (
            "evaluation.sets.arith.temperature=1000",
            "write 0 (greedy), or a number from 0.01 to 100",
        ),
        ("rollout.temperature=1e9", "it should be less than or equal to 100"),
        ("rollout.samples_per_prompt=1000000000", "it should be less than or equal to 65536"),
        (
            "reshard.round_bytes=100000000000000000",
            "it should be less than or equal to 1099511627776",
        ),
        ("algorithm.clip_high=1e300", "it should be less than or equal to 1000000000"),
        ("algorithm.oversample=1e300", "it should be less than or equal to 100"),
        ("run.steps=1e3", "write a whole number"),
    ],
    ids=lambda value: value[:32],
)
def test_a_value_beyond_its_bounds(override: str, says: str) -> None:
    (line,) = refused(override)
    assert says in line
    assert len(line) < 300


def test_every_number_of_the_recipe_has_both_bounds() -> None:
    """A key that is added without them can be given a number that fails a run after half a minute."""
    schema = Recipe.model_json_schema()
    unbounded = []
    num_numbers = 0
    for branch, definition in schema["$defs"].items():
        # a file is a path or a branch
        kinds = (definition, *definition.get("anyOf", ()))
        properties = [item for kind in kinds for item in kind.get("properties", {}).items()]
        for key, value in properties:
            for kind in (value, value.get("items", {}), *value.get("anyOf", ())):
                if kind.get("type") in ("integer", "number") and "enum" not in kind:
                    num_numbers += 1
                    has_lower = "minimum" in kind or "exclusiveMinimum" in kind
                    if not has_lower or "maximum" not in kind:
                        unbounded.append(f"{branch}.{key}")
    assert num_numbers > 80
    assert unbounded == []


# --- values that are too much together ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "device", "says"),
    [
        (
            "rollout.prompts_per_step=1000000 rollout.samples_per_prompt=1000", "cpu",
            "rollout.prompts_per_step: 1000000 prompts of 1000 samples each are 1000000000 samples a step; bring",
        ),
        ("placement.gpus=60000", "cpu", "placement.gpus: 60000 simulated GPUs are as many processes of 0.2 GB"),
        ("placement.gpus=60000", "cuda", "placement.gpus: 60000 GPUs on one machine (placement.network is loopback)"),
        ("placement.spare_nodes=2", "cpu", "placement.spare_nodes: 2 of a run on this machine alone ("),
        ("placement.hardware=nope", "cpu", "placement.hardware: nope: cannot be read (No such file or directory)"),
        ("placement.hardware=recipes/quickstart.yaml", "cpu", "placement.hardware: recipes/quickstart.yaml:"),
        ("run.timeline.steps=[30,31]", "cpu", "run.timeline.steps: step 31 is not one of the run's 30; name steps"),
        ("run.timeline.profile_ranks=[3,4]", "cpu", "run.timeline.profile_ranks: there is no rank 4 among 4 training"),
        ("run.dir=/proc", "cpu", "run.dir: /proc is not a folder that can be written to; name another folder"),
        ("run.dir=/proc/runs/here", "cpu", "run.dir: /proc is not a folder that can be written to"),
        ("run.dir=/dev/null/x", "cpu", "run.dir: /dev/null is not a folder that can be written to"),
        (f"run.dir=/{'ab/' * 1200}", "cpu", "run.dir: with run.name it makes a path of 36"),
    ],
    ids=lambda value: value[:32],
)  # fmt: skip
def test_values_that_are_too_much_together(
    good: list[str], overrides: str, device: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    errors = limit_errors(load_recipe(QUICKSTART, [*good, *overrides.split()]), device)
    assert errors and str(errors[0]).startswith(says), [str(error) for error in errors]


def test_one_machine_of_sixteen_gpus_is_named_so(good: list[str]) -> None:
    overrides = [*good, "placement.gpus=16"]
    (error,) = limit_errors(load_recipe(QUICKSTART, overrides), "cuda")
    hint = "set it to at most 8, or placement.gpus_per_node to 16, or placement.network to nodes"
    assert (error.where, error.hint) == ("placement.gpus", hint)
    assert (
        limit_errors(load_recipe(QUICKSTART, [*overrides, "placement.gpus_per_node=16"]), "cuda")
        == []
    )


@pytest.mark.parametrize("network", ["loopback", "nodes"])
def test_what_one_machine_or_a_cluster_has_is_no_error(good: list[str], network: str) -> None:
    gpus = 8 if network == "loopback" else 4096
    spares = 0 if network == "loopback" else 2
    keys = [f"gpus={gpus}", f"network={network}", f"spare_nodes={spares}"]
    recipe = load_recipe(QUICKSTART, [*good, *(f"placement.{key}" for key in keys)])
    assert limit_errors(recipe, "cuda") == []
    assert not Path(recipe.run.dir).exists(), "checking makes nothing"


# --- where a response ends ---------------------------------------------------------------------------------------


class Tokenizer:
    def __init__(self, eos: int | None) -> None:
        self.eos_token_id = eos


@pytest.mark.parametrize(
    ("own", "config", "warm_steps", "says"),
    [
        (
            None,
            None,
            0,
            "generation_config.json: neither it nor config.json has an eos_token_id: no response would",
        ),
        (7, None, 0, "write eos_token_id there: 7, the tokenizer's"),
        (None, 1, 0, ""),
        (
            None,
            1,
            3,
            "model.path: the tokenizer has no end-of-sequence token to teach; give it an eos_token",
        ),
        (
            7,
            1,
            3,
            "answers are taught to end with the tokenizer's token 7, and engines end responses at 1; add 7",
        ),
        (7, 1, 0, ""),
        (1, 1, 3, ""),
        (1, 99, 0, "eos_token_id is 99, and the vocabulary has 47 tokens"),
    ],
)
def test_a_model_whose_responses_never_end_is_refused(
    own: int | None, config: int | None, warm_steps: int, says: str, tmp_path: Path
) -> None:
    folder = checkpoints.write(tmp_path / "model", "qwen3-moe", eos_token_id=config)
    for path in folder.glob("generation_config.json"):
        path.unlink()
    recipe = load_recipe(QUICKSTART, [f"model.path={folder}", f"warm_start.steps={warm_steps}"])
    errors = [str(error) for error in eos_errors(recipe, Tokenizer(own))]
    assert (not errors) if not says else len(errors) == 1 and says in errors[0], errors
