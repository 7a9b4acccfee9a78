"""Rules about a node's GPUs, their driver and libraries, and their links. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from megarl.doctor.facts import NodeFacts
from megarl.doctor.findings import Finding, on_node
from megarl.doctor.nvidia import slowdowns
from megarl.doctor.rules_node import INSTALL, gb

_HELD_BYTES = 2 * 2**30  # used memory of a GPU before a run: more than the driver and a display use
_WHY = {  # a word of CUDA's error -> what to look at
    "driver": "install a driver for this CUDA, or torch's build for the driver's",
    "802": "start nvidia-fabricmanager, of the driver's own version",
    "not yet initialized": "start nvidia-fabricmanager, of the driver's own version",
}
_LAYERS = "transformer_engine.pytorch"
_NEEDED = {  # module -> (its use in a run on GPUs, its distribution)
    _LAYERS: ("TransformerEngine computes the training ranks' layers", "transformer-engine"),
    "sgl_kernel": ("SGLang's engines compute with its kernels", "sglang-kernel"),
    "torch_memory_saver": ("engines give their memory to the training ranks by it", "torch-memory-saver"),
}


def gpu_findings(node: NodeFacts, local_layers: bool = False) -> list[Finding]:
    """The findings of these rules; for a node without GPUs only that nvidia-smi fails.

    local_layers: the recipe allows Megatron's own layers where TransformerEngine is missing.
    """
    if node.nvidia_smi:
        mend = "look at dmesg, and whether the driver's module and library are of one version"
        return [on_node(node, "fault", "nvidia-smi", f"it does not answer ({node.nvidia_smi})", mend)]
    if not node.has_gpus:
        return []
    rules = (_torch, _attention, _each_gpu, _alike, _nvlink, _nics, _peer_memory)
    return [*_kernels(node, local_layers), *chain.from_iterable(rule(node) for rule in rules)]


def _torch(node: NodeFacts) -> Iterator[Finding]:
    torch, count = node.torch, len(node.gpus)
    if torch.version and not torch.cuda:
        problem = f"{torch.version} is a CPU build on a node with {count} GPUs: a run would train on the CPU, over gloo"
        yield on_node(node, "fault", "torch", problem, f"{INSTALL}: torch's build for CUDA")
        return
    if _major(node.driver_cuda) and _major(torch.cuda) > _major(node.driver_cuda):
        problem = f"{node.driver} runs CUDA {node.driver_cuda}, and torch {torch.version} is built for {torch.cuda}"
        yield on_node(node, "fault", "driver", problem, "install a newer driver")
    elif torch.error:
        mend = next((mend for word, mend in _WHY.items() if word in torch.error), "look at nvidia-smi -q and dmesg")
        yield on_node(node, "fault", "torch", f"CUDA does not start ({torch.error})", mend)
    elif torch.num_devices != count:
        problem = f"torch sees {torch.num_devices} of {count} GPUs"
        yield on_node(
            node, "fault", "torch", problem, "unset CUDA_VISIBLE_DEVICES where Ray is started, or mend the GPUs"
        )


def _kernels(node: NodeFacts, local_layers: bool) -> Iterator[Finding]:
    for module, (purpose, distribution) in _NEEDED.items():
        error, has_other = node.import_errors.get(module, ""), local_layers and module == _LAYERS
        if error and has_other:
            problem = f"it cannot be imported ({error}): training uses Megatron's own layers, which are slower"
            yield on_node(node, "warning", distribution, problem, f"{INSTALL}, for this torch and this CUDA")
        elif error:
            problem = f"it cannot be imported ({error}), and {purpose}"
            yield on_node(node, "fault", distribution, problem, f"{INSTALL}, for this torch and this CUDA")


def _attention(node: NodeFacts) -> Iterator[Finding]:
    errors = node.import_errors
    if errors.get("flash_attn", "") and node.torch.cuda and not node.torch.cudnn:
        problem = f"neither it ({errors['flash_attn']}) nor cuDNN: TransformerEngine's attention takes T x T memory"
        yield on_node(node, "warning", "flash-attn", problem, f"{INSTALL}: flash-attn or cuDNN")
    if error := errors.get("flashinfer", ""):
        problem = f"it cannot be imported ({error}): SGLang samples with torch, and MLA has no attention backend"
        yield on_node(node, "warning", "flashinfer-python", problem, INSTALL)


def _each_gpu(node: NodeFacts) -> Iterator[Finding]:
    for gpu in node.gpus:
        where = f"GPU {gpu.index} ({gpu.pci})"
        if gpu.mig:
            yield on_node(node, "fault", where, "it is cut into MIG instances", f"nvidia-smi -i {gpu.index} -mig 0")
        if gpu.ecc_errors:
            problem = f"{gpu.ecc_errors} uncorrected memory errors since the driver was loaded"
            yield on_node(node, "fault", where, problem, "drain the node and have the GPU reset or replaced")
        if reasons := slowdowns(gpu.clock_reasons or 0):
            clocks = f"{gpu.sm_mhz:g} of {gpu.max_sm_mhz:g} MHz" if gpu.sm_mhz and gpu.max_sm_mhz else "clocks are down"
            problem = f"{clocks} ({', '.join(reasons)}): all ranks wait for the slowest"
            yield on_node(node, "warning", where, problem, "mend its cooling or power, or leave the node out")
        if gpu.pcie_width and gpu.max_pcie_width and gpu.pcie_width < gpu.max_pcie_width:
            problem = f"{gpu.pcie_width} of {gpu.max_pcie_width} PCIe lanes"
            yield on_node(node, "warning", where, problem, "have the GPU reseated: offloading is slower in proportion")
        if gpu.used_bytes and gpu.used_bytes > _HELD_BYTES:
            problem = f"{gb(gpu.used_bytes)} are used already"
            yield on_node(
                node, "warning", where, problem, "end the processes that use it (see nvidia-smi), unless it is a run"
            )


def _alike(node: NodeFacts) -> Iterator[Finding]:
    kinds = Counter(gpu.name for gpu in node.gpus)
    if len(kinds) > 1:
        mend = "book nodes of one kind: all wait for the slowest"
        unlike = ", ".join(f"{count} {name}" for name, count in kinds.items())
        yield on_node(node, "warning", "GPUs", f"different models: {unlike}", mend)


def _nvlink(node: NodeFacts) -> Iterator[Finding]:
    """All pairs should have equally many NVLinks; PCIe between GPUs is slow for tensor and expert parallelism."""
    links = {name: row for name, row in node.topology.links.items() if name.startswith("GPU")}
    kinds = Counter(kind for name, row in links.items() for other, kind in row.items() if other.startswith("GPU"))
    if not kinds:
        return
    nvlinks = {kind for kind in kinds if kind.startswith("NV")}
    if not nvlinks:
        problem = f"no NVLink between its {len(node.gpus)} GPUs ({', '.join(sorted(kinds))})"
        yield on_node(node, "warning", "NVLink", problem, "keep train.tp and train.ep small, or book nodes with NVLink")
    elif len(kinds) > 1:
        usual = kinds.most_common(1)[0][0]
        odd = [f"{a}-{b} {kind}" for a, row in links.items() for b, kind in row.items() if _is_odd(a, b, kind, usual)]
        problem = f"pairs of GPUs are joined unequally: most by {usual}, but {', '.join(odd[:8])}"
        yield on_node(node, "warning", "NVLink", problem, "look at nvidia-smi nvlink -s: is a link down?")


def _is_odd(one: str, two: str, kind: str, usual: str) -> bool:
    """Whether a pair of GPUs has another kind of link than usual; counts one direction only."""
    return two.startswith("GPU") and int(one[3:]) < int(two[3:]) and kind != usual


def _nics(node: NodeFacts) -> Iterator[Finding]:
    down = [f"{nic.name}:{nic.port}" for nic in node.nics if not nic.is_up]
    if down:
        yield on_node(node, "warning", "network", f"links are down: {', '.join(down)}", "look at ibstat and the cables")
    rates = Counter(nic.gbit_per_s for nic in node.nics if nic.is_up and nic.name in node.gpu_nics.values())
    if len(rates) > 1:
        speeds = ", ".join(f"{count} of {rate or 0:g} Gb/s" for rate, count in rates.items())
        problem = f"the GPUs' cards are of unequal speed: {speeds}"
        yield on_node(node, "warning", "network", problem, "look at ibstat and the cables")
    for problem in node.nic_faults:
        yield on_node(
            node, "warning", "network", problem, "name the GPUs' cards in NCCL_IB_HCA, or mend the node's cards"
        )


def _peer_memory(node: NodeFacts) -> Iterator[Finding]:
    if node.gpu_nics and not node.has_peermem and not node.has_open_driver:
        problem = "neither nvidia_peermem nor open kernel modules (dmabuf): messages go through the host's memory"
        mend = "modprobe nvidia_peermem, or install the driver's open modules"
        yield on_node(node, "warning", "GPUDirect", problem, mend)


def _major(version: str) -> int:
    return int(version.partition(".")[0]) if version else 0
