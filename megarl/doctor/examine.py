"""`megarl doctor`: from the command's arguments to its report.

Gathers the facts of this machine, or of all nodes of the Ray cluster that RAY_ADDRESS names, and applies the rules.
"""

from __future__ import annotations

import os
import platform
import socket
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import megarl
from megarl.config import PlacementConfig, Recipe
from megarl.config.hardware import Hardware, load_hardware
from megarl.device import LOOPBACK
from megarl.disk import existing_folder, writing
from megarl.doctor import machine, nvidia, packages
from megarl.doctor.facts import NodeFacts, RankRates
from megarl.doctor.findings import Finding, Report, merged, of_errors
from megarl.doctor.rules_cluster import cluster_findings, recipe_findings
from megarl.doctor.rules_node import gpu_findings, node_findings
from megarl.preflight.machine_checks import cluster_errors
from megarl.printable import Say
from megarl.types import UserError, UserErrors

_RAY_PORT = 6379  # the default of `ray start --head`
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
# in a checkpoint: the bfloat16 weight and three float32 of the optimizer
_BYTES_OF_PARAMETER = 2 + 12
_NODE = "megarl.doctor.examine:Node"
_START_S = 120.0  # of a process: imports from a cold shared disk
_LOOK_S = 900.0
_CLOCK_TRIES = 5


def examine(
    recipe: Recipe | None,
    recipe_errors: Sequence[UserError],
    hardware_file: Path | None,
    ports: Sequence[int],
    say: Say,
) -> Report:
    """Examine this machine, or all nodes of the cluster that RAY_ADDRESS names.

    hardware_file: of measured rates; None: do not measure. ports: must be free.
    """
    has_cluster = bool(os.environ.get("RAY_ADDRESS"))
    findings = of_errors(recipe_errors)
    wanted = _wanted(recipe, ports, has_cluster)
    errors: list[UserError] = []
    if has_cluster:
        errors = cluster_errors(PlacementConfig(gpus=1, network="nodes"))
        findings += of_errors(errors) + _token_findings()
    if has_cluster and not errors:
        nodes, unreached = survey_cluster(wanted, say)
        findings += unreached
    else:  # without a cluster the recipe's own check reports that it needs one
        nodes = survey_here(wanted)
    local_layers = recipe is not None and recipe.train.local_layers
    for node in nodes:
        findings += node_findings(node) + gpu_findings(node, local_layers)
    if nodes:
        findings += cluster_findings(nodes)
    if recipe and nodes:
        findings += _of_recipe(recipe, nodes)
    rates: list[RankRates] = []
    # Not this machine in place of a cluster.
    if hardware_file and nodes and has_cluster == (nodes[0].ray_gpus is not None):
        rates = _measured(recipe, hardware_file, nodes, findings, say)
    return Report(nodes, merged(findings), rates, str(hardware_file) if rates else "")


def _wanted(recipe: Recipe | None, ports: Sequence[int], has_cluster: bool) -> Wanted:
    needed = dict.fromkeys(ports, True)
    if not has_cluster:
        needed.setdefault(_RAY_PORT, recipe is not None and recipe.placement.network == "nodes")
    written = [
        (recipe.run.dir if recipe else "runs", "run.dir"),
        (os.environ.get("MEGARL_RAY_DIR", "/tmp"), "Ray's sockets and logs, temporary files"),
    ]
    return Wanted(written, [(recipe.model.path, "model.path")] if recipe else [], needed)


def _token_findings() -> list[Finding]:
    """A finding about a token file that other users can read."""
    path = os.environ.get(_TOKEN_PATH)
    if path and Path(path).is_file() and Path(path).stat().st_mode & 0o077:
        return [
            Finding(
                "error",
                _TOKEN_PATH,
                f"{path} can be read by other users",
                f"chmod 600 {path}, and make a new one: whoever has it may run code on all nodes",
            )
        ]
    return []


def _of_recipe(recipe: Recipe, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """The errors of a run's own checks, and the findings about what the recipe needs of the nodes."""
    from megarl.plan.model_size import model_sizes
    from megarl.preflight.checks_by_command import check

    errors: list[UserError] = []
    try:
        check(recipe)
    except UserErrors as several:
        errors += several.errors
    size = 0
    if recipe.checkpoint.every and not errors:
        try:  # Megatron's modules on the meta device
            sizes = model_sizes(recipe).values()
            size = _BYTES_OF_PARAMETER * sum(size.parameters for size in sizes if size.trains)
        except UserError as error:
            errors.append(error)
    return of_errors(errors) + recipe_findings(recipe, nodes, _hardware(recipe), size)


def _hardware(recipe: Recipe) -> Hardware | None:
    with suppress(UserErrors):  # which the recipe's own check reports
        if recipe.placement.hardware:
            return load_hardware(recipe.placement.hardware)
    return None


def _measured(
    recipe: Recipe | None,
    file: Path,
    nodes: Sequence[NodeFacts],
    findings: list[Finding],
    say: Say,
) -> list[RankRates]:
    """Measure and write the hardware file; adds the findings about the rates to `findings`."""
    from megarl.doctor.measure import base_of, hardware_text, measure

    rates, rate_findings = measure(nodes, say)
    findings += rate_findings
    if rates:
        card = _hardware(recipe) if recipe else None
        if card is None or not card.is_card(rates[0].device_name):
            card = base_of(rates[0].device_name)
        text = hardware_text(rates, nodes, card)
        with writing(file.absolute().parent, file.name, "--out"):
            file.write_text(text, encoding="utf-8")
    return rates


@dataclass(frozen=True)
class Wanted:
    """The folders and ports that each node checks. written: folders that a run writes, run.dir first; read: or reads.

    ports: whether a run needs the port to be free; the others are only for a Ray that is started by hand. shared_name:
    a file in the first of the written folders, which all nodes must see; "" for a single node.
    """

    written: Sequence[tuple[str, str]]  # path, purpose
    read: Sequence[tuple[str, str]]
    ports: Mapping[int, bool]
    shared_name: str = ""


class Node:
    """The process that examines its node; in a cluster Ray starts one on each node."""

    def clock(self) -> float:
        """Seconds since the epoch by this node's clock."""
        return time.time()

    def look(self, address: str, wanted: Wanted) -> NodeFacts:
        """Gather the facts; takes some ten seconds where there are GPUs, mostly for imports."""
        gpu_facts = nvidia.gpu_facts()
        gpu_nics, nic_errors = machine.gpu_nics([gpu.pci for gpu in gpu_facts.gpus], address)
        shm_total, shm_free = machine.disk_bytes(Path("/dev/shm"))
        folders = []
        for path, purpose in wanted.written:
            name = "" if folders else wanted.shared_name
            folders.append(machine.folder(Path(path), purpose, is_written=True, shared_name=name))
        folders += [
            machine.folder(Path(path), purpose, is_written=False) for path, purpose in wanted.read
        ]
        return NodeFacts(
            **vars(gpu_facts),
            host=socket.gethostname(),
            address=address,
            kernel=platform.release(),
            python=platform.python_version(),
            num_cores=len(os.sched_getaffinity(0)),
            host_bytes=machine.host_bytes(),
            shm_total_bytes=shm_total,
            shm_free_bytes=shm_free,
            limits=machine.limits(),
            nics=tuple(machine.nics()),
            gpu_nics=gpu_nics,
            nic_errors=nic_errors,
            torch=packages.torch_facts(),
            versions=packages.versions(),
            import_errors=packages.import_errors() if gpu_facts.gpus else {},
            foreign_cudnn=packages.foreign_cudnn(os.environ, Path(sysconfig.get_path("purelib"))),
            pins=packages.sglang_pins(),
            source=machine.source_digest(Path(megarl.__file__).parent),
            environment=machine.environment(os.environ.items()),
            folders=tuple(folders),
            ports=tuple(
                machine.port(number, is_needed=needed) for number, needed in wanted.ports.items()
            ),
        )


def survey_here(wanted: Wanted) -> list[NodeFacts]:
    """The facts of this machine, without Ray."""
    return [Node().look(LOOPBACK, wanted)]


def survey_cluster(wanted: Wanted, say: Say) -> tuple[list[NodeFacts], list[Finding]]:
    """(facts of the nodes that answered, this machine's first; findings: why other nodes did not).

    Where the cluster cannot be joined, the facts of this machine and the reason.
    """
    from megarl.cluster.actor import answers, ray_nodes
    from megarl.cluster.ray_session import Cluster

    try:
        with Cluster(0, node_gpus=1, say=say) as cluster:
            nodes = sorted(ray_nodes(cluster.host), key=lambda node: node.address != cluster.host)
            started = answers({node.worker.start(_NODE): node.address for node in nodes}, _START_S)
            up = [node for node in nodes if not isinstance(started[node.address], Exception)]
            offsets = {
                node.address: _offset(
                    lambda node=node: answers({node.worker.call("clock"): ""}, _START_S)[""]
                )
                for node in up
            }
            with _probe(wanted) as shared_name:
                with_probe = replace(wanted, shared_name=shared_name)
                calls = {
                    node.worker.call("look", node.address, with_probe): node.address for node in up
                }
                seen = answers(calls, _LOOK_S)
    except UserError as error:
        return survey_here(wanted), of_errors([error])
    failed = {**started, **seen}
    findings = [
        _silent(address, why) for address, why in failed.items() if isinstance(why, Exception)
    ]
    facts_of_nodes = []
    for node in up:
        offset_s, error_s = offsets[node.address]
        if isinstance(facts := seen[node.address], NodeFacts):
            facts_of_nodes.append(
                replace(facts, ray_gpus=node.gpus, clock_offset_s=offset_s, clock_error_s=error_s)
            )
    return facts_of_nodes, findings


def _offset(remote_clock: Callable[[], object]) -> tuple[float, float]:
    """(remote clock minus ours, uncertainty: half of the round trip), by Cristian's algorithm.

    The most certain of several; (0, a large uncertainty) where the node does not answer.
    """
    offsets = []
    for _ in range(_CLOCK_TRIES):
        asked_s = time.time()
        remote_s = remote_clock()
        answered_s = time.time()
        if isinstance(remote_s, float):
            offsets.append((remote_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2))
    return min(offsets, key=lambda offset: offset[1], default=(0.0, _START_S))


@contextmanager
def _probe(wanted: Wanted) -> Iterator[str]:
    """Write a file in the first written folder, or in its nearest existing parent; yields its name.

    "" where nothing can be written, which is a finding about the folder.
    """
    existing = existing_folder(Path(wanted.written[0][0]).absolute())
    name = ""
    with ExitStack() as stack:
        with suppress(OSError):
            name = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=".megarl-doctor-", dir=existing)
            ).name
        yield Path(name).name


def _silent(address: str, why: Exception) -> Finding:
    """The finding about a node on which no process could be started, or did not finish."""
    if isinstance(why, UserError):
        return Finding("error", why.where, why.problem, why.hint, (address,))
    cause = (str(why).strip().splitlines() or [type(why).__name__])[-1]
    return Finding(
        "error",
        "Ray",
        f"no answer from a process there ({cause})",
        "look at the node and at Ray's logs there, or start Ray without it",
        (address,),
    )
