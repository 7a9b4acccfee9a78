"""A sender and a receiver of the reshard in one process: over NCCL one member, over gloo two."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from megarl.device import BACKEND, DEVICE
from megarl.resharding import fp8
from megarl.resharding.execute import Executor
from megarl.resharding.reshard_plan import Copy, MemberPlan, Round
from megarl.resharding.transport import batch, close_group, make_group, settle, wait

TIMEOUT_S = 60.0
GIVE_UP_S = 10.0  # on a message of a group that was aborted
ALONE = BACKEND == "nccl"  # NCCL lets a member send to itself, gloo does not
SOURCE, TARGET = (0, 0) if ALONE else (0, 1)
ROUNDS = 4
STALL_CYCLES = 4_000_000_000  # about two seconds of a GPU


class Exchange:
    """A group with nothing sent yet. What is kept are messages that nobody waits for, and the tensors of them."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._sender: Any = None
        self._receiver: Any = None
        if DEVICE == "cuda":
            torch.cuda.set_device(0)
        self.connect()

    def connect(self) -> float:
        """End the group that there is and make another on a store of its own; the seconds that making it takes."""
        if self._receiver is not None:
            close_group(self._receiver)
        self._sender = self._receiver = None
        store, num_members = HashStore(), 1 if ALONE else 2
        started = time.perf_counter()
        with ThreadPoolExecutor(num_members) as pool:
            members = range(num_members)
            ends = list(
                pool.map(lambda member: make_group(store, member, num_members, TIMEOUT_S), members)
            )
        self._sender, self._receiver = ends[0], ends[-1]
        return time.perf_counter() - started

    def empty(self) -> int:
        """The works of a round without messages."""
        with batch(self._receiver) as works:
            pass
        return len(works)

    def send(self, messages: int, message_bytes: int) -> dict[str, Any]:
        """Send messages in one round; whether the right bytes came, and the host's and the whole time."""
        out = (
            torch.arange(messages, device=DEVICE)
            .remainder_(251)
            .to(torch.uint8)[:, None]
            .repeat(1, message_bytes)
        )
        into = torch.zeros_like(out)
        settle(TIMEOUT_S)
        started = time.perf_counter()
        works = self._post(out.unbind(), into.unbind())
        posted = time.perf_counter()
        wait(works, TIMEOUT_S, _nobody_failed)
        settle(TIMEOUT_S)
        done = time.perf_counter()
        right = all(torch.equal(*pair) for pair in zip(out.chunk(16), into.chunk(16), strict=True))
        return {"right": right, "posted_s": posted - started, "done_s": done - started}

    def fail_inside(self, with_send: bool) -> str:
        """Raise in the middle of a round that has a receive, with its send or without; the exception that comes out."""
        out, into = (torch.ones(1024, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        self._kept += [out, into]
        try:
            with batch(self._receiver) as works:
                self._kept.append(works)
                works.append((SOURCE, self._receiver.recv([into], SOURCE, 0)))
                if with_send:
                    works.append((TARGET, self._sender.send([out], TARGET, 0)))
                raise ZeroDivisionError
        except Exception as error:
            return type(error).__name__

    def abort(self, num_bytes: int) -> dict[str, Any]:
        """Close the group while a message is on its way; the seconds that it takes and how the message ends."""
        out, into = (torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        self._kept += [out, into]
        if DEVICE == "cuda":
            torch.cuda._sleep(STALL_CYCLES)  # the device begins the message behind this
        works = self._post([out] if ALONE else [], [into])
        was_in_flight = not all(work.is_completed() for _, work in works)
        started = time.perf_counter()
        close_group(self._sender)
        self._sender = None  # over gloo the peer of who waits, which ends with the last reference
        seconds = time.perf_counter() - started
        try:
            wait(works, GIVE_UP_S, _nobody_failed)
            ended = "done"
        except RuntimeError:
            ended = "failed"
        self._receiver = None
        return {"was_in_flight": was_in_flight, "abort_s": seconds, "ended": ended}

    def _post(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> list[Any]:
        with batch(self._receiver) as works:
            works += [(SOURCE, self._receiver.recv([piece], SOURCE, 0)) for piece in into]
            works += [(TARGET, self._sender.send([piece], TARGET, 0)) for piece in out]
        return works

    def carry_out(self, rows: int) -> dict[str, Any]:
        """A plan of several rounds with whole, strided and quantised parameters; which arrive wrong, and the time."""
        torch.manual_seed(1)
        sources = {
            "whole": torch.randn(rows, 4096, dtype=torch.bfloat16, device=DEVICE),
            "strided": torch.randn(256, 384, dtype=torch.bfloat16, device=DEVICE),
            "weight": torch.randn(300, 256, dtype=torch.bfloat16, device=DEVICE),
        }
        targets = {
            "whole": torch.zeros_like(sources["whole"]),
            "strided": torch.zeros(256, 128, dtype=torch.bfloat16, device=DEVICE),
            "weight": torch.zeros(300, 256, dtype=fp8.FP8, device=DEVICE),
            "scales": torch.zeros(3, 2, device=DEVICE),
        }
        executors = self._executors(_rounds(rows), sources, targets)
        settle(TIMEOUT_S)
        started = time.perf_counter()
        with ThreadPoolExecutor(len(executors)) as pool:
            ends = (self._sender, self._receiver)[-len(executors) :]
            extra = list(
                pool.map(
                    lambda pair: pair[0].run(pair[1], TIMEOUT_S), zip(executors, ends, strict=True)
                )
            )
        settle(TIMEOUT_S)
        seconds = time.perf_counter() - started
        stack = sources["weight"].cpu()[None]
        expected = {
            "whole": sources["whole"].cpu(),
            "strided": sources["strided"][:, 64:192].cpu(),
            "weight": fp8.quantise(stack)[0],
            "scales": fp8.tile_scales(stack)[0],
        }
        wrong = [
            name for name, received in targets.items() if not same_bytes(received, expected[name])
        ]
        return {"wrong": wrong, "seconds": seconds, "extra_bytes": max(extra)}

    def _executors(
        self, rounds: list[tuple[Copy, ...]], sources: Any, targets: Any
    ) -> list[Executor]:
        if ALONE:
            plans = [
                MemberPlan(0, 1, (), tuple(Round(copies, copies) for copies in rounds), frozenset())
            ]
        else:
            plans = [
                MemberPlan(0, 2, (), tuple(Round(copies, ()) for copies in rounds), frozenset()),
                MemberPlan(1, 2, (), tuple(Round((), copies) for copies in rounds), frozenset()),
            ]
        return [Executor(plan, sources, targets) for plan in plans]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, wherever they are; of NaN and -0 too."""
    first, second = (tensor.cpu().contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def _rounds(rows: int) -> list[tuple[Copy, ...]]:
    """The whole parameter in as many rounds as there are buffers to fill twice, then the others."""
    step = rows // ROUNDS
    strips = [
        (_copy("whole", "bfloat16", (step, 4096), (start, 0), (start, 0)),)
        for start in range(0, rows, step)
    ]
    strided = _copy("strided", "bfloat16", (256, 128), (0, 64))
    quantised = _copy("weight", "float8_e4m3fn", (300, 256))
    scales = _copy("weight", "float32", (3, 2))
    scales = scales._replace(name="weight" + fp8.SCALE_SUFFIX, target_param="scales")
    return [*strips, (strided,), (quantised, scales)]


def _copy(
    name: str,
    dtype: str,
    size: tuple[int, int],
    start: tuple[int, int] = (0, 0),
    at: tuple[int, int] = (0, 0),
) -> Copy:
    box = (0, 1), (start[0], start[0] + size[0]), (start[1], start[1] + size[1])
    return Copy(name, box, dtype, SOURCE, name, (0, *start), False, TARGET, name, (0, *at))


def _nobody_failed() -> None:
    pass
