"""SGLang's engine with what it does to its host process taken away: signals, logging, temporary files, killing.

Importing this module imports SGLang (seconds): import it where an engine is built.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, cast

from megarl.device import DEVICE
from megarl.rollout import cpu
from megarl.rollout.scheduler import SchedulerEntry

if DEVICE == "cpu":
    cpu.prepare()

_loop_policy = asyncio.get_event_loop_policy()
with cpu.quiet_import():
    from sglang.srt.entrypoints import engine as sglang_engine
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import PortArgs, ServerArgs
asyncio.set_event_loop_policy(_loop_policy)  # SGLang chooses uvloop for the whole process


def leave_logging_alone() -> None:
    """SGLang reconfigures the root logger of its host process; only its own loggers are set, to errors."""
    sglang_engine.configure_logger = lambda *args, **kwargs: logging.getLogger("sglang").setLevel(logging.ERROR)


class Tokenizer(TokenizerManager):
    """The host's end of the engine; tells of its own failure where SGLang's would kill the whole process tree."""

    on_failure: Callable[[BaseException], None]

    async def handle_loop(self) -> None:
        try:
            await super().handle_loop()
        except Exception as error:
            self.on_failure(error)


class SglangEngine(sglang_engine.Engine):
    """Schedulers as children; no detokenizer process, no port, no file outside `directory`.

    Build it and run its coroutines in one thread that is not the main one: SGLang then installs no signal handlers,
    and its children, who die with the thread that started them, live as long as the engine.
    """

    tokenizer_manager: Any
    send_to_rpc: Any
    init_tokenizer_manager_func = staticmethod(
        functools.partial(cast(Any, sglang_engine.init_tokenizer_manager), TokenizerManagerClass=Tokenizer)
    )

    def __init__(self, entry: SchedulerEntry, **server_args: Any) -> None:
        leave_logging_alone()
        self.entry = entry
        self.run_scheduler_process_func = entry
        super().__init__(**server_args)
        self.tokenizer_manager._subprocess_watchdog.stop()  # it would answer a dead child with SIGQUIT to ourselves

    def _launch_subprocesses(self, **kwargs: Any) -> Any:
        return super()._launch_subprocesses(port_args=private_ports(self.entry), **kwargs)

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: ServerArgs, port_args: PortArgs, run_scheduler_process_func: SchedulerEntry, **kwargs: Any
    ) -> Any:
        entry = run_scheduler_process_func
        entry.environment = dict(os.environ)  # a fork server's own is older
        if DEVICE == "cpu":
            multiprocessing.set_start_method("forkserver", force=True)
        result, processes = cast(Any, super())._launch_scheduler_processes(server_args, port_args, entry, **kwargs)
        entry.processes.extend(processes)
        return result, processes

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **kwargs: Any) -> tuple[list[Any], list[str]]:
        return [], []  # the schedulers answer with token ids, straight to the tokenizer manager

    def shutdown(self) -> None:
        """SGLang's own kills every child of the host process, whoever started it; here the schedulers alone."""
        atexit.unregister(self.shutdown)
        self.entry.kill()
        if self.tokenizer_manager is not None:
            for socket in (self.tokenizer_manager.send_to_scheduler, self.send_to_rpc):
                socket.context.destroy(linger=0)  # else unsent messages to the dead would keep the process from ending


def private_ports(entry: SchedulerEntry) -> PortArgs:
    """Unix sockets in a directory of ours alone, in the place of files in the common temporary folder."""

    def address(name: str) -> str:
        return f"ipc://{entry.directory / name}"

    return PortArgs(
        tokenizer_ipc_name=address("tokenizer"),
        scheduler_input_ipc_name=address("scheduler"),
        detokenizer_ipc_name=address("detokenizer"),
        nccl_port=0,  # not used: the rendezvous is a file
        rpc_ipc_name=address("rpc"),
        metrics_ipc_name=address("metrics"),
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
        instance_id=entry.directory.name,
    )
