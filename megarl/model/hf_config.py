"""Reading a HF `config.json`: the integers of ModelShape, and the other values that building the model needs.

Without Megatron, so that it can be checked early. A model with a part that megarl cannot build is refused by the key
that asks for that part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.model.families import FAMILIES
from megarl.model.hf_values import (
    integer,
    mapping,
    number,
    optional_integer,
    refuse_contradictions,
    texts,
    truth,
)
from megarl.model.quantisation import Quantisation, quantisation
from megarl.model.shape import ModelShape
from megarl.types import UserError

# how transformers ends a family's class names
_MODEL = "ForCausalLM"
_CLASSIFIER = "ForSequenceClassification"
_COMMON_INTEGERS = {  # ModelShape's field -> the key of config.json
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
}
_SUPPORTED: dict[str, Any] = {  # variants of any family that no weight map or model describes
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
}
# data types of files besides bfloat16
_WIDER = {name: name for name in ("float16", "float32", "float64")}


@dataclass(frozen=True)
class Yarn:
    """Long context by YaRN (Peng et al., 2023) as DeepSeek uses it."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class HfFacts:
    """The values of a `config.json` that are not in ModelShape; the router's values are DeepSeek's.

    dtype: torch's name of the files' data type. quantisation: the format of the weights that have another; None: none.
    """

    rms_norm_eps: float
    rope_theta: float
    norm_topk_prob: bool
    max_positions: int
    yarn: Yarn | None = None
    num_groups: int | None = None  # of experts, of which a token chooses top_groups
    top_groups: int | None = None
    routed_scaling: float = 1.0
    dtype: str = "bfloat16"
    quantisation: Quantisation | None = None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError: no such file, unreadable, something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            str(file), "no such file", "set model.path to a Hugging Face checkpoint folder"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            str(file), f"cannot be read ({error})", "download or export the checkpoint again"
        ) from None
    if not isinstance(content, dict):
        raise UserError(
            str(file), "is not a JSON object", "download or export the checkpoint again"
        )
    return content


@dataclass(frozen=True)
class HfModel:
    """The `config.json` of a checkpoint folder, read once.

    error: why `facts`, and perhaps `known_shape` too, could not be read and are None. context_tokens: None where the
    file does not have them.
    """

    path: str
    known_shape: ModelShape | None = None
    facts: HfFacts | None = None
    context_tokens: int | None = None
    error: UserError | None = None

    @property
    def shape(self) -> ModelShape:
        """Raises the error where the shape could not be read."""
        if self.known_shape is None:
            assert self.error
            raise self.error
        return self.known_shape

    @property
    def required_facts(self) -> HfFacts:
        """Raises the error where they could not be read, or say what megarl does not build."""
        if self.facts is None:
            assert self.error
            raise self.error
        return self.facts


def read_model(path: str | Path, *, has_scores: bool = False) -> HfModel:
    """Read `config.json` without raising; has_scores: as a model with one score per token, not logits."""
    shape = None
    try:
        file, config, family, is_classifier = _opened(path)
        if is_classifier and not has_scores:
            hint = "use a language model, or name it as critic.path or reward_model.path"
            raise UserError(str(file), "it is a classifier's", hint)
        shape = _shape(file, config, family)
        if has_scores:
            shape = replace(shape, num_labels=1, tied=False, num_mtp_layers=0)
        facts = _facts(file, config, family)
    except UserError as error:
        return HfModel(str(path), shape, error=error)
    return HfModel(str(path), shape, facts, config.get("max_position_embeddings"))


def model_shape(path: str | Path) -> ModelShape:
    """Read a language model's `config.json`. Raises UserError: no file, unknown architecture, missing key, ..."""
    return read_model(path).shape


def scorer_shape(path: str | Path) -> ModelShape:
    """The shape with one score per token: of a classifier, or of a language model whose head is left out."""
    return read_model(path, has_scores=True).shape


def hf_facts(path: str | Path) -> HfFacts:
    """Read `config.json`. Raises UserError where the model does something that megarl does not build."""
    return _facts(*_opened(path)[:3])


def _opened(path: str | Path) -> tuple[Path, dict[str, Any], str, bool]:
    """`config.json`, its content, the family's class name, and whether it is the family's classifier.

    Raises UserError for an unreadable file and for any other architecture.
    """
    file = Path(path) / "config.json"
    config = read_json(file)
    architectures = config.get("architectures")
    if isinstance(architectures, list) and len(architectures) == 1:
        name = architectures[0]
    else:
        name = None
    is_classifier = str(name).endswith(_CLASSIFIER)
    if is_classifier:
        family = str(name).removesuffix(_CLASSIFIER) + _MODEL
    else:
        family = name
    if family not in FAMILIES:
        raise UserError(
            str(file), f"architectures is {architectures}", f"use one of {', '.join(FAMILIES)}"
        )
    return file, config, family, is_classifier


def _shape(file: Path, config: Mapping[str, Any], family: str) -> ModelShape:
    _refuse_variants(file, config)
    quantisation(file, config)
    integers: dict[str, Any] = {
        field: integer(file, config, keys) for field, keys in _COMMON_INTEGERS.items()
    }
    row = FAMILIES[family]
    tied = truth(file, config, "tie_word_embeddings")
    shape = ModelShape(**integers, **row.fields(file, config, integers), **row.constants, tied=tied)
    is_grouped = row.has_grouped_router
    if is_grouped:
        groups = optional_integer(file, config, "n_group") or 1
    else:
        groups = 1
    if is_grouped:
        top_groups = optional_integer(file, config, "topk_group") or groups
    else:
        top_groups = 1
    refuse_contradictions(file, shape, groups, top_groups)
    return shape


def _refuse_variants(file: Path, config: Mapping[str, Any]) -> None:
    for key, supported in _SUPPORTED.items():
        value = config.get(key)
        if value is not None and value != supported:
            hint = f"use a checkpoint where it is {json.dumps(supported)}"
            raise UserError(str(file), f"{key} is {json.dumps(value):.60}", hint)
    kinds = set(texts(file, config, "layer_types")) - {"full_attention"}
    if kinds:
        hint = "use a checkpoint where all are full_attention"
        raise UserError(str(file), f"layer_types has {', '.join(sorted(kinds))}", hint)


def _facts(file: Path, config: dict[str, Any], family: str) -> HfFacts:
    _refuse_variants(file, config)
    # transformers 5 writes one dictionary where 4 wrote rope_theta and rope_scaling.
    rope = mapping(file, config, "rope_parameters", "rope_scaling")
    _refuse_routing(file, config, family)
    return HfFacts(
        rms_norm_eps=number(file, config, "rms_norm_eps", 1e-6, most=1.0),
        rope_theta=number(file, config | dict(rope), "rope_theta", 10_000.0, most=1e12),
        norm_topk_prob=truth(file, config, "norm_topk_prob"),
        max_positions=integer(file, config, ("max_position_embeddings",), 32_768),
        yarn=_yarn(file, rope, family),
        num_groups=optional_integer(file, config, "n_group"),
        top_groups=optional_integer(file, config, "topk_group"),
        routed_scaling=number(file, config, "routed_scaling_factor", 1.0, most=1e6),
        dtype=_WIDER.get(str(config.get("torch_dtype") or config.get("dtype")), HfFacts.dtype),
        quantisation=quantisation(file, config),
    )


def _refuse_routing(file: Path, config: Mapping[str, Any], family: str) -> None:
    """Routers that Megatron's does not equal (moe_utils.py).

    A group's score is the sum of its 2 best experts; Megatron sums the chosen per chosen group. It always normalises
    sigmoid scores, unless one expert alone is chosen, whose softmax after the choice would be 1 whatever the score.
    """
    keys = "n_group", "topk_group", "num_experts_per_tok"
    groups, top_groups, chosen = (optional_integer(file, config, key) or 1 for key in keys)
    if groups > 1 and chosen // top_groups != 2:
        problem = f"num_experts_per_tok / topk_group is {chosen} / {top_groups}"
        raise UserError(
            str(file),
            problem,
            "use a checkpoint where it is 2, as in DeepSeek-V3, or where n_group is 1",
        )
    if FAMILIES[family].has_experts and chosen == 1:
        raise UserError(
            str(file), "num_experts_per_tok is 1", "use a checkpoint where it is 2 or more"
        )
    if FAMILIES[family].has_grouped_router and not config.get("norm_topk_prob", True):
        raise UserError(str(file), "norm_topk_prob is false", "use a checkpoint where it is true")


def _refuse_yarn(file: Path, rope: Mapping[str, Any]) -> None:
    """Raises UserError for variants of YaRN that Megatron does not have."""
    wrong = [
        key
        for key, usual in (("attention_factor", None), ("truncate", True))
        if rope.get(key, usual) != usual
    ]
    if rope.get("mscale_all_dim") is None and rope.get("mscale", 1) != 1:
        wrong.append("mscale without mscale_all_dim")
    if wrong:
        raise UserError(
            str(file), f"the rope parameters set {' and '.join(wrong)}", "use a checkpoint without"
        )


def _yarn(file: Path, rope: Mapping[str, Any], family: str) -> Yarn | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "yarn" and FAMILIES[family].has_yarn:
        _refuse_yarn(file, rope)
        return Yarn(
            factor=number(file, rope, "factor", 0.0, least=1.0, most=1e6),
            original_positions=integer(file, rope, ("original_max_position_embeddings",)),
            beta_fast=number(file, rope, "beta_fast", 32.0, most=1e6),
            beta_slow=number(file, rope, "beta_slow", 1.0, most=1e6),
            mscale=number(file, rope, "mscale", 1.0, most=1e6),
            mscale_all_dim=number(file, rope, "mscale_all_dim", 1.0, most=1e6)
            if rope.get("mscale_all_dim")
            else 0.0,
        )
    if rope_type != "default":
        raise UserError(
            str(file), f"rope_type is {rope_type!r}", "use a checkpoint where it is 'default'"
        )
    return None


def end_token_ids(path: str | Path) -> frozenset[int]:
    """The tokens at which SGLang ends a response: `eos_token_id` of config.json and of generation_config.json.

    Raises UserError as `model_shape`, and for a value that is no token of the vocabulary.
    """
    file, config, family, _ = _opened(path)
    configs = {file: config}
    other = Path(path) / "generation_config.json"
    if other.exists():
        configs[other] = read_json(other)
    vocab_size = _shape(file, config, family).vocab_size
    found = set()
    for where, content in configs.items():
        value = content.get("eos_token_id")
        if isinstance(value, list):
            ids = value
        elif value is None:
            ids = []
        else:
            ids = [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                problem = (
                    f"eos_token_id is {value!r:.60}, and the vocabulary has {vocab_size} tokens"
                )
                raise UserError(
                    str(where), problem, "write the number of the token that ends a response"
                )
        found.update(ids)
    return frozenset(found)
