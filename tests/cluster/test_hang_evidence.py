"""What the answers of Ray's servers say about the nodes of a run."""

from __future__ import annotations

import pytest

from megarl.cluster import hang_evidence


def test_a_node_that_ray_has_lost_has_no_full_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves out a resource that is used up, and a node of which it knows nothing."""
    store = {"object_store_memory": 8.0}
    monkeypatch.setattr(
        hang_evidence,
        "total_resources_per_node",
        lambda: {"half": store, "full": store, "lost": store, "none": {}},
    )
    monkeypatch.setattr(
        hang_evidence,
        "available_resources_per_node",
        lambda: {"half": {"object_store_memory": 4.0}, "full": {"CPU": 1.0}, "none": {}},
    )
    assert hang_evidence._store_shares() == {"half": 0.5, "full": 1.0}
