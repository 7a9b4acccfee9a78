"""Whether the log-probabilities of one engine are farther from the trainer's than those of its peers. Pure.

The engines of a run have the same weights and prompts of the same data, so that the differences of their groups come
from one distribution, whatever it is: heavy tails are usual, as where a router's choice hangs on rounding. So ranks are
compared and not means. A step's evidence against an engine is Mann and Whitney's z of its groups' differences, divided
by the band, against those of all other engines; it is added up over the steps by Page's rule (a cumulative sum that
does not fall below 0), so that large steps decide at once, and small ones together.

The band is by how many times an engine's groups may differ more than its peers': what the engines' medians have
deviated from each other in the run's earlier steps, times SPREADS, within BOUNDS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megarl.types import FloatArray

BOUNDS = (3.0, 30.0)
FIRST_BAND = 10.0  # until FEWEST deviations are known
FEWEST = 8
SPREADS = 5.0  # robust standard deviations
_TO_STANDARD = 1.4826  # a median absolute deviation of a normal distribution is 1 / _TO_STANDARD standard deviations
_MOST_DEVIATIONS = 400
_ALLOWED_Z = 1.0  # evidence of a step that counts as none
# of the evidence: normal noise reaches it once in exp(2 x 6) / 2 engines' steps even without a band
_LIMIT = 6.0
_SMALLEST = 1e-12  # differences below are equal


@dataclass(frozen=True)
class Outlier:
    """An engine out of its band. diff, peers_diff: the median of its groups' mean differences, and of the peers'."""

    engine: int
    diff: float
    peers_diff: float
    band: float


@dataclass(frozen=True)
class EngineBand:
    """What the steps of a run have shown so far.

    evidence: against each engine. deviations: logarithms of an engine's median over its peers' in steps without
    evidence against any.
    """

    evidence: Mapping[int, float] = field(default_factory=dict)
    deviations: tuple[float, ...] = ()

    @property
    def band(self) -> float:
        """By how many times an engine's differences may exceed its peers'."""
        if len(self.deviations) < FEWEST:
            return FIRST_BAND
        spread = _TO_STANDARD * float(np.median(np.abs(self.deviations)))
        (least, most) = BOUNDS
        return min(most, max(least, math.exp(min(SPREADS * spread, math.log(most)))))

    def after(self, diffs: Mapping[int, FloatArray]) -> tuple[EngineBand, list[Outlier]]:
        """With one step more, and the engines that are out of their band in it.

        diffs: of each engine, the mean |engine - trainer| logprob of each group that it sampled; all positive.
        """
        if len(diffs) < 2:
            return self, []
        band = self.band
        logs = {
            engine: np.log(np.maximum(own, _SMALLEST)).astype(np.float64)
            for engine, own in diffs.items()
        }
        evidence = dict(self.evidence)
        deviations = []
        outliers = []
        for engine, own in logs.items():
            peers = np.concatenate([other for number, other in logs.items() if number != engine])
            z = rank_z(own - math.log(band), peers)
            evidence[engine] = max(0.0, evidence.get(engine, 0.0) + z - _ALLOWED_Z)
            middle = float(np.median(own))
            peers_middle = float(np.median(peers))
            deviations.append(middle - peers_middle)
            if evidence[engine] >= _LIMIT:
                evidence[engine] = 0.0  # it is reported, and may be another engine from now on
                outliers.append(Outlier(engine, math.exp(middle), math.exp(peers_middle), band))
        if outliers or any(evidence.values()):
            deviations = []
        known = (*self.deviations, *deviations)[-_MOST_DEVIATIONS:]
        return EngineBand(evidence, known), outliers


def rank_z(own: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> float:
    """Mann and Whitney's U of `own` being larger, in standard deviations from its mean under equal distributions."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, own, side="left").sum()
    not_above = np.searchsorted(ordered, own, side="right").sum()
    pairs = len(own) * len(others)
    deviation = math.sqrt(pairs * (len(own) + len(others) + 1) / 12)
    return (float(below + not_above) / 2 - pairs / 2) / deviation
