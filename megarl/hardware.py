"""What a plan reckons with: one GPU model and the node around it, as recipes/hardware/*.yaml state them."""

from __future__ import annotations

from megarl.config import Branch, Count, Positive, Share, Text


class Hardware(Branch):
    """Bytes, bytes a second and operations a second of one GPU, each way where there are two ways; of the node's host.

    The shares say how much of a peak is reached; each file says where its figures are from.
    """

    name: Text
    memory_bytes: Count  # as the driver reports it
    bf16_flops: Positive  # dense
    fp8_flops: Positive | None = None  # None: the card has none
    hbm_bytes_per_s: Positive
    nvlink_bytes_per_s: Positive  # of a GPU to all others of its node, each way
    nic_bytes_per_s: Positive  # of the network card beside each GPU, each way
    pcie_bytes_per_s: Positive  # between a GPU and its host, each way
    gpus_per_node: Count = 8
    host_bytes: Count  # of a node
    disk_bytes_per_s: Positive  # that a node writes to the file system of checkpoints
    compute_share: Share  # of bf16_flops that training's matrix products reach
    prefill_share: Share  # of bf16_flops that the engine's reading of prompts reaches
    hbm_share: Share  # of hbm_bytes_per_s that the engine's decoding reaches
    link_share: Share  # of nvlink_bytes_per_s and nic_bytes_per_s that large messages reach
