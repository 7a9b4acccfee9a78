"""A disk of a megabyte or so, in a mount namespace of its own: nothing of it is left when its process has ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SCRIPT = 'mount -t tmpfs -o size="$1" none "$2" && echo mounted && exec cat'


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """A path by which every process of this user reaches the disk; skips where this user may not mount one."""
    at.mkdir()
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", _SCRIPT, "sh", size, str(at)]
    if os.geteuid() == 0:
        command.remove("--map-root-user")
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin and holder.stdout
    try:
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("this user may not mount a disk in a namespace of its own")
        yield Path(f"/proc/{holder.pid}/root{at}")
    finally:
        holder.stdin.close()  # ends it, and the disk with it
        holder.wait()
        holder.stdout.close()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Mount the disk read-only over itself: whoever opens something on it, in any process, finds it so."""
    mount_over(disk, "ro")
    try:
        yield
    finally:
        _in_namespace(disk, "umount", _inner(disk))


def mount_over(folder: Path, options: str) -> None:
    """Mount a folder of the disk over itself, so that it cannot be removed either."""
    at = _inner(folder)
    _in_namespace(folder, "mount", "--bind", at, at)
    _in_namespace(folder, "mount", "-o", f"remount,bind,{options}", at)


def _inner(path: Path) -> str:
    """/proc/PID/root/PATH is PATH to the process that holds the disk."""
    return str(Path("/", *path.parts[4:]))


def _in_namespace(path: Path, *command: str) -> None:
    enter = ["nsenter", f"--target={path.parts[2]}", "--mount"]
    if os.geteuid() != 0:
        enter += ["--user", "--preserve-credentials"]
    subprocess.run([*enter, *command], check=True)
