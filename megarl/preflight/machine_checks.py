"""Variables of this process that a run's processes inherit, checked before any is started: Ray's and Megatron's."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from megarl.config import PlacementConfig
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

_ADDRESS = "RAY_ADDRESS"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_CONNECT_S = 5.0  # Ray itself tries for minutes

# Megatron sets these itself, to 1 for its "auto", and ends every rank where another value is there before.
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@listed
def attention_errors(environment: Mapping[str, str] = os.environ) -> ErrorIterator:
    """Variables that choose TransformerEngine's attention, which Megatron refuses with an assertion on each rank."""
    for name in _ATTENTION:
        value = environment.get(name, "1")
        if value != "1":
            yield UserError(
                name,
                f"{value!r}, and Megatron refuses every value but 1",
                "unset it: TransformerEngine chooses among the kernels that fit",
            )


@listed
def cluster_errors(placement: PlacementConfig) -> ErrorIterator:
    """Errors of Ray's environment variables; none where the run starts its own Ray."""
    if placement.network == "loopback":
        return
    address = os.environ.get(_ADDRESS, "")
    if not address:
        yield UserError(
            "placement.network",
            f"nodes, but {_ADDRESS} names no Ray cluster",
            "start one (docs/cluster.md), or set it to loopback",
        )
        return
    yield from _address_errors(address)
    if not os.environ.get(_TOKEN):
        yield from _token_errors(os.environ.get(_TOKEN_PATH))


def _address_errors(address: str) -> ErrorIterator:
    host, _, port = address.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (ValueError, OverflowError):
        yield UserError(
            _ADDRESS,
            f"{address!r} is no address of a Ray cluster",
            "write an IPv4 address, a colon and the port, as 10.0.0.1:6379",
        )
    except OSError as error:
        yield UserError(
            _ADDRESS,
            f"nobody answers at {address} ({error.strerror or error})",
            "start Ray's head there, or correct it",
        )


def _token_errors(path: str | None) -> ErrorIterator:
    """Errors of the file with Ray's token."""
    problem = ""
    if not path:
        problem = "is not set: a Ray cluster without a token runs what anybody sends it"
    else:
        try:
            if not Path(path).read_text(encoding="utf-8").strip():
                problem = f"{path} holds no token (it is empty)"
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            problem = f"{path} holds no token ({reason})"
    if problem:
        yield UserError(
            _TOKEN_PATH, problem, "name the file with the token that Ray was started with"
        )
