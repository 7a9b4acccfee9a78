"""The planner on DeepSeek-V3 and 512 GPUs, as scripts/bench/plan.py measures it."""

from __future__ import annotations

import pytest

from tests.scripts.bench.benches import figures


@pytest.mark.slow
@pytest.mark.nightly  # tests/resharding/test_reshard_plan.py plans real models too
def test_deepseek_v3_on_512_gpus() -> None:
    """Bytes are exact. A rank's plan takes less time than the traffic of all 512, on a machine of any speed."""
    rows = figures("plan")
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["plan_s"] < row["account_s"], name
        assert row["plan_bytes"] < 200e6, name
        assert row["wire_over_minimum"] == 1, name
        assert row["fabric_over_minimum"] == 1, name
        # what goes in comes out
        assert row["fabric_out_bytes_max"] < 1.25 * row["fabric_in_bytes_mean"], name
        assert row["fabric_in_bytes_max"] < 1.25 * row["fabric_in_bytes_mean"], name
