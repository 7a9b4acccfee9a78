"""The judgement of facts: each planted fault on one line with its mend, and silence on what is sound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.doctor import nvidia
from megarl.doctor.facts import Folder, Nic, NodeFacts, Port, ProcessLimits, Torch
from megarl.doctor.findings import Finding, gb, merged
from megarl.doctor.rules_cluster import cluster_findings
from megarl.doctor.rules_node import gpu_findings, node_findings
from tests.doctor.nodes import smi_csv, smi_topology, sound

GPUS = sound().gpus
OTHER = "10.0.0.2"
CUDNN = {**sound().versions, "nvidia-cudnn-cu13": "9.20.0.48"}


def judged(*nodes: NodeFacts) -> list[Finding]:
    each = [finding for node in nodes for finding in node_findings(node) + gpu_findings(node)]
    return merged(each + cluster_findings(nodes))


def only(*nodes: NodeFacts) -> str:
    """The one line that is said of these nodes."""
    (finding,) = judged(*nodes)
    return finding.line(len(nodes))


def gpus(**changed: dict[int, str]) -> dict[str, Any]:
    return {"gpus": tuple(nvidia.gpus(smi_csv(**changed))[0])}


def test_nothing_is_said_of_a_sound_node_or_of_two() -> None:
    other = sound(address=OTHER, host="two", ray_gpus=8, clock_offset_s=0.1)
    assert judged(sound()) == judged(sound(ray_gpus=8), other) == []


def folder(**changed: Any) -> Folder:
    return replace(sound().folders[0], **changed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"shm_total_bytes": 64 * 2**20, "shm_free_bytes": 64 * 2**20},
         "error: /dev/shm: 0.067 GB of 0.067 GB free...--shm-size"),
        ({"shm_free_bytes": 2 * 10**9}, "warning: /dev/shm: 2 GB free, and Ray's object store wants 34 GB...remount"),
        ({"limits": ProcessLimits(8192 * 1024, 2**20, 2**20)},
         "error: memlock: 8192 KiB may be locked, and the RDMA cards (mlx5_0, mlx5_1...memlock unlimited"),
        ({"limits": ProcessLimits(-1, 1024, 2**20)}, "error: nofile: 1024 open files...limits.conf"),
        ({"limits": ProcessLimits(-1, 20_000, 2**20)}, "warning: nofile: 20000 open files...limits.conf"),
        ({"limits": ProcessLimits(-1, 2**20, 1000)}, "error: nproc: 1000 processes and threads...limits.conf"),
        ({"folders": (folder(free_bytes=10**6, error="no space left"),)},
         "error: /shared/runs (run.dir): the disk is full: 0.001 GB of 1000000 GB free...make room"),
        ({"folders": (folder(free_files=0),)}, "error: /shared/runs (run.dir): the disk is full...make room"),
        ({"folders": (folder(free_bytes=5 * 10**9),)}, "warning: /shared/runs (run.dir): 5 GB free...make room"),
        ({"folders": (folder(error="Read-only file system"),)},
         "error: /shared/runs (run.dir): nothing can be written (Read-only...name another folder"),
        ({"folders": (folder(write_bytes_per_s=30e6),)}, "warning: /shared/runs (run.dir): 30 MB/s are...faster disk"),
        ({"ports": (Port(6379, "redis-server (pid 7)"), Port(6380))},
         "error: port 6379: taken by redis-server (pid 7)...another port"),
        ({"ports": (Port(6379, "redis-server (pid 7)", False),)}, "warning: port 6379: taken...another port"),
        ({"pins": {"sglang-kernel": "0.4.6"}},
         "error: sglang-kernel: 0.4.7 is installed, and SGLang 0.5.21 is built for 0.4.6...pip install"),
        ({"versions": {**sound().versions, "torch": "2.13.0+cu130"}, "pins": {"torch": "2.12.0"}},
         "error: torch: 2.13.0+cu130 is installed...torch==2.12.0"),
        ({"nvidia_smi": "Failed to initialize NVML: Driver/library version mismatch", "gpus": ()},
         "error: nvidia-smi: it does not answer (Failed to initialize NVML...dmesg"),
        ({"torch": Torch("2.13.0+cpu")}, "error: torch: 2.13.0+cpu is a CPU build on a node with 8 GPUs...gpu.txt"),
        ({"driver_cuda": "12.4"}, "error: driver: 580.65.06 runs CUDA 12.4, and torch 2.13.0+cu130...newer driver"),
        ({"torch": replace(sound().torch, num_devices=0, error="Error 802: system not yet initialized")},
         "error: torch: CUDA does not start (Error 802...fabricmanager"),
        ({"torch": replace(sound().torch, num_devices=7)}, "error: torch: torch sees 7 of 8 GPUs...CUDA_VISIBLE"),
        ({"import_errors": {"transformer_engine.pytorch": "not installed"}},
         "error: transformer-engine: it cannot be imported (not installed), and Trans...gpu.txt"),
        ({"import_errors": {"sgl_kernel": "ImportError: undefined symbol: _ZN3c10"}},
         "error: sglang-kernel: it cannot be imported (ImportError: undefined symbol...this torch and this CUDA"),
        ({"import_errors": {"torch_memory_saver": "not installed"}}, "error: torch-memory-saver: it cannot...gpu.txt"),
        ({"torch": replace(sound().torch, cudnn="")}, "warning: flash-attn: neither it (not installed) nor...cuDNN"),
        ({"foreign_cudnn": "/usr/lib/libcudnn.so.9.13.0", "versions": CUDNN},
         "error: cuDNN: /usr/lib/libcudnn.so.9.13.0 is loaded in place of the package's 9.20.0.48...cuda:*-devel"),
        ({"import_errors": {"flashinfer": "not installed"}}, "warning: flashinfer-python: it cannot...gpu.txt"),
        (gpus(mig_mode_current={3: "Enabled"}), "error: GPU 3 (0000:5d:00.0): it is cut into MIG...-mig 0"),
        (gpus(ecc_errors_uncorrected_volatile_total={3: "2"}), "error: GPU 3 (0000:5d:00.0): 2 uncorrected...reset"),
        (gpus(clocks_event_reasons_active={0: "0x0000000000000048"}),
         "warning: GPU 0 (0000:18:00.0): 345 of 1980 MHz (hardware slowdown...cooling or power"),
        (gpus(pcie_link_width_current={7: "8"}), "warning: GPU 7 (0000:db:00.0): 8 of 16 PCIe lanes...seated"),
        (gpus(memory_used={5: "40000"}), "warning: GPU 5 (0000:ab:00.0): 42 GB are used already...nvidia-smi"),
        (gpus(name={5: "NVIDIA H100 80GB HBM3"}), "warning: GPUs: different models: 7 NVIDIA H800, 1 N...one kind"),
        ({"topology": nvidia.topology(smi_topology(GPU2_GPU5="SYS"))},
         "warning: NVLink: pairs of GPUs are joined unequally: most by NV8, but GPU2-GPU5 SYS...nvlink -s"),
        ({"topology": nvidia.topology(smi_topology().replace("NV8", "NODE"))}, "warning: NVLink: no NVLi...train.tp"),
        ({"nics": (*sound().nics, Nic("mlx5_8", 1, False, None, "Ethernet"))},
         "warning: network: links are down: mlx5_8:1...cables"),
        ({"nics": (*sound().nics[:7], Nic("mlx5_7", 1, True, 200.0, "InfiniBand"))},
         "warning: network: the GPUs' cards are of unequal speed: 7 of 400 Gb/s, 1 of 200 Gb/s...ibstat"),
        ({"nic_errors": ("on one ranks 0, 1 share the network card mlx5_0",)}, "warning: network: on o...NCCL_IB"),
        ({"has_peermem": False}, "warning: GPUDirect: neither nvidia_peermem...modprobe"),
        ({"clock_offset_s": -61.0, "clock_error_s": 0.01}, "error: clock: 61.0 s behind the first node's...chronyd"),
        ({"clock_offset_s": 2.0}, "warning: clock: 2.0 s ahead of...chronyd"),
        ({"ray_gpus": 8, "environment": {}},
         "error: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES: it is not 1 in Ray's environment...scripts/ray_node.sh"),
        ({"ray_gpus": 4}, "error: Ray: Ray counts 4 GPUs, nvidia-smi lists 8...--num-gpus"),
    ],
)  # fmt: skip
def test_one_error_of_a_node_is_one_line(changed: dict[str, Any], says: str) -> None:
    """says: how the line begins, dots, and what is in its hint."""
    line = only(sound(**changed))
    start, _, words = says.partition("...")
    assert line.startswith(start)
    assert words in line.rpartition("; ")[2], line
    assert "\n" not in line


@pytest.mark.parametrize(
    "changed",
    [
        # nothing locks memory there
        {"limits": ProcessLimits(64 * 1024, 2**20, 2**20), "nics": (), "gpu_nics": {}},
        {"has_peermem": False, "has_open_driver": True},
        {"foreign_cudnn": "/usr/lib/libcudnn.so.9.20.0", "versions": CUDNN},  # the same version
        {"foreign_cudnn": "/usr/lib/libcudnn.so.9.13.0"},  # a torch that brings none
        {"clock_offset_s": 3.0, "clock_error_s": 2.9},  # nobody knows it better
        {"clock_offset_s": -0.3},
        {"driver_cuda": ""},
        gpus(clocks_event_reasons_active={0: "0x0000000000000005"}),
        gpus(memory_used={5: "500"}),
        {"torch": replace(sound().torch, cudnn=""), "import_errors": {}},
        {"topology": nvidia.topology("")},
        {"folders": (folder(is_written=False, free_bytes=0),)},
        {"folders": (folder(free_files=None),)},
    ],
)
def test_what_does_no_harm_is_not_told(changed: dict[str, Any]) -> None:
    assert judged(sound(**changed)) == []


def test_a_machine_without_gpus_is_told_what_it_lacks_and_not_blamed() -> None:
    versions = dict.fromkeys(("torch", "megatron-core", "transformers", "sglang"), "2.13.0")
    cpu = Torch("2.13.0+cpu")
    error, note = judged(
        sound(gpus=(), driver="", nics=(), gpu_nics={}, torch=cpu, versions=versions)
    )
    assert note.severity == "note"
    assert "for one on GPUs: torch is a CPU build, transformer-engine is not installed" in note.hint
    assert (error.severity, error.where, error.problem) == ("error", "ray", "it is not installed")


def second(**changed: Any) -> tuple[NodeFacts, NodeFacts]:
    return sound(), sound(address=OTHER, **changed)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"versions": {**sound().versions, "ray": "2.50.0"}}, "error: 10.0.0.2: ray: 2.50.0, where 1 node has 2.60.0"),
        ({"versions": {**sound().versions, "apex": "0.1"}}, "error: 10.0.0.2: apex: 0.1, where 1 node has nothing"),
        ({"python": "3.11.7"}, "error: 10.0.0.2: Python: 3.11.7, where 1 node has 3.12.3"),
        ({"source": "ffff"}, "error: 10.0.0.2: megarl: source ffff, where 1 node has source 0123456789ab"),
        ({"torch": replace(sound().torch, nccl="2.27.3")}, "error: 10.0.0.2: NCCL: 2.27.3, where 1 node has 2.28.9"),
        ({"driver": "570.1"}, "warning: 10.0.0.2: driver: 570.1, where 1 node has 580.65.06"),
        ({"environment": {**sound().environment, "NCCL_IB_HCA": "mlx5"}},
         "warning: 10.0.0.2: NCCL_IB_HCA: mlx5, where 1 node has nothing"),
        ({"folders": (folder(is_shared=False),)}, "error: 10.0.0.2: /shared/runs (run.dir): a file of the first node"),
        ({"folders": (folder(exists=False, is_written=False),)}, "error: 10.0.0.2: /shared/runs (run.dir): it is on"),
        ({"clock_offset_s": 30.0}, "error: 10.0.0.2: clock: 30.0 s ahead of the first node's"),
    ],
)  # fmt: skip
def test_one_difference_between_two_nodes_is_one_line(changed: dict[str, Any], line: str) -> None:
    assert only(*second(**changed)).startswith(line)


def test_nodes_without_cards_and_of_other_kinds_are_named() -> None:
    assert "no RDMA card is up" in only(*second(nics=(), gpu_nics={}))
    (finding,) = judged(*second(gpus=GPUS[:4], torch=replace(sound().torch, num_devices=4)))
    assert finding.line(2).startswith(
        "warning: 10.0.0.2: GPUs: 4 x NVIDIA H800, where 1 node has 8 x NVIDIA H800"
    )


def test_many_nodes_alike_are_one_line_and_the_worst_comes_first() -> None:
    nodes = [
        sound(address=f"10.0.0.{n}", has_peermem=n > 6, torch=Torch("2.13.0+cpu"))
        for n in range(1, 9)
    ]
    torch, direct = [finding.line(8) for finding in judged(*nodes)]
    assert torch.startswith("error: all 8 nodes: torch: 2.13.0+cpu is a CPU build")
    assert direct.startswith(
        "warning: 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 2 more: GPUDirect: "
    )


def test_the_usual_version_is_most_nodes_and_of_a_draw_the_first_nodes() -> None:
    nodes = [sound(address=f"10.0.0.{n}", source="new" if n == 3 else "old") for n in range(1, 5)]
    assert only(*nodes).startswith(
        "error: 10.0.0.3: megarl: source new, where 3 nodes have source old"
    )
    assert only(*second(source="x")).startswith("error: 10.0.0.2")


def test_no_line_is_broken_by_what_it_tells() -> None:
    assert Finding("error", "a", "b\nc\x1b[2J", "d").line(1) == "error: a: b\\nc\\x1b[2J; d"


@pytest.mark.parametrize(
    ("value", "said"), [(0, "0 GB"), (12.34e9, "12 GB"), (1.26e9, "1.3 GB"), (1e6, "0.001 GB")]
)
def test_sizes_have_two_digits(value: float, said: str) -> None:
    assert gb(value) == said
