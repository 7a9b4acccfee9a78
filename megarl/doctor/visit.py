"""`megarl doctor`: from the command's arguments to its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.config import PlacementConfig, Recipe
from megarl.config.hardware import Hardware, load_hardware
from megarl.disk import writing
from megarl.doctor.facts import NodeFacts, RankRates
from megarl.doctor.findings import Finding, Report, merged, of_faults
from megarl.doctor.rules_cluster import cluster_findings, recipe_findings
from megarl.doctor.rules_node import gpu_findings, node_findings
from megarl.doctor.survey import Wanted, survey_cluster, survey_here
from megarl.preflight.environment import cluster_faults
from megarl.types import UserFault, UserFaults

_RAY_PORT = 6379  # the default of `ray start --head`
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_BYTES_OF_PARAMETER = 2 + 12  # in a checkpoint: the bfloat16 weight and three float32 of the optimizer


def examine(
    recipe: Recipe | None,
    recipe_faults: Sequence[UserFault],
    hardware_file: Path | None,
    ports: Sequence[int],
    say: Callable[[str], None],
) -> Report:
    """Examine this machine, or all nodes of the cluster that RAY_ADDRESS names.

    hardware_file: of measured rates; None: do not measure. ports: must be free.
    """
    has_cluster = bool(os.environ.get("RAY_ADDRESS"))
    findings = of_faults(recipe_faults)
    wanted = _wanted(recipe, ports, has_cluster)
    faults = cluster_faults(PlacementConfig(gpus=1, network="nodes")) if has_cluster else []
    if has_cluster:
        findings += of_faults(faults) + _token_findings()
    if has_cluster and not faults:
        nodes, unreached = survey_cluster(wanted, say)
        findings += unreached
    else:  # without a cluster the recipe's own check reports that it needs one
        nodes = survey_here(wanted)
    for node in nodes:
        findings += node_findings(node) + gpu_findings(node, recipe is not None and recipe.train.local_layers)
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
    room = os.environ.get("MEGARL_RAY_DIR", "/tmp")
    run = (recipe.run.dir if recipe else "runs", "run.dir")
    read = [(recipe.model.path, "model.path")] if recipe else []
    needed = dict.fromkeys(ports, True)
    if not has_cluster:
        needed.setdefault(_RAY_PORT, recipe is not None and recipe.placement.network == "nodes")
    return Wanted([run, (room, "Ray's sockets and logs, temporary files")], read, needed)


def _token_findings() -> list[Finding]:
    """A finding about a token file that other users can read."""
    path = os.environ.get(_TOKEN_PATH)
    if path and Path(path).is_file() and Path(path).stat().st_mode & 0o077:
        mend = f"chmod 600 {path}, and make a new one: whoever has it may run code on all nodes"
        return [Finding("fault", _TOKEN_PATH, f"{path} can be read by other users", mend)]
    return []


def _of_recipe(recipe: Recipe, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """The faults of a run's own checks, and the findings about what the recipe needs of the nodes."""
    from megarl.plan.model_size import model_sizes
    from megarl.preflight.check import check

    faults: list[UserFault] = []
    try:
        check(recipe)
    except UserFaults as several:
        faults += several.faults
    size = 0
    if recipe.checkpoint.every and not faults:
        try:  # Megatron's modules on the meta device
            sizes = model_sizes(recipe).values()
            size = _BYTES_OF_PARAMETER * sum(size.parameters for size in sizes if size.trains)
        except UserFault as fault:
            faults.append(fault)
    return of_faults(faults) + recipe_findings(recipe, nodes, _hardware(recipe), size)


def _hardware(recipe: Recipe) -> Hardware | None:
    try:
        return load_hardware(recipe.placement.hardware) if recipe.placement.hardware else None
    except UserFaults:  # the recipe's own check reports them
        return None


def _measured(
    recipe: Recipe | None, file: Path, nodes: Sequence[NodeFacts], findings: list[Finding], say: Callable[[str], None]
) -> list[RankRates]:
    """Measure and write the hardware file; adds the findings about the rates to `findings`."""
    from megarl.doctor.measure import base_of, hardware_text, measure

    rates, found = measure(nodes, say)
    findings += found
    if rates:
        own = _hardware(recipe) if recipe else None
        is_own = own is not None and own.is_card(rates[0].device_name)
        text = hardware_text(rates, nodes, own if is_own else base_of(rates[0].device_name))
        with writing(file.absolute().parent, file.name, "--out"):
            file.write_text(text, encoding="utf-8")
    return rates
