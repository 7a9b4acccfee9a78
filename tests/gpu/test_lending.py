"""A large buffer of one process that another maps: CUDA IPC on a GPU, shared memory without one.

Unverified on a GPU.

resharding/memory_handles.py CudaStorage: the training rank's buffers as CUDA IPC handles, mapped by the engine's
process. To check first: one visible-device numbering on both sides; PyTorch's expandable segments must be off for these
buffers, which `cluster/visible_gpus.py` sees to; the counters that are left behind in /dev/shm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megarl.device import DEVICE
from tests.gpu.child import Child, Failed
from tests.gpu.conftest import Record

pytestmark = pytest.mark.slow

ON_GPU = DEVICE == "cuda"
NUM_BYTES = 8 << 30 if ON_GPU else 1 << 20
VERSIONS = 10
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def lender(**environment: str) -> Child:
    return Child("tests.gpu.lending:Lender", environment, num_bytes=NUM_BYTES)


def borrower() -> Child:
    return Child("tests.gpu.lending:Borrower")


@contextmanager
def pair() -> Iterator[tuple[Child, Child]]:
    """A lender, and a borrower that has mapped its memory."""
    with lender() as lends, borrower() as borrows:
        borrows.ask("attach", handles=lends.ask("handles"))
        yield lends, borrows


def check_shared(lends: Child, borrows: Child, value: float) -> None:
    """What either of the two writes is what the other reads."""
    lends.ask("fill", value=value)
    assert borrows.ask("read")["ends"] == [value, value]
    borrows.ask("write", value=-value)
    assert lends.ask("read") == [-value, -value]


def test_every_version_is_seen(record: Record) -> None:
    with lender() as lends, borrower() as borrows:
        borrows.ask("is_alive")
        before = borrows.ask("free_bytes")
        handles = lends.ask("handles")
        record("attach", borrows.ask("attach", handles=handles), "s")
        for version in range(1, VERSIONS + 1):
            lends.ask("fill", value=version)
            reading = borrows.ask("read")
            assert reading["ends"] == [version, version]
        record("read", NUM_BYTES / reading["seconds"] / 1e9, "GB/s")
        check_shared(lends, borrows, 64.0)
        lent = before - borrows.ask("free_bytes")
        assert lent < 1.5 * NUM_BYTES, "the memory is there once: the lender's"


def test_mapping_again_takes_no_more_memory(record: Record) -> None:
    with pair() as (lends, borrows):
        handles = lends.ask("handles")
        before = borrows.ask("free_bytes")
        for version in range(1, VERSIONS + 1):
            borrows.ask("attach", handles=handles)
            lends.ask("fill", value=version)
            assert borrows.ask("read")["ends"] == [version, version]
        lost = before - borrows.ask("free_bytes")
        record("lost", lost / 2**20, "MiB")
        assert lost < NUM_BYTES // 8


def test_a_borrower_that_is_killed_leaves_the_lender_as_it_was() -> None:
    with pair() as (lends, borrows):
        borrows.kill()
        lends.ask("fill", value=3.0)
        assert lends.ask("read") == [3.0, 3.0]
        with borrower() as restarted:
            restarted.ask("attach", handles=lends.ask("handles"))
            check_shared(lends, restarted, 5.0)


def test_a_lender_that_is_killed_is_named_and_its_successor_is_mapped() -> None:
    with pair() as (lends, borrows):
        handles = lends.ask("handles")
        lends.kill()
        assert borrows.ask("is_alive")
        with borrower() as late, pytest.raises(Failed) as raised:
            late.ask("attach", handles=handles)
        assert raised.value.kind in ("RuntimeError", "AcceleratorError"), raised.value
        with lender() as successor:
            borrows.ask("attach", handles=successor.ask("handles"))
            check_shared(successor, borrows, 7.0)


@pytest.mark.skipif(
    not ON_GPU, reason="PyTorch's allocator of GPU memory has segments, that of the host has none"
)
def test_expandable_segments_are_lent_whole_or_refused(record: Record) -> None:
    """Unverified on a GPU.

    cluster/visible_gpus.py: `nvidia-smi` that lists GPUs which torch does not see, for a driver that is too old,
    and under MIG and cgroups. To check first: a CPU build beside GPUs, `CUDA_VISIBLE_DEVICES=`, and a Slurm step
    with fewer GPUs than the node; whether expandable segments, which it refuses, could be lent.
    """
    with lender(**EXPANDABLE) as lends, borrower() as borrows:
        try:
            borrows.ask("attach", handles=lends.ask("handles"))
        except Failed as error:
            record("lent", 0, "")
            assert "Error" in error.kind
            return
        record("lent", 1, "")
        check_shared(lends, borrows, 9.0)
