from dataclasses import replace

import pytest

from megarl.algos import ALGORITHMS

STAGES = {
    "sft": ("demonstrate", "update"),
    "prime": ("sample", "value", "update"),
    "ppo": ("sample", "observe", "value", "update"),
    "vapo": ("sample", "value", "update"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_stages_of_a_training_step(name: str) -> None:
    row = ALGORITHMS[name]
    assert row.stages(row.rules) == STAGES.get(name, ("sample", "update"))


def test_a_critic_needs_no_look_at_the_policy_without_a_kl_reward() -> None:
    row = ALGORITHMS["ppo"]
    assert row.stages(replace(row.rules, kl_coefficient=0.0)) == ("sample", "value", "update")
