"""Agreement of all members of an exchange through a key-value store; if one fails, all get its error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from megarl.timeline.recorder import spanned

Vote = Mapping[str, Any]


class StageFailed(RuntimeError):
    """A stage has failed for all members; the message is that of the member, or of the controller, that was first."""


def fail_stage(store: Store, stage: str, error: str) -> Vote:
    """Let a stage fail for all members, unless it has its outcome already; the outcome that stands."""
    return _propose(store, stage, {"error": error})


def suspects_of(store: Store, stage: str, num_members: int) -> list[int] | None:
    """The members that may have made a stage fail, as `most_suspected`; [] where it has not, or nobody knows.

    None where the members' votes do not match, so that no member has failed.
    """
    key = f"{stage}/outcome"
    outcome = json.loads(store.get(key)) if store.check([key]) else {}
    if "error" not in outcome:
        return []
    if outcome.get("votes_differ"):
        return None
    keys = {member: _suspects_key(stage, member) for member in range(num_members)}
    return most_suspected(
        {member: json.loads(store.get(key)) for member, key in keys.items() if store.check([key])}
    )


def most_suspected(suspects_by_member: Mapping[int, Sequence[int]]) -> list[int]:
    """The members by which a stage has most likely failed, given the suspects of each member that has left it.

    A member that suspects itself alone has failed by itself, and is believed. Else those are returned that most others
    suspect; of these, if there are any, those that suspect nobody. One other member is no majority: then all suspects
    are returned, those of the others first.
    """
    failed = [member for member, suspects in suspects_by_member.items() if suspects == [member]]
    if failed:
        return failed
    accusers = Counter(
        suspect
        for member, suspects in suspects_by_member.items()
        for suspect in suspects
        if suspect != member
    )
    most = max(accusers.values(), default=0)
    if most > 1:
        suspected = [member for member, count in accusers.items() if count == most]
        return [member for member in suspected if not suspects_by_member.get(member)] or suspected
    unsure = [member for member, suspects in suspects_by_member.items() if member in suspects]
    return [*dict.fromkeys([*accusers, *unsure])]


def _suspects_key(stage: str, member: int) -> str:
    return f"{stage}/suspects/{member}"


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

    @spanned("members agree")
    def reach(self, stage: str, vote: Vote, conclude: Callable[[Sequence[Vote]], Vote]) -> Vote:
        """Wait for all members; returns what `conclude` returns for their votes, in member order.

        Raises StageFailed with the message of a member that has refused or of `conclude`, or naming missing members.
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
                outcome = {"error": str(error), "votes_differ": True}
            _propose(self._store, stage, outcome)
        outcome = self._outcome(stage)
        if "error" in outcome:
            self._suspect(stage, [])
            raise StageFailed(outcome["error"])
        return outcome

    def refuse(self, stage: str, error: str, suspects: Sequence[int] | None = None) -> str | None:
        """Fail a stage for all members, present and later; returns the error of another member that was first.

        suspects: the members that may have caused the error, this one last where it may have; None: it has for certain.
        """
        self._keys.append(f"{stage}/outcome")
        own_error = f"{self._subject}: {self._names[self._member]} {error}"
        self._suspect(stage, [self._member] if suspects is None else suspects)
        standing_error = fail_stage(self._store, stage, own_error).get("error")
        return None if standing_error == own_error else standing_error

    def has_left(self, stage: str, member: int, patience_s: float) -> bool:
        """Whether a member has said whom it suspects, as all do that leave a stage; waits for that."""
        try:
            self._store.wait([_suspects_key(stage, member)], timedelta(seconds=patience_s))
        except RuntimeError:
            return False
        return True

    def _suspect(self, stage: str, suspects: Sequence[int]) -> None:
        """Say by which members the stage has failed, unless this member has said so before."""
        key = _suspects_key(stage, self._member)
        self._store.compare_set(key, "", json.dumps([*suspects]))
        self._keys.append(key)

    def ask(self, stage: str) -> None:
        """Return at once; raises StageFailed with the message of a member that has refused the stage."""
        key = f"{stage}/outcome"
        if self._store.check([key]):
            outcome = json.loads(self._store.get(key))
            if "error" in outcome:
                raise StageFailed(outcome["error"])

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
            problem = f"{names} did not arrive" if missing else "nobody has written the outcome"
            error = f"{self._subject}: {problem} within {self._timeout_s} s"
            self._keys.append(key)
            self._suspect(stage, missing)
            return fail_stage(self._store, stage, error)
        return json.loads(self._store.get(key))
