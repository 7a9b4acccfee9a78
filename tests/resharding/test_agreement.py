"""Whom the members of an exchange make out as the cause of its failure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch._C._distributed_c10d import HashStore

from megarl.resharding.agreement import Agreement, StageFailed, most_suspected, suspects_of


@pytest.mark.parametrize(
    ("suspects_by_member", "suspected"),
    [
        ({}, []),
        ({0: [], 1: []}, []),
        # by itself, whatever others make of it
        ({0: [1, 0], 1: [], 2: [2], 3: [1, 3]}, [2]),
        # an end of two broken connections, though it was the first to say so
        ({2: [0, 2], 0: [2, 0], 1: [2, 1]}, [2]),
        # both ends of one
        ({0: [2, 0], 1: [], 2: []}, [2, 0]),
        ({0: [2, 0], 2: [0, 2]}, [2, 0]),
        # members 1 and 2 wait for member 3, and member 0 for all of them
        ({0: [1, 2, 3], 1: [3, 1], 2: [3, 2]}, [3]),
        # both are as often suspected, but member 2 waits for nobody
        ({0: [1, 2, 0], 3: [1, 2, 3], 1: [4, 1]}, [2]),
        # nobody reaches anybody
        ({0: [1, 2, 0], 1: [0, 2, 1], 2: [0, 1, 2]}, [1, 2, 0]),
    ],
)
def test_who_is_suspected_by_most(
    suspects_by_member: dict[int, Sequence[int]], suspected: list[int]
) -> None:
    assert most_suspected(suspects_by_member) == suspected


def test_what_each_member_says_first_counts() -> None:
    """Also of those that leave after a stage has failed, but not that they do."""
    store = HashStore()
    agreements = [Agreement(store, member, 4, 60.0) for member in range(4)]
    assert agreements[0].refuse("1/done", "is cut off", [2, 0]) is None
    assert agreements[1].refuse("1/done", "is alone", [2, 1]) == "reshard: member 0 is cut off"
    with pytest.raises(StageFailed):
        agreements[3].reach("1/done", {}, lambda votes: {})
    agreements[3].refuse("1/done", "failed in the exchange: member 0 is cut off")
    assert suspects_of(store, "1/done", 4) == [2]
    assert agreements[0].has_left("1/done", 3, patience_s=0.01)
    assert not agreements[0].has_left("1/done", 2, patience_s=0.01)


def test_nobody_is_suspected_where_all_came_and_the_last_one_has_not_concluded() -> None:
    store = HashStore()
    for member in (1, 2):
        store.set(f"1/ready/{member}", "{}")
    agreement = Agreement(store, 0, 3, timeout_s=0.2)
    with pytest.raises(StageFailed, match=r"reshard: nobody has written the outcome within 0.2 s"):
        agreement.reach("1/ready", {}, lambda votes: {})
    assert suspects_of(store, "1/ready", 3) == []


def test_votes_that_differ_are_no_members_failure() -> None:
    def refuse(_: object) -> dict[str, object]:
        raise RuntimeError("version is 1 for member 0 and 2 for member 1")

    store = HashStore()
    with pytest.raises(StageFailed, match="version is 1"):
        Agreement(store, 0, 1, 60.0).reach("1/ready", {}, refuse)
    assert suspects_of(store, "1/ready", 1) is None
