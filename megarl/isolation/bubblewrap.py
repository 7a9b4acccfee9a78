"""The command line of bubblewrap (bwrap) for one program."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_NOBODY = 65534
_FIRST_UID = 61184
_NUM_UIDS = 4336  # systemd's range for users made on the fly
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SHARED_MEMORY_BYTES = 16 << 20
# --as-pid-1: bwrap's own process 1 outlives bwrap for a moment, an orphan that not every container collects
_ISOLATION = (
    "--die-with-parent --new-session --clearenv --unshare-ipc --unshare-pid --unshare-net --unshare-uts "
    "--unshare-cgroup-try --hostname sandbox --cap-drop ALL --as-pid-1"
)
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    # one thread for each core would exceed the limits on memory and processes
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def has_own_user() -> bool:
    """Whether the program gets a user of its own, which needs root; otherwise it gets a user namespace.

    Linux counts the processes of every user but root, and root owns the files of /proc/sys even in a user namespace.
    """
    return os.geteuid() == 0


def interpreter() -> str:
    """The Python that programs run in: the one that this environment was made from, without its packages."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def uid(number: int) -> int | None:
    """The user that the launcher becomes, so that concurrent programs are counted apart; None: no other."""
    if not has_own_user():
        return None
    return _FIRST_UID + number % _NUM_UIDS


def command(program: int, seccomp: int | None, info: int, tmp_bytes: int) -> list[str]:
    """The command line of bwrap up to the command that it starts, which finds the program at /tmp/main.py.

    program, seccomp: descriptors of the program's text and of the filter of system calls; info: bwrap writes its
    process ids to it.
    """
    line = [
        shutil.which("bwrap") or "bwrap",
        *_ISOLATION.split(),
        *f"--info-fd {info}".split(),
    ]
    if has_own_user():
        # gone once the launcher has used them
        line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        line += f"--unshare-user --disable-userns --uid {_NOBODY} --gid {_NOBODY}".split()
    if seccomp is not None:
        line += ["--seccomp", str(seccomp)]
    for name, value in ENVIRONMENT.items():
        line += ["--setenv", name, value]
    return [
        *line,
        *_system_binds(),
        *_interpreter_binds(),
        *f"--proc /proc --dev /dev --perms 1777 --size {_SHARED_MEMORY_BYTES} --tmpfs /dev/shm".split(),
        *f"--perms 1777 --size {tmp_bytes} --tmpfs /tmp".split(),
        *f"--perms 0444 --file {program} /tmp/main.py".split(),
        *["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"],
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
    for folder in reversed(prefix.parents[:-1]):  # empty folders, which show nothing but the path
        line += ["--perms", "0755", "--dir", str(folder)]
    return [*line, "--ro-bind", str(prefix), str(prefix)]
