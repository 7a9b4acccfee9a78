"""What a stage takes the lengths of incoming tensors to be, against what Megatron's own stages tell each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.placement.train_layout import TrainLayout
from tests.parallel.worlds import assign, part, ragged, recipe, run_world, weighted_loss

LAYOUTS = {
    "pp4": TrainLayout(4, 1, 4, 1),
    "vpp2": TrainLayout(2, 1, 2, 1, vpp=2),
    "tp2 cp2 pp2": TrainLayout(8, 2, 2, 1, cp=2),
    "tp2 uneven vpp2": TrainLayout(4, 2, 2, 1, vpp=2, stage_layers=(1, 1, 2, 0)),
}
VOCAB_SIZE = 200


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 5), st.booleans())
def test_every_row_comes_once_for_each_chunk_that_has_one_before_it(
    groups: int, chunks: int, stages: int, leads: bool
) -> None:
    from megarl.parallel.pipeline import receive_order

    rows = groups * stages
    order = receive_order(rows, chunks, stages, leads)
    assert sorted(order) == sorted([*range(rows)] * (chunks - leads))


def test_chunks_take_turns_of_as_many_rows_as_there_are_stages() -> None:
    from megarl.parallel.pipeline import receive_order

    assert receive_order(4, 2, 2, leads=False) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert receive_order(4, 2, 2, leads=True) == [0, 1, 2, 3]
    assert receive_order(3, 1, 4, leads=False) == [0, 1, 2]
    assert receive_order(3, 1, 4, leads=True) == []


def overhear(trainer: Any) -> list[tuple[Any, Any]]:
    """What each hop of a pass without and one with gradients was known to be, and what the stages said of it."""
    from megarl.parallel.pipeline import KnownShapes, P2PCommunicator

    hops, known = [], KnownShapes._communicate_shapes

    def both(self: Any, *hop: Any) -> Any:
        shapes = known(self, *hop)
        hops.append((shapes, P2PCommunicator._communicate_shapes(self, *hop)))
        return shapes

    KnownShapes._communicate_shapes = both  # type: ignore[method-assign]
    at, dp = trainer.layout.coords(trainer.rank), trainer.layout.dp
    batches = assign(ragged(14, VOCAB_SIZE, seed=3), at.dp, dp, micro_batches=4)
    trainer.token_outputs(batches)
    trainer.train_step(part(batches, 50.0), 1e-3, weighted_loss)
    return hops


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_stage_knows_what_the_others_would_have_told_it(
    checkpoint_path: Any, layout: TrainLayout
) -> None:
    ranks = run_world(recipe(checkpoint_path, layout), overhear)
    for hops in ranks:
        assert [tuple(known) for known, _ in hops] == [tuple(received) for _, received in hops]
    lengths = {shape[0] for hops in ranks for shapes, _ in hops for shape in shapes if shape[0]}
    assert len(lengths) > 1, "rows of one length would prove nothing"
