"""Where the engines' experts are, and how evenly the last rollout used their expert-parallel ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megarl.config import Recipe
from megarl.model.shape import ModelShape
from megarl.placement.expert_places import Places, imbalance, numbered, place_experts
from megarl.placement.roles import Roles
from megarl.types import Metrics


class ExpertPlacement:
    """The places of the experts in all engines of a run, which begin as numbered.

    places: of the next reshard; None where engines keep their experts as numbered.
    """

    def __init__(self, shape: ModelShape, ranks: int, *, moves: bool) -> None:
        """ranks: expert-parallel ranks of an engine. moves: place the experts anew by their load."""
        self._shape = shape
        self._ranks = ranks
        self._moves = moves
        self._places = numbered(shape.num_sparse_layers, shape.num_experts)

    @staticmethod
    def of(recipe: Recipe, roles: Roles) -> ExpertPlacement | None:
        """Of a run whose samples have routes, and whose engines have several expert-parallel ranks; else None."""
        ranks = roles.engines.ep
        if recipe.train.replay != "r3" or ranks == 1:
            return None
        moves = recipe.rollout.engine.place_experts
        return ExpertPlacement(roles.policy.shape, ranks, moves=moves)

    @property
    def places(self) -> Places | None:
        return self._places if self._moves else None

    def place_by_load(self, counts_LE: npt.NDArray[np.int64]) -> Metrics:
        """Place the experts by the load of the last rollout; how uneven that was, and where experts move would be now.

        counts_LE: tokens that chose each expert of each layer; empty where there was no rollout.
        """
        if not counts_LE.size:
            return {}
        missing = self._shape.num_experts - counts_LE.shape[1]
        load_LE = np.pad(counts_LE, ((0, 0), (0, missing)))
        metrics = {"rollout/expert_imbalance": imbalance(load_LE, self._places, self._ranks)}
        if self._moves:
            self._places = place_experts(load_LE, self._places, self._ranks)
            placed = imbalance(load_LE, self._places, self._ranks)
            metrics["rollout/expert_imbalance_placed"] = placed
        return metrics
