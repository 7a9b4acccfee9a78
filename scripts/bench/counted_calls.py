"""A simulated step's calls and stored values, counted, or weighed in place of being sent; for controller.py."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Protocol

from megarl.cluster.actor import Ref, Worker
from megarl.cluster.ray_session import Cluster
from megarl.types.remote import RemoteCall

# Ray sends a larger argument through the object store, once for each call
INLINE_BYTES = 100 * 1024
COUNTS: tuple[str, ...] = ("calls", "references", "puts", "pickled_bytes", "stored_bytes")


class Tally(Protocol):
    """What has been counted; weighs: calls are only weighed."""

    count: dict[str, float]
    weighs: bool


class Unsent:
    """In the place of a reference while calls are weighed and not made."""


class Counted(Worker):
    """A simulated rank in the process of another worker: its calls are counted, or weighed in place of being made."""

    def __init__(self, name: str, host: Worker, tally: Tally) -> None:
        self.name = name
        self.slot = host.slot
        self._actor = host._actor
        self.watch_refs = host.watch_refs
        self._tally = tally

    def call(self, method: str, *args: Any) -> Any:
        return Unsent() if self._is_weighed(args) else super().call(method, *args)

    def call_many(self, count: int, method: str, *args: Any) -> Any:
        return (
            [Unsent()] * count
            if self._is_weighed(args)
            else super().call_many(count, method, *args)
        )

    def compute(self, function: str, *args: Any) -> Any:
        return Unsent() if self._is_weighed(args) else super().compute(function, *args)

    def _is_weighed(self, args: Sequence[Any]) -> bool:
        count = self._tally.count
        flat = [*_flat(args)]
        values = [value for value in flat if not isinstance(value, Ref | Unsent)]
        count["calls"] += 1
        count["references"] += len(flat) - len(values)
        sizes = [size_of(value) for value in values] if self._tally.weighs else []
        count["pickled_bytes"] += sum(sizes)
        count["stored_bytes"] += sum(size for size in sizes if size > INLINE_BYTES)
        return self._tally.weighs


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    """The arguments, with the fields of a `RemoteCall`, and the items of lists in them, in its place."""
    for argument in args:
        if not isinstance(argument, RemoteCall):
            yield argument
            continue
        for field in fields(argument):  # type: ignore[arg-type]
            value = getattr(argument, field.name)
            yield from value if isinstance(value, list) else [value]


class CountedEngine(Counted):
    """A simulated engine: its process hears which of its engines is asked."""

    def call(self, method: str, *args: Any) -> Any:
        return super().call(method, *args, *([self.name] if method == "take_completed" else []))

    def call_many(self, count: int, method: str, *args: Any) -> Any:
        return super().call_many(count, method, *args, self.name)


def size_of(value: object) -> int:
    """Bytes of an argument, pickled in the protocol that Ray uses."""
    return len(pickle.dumps(value, protocol=5))


class CountedCluster:
    """A session whose `put` is counted too; `gather` and the rest are the product's."""

    def __init__(self, cluster: Cluster, tally: Tally) -> None:
        self._cluster, self._tally = cluster, tally

    def put(self, value: object) -> Any:
        size = size_of(value) if self._tally.weighs else 0
        for name, more in {"puts": 1, "pickled_bytes": size, "stored_bytes": size}.items():
            self._tally.count[name] += more
        return Unsent() if self._tally.weighs else self._cluster.put(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)
