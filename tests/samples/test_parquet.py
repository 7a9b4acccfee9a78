"""The file of samples: what comes back of it, and what is refused before a rank starts."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.model.hf_config import HfModel
from megarl.model.shape import ModelShape
from megarl.placement.roles import Roles, resolve
from megarl.preflight.data_checks import sample_file_errors
from megarl.samples.buffer import PartialGroup
from megarl.samples.parquet import SampleFile, open_samples, writing
from megarl.samples.summaries import summary
from megarl.types import Prompt, Sample, SampleGroup, SamplePart, UserError
from megarl.types.reward_result import Failure, RewardResult
from tests.samples.responses import refusal, response, with_row

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
TEMPERATURE = 0.7
SHAPE = ModelShape(
    4, 64, 4, 2, 16, vocab_size=32, num_experts=8, experts_per_token=2, num_dense_layers=1
)


def parts(length: int, seed: int) -> tuple[SamplePart, ...]:
    """Of two versions where there are two tokens."""
    return (
        (SamplePart(seed, 1), SamplePart(seed + 2, length - 1))
        if length > 1
        else (SamplePart(seed, 1),)
    )


def group(
    seed: int, *, samples: int = 3, experts: type | None = None, top_id: int = 31
) -> SampleGroup:
    random = np.random.default_rng(seed)
    row = {"n": seed, "nested": [1.5, None, "\u2713"]}
    prompt = Prompt(f"row {seed}", "two\n\u00fcber", (1, 2, top_id), "4", row)

    def sample(length: int) -> Sample:
        routed = None
        if experts is not None:
            routed = random.integers(0, 8, (3 + length - 1, 3, 2)).astype(experts)
        logp = -random.random(length, dtype=np.float32) * np.float32(1e-3)
        return response(
            prompt.token_ids,
            random.integers(0, 31, length),
            logp,
            f"r{length}",
            finished=length % 2 == 0,
            parts=parts(length, seed),
            routed_experts=routed,
            verifications=length + seed,
            prefills=length,
        )

    rewards = random.random(samples, dtype=np.float32)
    return SampleGroup(prompt, tuple(sample(1 + n) for n in range(samples)), rewards, rewards > 0.5)


def bits(group: SampleGroup) -> list[Any]:
    """Everything about a group that can be compared, arrays with their types and bytes."""

    def of(array: np.ndarray | None) -> tuple[Any, ...] | None:
        return (
            None
            if array is None
            else (array.dtype.str, array.shape, array.tobytes(), array.flags.writeable)
        )

    samples = [
        (
            row.prompt_ids,
            of(row.response_ids_T),
            of(row.engine_logp_T),
            of(row.trained_T),
            row.parts,
            of(row.routed_experts),
            sample.text,
            sample.finished,
            sample.is_open,
            sample.verifications,
            sample.prefills,
        )
        for sample in group.samples
        for row in sample.rows
    ]
    return [group.prompt, samples, of(group.rewards_G), of(group.correct_G)]


def write(path: Path, *steps: list[SampleGroup]) -> SampleFile:
    with writing(path, SHAPE.vocab_size, TEMPERATURE) as file:
        for step in steps:
            file.write(step)
    return open_samples(path)


def recipe(*overrides: str) -> Recipe:
    keys = ["run.steps=2", f"rollout.temperature={TEMPERATURE}", "train.updates_per_step=1"]
    return load_recipe(QUICKSTART, [*keys, *overrides])


def roles(*overrides: str, context: int | None = None, shape: ModelShape = SHAPE) -> Roles:
    """Those of the quickstart, with a policy of this shape and context."""
    resolved = resolve(recipe(*overrides))
    return replace(
        resolved, policy=replace(resolved.policy, model=HfModel("", shape, context_tokens=context))
    )


def told(
    samples: SampleFile, *overrides: str, context: int | None = None, shape: ModelShape = SHAPE
) -> list[str]:
    return [
        str(error)
        for error in sample_file_errors(samples, roles(*overrides, context=context, shape=shape))
    ]


def test_every_bit_of_every_group_comes_back(tmp_path: Path) -> None:
    """Of groups that lost samples too, and of neighbours with and without experts."""
    odd = group(7, samples=1, experts=np.int16)
    odd.samples[0].only_row.engine_logp_T.view(np.uint32)[:] = (
        0x7FC00123  # a NaN that says something
    )
    steps = [
        [group(1, experts=np.uint8), group(2, samples=2)],
        [odd, group(1, experts=np.int16)],
    ]
    file = write(tmp_path / "samples.parquet", *steps)
    assert file.num_samples == (5, 4)
    for number, groups in enumerate(steps, start=1):
        assert [bits(sample_group) for sample_group in file.groups(number)] == [
            bits(sample_group) for sample_group in groups
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["samples.parquet"]


def test_a_buffer_has_complete_groups_and_partial_ones_with_their_reward_results(
    tmp_path: Path,
) -> None:
    whole, other = group(1), group(2, samples=4, experts=np.uint8)
    reward_results = (
        RewardResult(0.5, True, "7"),
        RewardResult(-1.0, False),
        Failure("took too long"),
        None,
    )
    opened = replace(other.samples[3], text="", finished=False, is_open=True)
    partial = PartialGroup(other.prompt, (*other.samples[:3], opened), reward_results)
    with writing(tmp_path / "buffer.parquet", SHAPE.vocab_size, TEMPERATURE) as file:
        for sample_group in (whole, partial):
            file.write([sample_group])
    buffer = open_samples(tmp_path / "buffer.parquet")
    first, second = buffer.buffered_groups()
    assert isinstance(first, SampleGroup) and bits(first) == bits(whole)
    assert isinstance(second, PartialGroup) and (second.prompt, second.reward_results) == (
        partial.prompt,
        reward_results,
    )
    nothing = np.zeros(4, np.float32)
    assert bits(SampleGroup(second.prompt, second.samples, nothing, nothing > 0)) == bits(
        SampleGroup(partial.prompt, partial.samples, nothing, nothing > 0)
    )
    with pytest.raises(
        UserError, match="step 2 has samples that have not ended, as in a checkpoint's file"
    ):
        buffer.groups(2)


def test_a_file_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        writing(tmp_path / "samples.parquet", 32, TEMPERATURE) as file,
    ):
        file.write([group(1)])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named_whichever_byte_it_is(tmp_path: Path) -> None:
    """Cut anywhere, or with one flipped bit in any of its pages."""
    file = write(tmp_path / "samples.parquet", [group(1, experts=np.uint8)], [group(2)])
    whole = file.path.read_bytes()
    expected = [[bits(sample_group) for sample_group in file.groups(step)] for step in (1, 2)]

    def damage(content: bytes) -> bool:
        """Whether it is told; else everything must still be what it was."""
        file.path.write_bytes(content)
        try:
            damaged = open_samples(file.path)
            got = [[bits(sample_group) for sample_group in damaged.groups(step)] for step in (1, 2)]
        except UserError as error:
            assert error.where == str(file.path)
            return True
        assert got == expected
        return False

    assert all(damage(whole[:end]) for end in (0, 3, 8, len(whole) // 2, len(whole) - 1))
    data = whole.index(b"r1")
    flipped = [
        damage(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        for at in range(4, len(whole), 31)
    ]
    assert any(flipped)
    assert damage(whole[:data] + b"q" + whole[data + 1 :])


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    other = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1="]}), other)
    with pytest.raises(UserError, match="its format is not ours, this version reads 9 and 10"):
        open_samples(other)
    with pytest.raises(UserError, match="gone.parquet: not a complete file of samples"):
        open_samples(tmp_path / "gone.parquet")


@pytest.mark.parametrize(
    "description",
    [
        b"[" * 200_000,
        b"[1]",
        b"5",
        b"{'",
        b'"\xff"',
        b'{"temperature": "hot"}',
        b'{"vocab_size": null}',
    ],
    ids=["deep", "list", "number", "no JSON", "no UTF-8", "temperature", "vocab_size"],
)
def test_a_description_that_somebody_changed_is_refused_in_one_line(
    tmp_path: Path, description: bytes
) -> None:
    import pyarrow.parquet

    path = write(tmp_path / "samples.parquet", [group(1)]).path
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"megarl": description}), path)
    with pytest.raises(UserError, match="samples.parquet: not a complete file of samples"):
        open_samples(path)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="it is a folder, a pipe or a device"):
            open_samples(path)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    """The second is refused before it samples; after the first has ended another may replace the file."""
    path = tmp_path / "samples.parquet"
    with writing(path, 32, TEMPERATURE, "--out") as first:
        with (
            pytest.raises(
                UserError,
                match="--out: another process writes .*samples.parquet; wait until it has ended",
            ),
            writing(path, 32, TEMPERATURE, "--out"),
        ):
            pytest.fail("two write")
        first.write([group(1)])
    assert len(open_samples(path).groups(1)) == 1
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    write(path, [group(1), group(2)])
    assert len(open_samples(path).groups(1)) == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    problem = (
        f"--out: files in {tmp_path} cannot be locked ({os.strerror(number)}); mount it with locks"
    )
    with (
        pytest.raises(UserError, match=re.escape(problem)),
        writing(tmp_path / "samples.parquet", 32, TEMPERATURE, "--out"),
    ):
        pytest.fail("it is written without a lock")
    assert [*tmp_path.iterdir()] == []


def test_a_reward_that_is_no_number_is_refused_where_it_would_be_trained_on(tmp_path: Path) -> None:
    for reward in (np.nan, np.inf):
        bad = replace(group(2), rewards_G=np.array([0, reward, 1], np.float32))
        file = write(tmp_path / "samples.parquet", [group(1), bad])
        with pytest.raises(
            UserError, match="group 1 of step 1 has a reward that is not a finite number"
        ):
            file.groups(1)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("rows", None, "has no rows"),
        ("rows", [], "has no rows"),
        ("rows.engine_logp", [], "a row 0 with 2 tokens and 0 logprobs"),
        ("rows.response_ids", [-1, 1], "a negative token id"),
        ("rows.trained", None, "has a row without trained"),
        ("prompt_ids", None, "has no prompt_ids"),
        ("step", 2, "has the step number 2"),
        ("rows.experts", b"123", "has experts of type None"),
        ("rows.part_tokens", [1, 2], "a row 0 with 2 tokens and parts of 3"),
        ("rows.part_tokens", [0, 2], r"parts of \[0, 2\] tokens and of versions \[1, 3\]"),
        ("rows.versions", [3, 1], r"parts of \[1, 1\] tokens and of versions \[3, 1\]"),
        ("row", "{", "the row '{', which is not an object of JSON"),
        ("row", "[" * 200_000, "which is not an object of JSON"),
        ("row", "[1]", "which is not an object of JSON"),
        ("group", 7, "is sample 1 of group 7 and follows sample 0 of group 0"),
        ("sample", 2, "is sample 2 of group 0 and follows sample 0 of group 0"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 99 else "",
)
def test_rows_that_make_no_sample_are_refused(
    tmp_path: Path, column: str, value: Any, says: str
) -> None:
    """By another program that writes our columns."""
    path = write(tmp_path / "samples.parquet", [group(1)]).path

    def change(rows: list[Any]) -> None:
        place = rows[1]["rows"][0] if column.startswith("rows.") else rows[1]
        place[column.removeprefix("rows.")] = value

    assert refusal(path, change, says).startswith("sample 1 of step 1 ")


def test_experts_of_a_part_of_the_tokens_are_refused(tmp_path: Path) -> None:
    """As those of a response's last phase alone would be."""
    sample_group = group(1, experts=np.uint8)
    cut = [
        with_row(sample, routed_experts=sample.only_row.routed_experts[1:])  # type: ignore[index]
        for sample in sample_group.samples
    ]
    file = write(tmp_path / "samples.parquet", [replace(sample_group, samples=tuple(cut))])
    with pytest.raises(
        UserError, match="has a row 0 with 4 tokens of prompt and response, and the experts of 2"
    ):
        file.groups(1)


def test_a_file_that_fits_has_no_error(tmp_path: Path) -> None:
    file = write(
        tmp_path / "samples.parquet", [group(1, experts=np.uint8)], [group(2, experts=np.uint8)]
    )
    assert (
        told(
            file,
            "train.replay=r3",
            "train.tokens_per_micro_batch=6",
            "train.updates_per_step=3",
            context=6,
        )
        == []
    )


@pytest.mark.parametrize(
    ("overrides", "context", "says"),
    [
        (["run.steps=3"], None, "run.steps: 3 is more than the 2 steps in "),
        (
            ["train.tokens_per_micro_batch=5"],
            None,
            "train.tokens_per_micro_batch: 5 is less than the longest",
        ),
        ([], 5, "its longest sequence has 6 tokens, the model's context is 5"),
        (
            ["train.updates_per_step=4"],
            None,
            "train.updates_per_step: 4 is more than the 3 samples of a step",
        ),
        (["rollout.temperature=1.0"], None, "rollout.temperature: 1.0, and "),
        (["train.replay=r3"], None, "train.replay: r3 replays the experts that the engine chose"),
    ],
)
def test_what_does_not_fit_is_told_with_the_numbers(
    tmp_path: Path, overrides: list[str], context: int | None, says: str
) -> None:
    file = write(tmp_path / "samples.parquet", [group(1)], [group(2)])
    (line,) = told(file, *overrides, context=context)
    assert says in line
    assert str(file.path) in line


def test_a_sequence_is_held_against_the_budget_as_long_as_it_is_padded(tmp_path: Path) -> None:
    file = write(tmp_path / "samples.parquet", [group(1)], [group(2)])
    (error,) = sample_file_errors(file, roles("train.tokens_per_micro_batch=7", "train.cp=2"))
    assert (error.where, error.hint) == ("train.tokens_per_micro_batch", "set it to at least 8")


def test_another_vocabulary_is_told(tmp_path: Path) -> None:
    file = write(tmp_path / "samples.parquet", [group(1, top_id=40)], [group(2)])
    (line,) = told(file)
    assert line.startswith(
        f"{file.path}: it was sampled from a vocabulary of 32 (highest id 40); the vocabulary of"
    )


def test_experts_of_another_model_are_not_replayed(tmp_path: Path) -> None:
    file = write(
        tmp_path / "samples.parquet", [group(1, experts=np.uint8)], [group(2, experts=np.uint8)]
    )
    (line,) = told(
        file, "train.replay=r3", shape=ModelShape(**{**SHAPE.__dict__, "num_dense_layers": 0})
    )
    assert line.startswith("train.replay: ")


def test_another_temperature_is_told_with_what_to_write(tmp_path: Path) -> None:
    path = write(tmp_path / "samples.parquet", [group(1)], [group(2)]).path
    assert told(open_samples(path), f"rollout.temperature={TEMPERATURE}") == []
    (line,) = told(open_samples(path), "rollout.temperature=1.3")
    assert (
        line
        == f"rollout.temperature: 1.3, and {path} was sampled at 0.7; set it to 0.7, or sample anew"
    )


def test_samples_without_company_are_refused_where_they_are_compared(tmp_path: Path) -> None:
    """Groups that lost all but one sample are no fault, as long as there are others."""
    alone = write(tmp_path / "alone.parquet", [group(1, samples=1)], [group(2, samples=1)])
    mixed = write(tmp_path / "mixed.parquet", [group(1, samples=1)], [group(2, samples=2)])
    assert sample_file_errors(mixed, roles()) == []
    assert sample_file_errors(alone, roles("algorithm.name=ppo")) == []
    (error,) = sample_file_errors(alone, roles())
    assert error.where == "algorithm.name"
    assert (
        error.problem
        == f"grpo compares the samples of a prompt, and {alone.path} has one of each prompt"
    )


def test_greedy_samples_come_back_and_are_missed(tmp_path: Path) -> None:
    with_one = replace(
        group(1), samples=(*group(1).samples[:-1], replace(group(1).samples[-1], is_baseline=True))
    )
    file = write(tmp_path / "f.parquet", [with_one, group(2)])
    assert [sample.is_baseline for sample in file.groups(1)[0].samples] == [False, False, True]
    assert summary(file.groups(1)[0]).baseline == len(with_one.samples) - 1
    remax = roles("algorithm.name=remax", "run.steps=1")
    assert sample_file_errors(file, remax) == []
    other = write(tmp_path / "g.parquet", [group(1)], [group(2)])
    (error,) = sample_file_errors(other, remax)
    assert error.where == "algorithm.name" and error.hint == "sample with algorithm.name=remax"
