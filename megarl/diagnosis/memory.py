"""Errors of memory: which they are, and what the process and its machine measure then."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.device import memory_table
from megarl.types.memory_use import MemoryUse

_NO_THREAD = "can't start new thread"  # CPython's words
_OF_TORCH_ON_CPU = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to")
# In the log of a process that has ended, or in Ray's words about one. Not OOM: Ray names the kernel's OOM killer as a
# possible cause of every death.
_IN_TEXT = re.compile(
    r"^.*(OutOfMemoryError|DefaultCPUAllocator: can't allocate memory|CUDA out of memory"
    r"|out of memory \(|^MemoryError|low on memory|out-of-memory).*$",
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
        table = memory_table()
    except (OSError, RuntimeError, MemoryError):
        # what is asked may need the memory that there is not
        table = {}
    return MemoryUse(words[:_LONGEST], table)


def memory_error_in(text: str) -> str:
    """The line by which a log or an error tells that memory was short; "" where none does."""
    match = _IN_TEXT.search(text)
    return match.group(0).strip()[:_LONGEST] if match else ""


def kernel_kills(events: Path = _EVENTS) -> int:
    """How many processes of this cgroup the kernel has killed for want of memory; 0 where it does not tell."""
    try:
        fields = dict(line.split() for line in events.read_text().splitlines())
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
