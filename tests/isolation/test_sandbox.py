"""Nothing gets out of the sandbox. Each probe is run inside and, where it harms nobody, without isolation, where it
must succeed: a probe that cannot escape anywhere proves nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.isolation import sandbox
from megarl.isolation.sandbox import Outcome, SandboxLimits
from megarl.isolation.seccomp import filter_program

ROOT = Path(__file__).parents[2]
run = partial(sandbox.run, where="reward.function")
TOKEN = f"token-{uuid.uuid4().hex}"
PATIENT = SandboxLimits(wall_s=60.0, cpu_s=30)
needs_filter = pytest.mark.skipif(
    filter_program() is None, reason="system calls are not filtered on this machine type"
)

LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CALLS = LIBC + textwrap.dedent("""
    def call(name, *arguments):
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), name)
""")


def attempt(body: str, **names: Any) -> str:
    """A program that says ESCAPED when the body runs to its end, else HELD and why."""
    assignments = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    body = textwrap.indent(textwrap.dedent(body), "    ")
    ends = "    print('ESCAPED')\nexcept BaseException as error:\n    print('HELD', error)"
    return f"{assignments}import os, socket, sys\ntry:\n{body}\n{ends}"


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
        self.victim = subprocess.Popen(
            ["sleep", "600"], env={"SECRET": TOKEN, "PATH": os.environ["PATH"]}
        )
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        self.unix_path, self.abstract_name = f"{secret}.socket", f"\0{TOKEN}-{os.getpid()}"
        self.listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for listener, name in zip(
            self.listeners, (self.unix_path, self.abstract_name), strict=True
        ):
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
    assert held(
        attempt("socket.socket(type=socket.SOCK_DGRAM).connect((address, 53))", address=address)
    )


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
def test_calls_into_the_kernel_that_no_solution_needs_are_refused(
    isolation: None, body: str
) -> None:
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
    outcome = run(
        "import os; print(os.getuid(), os.getgroups()); print(open('/proc/self/status').read())"
    )
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
    known = {
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "tty",
        "console",
        "ptmx",
        "pts",
        "shm",
        "core",
        "fd",
    }
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
        control = subprocess.run(
            [sys.executable, "-c", program], close_fds=False, capture_output=True, text=True
        )
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
from megarl.isolation.sandbox import run
for unsafe in (False, True):
    print({TOKEN!r} in run({program!r}, where="", unsafe=unsafe).stdout)
"""
    environment = {**os.environ, "MEGARL_JUDGE_KEY": TOKEN, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", parent], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_what_it_is_given_cannot_be_changed(isolation: None) -> None:
    assert held(attempt("os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')"))
    assert run("print(input())", "given\n", PATIENT).stdout == "given\n"
