"""The values of a HF `config.json`, each of the type and within the bounds that its key can have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.model.shape import ModelShape
from megarl.types import UserError
from megarl.types.json_objects import JsonObject

_LARGEST = 2**31 - 1
_LARGEST_OF = {
    "num_hidden_layers": 4096,
    "num_nextn_predict_layers": 64,
    "mtp_num_hidden_layers": 64,
    "num_experts": 4096,
    "n_shared_experts": 4096,
}
_MOST_EXPERTS = 2**20  # of all layers
_HINT = "use a checkpoint whose config.json is that of its weights"


def read_json(file: Path) -> JsonObject:
    """A JSON object. Raises UserError: no such file, unreadable, something else."""
    hint = "download or export the checkpoint again"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "set model.path to a Hugging Face checkpoint folder"
        raise UserError(str(file), "no such file", hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read ({error})", hint) from None
    if not isinstance(content, dict):
        raise UserError(str(file), "is not a JSON object", hint)
    return content


@dataclass(frozen=True)
class ConfigFile:
    """A `config.json`, or an object inside it. A value that is null counts as absent."""

    file: Path
    content: Mapping[str, Any]

    def error(self, problem: str, hint: str) -> UserError:
        return UserError(str(self.file), problem, hint)

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The first of the keys that is there. Raises UserError: missing, or no whole number from `least` on."""
        values = (self.content.get(key) for key in keys)
        value = next((value for value in values if value is not None), default)
        largest = _LARGEST_OF.get(keys[0], _LARGEST)
        if value is None:
            problem = "is missing"
        elif type(value) is int and value > largest:
            hint = f"use a checkpoint where it is at most {largest}"
            raise self.error(f"{keys[0]} is {value:.6g}", hint)
        elif type(value) is int and value >= least:
            return value
        else:
            problem = f"is {value!r:.60}"
        kind = "positive integer" if least else "whole number"
        raise self.error(f"{keys[0]} {problem}", f"write it as a {kind}")

    def optional_integer(self, key: str) -> int | None:
        """Like `integer`, where the key may be absent."""
        if self.content.get(key) is None:
            return None
        return self.integer(key)

    def number(self, key: str, default: float, *, most: float, least: float = 0.0) -> float:
        """A number above 0. Raises UserError for another value."""

        def is_valid(value: Any) -> bool:
            return type(value) in (int, float) and least <= value <= most and value > 0

        hint = f"write it as a number above {least:g} and at most {most:g}"
        return float(self._checked(key, default, is_valid, hint))

    def truth(self, key: str) -> bool:
        """A boolean, false where the key is absent. Raises UserError for another value."""
        return self._checked(
            key, False, lambda value: isinstance(value, bool), "write true or false"
        )

    def known(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Raises UserError where a key has another value than those that are known of it; it may be absent."""
        for key, known in values.items():
            value = self.content.get(key)
            if value is not None and value not in known:
                raise self.error(
                    f"{key} is {value!r:.60}", f"use a checkpoint where it is {known[0]!r}"
                )

    def texts(self, key: str) -> list[str]:
        """A list of texts, empty where there is none. Raises UserError for another value."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)

        return self._checked(key, [], is_valid, "write it as a list of texts, or null")

    def part(self, *keys: str) -> ConfigFile:
        """The JSON object of the first key that has one; an empty one where no key has. Raises UserError for others."""
        hint = "write it as a JSON object, or null"
        for key in keys:
            value = self._checked(key, {}, lambda value: isinstance(value, dict), hint)
            if value:
                return ConfigFile(self.file, value)
        return ConfigFile(self.file, {})

    def _checked(self, key: str, default: Any, is_valid: Callable[[Any], bool], hint: str) -> Any:
        value = self.content.get(key)
        if value is None:
            value = default
        if not is_valid(value):
            raise self.error(f"{key} is {value!r:.60}", hint)
        return value

    def refuse_contradictions(self, shape: ModelShape, groups: int, top_groups: int) -> None:
        """Raises UserError for integers that contradict each other. top_groups: of the groups, for each token."""
        experts = shape.num_experts
        chosen = shape.experts_per_token
        in_reach = top_groups * experts // groups
        of_chosen = f"num_experts_per_tok is {chosen}, more than the experts"
        too_many = shape.num_dense_layers > shape.num_layers
        checks = [
            (chosen > experts, f"{of_chosen} ({experts})"),
            (experts % groups, f"n_group ({groups}) does not divide the experts ({experts})"),
            (top_groups > groups, f"topk_group is {top_groups}, more than n_group ({groups})"),
            (chosen > in_reach, f"{of_chosen} of its groups ({in_reach})"),
            (too_many, "first_k_dense_replace is more than num_hidden_layers"),
            (
                shape.num_layers * experts > _MOST_EXPERTS,
                f"layers x experts is {shape.num_layers * experts}",
            ),
        ]
        if shape.mla:
            rotated = "qk_rope_head_dim", shape.mla.rope_dim
        else:
            rotated = "head_dim", shape.head_dim
            heads = f"num_attention_heads ({shape.num_heads})"
            problem = f"{heads} is no multiple of num_key_value_heads ({shape.num_kv_heads})"
            checks.append((shape.num_heads % shape.num_kv_heads, problem))
        key, size = rotated
        checks.append((size % 2, f"{key} is odd ({size}), and pairs are turned"))
        for is_wrong, problem in checks:
            if is_wrong:
                raise self.error(problem, _HINT)
