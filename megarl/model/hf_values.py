"""The values of a HF `config.json`, each of the type and within the bounds that its key can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.model.shape import ModelShape
from megarl.types import UserError

_LARGEST = 2**31 - 1
_LARGEST_OF = {
    "num_hidden_layers": 4096,
    "num_nextn_predict_layers": 64,
    "num_experts": 4096,
    "n_shared_experts": 4096,
}
_MOST_EXPERTS = 2**20  # of all layers
_HINT = "use a checkpoint whose config.json is that of its weights"


def integer(
    file: Path,
    config: Mapping[str, Any],
    keys: Sequence[str],
    default: int | None = None,
    least: int = 1,
) -> int:
    """The first of the keys that is there. Raises UserError: missing, or no whole number from `least` on."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    largest = _LARGEST_OF.get(keys[0], _LARGEST)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest:
        return value
    if isinstance(value, int) and value > largest:
        raise UserError(
            str(file),
            f"{keys[0]} is {value:.6g}",
            f"use a checkpoint where it is at most {largest}",
        )
    if value is None:
        problem = "is missing"
    else:
        problem = f"is {value!r:.60}"
    if least:
        hint = "write it as a positive integer"
    else:
        hint = "write it as a whole number"
    raise UserError(str(file), f"{keys[0]} {problem}", hint)


def optional_integer(file: Path, config: Mapping[str, Any], key: str) -> int | None:
    """Like `integer`, where the key may be absent or null."""
    if config.get(key) is None:
        return None
    return integer(file, config, (key,))


def number(
    file: Path,
    config: Mapping[str, Any],
    key: str,
    default: float,
    *,
    most: float,
    least: float = 0.0,
) -> float:
    """A number above 0. Raises UserError for another value."""
    if config.get(key) is None:
        value = default
    else:
        value = config[key]
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and least <= value <= most
        and value > 0
    ):
        return float(value)
    hint = f"write it as a number above {least:g} and at most {most:g}"
    raise UserError(str(file), f"{key} is {value!r:.60}", hint)


def truth(file: Path, config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A boolean. Raises UserError for another value."""
    if config.get(key) is None:
        value = default
    else:
        value = config[key]
    if isinstance(value, bool):
        return value
    raise UserError(str(file), f"{key} is {value!r:.60}", "write true or false")


def mapping(file: Path, config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The JSON object of the first key that has one; empty where no key has. Raises UserError for other values."""
    for key in keys:
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise UserError(
                str(file), f"{key} is {value!r:.60}", "write it as a JSON object, or null"
            )
        if value:
            return value
    return {}


def texts(file: Path, config: Mapping[str, Any], key: str) -> list[str]:
    """A list of texts, empty where there is none. Raises UserError for another value."""
    value = [] if config.get(key) is None else config[key]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise UserError(str(file), f"{key} is {value!r:.60}", "write it as a list of texts, or null")


def refuse_contradictions(file: Path, shape: ModelShape, groups: int, top_groups: int) -> None:
    """Raises UserError for integers that contradict each other; a token uses experts of top_groups of the groups."""
    experts = shape.num_experts
    chosen = shape.experts_per_token
    heads = shape.num_heads
    mla = shape.mla
    in_reach = top_groups * experts // groups
    checks = [
        (chosen <= experts, f"num_experts_per_tok is {chosen}, more than the experts ({experts})"),
        (experts % groups == 0, f"n_group ({groups}) does not divide the experts ({experts})"),
        (top_groups <= groups, f"topk_group is {top_groups}, more than n_group ({groups})"),
        (
            chosen <= in_reach,
            f"num_experts_per_tok is {chosen}, more than the experts of its groups ({in_reach})",
        ),
        (
            shape.num_dense_layers <= shape.num_layers,
            "first_k_dense_replace is more than num_hidden_layers",
        ),
        (
            shape.num_layers * experts <= _MOST_EXPERTS,
            f"layers x experts is {shape.num_layers * experts}",
        ),
    ]
    if mla:
        checks.append(
            (
                mla.rope_dim % 2 == 0,
                f"qk_rope_head_dim is odd ({mla.rope_dim}), and pairs are turned",
            )
        )
    else:
        problem = f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({shape.num_kv_heads})"
        checks.append((heads % shape.num_kv_heads == 0, problem))
        checks.append(
            (shape.head_dim % 2 == 0, f"head_dim is odd ({shape.head_dim}), and pairs are turned")
        )
    problem = next((problem for is_good, problem in checks if not is_good), None)
    if problem:
        raise UserError(str(file), problem, _HINT)
