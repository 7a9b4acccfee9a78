"""The page of chaos.py: what became of all faults, by kind and role, and of the runs that they hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from chaos_runs import RUNS

DETECTED_S = 15.0  # within which a line tells of a fault
ENDED_S = 60.0
_OUTCOMES = ("recovered", "ended", "unnoticed", "missed", "hung")
_BEGUN = "<!-- made by scripts/chaos.py from its results -->"


def page(results: Sequence[dict[str, Any]], before: str = "") -> str:
    """Markdown. results: of `chaos.results_of`. before: the page as it is, whose first part stays."""
    results = _newest(results)
    faults = [result for result in results if "fault" in result]
    ends = [result for result in results if "end" in result]
    restarts_s = [result["restart_s"] for result in results if "restart_s" in result]
    sections = [
        before.partition(_BEGUN)[0].rstrip() or "# Faults in small runs",
        _BEGUN,
        _summary(faults, ends, restarts_s),
        _by_kind(faults, restarts_s),
        _by_run(faults, ends),
        _exceptions(faults, ends),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _newest(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the faults whose number was hit again, and the ends of runs with such a fault."""
    last = {_key(result, result["index"]): result for result in results if "fault" in result}

    def is_newest(place: int, result: dict[str, Any]) -> bool:
        if "fault" in result:
            return last[_key(result, result["index"])] is result
        again = {_key(later, later["index"]) for later in results[place:] if "fault" in later}
        return not any(_key(result, number) in again for number in result.get("faults", ()))

    return [result for place, result in enumerate(results) if is_newest(place, result)]


def _key(result: dict[str, Any], number: int) -> tuple[str, int, int]:
    return result["run"], result.get("seed", 1), number


def _summary(
    faults: Sequence[dict[str, Any]], ends: Sequence[dict[str, Any]], restarts_s: Sequence[float]
) -> str:
    hits = [fault for fault in faults if fault["outcome"] != "missed"]
    unequal = sum(bool(end["end"]["differences"]) for end in ends)
    left = sum(bool(part.get("left")) for part in [*faults, *(end["end"] for end in ends)])
    outcomes = Counter(fault["outcome"] for fault in faults)
    lines = [
        f"{len(faults)} faults, of which {len(hits)} hit somebody, in {len(ends)} runs of "
        f"{len({fault['run'] for fault in faults})} kinds:",
        ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in _OUTCOMES) + ".",
        f"Runs whose end differs: {unequal}. Ends that left something: {left}. "
        f"Told later than after {DETECTED_S:.0f} s: {_count_over(hits, 'detected_s', DETECTED_S)}; "
        f"not recovered or ended within {ENDED_S:.0f} s: {_count_over(hits, 'ended_s', ENDED_S)}.",
    ]
    if restarts_s:
        lines.append(f"A whole restart lost {mean(restarts_s):.0f} s ({len(restarts_s)} of them).")
    return "\n".join(lines)


def _count_over(faults: Iterable[dict[str, Any]], name: str, limit_s: float) -> int:
    return sum((fault[name] or 0.0) > limit_s for fault in faults)


def _by_kind(faults: Sequence[dict[str, Any]], restarts_s: Sequence[float]) -> str:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for fault in faults:
        what = fault["fault"]
        groups.setdefault((what["kind"], what["role"]), []).append(fault)
    rows = []
    for (kind, role), of_group in sorted(groups.items()):
        outcomes = Counter(fault["outcome"] for fault in of_group)
        detected = [fault["detected_s"] for fault in of_group if fault["detected_s"] is not None]
        lost = [fault["lost_s"] for fault in of_group if fault["lost_s"] is not None]
        cells = [kind, role, len(of_group), *(outcomes[outcome] for outcome in _OUTCOMES)]
        cells += [f"{max(detected):.1f}" if detected else "", f"{mean(lost):.1f}" if lost else ""]
        if restarts_s and lost:
            cells.append(f"{mean(lost) / mean(restarts_s):.2f}")
        else:
            cells.append("")
        rows.append(cells)
    head = ["kind", "role", "faults", *_OUTCOMES, "told after, at most, s", "lost, mean, s"]
    return _table([*head, "of a restart"], rows)


def _by_run(faults: Sequence[dict[str, Any]], ends: Sequence[dict[str, Any]]) -> str:
    rows = []
    for run in sorted({result["run"] for result in [*faults, *ends]}):
        of_run = [end for end in ends if end["run"] == run]
        unequal = sum(bool(end["end"]["differences"]) for end in of_run)
        count = sum(fault["run"] == run for fault in faults)
        # by the clock, of which nobody waited to see what became of each
        count += sum(len(end.get("hits", ())) for end in of_run)
        equal = len(of_run) - unequal if RUNS[run].is_seeded else "not seeded"
        rows.append([run, count, len(of_run), equal])
    return _table(["run", "faults", "runs to their end", "of these bit-equal"], rows)


def _exceptions(faults: Sequence[dict[str, Any]], ends: Sequence[dict[str, Any]]) -> str:
    """Each thing that must not be."""
    lines = []
    for fault in faults:
        what = "{kind} {role} in {phase}".format(**fault["fault"])
        where = f"{fault['run']} {fault['index']}: {what} of step {fault['step']}"
        if fault["outcome"] == "hung":
            lines.append(f"- {where} hung")
        elif (fault["ended_s"] or 0.0) > ENDED_S:
            lines.append(f"- {where} took {fault['ended_s']:.0f} s ({fault['outcome']})")
        elif (fault["detected_s"] or 0.0) > DETECTED_S:
            lines.append(f"- {where} was told after {fault['detected_s']:.0f} s")
        if fault["left"]:
            lines.append(f"- {where} left {fault['left'][0]}")
    for end in ends:
        lines += [f"- {end['run']}: differs: {name}" for name in end["end"]["differences"][:1]]
        lines += [f"- {end['run']}: left {name}" for name in end["end"]["left"][:1]]
    if not lines:
        return ""
    return "\n".join(["Exceptions:", "", *lines])


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
