"""Agreement of all members of an exchange through a key-value store; if one fails, all get its error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

Vote = Mapping[str, Any]


def fail_stage(store: Store, stage: str, error: str, suspects: Sequence[int] = ()) -> Vote:
    """Let a stage fail for all members, unless it has its outcome already; the outcome that stands.

    suspects: the members that may have caused the error, the likeliest first.
    """
    return _propose(store, stage, {"error": error, "suspects": list(suspects)})


def suspects_of(store: Store, stage: str) -> list[int]:
    """The members that may have made a stage fail, the likeliest first; [] where it has not, or nobody knows."""
    key = f"{stage}/outcome"
    if not store.check([key]):
        return []
    return json.loads(store.get(key)).get("suspects", [])


def _propose(store: Store, stage: str, outcome: Vote) -> Vote:
    """Write the outcome unless there is one; returns the outcome that stands."""
    return json.loads(store.compare_set(f"{stage}/outcome", "", json.dumps(outcome)))


class Agreement:
    """One member's side. Every member passes each stage once, under a name that was never used before.

    The last member to arrive reads all votes and writes the outcome, which is all that the others read.
    """

    def __init__(
        self,
        store: Store,
        member: int,
        num_members: int,
        timeout_s: float,
        subject: str = "reshard",
        names: Sequence[str] = (),
    ) -> None:
        """subject, names: what the members agree on, and the name of each member, for error messages."""
        self._store = store
        self._subject = subject
        self._names = names or [f"member {number}" for number in range(num_members)]
        self._member = member
        self._num_members = num_members
        self._timeout_s = timeout_s
        self._keys: list[str] = []  # that this member has written since the last `forget`

    def reach(self, stage: str, vote: Vote, conclude: Callable[[Sequence[Vote]], Vote]) -> Vote:
        """Wait for all members; returns what `conclude` returns for their votes, in member order.

        Raises RuntimeError with the message of a member that has refused or of `conclude`, or naming missing members.
        """
        self._set(f"{stage}/{self._member}", vote)
        if self._store.add(f"{stage}/count", 1) == self._num_members:
            self._keys += [f"{stage}/count", f"{stage}/outcome"]
            votes = self._store.multi_get(
                [f"{stage}/{member}" for member in range(self._num_members)]
            )
            try:
                outcome = conclude([json.loads(content) for content in votes])
            except RuntimeError as error:
                outcome = {"error": str(error)}
            _propose(self._store, stage, outcome)
        outcome = self._outcome(stage)
        if "error" in outcome:
            raise RuntimeError(outcome["error"])
        return outcome

    def refuse(self, stage: str, error: str, silent_peer: int | None = None) -> str | None:
        """Fail a stage for all members, present and later; returns the error of another member that was first.

        silent_peer: the other end of the connection that has failed, which is suspected before this member; None where
        the error is this member's own.
        """
        self._keys.append(f"{stage}/outcome")
        own_error = f"{self._subject}: {self._names[self._member]} {error}"
        suspects = [self._member]
        if silent_peer is not None:
            suspects.insert(0, silent_peer)
        standing_error = fail_stage(self._store, stage, own_error, suspects).get("error")
        return None if standing_error == own_error else standing_error

    def ask(self, stage: str) -> None:
        """Return at once; raises RuntimeError with the message of a member that has refused the stage."""
        key = f"{stage}/outcome"
        if self._store.check([key]):
            outcome = json.loads(self._store.get(key))
            if "error" in outcome:
                raise RuntimeError(outcome["error"])

    def forget(self) -> list[str]:
        """The keys written so far, for `delete` when all members have reached another stage."""
        keys = self._keys
        self._keys = []
        return keys

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys, so that a long run does not fill the store."""
        for key in keys:
            self._store.delete_key(key)

    def _set(self, key: str, content: Vote) -> None:
        self._store.set(key, json.dumps(content))
        self._keys.append(key)

    def _outcome(self, stage: str) -> Vote:
        """The outcome, as soon as it is there; after the timeout the stage fails by the members that are missing."""
        key = f"{stage}/outcome"
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
        except RuntimeError:
            missing = [
                member
                for member in range(self._num_members)
                if not self._store.check([f"{stage}/{member}"])
            ]
            names = ", ".join(self._names[member] for member in missing)
            error = f"{self._subject}: {names} did not arrive within {self._timeout_s} s"
            self._keys.append(key)
            return fail_stage(self._store, stage, error, suspects=missing)
        return json.loads(self._store.get(key))
