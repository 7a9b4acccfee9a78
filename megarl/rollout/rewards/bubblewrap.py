"""The command line of bubblewrap (bwrap) for one program, and whether this machine can run it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# As root the judged program gets a user of its own: Linux counts the processes of every user but the first. Else a
# user namespace makes it a user without rights. Inside either it is nobody that owns a file here.
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


def interpreter() -> str:
    """The Python that judged programs run in: the one under this environment, without this environment's packages."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def uid(way: Way) -> int | None:
    """The user that the launcher becomes, by process so that programs judged at once are counted apart; None: none."""
    return _FIRST_UID + os.getpid() % _NUM_UIDS if way == "own_user" else None


def command(way: Way, files: Files, tmp_bytes: int) -> list[str]:
    """bwrap with everything but the command that it starts; that finds its program at /tmp/main.py."""
    line = [
        *(shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--clearenv"),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--info-fd", str(files.info), "--cap-drop", "ALL"),
    ]
    if way == "own_user":
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


@functools.cache
def find_way() -> tuple[Way | None, str]:
    """How bwrap isolates on this machine, tried out once; or None, and why it does not."""
    if shutil.which("bwrap") is None:
        return None, "bubblewrap (bwrap) is not installed"
    ways: list[Way] = ["own_user", "user_namespace"] if os.geteuid() == 0 else ["user_namespace"]
    said = ""
    for way in ways:
        said = _try_out(way)
        if not said:
            return way, ""
    return None, f"bubblewrap does not work on this machine ({said})"


def _try_out(way: Way) -> str:
    """What bwrap, or Python in it, says against a way; empty: nothing."""
    source, info = os.memfd_create("program"), os.open("/dev/null", os.O_WRONLY)
    try:
        become = f"import os; uid = {uid(way)}; uid and (os.setgroups([]), os.setresuid(uid, uid, uid)); print('works')"
        line = [*command(way, Files(source, None, info), 1 << 20), interpreter(), "-I", "-S", "-c", become]
        os.close(os.pidfd_open(os.getpid()))
        run = subprocess.run(line, env={}, pass_fds=(source, info), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return " ".join(str(error).split())
    finally:
        os.close(source)
        os.close(info)
    if run.stdout == "works\n":
        return ""
    return (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
