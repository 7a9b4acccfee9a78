"""When nothing reads a key: `megarl explain` says it of the key, `megarl.preflight.notes` of a recipe that sets it."""

from __future__ import annotations

_FROM_ANSWERS = "{algorithm} learns from the data's answers"
_AGENT = "an agent makes its own calls"
# key or section -> why a run does not read it, or its keys; {algorithm} stands for the name of the run's algorithm
UNREAD_WHERE = {
    "data.messages": "episode is not set",
    "episode.phase_tool_s": "rollout.phase_tokens is not set",
    "episode.max_observation_tokens": _AGENT,
    "episode.call_timeout_s": _AGENT,
    "run.project": "run.trackers names neither wandb nor mlflow",
    "run.compare_replicas_every": "no rank has a replica",
    "run.restart_window_s": "run.restarts is 0",
    "run.timeline.profile_ranks": "run.timeline.steps names no step",
    "run.on_silent_fault": "it is repeat and run.restarts is 0: no step is repeated",
    "warm_start": "warm_start.steps is not set",
    "rollout.temperature": _FROM_ANSWERS,
    "rollout.top_p": _FROM_ANSWERS,
    "rollout.phase_tokens": _FROM_ANSWERS,
    "rollout.prompts_in_flight": _FROM_ANSWERS,
    "rollout.ahead": _FROM_ANSWERS,
    "evaluation": "data.eval names no set",
    "evaluation.top_p": "the temperature is 0, and the most probable token is taken",
    "reshard.round_bytes": "external engines get weights as files",
    "train.fp8_backward": "train.numbers is plain",
    "train.lr_end": "train.lr_schedule is constant",
    "reference.path": "reference.use is false and algorithm.kl_coefficient is 0",
    "critic": "{algorithm} has no critic",
    "critic.lr_end": "the critic's lr_schedule is constant",
    "reward_model": "neither reward_model.path nor reward_model.adapters is set",
    "checkpoint.memory_copies": "run.restarts is 0: a rank that fails ends the run",
}


def why_unread(path: str) -> list[str]:
    """When nothing reads a key, by itself or with a section around it; empty where every run reads it.

    The switches of a section, as warm_start.steps, which its reason names, are read in any case.
    """
    sections = path.split(".")
    names = (".".join(sections[:depth]) for depth in range(1, len(sections) + 1))
    return [
        UNREAD_WHERE[name].format(algorithm="the algorithm")
        for name in names
        if name in UNREAD_WHERE and not _is_switch(path, name)
    ]


def _is_switch(path: str, section: str) -> bool:
    """Whether a key lies in a section and its value decides whether the section is read."""
    return path.startswith(f"{section}.") and path in UNREAD_WHERE[section].split()
