"""The command line of bubblewrap (bwrap) for one program."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# As root the judged program gets a user of its own: Linux counts the processes of every user but root, and root, even
# in a user namespace, owns the files of /proc/sys. Other users' programs get a user namespace.
Way = Literal["own_user", "user_namespace"]
_NOBODY = 65534
_FIRST_UID, _NUM_UIDS = 61184, 4336  # systemd's range for users made on the fly
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SHARED_MEMORY_BYTES = 16 << 20
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # a numerical library's threads, one a core, would meet the limits on memory and processes
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Files:
    """Descriptors that bwrap reads: the program's text, the filter of system calls; and writes: its process ids."""

    program: int
    filter: int | None
    info: int


def way() -> Way:
    return "own_user" if os.geteuid() == 0 else "user_namespace"


def interpreter() -> str:
    """The Python that judged programs run in: the one under this environment, without this environment's packages."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def uid() -> int | None:
    """The user that the launcher becomes, by thread so that programs judged at once are counted apart; None: none."""
    return _FIRST_UID + threading.get_native_id() % _NUM_UIDS if way() == "own_user" else None


def command(files: Files, tmp_bytes: int) -> list[str]:
    """bwrap with everything but the command that it starts; that finds its program at /tmp/main.py."""
    line = [
        *(shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--clearenv"),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--info-fd", str(files.info), "--cap-drop", "ALL"),
        "--as-pid-1",  # bwrap's own process 1 outlives bwrap for a moment, an orphan that not every container collects
    ]
    if way() == "own_user":
        line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # gone once the launcher has used them
    else:
        line += ["--unshare-user", "--disable-userns", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
    if files.filter is not None:
        line += ["--seccomp", str(files.filter)]
    for name, value in ENVIRONMENT.items():
        line += ["--setenv", name, value]
    return [
        *line,
        *_system_binds(),
        *_interpreter_binds(),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"),
        *("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"),
        *("--perms", "0444", "--file", str(files.program), "/tmp/main.py"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"),
    ]


def _system_binds() -> list[str]:
    line = ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in map(Path, _SYSTEM):
        if folder.is_symlink():
            line += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            line += ["--ro-bind", str(folder), str(folder)]
    return line


def _interpreter_binds() -> list[str]:
    prefix = Path(os.path.realpath(sys.base_prefix))
    if prefix.is_relative_to("/usr"):
        return []
    line = []
    for folder in reversed(prefix.parents[:-1]):  # of these only the names are seen
        line += ["--perms", "0755", "--dir", str(folder)]
    return [*line, "--ro-bind", str(prefix), str(prefix)]
