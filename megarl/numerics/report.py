"""The differences of two computations in words: the culprit on one line, and a table of all operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.numerics.differences import Difference, LeftOut, first_difference
from megarl.numerics.operations import layer_name


@dataclass(frozen=True)
class NamedSide:
    """How the ranks of a side are called.

    noun: "training rank". places: where each rank is in its layout, "" where that says nothing. experts_on(layer,
    expert): the ranks that hold an expert.
    """

    noun: str
    places: Sequence[str]
    experts_on: Callable[[int, int], tuple[int, ...]]

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks for people."""
        numbers = ", ".join(map(str, ranks))
        if len(ranks) == 1 and self.places[ranks[0]]:
            return f"{self.noun} {numbers} ({self.places[ranks[0]]})"
        return f"{self.noun}{'s' * (len(ranks) != 1)} {numbers}"


Sides = tuple[NamedSide, NamedSide]


def verdict(
    differences: Sequence[Difference],
    sides: Sides,
    lengths: Sequence[int],
    unchecked: Sequence[int] = (),
) -> str:
    """One line: the first operation that differs, by how much, where, and on which ranks.

    lengths: of the sequences. unchecked: the layers of which nothing was compared.
    """
    if not differences:
        return "nothing was recorded on both sides, so that nothing can be compared"
    difference = first_difference(differences)
    if difference is None and unchecked:
        return f"{_layers(unchecked)}: nothing was compared; all other operations agree ({len(differences)})"
    if difference is None:
        return f"all operations agree ({len(differences)}); {_hidden(differences)}"
    where = _where(difference)
    return f"{where} differs: {_ranks(difference, sides)}; {_amount(difference, lengths)}"


def table_lines(differences: Sequence[Difference]) -> list[str]:
    """A row for each operation, in the order of computation."""
    heads = ("layer", "operation", "largest", "explained", "RMS", "explained", "tokens", "")
    rows: list[tuple[str, ...]] = [heads]
    for difference in differences:
        name = layer_name(difference.layer).removeprefix("layer ")
        numbers = [
            f"{value:.1e}"
            for value in (
                difference.largest,
                difference.allowed_largest,
                difference.rms,
                difference.allowed_rms,
            )
        ]
        tokens = f"{difference.num_differing}/{difference.num_tokens}"
        mark = "differs" if difference.differs else ""
        rows.append((name, difference.operation, *numbers, tokens, mark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number == 1 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def left_out_lines(left_out: Sequence[LeftOut], sides: Sides) -> list[str]:
    """A line for each operation that was not compared in some layers, and why."""
    layers: dict[tuple[str, str], list[int]] = {}
    for each in left_out:
        if each.has_ours and each.has_theirs:
            why = "no token is whole on both sides"
        else:
            why = f"only {sides[each.has_theirs].noun}s have it"
        layers.setdefault((each.operation, why), []).append(each.layer)
    return [
        f"not compared: {', '.join(filter(None, (operation, _layers(of))))}: {why}"
        for (operation, why), of in layers.items()
    ]


def _layers(layers: Sequence[int]) -> str:
    """For people, in ranges; "" before the first layer and after the last one."""
    if not layer_name(layers[0]):
        return ""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    ranges = [
        f"{start}-{end}" if end > start else f"{start}"
        for start, end in zip(starts, ends, strict=True)
    ]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(ranges)}"


def _hidden(differences: Sequence[Difference]) -> str:
    """What errors rounding could hide, and from where on."""
    largest = max(differences, key=lambda difference: difference.allowed_rms)
    return (
        f"from {_where(largest)} on rounding could hide an error of {largest.allowed_rms:.1g} in the mean and"
        f" {largest.allowed_largest:.1g} at an element, in units of an output's RMS; before, a smaller one"
    )


def _where(difference: Difference) -> str:
    return ", ".join(filter(None, (layer_name(difference.layer), difference.operation)))


def _ranks(difference: Difference, sides: Sides) -> str:
    """Ranks that their own replicas contradict before all others: theirs is the fault."""
    alone = [
        f"{side.named(ranks)} from its replicas"
        for side, ranks in zip(sides, difference.deviating, strict=True)
        if ranks
    ]
    if alone:
        return " and ".join(alone)
    if difference.experts:
        plural = "s" * (len(difference.experts) != 1)
        experts = ", ".join(map(str, difference.experts))
        holders = [
            side.named(_holders(side, difference.layer, difference.experts)) for side in sides
        ]
        return f"expert{plural} {experts} of {holders[0]} from {holders[1]}"
    ours, theirs = (
        side.named(ranks) if ranks else f"{side.noun}s"
        for side, ranks in zip(sides, difference.ranks, strict=True)
    )
    return f"{ours} from {theirs}"


def _holders(side: NamedSide, layer: int, experts: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({rank for expert in experts for rank in side.experts_on(layer, expert)}))


def _amount(difference: Difference, lengths: Sequence[int]) -> str:
    tokens = f"{difference.num_differing} of {difference.num_tokens} tokens"
    if difference.allowed_rms == 0:  # choices, which are equal or not
        return f"{tokens} go to other experts, {_place(difference, lengths)} first"
    if difference.largest <= difference.allowed_largest and difference.num_differing:
        return (
            f"by {difference.token_rms:.2g} in the mean of a token, in units of the output's RMS, where rounding"
            f" explains {difference.allowed_token_rms:.1g}; {tokens}, most of all {_place(difference, lengths)}"
        )
    return (
        f"by {difference.largest:.2g} at most and {difference.rms:.2g} in the mean, in units of the output's RMS,"
        f" where rounding explains {difference.allowed_largest:.1g} and {difference.allowed_rms:.1g};"
        f" {tokens}, most of all {_place(difference, lengths)}, feature {difference.feature}"
    )


def _place(difference: Difference, lengths: Sequence[int]) -> str:
    position = difference.token
    for sequence, length in enumerate(lengths):
        if position < length:
            return f"token {position} of sequence {sequence}"
        position -= length
    return f"token {difference.token}"
