"""The launcher inside the sandbox: it sets its own limits, then becomes the program.

argv: the limits as JSON, the program's path. `begun` among the limits is a descriptor that gets a byte when the program
begins. The sandbox has no packages, so this file imports nothing of megarl.
"""

import json
import math
import os
import resource
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
# before it, Linux counts a user's processes over the whole machine
_FORKS_COUNTED_BY_NAMESPACE = (5, 14)


def become_init() -> None:
    """Stay as process 1 of the namespace, and continue in a child, which becomes the program.

    Process 1 has no limits: without PR_SET_DUMPABLE 0 a program of the same user could write into its memory.
    """
    _prctl(_PR_SET_DUMPABLE, 0)
    program = os.fork()
    while program:
        ended, status = os.wait()
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
    _prctl(_PR_SET_DUMPABLE, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # a third of the launcher's time, and not always needed

    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0):
        raise OSError(f"prctl {option} failed")


def set_limits(limits: dict[str, Any]) -> None:
    if limits["die_with_parent"]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # short of memory, the kernel kills the program before training ranks
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if limits["uid"] is not None or release >= _FORKS_COUNTED_BY_NAMESPACE:
        limit(resource.RLIMIT_NPROC, limits["processes"])
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, math.ceil(limits["cpu_s"]), grace=1)
    limit(resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
    limit(resource.RLIMIT_NOFILE, limits["open_files"])
    limit(resource.RLIMIT_AS, limits["memory_mb"] << 20)
    uid = limits["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def limit(kind: int, value: int, grace: int = 0) -> None:
    """Set a soft limit, and a hard limit that is `grace` above it, unless they are lower already."""
    most = value + grace
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (min(value, most), most))


if __name__ == "__main__":
    program_limits = json.loads(sys.argv[1])
    if os.getpid() == 1:
        become_init()
    set_limits(program_limits)
    isolation = ["-I"]
    # -I would ignore it with all other variables; there are no others of Python
    if program_limits["hash_seed"] >= 0:
        os.environ["PYTHONHASHSEED"] = str(program_limits["hash_seed"])
        isolation = ["-P", "-s"]
    os.write(program_limits["begun"], b"+")
    os.close(program_limits["begun"])
    os.execv(sys.executable, [sys.executable, *isolation, "-B", "-X", "utf8", sys.argv[2]])
