"""The resharding bench: its counting of bytes, and the figures of one run."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from megarl.device import listening_socket
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.shards import box_area, intersect_boxes
from scripts.bench.resharding import wire
from scripts.bench.resharding.case import Case, forget, is_exact, make_case, values
from tests.scripts.bench.benches import figures, refusal

ITEM_BYTES = 2
METHODS = {"megarl", "gather", "megatron_core"}
FIGURES = {
    "wire_bytes_per_rank": int,
    "inter_node_bytes_per_rank": int,
    "median_s": float,
    "extra_memory_bytes": int,
    "plan_s": float,
    "exact": bool,
}


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with listening_socket() as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield client, server


def test_sockets_count_the_payload_of_each_direction(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    client, server = connected
    before = wire.own_sockets()
    client.sendall(b"x" * 12_345)
    server.sendall(b"y" * 67)
    for end, length in ((server, 12_345), (client, 67)):
        assert len(end.recv(length, socket.MSG_WAITALL)) == length

    def as_two_ranks(sockets: list[wire.Socket]) -> list[list[wire.Socket]]:
        return [
            [connection for connection in sockets if connection.local == end.getsockname()]
            for end in connected
        ]

    after = as_two_ranks(wire.own_sockets())
    counted = wire.traffic(as_two_ranks(before), after)
    assert counted == ([[0, 67], [12_345, 0]], 0)
    alone = wire.traffic(as_two_ranks(before)[:1], after[:1])  # the other end belongs to no rank
    assert alone == ([[0]], 67)


def test_every_weight_says_where_it_belongs() -> None:
    name, box = "model.layers.0.mlp.experts.{}.up_proj.weight", ((0, 4), (0, 64), (0, 64))
    here = {"w": values(name, box).contiguous()}
    assert is_exact(here, {"w": values(name, box)})
    shifted = [((1, 5), (0, 64), (0, 64)), ((0, 4), (1, 65), (0, 64)), ((0, 4), (0, 64), (1, 65))]
    for other in [values(name, moved) for moved in shifted] + [values("another", box)]:
        agreeing = (other == here["w"]).float().mean()
        assert agreeing < 0.01
    forget(here)
    assert not (here["w"] == values(name, box)).any()


def test_throttle_without_a_namespace_is_refused_in_one_line() -> None:
    line = "--throttle: this machine permits no network namespace; run as root, or without it"
    assert refusal("reshard", "--throttle 1000", PATH="/nonexistent") == line


def minimum_and_gathered(case: Case, model_bytes: int) -> tuple[float, float]:
    """Bytes that a rank wants and does not have, and bytes of the model that it does not have: means over the ranks."""
    missing, absent = 0, 0
    for rank in range(case.num_processes):
        held = megatron_map.shards(case.shape, case.train, rank, True)
        targets = sglang_map.shards(case.shape, case.engine, rank % case.engine.tp)
        boxes = [
            (a, intersect_boxes(a.box, b.box)) for a in targets for b in held if a.name == b.name
        ]
        here = sum(box_area(box) for _, box in boxes if box)
        missing += ITEM_BYTES * (sum(shard.area for shard in targets) - here)
        absent += model_bytes - ITEM_BYTES * sum(shard.area for shard in held)
    return missing / case.num_processes, absent / case.num_processes


@pytest.mark.slow
@pytest.mark.nightly  # a bench; tests/resharding exchanges in real processes by day
@pytest.mark.parametrize("target", ["tp", "ep"])
def test_one_run_reports_bytes_time_and_memory_of_every_method(target: str) -> None:
    result = figures("reshard", f"--target {target} --layers 2 --hidden 128 --repeats 2")
    assert set(result) == {"target", "model_bytes", "minimum_wire_bytes_per_rank", "methods"}
    assert result["target"] == target
    assert set(result["methods"]) == METHODS
    for name, row in result["methods"].items():
        assert {key: type(value) for key, value in row.items()} == FIGURES, name
        assert row["exact"] is True, name
        assert 0 < row["inter_node_bytes_per_rank"] < row["wire_bytes_per_rank"], name
        assert min(row["median_s"], row["plan_s"], row["extra_memory_bytes"]) > 0, name
    case = make_case(target, 8, 2, 2, 128)
    minimum, gathered = minimum_and_gathered(case, result["model_bytes"])
    assert result["minimum_wire_bytes_per_rank"] == round(minimum)
    assert result["methods"]["megarl"]["wire_bytes_per_rank"] == pytest.approx(minimum, rel=0.01)
    assert result["methods"]["gather"]["wire_bytes_per_rank"] == pytest.approx(gathered, rel=0.01)
    assert result["methods"]["megatron_core"]["wire_bytes_per_rank"] > 0.99 * minimum
