"""Whether a checkpoint fits the recipe, and when one is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.checkpoints.snapshots import MANIFEST, RUN, Snapshot, Snapshots, digest
from megarl.cluster import processes
from megarl.cluster.failures import WorkerFailed
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
from megarl.disk import writing
from megarl.fleet.rank_groups import GroupBuffer
from megarl.model.hf_config import model_shape
from megarl.placement.roles import resolve
from megarl.types import (
    DiskFault,
    Drained,
    EndedEarly,
    GroupSummary,
    Prompt,
    SamplePart,
    UserError,
    UserErrors,
)
from tests.samples.responses import response_rows
from tests.small_disk import small_disk
from tests.test_disk import fill

EMPTY = GroupBuffer()
SUMMARY: Any = "summary"
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def stream(count: int = 7) -> PromptStream:
    return PromptStream([Prompt(str(n), "", (n,), "") for n in range(count)], seed=1)


class Ranks:
    """The training ranks' side of a checkpoint: one file."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.are_slow = False
        self._folder = Path()

    def save(self, folder: Path) -> None:
        self.calls.append(f"save {folder.name.partition('.partial')[0]}")
        self._folder = folder

    def finish_save(self) -> dict[str, Any]:
        self.calls.append("finish")
        with writing(self._folder.parent, "a checkpoint"):
            (self._folder / "rank-0.pt").write_bytes(b"weights")
        return {}

    def load(self, folder: Path) -> None:
        self.calls.append(f"load {folder.name}")


class Fleet(SimpleNamespace):
    def save(self, folder: Path, buffer: GroupBuffer) -> tuple[dict[str, Any], dict[str, float]]:
        self.saved = buffer
        self.trainers.save(folder)
        return {"rank-1.pt": 1}, {"memory/before_critic_bytes": 2.0}

    def has_saved(self) -> bool:
        return not self.trainers.are_slow

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


class Runs:
    """A run's folder, with the fleet whose checkpoints are in it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder / "try"
        self.folder.mkdir()  # as the run's log makes it, before anything is saved
        self.fleet: Any = Fleet(trainers=Ranks(), version=3, attempts=5, summaries=None)
        self.calls: list[str] = self.fleet.trainers.calls
        self.say: Callable[[str], None] = pytest.fail
        self.drain: Any = None
        self._keys = [f"model.path={model}", f"run.dir={folder}", "run.name=try"]

    def recipe(self, *overrides: str) -> Recipe:
        return load_recipe(
            QUICKSTART, [*self._keys, "run.steps=9", "checkpoint.every=4", *overrides]
        )

    def saver(self, *overrides: str, prompts: PromptStream | None = None) -> Saver:
        recipe = self.recipe(*overrides)
        self.fleet.roles = resolve(recipe)
        return Saver(recipe, self.fleet, prompts or stream(), self.folder, self.say, self.drain)

    def all(self, *overrides: str, prompts: PromptStream | None = None) -> None:
        """All steps of a run."""
        prompts = prompts or stream()
        saver = self.saver(*overrides, prompts=prompts)
        saver.begin(0, EMPTY)  # after a warm start
        for step in range(1, 10):
            prompts.take(3)
            saver.begin(step, EMPTY)
            self.fleet.version += 1
            saver.settle(step)

    def save(self, buffer: GroupBuffer, *overrides: str, prompts: PromptStream) -> None:
        """The checkpoint of step 4."""
        saver = self.saver("checkpoint.asynchronous=false", *overrides, prompts=prompts)
        saver.begin(4, buffer)
        saver.settle(4)

    def find(self, *overrides: str, prompts: PromptStream | None = None) -> Snapshot:
        snapshot = find(self.recipe(*overrides), prompts or stream(), pytest.fail)
        assert snapshot is not None
        return snapshot

    def refused(self, *overrides: str) -> list[UserError]:
        """The errors of a run that would resume with these keys."""
        try:
            self.find(*overrides)
        except UserErrors as errors:
            return list(errors.errors)
        return []


@pytest.fixture
def runs(tiny_model: Path, tmp_path: Path) -> Runs:
    return Runs(tiny_model, tmp_path)


def other_fleet() -> Any:
    """The fleet of a process that resumes."""
    return Fleet(trainers=Ranks(), version=-1, attempts=0, saved=EMPTY, summaries=None)


def test_an_asynchronous_checkpoint_is_completed_a_step_later(runs: Runs) -> None:
    runs.all()
    assert runs.calls == [
        *("save .step-000000", "finish"),
        *("save .step-000004", "finish"),
        *("save .step-000008", "finish"),
        *("save .step-000009", "finish"),
    ]


def test_what_is_gone_on_from(runs: Runs) -> None:
    prompts = stream()
    runs.all("checkpoint.asynchronous=false", "checkpoint.keep=2", prompts=prompts)
    names = sorted(path.name for path in (runs.folder / FOLDER).iterdir())
    assert names == ["step-000008", "step-000009"]
    again, other = stream(), other_fleet()
    snapshot = runs.find(prompts=again)
    assert snapshot.step == 9
    assert resume(snapshot, runs.recipe(), other, again) == EMPTY
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


def test_a_buffer_comes_back_with_the_prompts_of_its_drawn_prompts(runs: Runs) -> None:
    """By their numbers in the data, because a file does not keep every type of a row's values."""
    prompts, again = stream(), stream()
    buffer = buffered(prompts)
    assert [entry.number for entry in buffer.entries] == [2, 6, 9]
    runs.save(buffer, prompts=prompts)
    back = resume(runs.find(prompts=again), runs.recipe(), runs.fleet, again)
    assert [entry.ref for entry in back.entries] == ["ref 2", "ref 6", "ref 9"]
    assert [entry.stream for entry in back.entries] == [(1, 2, 2), (1, 3, 0), (1, 3, 3)]
    unsampled = [
        replace(entry, summary=whole.summary, ref=None)
        for entry, whole in zip(back.entries, buffer.entries, strict=True)
    ]
    assert replace(back, entries=tuple(unsampled)) == buffer
    assert again.taken == prompts.taken and again.take(5) == prompts.take(5)


OPEN = ["rollout.prompts_per_step=4", "rollout.prompts_in_flight=8", "rollout.phase_tokens=2"]


def wheres(errors: list[UserError]) -> list[str]:
    return [error.where for error in errors]


def test_what_open_responses_depend_on_is_refused_by_its_own_key_all_at_once(runs: Runs) -> None:
    """Also what would raise no bound: of 16 tokens, 8 prompts a step and 16 in flight, 2 and 4 leave it as it is."""
    prompts = stream()
    runs.save(buffered(prompts), *OPEN, prompts=prompts)
    assert runs.refused(*OPEN, "train.replay=r2", "algorithm.name=rloo") == [], (
        "r3 and greedy samples alone count"
    )
    changes = {
        "rollout.samples_per_prompt": 3, "rollout.temperature": 0.5, "rollout.top_p": 0.9,
        "rollout.max_response_tokens": 1, "rollout.phase_tokens": 1, "rollout.prompts_per_step": 2,
        "rollout.prompts_in_flight": 4, "algorithm.name": "remax", "algorithm.dynamic_sampling": "true",
        "train.replay": "r3",
    }  # fmt: skip
    keys = wheres(runs.refused(*(f"{key}={value}" for key, value in changes.items())))
    assert sorted(keys) == sorted([*changes, "algorithm.oversample"])
    for key, value in changes.items():
        assert key in wheres(runs.refused(*OPEN, f"{key}={value}"))
    says = "rollout.phase_tokens: 1, and .*step-000004 has responses that have not ended, of a run with 2; set it to 2,"
    (error,) = runs.refused(*OPEN, "rollout.phase_tokens=1")
    assert re.match(says, str(error))


def test_complete_groups_wait_for_steps_of_any_size(runs: Runs) -> None:
    """Two of three, sampled by version 2, wait for two steps of one group each, the first of which has version 4."""
    prompts = stream()
    buffer = buffered(prompts)
    nothing = np.zeros(1, np.float32)
    rows = response_rows(1, [(SamplePart(2, 5),)])
    whole = GroupSummary("", "", ("",), rows, nothing > 0, nothing, nothing > 0)
    buffer = buffer.updated([replace(entry, summary=whole) for entry in buffer.entries])
    runs.save(buffer, "rollout.prompts_per_step=4", prompts=prompts)
    runs.fleet.summaries = [whole] * 3
    smaller = ("rollout.prompts_per_step=1", "rollout.max_response_tokens=1")
    resumed = resume(runs.find(*smaller), runs.recipe(*smaller), runs.fleet, stream())
    assert resumed.loaded_bound == 4 - 2 + 2
    changed = wheres(runs.refused("rollout.temperature=0.5", "train.replay=r3"))
    assert changed == ["rollout.temperature", "train.replay"]


def test_without_waiting_groups_anything_may_change(runs: Runs) -> None:
    runs.all(*OPEN)
    changes = ("rollout.temperature=0.5", "train.replay=r3", "rollout.max_response_tokens=1")
    assert runs.refused(*changes) == []


def test_samples_of_another_prompt_than_the_datas_are_refused(runs: Runs) -> None:
    prompts = stream()
    runs.save(buffered(prompts), prompts=prompts)
    entry, *others = runs.fleet.saved.entries
    strange = replace(entry, prompt=Prompt("row 77", "", (1,), ""))
    runs.fleet.saved = replace(runs.fleet.saved, entries=(strange, *others))
    with pytest.raises(
        UserError, match="data.train: .* has samples of row 77, and the data has . in its place"
    ):
        resume(runs.find(), runs.recipe(), runs.fleet, stream())


@pytest.mark.parametrize(
    "changes", [{"trained": 0b11}, {"dropped": 0}, {"next_number": 11}, {"entries": ()}]
)
def test_no_checkpoint_is_written_that_lost_a_prompt_or_has_one_twice(
    runs: Runs, changes: dict[str, Any]
) -> None:
    with pytest.raises(
        RuntimeError, match="prompts that were drawn are not each of .* exactly once"
    ):
        runs.saver().begin(4, replace(buffered(stream()), **changes))


def test_a_mix_of_files_goes_on_where_it_was_and_other_weights_are_refused(runs: Runs) -> None:
    def mixed(*weights: float) -> MixedStream:
        files = [
            [Prompt(f"{name}{n}", "", (n,), "") for n in range(size)]
            for name, size in (("a", 7), ("b", 11))
        ]
        return MixedStream(files, weights, seed=1)

    prompts, again = mixed(3.0, 1.0), mixed(3.0, 1.0)
    runs.all(prompts=prompts)
    snapshot = runs.find(prompts=again)
    assert snapshot.run["prompts_taken"] == 27
    resume(snapshot, runs.recipe(), other_fleet(), again)
    assert again.taken == prompts.taken and again.take(40) == prompts.take(40)
    with pytest.raises(
        UserErrors, match="data.train: its rows, or the weights of its files, have changed since"
    ):
        runs.find(prompts=mixed(3.0, 2.0))


def test_the_readings_of_memory_are_those_of_a_checkpoint_that_is_begun(runs: Runs) -> None:
    saver = runs.saver()
    assert saver.begin(3, EMPTY) == {}
    assert saver.begin(4, EMPTY) == {"memory/before_critic_bytes": 2.0, "checkpoint/failed": 0}


def test_no_checkpoints_unless_they_are_asked_for(runs: Runs) -> None:
    runs.all("checkpoint.every=null")
    assert runs.calls == []
    assert find(runs.recipe(), stream(), pytest.fail) is None


@pytest.fixture
def end_wanted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether SIGUSR1 has come: once the list has an item."""
    signals: list[bool] = []
    monkeypatch.setattr(processes, "is_end_wanted", lambda: bool(signals))
    return signals


def test_a_wish_to_end_costs_nothing_that_was_learnt(runs: Runs, end_wanted: list[bool]) -> None:
    """Also where no checkpoint is ever due: one is written after the publication, as if it had been before it."""
    prompts = stream()
    saver = runs.saver("checkpoint.every=null", prompts=prompts)
    saver.leave_if_wanted()
    prompts.take(3)
    saver.begin(1, buffered(stream()))
    runs.fleet.version += 1
    saver.settle(1)
    end_wanted.append(True)
    with pytest.raises(EndedEarly, match="the checkpoint of step 1 is complete"):
        saver.leave_if_wanted()
    snapshot = runs.find("checkpoint.every=null")
    assert snapshot.step == 1 and len(runs.fleet.saved.entries) == 3
    assert (snapshot.run["version"], snapshot.run["prompts_taken"]) == (3, 3), (
        "what step 1's publication is repeated from"
    )


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_wish_to_end_completes_what_was_begun_and_writes_no_second(
    runs: Runs, end_wanted: list[bool], asynchronous: str
) -> None:
    saver = runs.saver(f"checkpoint.asynchronous={asynchronous}")
    saver.begin(4, EMPTY)
    saver.settle(4)
    end_wanted.append(True)
    with pytest.raises(EndedEarly, match="step 4"):
        saver.leave_if_wanted()
    assert runs.calls == ["save .step-000004", "finish"]


def test_a_wish_to_end_before_anything_was_learnt_saves_nothing(
    runs: Runs, end_wanted: list[bool]
) -> None:
    end_wanted.append(True)
    with pytest.raises(EndedEarly, match="nothing new to save"):
        runs.saver().leave_if_wanted()
    assert runs.calls == []


def test_every_reason_not_to_go_on_is_told_at_once(runs: Runs, tiny_model: Path) -> None:
    snapshots = Snapshots(runs.folder / FOLDER, pytest.fail)
    shape: dict[str, Any] = asdict(model_shape(tiny_model)) | {"num_layers": 8}
    known: dict[str, Any] = {"seed": 7, "trains_mtp": False, "critic": None, "sampling": {}}
    data = stream(11).fingerprint
    progress = Progress(5, 2, 3, prompts_taken=9, data=data, shape=shape, buffer=STATE, **known)
    snapshots.commit(snapshots.begin(5), asdict(progress), {}, keep=1)
    errors = runs.refused("train.mtp_loss=0.1", "train.optimizer_name=muon")
    keys = ["run.seed", "train.mtp_loss", "train.optimizer_name"]
    assert wheres(errors) == ["model.path", "data.train", *keys]
    lines = list(map(str, errors))
    assert "is of a model with num_layers 8, this one has 4" in lines[0]
    assert "its rows, or the weights of its files, have changed since" in lines[1]
    assert "1 shuffles the data differently from 7" in lines[2]
    assert "has the state of adamw; set it to adamw" in lines[4]


OWN_FAMILY = """
from dataclasses import replace
from megarl.model.families import FAMILIES
ROW = replace(FAMILIES["Qwen3MoeForCausalLM"], models="my own")
"""


def test_another_family_or_scaling_of_positions_is_refused_by_its_key(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is older than the record of these keys goes on with any."""
    (tmp_path / "row_of_saver.py").write_text(OWN_FAMILY)
    monkeypatch.syspath_prepend(str(tmp_path))
    scaling = "model.rope_scaling={factor: 4, original_max_position_embeddings: 32}"
    family = "model.family=row_of_saver:ROW"
    runs.all(scaling)
    assert runs.refused(scaling) == []
    of_scaling, of_family = map(str, reversed(runs.refused(family)))
    assert "model.family: row_of_saver:ROW, and" in of_family
    assert of_family.endswith("was written with null; set it to null, or choose another run.name")
    assert of_scaling.startswith("model.rope_scaling: null, and")
    assert '"factor": 4.0' in of_scaling
    assert wheres(runs.refused(scaling.replace("4", "8"))) == ["model.rope_scaling"]
    snapshot = runs.find(scaling)
    older = {key: value for key, value in snapshot.run.items() if key != "model"}
    assert model_errors(replace(snapshot, run=older), runs.recipe()) == []


def test_a_shape_that_is_older_than_one_of_its_fields_is_the_same_shape(runs: Runs) -> None:
    """And where it has a field that is gone."""
    runs.all()
    snapshot = runs.find()
    assert snapshot.run["shape"].pop("family") == "Qwen3MoeForCausalLM"
    snapshot.run["shape"]["attention"] = "grouped_query"
    assert model_errors(snapshot, runs.recipe()) == []


def test_a_checkpoint_with_an_earlier_name_of_the_buffer_is_read(runs: Runs) -> None:
    runs.all()
    snapshot = runs.find()
    renamed = {"stock" if key == "buffer" else key: value for key, value in snapshot.run.items()}
    assert progress_of(replace(snapshot, run=renamed)) == progress_of(snapshot)


def test_a_checkpoint_says_its_format_and_one_without_is_of_the_first(runs: Runs) -> None:
    runs.all()
    snapshot = runs.find()
    assert snapshot.run["format"] == progress_of(snapshot).format == 2
    first = {key: value for key, value in snapshot.run.items() if key != "format"}
    assert progress_of(replace(snapshot, run=first)).format == 1


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
        (
            {"format": 3, "color": "blue"},
            "is a checkpoint of format 3, and this version reads 1 to 2; "
            "use the version of megarl that wrote it, or another run",
        ),
        ({"format": 0}, "is a checkpoint of format 0, and this version reads 1 to 2"),
        ({"format": "2"}, 'has "2" as format in its state'),
    ],
)
def test_a_state_that_somebody_changed_is_refused_in_one_line(
    runs: Runs, changes: dict[str, Any], told: str
) -> None:
    """With the right checksum: the checksums detect damage, not forgery."""
    runs.all()
    folder = runs.folder / FOLDER / "step-000009"
    (folder / RUN).write_text(json.dumps(json.loads((folder / RUN).read_text()) | changes))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][RUN] = asdict(digest(folder / RUN))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (error,) = runs.refused()
    assert str(error).startswith(f"{folder}: {told}")


def test_a_damaged_checkpoint_is_passed_over_loudly(runs: Runs) -> None:
    runs.all()
    (runs.folder / FOLDER / "step-000009" / "rank-0.pt").write_bytes(b"weighty")
    lines: list[str] = []
    snapshot = find(runs.recipe(), stream(), lines.append)
    assert snapshot is not None and snapshot.step == 8
    (line,) = lines
    assert "step-000009 is damaged and skipped: rank-0.pt has other bytes" in line


def test_a_failure_does_not_cost_what_was_begun_before(runs: Runs) -> None:
    """What an earlier step began is completed; a step that failed has no record, so its checkpoint is worth nothing."""
    saver = runs.saver()
    saver.begin(4, EMPTY)
    saver.rescue()
    assert runs.calls == ["save .step-000004"], "step 4 itself failed"
    saver.settle(4)
    saver.rescue()
    assert runs.calls[-1] == "finish"
    assert runs.find().step == 4


def test_what_lost_ranks_were_writing_is_written_again_in_its_step(runs: Runs) -> None:
    """With the state of the run as it was then, whatever the run has done since."""
    prompts = stream()
    saver = runs.saver(prompts=prompts)
    prompts.take(3)
    saver.begin(4, EMPTY)
    saver.settle(4)
    runs.fleet.version += 1
    prompts.take(3)
    saver.begin(5, EMPTY)
    saver.set_aside()
    assert not [*(runs.folder / FOLDER).iterdir()] and saver.saved is None
    saver.rescue()
    saver.save_again(3)
    assert runs.calls == ["save .step-000004"], "it is of another step"
    saver.save_again(4)
    assert runs.calls[1:] == ["save .step-000004", "finish"]
    saver.save_again(4)
    assert len(runs.calls) == 3, "it is there"
    then = progress_of(runs.find())
    assert (then.step, then.version, then.prompts_taken) == (4, 3, 3)
    assert saver.saved and (saver.saved.step, saver.saved.version) == (4, 4)
    assert saver.saved.folder == (runs.folder / FOLDER / "step-000004").absolute()


def test_a_checkpoint_that_was_lost_while_it_was_begun_is_written_once(runs: Runs) -> None:
    """The ranks are brought back in between, and write it again, before the step begins it for the second time."""
    saver = runs.saver("checkpoint.asynchronous=false")
    saver.begin(4, EMPTY)
    saver.set_aside()
    saver.save_again(4)
    assert saver.begin(4, EMPTY) == {"checkpoint/failed": 0}
    assert saver.is_open
    saver.settle(4)
    assert runs.calls == ["save .step-000004", "save .step-000004", "finish"]
    assert not saver.is_open and runs.find().step == 4


def test_a_checkpoint_that_is_lost_again_while_it_is_written_again_keeps_its_record(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = runs.saver()
    saver.begin(4, EMPTY)
    saver.settle(4)
    saver.set_aside()
    with monkeypatch.context() as patch, pytest.raises(WorkerFailed):
        patch.setattr(runs.fleet.trainers, "save", lost)
        saver.save_again(4)
    saver.set_aside()
    saver.save_again(4)
    assert not saver.is_open and runs.find().step == 4, "it was complete at once"


def lost(*_: object) -> None:
    raise WorkerFailed("training rank 0: its process died", "traceback", "training rank 0")


def test_a_checkpoint_of_a_state_that_ranks_do_not_have_again_is_given_up_in_a_line(
    runs: Runs,
) -> None:
    lines: list[str] = []
    runs.say = lines.append
    saver = runs.saver()
    saver.begin(4, EMPTY)
    saver.set_aside()
    saver.save_again(5)
    saver.save_again(4)
    assert lines == ["the checkpoint of step 4 is not written: the ranks that wrote it are lost"]
    assert runs.calls == ["save .step-000004"]


def test_a_run_that_goes_back_to_a_step_with_a_checkpoint_writes_no_second(
    runs: Runs, end_wanted: list[bool]
) -> None:
    saver = runs.saver("checkpoint.asynchronous=false")
    saver.begin(4, EMPTY)
    saver.settle(4)
    saver.go_back(4, EMPTY)
    end_wanted.append(True)
    with pytest.raises(EndedEarly, match="the checkpoint of step 4 is complete"):
        saver.leave_if_wanted()
    assert runs.calls == ["save .step-000004", "finish"]


def test_a_run_that_goes_back_saves_what_it_goes_back_to(
    runs: Runs, end_wanted: list[bool]
) -> None:
    """After a wish to end; and nothing before its first step."""
    prompts = stream()
    saver = runs.saver(prompts=prompts)
    saver.begin(4, EMPTY)
    saver.go_back(3, EMPTY)
    end_wanted.append(True)
    with pytest.raises(EndedEarly, match="the checkpoint of step 3"):
        saver.leave_if_wanted()
    assert runs.find().step == 3
    saver.go_back(0, EMPTY)
    assert saver.saved is None, "from which no rank goes on: the run begins again"
    with pytest.raises(EndedEarly, match="nothing new to save"):
        saver.leave_if_wanted()


def test_adapters_fit_the_weights_and_sizes_of_their_run(runs: Runs) -> None:
    rank = "lora.rank=4"
    runs.all(rank)
    snapshot = runs.find(rank)

    def told(*overrides: str) -> str:
        return " ".join(map(str, model_errors(snapshot, runs.recipe(*overrides))))

    assert told(rank) == told(rank, "lora.sync=adapters", "lora.rounding=nearest") == ""
    assert re.match("lora.rank: 8, and .* was written with 4; set it to 4", told("lora.rank=8"))
    assert told(rank, "lora.experts=2") == "", "4 / 2 experts of a token"
    other_experts = told(rank, "lora.experts=4")
    assert re.match("lora.experts: 4, and .* was written with 2; set it to 2", other_experts)
    assert re.match("lora: .* has adapters alone", told())
    snapshot.run["lora"]["base"] = "another"
    assert re.match("model.path: its weights are not those to which the adapters of", told(rank))


def test_a_checkpoint_that_was_not_all_begun_is_not_completed(
    runs: Runs, end_wanted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = runs.saver("checkpoint.every=null")
    one.begin(1, EMPTY)
    one.settle(1)
    end_wanted.append(True)

    def fail(*_: Any) -> None:
        raise RuntimeError("a rank has died")

    monkeypatch.setattr(runs.fleet, "save", fail)
    with pytest.raises(RuntimeError):
        one.leave_if_wanted()
    one.rescue()
    assert "finish" not in runs.calls


@pytest.fixture
def on_small_disk(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Runs, list[str]]]:
    """Runs on a disk that a test fills, and what they say."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        runs = Runs(tiny_model, disk)
        lines: list[str] = []
        runs.say = lines.append
        yield runs, lines


def steps_of(saver: Saver, *steps: int) -> list[dict[str, float]]:
    """The metrics of steps in a row, whose checkpoints take the prompts' place as they are."""
    metrics = []
    for step in steps:
        metrics.append(saver.begin(step, EMPTY))
        saver.settle(step)
    return metrics


def names(runs: Runs) -> list[str]:
    return sorted(path.name for path in (runs.folder / FOLDER).iterdir())


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_goes_on_without_a_checkpoint_that_a_full_disk_does_not_take(
    on_small_disk: tuple[Runs, list[str]], asynchronous: str
) -> None:
    runs, lines = on_small_disk
    saver = runs.saver(f"checkpoint.asynchronous={asynchronous}", "checkpoint.every=2")
    steps_of(saver, 1, 2, 3)
    filler = fill(runs.folder)
    steps_of(saver, 4, 5)
    assert names(runs) == ["step-000002"], "no half of one"
    (line,) = lines
    count = "1 in a row, of which checkpoint.may_fail allows 2"
    problem = f"run.dir: no space left in {runs.folder}"
    assert line.startswith(f"the run goes on without the checkpoint of step 4 ({count}): {problem}")
    filler.unlink()
    metrics = steps_of(saver, 6, 7, 8)
    name = "checkpoint/failed"
    assert [record[name] for record in metrics if name in record] == [1, 0]
    assert {"step-000002", "step-000006"} <= {*names(runs)} and len(lines) == 1


def test_a_run_ends_where_a_checkpoint_is_not_written_once_too_often(
    on_small_disk: tuple[Runs, list[str]],
) -> None:
    runs, lines = on_small_disk
    saver = runs.saver(
        "checkpoint.asynchronous=false", "checkpoint.every=1", "checkpoint.may_fail=1"
    )
    fill(runs.folder)
    steps_of(saver, 1)
    assert len(lines) == 1
    told = r"run.dir: no space left in .* \(2 in a row, of which checkpoint.may_fail allows 1\); make room there"
    with pytest.raises(DiskFault, match=told):
        steps_of(saver, 2)


def test_without_its_last_checkpoint_a_run_has_failed(
    on_small_disk: tuple[Runs, list[str]],
) -> None:
    runs, lines = on_small_disk
    saver = runs.saver()
    fill(runs.folder)
    with pytest.raises(DiskFault, match=r"no space left in .*; make room there"):
        steps_of(saver, 9)
    assert lines == [] and names(runs) == []


def test_a_wish_to_end_writes_the_checkpoint_that_a_full_disk_did_not_take(
    on_small_disk: tuple[Runs, list[str]], end_wanted: list[bool]
) -> None:
    runs, lines = on_small_disk
    saver = runs.saver("checkpoint.asynchronous=false")
    filler = fill(runs.folder)
    steps_of(saver, 4)
    end_wanted.append(True)
    with pytest.raises(DiskFault, match="no space left"):
        saver.leave_if_wanted()
    filler.unlink()
    with pytest.raises(EndedEarly, match="the checkpoint of step 4 is complete"):
        saver.leave_if_wanted()
    assert names(runs) == ["step-000004"] and len(lines) == 1


def test_a_slow_disk_is_waited_for_when_the_next_checkpoint_is_due(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    runs.say = lines.append
    monkeypatch.setattr("megarl.controller.saver._LONG_WAIT_S", 0.0)
    runs.fleet.trainers.are_slow = True
    saver = runs.saver()
    first, *later = steps_of(saver, 4, 5, 6, 7)
    assert "checkpoint/waited_s" not in first and later == [{}, {}, {}]
    assert runs.calls == ["save .step-000004"]
    (metrics,) = steps_of(saver, 8)
    assert metrics["checkpoint/waited_s"] > 0
    assert runs.calls == ["save .step-000004", "finish", "save .step-000008"]
    (line,) = lines
    waited = "the checkpoint of step 8 waited 0 s for the files of that of step 4: the disk of "
    assert line.startswith(waited) and line.endswith("is slow for checkpoint.every (4)")


class Requests:
    """Those of `megarl drain`, as a run sees them."""

    def __init__(self) -> None:
        self.is_wanted = False

    def decline(self) -> None:
        self.is_wanted = False


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_drained_run_finishes_its_step_and_saves_it(runs: Runs, asynchronous: str) -> None:
    """In its place in the step, although none is due; the phases of the step are not cut."""
    runs.drain = Requests()
    saver = runs.saver("checkpoint.every=null", f"checkpoint.asynchronous={asynchronous}")
    saver.leave_if_wanted()
    steps_of(saver, 1)
    saver.leave_if_wanted()
    runs.drain.is_wanted = True
    saver.leave_within_step()
    steps_of(saver, 2)
    with pytest.raises(
        Drained, match="ended by megarl drain, the checkpoint of step 2 is complete"
    ):
        saver.leave_if_wanted()
    assert runs.calls == ["save .step-000002", "finish"]
    assert runs.find("checkpoint.every=null").step == 2


def test_a_run_that_is_drained_after_its_step_saved_or_before_its_first(runs: Runs) -> None:
    runs.drain = Requests()
    saver = runs.saver("checkpoint.every=null")
    steps_of(saver, 1)
    runs.drain.is_wanted = True
    with pytest.raises(Drained, match="step 1 is complete"):
        saver.leave_if_wanted()
    with pytest.raises(Drained, match="nothing new to save"):
        runs.saver().leave_if_wanted()


def test_a_drained_run_goes_on_where_the_disk_does_not_take_its_step(
    on_small_disk: tuple[Runs, list[str]],
) -> None:
    runs, lines = on_small_disk
    runs.drain = Requests()
    saver = runs.saver("checkpoint.every=null")
    runs.drain.is_wanted = True
    filler = fill(runs.folder)
    steps_of(saver, 1)
    saver.leave_if_wanted()
    assert not runs.drain.is_wanted
    assert "without that checkpoint the step would be lost" in lines[-1] and len(lines) == 2
    filler.unlink()
    steps_of(saver, 2)
    runs.drain.is_wanted = True
    with pytest.raises(Drained, match="step 2 is complete"):
        saver.leave_if_wanted()
