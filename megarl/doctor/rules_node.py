"""Rules about one node: memory, limits, disks, ports, packages; GPUs with their driver, kernels and links. Pure."""

from __future__ import annotations

from collections import Counter

from megarl.doctor.facts import UNLIMITED, NodeFacts
from megarl.doctor.findings import Finding, Problems, gb, of_node
from megarl.doctor.nvidia import slowdowns

_INSTALL = "install what requirements/gpu.txt names"
# NCCL's and gloo's buffers of eight ranks, and Ray's smallest object store
_LEAST_SHM_BYTES = 2**30
_MOST_STORE_BYTES = 2**35  # the bound of Ray's object store in megarl and scripts/ray_node.sh
_LEAST = 4096  # open files, and processes with their threads
_GOOD_FILES = 65_536  # descriptors: each rank has a socket to each other rank, Ray several
_GOOD_PROCESSES = 32_768  # including threads: some hundreds for each rank and engine
# for logs and sockets; for a run's logs and a compiler's caches
_FULL_BYTES = 10**9
_LOW_BYTES = 20 * 10**9
_FEW_FILES = 1000
_SLOW_BYTES_PER_S = 200e6  # a single old disk; a checkpoint of a 30B model takes half an hour
_HELD_BYTES = 2 * 2**30  # used memory of a GPU before a run: more than the driver and a display use
_NEEDED = ("torch", "megatron-core", "ray", "transformers", "sglang")
_NEEDED_ON_GPUS = {  # distribution -> (its module, the module's use in a run)
    "transformer-engine": (
        "transformer_engine.pytorch",
        "TransformerEngine computes the training ranks' layers",
    ),
    "sglang-kernel": ("sgl_kernel", "SGLang's engines compute with its kernels"),
    "torch-memory-saver": (
        "torch_memory_saver",
        "engines give their memory to the training ranks by it",
    ),
}
_WHY = {  # a word of CUDA's error -> what to look at
    "driver": "install a driver for this CUDA, or torch's build for the driver's",
    "802": "start nvidia-fabricmanager, of the driver's own version",
    "not yet initialized": "start nvidia-fabricmanager, of the driver's own version",
}


def node_findings(node: NodeFacts) -> list[Finding]:
    """The findings about everything but GPUs; for a node without GPUs a note on what was not checked."""
    return of_node(
        node,
        *(rule(node) for rule in (_shm, _memlock, _counts, _disks, _ports, _packages, _no_gpu)),
    )


def gpu_findings(node: NodeFacts, local_layers: bool = False) -> list[Finding]:
    """The findings about GPUs; for a node without them only that nvidia-smi fails.

    local_layers: the recipe allows Megatron's own layers where TransformerEngine is missing.
    """
    if node.nvidia_smi:
        return [
            Finding(
                "error",
                "nvidia-smi",
                f"it does not answer ({node.nvidia_smi})",
                "look at dmesg, and whether the driver's module and library are of one version",
                (node.address,),
            )
        ]
    if not node.gpus:
        return []
    rules = (_torch, _attention, _cudnn, _each_gpu, _alike, _nvlink, _nics, _peer_memory)
    return of_node(node, _kernels(node, local_layers), *(rule(node) for rule in rules))


def _shm(node: NodeFacts) -> Problems:
    free = node.shm_free_bytes
    store = min(_MOST_STORE_BYTES, node.host_bytes // 10)
    hint = "start the container with --shm-size=64g, or: mount -o remount,size=64g /dev/shm"
    if free < _LEAST_SHM_BYTES:
        least = gb(_LEAST_SHM_BYTES)
        yield (
            "error",
            "/dev/shm",
            f"{gb(free)} of {gb(node.shm_total_bytes)} free; NCCL, gloo and Ray need {least} and more",
            hint,
        )
    elif free < store:
        yield (
            "warning",
            "/dev/shm",
            f"{gb(free)} free, and Ray's object store wants {gb(store)}: the rest of it spills to the disk",
            hint,
        )


def _memlock(node: NodeFacts) -> Problems:
    limit = node.limits.memlock_bytes
    cards = sorted({nic.name for nic in node.nics if nic.is_up})
    if cards and limit != UNLIMITED:
        yield (
            "error",
            "memlock",
            f"{limit // 1024} KiB may be locked, and the RDMA cards ({', '.join(cards)}) lock all that they send",
            "set it to unlimited: `* - memlock unlimited` in limits.conf, or --ulimit memlock=-1 of the container",
        )


def _counts(node: NodeFacts) -> Problems:
    for name, limit, good, what in (
        ("nofile", node.limits.num_files, _GOOD_FILES, "open files"),
        ("nproc", node.limits.num_processes, _GOOD_PROCESSES, "processes and threads"),
    ):
        if limit != UNLIMITED and limit < good:
            yield (
                "error" if limit < _LEAST else "warning",
                name,
                f"{limit} {what} at most, and a node of eight GPUs wants {good}",
                f"raise it before Ray is started: `* - {name} {good}` in limits.conf",
            )


def _disks(node: NodeFacts) -> Problems:
    for folder in node.folders:
        where = f"{folder.path} ({folder.purpose})"
        speed = folder.write_bytes_per_s
        if not folder.is_written:
            continue
        has_few_files = folder.free_files is not None and folder.free_files < _FEW_FILES
        if folder.free_bytes < _FULL_BYTES or has_few_files:
            files = "" if folder.free_files is None else f", {folder.free_files} files"
            yield (
                "error",
                where,
                f"the disk is full: {gb(folder.free_bytes)} of {gb(folder.total_bytes)} free{files}",
                "make room there, or name a folder on another disk",
            )
        elif folder.error:
            yield (
                "error",
                where,
                f"nothing can be written ({folder.error})",
                "mend that, or name another folder",
            )
        elif folder.free_bytes < _LOW_BYTES:
            yield (
                "warning",
                where,
                f"{gb(folder.free_bytes)} free",
                "make room there before a long run",
            )
        if speed is not None and speed < _SLOW_BYTES_PER_S:
            yield (
                "warning",
                where,
                f"{speed / 1e6:.0f} MB/s are written ({folder.file_system or 'unknown file system'})",
                "name a faster disk: a step waits for its checkpoint",
            )


def _ports(node: NodeFacts) -> Problems:
    hint = "end that, or name another port: ray start --port=..., or scripts/ray_node.sh: it takes a free one"
    for port in node.ports:
        if port.taken_by:
            severity = "error" if port.is_needed else "warning"
            yield severity, f"port {port.number}", f"taken by {port.taken_by}", hint


def _packages(node: NodeFacts) -> Problems:
    for name in _NEEDED:
        if name not in node.versions:
            yield "error", name, "it is not installed", _INSTALL
    for name, pinned in node.pins.items():
        here = node.versions.get(name)
        if here and here.partition("+")[0] != pinned:
            yield (
                "error",
                name,
                f"{here} is installed, and SGLang {node.versions.get('sglang', '')} is built for {pinned}",
                f"pip install {name}=={pinned}",
            )


def _no_gpu(node: NodeFacts) -> Problems:
    """A note on a machine without GPUs about the checks that were left out."""
    if node.gpus or node.nvidia_smi:
        return
    lacks = [] if node.torch.cuda else ["torch is a CPU build"]
    lacks += [f"{name} is not installed" for name in _NEEDED_ON_GPUS if name not in node.versions]
    yield (
        "note",
        "GPUs",
        "nvidia-smi lists none: driver, CUDA, NCCL, NVLink, clocks and kernels were not checked",
        "nothing for a run on CPU" + (f"; for one on GPUs: {', '.join(lacks)}" if lacks else ""),
    )


def _kernels(node: NodeFacts, local_layers: bool) -> Problems:
    for distribution, (module, purpose) in _NEEDED_ON_GPUS.items():
        if error := node.import_errors.get(module, ""):
            severity = "error"
            effect = f", and {purpose}"
            if local_layers and distribution == "transformer-engine":
                severity = "warning"
                effect = ": training uses Megatron's own layers, which are slower"
            yield (
                severity,
                distribution,
                f"it cannot be imported ({error}){effect}",
                f"{_INSTALL}, for this torch and this CUDA",
            )


def _cudnn(node: NodeFacts) -> Problems:
    """Another cuDNN than the package's, which TransformerEngine prefers."""
    packaged = node.versions.get("nvidia-cudnn-cu13", "")
    same = f"/libcudnn.so.{'.'.join(packaged.split('.')[:3])}"
    if not packaged or not node.foreign_cudnn or node.foreign_cudnn.endswith(same):
        return
    yield (
        "error",
        "cuDNN",
        f"{node.foreign_cudnn} is loaded in place of the package's {packaged}: TransformerEngine's import fails, "
        "or two versions are mixed",
        "take an image without cuDNN (cuda:*-devel, not cudnn-devel), or remove it and take its folder out of "
        "LD_LIBRARY_PATH, CUDNN_HOME and CUDNN_PATH",
    )


def _torch(node: NodeFacts) -> Problems:
    torch = node.torch
    count = len(node.gpus)
    if torch.version and not torch.cuda:
        yield (
            "error",
            "torch",
            f"{torch.version} is a CPU build on a node with {count} GPUs: a run would train on the CPU, over gloo",
            f"{_INSTALL}: torch's build for CUDA",
        )
    elif _major(node.driver_cuda) and _major(torch.cuda) > _major(node.driver_cuda):
        yield (
            "error",
            "driver",
            f"{node.driver} runs CUDA {node.driver_cuda}, and torch {torch.version} is built for {torch.cuda}",
            "install a newer driver",
        )
    elif torch.error:
        yield (
            "error",
            "torch",
            f"CUDA does not start ({torch.error})",
            next(
                (hint for word, hint in _WHY.items() if word in torch.error),
                "look at nvidia-smi -q and dmesg",
            ),
        )
    elif torch.num_devices != count:
        yield (
            "error",
            "torch",
            f"torch sees {torch.num_devices} of {count} GPUs",
            "unset CUDA_VISIBLE_DEVICES where Ray is started, or mend the GPUs",
        )


def _attention(node: NodeFacts) -> Problems:
    errors = node.import_errors
    if errors.get("flash_attn", "") and node.torch.cuda and not node.torch.cudnn:
        yield (
            "warning",
            "flash-attn",
            f"neither it ({errors['flash_attn']}) nor cuDNN: TransformerEngine's attention takes T x T memory",
            f"{_INSTALL}: flash-attn or cuDNN",
        )
    if error := errors.get("flashinfer", ""):
        yield (
            "warning",
            "flashinfer-python",
            f"it cannot be imported ({error}): SGLang samples with torch, and MLA has no attention backend",
            _INSTALL,
        )


def _each_gpu(node: NodeFacts) -> Problems:
    for gpu in node.gpus:
        where = f"GPU {gpu.index} ({gpu.pci})"
        if gpu.mig:
            yield (
                "error",
                where,
                "it is cut into MIG instances",
                f"nvidia-smi -i {gpu.index} -mig 0",
            )
        if gpu.ecc_errors:
            yield (
                "error",
                where,
                f"{gpu.ecc_errors} uncorrected memory errors since the driver was loaded",
                "drain the node and have the GPU reset or replaced",
            )
        if reasons := slowdowns(gpu.clock_reasons or 0):
            if gpu.sm_mhz and gpu.max_sm_mhz:
                clocks = f"{gpu.sm_mhz:g} of {gpu.max_sm_mhz:g} MHz"
            else:
                clocks = "clocks are down"
            yield (
                "warning",
                where,
                f"{clocks} ({', '.join(reasons)}): all ranks wait for the slowest",
                "mend its cooling or power, or leave the node out",
            )
        if gpu.pcie_width and gpu.max_pcie_width and gpu.pcie_width < gpu.max_pcie_width:
            yield (
                "warning",
                where,
                f"{gpu.pcie_width} of {gpu.max_pcie_width} PCIe lanes",
                "have the GPU reseated: offloading is slower in proportion",
            )
        if gpu.used_bytes and gpu.used_bytes > _HELD_BYTES:
            yield (
                "warning",
                where,
                f"{gb(gpu.used_bytes)} are used already",
                "end the processes that use it (see nvidia-smi), unless it is a run",
            )


def _alike(node: NodeFacts) -> Problems:
    kinds = Counter(gpu.name for gpu in node.gpus)
    if len(kinds) > 1:
        unlike = ", ".join(f"{count} {name}" for name, count in kinds.items())
        yield (
            "warning",
            "GPUs",
            f"different models: {unlike}",
            "book nodes of one kind: all wait for the slowest",
        )


def _nvlink(node: NodeFacts) -> Problems:
    """All pairs should have equally many NVLinks; PCIe between GPUs is slow for tensor and expert parallelism."""
    pairs = {
        f"{first}-{other}": kind
        for first, row in node.topology.links.items()
        for other, kind in row.items()
        if first[:3] == other[:3] == "GPU" and int(first[3:]) < int(other[3:])
    }
    kinds = Counter(pairs.values())
    if kinds and not any(kind.startswith("NV") for kind in kinds):
        yield (
            "warning",
            "NVLink",
            f"no NVLink between its {len(node.gpus)} GPUs ({', '.join(sorted(kinds))})",
            "keep train.tp and train.ep small, or book nodes with NVLink",
        )
    elif len(kinds) > 1:
        usual = kinds.most_common(1)[0][0]
        odd = [f"{pair} {kind}" for pair, kind in pairs.items() if kind != usual]
        yield (
            "warning",
            "NVLink",
            f"pairs of GPUs are joined unequally: most by {usual}, but {', '.join(odd[:8])}",
            "look at nvidia-smi nvlink -s: is a link down?",
        )


def _nics(node: NodeFacts) -> Problems:
    down = [f"{nic.name}:{nic.port}" for nic in node.nics if not nic.is_up]
    if down:
        yield (
            "warning",
            "network",
            f"links are down: {', '.join(down)}",
            "look at ibstat and the cables",
        )
    rates = Counter(
        nic.gbit_per_s for nic in node.nics if nic.is_up and nic.name in node.gpu_nics.values()
    )
    if len(rates) > 1:
        speeds = ", ".join(f"{count} of {rate or 0:g} Gb/s" for rate, count in rates.items())
        yield (
            "warning",
            "network",
            f"the GPUs' cards are of unequal speed: {speeds}",
            "look at ibstat and the cables",
        )
    for problem in node.nic_errors:
        yield (
            "warning",
            "network",
            problem,
            "name the GPUs' cards in NCCL_IB_HCA, or mend the node's cards",
        )


def _peer_memory(node: NodeFacts) -> Problems:
    if node.gpu_nics and not node.has_peermem and not node.has_open_driver:
        yield (
            "warning",
            "GPUDirect",
            "neither nvidia_peermem nor open kernel modules (dmabuf): messages go through the host's memory",
            "modprobe nvidia_peermem, or install the driver's open modules",
        )


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)
