"""The thread that runs SGLang: starting it, watching its schedulers, and failing all waiting calls when one dies."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from concurrent import futures
from concurrent.futures import Future
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from megarl.cluster.session_folder import SessionFolder, remove_dead
from megarl.cpu import sglang_patches
from megarl.device import DEVICE
from megarl.isolation.process import describe_exit
from megarl.rollout.sglang import scheduler
from megarl.rollout.sglang.arguments import EngineSettings, server_arguments
from megarl.rollout.sglang.loop_counts import Standstill, make_counter_file
from megarl.types import ProcessLost, Silence

Result = TypeVar("Result")
_LOG_LINES = 30
_LOOKED_AT_S = 20.0  # for which schedulers that hang are left to a look at their stacks
_PRELOAD = "megarl.rollout.sglang.preload"  # what the schedulers of a CPU share
# of the engine's temporary folder, which lies in the run's own if there is a run
PREFIX = "megarl-engine-"


class EngineError(RuntimeError):
    """The engine cannot answer. The text's last line is the cause, after the last output of its scheduler."""


class EngineLost(EngineError, ProcessLost):
    """The engine cannot answer this call, nor any later one."""


class EngineStandstill(EngineLost, Silence):
    """A scheduler is alive and has made no progress for too long."""


class Host:
    """The thread and event loop that own one SGLang engine, and the thread that watches its schedulers.

    SGLang runs in a thread because it takes over the process's signals in a main thread, and so that an engine can be
    built where an event loop already runs. The constructor blocks until the schedulers are ready, else EngineError.
    """

    def __init__(self, settings: EngineSettings, weight_loader: str) -> None:
        arguments = server_arguments(settings, weight_loader)
        self._error: EngineError | None = None
        self._is_stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop_reader, self._stop_writer = connection.Pipe(duplex=False)
        scheduler.set_environment(whole_shared=settings.layout.whole_shared)
        remove_dead(PREFIX, tempfile.gettempdir())
        self._folder = SessionFolder(PREFIX, tempfile.gettempdir())
        self._entry = scheduler.SchedulerEntry(self._folder.path, settings)
        make_counter_file(self._entry.loop_counts_path, settings.layout.tp)
        self._standstill = Standstill(
            self._entry.loop_counts_path,
            settings.timeout_s,
            computes_here=DEVICE == "cpu" and settings.span is None,
        )
        self._relay: Any = None
        if settings.span and settings.layout.dp > 1:
            from megarl.rollout.sglang.relay import Relay

            try:
                self._relay = Relay(self._folder.path, settings.layout, settings.span)
            except BaseException:
                self._folder.remove()
                raise
        if DEVICE == "cpu":
            sglang_patches.start_fork_server(_PRELOAD)
        started: Future[Any] = Future()
        self._thread = threading.Thread(
            target=self._serve, args=(started, arguments), name="engine", daemon=True
        )
        self._thread.start()
        try:
            self.server = self._outcome(started)
        except BaseException as raised:
            unknown = f"the engine did not start: {type(raised).__name__}: {raised}"
            error = self._error or self._death() or EngineLost(unknown)
            self.stop()
            if not isinstance(raised, Exception):
                raise
            raise error from raised
        if self.server.tokenizer_manager is not None:  # on the first node alone
            self.server.tokenizer_manager.on_failure = self._fail_host
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
        atexit.register(self.stop)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in SGLang's event loop. Raises EngineError when a scheduler dies before it is done."""
        self._refuse_if_gone(work)
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)
        )

    async def fail(self) -> None:
        """Raises EngineLost when a scheduler dies or hangs; does not return, and is silent after `stop`."""
        try:
            await self.run(asyncio.Event().wait())
        except EngineLost:
            if not self._is_stopped:
                raise
        await asyncio.Event().wait()

    def pids(self) -> list[int]:
        """The scheduler processes, by tensor-parallel rank."""
        return [process.pid for process in self._entry.processes if process.pid is not None]

    def spans_files(self) -> dict[str, Path]:
        """Where the schedulers of this node write what they record, by their names."""
        first_rank = self._entry.settings.first_rank
        ranks = range(first_rank, first_rank + len(self._entry.processes))
        return {f"scheduler {rank}": self._entry.spans_path(rank) for rank in ranks}

    @property
    def exchange_still_s(self) -> float:
        """For how long all schedulers in an exchange with others have stood still; 0 outside of one."""
        return self._standstill.exchange_still_s

    def stop(self) -> None:
        """End and reap the schedulers and remove all files; waiting calls raise EngineError."""
        if not self._thread.is_alive():
            return
        self._is_stopped = True
        self._fail(EngineLost("the engine was shut down"))
        self._stop_writer.send_bytes(b"stop")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if self._relay:
            self._relay.stop()
        if DEVICE == "cpu":
            sglang_patches.stop_fork_server()
        self._folder.remove()
        atexit.unregister(self.stop)

    def _serve(self, started: Future[Any], arguments: Mapping[str, Any]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            from megarl.rollout.sglang.server import SglangEngine

            server = SglangEngine(self._entry, **arguments)
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(server)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(
            asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True)
        )
        if started.exception() is None:
            started.result().shutdown()
        self._entry.kill()
        self._loop.close()

    async def _guarded(self, work: Coroutine[Any, Any, Result]) -> Result:
        # again, now in the event loop's thread, which cancels the waiting tasks
        self._refuse_if_gone(work)
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            self._refuse_if_gone(work)
            raise
        finally:
            self._tasks.discard(task)

    def _refuse_if_gone(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._error is not None:
            work.close()
            raise type(self._error)(*self._error.args) from None

    def _outcome(self, started: Future[Any]) -> Any:
        """Wait for the engine's start; kill the schedulers when one hangs."""
        while not futures.wait([started], self._standstill.period_s).done:
            if self._look():
                self._entry.kill()
        return started.result()

    def _look(self) -> bool:
        """Check whether a scheduler hangs; if so, fail the waiting calls and return True."""
        problem = self._standstill.look(self._entry.processes, self._entry.settings.first_rank)
        if problem:
            self._fail(EngineStandstill(problem))
        return problem is not None

    def _watch(self) -> None:
        """Kill all schedulers when one dies or hangs, because its peers would wait for it in a collective."""
        waited: list[Any] = [
            self._stop_reader,
            *(process.sentinel for process in self._entry.processes),
        ]
        while not (ended := connection.wait(waited, self._standstill.period_s)):
            if self._look():
                # whoever is told of it looks at them first, and then ends this process
                ended = connection.wait([self._stop_reader], _LOOKED_AT_S)
                break
        if self._stop_reader in ended:
            return
        self._fail(self._death() or EngineLost("a scheduler of the engine ended"))
        self._entry.kill()

    def _death(self) -> EngineError | None:
        """The error of a dead scheduler; a killed process comes before others, which failed because it was gone."""
        ranks = enumerate(self._entry.processes, start=self._entry.settings.first_rank)
        dead = [(rank, process) for rank, process in ranks if process.exitcode is not None]
        if not dead:
            return None
        rank, process = min(dead, key=lambda item: (item[1].exitcode or 0) >= 0)
        lines: list[str] = []
        if (log := self._entry.log_path(rank)).exists():
            lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        code = process.exitcode or 0
        end = "was" if code < 0 else "ended with"
        end += f" {describe_exit(code)}"
        if lines and code > 0:
            end += f": {lines[-1].strip()}"
        return EngineLost("\n".join([*lines, f"engine scheduler {rank} (pid {process.pid}) {end}"]))

    def _fail_host(self, error: BaseException) -> None:
        self._fail(
            EngineLost(f"the engine's tokenizer manager failed: {type(error).__name__}: {error}")
        )

    def _fail(self, error: EngineError) -> None:
        self._error = self._error or error
        self._loop.call_soon_threadsafe(self._cancel_tasks)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
