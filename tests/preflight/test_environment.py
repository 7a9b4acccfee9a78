"""What the environment lacks for a run of several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config import PlacementConfig
from megarl.device import listening_socket
from megarl.preflight.environment import cluster_faults

NODES = PlacementConfig(gpus=16, network="nodes")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with listening_socket() as listener:
        address = "{}:{}".format(*listener.getsockname())
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield address


def wheres() -> list[str]:
    return [fault.where for fault in cluster_faults(NODES)]


def test_a_run_of_its_own_needs_nothing() -> None:
    assert cluster_faults(PlacementConfig(gpus=16)) == []


def test_a_cluster_must_be_named() -> None:
    assert wheres() == ["placement.network"]


NO_ADDRESSES = ["local", "auto", "ray://10.0.0.1:1", "head:6379", "10.0.0.1", "127.0.0.1:x", "1:2"]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_is_told(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert wheres() == ["RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"]


def test_a_head_that_is_gone_is_told_at_once(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening_socket() as other:
        port = other.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    (fault,) = cluster_faults(NODES)
    assert "nobody answers" in fault.problem and "secret" not in str(fault)


def test_the_token_must_be_there(head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert wheres() == ["RAY_AUTH_TOKEN_PATH"]
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert wheres() == ["RAY_AUTH_TOKEN_PATH"]
    file.write_text("\n")
    assert wheres() == ["RAY_AUTH_TOKEN_PATH"]
    file.write_text("secret\n")
    assert wheres() == []
