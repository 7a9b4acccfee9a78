"""The batching bench: the peers' rules as described, and one run of it."""

from __future__ import annotations

import pytest

from scripts.bench.batching import LIMIT, differencing, slime, verl
from tests.scripts.bench.benches import figures, refusal


def test_differencing_on_the_textbook_example() -> None:
    """8 7 6 5 4: 8 against 7 and 6 against 5 leave 1, 1 and 4, which end 2 apart: 16 and 14."""
    sets = differencing([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(sum([8, 7, 6, 5, 4][index] for index in indices) for indices in sets) == [14, 16]


def test_differencing_keeps_equal_sizes() -> None:
    sets = differencing([9, 1, 1, 1, 1, 1], 3, equal_size=True)
    assert [len(indices) for indices in sets] == [2, 2, 2]
    assert sorted(index for indices in sets for index in indices) == list(range(6))


def test_verl_takes_as_many_micro_batches_as_tokens_need() -> None:
    plan = verl([30, 30, 30, 10, 10, 10], dp=1, budget=60)
    assert [len(rank) for rank in plan] == [2]


def test_slime_packs_in_order_and_halves_the_fullest() -> None:
    (first,), (second,), (third,) = slime([30, 20, 10, 40, 15], dp=3, budget=60)
    assert sorted(sorted(indices) for indices in (first, second, third)) == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize("options", ["--dp 3", f"--budget {LIMIT - 1}"])
def test_options_that_no_rule_takes_are_refused(options: str) -> None:
    assert options.split()[0] in refusal("batching", options)


def test_a_run_tells_that_ours_is_the_more_even() -> None:
    results = figures("batching", "--samples 512 --dp 4 32")
    assert results.keys() == {"lognormal", "tail32k"}
    for by_dp in results.values():
        for rows in by_dp.values():
            assert rows.keys() == {"megarl", "verl", "verl_tokens", "slime"}
            megarl = rows["megarl"]
            assert megarl["fullest_over_budget"] <= 1
            assert (
                megarl["step_imbalance"] >= megarl["rank_imbalance"] >= megarl["least_rank"] - 1e-9
            )
            assert megarl["step_imbalance"] >= megarl["least_step"] - 1e-9
            assert megarl["step_imbalance"] == min(row["step_imbalance"] for row in rows.values())
            assert megarl["padding"] == min(row["padding"] for row in rows.values())
