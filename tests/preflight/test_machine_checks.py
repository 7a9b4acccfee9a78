"""What the environment lacks for a run of several nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megarl.config import PlacementConfig
from megarl.device import listening_socket
from megarl.preflight.machine_checks import attention_errors, cluster_errors

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
    return [error.where for error in cluster_errors(NODES)]


def test_a_run_of_its_own_needs_nothing() -> None:
    assert cluster_errors(PlacementConfig(gpus=16)) == []


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
    (error,) = cluster_errors(NODES)
    assert "nobody answers" in error.problem and "secret" not in str(error)


def test_the_token_must_be_there(
    head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert wheres() == ["RAY_AUTH_TOKEN_PATH"]
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert wheres() == ["RAY_AUTH_TOKEN_PATH"]
    file.write_text("\n")
    assert wheres() == ["RAY_AUTH_TOKEN_PATH"]
    file.write_text("secret\n")
    assert wheres() == []


def test_variables_that_choose_the_attention_are_named() -> None:
    """Megatron's own assertion would end each rank, after Ray and all ranks have started."""
    assert (
        attention_errors({}) == attention_errors({"NVTE_FLASH_ATTN": "1", "NVTE_DEBUG": "0"}) == []
    )
    errors = attention_errors(
        {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": ""}
    )
    assert [error.where for error in errors] == ["NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"]
    assert str(errors[0]).startswith(
        "NVTE_FLASH_ATTN: '0', and Megatron refuses every value but 1; unset it"
    )


@pytest.mark.slow
def test_megatron_refuses_the_values_that_are_named() -> None:
    """In its own function, with the backend that a recipe cannot change."""
    from megarl.parallel import model  # installs what Megatron's import needs

    assert model
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    default = next(
        field.default for field in fields(TransformerConfig) if field.name == "attention_backend"
    )
    assert default is AttnBackend.auto
    for value, is_refused in (("0", True), ("", True), ("1", False)):
        with mock.patch.dict(os.environ, {"NVTE_FUSED_ATTN": value}):
            assert bool(attention_errors(os.environ)) == is_refused
            refused: Any = (
                pytest.raises(AssertionError, match="NVTE_FUSED_ATTN")
                if is_refused
                else nullcontext()
            )
            with refused:
                itself: Any = SimpleNamespace(config=SimpleNamespace(attention_backend=default))
                LanguageModule._set_attention_backend(itself)
