"""What runs in SGLang's scheduler processes: our environment and patches first, then SGLang's own function."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megarl.device import DEVICE, use_loopback, use_sglang_nccl_settings
from megarl.rollout.rounds import Rounds
from megarl.rollout.sglang import cpu, cpu_attention, deterministic
from megarl.rollout.sglang.arguments import NodeSpan


def set_environment() -> None:
    """What SGLang and its libraries read from the environment, some of it when they are imported.

    Run in the host process before its schedulers start. Logprobs are those of the distribution at the sampling
    temperature, as the trainer computes them, even where the user's environment asks SGLang for those of temperature 1.
    """
    use_loopback()
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # on an engine's further nodes its start returns
    os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"  # a /dev/shm file that a SIGKILL leaves
    os.environ["SGLANG_NUMA_BIND_V2"] = "0"  # a script in /tmp that everyone may write is run; it binds itself instead
    os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # training takes unequal parts of an engine's GPUs
    use_sglang_nccl_settings()
    if DEVICE == "cpu":
        cpu.set_environment()


@dataclass
class SchedulerEntry:
    """The target of a scheduler process, in the place of `sglang.srt.managers.scheduler.run_scheduler_process`.

    It is pickled into the process; `processes` is filled on the parent's side, once they are started.
    """

    directory: Path
    seeded: bool = False
    span: NodeSpan | None = None
    first_rank: int = 0
    reserve_bytes: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[BaseProcess] = field(default_factory=list)

    def log_path(self, tp_rank: int) -> Path:
        return self.directory / f"scheduler-{tp_rank}.log"

    @property
    def rounds_path(self) -> Path:
        """Of the file in which the schedulers count their rounds."""
        return self.directory / "rounds"

    def kill(self) -> None:
        """End and reap the schedulers."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def _set_rendezvous(self) -> None:
        """Torch's own TCPStore would listen on every interface: a file in its place, or for several nodes a store."""
        method = f"file://{self.directory / 'rendezvous'}"
        if self.span:
            host, port = self.span.meet
            method = f"tcp://{host}:{port}"
            # Torch then joins the store that is there, and nobody serves another (distributed/rendezvous.py).
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = method

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The target is unpickled before its arguments, which import SGLang."""
        self.__dict__.update(state)
        if DEVICE == "cpu":
            cpu.prepare()

    def __call__(
        self, server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, pp_rank: int, _: None, *rest: Any
    ) -> None:
        os.environ.update(self.environment)
        self._set_rendezvous()
        _write_output_to(self.log_path(tp_rank))
        with _exit_with_traceback():
            if DEVICE == "cpu":
                cpu.live_no_longer_than_host()
            patch_sglang(repeatable=self.seeded)
            from sglang.srt.managers import scheduler

            rounds = Rounds(self.rounds_path, tp_rank - self.first_rank)
            _seed_groups(scheduler)
            if DEVICE == "cuda":
                _keep_room(scheduler, gpu_id, self.reserve_bytes)
            _count_rounds(scheduler, rounds)
            _end_on_exceptions(scheduler)
            _publish_no_load(scheduler)
            tqdm.set_lock(threading.RLock())  # its default lock is a named semaphore, which a SIGKILL leaves
            _report_failed_loads(rounds)
            group = tp_rank * server_args.dp_size // server_args.tp_size if server_args.dp_size > 1 else None
            address = group_address(port_args.scheduler_input_ipc_name, group or 0)
            port_args = replace(port_args, scheduler_input_ipc_name=address)
            scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, pp_rank, group, *rest)


def patch_sglang(repeatable: bool) -> None:
    """What SGLang needs on this device, and for samples that repeat; run before its model is built."""
    if DEVICE == "cpu":
        cpu.patch_sglang()
        if not repeatable:
            cpu_attention.attend_together()
    if repeatable:
        deterministic.patch_sglang()


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What a scheduler takes over of this process's environment: a fork server's own is older.

    Not LD_PRELOAD: SGLang sets it for the schedulers alone, while they start, for the memory saver that looks it up.
    """
    return {name: value for name, value in environment.items() if name != "LD_PRELOAD"}


def ipc_address(folder: Path, name: str) -> str:
    """ZeroMQ's address of a socket that is a file."""
    return f"ipc://{folder / name}"


def group_address(first: str, group: int) -> str:
    """Where the leader of a DP attention group takes requests; `first` is the first group's address."""
    return f"{first}-{group}" if group else first


def _write_output_to(log: Path) -> None:
    """Everything the process prints, C++ aborts included, goes where the parent finds the reason of its death."""
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())


@contextmanager
def _exit_with_traceback() -> Iterator[None]:
    """Leave the traceback as the log's last lines and end at once, without waiting for peers or threads."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _seed_groups(scheduler: Any) -> None:
    """SGLang gives every rank one seed, by which all attention groups would draw the same samples of a prompt.

    The ranks of one group share a seed: each of them draws the group's tokens for itself.
    """
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils import set_random_seed

    class Scheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            set_random_seed(deterministic.generator_seed(self.random_seed, get_parallel().attn_dp_rank))

    scheduler.Scheduler = Scheduler


def _keep_room(scheduler: Any, gpu_id: int, num_bytes: int) -> None:
    """Hold as much memory as the exchange's communicator will take until SGLang has sized its cache.

    The communicator is made later, and the first `resume_cache` must find as much memory free as the start did.
    """
    import torch

    class Scheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            room = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{gpu_id}")
            super().__init__(*args, **kwargs)
            del room
            torch.cuda.empty_cache()

    scheduler.Scheduler = Scheduler


def _end_on_exceptions(scheduler: Any) -> None:
    """SGLang answers a scheduler's exception with SIGQUIT to its parent, which would kill the actor without a word."""

    class Scheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _exit_with_traceback():
                super().__init__(*args, **kwargs)

        def run_event_loop(self) -> None:
            with _exit_with_traceback():
                super().run_event_loop()

    scheduler.Scheduler = Scheduler


def _count_rounds(scheduler: Any, rounds: Rounds) -> None:
    """SGLang's own watchdog counts forward passes alone, and answers a standstill with SIGQUIT to its parent."""

    class Scheduler(scheduler.Scheduler):
        def ingest_requests(self, *args: Any, **kwargs: Any) -> Any:
            rounds.count()
            return super().ingest_requests(*args, **kwargs)

    scheduler.Scheduler = Scheduler


def _publish_no_load(scheduler: Any) -> None:
    """SGLang's load snapshot for balancers is a file in /dev/shm that nothing of ours reads and a SIGKILL leaves."""
    scheduler.create_load_snapshot_writer = lambda *args, **kwargs: None


def _report_failed_loads(rounds: Rounds) -> None:
    """A custom weight loader that raises ends SGLang's scheduler; ours must answer, on every rank, what was wrong.

    The ranks exchange their errors, so that rank 0, the only one that answers, also knows of the others'.
    """
    import torch.distributed as dist
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.model_executor.model_runner_components import weight_updater

    updater: Any = weight_updater.WeightUpdater
    original = updater.update_weights_from_tensor

    def update(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        try:
            with rounds.exempt():
                success, message = original(self, *args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            success, message = False, " ".join(f"{type(error).__name__}: {error}".split())
        group = get_tp_group()
        failures: list[str | None] = [None] * group.world_size
        mine = None if success else f"tensor-parallel rank {group.rank_in_group}: {message}"
        dist.all_gather_object(failures, mine, group=group.cpu_group)
        reasons = [failure for failure in failures if failure]
        return (False, "; ".join(reasons)) if reasons else (True, message)

    updater.update_weights_from_tensor = update
