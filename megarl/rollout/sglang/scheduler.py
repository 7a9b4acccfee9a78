"""The entry of SGLang's scheduler processes: our environment and patches, then SGLang's own function."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from megarl.cpu import sglang_attention, sglang_patches
from megarl.device import DEVICE, use_loopback, use_sglang_nccl_settings
from megarl.diagnosis.stacks import answer_with_stacks
from megarl.model.precision import PLAIN, Precision
from megarl.rollout.sglang import adapter_slot, deterministic, fp8_scales, scheduler_spans
from megarl.rollout.sglang.arguments import EngineSettings
from megarl.rollout.sglang.loop_counts import LoopCounter
from megarl.timeline import recorder


def set_environment(*, whole_shared: bool = False) -> None:
    """Set the variables that SGLang and its libraries read, some of them at import.

    Run in the host process before its schedulers start. Logprobs are those at the sampling temperature, as the trainer
    computes them, even where the user's environment asks SGLang for those at temperature 1.
    """
    use_loopback()
    os.environ |= {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_SHARED_EXPERT_TP1": str(int(whole_shared)),
        # otherwise the start does not return on other nodes
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
        # a /dev/shm file that survives a SIGKILL
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        # it runs a script in /tmp that everyone may write; SGLang has another way
        "SGLANG_NUMA_BIND_V2": "0",
        # training uses the engine's GPUs unevenly
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # a bench's option: so many drafts are accepted unseen
        "SGLANG_SIMULATE_ACC_LEN": "-1",
    }
    use_sglang_nccl_settings()
    if DEVICE == "cpu":
        sglang_patches.set_environment()


def leave_out_megatron() -> None:
    """Make `import megatron` fail in this process: SGLang's dumper, a tool for debugging, imports it if it can.

    That is a quarter of the processor time of a scheduler's start.
    """
    sys.modules.setdefault("megatron", cast(Any, None))


@dataclass
class SchedulerEntry:
    """The target of a scheduler process, in place of `sglang.srt.managers.scheduler.run_scheduler_process`.

    It is pickled into the process; `processes` is filled in the parent once they are started.
    """

    directory: Path
    settings: EngineSettings
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[BaseProcess] = field(default_factory=list)

    def log_path(self, tp_rank: int) -> Path:
        return self.directory / f"scheduler-{tp_rank}.log"

    def spans_path(self, tp_rank: int) -> Path:
        """Where a scheduler writes what it has recorded."""
        return self.directory / f"spans-{tp_rank}.json"

    @property
    def loop_counts_path(self) -> Path:
        """The file in which the schedulers count the rounds of their event loops."""
        return self.directory / "rounds"

    def kill(self) -> None:
        """End and reap the schedulers."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def _set_rendezvous(self) -> None:
        """Use a file, or our store for several nodes, because torch's own TCPStore would listen on every interface."""
        method = f"file://{self.directory / 'rendezvous'}"
        if self.settings.span:
            host, port = self.settings.span.rendezvous
            method = f"tcp://{host}:{port}"
            # With these variables torch joins the existing store and starts none (distributed/rendezvous.py).
            os.environ |= {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = method

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare for SGLang's import: the target is unpickled before its arguments, which import SGLang."""
        self.__dict__.update(state)
        leave_out_megatron()
        if DEVICE == "cpu":
            sglang_patches.prepare()

    def __call__(
        self,
        server_args: Any,
        port_args: Any,
        gpu_id: int,
        tp_rank: int,
        pp_rank: int,
        _: None,
        *rest: Any,
    ) -> None:
        os.environ.update(self.environment)
        self._set_rendezvous()
        _write_output_to(self.log_path(tp_rank))
        answer_with_stacks()
        with _exit_with_traceback():
            if DEVICE == "cpu":
                sglang_patches.end_with_host()
            patch_sglang(repeatable=self.settings.seeded, precision=self.settings.layout.precision)
            if self.settings.adapter:
                adapter_slot.start_empty(self.settings.adapter)
            from sglang.srt.managers import scheduler

            rounds = LoopCounter(self.loop_counts_path, tp_rank - self.settings.first_rank)
            if DEVICE == "cuda":
                _reserve_memory(scheduler, gpu_id, self.settings.reserve_bytes)
            _patch_scheduler(
                scheduler,
                rounds,
                has_adapter=self.settings.adapter is not None,
                spans_path=self.spans_path(tp_rank),
            )
            # Load snapshots for balancers are files in /dev/shm that we do not read and that survive a SIGKILL.
            scheduler.create_load_snapshot_writer = lambda *args, **kwargs: None
            # its default lock is a named semaphore, which a SIGKILL leaves
            tqdm.set_lock(threading.RLock())
            _report_failed_loads(rounds)
            group = None
            if server_args.dp_size > 1:
                group = tp_rank * server_args.dp_size // server_args.tp_size
            address = group_address(port_args.scheduler_input_ipc_name, group or 0)
            port_args = replace(port_args, scheduler_input_ipc_name=address)
            scheduler.run_scheduler_process(
                server_args, port_args, gpu_id, tp_rank, pp_rank, group, *rest
            )


def patch_sglang(repeatable: bool, precision: Precision = PLAIN) -> None:
    """Apply the patches for this device, for seeded samples and for formats; run before the model is built."""
    if DEVICE == "cpu":
        sglang_patches.patch_sglang()
        if not repeatable:
            sglang_attention.batch_attention()
    elif precision.is_quantised and precision.scales == "powers_of_two":
        fp8_scales.round_scales_up()
    if repeatable:
        deterministic.patch_sglang()


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process for a scheduler, because the fork server's environment is older.

    Without LD_PRELOAD, which SGLang sets while it starts the schedulers, for its memory saver.
    """
    return {name: value for name, value in environment.items() if name != "LD_PRELOAD"}


def ipc_address(folder: Path, name: str) -> str:
    """ZeroMQ's address of a Unix socket."""
    return f"ipc://{folder / name}"


def group_address(first: str, group: int) -> str:
    """The address where the leader of an attention DP group receives requests; first: that of group 0."""
    return f"{first}-{group}" if group else first


def _write_output_to(log: Path) -> None:
    """Redirect all output, that of C++ aborts included, to the log in which the parent finds the cause of death."""
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())


@contextmanager
def _exit_with_traceback() -> Iterator[None]:
    """On an exception, write the traceback and exit at once, without waiting for peers or threads."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _reserve_memory(scheduler: Any, gpu_id: int, num_bytes: int) -> None:
    """Hold the memory of the exchange's communicator while SGLang sizes its KV cache.

    The communicator is made later, and the first `resume_cache` needs as much free memory as the start had.
    """
    import torch

    class MemoryReservingScheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            room = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{gpu_id}")
            super().__init__(*args, **kwargs)
            del room
            torch.cuda.empty_cache()

    scheduler.Scheduler = MemoryReservingScheduler


def _patch_scheduler(
    scheduler: Any, rounds: LoopCounter, *, has_adapter: bool, spans_path: Path
) -> None:
    """Replace SGLang's scheduler class.

    Each attention DP group gets its own seed: with SGLang's single one all would draw the same samples of a prompt. The
    ranks of a group share the seed, because each of them samples the group's tokens. The process exits on an exception:
    SGLang would send SIGQUIT to the parent, which would kill the actor silently. The rounds of the event loop are
    counted: SGLang's watchdog counts only forward passes, and sends SIGQUIT. Calls of methods (RPC) are the copies of
    weights to new engines, which all ranks send in the same round, the unmapping of training ranks' weights, and the
    recordings of what the schedulers do and of what their layers give. The answer is one that goes to the tokenizer
    manager, as the leader of every attention group sends it: the socket of SGLang's own answer is only for one.
    """
    from sglang.srt.managers.io_struct import SendWeightsToRemoteInstanceReqOutput
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils import set_random_seed

    from megarl.rollout.sglang.stop_texts import StopTextDecoder

    class PatchedScheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _exit_with_traceback():
                super().__init__(*args, **kwargs)
                self.spans_path = spans_path
                set_random_seed(
                    deterministic.generator_seed(self.random_seed, get_parallel().attn_dp_rank)
                )
                # SGLang would have none
                self.tokenizer = StopTextDecoder(self.server_args.model_path)
                if has_adapter:
                    adapter_slot.occupy_slot(self.tp_worker.model_runner)

        def run_event_loop(self) -> None:
            with _exit_with_traceback():
                super().run_event_loop()

        def ingest_requests(self, *args: Any, **kwargs: Any) -> Any:
            rounds.count()
            return super().ingest_requests(*args, **kwargs)

        def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            with recorder.span(batch.forward_mode.name.lower(), requests=len(batch.reqs)):
                return super().run_batch(batch, *args, **kwargs)

        def process_batch_result(self, batch: Any, result: Any) -> None:
            with recorder.span("take results", requests=len(batch.reqs)):
                super().process_batch_result(batch, result)
            scheduler_spans.note_first_tokens(batch)

        def handle_rpc_request(self, recv_req: Any) -> SendWeightsToRemoteInstanceReqOutput:
            with rounds.exempt():
                reasons = _reasons(_failure(recv_req.method, self, recv_req.parameters))
            return SendWeightsToRemoteInstanceReqOutput(success=not reasons, message=reasons)

    scheduler.Scheduler = PatchedScheduler


def _failure(method: str, scheduler: Any, parameters: Mapping[str, Any]) -> str:
    """Call one of our own methods with its parameters; why that failed, else ""."""
    try:
        _METHODS[method](scheduler, **parameters)
    except Exception as error:
        traceback.print_exc()
        return _in_one_line(error)
    return ""


def _send_copy(scheduler: Any, message: str) -> None:
    """Send this rank's weights to a new engine. message: as JSON."""
    from sglang.srt.runtime_context import get_serving

    from megarl.rollout.sglang import weight_loader

    version = int(get_serving().weight_version)
    weight_loader.send(_models(scheduler), json.loads(message), version)


def _forget_ranks(_: Any) -> None:
    """Unmap the weights of the training rank on this GPU."""
    from megarl.rollout.sglang import weight_loader

    weight_loader.forget_ranks()


def _begin_layers(scheduler: Any, num_terms: int) -> None:
    """Record the outputs of layers from now on."""
    from sglang.srt.distributed import get_tp_group

    from megarl.rollout.sglang.layer_outputs import EngineLayerRecorder

    # of a draft model there is one more
    target = _models(scheduler)[0]
    scheduler.layer_recorder = EngineLayerRecorder(target, get_tp_group().rank_in_group, num_terms)


def _end_layers(scheduler: Any, folder: str) -> None:
    """Write what was recorded into this rank's file."""
    scheduler.layer_recorder.finish(Path(folder))
    del scheduler.layer_recorder


def _begin_spans(_: Any) -> None:
    """Record what this scheduler does from now on."""
    recorder.begin()


def _end_spans(scheduler: Any) -> None:
    """Write what was recorded into this scheduler's file."""
    scheduler_spans.write_spans(scheduler.spans_path)


def _models(scheduler: Any) -> list[Any]:
    return [runner.model for _, runner in scheduler.weight_updater._select_runners()]


_METHODS: Mapping[str, Callable[..., None]] = {
    "send_copy": _send_copy,
    "forget_ranks": _forget_ranks,
    "begin_layers": _begin_layers,
    "end_layers": _end_layers,
    scheduler_spans.BEGIN: _begin_spans,
    scheduler_spans.END: _end_spans,
}


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _reasons(failure: str) -> str:
    """Why any tensor-parallel rank failed, because only rank 0 answers; "" if none did. failure: of this one."""
    import torch.distributed as dist
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    own = failure and f"tensor-parallel rank {group.rank_in_group}: {failure}"
    failures = [own] * group.world_size
    dist.all_gather_object(failures, own, group=group.cpu_group)
    return "; ".join(filter(None, failures))


def _report_failed_loads(rounds: LoopCounter) -> None:
    """Answer a weight update whose loader raised with the error; SGLang's scheduler would end."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    updater: Any = weight_updater.WeightUpdater
    original = updater.update_weights_from_tensor

    def update(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        try:
            with rounds.exempt():
                success, message = original(self, *args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            success = False
            message = _in_one_line(error)
        reasons = _reasons("" if success else message)
        return (not reasons, reasons or message)

    updater.update_weights_from_tensor = update
