"""SGLang on a machine without an accelerator: all patches that it needs, each with its reason.

Run `prepare` in a process before its first `import sglang`.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megarl.collector import collector_paused
from megarl.cpu import sglang_delta_net, sglang_fp8
from megarl.cpu.sglang_experts import sum_local_experts

_KERNELS = "sgl_kernel"
_VISION = "torchvision"


def prepare() -> None:
    """Make `import sglang` work."""
    stand_in_for_torchvision()
    declare_torchvision_operators()
    stand_in_for_kernels()
    sglang_delta_net.install()


def patch_sglang() -> None:
    """The patches of SGLang's own modules; run in a scheduler before its model is built."""
    skip_remote_experts()
    use_latent_cache()
    turn_without_yarn()
    norm_all_heads()
    gate_shared_experts()
    pad_idle_groups()
    scatter_without_nccl()
    keep_memory_unpinned()
    norm_in_torch()
    sglang_fp8.compute_with_codes()


def set_environment() -> None:
    """One thread a process and no busy waiting: engine, training ranks and controller share the cores."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # the convolutions' state is bfloat16 by default, whatever the engine's type
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling small functions costs the first batch 18 s
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def server_arguments(tp: int, room: int, num_sequences: int) -> dict[str, Any]:
    """SGLang's server arguments for CPU, where no device memory is divided.

    room: tokens that the KV cache needs. num_sequences: that may run at once.
    """
    cores = os.cpu_count() or 1
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(tp))
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
        "max_total_tokens": room,
        # of linear attention, which else has nearly half of the machine's memory
        "max_mamba_cache_size": _STATES_OF_A_SEQUENCE * num_sequences,
    }


def start_fork_server(preload: str) -> None:
    """Start a fork server that imports SGLang once, in parallel with this process, for all schedulers.

    preload: the module that it imports.

    A spawned scheduler would spend seconds of the shared cores on the same imports. With CUDA a fork server cannot be
    used, because importing SGLang initialises the driver.
    """
    multiprocessing.set_forkserver_preload([preload])
    forkserver.ensure_running()
    _FORK_SERVER_USERS.append(None)


def stop_fork_server() -> None:
    """End the fork server with the last engine of this process; Python itself keeps it until the process ends."""
    _FORK_SERVER_USERS.pop()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if not _FORK_SERVER_USERS:
        # a regular exit takes seconds to unload its imports
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def end_with_host() -> None:
    """Close this process's copy of the fork server's lifeline, so that both end when the host is killed.

    The fork server ends when no process holds its lifeline, and SGLang's schedulers end with their parent; but Python
    passes the lifeline on to every forked process.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


_FORK_SERVER_USERS: list[None] = []

# its own and those of the prefixes that SGLang keeps for it, by MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO (SGLang)
_STATES_OF_A_SEQUENCE = 3


@contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress SGLang's warnings at import about every model and kernel that this machine lacks.

    Python's collector, which would traverse all that is imported again and again, is kept away from it.
    """
    logging.getLogger("sglang").setLevel(logging.ERROR)
    with warnings.catch_warnings(), collector_paused():
        warnings.simplefilter("ignore")
        yield
        gc.freeze()


def declare_torchvision_operators() -> None:
    """PyPI's torchvision wheel is a CUDA build: its library does not load here, so its import finds no operators."""
    spec = importlib.util.find_spec(_VISION)
    if spec is None or spec.origin is None:
        return
    with suppress(OSError):
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.so"))
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT_LIBRARIES.append(library)


# a Library that is garbage collected removes its definitions
_KEPT_LIBRARIES: list[torch.library.Library] = []


class _MissingName:
    """A name of a missing package: its attributes are missing names too (SGLang reads constants), calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _MissingName:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingName(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        package = self._name.split(".")[0]
        raise RuntimeError(
            f"{self._name} was called on a machine without {package}, which SGLang imports"
        )


class _MissingPackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a package that is not installed, and any submodule of it."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _MissingName(module.__name__).__getattr__


def stand_in_for_kernels() -> None:
    """Replace `sgl_kernel`, whose wheel needs CUDA: SGLang imports it, but calls its own torch code on CPU."""
    if importlib.util.find_spec(_KERNELS) is None:
        sys.meta_path.append(_MissingPackage(_KERNELS))


def stand_in_for_torchvision() -> None:
    """Replace torchvision, which SGLang imports for its image models even where no image is read.

    Transformers must not take the stand-in for torchvision, so it is imported first and caches that torchvision is
    absent. It then exports an AutoImageProcessor that raises, although the real class works without torchvision.
    """
    if importlib.util.find_spec(_VISION) is None:
        processors = importlib.import_module("transformers.models.auto.image_processing_auto")
        vars(sys.modules["transformers"])["AutoImageProcessor"] = processors.AutoImageProcessor
        sys.meta_path.append(_MissingPackage(_VISION))


def skip_remote_experts() -> None:
    """Skip the experts of other ranks: SGLang gives them the id -1, which its torch code would use as an index.

    With expert parallelism the outputs are summed over the local experts; other layers use SGLang's own function.
    """
    from sglang.srt.layers.moe import fused_moe_native

    original = fused_moe_native.moe_forward_native

    def forward(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
        weights, ids, _ = topk_output
        if config.activation != "silu" or layer.moe_ep_size == 1:
            return original(layer, x, topk_output, config)

        def compute(expert: int, rows_TH: Tensor) -> Tensor:
            gate, up = F.linear(rows_TH, layer.w13_weight[expert]).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, layer.w2_weight[expert])

        return sum_local_experts(x, weights, ids, len(layer.w13_weight), compute)

    fused_moe_native.moe_forward_native = forward


def use_latent_cache() -> None:
    """Use the latent cache in both phases of multi-head latent attention (MLA).

    SGLang does not know how `torch_native` prefills MLA, and falls back to plain attention, which reads keys and values
    that were never written.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    attention_backend_handler.AttentionBackendRegistry.register(
        "torch_native", lambda *_: AttnForwardMethod.MLA
    )


def turn_without_yarn() -> None:
    """Give latent attention the rotary positions of other attention where a model has no YaRN.

    SGLang's function for CPU knows YaRN alone.
    """
    from sglang.srt.layers.rotary_embedding import factory

    with_yarn = factory.get_rope_cpu

    def get_rope_cpu(*arguments: Any) -> Any:
        *of_any_device, _ = arguments
        rope_scaling = of_any_device[5]
        if rope_scaling is None:
            return factory.get_rope(*of_any_device)
        return with_yarn(*arguments)

    factory.get_rope_cpu = get_rope_cpu


def norm_all_heads() -> None:
    """Use the torch code of MiniMax-M2's norms, in whose place SGLang calls one kernel for both."""
    from sglang.srt.models import minimax_m2

    norms: Any = minimax_m2.MiniMaxM2QKRMSNorm
    norms.forward = lambda self, q, k: (self._q_norm(q), self._k_norm(k))


def gate_shared_experts() -> None:
    """Gate the shared experts of Qwen2-MoE, Qwen3-Next and Qwen3.5 in torch, where SGLang launches a Triton kernel."""
    from sglang.srt.models import qwen2_moe

    def add(hidden: Tensor, gate_weight_H: Tensor, shared: Tensor, total: Tensor) -> None:
        total += F.linear(hidden, gate_weight_H[None]).sigmoid() * shared

    qwen2_moe.fused_gate_sigmoid_mul_add = add


def pad_idle_groups() -> None:
    """Define the length of padding sequences, which DP attention needs and `torch_native` lacks."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend: Any = TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def scatter_without_nccl() -> None:
    """Replace the uneven reduce-scatter (DP attention with expert parallelism), which uses NCCL on every device.

    SGLang's own variant for deterministic sampling works on any device.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    coordinator: Any = GroupCoordinator
    coordinator.reduce_scatterv = coordinator._deterministic_reduce_scatterv


def keep_memory_unpinned() -> None:
    """Do not pin the list of routed experts and what adapters need, which SGLang pins on every device."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *args: None
    Tensor.pin_memory = lambda self, device=None: self
    for module in (layers, torch_backend):
        vars(module)["torch"] = _UnpinnedTorch()


def norm_in_torch() -> None:
    """Compute the norm behind Gated DeltaNet in torch: on CPUs without AMX SGLang would launch a Triton kernel."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated

    # Qwen3-Next's and Qwen3.5's
    norms: list[Any] = [fused_norm_gate.FusedRMSNormGated, layernorm_gated.RMSNorm]
    for norm in norms:
        norm.forward = lambda self, x, gate: sglang_delta_net.gated_norm(
            x, self.weight, gate, self.eps
        )


class _UnpinnedTorch:
    """torch, whose new tensors are not pinned."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if name not in ("tensor", "zeros"):
            return attribute

        def unpinned(*args: Any, **kwargs: Any) -> Tensor:
            kwargs["pin_memory"] = False
            return attribute(*args, **kwargs)

        return unpinned
