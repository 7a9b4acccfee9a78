"""Nothing gets out of the sandbox. Each probe is run inside and, where it harms nobody, without isolation, where it
must succeed: a probe that cannot escape anywhere proves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.rollout.rewards import sandbox
from megarl.rollout.rewards.sandbox import Limits, Outcome, run
from megarl.rollout.rewards.seccomp import filter_program
from megarl.types import UserFault

ROOT = Path(__file__).parents[3]
TOKEN = f"token-{uuid.uuid4().hex}"
PATIENT = Limits(wall_s=60.0, cpu_s=30)
needs_filter = pytest.mark.skipif(filter_program() is None, reason="system calls are not filtered on this machine type")

LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CALLS = LIBC + textwrap.dedent("""
    def call(name, *arguments):
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), name)
""")


def attempt(body: str, **names: Any) -> str:
    """A program that says ESCAPED when the body runs to its end, else HELD and why."""
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    body = textwrap.indent(textwrap.dedent(body), "    ")
    ends = "    print('ESCAPED')\nexcept BaseException as error:\n    print('HELD', error)"
    return f"{given}import os, socket, sys\ntry:\n{body}\n{ends}"


def says(outcome: Outcome) -> str:
    assert outcome.status == 0, outcome
    return outcome.stdout.split(maxsplit=1)[0]


def held(program: str) -> bool:
    return says(run(program, limits=PATIENT)) == "HELD"


def escapes_without(program: str) -> bool:
    return says(run(program, limits=PATIENT, unsafe=True)) == "ESCAPED"


class Host:
    """What a program could reach for on this machine."""

    def __init__(self, folder: Path, secret: str) -> None:
        self.secret, self.home = secret, os.path.dirname(secret)
        self.temporary, self.outside = str(folder / "secret"), str(folder / "written")
        Path(self.temporary).write_text(TOKEN)
        self.victim = subprocess.Popen(["sleep", "600"], env={"SECRET": TOKEN, "PATH": os.environ["PATH"]})
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        self.unix_path, self.abstract_name = f"{secret}.socket", f"\0{TOKEN}-{os.getpid()}"
        self.listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for listener, name in zip(self.listeners, (self.unix_path, self.abstract_name), strict=True):
            listener.bind(name)
            listener.listen()
        self.shared = Path(f"/dev/shm/{TOKEN}-{os.getpid()}")
        self.shared.write_text(TOKEN)

    def names(self) -> dict[str, Any]:
        return {
            "token": TOKEN, "secret": self.secret, "home": self.home, "temporary": self.temporary,
            "outside": self.outside, "project": str(ROOT / "README.md"), "pid": self.victim.pid,
            "tcp": self.tcp.getsockname(), "udp": self.udp.getsockname(), "unix_path": self.unix_path,
            "abstract_name": self.abstract_name, "shared": str(self.shared),
        }  # fmt: skip

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for end in (self.tcp, self.udp, *self.listeners):
            end.close()
        self.shared.unlink()
        os.unlink(self.unix_path)


@pytest.fixture
def host(tmp_path: Path, isolation: None) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".megarl-probe-") as folder:
        secret = Path(folder, "s")
        secret.write_text(TOKEN)
        host = Host(tmp_path, str(secret))
        yield host
        host.close()


# --- probes that succeed without isolation -----------------------------------------------------------------------

PROBES = {
    "reads a secret in a home directory": "assert open(secret).read() == token",
    "lists the home directory": "assert 's' in os.listdir(home)",
    "reads the project's folder": "open(project).read()",
    "reads another's temporary file": "assert open(temporary).read() == token",
    "follows a symbolic link": "os.symlink(secret, 'link'); assert open('link').read() == token",
    "goes up from its folder": "assert open(os.path.relpath(secret)).read() == token",
    "reads the users": "assert 'root' in open('/etc/passwd').read()",
    "reads a process's environment": "assert token in open(f'/proc/{pid}/environ').read()",
    "finds any process with the token": """
        pids = [name for name in os.listdir('/proc') if name.isdigit()]
        assert str(pid) in pids""",
    "signals a process": "os.kill(pid, 0)",
    "reaches a process's files": "assert os.path.exists(f'/proc/{pid}/root/usr')",
    "connects to a port": "socket.create_connection(tcp, timeout=5)",
    "connects to a socket's file": "socket.socket(socket.AF_UNIX).connect(unix_path)",
    "connects to an abstract socket": "socket.socket(socket.AF_UNIX).connect(abstract_name)",
    "writes outside": "open(outside, 'w').write(token)",
    "reads shared memory": "assert open(shared).read() == token",
    "sees the machine's devices": "assert len(os.listdir('/dev')) > 14",
    "sees the machine's kernel objects": "assert os.path.isdir('/sys/kernel')",
    "sees the machine's name": "assert os.uname().nodename == machine",
}


@pytest.mark.parametrize("body", PROBES.values(), ids=PROBES)
def test_what_a_program_reaches_for_is_not_there(host: Host, body: str) -> None:
    program = attempt(body, **host.names(), machine=os.uname().nodename)
    assert held(program)
    assert escapes_without(program)


def test_a_datagram_does_not_arrive(host: Host) -> None:
    program = attempt("socket.socket(type=socket.SOCK_DGRAM).sendto(b'out', udp)", **host.names())
    run(program, limits=PATIENT)
    with pytest.raises(BlockingIOError):
        host.udp.recv(8)
    assert escapes_without(program)
    assert host.udp.recv(8) == b"out"


@pytest.mark.parametrize("address", ["192.0.2.1", "8.8.8.8", "169.254.169.254"])
def test_no_other_machine_is_reachable(isolation: None, address: str) -> None:
    assert held(attempt("socket.socket(type=socket.SOCK_DGRAM).connect((address, 53))", address=address))


FILTERED = {
    "unshare": "call('unshare', 0x400)",  # no right is needed for this one
    "ptrace": """
        child = os.fork()
        if not child:
            import time; time.sleep(60)
        try:
            call('ptrace', 16, child, 0, 0)
        finally:
            os.kill(child, 9)""",
    "System V shared memory": """
        segment = libc.shmget(0, 4096, 0o1600)
        assert segment >= 0
        libc.shmctl(segment, 0, None)""",
    "a file in memory": "os.memfd_create('hidden')",
    "another socket family": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "process_vm_readv": "call('process_vm_readv', os.getpid(), None, 0, None, 0, 0)",
}


@needs_filter
@pytest.mark.parametrize("body", FILTERED.values(), ids=FILTERED)
def test_calls_into_the_kernel_that_no_solution_needs_are_refused(isolation: None, body: str) -> None:
    program = attempt(textwrap.dedent(body))
    assert held(CALLS + program)
    assert escapes_without(CALLS + program)


# --- probes that would harm this machine, or need rights on it ----------------------------------------------------

RIGHTS = {
    "mount": "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "unmount": "call('umount2', b'/tmp', 2)",
    "chroot": "os.chroot('/tmp')",
    "a user namespace": "call('unshare', 0x10000000)",
    "a namespace by clone": "assert libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
    "a device": "os.mknod('disk', 0o060666, os.makedev(8, 0))",
    "become root": "os.setuid(0)",
    "change the machine's name": "socket.sethostname('x')",
    "a kernel setting": "open('/proc/sys/kernel/core_pattern', 'w')",
    "the kernel's requests": "open('/proc/sysrq-trigger', 'w')",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "the root folder": "open('/written', 'w')",
    "the system's folder": "open('/usr/written', 'w')",
    "the devices' folder": "open('/dev/written', 'w')",
    "the interpreter": "open(os.path.join(sys.base_prefix, 'written'), 'w')",
    "the first process's memory": "open('/proc/1/mem', 'rb')",
}


@pytest.mark.parametrize("body", RIGHTS.values(), ids=RIGHTS)
def test_what_needs_rights_is_refused(isolation: None, body: str) -> None:
    assert held(CALLS + attempt(body))


def test_it_is_nobody_and_has_no_rights(isolation: None) -> None:
    outcome = run("import os; print(os.getuid(), os.getgroups()); print(open('/proc/self/status').read())")
    assert int(outcome.stdout.split()[0]) > 1000
    assert "CapEff:\t0000000000000000" in outcome.stdout
    assert "NoNewPrivs:\t1" in outcome.stdout


def test_its_signals_stay_inside(isolation: None) -> None:
    program = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for pid in (1, os.getppid(), -1):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except OSError as error:
            print(error)
print("still here")
"""
    assert run(program, limits=PATIENT).stdout.endswith("still here\n")


def test_only_devices_without_a_machine_behind_them(isolation: None) -> None:
    outcome = run("import os; print(*[n for n in os.listdir('/dev')])")
    known = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts", "shm", "core", "fd"}
    assert set(outcome.stdout.split()) <= known | {"stdin", "stdout", "stderr"}


# --- what it inherits --------------------------------------------------------------------------------------------


def test_no_descriptor_is_inherited(isolation: None, tmp_path: Path) -> None:
    secret = tmp_path / "open"
    secret.write_text(TOKEN)
    program = """
import os
for descriptor in range(3, 1024):
    try:
        print(os.pread(descriptor, 100, 0).decode())
    except OSError:
        pass
"""
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        assert TOKEN not in run(program, limits=PATIENT).stdout
        control = subprocess.run([sys.executable, "-c", program], close_fds=False, capture_output=True, text=True)
        assert TOKEN in control.stdout


def test_the_parents_environment_is_nowhere(isolation: None) -> None:
    """Not in the program's, and not in that of bubblewrap's own process, which the program can find in /proc."""
    program = """
import os
print(os.environ)
for name in os.listdir("/proc"):
    try:
        print(open(f"/proc/{name}/environ").read())
    except OSError:
        pass
"""
    parent = f"""
from megarl.rollout.rewards.sandbox import run
for unsafe in (False, True):
    print({TOKEN!r} in run({program!r}, unsafe=unsafe).stdout)
"""
    environment = {**os.environ, "MEGARL_JUDGE_KEY": TOKEN, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", parent], env=environment, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "True"], said.stderr


def test_what_it_is_given_cannot_be_changed(isolation: None) -> None:
    assert held(attempt("os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')"))
    assert run("print(input())", "given\n", PATIENT).stdout == "given\n"


# --- limits ------------------------------------------------------------------------------------------------------


def test_the_disk_cannot_be_filled(isolation: None) -> None:
    program = """
written = 0
try:
    for number in range(64):
        with open(f"file{number}", "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
except OSError:
    pass
print(written >> 20)
"""
    limits = Limits(wall_s=60.0, tmp_mb=8)
    assert int(run(program, limits=limits).stdout) <= 8
    assert int(run(program, limits=limits, unsafe=True).stdout) == 64


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_file_has_a_largest_size(isolation: None, unsafe: bool) -> None:
    program = "file = open('file', 'wb', buffering=0)\nfor _ in range(8): file.write(bytes(1 << 20))"
    assert "File too large" in run(program, limits=Limits(wall_s=60.0, file_mb=4), unsafe=unsafe).stderr
    assert run(program, limits=PATIENT, unsafe=unsafe).status == 0


@pytest.mark.parametrize("unsafe", [False, True])
def test_memory_has_a_limit(isolation: None, unsafe: bool) -> None:
    program = "x = bytearray(600 << 20)"
    assert run(program, limits=PATIENT, unsafe=unsafe).out_of_memory
    enough = run(program, limits=Limits(wall_s=60.0, memory_mb=1024), unsafe=unsafe)
    assert enough.status == 0 and not enough.out_of_memory


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_spin_uses_up_its_time_on_the_processor(isolation: None, unsafe: bool) -> None:
    outcome = run("while True: pass", limits=Limits(wall_s=60.0, cpu_s=1), unsafe=unsafe)
    assert outcome.status == 128 + signal.SIGXCPU and not outcome.timed_out


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_sleep_meets_the_deadline(isolation: None, unsafe: bool) -> None:
    started = time.monotonic()
    outcome = run("print('begun', flush=True); import time; time.sleep(600)", limits=Limits(1.0), unsafe=unsafe)
    assert outcome.timed_out and outcome.status is None and not outcome.out_of_memory
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_program_that_prints_for_ever_is_stopped(isolation: None, unsafe: bool) -> None:
    limits = Limits(wall_s=60.0, cpu_s=60, stdout_bytes=10_000, stderr_bytes=1_000)
    outcome = run("while True: print('x' * 99)", limits=limits, unsafe=unsafe)
    assert outcome.too_much_output and not outcome.timed_out
    assert outcome.stdout == ("x" * 99 + "\n") * 100
    program = "import sys\nfor _ in range(10**4): sys.stderr.write('x' * 100)\nprint('end')"
    outcome = run(program, limits=limits, unsafe=unsafe)
    assert outcome.stdout == "end\n" and len(outcome.stderr) == 1_000


FORKS = """
import os, signal
made = 0
try:
    while made < most:
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError:
    pass
print(made)
"""
THREADS = """
import threading
held, made = threading.Event(), 0
threading.stack_size(32768)
try:
    while made < most:
        threading.Thread(target=held.wait, daemon=True).start()
        made += 1
except RuntimeError:
    pass
print(made, flush=True)
"""


@pytest.mark.parametrize("program", [FORKS, THREADS], ids=["forks", "threads"])
def test_processes_and_threads_are_counted(isolation: None, program: str) -> None:
    few = run(f"most = 10_000\n{program}", limits=Limits(wall_s=60.0, processes=16))
    many = run(f"most = 100\n{program}", limits=Limits(wall_s=60.0, processes=128))
    assert 8 <= int(few.stdout) < 16
    assert int(many.stdout) == 100


# --- what it leaves ----------------------------------------------------------------------------------------------


def named(name: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]


LEAVES = """
import os, signal, sys
with open("/proc/self/comm", "w") as file:
    file.write(name)
if os.fork() == 0:
    os.setsid()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    os.closerange(0, 64)
    if os.fork() == 0:
        signal.pause()
    signal.pause()
"""


def test_a_daemon_ends_with_its_program(isolation: None) -> None:
    name = f"d{uuid.uuid4().hex[:12]}"
    program = f"name = {name!r}{LEAVES}"
    assert run(program, limits=PATIENT).status == 0
    assert not named(name)
    run(program, limits=PATIENT, unsafe=True)
    left = named(name)
    assert left
    for process in left:
        process.kill()


def test_a_fork_bomb_is_gone_at_the_deadline(isolation: None) -> None:
    name = f"b{uuid.uuid4().hex[:12]}"
    bomb = f"""
import os
open("/proc/self/comm", "w").write({name!r})
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    started = time.monotonic()
    assert run(bomb, limits=Limits(wall_s=1.0)).timed_out
    assert not named(name)
    assert time.monotonic() - started < 30


def test_nothing_outlives_a_killed_caller(isolation: None) -> None:
    """As when the pool of reward workers kills one."""
    name = f"k{uuid.uuid4().hex[:12]}"
    program = f"import signal\nopen('/proc/self/comm', 'w').write({name!r})\nsignal.pause()"
    parent = f"from megarl.rollout.rewards.sandbox import *\nrun({program!r}, limits=Limits(wall_s=600.0))"
    with subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as caller:
        try:
            await_true(lambda: caller.poll() is not None or bool(named(name)))
            assert caller.poll() is None
        finally:
            caller.kill()
    await_true(lambda: not named(name))


def await_true(condition: Any, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- outcomes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize(
    ("program", "status"),
    [("", 0), ("import sys; sys.exit(7)", 7), ("1/0", 1), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_an_end_is_told_as_a_shell_does(isolation: None, program: str, status: int, unsafe: bool) -> None:
    outcome = run(program, limits=PATIENT, unsafe=unsafe)
    assert outcome.status == status
    assert ("ZeroDivisionError" in outcome.stderr) == (program == "1/0")


@pytest.mark.parametrize("unsafe", [False, True])
def test_any_text_goes_in_and_out(isolation: None, unsafe: bool) -> None:
    text = "é\0\u2028 " + "many lines\n" * 50_000
    outcome = run("import sys; sys.stdout.write(sys.stdin.read())", text, PATIENT, unsafe=unsafe)
    assert outcome.stdout == text
    assert "\ufffd" in run("import sys; sys.stdout.buffer.write(b'\\xff')", limits=PATIENT, unsafe=unsafe).stdout
    assert run("print('\ud800')", limits=PATIENT, unsafe=unsafe).status == 0  # half a character, as a model may write


@pytest.fixture
def other_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.find_problem.cache_clear()
    yield tmp_path
    sandbox.find_problem.cache_clear()


def test_a_missing_bubblewrap_is_said_in_a_line(other_path: Path) -> None:
    (fault,) = sandbox.sandbox_faults()
    assert fault.where == "reward.function"
    assert "bubblewrap (bwrap) is not installed; install bubblewrap" in str(fault)
    with pytest.raises(UserFault, match="`unsafe: true`"):
        run("print('ran')")
    assert sandbox.sandbox_faults(unsafe=True) == []
    assert run("print('ran')", limits=PATIENT, unsafe=True).stdout == "ran\n"


def test_a_bubblewrap_that_does_not_work_is_said_in_a_line(other_path: Path) -> None:
    path = other_path / "bwrap"
    path.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    path.chmod(0o755)
    (fault,) = sandbox.sandbox_faults()
    assert "does not work on this machine (bwrap: No permissions to create a new namespace)" in str(fault)
    assert "\n" not in str(fault)
