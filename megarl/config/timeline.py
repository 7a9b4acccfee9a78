"""Which steps of a run are recorded as a timeline."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megarl.config.fields import Branch, Count, Whole


class TimelineConfig(Branch):
    """Steps whose timeline is written, for ui.perfetto.dev (docs/tracking.md)."""

    steps: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Steps of which `timeline/step_N.json.gz` in the run's folder shows what each process did, and when."""
    profile_ranks: Annotated[tuple[Whole, ...], Field(strict=False)] = ()
    """Training ranks of the policy whose part in the `train` phase of these steps torch's profiler records, each in a
    file of its own beside the timeline; it slows them down. `megarl rollout` trains nothing and ignores it."""
