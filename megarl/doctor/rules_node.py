"""Rules about a node other than its GPUs: memory, limits, disks, ports, packages that every run needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from megarl.doctor.facts import UNLIMITED, Folder, NodeFacts
from megarl.doctor.findings import Finding, Severity, on_node

INSTALL = "install what requirements/gpu.txt names"
_GB = 1e9
_LEAST_SHM_BYTES = 2**30  # NCCL's and gloo's buffers of eight ranks, and Ray's smallest object store
_MOST_STORE_BYTES = 2**35  # the bound of Ray's object store in megarl and scripts/ray_node.sh
_LEAST_FILES, _GOOD_FILES = 4096, 65_536  # descriptors: each rank has a socket to each other rank, Ray several
_LEAST_PROCESSES, _GOOD_PROCESSES = 4096, 32_768  # including threads: some hundreds for each rank and engine
_FULL_BYTES, _LOW_BYTES = 10**9, 20 * 10**9  # for logs and sockets; for a run's logs and a compiler's caches
_FEW_FILES = 1000
_SLOW_BYTES_PER_S = 200e6  # a single old disk; a checkpoint of a 30B model takes half an hour
_NEEDED = ("torch", "megatron-core", "ray", "transformers", "sglang")
_NEEDED_ON_GPUS = ("transformer-engine", "sglang-kernel", "torch-memory-saver")


def node_findings(node: NodeFacts) -> list[Finding]:
    """The findings of these rules."""
    rules = (_shm, _memlock, _counts, _disks, _ports, _packages, _no_gpu)
    return [*chain.from_iterable(rule(node) for rule in rules)]


def gb(num_bytes: float) -> str:
    """Bytes as text, with two significant digits, in GB of 10^9 bytes."""
    value = num_bytes / _GB
    return f"{value:.0f} GB" if value >= 10 else f"{float(f'{value:.2g}'):g} GB"


def _shm(node: NodeFacts) -> Iterator[Finding]:
    free, store = node.shm_free_bytes, min(_MOST_STORE_BYTES, node.host_bytes // 10)
    mend = "start the container with --shm-size=64g, or: mount -o remount,size=64g /dev/shm"
    if free < _LEAST_SHM_BYTES:
        least = gb(_LEAST_SHM_BYTES)
        problem = f"{gb(free)} of {gb(node.shm_total_bytes)} free; NCCL, gloo and Ray need {least} and more"
        yield on_node(node, "fault", "/dev/shm", problem, mend)
    elif free < store:
        problem = f"{gb(free)} free, and Ray's object store wants {gb(store)}: the rest of it spills to the disk"
        yield on_node(node, "warning", "/dev/shm", problem, mend)


def _memlock(node: NodeFacts) -> Iterator[Finding]:
    limit, cards = node.limits.memlock_bytes, sorted({nic.name for nic in node.nics if nic.is_up})
    if cards and limit != UNLIMITED:
        problem = f"{limit // 1024} KiB may be locked, and the RDMA cards ({', '.join(cards)}) lock all that they send"
        mend = "set it to unlimited: `* - memlock unlimited` in limits.conf, or --ulimit memlock=-1 of the container"
        yield on_node(node, "fault", "memlock", problem, mend)


def _counts(node: NodeFacts) -> Iterator[Finding]:
    limits = node.limits
    yield from _count(node, "nofile", limits.num_files, _LEAST_FILES, _GOOD_FILES, "open files")
    yield from _count(node, "nproc", limits.num_processes, _LEAST_PROCESSES, _GOOD_PROCESSES, "processes and threads")


def _count(node: NodeFacts, name: str, limit: int, least: int, good: int, what: str) -> Iterator[Finding]:
    if limit == UNLIMITED or limit >= good:
        return
    severity: Severity = "fault" if limit < least else "warning"
    problem = f"{limit} {what} at most, and a node of eight GPUs wants {good}"
    yield on_node(node, severity, name, problem, f"raise it before Ray is started: `* - {name} {good}` in limits.conf")


def _disks(node: NodeFacts) -> Iterator[Finding]:
    for folder in node.folders:
        yield from _disk(node, folder)


def _disk(node: NodeFacts, folder: Folder) -> Iterator[Finding]:
    where = f"{folder.path} ({folder.purpose})"
    if not folder.is_written:
        return
    is_full = folder.free_bytes < _FULL_BYTES or folder.free_files is not None and folder.free_files < _FEW_FILES
    if is_full:
        files = "" if folder.free_files is None else f", {folder.free_files} files"
        problem = f"the disk is full: {gb(folder.free_bytes)} of {gb(folder.total_bytes)} free{files}"
        yield on_node(node, "fault", where, problem, "make room there, or name a folder on another disk")
    elif folder.error:
        yield on_node(
            node, "fault", where, f"nothing can be written ({folder.error})", "mend that, or name another folder"
        )
    elif folder.free_bytes < _LOW_BYTES:
        yield on_node(node, "warning", where, f"{gb(folder.free_bytes)} free", "make room there before a long run")
    speed = folder.write_bytes_per_s
    if speed is not None and speed < _SLOW_BYTES_PER_S:
        problem = f"{speed / 1e6:.0f} MB/s are written ({folder.file_system or 'unknown file system'})"
        yield on_node(node, "warning", where, problem, "name a faster disk: a step waits for its checkpoint")


def _ports(node: NodeFacts) -> Iterator[Finding]:
    for port in node.ports:
        if port.taken_by:
            severity: Severity = "fault" if port.is_needed else "warning"
            mend = "end that, or name another port: ray start --port=..., or scripts/ray_node.sh: it takes a free one"
            yield on_node(node, severity, f"port {port.number}", f"taken by {port.taken_by}", mend)


def _packages(node: NodeFacts) -> Iterator[Finding]:
    for name in _NEEDED:
        if name not in node.versions:
            yield on_node(node, "fault", name, "it is not installed", INSTALL)
    for name, pinned in node.pins.items():
        here = node.versions.get(name)
        if here and here.partition("+")[0] != pinned:
            problem = f"{here} is installed, and SGLang {node.versions.get('sglang', '')} is built for {pinned}"
            yield on_node(node, "fault", name, problem, f"pip install {name}=={pinned}")


def _no_gpu(node: NodeFacts) -> Iterator[Finding]:
    """A note on a machine without GPUs about the checks that were left out."""
    if node.has_gpus or node.nvidia_smi:
        return
    lacks = [f"{name} is not installed" for name in _NEEDED_ON_GPUS if name not in node.versions]
    if not node.torch.cuda:
        lacks.insert(0, "torch is a CPU build")
    problem = "nvidia-smi lists none: driver, CUDA, NCCL, NVLink, clocks and kernels were not checked"
    mend = f"nothing for a run on CPU; for one on GPUs: {', '.join(lacks)}" if lacks else "nothing for a run on CPU"
    yield on_node(node, "note", "GPUs", problem, mend)
