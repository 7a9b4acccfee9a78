"""What an update tells of its routers: auxiliary losses, replayed choices, and how evenly experts have tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megarl import device
from megarl.algos.statistics import UPDATE_MEAN, Statistic, Statistics
from megarl.model.shape import ModelShape
from megarl.parallel.pipeline import Norms
from megarl.parallel.routing import load_of
from megarl.types.tensors import NamedTensors

_NAMES = ("aux_loss", "z_loss", "mtp_loss", "differing_choices", "replayed_choices")
AUX_LOSS, Z_LOSS, MTP_LOSS = (Statistic(name, UPDATE_MEAN) for name in _NAMES[:3])
# of the replayed choices, those that are not the router's own
DIFFERING_SHARE = Statistic("replay/differing_share")
# tokens of a layer's busiest expert over the mean of its experts, in the layer where that is most
BUSIEST = Statistic("experts/busiest", UPDATE_MEAN)
UNUSED = Statistic("experts/unused", UPDATE_MEAN)  # share of all layers' experts without a token


def busiest_in(layer: int) -> Statistic:
    """`BUSIEST` of one layer (from 0)."""
    return Statistic(f"experts/busiest_layer_{layer}", UPDATE_MEAN)


def routing_statistics(
    sums: NamedTensors,
    norms: Norms,
    shape: ModelShape,
    layers: Sequence[int],
    *,
    trains_mtp: bool,
) -> Statistics:
    """Of an update, over all ranks of the policy, each of which calls this; none of a dense model.

    The auxiliary losses are means over tokens (and layers). sums: of this rank's tokens, as `Routing` counts them;
    layers: those with experts, on all pipeline ranks.
    """
    if not shape.num_experts:
        return {}
    values = torch.stack(
        [torch.as_tensor(sums.get(name, 0.0), dtype=torch.float64).cpu() for name in _NAMES]
    )
    values = values.to(device.DEVICE)
    dist.all_reduce(values)
    totals: dict[str, float] = dict(zip(_NAMES, values.tolist(), strict=True))
    num_routers = len(layers) + shape.num_mtp_layers * trains_mtp
    units = {
        AUX_LOSS: norms.tokens * num_routers,
        Z_LOSS: norms.tokens * num_routers,
        MTP_LOSS: norms.loss_tokens,
    }
    stats: Statistics = {
        statistic: (totals[statistic.name] / unit,)
        for statistic, unit in units.items()
        if totals[statistic.name]
    }
    if totals["replayed_choices"]:
        stats[DIFFERING_SHARE] = totals["differing_choices"], totals["replayed_choices"]
    return stats | _load_statistics(sums, layers, shape.num_experts)


def _load_statistics(sums: NamedTensors, layers: Sequence[int], num_experts: int) -> Statistics:
    load_LE = torch.zeros(len(layers), num_experts, dtype=torch.float64, device=device.DEVICE)
    for place, layer in enumerate(layers):
        name = load_of(layer)
        if name in sums:
            load_LE[place] = sums[name]
    dist.all_reduce(load_LE)
    load_LE = load_LE.cpu()
    if not load_LE.any():  # an update may have no token
        return {}
    busiest = (load_LE.max(1).values / load_LE.mean(1)).tolist()
    unused = (load_LE == 0).double().mean().item()
    stats: Statistics = {
        busiest_in(layer): (ratio,) for layer, ratio in zip(layers, busiest, strict=True)
    }
    return stats | {BUSIEST: (max(busiest),), UNUSED: (unused,)}
