"""`megarl doctor`: from the command's arguments to its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config import PlacementConfig, Recipe
from megarl.config.hardware import Hardware, load_hardware
from megarl.disk import writing
from megarl.doctor.facts import NodeFacts
from megarl.doctor.findings import Finding, merged, of_faults
from megarl.doctor.node import Wanted
from megarl.doctor.rates import RankRates
from megarl.doctor.report import Report
from megarl.doctor.rules_cluster import cluster_findings
from megarl.doctor.rules_gpu import gpu_findings
from megarl.doctor.rules_node import node_findings
from megarl.doctor.rules_recipe import recipe_findings
from megarl.doctor.survey import Survey, survey_cluster, survey_here
from megarl.preflight.environment import cluster_faults
from megarl.types import UserFault, UserFaults

RAY_PORT = 6379  # the default of `ray start --head`
_RUNS = "runs"  # the default folder of run.dir
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_BYTES_OF_PARAMETER = 2 + 12  # in a checkpoint: the bfloat16 weight and three float32 of the optimizer


@dataclass(frozen=True)
class Asked:
    """The command's arguments. hardware_file: of measured rates; None: do not measure. ports: must be free."""

    recipe: Recipe | None = None
    recipe_faults: Sequence[UserFault] = ()
    hardware_file: Path | None = None
    ports: Sequence[int] = ()


def examine(asked: Asked, say: Callable[[str], None]) -> Report:
    """Examine this machine, or all nodes of the cluster that RAY_ADDRESS names."""
    findings = of_faults(asked.recipe_faults)
    seen, joins = _seen(asked, findings, say)
    nodes = seen.nodes
    findings += seen.findings
    local_layers = asked.recipe is not None and asked.recipe.train.local_layers
    for node in nodes:
        findings += node_findings(node) + gpu_findings(node, local_layers)
    if nodes:
        findings += cluster_findings(nodes)
    if asked.recipe and nodes:
        findings += _of_recipe(asked.recipe, nodes)
    rates: list[RankRates] = []
    if asked.hardware_file and nodes and joins == _has_cluster():  # not this machine in place of a cluster
        rates = _measured(asked, nodes, joins, findings, say)
    written = str(asked.hardware_file) if rates else ""
    return Report(nodes, merged(findings), rates, written)


def _seen(asked: Asked, findings: list[Finding], say: Callable[[str], None]) -> tuple[Survey, bool]:
    """(survey of the nodes, whether they are those of a Ray cluster)."""
    has_cluster = _has_cluster()
    wants_cluster = asked.recipe is not None and asked.recipe.placement.network == "nodes"
    wanted = _wanted(asked, None if has_cluster else RAY_PORT, is_needed=wants_cluster)
    if not has_cluster:
        return survey_here(wanted), False  # the recipe's own check reports that it needs a cluster
    faults = cluster_faults(PlacementConfig(gpus=1, network="nodes"))
    findings += of_faults(faults) + _token_findings()
    if faults:
        return survey_here(wanted), False
    survey = survey_cluster(wanted, say)
    return survey, not (len(survey.nodes) == 1 and survey.nodes[0].ray_gpus is None)


def _has_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


def _wanted(asked: Asked, ray_port: int | None, *, is_needed: bool) -> Wanted:
    recipe, room = asked.recipe, os.environ.get("MEGARL_RAY_DIR", "/tmp")
    ports = [*asked.ports, *([ray_port] if ray_port and is_needed else [])]
    run = (recipe.run.dir if recipe else _RUNS, "run.dir")
    read = [(recipe.model.path, "model.path")] if recipe else []
    return Wanted([run, (room, "Ray's sockets and logs, temporary files")], read, ports, ray_port)


def _token_findings() -> list[Finding]:
    """A finding about a token file that other users can read."""
    path = os.environ.get(_TOKEN_PATH)
    if path and Path(path).is_file() and Path(path).stat().st_mode & 0o077:
        mend = f"chmod 600 {path}, and make a new one: whoever has it may run code on all nodes"
        return [Finding("fault", _TOKEN_PATH, f"{path} can be read by other users", mend)]
    return []


def _of_recipe(recipe: Recipe, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """The faults of a run's own checks, and the findings about what the recipe needs of the nodes."""
    from megarl.preflight.check import check

    faults: list[UserFault] = []
    try:
        check(recipe)
    except UserFaults as several:
        faults += several.faults
    hardware = _hardware(recipe)
    size = 0
    if recipe.checkpoint.every and not faults:
        try:
            size = _checkpoint_bytes(recipe)
        except UserFault as fault:
            faults.append(fault)
    return of_faults(faults) + recipe_findings(recipe, nodes, hardware, size)


def _hardware(recipe: Recipe) -> Hardware | None:
    try:
        return load_hardware(recipe.placement.hardware) if recipe.placement.hardware else None
    except UserFaults:  # the recipe's own check reports them
        return None


def _checkpoint_bytes(recipe: Recipe) -> int:
    """The size of a checkpoint of all trained models, by Megatron's modules on the meta device."""
    from megarl.plan.model_size import model_sizes

    return _BYTES_OF_PARAMETER * sum(size.parameters for size in model_sizes(recipe).values() if size.trains)


def _measured(
    asked: Asked, nodes: Sequence[NodeFacts], joins: bool, findings: list[Finding], say: Callable[[str], None]
) -> list[RankRates]:
    """Measure and write the hardware file; adds the findings about the rates to `findings`."""
    from megarl.doctor.hardware_file import base_of, hardware_text
    from megarl.doctor.measure import measure

    rates, found = measure(nodes, joins, say)
    findings += found
    if rates and asked.hardware_file:
        own = _hardware(asked.recipe) if asked.recipe else None
        is_own = own is not None and own.is_card(rates[0].device_name)
        text = hardware_text(rates, nodes, own if is_own else base_of(rates[0].device_name))
        with writing(asked.hardware_file.absolute().parent, asked.hardware_file.name, "--out"):
            asked.hardware_file.write_text(text, encoding="utf-8")
    return rates
