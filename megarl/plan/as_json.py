"""A plan as one JSON object; docs/plan.md lists its keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megarl.plan.phase_memory import MemoryPlan
from megarl.plan.run_plan import RunPlan
from megarl.plan.slots import Slot


def plan_json(plan: RunPlan) -> dict[str, Any]:
    """Values of json's own types alone."""
    samples, policy = plan.samples, plan.sizes["policy"]
    return {
        "name": plan.recipe.run.name,
        "fits": plan.fits,
        "faults": [{"where": fault.where, "problem": fault.problem, "mend": fault.mend} for fault in plan.faults],
        "hardware": plan.hardware.model_dump(),
        "model": {"parameters": policy.parameters, "active_parameters": policy.active_parameters},
        "ranks": [_slot_json(slot) for slot in plan.slots],
        "memory": {"capacity_bytes": plan.hardware.memory_bytes} | _memory_json(plan.memory),
        "batch": {
            "prompts": samples.prompts,
            "drawn_prompts": samples.drawn_prompts,
            "samples": samples.num_trained,
            "tokens": int(samples.lengths.sum()),
            "longest_tokens": samples.longest,
            "mean_response_share": plan.response_share,
            "models": {role: asdict(share) for role, share in plan.shares.items()},
            "advice": list(plan.advice),
        },
        "kv": asdict(plan.memory.kv),
        "rollout": asdict(plan.rollout),
        "reshard": asdict(plan.reshard),
        "learning": {role: asdict(times) for role, times in plan.learning.items()},
        "step": asdict(plan.step) | {"total_s": plan.step.total_s},
    }


def _slot_json(slot: Slot) -> dict[str, Any]:
    values = asdict(slot)
    ranks = values.pop("ranks")
    return values | ranks


def _memory_json(memory: MemoryPlan) -> dict[str, Any]:
    return {
        "peak_phase": memory.peak_phase,
        "device": {phase: asdict(parts) | {"total_bytes": parts.total_bytes} for phase, parts in memory.device.items()},
        "fullest_slot": memory.fullest_slot,
        "slot_bytes": memory.slot_bytes,
        "host": memory.host,
        "host_bytes": memory.host_bytes,
        "host_capacity_bytes": memory.host_capacity_bytes,
    }
