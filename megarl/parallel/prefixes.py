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
class TokenRun:
    """Neighbouring tokens of a tree, which attend to the path that leads to them and, causally, to each other.

    path: the places of all tokens from a sequence's first one to the run's last; the last num_tokens are the run.
    """

    path: IntArray
    num_tokens: int

    @property
    def first(self) -> int:
        """The place of the run's first token."""
        return int(self.path[-self.num_tokens])


@dataclass(frozen=True)
class PrefixTree:
    """U tokens, which S sequences of T tokens together are made of.

    token_ids_U, depth_U, parent_U: of each token its id, the number of tokens before it in its sequences, and the place
    of the last of these (its own place, where there are none). branch_U: its branch, which are neighbouring tokens that
    the same sequences have; has_branch_SB says which. place_T: of the sequences' tokens, end to end, their places.
    """

    token_ids_U: IntArray
    depth_U: IntArray
    parent_U: IntArray
    branch_U: IntArray
    has_branch_SB: BoolArray
    place_T: IntArray
    runs: tuple[TokenRun, ...]


def prefix_tree(sequences: Sequence[IntArray]) -> PrefixTree:
    """Merge sequences of token ids, of which there is at least one; none is empty.

    In lexical order a sequence shares with the one before it what it shares with any of the earlier ones.
    """
    order = sorted(
        range(len(sequences)), key=lambda place: sequences[place].astype(">u4").tobytes()
    )
    paths = [np.zeros(0, np.int64)] * len(sequences)
    runs = []
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
            runs.append(TokenRun(path, len(own)))
            branch_starts.add(size)
        paths[place] = path
        size += len(own)
        ids_before = ids
    return _tree(sequences, paths, tuple(runs), sorted(branch_starts))


def _tree(
    sequences: Sequence[IntArray],
    paths: Sequence[IntArray],
    runs: tuple[TokenRun, ...],
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
    return PrefixTree(token_ids_U, depth_U, parent_U, branch_U, has_branch_SB, place_T, runs)


def num_common(first: IntArray, second: IntArray) -> int:
    """The number of tokens with which both sequences begin."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
