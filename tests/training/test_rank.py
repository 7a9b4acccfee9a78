"""A rank by itself; what it computes with others is in tests/parallel."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megarl.training.rank import TrainingRank


def test_the_disk_is_attended_to_until_the_call_of_that_number_has_ended(tmp_path: Path) -> None:
    """Also where the rank was started anew, and its predecessor had the calls before."""
    rank = TrainingRank.__new__(TrainingRank)
    rank._last_disk_call = 0
    rank._saved_in = tmp_path

    async def attend() -> None:
        attending = asyncio.ensure_future(rank.attend_disk(5, tmp_path))
        await asyncio.sleep(0)
        assert not attending.done()
        with rank._disk_call(5):
            pass
        await attending

    asyncio.run(asyncio.wait_for(attend(), 60.0))
