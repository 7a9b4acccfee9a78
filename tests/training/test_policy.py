"""A training rank as the rest of the program uses it. One world of two ranks answers most questions at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.statistics import TOKENS
from megarl.config import ReferenceConfig
from megarl.controller.samples import samples_of
from megarl.placement.train_layout import TrainLayout
from megarl.samples.summaries import summary
from megarl.training.batching import SampleRef, plan_updates
from megarl.training.calls import TrainCall
from megarl.types import Prompt, SampleGroup, SilentFault
from tests.parallel.conftest import write_checkpoint
from tests.parallel.worlds import assign, numbers, part, ragged, recipe, run_world, weighted_loss
from tests.samples.responses import random_group, with_row
from tests.training.episodes import cut, episode

pytestmark = pytest.mark.slow

# padded to 256 at TP 2, so that the second rank's half of the vocabulary is all padding
VOCAB_SIZE = 100
IDLE_S = 1.0
STEPS = 200  # of a run that may not grow
TEMPERATURE = 0.7
DIFF = "logprob_diff_mean"


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("small-vocabulary"), vocab_size=VOCAB_SIZE, num_hidden_layers=2
    )


def explore(trainer: Any) -> dict[str, Any]:
    from megarl import device
    from megarl.resharding import megatron_map
    from megarl.resharding.memory_handles import map_params
    from megarl.resharding.shards import verify_params

    verify_params(
        megatron_map.shards(trainer.shape, trainer.layout, trainer.rank), trainer.params()
    )
    batches = assign(ragged(10, VOCAB_SIZE, seed=5), 0, 1, micro_batches=2)
    facts: dict[str, Any] = {"logprobs": trainer.token_outputs(batches)}

    storages = [buffer.grad_data.untyped_storage() for buffer in _buffers(trainer)]
    full_bytes = [storage.nbytes() for storage in storages]
    facts["held_when_given_back"] = []
    device.empty_cache = lambda: facts["held_when_given_back"].append(
        sum(storage.nbytes() for storage in storages)
    )
    trainer.offload()
    facts["offloaded_bytes"] = [storage.nbytes() for storage in storages]
    facts["logprobs_offloaded"] = trainer.token_outputs(batches)
    trainer.onload()
    facts["is_restored"] = [storage.nbytes() for storage in storages] == full_bytes
    facts["gradients_after_onload"] = max(
        float(buffer.grad_data.abs().max()) for buffer in _buffers(trainer)
    )

    mapped = map_params(trainer.handles().source)
    before = {name: tensor.clone() for name, tensor in mapped.items()}
    facts["first"] = numbers(trainer.train_step(part(batches, 50.0), 1e-2, weighted_loss))
    facts["unchanged"] = [
        name for name, tensor in mapped.items() if torch.equal(tensor, before[name])
    ]
    facts["is_same_memory"] = all(
        torch.equal(mapped[name], param) for name, param in trainer.params().items()
    )

    facts["on_policy"] = numbers(trainer.train_step(part(batches, 50.0), 0.0, weighted_loss))
    off_policy = part(batches, 50.0, old_logp=facts["logprobs"])
    facts["off_policy"] = numbers(trainer.train_step(off_policy, 0.0, weighted_loss))
    facts["grpo"] = [
        [numbers(update) for update in trainer.train(_step(updates))] for updates in (1, 2)
    ]
    facts["sft"] = [
        [numbers(update) for update in trainer.train(_step(1, algorithm="sft"))] for _ in range(8)
    ]
    facts["episodes"] = {
        name: [
            numbers(trainer.train(_episodes(form, name))[0])
            for form in ("whole", "cut", "other words")
        ]
        for name in ("grpo", "gspo")
    }
    facts["idle_share"] = _idle_share()
    with pytest.raises(SilentFault, match="ranks? 0.* computed a loss that is not finite"):
        trainer.train_step(part(batches, 50.0), 1e-3, _infinite_loss)
    return facts


def _buffers(trainer: Any) -> list[Any]:
    return [
        buffer
        for chunk in trainer._model.chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]


def _step(
    updates: int, seed: int = 9, longest: int = 6, *, algorithm: str = "grpo", lr: float = 1e-2
) -> TrainCall[Any]:
    """A step on two groups of four samples of up to `longest` tokens."""
    rng = np.random.default_rng(seed)
    groups, refs = [], []
    for group in range(2):
        lengths = rng.integers(1, longest + 1, 4).tolist()
        groups.append(random_group(rng, VOCAB_SIZE, lengths))
        refs += [
            SampleRef(group, i, 5 + length, length, advantage=(-1.0) ** i)
            for i, length in enumerate(lengths)
        ]
    plan = plan_updates(
        refs, updates=updates, dp=1, token_budget=24, aggregation="sequence_mean", work=float
    )
    return TrainCall(algorithm, plan, dict(enumerate(groups)), lr, state=None)


def _episodes(how: str, algorithm: str) -> TrainCall[Any]:
    """A step on two episodes of three turns, at learning rate 0.

    how: "whole", each in a row of its own; "cut", the first in two rows; with "other words" in an observation.
    """
    rng, prompt = np.random.default_rng(4), Prompt("", "", (3, 1, 4, 1, 5), "")
    sample, other = (episode(prompt, rng, 3, version=0) for _ in range(2))
    if how == "cut":
        sample = cut(sample, [1])
    if how == "other words":
        row = sample.only_row
        changed_T = row.response_ids_T.copy()
        changed_T[np.flatnonzero(~row.trained_T)[0]] ^= 1
        sample = with_row(sample, response_ids_T=changed_T)
    group = SampleGroup(
        prompt, (sample, other), np.array([1.0, 0.0], np.float32), np.array([True, False])
    )
    refs = samples_of([summary(group)], "grpo", version=0)
    plan = plan_updates(
        refs, updates=1, dp=1, token_budget=99, aggregation="sequence_mean", work=float
    )
    return TrainCall(algorithm, plan, {0: group}, 0.0, state=None)


def _idle_share() -> float:
    """CPU seconds per second of every thread of this process while nothing is asked of it."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - cpu_s) / (time.perf_counter() - start_s)


def _infinite_loss(
    logp_T: torch.Tensor, entropy_T: torch.Tensor, old_logp_T: torch.Tensor, targets: Any
) -> tuple[torch.Tensor, dict]:
    return logp_T.sum() * float("inf"), {TOKENS: targets.loss_mask_T.sum()}


@pytest.fixture(scope="module")
def world(small_vocabulary: Path) -> list[dict[str, Any]]:
    return run_world(recipe(small_vocabulary, TrainLayout(2, 2, 1, 2)), explore)


def test_logprobs_where_one_rank_holds_only_padding(
    world: list[dict[str, Any]], small_vocabulary: Path
) -> None:
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(small_vocabulary, dtype=torch.float32).eval()
    for logp_T, other, sequence in zip(
        *(rank["logprobs"] for rank in world), ragged(10, VOCAB_SIZE, seed=5), strict=True
    ):
        tokens_T = torch.from_numpy(sequence.token_ids_T)
        with torch.no_grad():
            logp_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
        np.testing.assert_allclose(
            logp_T[1:], logp_TV[:-1].gather(-1, tokens_T[1:, None])[:, 0], atol=1e-4
        )
        assert logp_T[0] == 0.0
        np.testing.assert_array_equal(logp_T, other)


def test_offload_frees_the_gradients_and_keeps_the_weights(world: list[dict[str, Any]]) -> None:
    for rank in world:
        assert set(rank["offloaded_bytes"]) == {0}
        assert rank["held_when_given_back"] == [0]
        assert rank["is_restored"] and rank["gradients_after_onload"] == 0.0
        for kept, before in zip(rank["logprobs_offloaded"], rank["logprobs"], strict=True):
            np.testing.assert_array_equal(kept, before)


def test_steps_write_into_the_published_memory(world: list[dict[str, Any]]) -> None:
    assert all(rank["is_same_memory"] for rank in world)
    assert world[0]["unchanged"] == []
    # all padding
    assert world[1]["unchanged"] == ["embedding.word_embeddings.weight", "output_layer.weight"]


def test_old_logprobs_are_of_the_policy_before_the_updates(world: list[dict[str, Any]]) -> None:
    """The gap is |old - engine|: current and old policy differ after a step, and the first step saw the old one."""
    first, on_policy, off_policy = (world[0][key] for key in ("first", "on_policy", "off_policy"))
    assert off_policy[DIFF] == pytest.approx(first[DIFF], rel=1e-5)
    assert abs(on_policy[DIFF] - first[DIFF]) > 1e-2 * first[DIFF]
    (only,), (_, second) = world[0]["grpo"]
    assert only["old_kl"] == 0.0
    assert second["old_kl"] > 1e-4


def test_supervised_steps_learn(world: list[dict[str, Any]]) -> None:
    losses = [metrics["loss"] for (metrics,) in world[0]["sft"]]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_what_the_model_did_not_sample_has_no_gradient(
    world: list[dict[str, Any]], name: str
) -> None:
    """A row in which an observation is a part of the prompt learns the same as one in which it is masked.

    It is a part of the context all the same: another one gives other probabilities.
    """
    whole, rows, other = world[0]["episodes"][name]
    assert (
        whole.keys() == rows.keys()
        and whole["logprob_diff_turn_3"] > 0
        and "logprob_diff_turn_4" not in whole
    )
    # The experts also have the observations, of which the two forms of an episode read another number.
    learned = {key for key in whole if not key.startswith("busiest")}
    assert {key: rows[key] for key in learned} == pytest.approx(
        {key: whole[key] for key in learned}, rel=1e-4, abs=1e-6
    )
    assert whole["grad_norm"] > 1e-3
    assert other["logprob_diff_turn_1"] == pytest.approx(whole["logprob_diff_turn_1"], rel=1e-4)
    assert other["logprob_diff_turn_2"] != pytest.approx(whole["logprob_diff_turn_2"], rel=1e-4)


def test_an_idle_rank_leaves_the_cpu_alone(world: list[dict[str, Any]]) -> None:
    """A thread that spins shows 1; other work on the machine makes the kernel's own share come and go."""
    assert max(rank["idle_share"] for rank in world) < 0.1


def drift(trainer: Any) -> dict[str, Any]:
    """GRPO steps with a reference, its logprobs before and after them, and where the weights lie then.

    Before that, steps at learning rate 0 on samples and on demonstrations.
    """
    from megarl.parallel import host_offload

    still = {
        name: numbers(trainer.train(_step(1, algorithm=name, lr=0.0))[0])
        for name in ("grpo", "sft")
    }
    batches = assign(ragged(6, VOCAB_SIZE, seed=5), 0, 1, micro_batches=2)
    before, places = (
        trainer.token_outputs(batches),
        {name: param.data_ptr() for name, param in trainer.params().items()},
    )
    kls = [
        numbers(update).get("reference_kl")
        for (update,) in (trainer.train(_step(1)) for _ in range(3))
    ]
    weights = {name: param.clone() for name, param in trainer.params().items()}
    with host_offload.swapped_in(trainer.params(), trainer._reference):
        during = trainer.token_outputs(batches)
    return {
        "still": still,
        "kls": kls,
        "same": [
            np.array_equal(array, other)
            for array, other in zip(before or (), during or (), strict=True)
        ],
        "back": all(torch.equal(weights[name], param) for name, param in trainer.params().items()),
        "moved": [
            name for name, param in trainer.params().items() if param.data_ptr() != places[name]
        ],
        "dtypes": {str(param.dtype) for param in trainer.params().values()},
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_stays_what_the_policy_was(small_vocabulary: Path, dtype: str) -> None:
    """It is in the policy's own memory while it computes, and the policy comes back to the last bit.

    The samples are of another temperature than 1, and so are the policy and the reference, whose distance is 0 at the
    start; a supervised loss is at temperature 1.
    """
    run_recipe = recipe(small_vocabulary, TrainLayout(2, 1, 2, 1), dtype=dtype)
    rollout = run_recipe.rollout.model_copy(update={"temperature": TEMPERATURE})
    run_recipe = run_recipe.model_copy(
        update={"reference": ReferenceConfig(use=True), "rollout": rollout}
    )
    first, last = run_world(run_recipe, drift)
    for rank in (first, last):
        assert all(rank["same"]) and rank["back"] and rank["moved"] == []
    assert last["same"] and first["kls"] == [None] * 3
    start, *later = last["kls"]
    assert start == pytest.approx(0.0, abs=1e-6)
    assert all(kl > 1e-3 for kl in later)
    (update,) = _step(1).updates
    tempered_T, plain_T = (
        _response_logps(small_vocabulary, temperature) for temperature in (TEMPERATURE, 1.0)
    )
    # the engine's logprob of every token is -4
    distance, nll = np.abs(tempered_T + 4.0).sum(), -plain_T.sum()
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    assert last["still"]["grpo"][DIFF] == pytest.approx(
        distance / update.loss_tokens, rel=tolerance
    )
    assert last["still"]["sft"]["loss"] == pytest.approx(nll / update.denominator, rel=tolerance)
    assert abs(np.abs(plain_T + 4.0).sum() - distance) > 0.05 * distance
    assert abs(tempered_T.sum() - plain_T.sum()) > 0.05 * nll


def _response_logps(path: Path, temperature: float) -> np.ndarray:
    """transformers' log-probability of every response token of `_step`'s samples."""
    from transformers import Qwen3MoeForCausalLM

    model, logps = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), []
    for group in _step(1).groups.values():
        for sample in group.samples:
            ids = torch.tensor(
                [[*group.prompt.token_ids, *sample.only_row.response_ids_T.tolist()]]
            )
            with torch.no_grad():
                logp_TV = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
            logps.append(logp_TV.gather(-1, ids[0, 1:, None])[-sample.num_trained :, 0].numpy())
    return np.concatenate(logps)


def onload_for(trainer: Any) -> list[int]:
    """What the process holds at first, without its gradients, and with them again, written to."""
    batches = assign(ragged(4, 200, seed=5), 0, 1, micro_batches=1)
    trainer.train_step(part(batches, 50.0), 1e-3, weighted_loss)
    held = [trainer.held_bytes()]
    trainer.offload()
    held.append(trainer.held_bytes())
    trainer.onload()
    trainer.train_step(part(batches, 50.0), 1e-3, weighted_loss)
    return [*held, trainer.held_bytes()]


def test_lending_gives_the_gradients_memory_back_to_the_machine(tmp_path: Path) -> None:
    """Of the process's resident memory, on CPU: 4 bytes for each of 16 million weights."""
    path = write_checkpoint(tmp_path, vocab_size=32_000, hidden_size=256, num_hidden_layers=1)
    ((full, lent, again),) = run_world(recipe(path, TrainLayout(1, 1, 1, 1)), onload_for)
    gradients = 2 * 32_000 * 256 * 4
    assert full - lent > 0.9 * gradients
    assert again - lent > 0.9 * gradients


def hold(trainer: Any) -> list[int]:
    """What the process holds after each step of a run; every step is of other shapes."""
    held = []
    for seed in range(STEPS):
        trainer.onload()
        trainer.train(_step(2, seed, longest=19))
        trainer.offload()
        held.append(trainer.held_bytes())
    return held


@pytest.mark.slow
@pytest.mark.nightly  # a soak
def test_memory_is_flat_over_two_hundred_steps(small_vocabulary: Path) -> None:
    """A step that kept 0.1 MB would show: 5 MB from each quarter of the steps to the next, after the first.

    Once in a while the allocator takes a piece of some MB and keeps it: between two of the quarters, not between all.
    """
    (held,) = run_world(recipe(small_vocabulary, TrainLayout(1, 1, 1, 1)), hold)
    _, *quarters = np.median(np.reshape(held, (4, -1)), axis=1)
    assert min(np.diff(quarters)) < 50e3 * STEPS / 4, held


def learn(trainer: Any) -> dict[str, Any]:
    batches = assign(ragged(10, VOCAB_SIZE, seed=5), 0, 1, micro_batches=2)
    start = trainer.token_outputs(batches)
    start_weights = {name: param.clone() for name, param in trainer.params().items()}
    norms = [
        numbers(trainer.train_step(part(batches, 50.0), 1e-5, weighted_loss)) for _ in range(12)
    ]
    matrices = {name: param for name, param in trainer.params().items() if param.ndim == 2}
    moved = [
        float((param != start_weights[name]).float().mean()) for name, param in matrices.items()
    ]
    return {
        "logprobs": start,
        "metrics": norms,
        "moved": moved,
        "dtypes": {p.dtype for p in trainer.params().values()},
    }


def test_bfloat16_over_two_stages(small_vocabulary: Path, world: list[dict[str, Any]]) -> None:
    """Steps too small for a bf16 weight add up in the optimizer's float32 copy until they show.

    A step of 1e-5 rounds to nothing at the usual size of a weight (0.15, spacing 1e-3): on its own it could move only
    the 2 % of weights near zero, but twelve of them carry one in ten over a boundary.
    """
    stages = run_world(recipe(small_vocabulary, TrainLayout(2, 1, 2, 1), dtype="bfloat16"), learn)
    assert all(stage["dtypes"] == {torch.bfloat16} for stage in stages)
    assert all(np.mean(stage["moved"]) > 0.06 for stage in stages)
    bfloat16, float32 = (
        np.concatenate(arrays) for arrays in (stages[1]["logprobs"], world[0]["logprobs"])
    )
    assert 1e-6 < np.abs(bfloat16 - float32).mean() < 0.1
    losses = [metrics["loss"] for metrics in stages[1]["metrics"]]
    assert losses[-1] < losses[0]
