"""Variables of this process that a run's processes inherit, checked before any is started: Ray's and Megatron's."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from megarl.config import PlacementConfig
from megarl.types import UserFault

_ADDRESS, _TOKEN, _TOKEN_PATH = "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_CONNECT_S = 5.0  # Ray itself tries for minutes

# Megatron sets these itself, to 1 for its "auto", and ends every rank where another value is there before.
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def attention_faults(environment: Mapping[str, str] = os.environ) -> list[UserFault]:
    """Variables that choose TransformerEngine's attention, which Megatron refuses with an assertion on each rank."""
    mend = "unset it: TransformerEngine chooses among the kernels that fit"
    problem = "{!r}, and Megatron refuses every value but 1"
    named = [name for name in _ATTENTION if environment.get(name, "1") != "1"]
    return [UserFault(name, problem.format(environment[name]), mend) for name in named]


def cluster_faults(placement: PlacementConfig) -> list[UserFault]:
    """Faults of Ray's environment variables; none where the run starts its own Ray."""
    if placement.network == "loopback":
        return []
    address = os.environ.get(_ADDRESS, "")
    if not address:
        mend = "start one (docs/cluster.md), or set it to loopback"
        return [UserFault("placement.network", f"nodes, but {_ADDRESS} names no Ray cluster", mend)]
    return _address_faults(address) + _token_faults()


def _address_faults(address: str) -> list[UserFault]:
    host, _, port = address.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (ValueError, OverflowError):
        mend = "write an IPv4 address, a colon and the port, as 10.0.0.1:6379"
        return [UserFault(_ADDRESS, f"{address!r} is no address of a Ray cluster", mend)]
    except OSError as error:
        mend = "start Ray's head there, or correct it"
        return [UserFault(_ADDRESS, f"nobody answers at {address} ({error.strerror or error})", mend)]
    return []


def _token_faults() -> list[UserFault]:
    if os.environ.get(_TOKEN):
        return []
    mend = "name the file with the token that Ray was started with"
    path = os.environ.get(_TOKEN_PATH)
    if not path:
        problem = "is not set: a Ray cluster without a token runs what anybody sends it"
        return [UserFault(_TOKEN_PATH, problem, mend)]
    try:
        if Path(path).read_text(encoding="utf-8").strip():
            return []
        reason = "it is empty"
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
    return [UserFault(_TOKEN_PATH, f"{path} holds no token ({reason})", mend)]
