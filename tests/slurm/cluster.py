"""A real Slurm on this machine, all of it in one folder: munge, configuration, spool. Nothing outside is touched."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scancel",
    "scontrol",
    "sinfo",
    "squeue",
)
_START_S = 120.0
_STOP_S = 30.0
_POLL_S = 0.1
_GPUS = ("/dev/null", "/dev/zero")  # Slurm counts devices and opens none
# A requeued job waits until the credentials of its last life have run out (cred_expire). The nodes' names are their
# addresses, so that they need no line of /etc/hosts.
_CONF = """
ClusterName=megarl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
MpiDefault=none
MessageTimeout=60
BatchStartTimeout=60
KillWait=60
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000 Gres=gpu:2
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000 Gres=gpu:2
NodeName={nodes[2]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=1 RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs of Slurm and munge that this machine lacks."""
    return [name for name in PROGRAMS if not shutil.which(name)]


def wait_until(holds: Callable[[], bool], limit_s: float, told: Callable[[], str]) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(_POLL_S)


def line_of(process: psutil.Process) -> str:
    """Its command line; empty once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """All that have this in their environment."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


class Slurm:
    """One controller and a slurmd for each of NODES, children of this process. Used by `with`."""

    def __init__(self, folder: Path) -> None:
        """folder: empty, with a short path."""
        self._folder, self._conf = folder, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH_", "SRUN_"))
        }
        self.environment = variables | {"SLURM_CONF": str(self._conf)}

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def call(self, *command: str) -> str:
        """Standard output of one of Slurm's commands."""
        return subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True
        ).stdout

    def end(self, job: str) -> None:
        """Cancel it, if it has not ended."""
        subprocess.run(["scancel", job], env=self.environment, capture_output=True)

    def field(self, job: str, name: str) -> str:
        """Of `scontrol show job`, as JobState."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def kill_node(self, node: str, processes: list[psutil.Process]) -> None:
        """Its slurmd, with the parents of `processes`, which watch over a job's steps, and these: all at once."""
        parents = [
            parent
            for process in processes
            if (parent := process.parent()) and parent.name() == "slurmstepd"
        ]
        slurmd = self._daemons.pop(node)
        for process in [psutil.Process(slurmd.pid), *parents, *processes]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        slurmd.wait()

    def start_node(self, node: str) -> None:
        self._spawn(node, "slurmd", "-D", "-N", node)

    def _start(self) -> None:
        folder, user = self._folder, psutil.Process().username()
        folder.chmod(0o711)  # munged offers its socket to every user, or not at all
        host = socket.gethostname().partition(".")[0]
        self._conf.write_text(
            _CONF.format(folder=folder, host=host, nodes=NODES, user=user, ports=_free_ports(4))
        )
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in _GPUS))
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._spawn("munged", "munged", "--foreground", f"--socket={folder}/munge.socket", *files)
        self._wait(lambda: (folder / "munge.socket").exists())
        self._spawn("slurmctld", "slurmctld", "-D", "-c")
        self._wait(lambda: self._tells("UP", "scontrol", "ping"))
        for node in NODES:
            self.start_node(node)
        self._wait(lambda: self._tells("3", "sinfo", "-h", "-t", "idle", "-o", "%D"))

    def _spawn(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def _wait(self, holds: Callable[[], bool]) -> None:
        def holds_or_fails() -> bool:
            assert all(daemon.poll() is None for daemon in self._daemons.values()), self.log()
            return holds()

        wait_until(holds_or_fails, _START_S, self.log)

    def _tell(self, *command: str) -> str:
        """Standard output, also of a command that fails."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True).stdout

    def _tells(self, word: str, *command: str) -> bool:
        return word in self._tell(*command).split()

    def log(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-3000:]}"
            for path in sorted(self._folder.glob("*.out"))
        )

    def _stop(self) -> None:
        """Jobs first: a slurmstepd that outlives the controller reports to it for minutes."""
        daemons = {daemon.pid for daemon in self._daemons.values()}
        jobs = [
            process
            for process in processes_with("SLURM_CONF", str(self._conf))
            if process.pid not in daemons
        ]
        watchers = {
            parent
            for process in jobs
            if (parent := process.parent()) and parent.name() == "slurmstepd"
        }
        if "slurmctld" in self._daemons:
            for job in self._tell("squeue", "-h", "-o", "%A").split():
                self.end(job)
        for process in jobs:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(list(watchers), timeout=_STOP_S)
        for watcher in left:
            watcher.kill()
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
