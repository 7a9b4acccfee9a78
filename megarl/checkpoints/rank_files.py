"""A training rank's files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoints.snapshots import Digest, digests, home
from megarl.disk import writing
from megarl.parallel.rank_model import RankModel


class RankFiles:
    """A rank's part of a checkpoint on its way into a folder."""

    def __init__(self, folder: Path, rank_model: RankModel) -> None:
        """Raises UserFault where the disk is full or the folder is gone."""
        self._folder = folder
        with writing(home(folder), "a checkpoint"):
            self._pending = rank_model.save(folder)

    def finish(self) -> dict[str, Digest]:
        """Wait until the files of all ranks are written; the digests of this rank's own. Raises as the constructor."""
        with writing(home(self._folder), "a checkpoint"):
            self._pending.finish()
            return digests(self._folder, self._pending.files)
