"""Reading a HF `config.json`: the integers of ModelShape, and the other values that building the model needs.

Without Megatron, so that it can be checked early. A model with a part that megarl cannot build is refused by the key
that asks for that part.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.model.families import FAMILIES, KEY, own_family
from megarl.model.families.family import Family
from megarl.model.families.wrapper import Wrapper
from megarl.model.hf_values import ConfigFile, read_json
from megarl.model.quantisation import Quantisation, quantisation
from megarl.model.rope import Yarn, read_yarn, rope_values, with_rope_scaling
from megarl.model.shape import ModelShape
from megarl.types import UserError
from megarl.types.json_objects import JsonObject

# how transformers ends a family's class names
_MODEL = "ForCausalLM"
_CLASSIFIER = "ForSequenceClassification"
_COMMON_INTEGERS = {  # ModelShape's field -> the key of config.json
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_SUPPORTED: dict[str, Any] = {  # variants of any family that no weight map or model describes
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
# keys of which SGLang reads a wrapper's own value where it has one
_OF_WRAPPER = ("tie_word_embeddings", "eos_token_id")
# data types of files besides bfloat16
_WIDER = ("float16", "float32", "float64")


@dataclass(frozen=True)
class HfFacts:
    """The values of a `config.json` that are not in ModelShape; the router's values are DeepSeek's.

    dtype: torch's name of the files' data type. quantisation: the format of the weights that have another; None: none.
    """

    rms_norm_eps: float
    rope_theta: float
    norm_topk_prob: bool
    max_positions: int
    rotary_share: float = 1.0  # of each head's width, what rotary positions turn
    yarn: Yarn | None = None
    num_groups: int | None = None  # of experts, of which a token chooses top_groups
    top_groups: int | None = None
    routed_scaling: float = 1.0
    dtype: str = "bfloat16"
    quantisation: Quantisation | None = None


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


def read_model(
    path: str | Path,
    family: str | None = None,
    *,
    has_scores: bool = False,
    rope_scaling: JsonObject | None = None,
) -> HfModel:
    """Read `config.json` without raising; has_scores: as a model with one score per token, not logits.

    family: `model.family` of the recipe. rope_scaling: its `model.rope_scaling`, in place of the file's.
    """
    shape = None
    try:
        config, row, is_classifier = _opened(path, family)
        if rope_scaling is not None:
            config = replace(config, content=with_rope_scaling(config.content, rope_scaling))
        if is_classifier and not has_scores:
            hint = "use a language model, or name it as critic.path or reward_model.path"
            raise config.error("it is a classifier's", hint)
        shape = _shape(config, row, family)
        if has_scores:
            shape = replace(shape, num_labels=1, tied=False, num_mtp_layers=0)
        if rope_scaling is not None and (shape.mla or not row.has_yarn):
            raise _rope_scaling_error(row, is_latent=shape.mla is not None)
        facts = _facts(config, row, is_latent=shape.mla is not None)
    except UserError as error:
        return HfModel(str(path), shape, error=error)
    return HfModel(str(path), shape, facts, config.content.get("max_position_embeddings"))


def model_shape(path: str | Path, family: str | None = None) -> ModelShape:
    """Read a language model's `config.json`. Raises UserError: no file, unknown architecture, missing key, ..."""
    return read_model(path, family).shape


def hf_facts(path: str | Path, family: str | None = None) -> HfFacts:
    """Read a language model's `config.json`. Raises UserError, also for what megarl does not build."""
    return read_model(path, family).required_facts


def _rope_scaling_error(family: Family, *, is_latent: bool) -> UserError:
    problem = f"{family.architecture} is trained with the positions of its config.json alone"
    if is_latent:
        problem = f"{family.architecture} has latent attention, whose YaRN has more parameters"
    return UserError("model.rope_scaling", problem, "leave it out: config.json decides")


def _opened(path: str | Path, own: str | None) -> tuple[ConfigFile, Family, bool]:
    """`config.json`, the model's family, and whether it is the family's classifier.

    own: a user's family, which comes before that of the table. Raises UserError for an unreadable file, for a family
    that cannot be loaded, and for any other architecture.
    """
    file = Path(path) / "config.json"
    config = ConfigFile(file, read_json(file))
    architectures = config.content.get("architectures")
    name = ""
    if isinstance(architectures, list) and len(architectures) == 1:
        name = str(architectures[0])
    is_classifier = name.endswith(_CLASSIFIER)
    if is_classifier:
        name = name.removesuffix(_CLASSIFIER) + _MODEL
    rows = FAMILIES
    if own:
        rows = FAMILIES | {own_family(own).architecture: own_family(own)}
    if name not in rows:
        problem = f"architectures is {json.dumps(architectures):.80}"
        if own:
            problem += f", and {KEY} is {own}, of {own_family(own).architecture}"
        nearest = difflib.get_close_matches(name, rows, n=1, cutoff=0.0)
        hint = f"add a family of your own, named in {KEY} (docs/models.md); the name nearest to it is {nearest[0]}"
        raise config.error(problem, f"{hint}; or use one of {', '.join(rows)}")
    row = rows[name]
    if row.wrapper:
        config = replace(config, content=_unwrapped(config, row.wrapper))
    return config, row, is_classifier


def _unwrapped(config: ConfigFile, wrapper: Wrapper) -> JsonObject:
    """The values of the language model, and those of the whole file for the keys that it has not."""
    whole = config.content
    text = config.part(wrapper.config_key).content
    if not text:
        hint = "use the config.json that was published with the weights"
        raise config.error(f"{wrapper.config_key} is missing", hint)
    stated = {key: value for key, value in text.items() if value is not None}
    of_wrapper = {key: whole[key] for key in _OF_WRAPPER if whole.get(key) is not None}
    return {**whole, **stated, **of_wrapper}


def _shape(config: ConfigFile, family: Family, own: str | None) -> ModelShape:
    """own: the name of a user's family, which may be this one."""
    _refuse_variants(config, family)
    quantisation(config)
    common = {field: config.integer(key) for field, key in _COMMON_INTEGERS.items()}
    fields: dict[str, Any] = {**common, **family.read(config, common), **family.constants}
    fields["family"] = family.architecture
    if own and family is own_family(own):
        fields["family"] = own
    shape = ModelShape(**fields, tied=config.truth("tie_word_embeddings"))
    groups = top_groups = 1
    if family.has_sigmoid_router:
        groups = config.optional_integer("n_group") or 1
        top_groups = config.optional_integer("topk_group") or groups
    config.refuse_contradictions(shape, groups, top_groups)
    return shape


def _refuse_variants(config: ConfigFile, family: Family) -> None:
    for key, supported in _SUPPORTED.items():
        value = config.content.get(key)
        if key not in family.own_keys and value is not None and value != supported:
            hint = f"use a checkpoint where it is {json.dumps(supported)}"
            raise config.error(f"{key} is {json.dumps(value):.60}", hint)
    _refuse_routers(config, family)
    window = config.content.get("sliding_window")
    if window is not None and config.content.get("use_sliding_window") is None:
        hint = "use a checkpoint where it is null: each token attends to all earlier ones here"
        raise config.error(f"sliding_window is {json.dumps(window):.60}", hint)
    kinds = set(config.texts("layer_types")) - {"full_attention"}
    if kinds and "layer_types" not in family.own_keys:
        hint = "use a checkpoint where all are full_attention"
        raise config.error(f"layer_types has {', '.join(sorted(kinds))}", hint)


def _refuse_routers(config: ConfigFile, family: Family) -> None:
    """Scores and groups of experts that the family's routers do not have."""
    known: dict[str, tuple[Any, ...]] = {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy",),
        "n_group": (1,),
        "topk_group": (1,),
    }
    if family.has_sigmoid_router:
        known = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    for key, values in known.items():
        value = config.content.get(key)
        if value is not None and value not in values:
            hint = f"use a checkpoint where it is {json.dumps(values[0])}, which {family.architecture} has"
            raise config.error(f"{key} is {json.dumps(value):.60}", hint)


def _facts(config: ConfigFile, family: Family, *, is_latent: bool) -> HfFacts:
    rope = rope_values(config)
    with_theta = replace(config, content={**config.content, **rope.content})
    _refuse_routing(config, family)
    dtype = str(config.content.get("torch_dtype") or config.content.get("dtype"))
    usual = HfFacts(
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, most=1.0),
        rope_theta=with_theta.number("rope_theta", 10_000.0, most=1e12),
        norm_topk_prob=config.truth("norm_topk_prob"),
        max_positions=config.integer("max_position_embeddings", default=32_768),
        rotary_share=_rotary_share(with_theta, family),
        yarn=read_yarn(rope, is_known=family.has_yarn, is_latent=is_latent),
        num_groups=config.optional_integer("n_group"),
        top_groups=config.optional_integer("topk_group"),
        routed_scaling=config.number("routed_scaling_factor", 1.0, most=1e6),
        dtype=dtype if dtype in _WIDER else HfFacts.dtype,
        quantisation=quantisation(config),
    )
    return replace(usual, **family.facts(config))


def _rotary_share(config: ConfigFile, family: Family) -> float:
    """Raises UserError where a family would turn a part of its heads that turns all of them."""
    key = "partial_rotary_factor"
    share = config.number(key, family.rotary_share or 1.0, most=1.0)
    if family.rotary_share is None and share != 1.0:
        raise config.error(f"{key} is {share:g}", "use a checkpoint where it is 1")
    return share


def _refuse_routing(config: ConfigFile, family: Family) -> None:
    """Routers that Megatron's does not equal (moe_utils.py).

    A group's score is the sum of its 2 best experts; Megatron sums the chosen per chosen group. It always normalises
    sigmoid scores, unless one expert alone is chosen, whose softmax after the choice would be 1 whatever the score.
    """
    keys = "n_group", "topk_group", "num_experts_per_tok"
    groups, top_groups, chosen = (config.optional_integer(key) or 1 for key in keys)
    if groups > 1 and chosen // top_groups != 2:
        problem = f"num_experts_per_tok / topk_group is {chosen} / {top_groups}"
        hint = "use a checkpoint where it is 2, as in DeepSeek-V3, or where n_group is 1"
        raise config.error(problem, hint)
    if family.has_experts and chosen == 1:
        raise config.error("num_experts_per_tok is 1", "use a checkpoint where it is 2 or more")
    if family.has_sigmoid_router and not config.content.get("norm_topk_prob", True):
        raise config.error("norm_topk_prob is false", "use a checkpoint where it is true")


def end_token_ids(path: str | Path, family: str | None = None) -> frozenset[int]:
    """The tokens at which SGLang ends a response: `eos_token_id` of config.json and of generation_config.json.

    Raises UserError as `model_shape`, and for a value that is no token of the vocabulary.
    """
    config, row, _ = _opened(path, family)
    configs = [config]
    other = Path(path) / "generation_config.json"
    if other.exists():
        configs.append(ConfigFile(other, read_json(other)))
    vocab_size = _shape(config, row, family).vocab_size
    end_ids: set[int] = set()
    for each in configs:
        value = each.content.get("eos_token_id")
        if value is None:
            continue
        ids: list[Any] = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            problem = f"eos_token_id is {value!r:.60}, and the vocabulary has {vocab_size} tokens"
            raise each.error(problem, "write the number of the token that ends a response")
        end_ids.update(ids)
    return frozenset(end_ids)
