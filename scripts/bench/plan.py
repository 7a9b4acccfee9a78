"""What planning costs: DeepSeek-V3 on 512 GPUs, in nodes of 8, from Megatron's shards into SGLang's, without a GPU.

For each engine layout: seconds and memory of one rank's plan, seconds of the whole cluster's traffic, and the bytes of
that traffic next to what no plan can avoid. Each layout is measured in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time

from megarl.model.precision import FP8_TILES
from megarl.model.shape import MlaShape, ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.fp8 import with_scales
from megarl.resharding.reshard_plan import plan_streams
from megarl.resharding.traffic import count_traffic

DEEPSEEK_V3 = ModelShape(
    num_layers=61, hidden_size=7168, num_heads=128, num_kv_heads=128, head_dim=128, vocab_size=129280, num_experts=256,
    experts_per_token=8, moe_ffn_size=2048, num_dense_layers=3, ffn_size=18432, num_shared_experts=1, router_bias=True,
    qk_norm=False, num_mtp_layers=1, mla=MlaShape(1536, 512, 128, 64, 128),
)  # fmt: skip
TRAIN = TrainLayout(512, tp=4, pp=16, ep=16, stage_layers=(4,) * 13 + (3,) * 3)
ENGINES = {
    "tp32": EngineLayout(16, 32, 1),
    "tp32 ep32": EngineLayout(16, 32, 32),
    "tp16 ep16 fp8": EngineLayout(32, 16, 16, precision=FP8_TILES),
    "tp128 ep128 dp16": EngineLayout(4, 128, 128, dp=16),
}
GPUS, GPUS_PER_NODE, DTYPE, ROUND_BYTES, MEMBER = 512, 8, "bfloat16", 512 << 20, 77


def measure(name: str) -> dict[str, float]:
    """The figures of one of `ENGINES`."""
    topology = {"num_members": GPUS, "gpus_per_node": GPUS_PER_NODE, "dtype": DTYPE}
    before_bytes = peak_bytes()
    started = time.perf_counter()
    targets = sglang_map.parts(DEEPSEEK_V3, ENGINES[name])
    sources = with_scales(megatron_map.parts(DEEPSEEK_V3, TRAIN, transformer_engine=True), targets)
    mapped = time.perf_counter()
    streams = plan_streams(sources, targets, MEMBER, **topology)
    plan = streams.assign(streams.rounds_needed(ROUND_BYTES))
    planned = time.perf_counter()
    plan_bytes = peak_bytes() - before_bytes
    traffic = count_traffic(sources, targets, **topology)
    accounted = time.perf_counter()
    return {
        "maps_s": mapped - started,
        "plan_s": planned - mapped,
        "plan_bytes": plan_bytes,
        "account_s": accounted - planned,
        "rounds": len(plan.rounds),
        "copies": sum(len(step.sends) + len(step.receives) for step in plan.rounds),
        "wire_over_minimum": int(traffic.wire_in.sum()) / int(traffic.minimum_wire.sum()),
        "fabric_over_minimum": int(traffic.fabric_in.sum()) / int(traffic.minimum_fabric.sum()),
        "dest_bytes_mean": float(traffic.dest.mean()),
        "fabric_in_bytes_mean": float(traffic.fabric_in.mean()),
        "fabric_in_bytes_max": int(traffic.fabric_in.max()),
        "fabric_out_bytes_max": int(traffic.fabric_out.max()),
        "node_in_bytes_max": int(traffic.node_in.max()),
    }


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, by engine layout"
    )
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = dict(zip(ENGINES, pool.map(measure, ENGINES, chunksize=1), strict=True))
    if args.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(name)
        for figure, value in row.items():
            print(f"  {figure:20} {value:,.0f}" if value > 1e4 else f"  {figure:20} {value:.4g}")


if __name__ == "__main__":
    main()
