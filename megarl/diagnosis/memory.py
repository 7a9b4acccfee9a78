"""Errors of memory: which they are, and what the process and its machine measure then."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import psutil

from megarl.device import gpu_memory
from megarl.types.memory_use import MemoryUse

_NO_THREAD = "can't start new thread"  # CPython's words
_OF_TORCH_ON_CPU = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to")
# In the log of a process that has ended, or in Ray's words about one. Not OOM: Ray names the kernel's OOM killer as a
# possible cause of every death.
_IN_TEXT = re.compile(
    r"^.*(OutOfMemoryError|DefaultCPUAllocator: can't allocate memory|CUDA out of memory"
    r"|out of memory \(|^MemoryError|std::bad_alloc|low on memory|out-of-memory).*$",
    re.MULTILINE,
)
_EVENTS = Path("/sys/fs/cgroup/memory.events")
_LONGEST = 300


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or torch on a GPU or the CPU, has raised it for want of memory.

    A MemoryError of megarl's has a text, and is none.
    """
    if isinstance(error, MemoryError):
        return not error.args
    if not isinstance(error, RuntimeError):
        return False
    if type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return text == _NO_THREAD or any(words in text for words in _OF_TORCH_ON_CPU)


def memory_use(error: BaseException) -> MemoryUse:
    """What this process holds at the moment at which an allocation has failed."""
    words = " ".join(str(error).split()) or type(error).__name__
    try:
        table = _memory_table()
    except (OSError, RuntimeError, MemoryError):
        # what is asked may need the memory that there is not
        table = {}
    return MemoryUse(words[:_LONGEST], table)


def _memory_table() -> dict[str, int]:
    """Bytes of memory by what has them: of the GPU and torch's allocator; without a GPU of this process and machine."""
    if of_gpu := gpu_memory():
        stats, free, total = of_gpu
        allocated = stats["allocated_bytes.all.current"]
        reserved = stats["reserved_bytes.all.current"]
        return {
            "allocated": allocated,
            "peak allocated": stats["allocated_bytes.all.peak"],
            "reserved but unallocated": reserved - allocated,
            "used by others": total - free - reserved,
            "free": free,
            "the GPU": total,
        }
    machine = psutil.virtual_memory()
    table = {"resident set": psutil.Process().memory_info().rss}
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        table |= {"address space": psutil.Process().memory_info().vms, "its limit": limit}
    return table | {"free in the machine": machine.available, "the machine": machine.total}


def memory_error_in(text: str) -> str:
    """The last line by which a log or an error tells that memory was short; "" where none does."""
    lines = [match.group(0).strip() for match in _IN_TEXT.finditer(text)]
    return lines[-1][:_LONGEST] if lines else ""


def kernel_kills(events: Path = _EVENTS) -> int:
    """How many processes of this cgroup the kernel has killed for want of memory; 0 where it does not tell."""
    try:
        fields = dict(line.split() for line in events.read_text().splitlines())
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
