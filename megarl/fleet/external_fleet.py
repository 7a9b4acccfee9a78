"""A fleet whose engines are SGLang servers that others have started: it publishes weights as files."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megarl.cluster.actor import Ref
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.disk import existing_folder, writing
from megarl.fleet.fleet import Fleet
from megarl.printable import Say
from megarl.recovery.engine_processes import EngineProcess
from megarl.recovery.external_engines import ExternalEngineProcesses
from megarl.resharding.member import Stats
from megarl.resharding.payloads import PayloadName
from megarl.rollout.external.weight_files import WeightFiles

_WHERE = "rollout.engine.external_dir"


def make_fleet(cluster: Cluster, recipe: Recipe, say: Say, *, learns: bool = True) -> Fleet:
    """The fleet of a recipe; the arguments are those of `Fleet`."""
    kind = ExternalFleet if recipe.rollout.engine.external else Fleet
    return kind(cluster, recipe, say, learns=learns)


class ExternalFleet(Fleet):
    """The training ranks write a Hugging Face folder together, which all servers read.

    The folder of the version before is removed once a server has the new one; the last one by `shutdown`.
    """

    def __init__(self, cluster: Cluster, recipe: Recipe, say: Say, *, learns: bool = True) -> None:
        run = recipe.run
        root = Path(recipe.rollout.engine.external_dir or run.dir).absolute()
        self._folder = root / run.name / "weights"
        self._weights: WeightFiles | None = None
        self._publish_s = 0.0
        self._has_said_unchecked = False
        super().__init__(cluster, recipe, say, learns=learns)

    @property
    def _external(self) -> ExternalEngineProcesses:
        assert isinstance(self.engines.processes, ExternalEngineProcesses)
        return self.engines.processes

    def begin_copy(self, target: EngineProcess, sources: Sequence[EngineProcess]) -> dict[Ref, str]:
        """Begin to load the current files into a server; the target's calls, by worker."""
        worker = target.worker
        return {worker.call("take_files", self._weights): worker.name}

    def abandon_copies(self, engine: EngineProcess, reason: str) -> None:
        """Nobody waits for a server that is lost."""

    def shutdown(self) -> None:
        super().shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
        # what else is there is of the run
        with suppress(OSError):
            self._folder.parent.rmdir()

    def _publish(self, version: int) -> list[PayloadName]:
        """Write the weights and have all servers that are up load them; nothing is exchanged.

        Raises WorkerFailed where a training rank is gone or no server is left.
        """
        began_s = time.monotonic()
        self._refuse_lost_ranks()
        self._external.restore()
        self.attempts += 1
        # servers may be used by several runs, one after the other, and a run may publish a version again
        label = f"{self._run_id}-{version}-{self.attempts}"
        folder = self._folder / label
        with writing(existing_folder(self._folder), label, _WHERE):
            self._folder.mkdir(parents=True, exist_ok=True)
        self.trainers.export(folder, where=_WHERE)
        self._refuse_lost_ranks()
        self._weights = WeightFiles(str(folder), label, version)
        self._external.fill()
        self._remove_all_but(label)
        if self._recipe.reshard.verify == "checksum":
            self._compare_servers()
        self._publish_s = time.monotonic() - began_s
        return []

    def _remove_all_but(self, label: str) -> None:
        """Remove earlier versions, and what a run before this one has left."""
        for folder in self._folder.iterdir():
            if folder.name != label:
                shutil.rmtree(folder, ignore_errors=True)

    def _compare_servers(self) -> None:
        """Raises RuntimeError where servers of one layout have other weights than each other."""
        checksums = defaultdict(set)
        for answer in self.engines.checksums():
            layout, _, checksum = answer.rpartition(" ")
            checksums[layout].add(checksum)
        if "" in checksums and not self._has_said_unchecked:
            self._has_said_unchecked = True
            self.say(
                "reshard.verify: servers that give no checksum, as those without a GPU, are not compared"
            )
        checksums.pop("", None)
        if any(len(different) > 1 for different in checksums.values()):
            raise RuntimeError(
                "the servers of rollout.engine.external have loaded the same files, and their weights differ"
            )

    def _stats(self, payloads: Sequence[PayloadName]) -> Stats:
        """The cost of the last publication: the bytes of its files, and all of its seconds."""
        assert self._weights
        files = Path(self._weights.folder).glob("*.safetensors")
        num_bytes = sum(file.stat().st_size for file in files)
        return Stats(
            wire_bytes=num_bytes,
            inter_node_bytes=0,
            local_bytes=0,
            extra_bytes=0,
            plan_s=0.0,
            seconds=self._publish_s,
        )
