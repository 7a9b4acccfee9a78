"""What can be tested on which machine: `python -m tests.gpu.tiers [TIER]` prints the tiers that this one allows.

With `--paths TIER` it prints the arguments of pytest for that tier.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
NODE_GPUS = 8
WITH_EVERYTHING = ("pydantic", "ray", "sglang", "transformer_engine", "hypothesis", "psutil")
TIERS: dict[int, tuple[str, ...]] = {
    1: ("tests/gpu",),
    2: (
        "tests/diagnosis/test_memory.py",
        "tests/parallel/test_reference.py",
        "tests/rollout/sglang/test_engine.py",
        "tests/rollout/test_draws.py",
        "tests/rollout/sglang/test_deterministic.py",
        "tests/rollout/sglang/test_draft_engine.py",
        "tests/rollout/sglang/test_engine_ends.py",
        "tests/end_to_end/test_one_gpu.py",
        "tests/end_to_end/test_doctor.py",
        "tests/end_to_end/test_external_engines.py",
    ),
    3: (
        "tests/model/test_families.py",
        "tests/parallel/test_groups.py",
        "tests/parallel/test_layer_outputs.py",
        "tests/parallel/test_replay.py",
        "tests/parallel/test_shared_prefixes.py",
        "tests/parallel/test_token_rewards.py",
        "tests/parallel/test_optimizer_offload.py",
        "tests/parallel/test_dist_checkpoint.py",
        "tests/resharding/test_verify.py",
        "tests/resharding/test_end_to_end.py",
        "tests/gpu/test_flex.py",
        "tests/gpu/test_peer_copy.py",
        "tests/gpu/test_silent.py",
        "tests/rollout/sglang/test_peer_copy.py",
        "tests/rollout/sglang/test_deepep.py",
        "tests/rollout/sglang/test_nodes.py",
        "tests/cluster/test_hang_watch.py",
        "tests/cluster/test_topology.py",
        "tests/checkpoints/test_hf_export.py",
        "tests/scripts/bench/test_train.py",
        "tests/end_to_end/test_run.py",
        "tests/end_to_end/test_roles.py",
        "tests/end_to_end/test_slurm.py",
        "tests/end_to_end/test_compare_layers.py",
        "tests/parallel/test_parity.py",
        "tests/parallel/test_lora.py",
        "tests/parallel/test_muon.py",
        "tests/training/test_update_guard.py",
    ),
}
# The conftest above tests/gpu imports what machines of tier 1 lack; the harness is tested where all tests run.
OPTIONS = {
    1: (
        "--confcutdir=tests/gpu",
        "--ignore=tests/gpu/test_harness.py",
        "--ignore=tests/gpu/simulated",
    ),
}


def lacking(tier: int) -> list[str]:
    """What this machine does not have and the tier needs."""
    missing = [] if tier == 1 or torch.cuda.is_available() else ["a GPU that torch sees"]
    if tier > 1:
        missing += [name for name in WITH_EVERYTHING if importlib.util.find_spec(name) is None]
    num_gpus = torch.cuda.device_count()
    if tier == 3 and num_gpus < NODE_GPUS:
        missing.append(f"{NODE_GPUS} GPUs (there are {num_gpus})")
    return missing


def main(arguments: Sequence[str]) -> int:
    """Print the tiers, or the arguments of pytest for one; 2 where a tier is asked for that cannot run."""
    if arguments[:1] == ["--paths"]:
        tier = int(arguments[1])
        print("\n".join((*OPTIONS.get(tier, ()), *TIERS[tier])))
        return 0
    asked = [int(argument) for argument in arguments if argument in map(str, TIERS)]
    if len(asked) != len(arguments):
        print(f"gpu_check.sh: {' '.join(arguments)}: no such tier; use 1, 2 or 3", file=sys.stderr)
        return 2
    for tier in asked or TIERS:
        missing = lacking(tier)
        if missing:
            print(f"tier {tier} is left out, it needs {', '.join(missing)}", file=sys.stderr)
        else:
            print(tier)
    return 2 if asked and lacking(asked[0]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
