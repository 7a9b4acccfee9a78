"""The comparison of worlds finds an error of 1e-3 in one rank's part of one gradient, and forgives rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megarl.placement.train_layout import TrainLayout
from tests.parallel.checkpoints import write
from tests.parallel.gradients import (
    Learning,
    Tensors,
    check_gradients,
    check_moved,
    check_weights,
    recorded,
    whole,
)
from tests.parallel.worlds import assign, ragged, recipe, run_world, weighted_loss, world_part

VOCAB_SIZE, LR, ERROR = 200, 1e-3, 1e-3
# A parameter of one rank whose gradient gets an error, and the checkpoint's tensor that it is a part of. It is the last
# rank, but for the embedding, whose rows there have less than a hundredth of the tensor's root mean square.
PLANTED = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight": "model.layers.0.self_attn.q_proj.weight",
    "decoder.layers.1.self_attention.k_layernorm.weight": "model.layers.1.self_attn.k_norm.weight",
    "decoder.layers.1.mlp.router.weight": "model.layers.1.mlp.gate.weight",
    "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight": "model.layers.1.mlp.experts.7.down_proj.weight",
    "output_layer.weight": "lm_head.weight",
}


@contextmanager
def too_large(trainer: Any, name: str) -> Iterator[None]:
    """One rank's own part of this parameter's gradient is too large by ERROR, before anything is summed."""
    param = dict(trainer._model.chunks[0].module.named_parameters())[name]
    rank = trainer.layout.world_size - (2 if name.startswith("embedding") else 1)
    hook = param.register_hook(lambda gradient: gradient * (1 + ERROR * (trainer.rank == rank)))
    yield
    hook.remove()


def without_sum() -> Any:
    """Megatron does not sum the gradients of norms and routers over the tensor-parallel ranks."""
    from megatron.core.distributed import finalize_model_grads

    left_out = {"_allreduce_non_tensor_model_parallel_grads": lambda *_, **__: None}
    return patch.dict(finalize_model_grads.__globals__, left_out)


def learn(trainer: Any) -> dict[str, Learning[Any]]:
    """One gradient again and again, at a learning rate of 0, with each error; then two steps without."""
    sequences, at, dp = (
        ragged(14, VOCAB_SIZE, seed=3),
        trainer.layout.coords(trainer.rank),
        trainer.layout.dp,
    )
    part = world_part(assign(sequences, at.dp, dp, micro_batches=2), sequences, 97.0)
    errors = (
        {}
        if trainer.layout.world_size == 1
        else {name: too_large(trainer, name) for name in PLANTED}
    )
    found = {}
    for name, planted in (errors | {"no sum": without_sum(), "none": nullcontext()}).items():
        with planted, recorded(trainer) as found[name]:
            trainer.train_step(part, 0.0, weighted_loss)
    trainer._model.make_optimizer()  # without what the errors left in the moments
    with recorded(trainer) as found["steps"]:
        for _ in range(2):
            trainer.train_step(part, LR, weighted_loss)
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Learning[Any]]]]:
    path = write(
        tmp_path_factory.mktemp("model"), "qwen3-moe", vocab_size=VOCAB_SIZE, num_hidden_layers=2
    )
    layouts = {"one rank": TrainLayout(1, 1, 1, 1), "tp2 dp2": TrainLayout(4, 2, 1, 2)}
    return {
        name: run_world(recipe(path, layout, weight_decay=0.1), learn)
        for name, layout in layouts.items()
    }


def gradients(worlds: Any, world: str, error: str) -> list[Tensors]:
    return whole([rank[error] for rank in worlds[world]]).gradients


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_an_error_in_one_ranks_part_of_one_gradient_is_found(worlds: Any, name: str) -> None:
    expected = gradients(worlds, "one rank", "none")
    check_gradients(gradients(worlds, "tp2 dp2", "none"), expected)
    with pytest.raises(AssertionError, match=f"step 0: the gradient of {PLANTED[name]} differs"):
        check_gradients(gradients(worlds, "tp2 dp2", name), expected)


@pytest.mark.slow
def test_a_missing_sum_is_found(worlds: Any) -> None:
    with pytest.raises(AssertionError, match="norm.weight: replicas differ"):
        gradients(worlds, "tp2 dp2", "no sum")


@pytest.mark.slow
def test_a_weight_that_its_gradients_do_not_explain_is_found(worlds: Any) -> None:
    learning = whole([rank["steps"] for rank in worlds["tp2 dp2"]])
    check_weights(learning)
    assert learning.after
    for tensor, values in learning.after.items():
        moved = values.copy()
        moved[0, 0] += 0.05 * LR
        with pytest.raises(AssertionError, match=tensor):
            check_weights(replace(learning, after={**learning.after, tensor: moved}))
    with pytest.raises(AssertionError, match="gradient norm"):
        check_weights(replace(learning, norms=[norm * (1 + ERROR) for norm in learning.norms]))


def learnt(gradient: np.ndarray) -> Learning[Tensors]:
    """Two steps of AdamW by hand on weights of 1, along the same gradient."""
    weight = np.ones_like(gradient) - 2 * LR * gradient / (np.abs(gradient) + 1e-8)
    steps = {"w": gradient}
    norm = float(np.linalg.norm(gradient))
    return Learning(
        1e9, 0.0, {"w": np.ones_like(gradient)}, [steps] * 2, [LR] * 2, [norm] * 2, {"w": weight}
    )


def test_what_rounding_decides_is_no_difference() -> None:
    """Two rows of a gradient are zero but for rounding, with another sign in each world."""
    rng = np.random.default_rng(2)
    gradient = rng.normal(size=(200, 32)).astype(np.float32)
    gradient[3:5] = 1e-6
    other = (gradient * (1 + 1e-6 * rng.normal(size=gradient.shape))).astype(np.float32)
    other[3:5] *= -1
    mine, expected = learnt(gradient), learnt(other)
    assert mine.after and expected.after
    assert np.abs(mine.after["w"] - expected.after["w"]).max() > 3 * LR
    check_gradients(mine.gradients, expected.gradients)
    check_weights(mine)
    check_weights(expected)
    check_moved(mine, expected)


def test_a_weight_that_moves_otherwise_along_the_same_gradients_is_found() -> None:
    expected = learnt(np.random.default_rng(2).normal(size=(200, 32)).astype(np.float32))
    assert expected.after
    moved = expected.after["w"].copy()
    moved[np.unravel_index(np.argmax(expected.gradients[0]["w"]), moved.shape)] += 0.01 * LR
    with pytest.raises(AssertionError, match="\nw\n"):
        check_moved(replace(expected, after={"w": moved}), expected)


@pytest.mark.parametrize("step", [0, 1])
def test_a_gradient_that_is_missing_is_found_at_every_step(step: int) -> None:
    gradient = {"w": np.random.default_rng(2).normal(size=(200, 32)).astype(np.float32)}
    partial = {"w": gradient["w"] * np.float32(0.99)}
    with pytest.raises(AssertionError, match=f"step {step}: the gradient of w"):
        check_gradients(
            [partial if index == step else gradient for index in range(2)], [gradient] * 2
        )
