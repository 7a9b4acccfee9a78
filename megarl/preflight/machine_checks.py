"""Variables of this process that a run's processes inherit, checked before any is started: Ray's and Megatron's."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from megarl.config import PlacementConfig
from megarl.types import UserError

_ADDRESS = "RAY_ADDRESS"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_CONNECT_S = 5.0  # Ray itself tries for minutes

# Megatron sets these itself, to 1 for its "auto", and ends every rank where another value is there before.
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def attention_errors(environment: Mapping[str, str] = os.environ) -> list[UserError]:
    """Variables that choose TransformerEngine's attention, which Megatron refuses with an assertion on each rank."""
    hint = "unset it: TransformerEngine chooses among the kernels that fit"
    problem = "{!r}, and Megatron refuses every value but 1"
    named = [name for name in _ATTENTION if environment.get(name, "1") != "1"]
    return [UserError(name, problem.format(environment[name]), hint) for name in named]


def cluster_errors(placement: PlacementConfig) -> list[UserError]:
    """Errors of Ray's environment variables; none where the run starts its own Ray."""
    if placement.network == "loopback":
        return []
    address = os.environ.get(_ADDRESS, "")
    if not address:
        hint = "start one (docs/cluster.md), or set it to loopback"
        return [UserError("placement.network", f"nodes, but {_ADDRESS} names no Ray cluster", hint)]
    return _address_errors(address) + _token_errors()


def _address_errors(address: str) -> list[UserError]:
    host, _, port = address.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (ValueError, OverflowError):
        hint = "write an IPv4 address, a colon and the port, as 10.0.0.1:6379"
        return [UserError(_ADDRESS, f"{address!r} is no address of a Ray cluster", hint)]
    except OSError as error:
        hint = "start Ray's head there, or correct it"
        return [
            UserError(_ADDRESS, f"nobody answers at {address} ({error.strerror or error})", hint)
        ]
    return []


def _token_errors() -> list[UserError]:
    if os.environ.get(_TOKEN):
        return []
    hint = "name the file with the token that Ray was started with"
    path = os.environ.get(_TOKEN_PATH)
    if not path:
        problem = "is not set: a Ray cluster without a token runs what anybody sends it"
        return [UserError(_TOKEN_PATH, problem, hint)]
    try:
        if Path(path).read_text(encoding="utf-8").strip():
            return []
        reason = "it is empty"
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
    return [UserError(_TOKEN_PATH, f"{path} holds no token ({reason})", hint)]
