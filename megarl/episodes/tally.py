"""What is counted in an episode while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from megarl.episodes.transcript import TranscriptWriter
from megarl.types import EpisodeEnd, EpisodeFacts
from megarl.types.json_objects import JsonObject


@dataclass
class Tally:
    """What has happened in an episode so far."""

    turns: int = 0
    calls: int = 0
    call_errors: int = 0
    tool_s: float = 0.0
    sampled_tokens: int = 0
    dropped_unawaited: int = 0
    dropped_anew: int = 0
    begun_anew: int = 0
    verifications: int = 0
    prefills: int = 0
    reusable_tokens: int = 0
    cached_tokens: int = 0
    transcript: TranscriptWriter = field(default_factory=TranscriptWriter)

    @property
    def account(self) -> JsonObject:
        """All but the transcript, which a sample has."""
        return {name: value for name, value in vars(self).items() if name != "transcript"}

    def facts(self, end: EpisodeEnd, seed: int) -> EpisodeFacts:
        """Of the episode, which has ended."""
        names = {field.name for field in fields(EpisodeFacts)}
        counts = {name: count for name, count in self.account.items() if name in names}
        return EpisodeFacts(end=end, seed=seed, **counts)

    @property
    def kept_tokens(self) -> int:
        """Those that were sampled and not dropped."""
        return self.sampled_tokens - self.dropped_unawaited - self.dropped_anew

    def begin_anew(self) -> None:
        """All that was sampled is dropped."""
        begun = Tally(
            tool_s=self.tool_s,
            sampled_tokens=self.sampled_tokens,
            dropped_unawaited=self.dropped_unawaited,
            dropped_anew=self.dropped_anew + self.kept_tokens,
            begun_anew=self.begun_anew + 1,
        )
        vars(self).update(vars(begun))
