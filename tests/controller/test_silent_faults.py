"""What a silent fault says, and what the controller adds to it on the way to the last line of a run."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config.loading import load_recipe
from megarl.controller.run import Run
from megarl.controller.silent_faults import compare_logprobs, step_of_faults
from megarl.tracking.run_log import Record
from megarl.training.row_diffs import RowDiffs
from megarl.types import FaultMember, SilentFault
from tests.controller.test_loop import QUICKSTART

NODE = "gpu-17, 10.0.0.5"
RANKS = SilentFault(
    "replicas",
    "differed in weights from each other",
    [FaultMember(0, "training rank 0", (0,), NODE), FaultMember(3, "training rank 3", (3,), NODE)],
)
ENGINE = SilentFault("engine", "gave other log-probabilities", [FaultMember(1)])


def run(decision: str) -> Any:
    """What the two functions read of a run; its engines know that engine 1 is on two GPUs."""
    known = {1: FaultMember(1, "engine 1", (2, 3), NODE)}
    engines = SimpleNamespace(
        located=lambda fault: fault.located(known), processes=SimpleNamespace(engines=["engine 0"])
    )
    made = object.__new__(Run)
    recipe = load_recipe(QUICKSTART, [f"run.on_silent_fault={decision}"])
    object.__setattr__(made, "recipe", recipe)
    object.__setattr__(made, "fleet", SimpleNamespace(engines=engines))
    return made


def test_the_line_names_members_gpus_node_and_step() -> None:
    with pytest.raises(SilentFault) as caught, step_of_faults(run("stop"), 12):
        raise RANKS
    assert str(caught.value) == (
        f"step 12: training rank 0 (GPU 0 of {NODE}) and training rank 3 (GPU 3 of {NODE}) "
        "differed in weights from each other"
    )
    assert not caught.value.may_repeat
    with pytest.raises(SilentFault) as caught, step_of_faults(run("stop"), 3):
        raise ENGINE
    assert (
        str(caught.value)
        == f"step 3: engine 1 (GPUs 2 to 3 of {NODE}) gave other log-probabilities"
    )


def test_the_recipe_decides_whether_the_step_is_repeated() -> None:
    with pytest.raises(SilentFault) as caught, step_of_faults(run("repeat"), 12):
        raise RANKS
    assert caught.value.may_repeat
    everywhere = SilentFault("not_finite", "computed no number", [FaultMember(0)], is_local=False)
    with pytest.raises(SilentFault) as caught, step_of_faults(run("repeat"), 12):
        raise everywhere
    assert not caught.value.may_repeat, "it would come again"


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="other"), step_of_faults(run("repeat"), 12):
        raise ValueError("other")


def test_a_fault_survives_the_way_between_processes() -> None:
    fault = RANKS.in_step(4, may_repeat=True)
    copied = pickle.loads(pickle.dumps(fault))
    assert (str(copied), copied.__dict__) == (str(fault), fault.__dict__)


def test_one_engine_is_compared_with_no_other_and_its_tokens_are_recorded() -> None:
    shown = {(0, 0, 0): {"token_ids": [7]}}
    rows = RowDiffs(
        np.zeros((1, 3), np.int64), np.ones(1, np.float32), {4: (0.5, 5), 3: (3.0, 10)}, shown
    )
    made = run("stop")
    made.fleet.version = 4
    made.fleet.trainers = SimpleNamespace(row_diffs=lambda: rows)
    record = Record(1)
    step: Any = SimpleNamespace(trained="trained", collected="collected", record=record)
    compare_logprobs(made, step)
    assert record.metrics == {"rollout/logprob_diff_age_0": 0.1, "rollout/logprob_diff_age_1": 0.3}
    assert record.shown_tokens == shown
