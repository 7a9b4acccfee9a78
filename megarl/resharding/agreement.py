"""All members of an exchange come to one outcome through a key-value store, or all hear who cannot and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

Verdict = Mapping[str, Any]


class Agreement:
    """One member's seat. Each stage has a key that every member uses once, and that was never used before.

    The last member to come reads what all have said and writes the outcome; nobody reads more than that.
    """

    def __init__(self, store: Store, member: int, num_members: int, timeout_s: float) -> None:
        self._store, self._member, self._num_members, self._timeout_s = store, member, num_members, timeout_s
        self._keys: list[str] = []  # written by this member and not forgotten yet

    def reach(self, stage: str, verdict: Verdict, conclude: Callable[[Sequence[Verdict]], Verdict]) -> Verdict:
        """The outcome that `conclude` makes of all members' verdicts, in member order.

        Raises RuntimeError with the words of a member that cannot go on, of `conclude`, or with who has not come.
        """
        self._set(f"{stage}/{self._member}", verdict)
        if self._store.add(f"{stage}/count", 1) == self._num_members:
            self._keys += [f"{stage}/count", f"{stage}/outcome"]
            verdicts = self._store.multi_get([f"{stage}/{member}" for member in range(self._num_members)])
            try:
                outcome = conclude([json.loads(content) for content in verdicts])
            except RuntimeError as error:
                outcome = {"fault": str(error)}
            self._propose(stage, outcome)
        outcome = self._outcome(stage)
        if "fault" in outcome:
            raise RuntimeError(outcome["fault"])
        return outcome

    def refuse(self, stage: str, fault: str) -> str | None:
        """Tell all who wait, or will wait, at a stage that this member cannot go on.

        Only the first to say so is heard; its words, if that was another member.
        """
        self._keys.append(f"{stage}/outcome")
        words = f"reshard: member {self._member} {fault}"
        first = self._propose(stage, {"fault": words}).get("fault")
        return None if first == words else first

    def ask(self, stage: str) -> None:
        """Return at once; raises RuntimeError with the words of a member that has refused the stage, if one has."""
        key = f"{stage}/outcome"
        if self._store.check([key]):
            outcome = json.loads(self._store.get(key))
            if "fault" in outcome:
                raise RuntimeError(outcome["fault"])

    def forget(self) -> list[str]:
        """The keys written so far, for `delete` once everyone has gone on to another stage."""
        keys, self._keys = self._keys, []
        return keys

    def delete(self, keys: Sequence[str]) -> None:
        """A long run must not fill the store."""
        for key in keys:
            self._store.delete_key(key)

    def _set(self, key: str, content: Verdict) -> None:
        self._store.set(key, json.dumps(content))
        self._keys.append(key)

    def _propose(self, stage: str, outcome: Verdict) -> Verdict:
        """The outcome that stands: this one, or another's that came before."""
        return json.loads(self._store.compare_set(f"{stage}/outcome", "", json.dumps(outcome)))

    def _outcome(self, stage: str) -> Verdict:
        key = f"{stage}/outcome"
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            members = range(self._num_members)
            missing = [member for member in members if not self._store.check([f"{stage}/{member}"])]
            raise RuntimeError(f"reshard: members {missing} did not come within {self._timeout_s} s") from error
        return json.loads(self._store.get(key))
