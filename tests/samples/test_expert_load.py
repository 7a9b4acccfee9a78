"""Counts of tokens by layer and expert."""

from __future__ import annotations

import numpy as np

from megarl.samples.expert_load import ExpertLoad

# [tokens 3, layers 2, chosen 2]
EXPERTS_TMK = np.array([[[0, 1], [3, 2]], [[0, 2], [3, 0]], [[1, 2], [3, 1]]], np.uint8)


def test_tokens_are_counted_by_layer_and_expert_and_taken_once() -> None:
    load = ExpertLoad()
    load.add(EXPERTS_TMK)
    assert load.counts_LE.tolist() == [[2, 2, 2, 0], [1, 1, 1, 3]]
    load.add(EXPERTS_TMK[:1, :, :] + 4)
    assert load.take().tolist() == [[2, 2, 2, 0, 1, 1, 0, 0], [1, 1, 1, 3, 0, 0, 1, 1]]
    assert load.take().size == 0


def test_counts_of_several_engines_are_added_whatever_the_largest_expert_of_each() -> None:
    whole, one, other = ExpertLoad(), ExpertLoad(), ExpertLoad(every=2)
    one.add(EXPERTS_TMK[:, :1])
    other.add(EXPERTS_TMK)
    whole.merge(one.take())
    whole.merge(other.take())
    whole.merge(np.zeros((0, 0), np.int64))
    assert whole.counts_LE.tolist() == [[3, 4, 3, 0], [0, 1, 1, 2]]
