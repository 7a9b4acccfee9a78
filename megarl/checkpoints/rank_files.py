"""The files that a training rank writes into a checkpoint."""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoints.snapshots import Digest, digests
from megarl.disk import visible_folder, writing
from megarl.parallel.rank_model import RankModel


class RankFiles:
    """A rank's files of a checkpoint while they are written; see `finish`."""

    def __init__(self, folder: Path, rank_model: RankModel) -> None:
        """Raises UserFault where the disk is full or the folder is gone."""
        self._folder = folder
        with writing(visible_folder(folder), "a checkpoint"):
            self._pending = rank_model.save(folder)

    def finish(self) -> dict[str, Digest]:
        """Wait until the files of all ranks are written; returns the digests of this rank's. Raises UserFault."""
        with writing(visible_folder(self._folder), "a checkpoint"):
            self._pending.finish()
            return digests(self._folder, self._pending.files)
