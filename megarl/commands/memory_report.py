"""A run that has ended for want of memory: one error with what was measured, what the plan has, and which key helps."""

from __future__ import annotations

from megarl.cluster.failures import WorkerFailed
from megarl.config import Recipe
from megarl.config.hardware import load_hardware
from megarl.diagnosis.memory import memory_error_in
from megarl.diagnosis.phases import Phase
from megarl.plan.fit import cheapest_help
from megarl.plan.run_plan import make_plan
from megarl.preflight.model_checks import stand_ins
from megarl.printable import first_line

_GB = 1e9
# of the run -> of the plan
_PLANNED = {
    "rollout": "rollout",
    "ahead": "rollout",
    "eval": "rollout",
    "score": "score",
    "critic": "critic",
    "logprobs": "train",
    "train": "train",
    "reshard": "reshard",
}
_FRACTION = "lower mem_fraction_static in rollout.engine.sglang"
_MOST_PARTS = 4


def with_memory_report(
    recipe: Recipe, failed: WorkerFailed, phase: Phase | None, kernel_kills: int
) -> WorkerFailed:
    """The failure with all that is known, where it is one of memory; any other as it is.

    kernel_kills: of processes of this node, during the run.
    """
    found = _memory_words(failed, kernel_kills)
    if not found:
        return failed
    is_engine = failed.worker.startswith("engine")
    # a start has what its process needs at work
    planned = _PLANNED.get(phase.name if phase else "", "rollout" if is_engine else "train")
    who = failed.worker or "a process"
    where = f" in {phase}" if phase else ""
    parts = [f"{who} ran out of memory{where}: {found}", _plan_words(recipe, planned)]
    if hint := _hint(recipe, planned, is_engine=is_engine):
        parts.append(hint)
    message = "; ".join(part for part in parts if part)
    return WorkerFailed(message, failed.evidence, failed.worker, failed.memory)


def _memory_words(failed: WorkerFailed, kernel_kills: int) -> str:
    if failed.memory:
        return str(failed.memory)
    if line := memory_error_in(f"{failed.message}\n{failed.evidence}"):
        return line
    if kernel_kills and "its process died" in failed.message:
        return "the kernel has killed it, or another process of its node (oom_kill of the cgroup)"
    return ""


def _plan_words(recipe: Recipe, phase: str) -> str:
    """The plan's bytes of the phase, the largest parts first."""
    if recipe.placement.hardware is None:
        return "placement.hardware is not set, so that there is no plan's figure"
    try:
        plan = make_plan(recipe, load_hardware(recipe.placement.hardware), in_full=False)
        parts = plan.memory.device[phase]
    except Exception as error:  # the failure itself is to be told
        return f"the plan has no figure ({first_line(error)})"
    by_size = sorted(parts.by_name().items(), key=lambda part: -part[1])
    named = ", ".join(
        f"{name.replace('_', ' ')} {count / _GB:.1f}" for name, count in by_size[:_MOST_PARTS]
    )
    total = parts.total_bytes / _GB
    capacity = plan.memory.capacity_bytes / _GB
    return f"the plan has {total:.1f} GB of {capacity:.1f} on the fullest GPU in {phase} ({named})"


def _hint(recipe: Recipe, phase: str, *, is_engine: bool) -> str:
    try:
        change = cheapest_help(stand_ins(recipe)[0], phase)
    except Exception:  # the model may be gone meanwhile
        change = ""
    if is_engine and not recipe.rollout.engine.external:
        return f"{_FRACTION}, or set {change}" if change else _FRACTION
    return f"set {change}" if change else ""
