"""What is known of a node: plain values that travel between processes and into JSON. Nothing here judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNLIMITED = -1  # of a limit


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi --query-gpu`; None where the driver answers "[N/A]"."""

    index: int
    name: str
    pci: str  # as /sys/bus/pci/devices has it
    memory_bytes: int | None
    used_bytes: int | None
    sm_mhz: float | None
    max_sm_mhz: float | None
    clock_reasons: int | None  # NVML's mask of what holds the clocks down
    ecc_errors: int | None  # uncorrected, since the driver was loaded
    mig: bool
    pcie_width: int | None
    max_pcie_width: int | None
    compute_capability: str


@dataclass(frozen=True)
class Topology:
    """`nvidia-smi topo -m`: the kind of connection (NV8, PIX, SYS...) of each pair of devices, and the cards' names."""

    links: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # "GPU0" -> "GPU1" -> "NV8"
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
    """A folder that a run writes or reads, and the disk below it."""

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
    is_shared: bool | None = None  # whether a file of the first node is seen here; None: not asked


@dataclass(frozen=True)
class Port:
    """A TCP port that something of a run would listen on."""

    number: int
    taken_by: str = ""  # "" where it is free
    is_needed: bool = True  # or only where somebody starts Ray by hand


@dataclass(frozen=True)
class Torch:
    """What torch says in a process of its own."""

    version: str = ""
    cuda: str = ""  # "" for a CPU build
    nccl: str = ""
    cudnn: str = ""
    num_devices: int = 0
    error: str = ""  # why torch, or CUDA in it, does not start


@dataclass(frozen=True)
class ProcessLimits:
    """Of a process of this user; UNLIMITED where there is none."""

    memlock_bytes: int
    num_files: int
    num_processes: int


@dataclass(frozen=True)
class NodeFacts:
    """Everything that was seen on one node."""

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
    clock_error_s: float = 0.0  # by how much that may be wrong
    nvidia_smi: str = ""  # why nvidia-smi does not answer; "" where it does, or is not there
    driver: str = ""
    driver_cuda: str = ""  # the newest CUDA that the driver can run
    gpus: tuple[Gpu, ...] = ()
    topology: Topology = Topology()
    has_peermem: bool = False
    has_open_driver: bool = False  # its dmabuf does what nvidia_peermem does
    nics: tuple[Nic, ...] = ()
    gpu_nics: Mapping[str, str] = field(default_factory=dict)  # PCI address -> card
    nic_faults: tuple[str, ...] = ()
    torch: Torch = Torch()
    versions: Mapping[str, str] = field(default_factory=dict)  # of distributions that are installed
    import_errors: Mapping[str, str] = field(default_factory=dict)  # "" where the module can be imported
    pins: Mapping[str, str] = field(default_factory=dict)  # versions that the installed SGLang demands
    source: str = ""  # a digest of megarl's own files
    environment: Mapping[str, str] = field(default_factory=dict)  # NCCL_*, GLOO_*, ... that processes inherit
    folders: tuple[Folder, ...] = ()
    ports: tuple[Port, ...] = ()
    ray_gpus: int | None = None  # that Ray was told of; None without a Ray cluster

    @property
    def has_gpus(self) -> bool:
        return bool(self.gpus)
