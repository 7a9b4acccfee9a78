"""Copies of tokens for experts: the formulas against tokens that are drawn, and counted one by one."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.placement.train_layout import TrainLayout
from megarl.plan.expert_exchange import (
    EvenRouting,
    TokenCopies,
    by_alltoall,
    by_deepep,
    chance_of_none,
    exchanged_bytes,
)
from tests.plan.plans import SHAPE

TOKENS = 4096
DEEPSEEK = EvenRouting(256, 8, groups=8, top_groups=4)
PLAIN = EvenRouting(64, 8)


def drawn(routing: EvenRouting) -> np.ndarray:
    """[tokens, chosen]: experts of groups that are drawn first."""
    rng = np.random.default_rng(7)
    shape = (TOKENS, routing.groups)
    chosen_groups = rng.random(shape).argsort(axis=1) < routing.top_groups
    scores = rng.random((TOKENS, routing.experts))
    scores -= np.repeat(~chosen_groups, routing.experts // routing.groups, axis=1)
    return (-scores).argsort(axis=1)[:, : routing.chosen]


@pytest.mark.parametrize(
    ("routing", "parts"),
    [
        (PLAIN, 1),
        (PLAIN, 4),
        (PLAIN, 32),
        (DEEPSEEK, 2),
        (DEEPSEEK, 4),
        (DEEPSEEK, 8),
        (DEEPSEEK, 64),
        (EvenRouting(64, 4, groups=8, top_groups=2), 4),
    ],
)
def test_a_part_of_the_experts_is_missed_as_often_as_when_tokens_are_drawn(
    routing: EvenRouting, parts: int
) -> None:
    has_part = drawn(routing) // (routing.experts // parts) == parts - 1
    missed = 1 - has_part.any(axis=1).mean()
    chance = chance_of_none(routing, parts)
    deviation = (chance * (1 - chance) / TOKENS) ** 0.5
    assert chance == pytest.approx(missed, abs=5 * deviation + 1e-12)


def counted(
    routing: EvenRouting, layout: TrainLayout, node: int, *, deepep: bool
) -> tuple[TokenCopies, float]:
    """Means over tokens whose senders are all ranks in turn, and the largest deviation of a mean."""
    etp = layout.etp
    ranks = layout.ep * etp
    of_rank = routing.experts // layout.ep
    copies = []
    for token, experts in enumerate(drawn(routing)):
        sender = token % ranks
        # of those that split an expert, all-to-all sends to the rank with the sender's own place
        split = range(etp) if deepep else [sender % etp]
        to = [int(expert) // of_rank * etp + part for expert in experts for part in split]
        fabric = [rank // node for rank in to if rank // node != sender // node]
        if not deepep:
            inside = sum(rank != sender for rank in to) - len(fabric)
            copies.append((len(fabric), inside, len(to) * (etp - 1)))
            continue
        landed = {rank // node * node + sender % node for rank in to}
        copies.append((len(set(fabric)), len({*to} - landed), 0))
    values = np.array(copies, dtype=float)
    return TokenCopies(*values.mean(0)), float(values.std(0).max() / TOKENS**0.5)


@pytest.mark.parametrize("deepep", [False, True])
@pytest.mark.parametrize(
    ("routing", "ep", "etp"),
    [(PLAIN, 8, 1), (PLAIN, 16, 1), (PLAIN, 8, 2), (DEEPSEEK, 32, 1), (DEEPSEEK, 16, 4)],
)
def test_copies_are_those_of_tokens_that_are_sent_one_by_one(
    routing: EvenRouting, ep: int, etp: int, deepep: bool
) -> None:
    layout = TrainLayout(ep * etp, 1, 1, ep, expert_tp=etp)
    mean, deviation = counted(routing, layout, 8, deepep=deepep)
    by = by_deepep if deepep else by_alltoall
    copies = by(routing, layout, 8)
    assert vars(copies) == pytest.approx(vars(mean), abs=5 * deviation + 1e-12)


def test_bytes_are_those_there_and_back_through_all_layers_of_a_stage() -> None:
    layout = TrainLayout(64, 2, 2, 16)
    sent = exchanged_bytes(SHAPE, None, layout, 8, tokens=4096)
    there = 4096 / 2 * 1024 * 2 * SHAPE.num_layers / 2
    assert sent["alltoall"].fabric_bytes == pytest.approx(2 * there * 8 / 2)
    assert sent["alltoall"].nvlink_bytes == pytest.approx(2 * there * 8 * 7 / 16)
    assert sent["flex"].fabric_bytes < there * 2
    assert [*exchanged_bytes(SHAPE, None, TrainLayout(12, 1, 1, 12), 8, 1.0)] == ["alltoall"]
    assert exchanged_bytes(SHAPE, None, TrainLayout(8, 1, 1, 1), 8, 1.0) == {}
