"""Sequences that begin alike, merged into a tree in which each token that they share is there once. Pure.

In a causal model the hidden state of a token depends on it and on the tokens before it, so that tokens which follow
equal tokens have equal hidden states, in whichever sequences they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.types import BoolArray, IntArray


@dataclass(frozen=True)
class PrefixBranch:
    """Neighbouring tokens of a tree, from `first` to before `end`, which the same sequences have.

    What these sequences have behind it follows, up to before `reach`. level: the number of branches that lead to it.
    """

    first: int
    end: int
    reach: int
    level: int


@dataclass(frozen=True)
class PrefixTree:
    """U tokens, which S sequences of T tokens together are made of.

    token_ids_U, depth_U, parent_U: of each token its id, the number of tokens before it in its sequences, and the place
    of the last of these (its own place, where there are none). branch_U: the number of its branch; has_branch_SB: which
    sequences have a branch. place_T: of the sequences' tokens, end to end, their places. branches: in their order, so
    that what follows a branch in its sequences is behind it.
    """

    token_ids_U: IntArray
    depth_U: IntArray
    parent_U: IntArray
    branch_U: IntArray
    has_branch_SB: BoolArray
    place_T: IntArray
    branches: tuple[PrefixBranch, ...]


def prefix_tree(sequences: Sequence[IntArray]) -> PrefixTree:
    """Merge sequences of token ids, of which there is at least one; none is empty.

    In lexical order a sequence shares with the one before it what it shares with any of the earlier ones.
    """
    order = sorted(
        range(len(sequences)), key=lambda place: sequences[place].astype(">u4").tobytes()
    )
    paths = [np.zeros(0, np.int64)] * len(sequences)
    branch_starts = {0}
    size = 0
    ids_before = path = np.zeros(0, np.int64)
    for place in order:
        ids = sequences[place]
        num_shared = num_common(ids_before, ids)
        if num_shared < len(path):
            branch_starts.add(int(path[num_shared]))
        own = np.arange(size, size + len(ids) - num_shared)
        path = np.concatenate([path[:num_shared], own])
        if len(own):
            branch_starts.add(size)
        paths[place] = path
        size += len(own)
        ids_before = ids
    return _tree(sequences, paths, sorted(branch_starts))


def _tree(
    sequences: Sequence[IntArray],
    paths: Sequence[IntArray],
    branch_starts: Sequence[int],
) -> PrefixTree:
    place_T = np.concatenate(paths)
    size = int(place_T.max()) + 1
    token_ids_U = np.zeros(size, np.int64)
    token_ids_U[place_T] = np.concatenate(sequences)
    depth_U = np.zeros(size, np.int64)
    depth_U[place_T] = np.concatenate([np.arange(len(path)) for path in paths])
    parent_U = np.zeros(size, np.int64)
    parent_U[place_T] = np.concatenate([np.concatenate([path[:1], path[:-1]]) for path in paths])
    is_start_U = np.zeros(size, np.int64)
    is_start_U[list(branch_starts)] = 1
    branch_U = np.cumsum(is_start_U) - 1
    has_branch_SB = np.zeros((len(paths), len(branch_starts)), np.bool_)
    for sequence, path in enumerate(paths):
        has_branch_SB[sequence, branch_U[path]] = True
    branches = _branches(branch_starts, depth_U)
    return PrefixTree(token_ids_U, depth_U, parent_U, branch_U, has_branch_SB, place_T, branches)


def _branches(firsts: Sequence[int], depth_U: IntArray) -> tuple[PrefixBranch, ...]:
    """The branches that begin at these places."""
    size = len(depth_U)
    ends = [*firsts[1:], size]
    reaches = [size] * len(firsts)
    levels = []
    path: list[int] = []  # the numbers of the branches that lead to the current one
    for number, first in enumerate(firsts):
        while path and depth_U[firsts[path[-1]]] >= depth_U[first]:
            reaches[path.pop()] = first
        levels.append(len(path))
        path.append(number)
    return tuple(map(PrefixBranch, firsts, ends, reaches, levels))


def num_common(first: IntArray, second: IntArray) -> int:
    """The number of tokens with which both sequences begin."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
