"""SGLang's own loaders of weights and of adapters against the maps, on small models of meta_engines.py, on the CPU.

Run in its child process alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from megarl.cpu import sglang_patches
from megarl.model.families import name_in_files
from megarl.model.hf_config import model_shape
from megarl.model.lora_pairs import LoraSize, factor_name
from megarl.model.shape import ModelShape
from megarl.model.tensors import STACK, hf_tensors, tensors
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding import engine_model, lora_map, lora_slots, sglang_map
from megarl.resharding.shards import views
from megarl.rollout.sglang import adapter_slot
from tests.resharding.worlds import Pair, factor, fill, logical, same_bits

DTYPE = torch.bfloat16


def wrong_weights(models: Sequence[Any], request: Mapping[str, Any]) -> list[str]:
    """Names of parameters in which SGLang's loader puts other numbers than the map says; models: with the draft."""
    from sglang.srt.speculative.pp_draft_embedding import resolve_target_embed_and_head

    shape, engine = model_shape(request["folder"]), EngineLayout(**request["engine"])
    for model in models:
        attributes = {name: vars(param) for name, param in model.named_parameters()}
        for name, param in model.to_empty(device="cpu").named_parameters():
            # how each is loaded; HY-V3 has a router's bias by two names, which are two parameters then
            vars(param).update(attributes.get(name, {}))
    for draft in models[1:]:
        draft.set_embed_and_head(*resolve_target_embed_and_head(models[0]))
    for model in models:
        model.load_weights(_weights(shape))
    params, wrong = engine_model.params(engine_model.joined(models)), []
    for shard in sglang_map.shards(shape, engine, request["rank"]):
        content = logical(shard.name, shard.box, 1, DTYPE)
        places = views(params, shard.param, shard.at, shard.size)
        parts = [content] if len(places) == 1 else content.split(1)
        if any(not torch.equal(*pair) for pair in zip(places, parts, strict=True)):
            wrong.append(f"{shard.param}: {shard.name}")
    return wrong


def _weights(shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the checkpoint's files."""
    sizes = hf_tensors(shape)
    for name, (items, rows, cols) in tensors(shape).items():
        content = logical(name, ((0, items), (0, rows), (0, cols)), 1, DTYPE)
        for item, matrix in enumerate(content):
            each = name.format(item)
            yield name_in_files(shape, each), matrix.reshape(sizes[each])


def wrong_slots(model: torch.nn.Module, server: Any, request: Mapping[str, Any]) -> list[str]:
    """Names of slots in which SGLang's loader puts other bits than the map says, and of those that it lacks.

    An adapter of one rank and of this alpha: SGLang multiplies the factors of experts alone as it loads them.
    """
    shape, engine = model_shape(request["folder"]), EngineLayout(**request["engine"])
    size = LoraSize(**{**request["lora"], "targets": tuple(request["lora"]["targets"])})
    _load(model, server, shape, size, engine, request["rank"])
    slots = engine_model.adapter_slots(model)
    pair: Any = Pair(shape, None, engine, "bfloat16", lora=size, payload="factors")  # type: ignore[arg-type]
    expected = pair.made_targets(request["rank"])
    fill(expected, pair.target_shards(request["rank"]), 1, DTYPE)
    wrong = [f"{name}: no such slot" for name in expected if name not in slots]
    wrong += [
        f"{name}: {list(slots[name].shape)}"
        for name in expected
        if name in slots and _differs(name, slots, expected)
    ]
    return wrong + [
        f"{name}: not empty" for name in slots if name not in expected and slots[name].any()
    ]


def _differs(
    name: str, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> bool:
    return found[name].shape != wanted[name].shape or not same_bits(found[name], wanted[name])


def _load(
    model: Any, server: Any, shape: ModelShape, size: LoraSize, engine: EngineLayout, rank: int
) -> None:
    """Let SGLang wrap the model's layers and load an adapter into its slot."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARef

    sglang_patches.keep_memory_unpinned()
    names, width = lora_slots.modules(shape, size), lora_slots.slot_rank(size)
    model.to_empty(device="cpu")
    manager: Any = LoRAManager(
        model,
        model.config,
        2,
        LoadConfig(),
        DTYPE,
        server,
        "triton",
        engine.tp,
        rank,
        width,
        set(names),
        [],
    )
    uid, config = (
        "mine",
        {"peft_type": "LORA", "r": width, "lora_alpha": width, "target_modules": list(names)},
    )
    adapter = LoRARef(lora_id=uid, lora_name=uid, lora_path=uid, pinned=True)
    result = manager.load_lora_adapter_from_tensors(adapter, dict(_tensors(shape, size)), config)
    assert result.success, result.error_message
    adapter_slot.occupy_slot(SimpleNamespace(lora_manager=manager, model=model))


def _tensors(shape: ModelShape, size: LoraSize) -> Iterator[tuple[str, torch.Tensor]]:
    """The factors under the names of PEFT's files; SGLang wants all of a fused layer: others are 0."""
    adapted, layers = lora_map.adapted_weights(shape, size), {*lora_slots.modules(shape, size)}
    targets = lora_map.targets_of(shape)
    beside = tuple(
        target
        for target in targets
        if layers & {*lora_slots.modules(shape, replace(size, targets=(target,)))}
    )
    for name, (items, rows, cols) in lora_map.adapted_weights(
        shape, replace(size, targets=beside)
    ).items():
        width = size.rank_of(STACK in name)
        for letter, (height, breadth) in (("A", (width, cols)), ("B", (rows, width))):
            of_stack = factor_name(name, letter)
            content = factor(of_stack, ((0, items), (0, height), (0, breadth)), 1, DTYPE)
            for item, matrix in enumerate(
                content if name in adapted else torch.zeros_like(content)
            ):
                yield (
                    f"base_model.model.{of_stack.format(item) if STACK in name else of_stack}",
                    matrix,
                )
