"""SGLang's own HTTP server, on CPU with megarl's patches: sglang_server.py MODEL PORT TP KEY

A real server that somebody else has started, as an external engine of a run: TP ranks, whose samples depend on their
seeds alone, and which want an API key. It listens on loopback, and ends with the process that has started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from megarl.cpu import sglang_patches
from megarl.device import DEVICE, use_loopback
from megarl.rollout.sglang import deterministic, scheduler

scheduler.leave_out_megatron()
if DEVICE == "cpu":
    sglang_patches.prepare()

_PR_SET_PDEATHSIG = 1
_SEQUENCES = 64
_TOKENS = 4096  # of its KV cache


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_scheduler(*arguments: Any) -> None:
    """SGLang's scheduler process with the patches for CPU."""
    end_with_parent()
    use_loopback()
    scheduler.patch_sglang(repeatable=True)
    from sglang.srt.managers import scheduler as sglang_scheduler

    # files in /dev/shm that a killed server leaves
    sglang_scheduler.create_load_snapshot_writer = lambda *_, **__: None  # type: ignore[assignment]
    sglang_scheduler.run_scheduler_process(*arguments)


def run_detokenizer(*arguments: Any) -> None:
    end_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments)


def main(model: str, port: str, tp: str, key: str) -> None:
    end_with_parent()
    scheduler.set_environment()
    with sglang_patches.quiet_import():
        from sglang.srt.entrypoints.http_server import launch_server
        from sglang.srt.server_args import ServerArgs

    arguments: dict[str, Any] = {
        "model_path": model,
        "dtype": "float32",
        "host": "127.0.0.1",
        "port": int(port),
        "tp_size": int(tp),
        "api_key": key,
        "log_level": "error",
        "max_running_requests": _SEQUENCES,
        "disable_shared_experts_fusion": True,
        "skip_server_warmup": True,
        "max_total_tokens": _TOKENS,
    }
    if DEVICE == "cpu":
        arguments |= sglang_patches.server_arguments(int(tp), _TOKENS, _SEQUENCES)
    else:
        # the run's training rank has the rest of the GPU
        arguments |= {"mem_fraction_static": 0.3, "moe_runner_backend": "triton"}
    arguments |= deterministic.server_arguments(_TOKENS, DEVICE)
    if DEVICE == "cpu":
        # SGLang refuses it for the attention of a CPU, where the scheduler's patches make it true
        resolved_dict = ServerArgs.resolved_dict
        stated = {"enable_deterministic_inference": True}
        ServerArgs.resolved_dict = lambda args: resolved_dict(args) | stated  # type: ignore[method-assign]
    launch_server(
        ServerArgs(**arguments),
        run_scheduler_process_func=run_scheduler,
        run_detokenizer_process_func=run_detokenizer,
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(*sys.argv[1:])
