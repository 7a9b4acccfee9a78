"""What a run repeats after failures of its ranks: the end is that of a run without any.

The ranks are a number here: a training makes another one of it, so that a training too many, or of a wrong state,
shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.failures import ResultsLost, WorkerFailed
from megarl.recovery import repetition
from megarl.recovery.rank_processes import LossKind, RankLoss
from megarl.recovery.repetition import CannotRepeat, Repetition, SavedState
from megarl.recovery.restarts import Restarts
from megarl.recovery.state_copies import CopiesLost, Generation
from megarl.types.losses import Losses

STEPS = 6
START = 1
UNDEFINED = -1


def trained(state: int, step: int) -> int:
    """The state after a step."""
    return (state * 31 + step) % 1_000_003


def failure(rank: str, what: str = "its process died") -> WorkerFailed:
    return WorkerFailed(f"{rank}: {what}", "traceback", rank)


class Processes:
    """One group of a single rank."""

    def __init__(self, name: str, *, trains: bool = True) -> None:
        self.name = name
        self.trains = trains
        self.kind: LossKind = "death"
        self.loss: RankLoss | None = None

    def lose(self) -> None:
        self.end_for(failure(self.name))

    def end_for(self, failed: WorkerFailed) -> None:
        if failed.worker == self.name and not self.loss:
            self.loss = RankLoss(self.name, 0, self.kind, failed, self.trains)


class World:
    """The ranks of a run, its checkpoints and the copies of its ranks' state."""

    def __init__(self, *, copies: bool, every: int | None, restarts: int | None = 99) -> None:
        self.state = START
        self.version = 0
        self.groups = [Processes("training rank 0"), Processes("reward model rank 0", trains=False)]
        # of the policy; a critic's begins in a test that has one
        self.trained_ranks: Any = [object()]
        self.lines: list[str] = []
        self.every = every
        # of checkpoints: the complete one, the one that is being written, the one that was set aside
        self.saved: SavedState | None = None
        self.saved_states: dict[int, int] = {}
        self.open: int | None = None
        self.aside: int | None = None
        # of copies
        self.newest: Generation | None = None
        self.copied: dict[int, int] = {}
        self.begun: Generation | None = None
        # while ranks are started: the generation after this, and whether a part of it had been given before
        self.loses_copies = False
        self.gives_a_part = False
        self.loses_reward_model = False
        self.rebuilt: list[bool] = []
        self.loss_log = Losses()
        limit = None if restarts is None else Restarts(restarts, 1e9)
        it: Any = self
        self.repetition = Repetition(it, it, it if copies else None, limit, self.lines.append)

    # the ranks

    @property
    def rank_processes(self) -> Any:
        return self.groups

    def rebuild_ranks(self, *, afresh: bool) -> None:
        if afresh or self.groups[0].loss:
            self.state = START if afresh else UNDEFINED
            # without `afresh` the critic goes on with the ranks that it has
            kept = [] if afresh else self.trained_ranks[1:]
            self.trained_ranks = [object() for _ in self.trained_ranks[len(kept) :]] + kept
        for processes in self.groups:
            processes.loss = None
        self.rebuilt.append(afresh)

    def load_state(self, folder: Path) -> None:
        self.state = self.saved_states[int(folder.name)]

    def state_restored(self, version: int) -> None:
        assert self.state != UNDEFINED

    # checkpoints, which a later step completes

    def save(self, step: int) -> None:
        self.check_alive()
        self.complete()
        if self.every and step % self.every == 0:
            self.open = step
            self.saved_states[step] = self.state

    def complete(self) -> None:
        self.check_alive()
        if self.open is not None:
            self.saved = SavedState(self.open, self.version, Path(str(self.open)))
            self.open = None

    def set_aside(self) -> None:
        if self.open is not None:
            self.aside = self.open
            self.open = None

    def save_again(self, step: int) -> None:
        if self.aside == step:
            assert self.saved_states[step] == self.state, "another state than that of the step"
            self.open = step
            self.complete()
            self.aside = None

    # copies

    @property
    def safe_step(self) -> int | None:
        return self.newest.step if self.newest else None

    def begin(self, step: int, version: int, ranks: Any) -> None:
        self.begun = Generation(step, version, {})
        self.copied[step] = self.state

    def settle(self) -> dict[str, float]:
        if self.begun and not self.groups[0].loss:
            self.newest = self.begun
        self.begun = None
        return {}

    def restore(self, generation: Generation, ranks: Any) -> None:
        self.check_alive()
        if self.loses_copies:
            self.loses_copies = False
            self.newest = None
            if self.loses_reward_model:
                self.groups[1].lose()
            raise CopiesLost("the copies are lost", ranks_are_untouched=not self.gives_a_part)
        self.state = self.copied[generation.step]

    def forget(self) -> None:
        self.newest = None
        self.begun = None

    # what a run does

    def check_alive(self) -> None:
        if self.groups[0].loss:
            raise failure("training rank 0")

    def train(self, step: int, after: Callable[[], None] = lambda: None) -> None:
        def run() -> None:
            self.check_alive()
            self.state = trained(self.state, step)
            after()

        def again() -> None:
            self.check_alive()
            self.state = trained(self.state, step)

        self.repetition.train(step, run, again)

    def publish(self, step: int) -> None:
        def reshard() -> None:
            self.check_alive()
            self.version = step

        self.repetition.attempt(step, reshard)
        self.repetition.published(step)


def expected(steps: int = STEPS) -> int:
    state = START
    for step in range(1, steps + 1):
        state = trained(state, step)
    return state


@given(st.sets(st.tuples(st.integers(1, STEPS), st.integers(0, 5))), st.booleans())
def test_the_end_is_that_of_a_run_without_failures(
    losses: set[tuple[int, int]], has_copies: bool
) -> None:
    """With copies, or with a checkpoint of every step, no step begins again; a loss in any of six places of a step."""
    world = World(copies=has_copies, every=None if has_copies else 1)
    if not has_copies:
        world.saved = SavedState(0, 0, Path("0"))
        world.saved_states[0] = START
    left = set(losses)

    def strike(step: int, place: int) -> None:
        if (step, place) in left:
            left.remove((step, place))
            world.groups[0].lose()

    def strike_and_fail(step: int, place: int) -> None:
        strike(step, place)
        world.check_alive()

    world.repetition.begin(0)
    world.settle()  # a loss before the first copy is whole has the run begin again
    for step in range(1, STEPS + 1):
        strike(step, 0)  # in the rollout
        world.train(step, lambda step=step: strike_and_fail(step, 1))
        strike(step, 2)
        world.repetition.attempt(step, lambda step=step: (strike(step, 3), world.save(step)))
        world.publish(step)
        strike(step, 4)
        world.repetition.excuse(world.complete if step > 1 else lambda: None)
        strike(step, 5)
    assert left == set()
    world.repetition.attempt(STEPS, lambda: None)
    assert world.state == expected()
    assert {step: expected(step) for step in world.saved_states} == world.saved_states


def test_a_far_checkpoint_leads_nowhere() -> None:
    """The samples of three steps are not kept: the run itself has to go back."""
    world = World(copies=False, every=None)
    world.saved = SavedState(0, 0, Path("0"))
    world.saved_states[0] = START
    world.repetition.begin(0)
    for step in (1, 2, 3):
        world.train(step)
        world.publish(step)
    world.groups[0].lose()
    with pytest.raises(CannotRepeat):
        world.train(4)
    assert not world.repetition.go_back(3)
    world.repetition.start_over("the run goes back to 0")
    assert (world.state, world.rebuilt) == (START, [True])
    assert world.lines == ["training rank 0: its process died; the run goes back to 0"]


def with_lost_copies(*, every: int | None, gives_a_part: bool = False) -> World:
    """After two steps, with a checkpoint of the first where `every` is 1; the copies of the second will be lost."""
    world = World(copies=True, every=every)
    world.repetition.begin(0)
    for step in (1, 2):
        world.train(step)
        world.repetition.attempt(step, lambda step=step: world.save(step))
        world.publish(step)
    world.settle()
    world.loses_copies = True
    world.gives_a_part = gives_a_part
    world.groups[0].lose()
    return world


@pytest.mark.parametrize("gives_a_part", [False, True])
def test_ranks_are_started_once_where_copies_are_lost_meanwhile_and_given_the_next_newest_state(
    gives_a_part: bool,
) -> None:
    """Twice only where a part of the copy was given. The loss is none of the rank's: it counts once."""
    world = with_lost_copies(every=1, gives_a_part=gives_a_part)
    world.repetition.attempt(3, lambda: None)
    assert world.state == expected(2)
    assert world.rebuilt == ([False, True] if gives_a_part else [False])
    assert world.lines == [
        "training rank 0: its process died; the ranks go on from the state after step 2",
        "the copies are lost; the ranks go on from the state after step 1",
    ]
    assert world.repetition.take_metrics()["recovery/rank_deaths"] == 1.0


def test_all_trained_ranks_are_started_where_copies_are_lost_and_the_critic_has_gone_on() -> None:
    """Its ranks have their state of now, which is not that of the checkpoint."""
    world = with_lost_copies(every=1)
    critic = object()
    world.trained_ranks.append(critic)
    world.repetition.attempt(3, lambda: None)
    assert world.state == expected(2)
    assert world.rebuilt == [False, True] and critic not in world.trained_ranks


def test_a_reward_model_that_is_lost_meanwhile_is_started_alone() -> None:
    world = with_lost_copies(every=1)
    world.loses_reward_model = True
    world.repetition.attempt(3, lambda: None)
    assert world.state == expected(2)
    assert world.rebuilt == [False, False] and not world.groups[1].loss


def test_ranks_that_were_started_in_vain_are_those_with_which_a_run_begins_again() -> None:
    """Where lost copies leave no state that leads here."""
    world = with_lost_copies(every=None)
    with pytest.raises(CannotRepeat):
        world.repetition.attempt(3, lambda: None)
    assert not world.repetition.go_back(2)
    world.repetition.start_over("the run begins again")
    assert world.rebuilt == [False]
    world.state = START  # with which ranks begin
    world.repetition.begin(0)
    world.settle()
    world.groups[0].lose()
    world.repetition.attempt(1, lambda: None)
    assert world.rebuilt == [False, False]


def test_a_step_can_be_taken_back_after_its_training() -> None:
    """Where what follows fails for another reason, and the whole step is repeated."""
    world = World(copies=True, every=None)
    world.repetition.begin(0)
    for step in (1, 2):
        world.train(step)
        world.publish(step)
    world.train(3)
    assert world.repetition.go_back(2)
    assert world.state == expected(2)
    world.train(3)
    assert world.state == expected(3)


def test_a_copy_from_which_the_ranks_go_on_is_not_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a loss meanwhile would leave no whole copy; a state that trainings led to has no copy yet."""
    world = World(copies=True, every=None)
    world.repetition.begin(0)
    for step in (1, 2):
        world.train(step)
        world.publish(step)
    world.settle()
    begun: list[int] = []
    monkeypatch.setattr(world, "begin", lambda step, *_: begun.append(step))
    world.groups[0].lose()
    world.repetition.attempt(3, lambda: None)
    assert (world.state, begun) == (expected(2), [])
    world.newest = Generation(1, 1, {})
    world.groups[0].lose()
    world.repetition.attempt(3, lambda: None)
    assert (world.state, begun) == (expected(2), [2])


def test_time_that_is_lost_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a run that goes back to before a step, in which the ranks are brought back."""
    now_s = 100.0

    def tick() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    world = World(copies=True, every=None)
    world.repetition.begin(0)
    world.train(1)
    world.publish(1)
    world.settle()
    world.groups[0].lose()
    monkeypatch.setattr(repetition, "time", SimpleNamespace(monotonic=tick))
    began_s = now_s
    end_lost_time = world.repetition.lost_time()
    assert world.repetition.go_back(1)
    end_lost_time()
    # by a clock that goes on by a second whenever it is looked at
    assert world.repetition.take_metrics()["recovery/seconds"] == now_s - began_s - 1.0


def test_a_model_that_learns_nothing_is_rebuilt_alone() -> None:
    world = World(copies=False, every=None)
    world.repetition.begin(0)
    world.train(1)
    world.groups[1].lose()
    world.train(2)
    assert (world.state, world.rebuilt) == (expected(2), [False])
    assert world.repetition.take_metrics()["recovery/rank_deaths"] == 1.0


def test_the_same_error_in_the_same_step_ends_the_run() -> None:
    world = World(copies=True, every=None)
    world.groups[0].kind = "error"
    world.repetition.begin(0)
    errors = iter(["ValueError: 1", "ValueError: 2", "ValueError: 2"])

    def fail() -> None:
        raise failure("training rank 0", next(errors))

    with pytest.raises(WorkerFailed, match="training rank 0: ValueError: 2$"):
        world.train(1, fail)
    assert [*errors] == []


def test_a_slot_that_fails_too_often_ends_the_run_with_the_cause() -> None:
    world = World(copies=True, every=None, restarts=2)
    world.repetition.begin(0)
    times = iter(range(9))

    def die() -> None:
        next(times)
        world.groups[0].lose()
        world.check_alive()

    with pytest.raises(WorkerFailed, match=r"died; it was lost more than 2 times \(run.restarts\)"):
        world.train(1, die)
    assert next(times) == 3


def test_a_fault_that_may_be_repeated_is_repeated_from_the_state_before() -> None:
    """No process has died, and the weights may have changed."""
    world = World(copies=True, every=None)
    world.repetition.begin(0)

    class Fault(Exception):
        may_repeat = True

    faults = [Fault("NaN")]

    def fail() -> None:
        if faults:
            raise faults.pop()

    world.train(1, fail)
    assert world.state == expected(1)
    assert world.lines == ["NaN; the ranks go on from the state after step 0"]
    for fault in (Fault("NaN"), Fault("NaN")):
        faults.append(fault)
    with pytest.raises(Fault):
        world.train(2, lambda: fail() if faults else None)


def test_samples_that_are_lost_with_their_node_come_with_the_whole_step_alone() -> None:
    """The ranks that asked for them are ended, as all that wait for these, and are not to blame."""
    world = World(copies=True, every=None, restarts=1)
    world.groups[0].kind = "error"
    world.repetition.begin(0)
    world.train(1)
    world.publish(1)
    times = iter([1, 2])

    def miss() -> None:
        next(times)
        raise ResultsLost("training rank 0: what it needs is lost", "traceback", "training rank 0")

    with pytest.raises(CannotRepeat):
        world.train(2, miss)
    assert world.repetition.go_back(1) and world.state == expected(1)
    assert next(times) == 2, "once"
    world.train(2)
    assert world.state == expected(2)
    metrics = world.repetition.take_metrics()
    assert metrics["recovery/rank_faults"] == 1.0 and "recovery/rank_errors" not in metrics


@pytest.mark.parametrize("restarts", [None, 3])
def test_what_is_not_the_loss_of_a_rank_ends_the_run(restarts: int | None) -> None:
    world = World(copies=True, every=None, restarts=restarts)
    world.repetition.begin(0)

    def fail() -> None:
        raise failure("engine 0" if restarts else "training rank 0")

    with pytest.raises(WorkerFailed):
        world.train(1, fail)
    with pytest.raises(WorkerFailed):
        world.repetition.excuse(fail)
    assert world.rebuilt == []


def test_failing_again_and_again_for_another_reason_ends_the_run() -> None:
    """The ranks are lost, and cannot be rebuilt because of an engine."""
    world = World(copies=True, every=None)
    world.repetition.begin(0)
    world.settle()
    world.groups[0].lose()
    calls = SimpleNamespace(count=0)

    def rebuild(*, afresh: bool) -> None:
        calls.count += 1
        raise failure("engine 0")

    world.rebuild_ranks = rebuild  # type: ignore[method-assign]
    with pytest.raises(WorkerFailed, match="engine 0"):
        world.train(1)
    assert calls.count == 2
