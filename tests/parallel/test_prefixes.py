"""Sequences that begin alike as a tree: every sequence comes back, and nothing that they share is there twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.parallel.prefixes import num_common, prefix_tree
from megarl.types import IntArray

# few ids, so that many begin alike, also some that sort differently as numbers and as text
SEQUENCES = st.lists(
    st.lists(st.sampled_from([0, 1, 256, 70_000]), min_size=1, max_size=6), min_size=1, max_size=8
)


def arrays(sequences: list[list[int]]) -> list[IntArray]:
    return [np.array(ids, np.int64) for ids in sequences]


def test_by_hand() -> None:
    """A prompt 7 8 with the answers 1, 2 3 and 2 4, of which the latter two share a token more."""
    tree = prefix_tree(arrays([[7, 8, 2, 4], [7, 8, 1], [7, 8, 2, 3]]))
    assert tree.token_ids_U.tolist() == [7, 8, 1, 2, 3, 4]
    assert tree.depth_U.tolist() == [0, 1, 2, 2, 3, 3]
    assert tree.parent_U.tolist() == [0, 0, 1, 1, 3, 3]
    assert tree.branch_U.tolist() == [0, 0, 1, 2, 3, 4]
    assert tree.place_T.tolist() == [0, 1, 3, 5, 0, 1, 2, 0, 1, 3, 4]
    assert tree.has_branch_SB.astype(int).tolist() == [
        [1, 0, 1, 0, 1],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0],
    ]
    assert [(each.first, each.end, each.reach, each.level) for each in tree.branches] == [
        (0, 2, 6, 0),
        (2, 3, 3, 1),
        (3, 4, 6, 1),
        (4, 5, 5, 2),
        (5, 6, 6, 2),
    ]


@given(SEQUENCES)
def test_each_prefix_is_there_once_and_every_sequence_comes_back(
    sequences: list[list[int]],
) -> None:
    tree = prefix_tree(arrays(sequences))
    prefixes = {tuple(ids[: end + 1]) for ids in sequences for end in range(len(ids))}
    assert len(tree.token_ids_U) == len(prefixes)
    assert tree.token_ids_U[tree.place_T].tolist() == [token for ids in sequences for token in ids]
    paths = np.split(tree.place_T, np.cumsum([len(ids) for ids in sequences])[:-1])
    for path in paths:
        assert tree.depth_U[path].tolist() == list(range(len(path)))
        assert tree.parent_U[path].tolist() == [*path[:1], *path[:-1]]


@given(SEQUENCES)
def test_a_branch_has_the_tokens_that_the_same_sequences_have(sequences: list[list[int]]) -> None:
    tree = prefix_tree(arrays(sequences))
    paths = np.split(tree.place_T, np.cumsum([len(ids) for ids in sequences])[:-1])
    for place, branch in enumerate(tree.branch_U.tolist()):
        assert tree.has_branch_SB[:, branch].tolist() == [place in path for path in paths]
    assert np.diff(tree.branch_U, prepend=0).max(initial=0) <= 1, "branch by branch"


@given(SEQUENCES)
def test_a_branch_leads_to_what_its_sequences_have_behind_it(sequences: list[list[int]]) -> None:
    tree = prefix_tree(arrays(sequences))
    paths = np.split(tree.place_T, np.cumsum([len(ids) for ids in sequences])[:-1])
    places = [place for branch in tree.branches for place in range(branch.first, branch.end)]
    assert places == list(range(len(tree.token_ids_U)))
    for number, branch in enumerate(tree.branches):
        assert set(tree.branch_U[branch.first : branch.end].tolist()) == {number}
        behind = {
            place
            for path in paths
            if branch.first in path
            for place in path[path > branch.first].tolist()
        }
        assert behind == {*range(branch.first + 1, branch.reach)}
        leading = [other for other in tree.branches if other.first < branch.first < other.reach]
        assert branch.level == len(leading)


def test_what_two_sequences_have_in_common() -> None:
    assert [
        num_common(*arrays([first, second]))
        for first, second in (([1, 2], [1, 3]), ([1, 2], [1, 2, 3]), ([1], [2]), ([4], [4]))
    ] == [1, 2, 0, 1]
