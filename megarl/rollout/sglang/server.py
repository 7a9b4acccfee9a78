"""SGLang's engine without its effects on the host process: signals, logging, temporary files, killed processes.

Importing this module imports SGLang (seconds): import it only where an engine is built.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast
from unittest import mock

import zmq

from megarl.cpu import sglang_patches
from megarl.device import DEVICE
from megarl.rollout.load_balancing import Capacity
from megarl.rollout.request_spans import RequestSpans
from megarl.rollout.sglang.group_queue import GroupQueue
from megarl.rollout.sglang.scheduler import (
    SchedulerEntry,
    group_address,
    inherited_environment,
    ipc_address,
)

_loop_policy = asyncio.get_event_loop_policy()
with sglang_patches.quiet_import():
    if DEVICE == "cpu":
        sglang_patches.prepare()
    from sglang.srt.entrypoints import engine as sglang_engine
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import PortArgs, ServerArgs
    from sglang.srt.utils.network import get_zmq_socket

    from megarl.rollout.sglang.stop_texts import StopTextParams
asyncio.set_event_loop_policy(_loop_policy)  # SGLang's import sets uvloop for the whole process


def leave_logging_alone() -> None:
    """Set only the level of SGLang's own loggers; SGLang would reconfigure the root logger of the host process."""
    sglang_engine.configure_logger = lambda *args, **kwargs: logging.getLogger("sglang").setLevel(
        logging.ERROR
    )


class Tokenizer(TokenizerManager):
    """The engine's tokenizer manager; it reports its own failure where SGLang's would kill the whole process tree.

    With DP attention it sends each generation request to the group that its queue names, once that has room, and all
    other requests to the first group, which forwards them. SGLang has a controller process for that, which would be the
    schedulers' parent.
    """

    on_failure: Callable[[BaseException], None]
    queue: GroupQueue
    spans: RequestSpans

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        first: zmq.Socket[Any] = cast(Any, self.send_to_scheduler)
        address = port_args.scheduler_input_ipc_name
        groups = range(1, get_parallel().dp_size)
        others = [
            get_zmq_socket(first.context, zmq.PUSH, group_address(address, group), True)
            for group in groups
        ]
        self._groups = [first, *cast(Any, others)]

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self.sampling_params_class = StopTextParams

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        await self._send_placed(
            [tokenized_obj], functools.partial(super()._send_one_request, tokenized_obj)
        )

    def _should_use_batch_tokenization(self, batch_size: int, requests: Any) -> bool:
        """SGLang sends a batch as one message, to one group. Its own answer is that of the process's last engine."""
        return len(self._groups) == 1 and super()._should_use_batch_tokenization(
            batch_size, requests
        )

    async def _send_batch_request(self, tokenized_objs: Sequence[Any]) -> None:
        await self._send_placed(
            tokenized_objs, functools.partial(super()._send_batch_request, list(tokenized_objs))
        )

    async def _send_placed(
        self, requests: Sequence[Any], send: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            for request in requests:
                self.spans.begin(request.rid, len(request.input_ids))
                await self.queue.place(request.rid, len(request.input_ids))
            await send()
        except BaseException:
            for request in requests:
                self.spans.finish(request.rid, None)
                self.queue.withdraw(request.rid)
            raise

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        if isinstance(obj, io_struct.TokenizedGenerateReqInput):
            io_struct.sock_send(self._groups[self.queue.group_of(cast(str, obj.rid))], obj)
        else:
            super()._dispatch_to_scheduler(obj)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        await super()._handle_batch_output(recv_obj)
        ended = zip(
            recv_obj.rids, recv_obj.finished_reasons, recv_obj.completion_tokens, strict=True
        )
        for request, reason, response_tokens in ended:
            if reason is not None:
                self.spans.finish(request, response_tokens)
                self.queue.finish(request, response_tokens)

    def _handle_abort_req(self, recv_obj: Any) -> None:
        super()._handle_abort_req(recv_obj)
        self.spans.finish(recv_obj.rid, None)
        self.queue.withdraw(recv_obj.rid)

    async def handle_loop(self) -> None:
        try:
            await super().handle_loop()
        except Exception as error:
            self.on_failure(error)


class SglangEngine(sglang_engine.Engine):
    """An engine whose schedulers are child processes, without a detokenizer process, ports, or files elsewhere.

    Construct it and run its coroutines in one thread, not the main one: SGLang then installs no signal handlers, and
    the schedulers, which die with the thread that started them, live as long as the engine.
    """

    tokenizer_manager: Any
    send_to_rpc: Any
    init_tokenizer_manager_func = staticmethod(
        functools.partial(
            cast(Any, sglang_engine.init_tokenizer_manager), TokenizerManagerClass=Tokenizer
        )
    )

    def __init__(self, entry: SchedulerEntry, **server_args: Any) -> None:
        leave_logging_alone()
        self.entry = entry
        self.run_scheduler_process_func = entry
        self._tokenizer: Tokenizer | None = None
        try:
            super().__init__(**server_args)
        except BaseException:
            self._close_sockets()
            raise
        if self.tokenizer_manager is not None:  # on the first node alone
            # it would send SIGQUIT to this process
            self.tokenizer_manager._subprocess_watchdog.stop()
            self.tokenizer_manager.queue = self._group_queue()
            self.tokenizer_manager.spans = RequestSpans()

    @property
    def group_capacity(self) -> Capacity:
        """What each attention group can run at once."""
        tokens = self._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        return Capacity(self.server_args.max_running_requests // self.server_args.dp_size, tokens)

    def _group_queue(self) -> GroupQueue:
        """The queue in front of the attention groups; without a limit for one group, whose own queue does the same."""
        groups = self.server_args.dp_size
        unlimited = Capacity(sys.maxsize, sys.maxsize)
        capacity = self.group_capacity if groups > 1 else unlimited
        return GroupQueue(capacity, groups, self.tokenizer_manager.context_len)

    def _launch_subprocesses(
        self, *, init_tokenizer_manager_func: Callable[..., Any], **kwargs: Any
    ) -> Any:
        def keep(*args: Any) -> Any:
            managers = init_tokenizer_manager_func(*args)
            self._tokenizer = managers[0]  # SGLang drops it when a scheduler fails
            return managers

        ports = private_ports(self.entry)
        return super()._launch_subprocesses(
            port_args=ports, init_tokenizer_manager_func=keep, **kwargs
        )

    @classmethod
    def _launch_scheduler_processes(
        cls,
        server_args: ServerArgs,
        port_args: PortArgs,
        run_scheduler_process_func: SchedulerEntry,
        **kwargs: Any,
    ) -> Any:
        entry = run_scheduler_process_func
        entry.environment = inherited_environment(os.environ)
        if DEVICE == "cpu":
            multiprocessing.set_start_method("forkserver", force=True)
        # the schedulers of all attention DP groups become our own children, as SGLang starts them with a DP size of 1
        with mock.patch.object(sglang_engine, "get_parallel", _OneGroup):
            result, processes = cast(Any, super())._launch_scheduler_processes(
                server_args, port_args, entry, **kwargs
            )
        entry.processes.extend(processes)
        return result, processes

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **kwargs: Any) -> tuple[list[Any], list[str]]:
        return [], []  # the schedulers answer with token ids, straight to the tokenizer manager

    def shutdown(self) -> None:
        """Kill the schedulers; SGLang's own method kills every child of the host process."""
        atexit.unregister(self.shutdown)
        self.entry.kill()
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Destroy the ZeroMQ contexts: unsent messages to dead processes would keep this process from ending.

        A context that is garbage collected before waits for its sockets forever, in any thread.
        """
        for owner, name in ((self._tokenizer, "send_to_scheduler"), (self, "send_to_rpc")):
            socket = getattr(owner, name, None)
            if socket is not None:
                socket.context.destroy(linger=0)


class _OneGroup:
    """SGLang's parallel sizes with a DP size of 1."""

    dp_size = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(get_parallel(), name)


def private_ports(entry: SchedulerEntry) -> PortArgs:
    """Unix sockets in our own directory, in place of files in the common temporary folder."""
    address = functools.partial(ipc_address, entry.directory)
    return PortArgs(
        tokenizer_ipc_name=address("tokenizer"),
        scheduler_input_ipc_name=address("scheduler"),
        detokenizer_ipc_name=address("detokenizer"),
        nccl_port=0,  # not used: the rendezvous is a file
        rpc_ipc_name=address("rpc"),
        metrics_ipc_name=address("metrics"),
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
        # bound by engines of several nodes
        load_collector_ipc_name=address("loads"),
        instance_id=entry.directory.name,
    )
