"""The facts of a node and the rates of its GPUs: plain values that are sent between processes and written as JSON."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field

UNLIMITED = resource.RLIM_INFINITY  # the value of a limit that is not set


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi --query-gpu`; None where the driver answers "[N/A]"."""

    index: int
    name: str
    pci: str  # the address in /sys/bus/pci/devices
    memory_bytes: int | None
    used_bytes: int | None
    sm_mhz: float | None
    max_sm_mhz: float | None
    clock_reasons: int | None  # NVML's mask of the reasons for reduced clocks
    ecc_errors: int | None  # uncorrected, since the driver was loaded
    mig: bool
    pcie_width: int | None
    max_pcie_width: int | None
    compute_capability: str


@dataclass(frozen=True)
class Topology:
    """`nvidia-smi topo -m`: the kind of connection (NV8, PIX, SYS...) of each pair of devices, and the NICs' names."""

    # "GPU0" -> "GPU1" -> "NV8"
    links: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    nics: Mapping[str, str] = field(default_factory=dict)  # "NIC0" -> "mlx5_0"


@dataclass(frozen=True)
class Nic:
    """One port of an RDMA card, from /sys/class/infiniband."""

    name: str
    port: int
    is_up: bool
    gbit_per_s: float | None
    link_layer: str  # InfiniBand, or Ethernet for RoCE


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes or reads, and its file system."""

    path: str
    purpose: str
    exists: bool
    is_written: bool = True
    total_bytes: int = 0
    free_bytes: int = 0
    free_files: int | None = None  # None: the file system has no such limit
    file_system: str = ""
    error: str = ""  # why nothing can be written there
    write_bytes_per_s: float | None = None
    # whether this node sees a file that the first node wrote; None: not checked
    is_shared: bool | None = None


@dataclass(frozen=True)
class Port:
    """A TCP port on which a process of a run would listen."""

    number: int
    taken_by: str = ""  # "" where it is free
    is_needed: bool = True  # False: only if Ray is started by hand


@dataclass(frozen=True)
class Torch:
    """The facts that torch reports in a separate process."""

    version: str = ""
    cuda: str = ""  # "" for a CPU build
    nccl: str = ""
    cudnn: str = ""
    num_devices: int = 0
    error: str = ""  # why torch cannot be imported, or CUDA not be initialised


@dataclass(frozen=True)
class ProcessLimits:
    """The resource limits of this user's processes; UNLIMITED where there is none."""

    memlock_bytes: int
    num_files: int
    num_processes: int


@dataclass(frozen=True)
class GpuFacts:
    """A node's GPUs, their driver and topology. nvidia_smi: why nvidia-smi, which is installed, fails."""

    nvidia_smi: str = ""
    driver: str = ""
    driver_cuda: str = ""  # the newest CUDA that the driver can run
    gpus: tuple[Gpu, ...] = ()
    topology: Topology = Topology()
    has_peermem: bool = False
    has_open_driver: bool = False  # open kernel modules, whose dmabuf replaces nvidia_peermem


@dataclass(frozen=True, kw_only=True)
class NodeFacts(GpuFacts):
    """All facts of one node."""

    host: str
    address: str
    kernel: str
    python: str
    num_cores: int
    host_bytes: int
    shm_total_bytes: int
    shm_free_bytes: int
    limits: ProcessLimits
    clock_offset_s: float = 0.0  # its clock minus that of the first node
    clock_error_s: float = 0.0  # the uncertainty of clock_offset_s
    nics: tuple[Nic, ...] = ()
    gpu_nics: Mapping[str, str] = field(default_factory=dict)  # PCI address -> card
    nic_errors: tuple[str, ...] = ()
    torch: Torch = Torch()
    versions: Mapping[str, str] = field(default_factory=dict)  # of the installed distributions
    # "" where the module can be imported
    import_errors: Mapping[str, str] = field(default_factory=dict)
    # a cuDNN of the machine that is loaded in place of the package's; "" where there is none
    foreign_cudnn: str = ""
    # exact versions that the installed SGLang requires
    pins: Mapping[str, str] = field(default_factory=dict)
    source: str = ""  # a digest of megarl's source files
    # NCCL_*, GLOO_*, ... that processes inherit
    environment: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[Folder, ...] = ()
    ports: tuple[Port, ...] = ()
    ray_gpus: int | None = None  # as Ray counts them; None without a Ray cluster


@dataclass(frozen=True)
class RankRates:
    """The measured rates of one rank, for messages in each direction; None where there is no peer.

    copy_bytes_per_s counts bytes read and bytes written. Latencies are those of a small all-reduce.
    """

    node: int
    device_name: str
    memory_bytes: int
    matmul_flops: float
    copy_bytes_per_s: float
    host_bytes_per_s: float | None  # from pinned host memory to the GPU
    inside_bytes_per_s: float | None
    between_bytes_per_s: float | None
    inside_latency_s: float | None
    between_latency_s: float | None
    communicator_bytes: int | None  # GPU memory of one NCCL communicator
