"""Whether a checkpoint fits the recipe, and when one is written."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.checkpoints.snapshots import MANIFEST, RUN, Snapshots, digest
from megarl.cluster import processes
from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.controller.resuming import (
    FOLDER,
    BufferState,
    Progress,
    find,
    model_errors,
    progress_of,
    resume,
)
from megarl.controller.saver import Saver
from megarl.data.streams import MixedStream, PromptStream
from megarl.fleet.rank_groups import GroupBuffer
from megarl.model.hf_config import model_shape
from megarl.placement.roles import resolve
from megarl.types import EndedEarly, GroupSummary, Prompt, SamplePart, UserError, UserErrors
from tests.samples.responses import response_rows

EMPTY = GroupBuffer()
SUMMARY: Any = "summary"
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def stream(count: int = 7) -> PromptStream:
    return PromptStream([Prompt(str(n), "", (n,), "") for n in range(count)], seed=1)


class Ranks:
    """The training ranks' side of a checkpoint: one file."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._folder = Path()

    def save(self, folder: Path) -> None:
        self.calls.append(f"save {folder.name.partition('.partial')[0]}")
        self._folder = folder

    def finish_save(self) -> dict[str, Any]:
        self.calls.append("finish")
        (self._folder / "rank-0.pt").write_bytes(b"weights")
        return {}

    def load(self, folder: Path) -> None:
        self.calls.append(f"load {folder.name}")


class Fleet(SimpleNamespace):
    def save(self, folder: Path, buffer: GroupBuffer) -> tuple[dict[str, Any], dict[str, float]]:
        self.saved = buffer
        self.trainers.save(folder)
        return {"rank-1.pt": 1}, {"memory/before_critic_bytes": 2.0}

    def finish_save(self, digests: dict[str, Any]) -> dict[str, Any]:
        assert digests == {"rank-1.pt": 1}, "as `save` returned them"
        return self.trainers.finish_save()

    def resume(self, folder: Path, version: int, attempts: int) -> list[tuple[str, Any, str]]:
        self.trainers.load(folder)
        self.version, self.attempts = version, attempts
        entries = self.saved.entries
        summaries = self.summaries or [SUMMARY] * len(entries)
        return [
            (entry.prompt.id, summary, f"ref {entry.number}")
            for entry, summary in zip(entries, summaries, strict=True)
        ]


@pytest.fixture
def fleet() -> Any:
    return Fleet(trainers=Ranks(), version=3, attempts=5, summaries=None)


@pytest.fixture
def made(tiny_model: Path, tmp_path: Path) -> Any:
    (tmp_path / "try").mkdir()  # as the run's log makes it, before anything is saved

    def make(*overrides: str) -> Recipe:
        base = [
            f"model.path={tiny_model}",
            f"run.dir={tmp_path}",
            "run.name=try",
            "run.steps=9",
            "checkpoint.every=4",
        ]
        return load_recipe(QUICKSTART, [*base, *overrides])

    return make


def saver(recipe: Recipe, fleet: Any, prompts: PromptStream, tmp_path: Path) -> Saver:
    fleet.roles = resolve(recipe)
    return Saver(recipe, fleet, prompts, tmp_path / "try", pytest.fail)


def run(recipe: Recipe, fleet: Any, prompts: PromptStream, tmp_path: Path) -> None:
    one = saver(recipe, fleet, prompts, tmp_path)
    one.begin(0, EMPTY)  # after a warm start
    for step in range(1, recipe.run.steps + 1):
        prompts.take(3)
        one.begin(step, EMPTY)
        fleet.version += 1
        one.settle(step)


def test_an_asynchronous_checkpoint_is_completed_a_step_later(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    run(made(), fleet, stream(), tmp_path)
    assert fleet.trainers.calls == [
        *("save .step-000000", "finish"),
        *("save .step-000004", "finish"),
        *("save .step-000008", "finish"),
        *("save .step-000009", "finish"),
    ]


def test_what_is_gone_on_from(made: Any, fleet: Any, tmp_path: Path) -> None:
    prompts = stream()
    run(made("checkpoint.asynchronous=false", "checkpoint.keep=2"), fleet, prompts, tmp_path)
    names = sorted(one.name for one in (tmp_path / "try" / FOLDER).iterdir())
    assert names == ["step-000008", "step-000009"]
    again, other = (
        stream(),
        Fleet(trainers=Ranks(), version=-1, attempts=0, saved=EMPTY, summaries=None),
    )
    found = find(made(), again, pytest.fail)
    assert found is not None and found.step == 9
    assert resume(found, made(), other, again) == EMPTY  # type: ignore[arg-type]
    assert (other.version, other.attempts, other.trainers.calls) == (11, 5, ["load step-000009"])
    assert again.taken == prompts.taken and again.take(5) == prompts.take(5)


def buffered(prompts: PromptStream) -> GroupBuffer:
    """Ten tickets of a stream whose first five prompts a warm start took: three wait, one of another step."""
    prompts.take(5)
    buffer = GroupBuffer().admitted(prompts.take(6), (1, 2), 3)
    first, *others = buffer.entries
    buffer = buffer.without_trained([others[0], others[2]]).without_dropped([first, *others[3:]])
    buffer = buffer.admitted(prompts.take(4), (1, 3), 3)
    return replace(buffer.without_trained(buffer.entries[2:4]), surplus=7)


def test_a_buffer_comes_back_with_the_prompts_of_its_drawn_prompts(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    """By their numbers in the data, because a file does not keep every type of a row's values."""
    prompts, recipe = stream(), made("checkpoint.asynchronous=false")
    buffer = buffered(prompts)
    assert [entry.number for entry in buffer.entries] == [2, 6, 9]
    one = saver(recipe, fleet, prompts, tmp_path)
    one.begin(4, buffer)
    one.settle(4)
    again = stream()
    found = find(recipe, again, pytest.fail)
    assert found is not None
    back = resume(found, recipe, fleet, again)
    assert [entry.ref for entry in back.entries] == ["ref 2", "ref 6", "ref 9"]
    assert [entry.prompt for entry in back.entries] == [entry.prompt for entry in buffer.entries]
    assert [entry.stream for entry in back.entries] == [(1, 2, 2), (1, 3, 0), (1, 3, 3)]
    assert (back.next_number, back.trained, back.dropped) == (
        buffer.next_number,
        buffer.trained,
        buffer.dropped,
    )
    assert back.surplus == 7
    assert again.taken == prompts.taken and again.take(5) == prompts.take(5)


OPEN = ["rollout.prompts_per_step=4", "rollout.prompts_in_flight=8", "rollout.phase_tokens=2"]


def saved(recipe: Recipe, fleet: Any, tmp_path: Path, *, is_open: bool) -> None:
    """A checkpoint of step 4, by version 3, with three groups: open, or complete and sampled by version 2."""
    prompts = stream()
    buffer = buffered(prompts)
    if not is_open:
        nothing = np.zeros(1, np.float32)
        rows = response_rows(1, [(SamplePart(2, 5),)])
        whole = GroupSummary("", "", ("",), rows, nothing > 0, nothing, nothing > 0)
        buffer = buffer.updated([replace(entry, summary=whole) for entry in buffer.entries])
    one = saver(recipe, fleet, prompts, tmp_path)
    one.begin(4, buffer)
    one.settle(4)


def refused(recipe: Recipe) -> list[str]:
    try:
        find(recipe, stream(), pytest.fail)
    except UserErrors as errors:
        return [error.where for error in errors.errors]
    return []


def test_what_open_responses_depend_on_is_refused_by_its_own_key_all_at_once(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    """Also what would raise no bound: of 16 tokens, 8 prompts a step and 16 in flight, 2 and 4 leave it as it is."""
    saved(made("checkpoint.asynchronous=false", *OPEN), fleet, tmp_path, is_open=True)
    assert refused(made(*OPEN, "train.replay=r2", "algorithm.name=rloo")) == [], (
        "r3 and greedy samples alone count"
    )
    changes = {
        "rollout.samples_per_prompt": 3, "rollout.temperature": 0.5, "rollout.top_p": 0.9,
        "rollout.max_response_tokens": 1, "rollout.phase_tokens": 1, "rollout.prompts_per_step": 2,
        "rollout.prompts_in_flight": 4, "algorithm.name": "remax", "algorithm.dynamic_sampling": "true",
        "train.replay": "r3",
    }  # fmt: skip
    told = refused(made(*(f"{key}={value}" for key, value in changes.items())))
    assert sorted(told) == sorted([*changes, "algorithm.oversample"])
    for key, value in changes.items():
        assert key in refused(made(*OPEN, f"{key}={value}"))
    says = "rollout.phase_tokens: 1, and .*step-000004 has responses that have not ended, of a run with 2; set it to 2,"
    with pytest.raises(UserErrors, match=says):
        find(made(*OPEN, "rollout.phase_tokens=1"), stream(), pytest.fail)


def test_complete_groups_wait_for_steps_of_any_size(made: Any, fleet: Any, tmp_path: Path) -> None:
    """Two of three wait for two steps of one group each, the first of which has version 4."""
    saved(
        made("checkpoint.asynchronous=false", "rollout.prompts_per_step=4"),
        fleet,
        tmp_path,
        is_open=False,
    )
    smaller = made("rollout.prompts_per_step=1", "rollout.max_response_tokens=1")
    found = find(smaller, stream(), pytest.fail)
    assert found is not None
    fleet.summaries = [entry.summary for entry in fleet.saved.entries]
    assert resume(found, smaller, fleet, stream()).loaded_bound == 4 - 2 + 2
    assert refused(made("rollout.temperature=0.5", "train.replay=r3")) == [
        "rollout.temperature",
        "train.replay",
    ]


def test_without_waiting_groups_anything_may_change(made: Any, fleet: Any, tmp_path: Path) -> None:
    run(made(*OPEN), fleet, stream(), tmp_path)
    assert (
        refused(made("rollout.temperature=0.5", "train.replay=r3", "rollout.max_response_tokens=1"))
        == []
    )


def test_samples_of_another_prompt_than_the_datas_are_refused(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    recipe = made("checkpoint.asynchronous=false")
    saved(recipe, fleet, tmp_path, is_open=True)
    found = find(recipe, stream(), pytest.fail)
    assert found is not None
    one, *others = fleet.saved.entries
    strange = replace(one, prompt=Prompt("row 77", "", (1,), ""))
    fleet.saved = replace(fleet.saved, entries=(strange, *others))
    with pytest.raises(
        UserError, match="data.train: .* has samples of row 77, and the data has . in its place"
    ):
        resume(found, recipe, fleet, stream())


@pytest.mark.parametrize(
    "changes", [{"trained": 0b11}, {"dropped": 0}, {"next_number": 11}, {"entries": ()}]
)
def test_no_checkpoint_is_written_that_lost_a_prompt_or_has_one_twice(
    made: Any, fleet: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    one, prompts = saver(made(), fleet, stream(), tmp_path), stream()
    with pytest.raises(
        RuntimeError, match="prompts that were drawn are not each of .* exactly once"
    ):
        one.begin(4, replace(buffered(prompts), **changes))


def test_a_mix_of_files_goes_on_where_it_was_and_other_weights_are_refused(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    def mixed(*weights: float) -> MixedStream:
        files = [
            [Prompt(f"{name}{n}", "", (n,), "") for n in range(size)]
            for name, size in (("a", 7), ("b", 11))
        ]
        return MixedStream(files, weights, seed=1)

    prompts = mixed(3.0, 1.0)
    run(made(), fleet, prompts, tmp_path)
    again, other = (
        mixed(3.0, 1.0),
        Fleet(trainers=Ranks(), version=-1, attempts=0, saved=EMPTY, summaries=None),
    )
    found = find(made(), again, pytest.fail)
    assert found is not None and found.run["prompts_taken"] == 27
    resume(found, made(), other, again)  # type: ignore[arg-type]
    assert again.taken == prompts.taken and again.take(40) == prompts.take(40)
    with pytest.raises(
        UserErrors, match="data.train: its rows, or the weights of its files, have changed since"
    ):
        find(made(), mixed(3.0, 2.0), pytest.fail)


def test_the_readings_of_memory_are_those_of_a_checkpoint_that_is_begun(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    one = saver(made(), fleet, stream(), tmp_path)
    assert one.begin(3, EMPTY) == {}
    assert one.begin(4, EMPTY) == {"memory/before_critic_bytes": 2.0}


def test_no_checkpoints_unless_they_are_asked_for(made: Any, fleet: Any, tmp_path: Path) -> None:
    run(made("checkpoint.every=null"), fleet, stream(), tmp_path)
    assert fleet.trainers.calls == []
    assert find(made(), stream(), pytest.fail) is None


def test_a_wish_to_end_costs_nothing_that_was_learnt(
    made: Any, fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no checkpoint is ever due: one is written after the publication, as if it had been before it."""
    prompts, recipe = stream(), made("checkpoint.every=null")
    one = saver(recipe, fleet, prompts, tmp_path)
    monkeypatch.setattr(processes, "is_end_wanted", lambda: False)
    one.leave_if_wanted()
    prompts.take(3)
    one.begin(1, buffered(stream()))
    fleet.version += 1
    one.settle(1)
    monkeypatch.setattr(processes, "is_end_wanted", lambda: True)
    with pytest.raises(EndedEarly, match="the checkpoint of step 1 is complete"):
        one.leave_if_wanted()
    found = find(recipe, stream(), pytest.fail)
    assert found is not None and found.step == 1 and len(fleet.saved.entries) == 3
    assert (found.run["version"], found.run["prompts_taken"]) == (3, 3), (
        "what step 1's publication is repeated from"
    )


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_wish_to_end_completes_what_was_begun_and_writes_no_second(
    made: Any, fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: str
) -> None:
    one = saver(made(f"checkpoint.asynchronous={asynchronous}"), fleet, stream(), tmp_path)
    one.begin(4, EMPTY)
    one.settle(4)
    monkeypatch.setattr(processes, "is_end_wanted", lambda: True)
    with pytest.raises(EndedEarly, match="step 4"):
        one.leave_if_wanted()
    assert fleet.trainers.calls == ["save .step-000004", "finish"]


def test_a_wish_to_end_before_anything_was_learnt_saves_nothing(
    made: Any, fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "is_end_wanted", lambda: True)
    with pytest.raises(EndedEarly, match="nothing new to save"):
        saver(made(), fleet, stream(), tmp_path).leave_if_wanted()
    assert fleet.trainers.calls == []


def test_every_reason_not_to_go_on_is_told_at_once(
    made: Any, tiny_model: Path, tmp_path: Path
) -> None:
    snapshots = Snapshots(tmp_path / "try" / FOLDER, pytest.fail)
    shape = asdict(model_shape(tiny_model)) | {"num_layers": 8}
    shape = json.loads(json.dumps(shape))
    data = stream(11).fingerprint
    known = {"seed": 7, "trains_mtp": False, "critic": None, "sampling": {}}
    progress = Progress(
        5, 2, 3, prompts_taken=9, data=data, shape=shape, buffer=BufferState.of(EMPTY), **known
    )
    snapshots.commit(snapshots.begin(5), asdict(progress), {}, keep=1)
    with pytest.raises(UserErrors) as caught:
        find(made("train.mtp_loss=0.1"), stream(), pytest.fail)
    told = [str(error) for error in caught.value.errors]
    keys = ["model.path", "data.train", "run.seed", "train.mtp_loss"]
    assert [line.split(":")[0] for line in told] == keys
    assert "is of a model with num_layers 8, this one has 4" in told[0]
    assert "its rows, or the weights of its files, have changed since" in told[1]
    assert "1 shuffles the data differently from 7" in told[2]


def test_a_shape_that_is_older_than_one_of_its_fields_is_the_same_shape(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    run(made(), fleet, stream(), tmp_path)
    found = find(made(), stream(), pytest.fail)
    assert found is not None and found.run["shape"].pop("attention") == "grouped_query"
    assert model_errors(found, made()) == []


def test_a_checkpoint_with_an_earlier_name_of_the_buffer_is_read(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    run(made(), fleet, stream(), tmp_path)
    found = find(made(), stream(), pytest.fail)
    assert found is not None
    before = progress_of(found)
    renamed = {"stock" if key == "buffer" else key: value for key, value in found.run.items()}
    assert progress_of(replace(found, run=renamed)) == before


STATE = BufferState.of(EMPTY)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"buffer": []}, "has [] as buffer in its state"),
        ({"seed": "1"}, 'has "1" as seed in its state'),
        ({"prompts_taken": None}, "has null as prompts_taken in its state"),
        ({"prompts_taken": -1}, "has -1 as prompts_taken in its state"),
        ({"step": 8}, "is of step 9 by its manifest, and of step 8 by its state"),
        ({"buffer": {"next_number": 0}}, "was written by another version of megarl"),
        ({"buffer": STATE | {"trained": "no digits"}}, 'has "no digits" as trained in its state'),
        ({"buffer": STATE | {"streams": {"x": [1]}}}, 'has "x" as streams.x.[key] in its state'),
        ({"buffer": STATE | {"streams": {"0": None}}}, "has null as streams.0 in its state"),
        ({"color": "blue"}, "was written by another version of megarl"),
    ],
)
def test_a_state_that_somebody_changed_is_refused_in_one_line(
    made: Any, fleet: Any, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """With the right checksum: the checksums detect damage, not forgery."""
    run(made(), fleet, stream(), tmp_path)
    folder = tmp_path / "try" / FOLDER / "step-000009"
    (folder / RUN).write_text(json.dumps(json.loads((folder / RUN).read_text()) | changes))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][RUN] = asdict(digest(folder / RUN))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserErrors) as caught:
        find(made(), stream(), pytest.fail)
    (error,) = caught.value.errors
    assert str(error).startswith(f"{folder}: {told}")


def test_a_damaged_checkpoint_is_passed_over_loudly(made: Any, fleet: Any, tmp_path: Path) -> None:
    run(made(), fleet, stream(), tmp_path)
    (tmp_path / "try" / FOLDER / "step-000009" / "rank-0.pt").write_bytes(b"weighty")
    said: list[str] = []
    found = find(made(), stream(), said.append)
    assert found is not None and found.step == 8
    assert (
        len(said) == 1
        and "step-000009 is damaged and skipped: rank-0.pt has other bytes" in said[0]
    )


def test_a_failure_does_not_cost_what_was_begun_before(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    """What an earlier step began is completed; a step that failed has no record, so its checkpoint is worth nothing."""
    one = saver(made(), fleet, stream(), tmp_path)
    one.begin(4, EMPTY)
    one.rescue(4)
    assert fleet.trainers.calls == ["save .step-000004"], "step 4 itself failed"
    one.settle(4)
    one.rescue(5)
    assert fleet.trainers.calls[-1] == "finish"
    found = find(made(), stream(), pytest.fail)
    assert found is not None and found.step == 4


def test_adapters_fit_the_weights_and_sizes_of_their_run(
    made: Any, fleet: Any, tmp_path: Path
) -> None:
    recipe = made("lora.rank=4")
    run(recipe, fleet, stream(), tmp_path)
    found = find(recipe, stream(), pytest.fail)
    assert found is not None and model_errors(found, recipe) == []
    assert (
        model_errors(found, made("lora.rank=4", "lora.sync=adapters", "lora.rounding=nearest"))
        == []
    )
    (error,) = model_errors(found, made("lora.rank=8"))
    assert str(error).startswith("lora.rank: 8, and ") and "was written with 4; set it to 4" in str(
        error
    )
    assert model_errors(found, made("lora.rank=4", "lora.experts=2")) == [], (
        "4 / 2 experts of a token"
    )
    (error,) = model_errors(found, made("lora.rank=4", "lora.experts=4"))
    assert str(error).startswith(
        "lora.experts: 4, and "
    ) and "was written with 2; set it to 2" in str(error)
    (error,) = model_errors(found, made())
    assert str(error).startswith("lora: ") and "has adapters alone" in str(error)
    found.run["lora"]["base"] = "another"
    (error,) = model_errors(found, recipe)
    assert str(error).startswith("model.path: its weights are not those to which the adapters of")
