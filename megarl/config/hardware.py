"""The figures that a plan uses: one GPU model and its node, as in recipes/hardware/*.yaml."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megarl.config.fields import Branch, Bytes, ParallelSize, Positive, Share, Speed, Text
from megarl.config.loading import load_branch
from megarl.types import UserError

FOLDER = Path("recipes/hardware")  # of the files that are there, from where the command is given
# DeepEP's README, low-latency kernels on H800 with 400 Gb/s cards: dispatch and combine of 128 tokens of 7,168 numbers
# to 8 experts take 191, 313, 428, 487, 561 and 554 us, of which 60 us are taken to be what no token costs.
DEEPEP_TOKEN_S = {8: 1.02e-6, 16: 1.98e-6, 32: 2.88e-6, 64: 3.34e-6, 128: 3.91e-6, 256: 3.86e-6}


class Hardware(Branch):
    """Bytes, bytes/s and operations/s of one GPU (links: in each direction), and of the node's host.

    The shares say how much of a peak is reached; each file says where its figures are from.
    """

    name: Text
    """Of the GPU, as its driver begins it."""
    memory_bytes: Bytes
    """Memory of a GPU, as the driver reports it."""
    bf16_flops: Speed
    """Dense bf16 operations/s of a GPU."""
    fp8_flops: Speed | None = None
    """The same in fp8; null: the card has none."""
    hbm_bytes_per_s: Speed
    """Of a GPU's memory."""
    nvlink_bytes_per_s: Speed
    """Of a GPU to all others of its node, each way."""
    nic_bytes_per_s: Speed
    """Of the network card beside each GPU, each way."""
    pcie_bytes_per_s: Speed
    """Between a GPU and its host, each way."""
    communicator_bytes: Bytes = 192 << 20
    """Memory of a GPU for one group of NCCL's, as a run tells when it starts; the default is an assumption."""
    gpus_per_node: ParallelSize = 8
    """GPUs of a node."""
    host_bytes: Bytes
    """Memory of a node."""
    disk_bytes_per_s: Speed
    """What a node writes to the file system of checkpoints."""
    compute_share: Share
    """How much of `bf16_flops` training's matrix products reach."""
    prefill_share: Share
    """How much of `bf16_flops` the engine's reading of prompts reaches."""
    hbm_share: Share
    """How much of `hbm_bytes_per_s` the engine's decoding reaches."""
    nvlink_share: Share
    """How much of `nvlink_bytes_per_s` large messages reach."""
    nic_share: Share
    """How much of `nic_bytes_per_s` large messages reach."""
    nvlink_latency_s: Positive
    """Seconds of one small all-reduce inside a node."""
    nic_latency_s: Positive
    """The same over several nodes."""
    deepep_latency_s: Positive = 60e-6
    """Seconds that DeepEP's dispatch and combine of one layer take in themselves."""
    deepep_token_s: dict[int, Positive] = Field(
        default_factory=lambda: dict(DEEPEP_TOKEN_S), min_length=1
    )
    """Seconds that they take for each token of a GPU, by expert-parallel size."""

    @property
    def hbm_reached_per_s(self) -> float:
        """Bytes/s of its memory that are reached."""
        return self.hbm_bytes_per_s * self.hbm_share

    @property
    def nvlink_reached_per_s(self) -> float:
        return self.nvlink_bytes_per_s * self.nvlink_share

    @property
    def nic_reached_per_s(self) -> float:
        return self.nic_bytes_per_s * self.nic_share

    def is_card(self, device_name: str) -> bool:
        """Whether a driver's name of a GPU is this model, compared by whole words: H20 is not H200."""
        model_words = _words(self.name)
        words = _words(device_name)
        return any(words[at : at + len(model_words)] == model_words for at in range(len(words)))


def _words(name: str) -> list[str]:
    return name.lower().replace("-", " ").split()


def communicator_bytes(path: str | Path | None) -> int:
    """Bytes of a GPU for one NCCL communicator, from the file that a recipe names; without a file, the default."""
    if path is None:
        return Hardware.model_fields["communicator_bytes"].default
    return load_hardware(path).communicator_bytes


def load_hardware(path: str | Path | None) -> Hardware:
    """Read one file. Raises UserErrors with the errors of its lines; UserError where there is no such file."""
    if path is None:
        there = sorted(str(file) for file in FOLDER.glob("*.yaml"))
        if there:
            files = f"one of {', '.join(there)}"
        else:
            files = "a file like those of recipes/hardware"
        raise UserError(
            "placement.hardware",
            "no hardware is named to reckon with",
            f"set it, or give --hardware, to {files}",
        )
    return load_branch(Hardware, path)
