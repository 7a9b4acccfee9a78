"""Critic and reward model: values of every token equal transformers', and every layout learns what one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.device import Address
from megarl.placement.train_layout import TrainLayout
from megarl.training.calls import ScoreCall
from megarl.types import Prompt, SampleGroup
from tests.parallel.checkpoints import write, write_classifier
from tests.parallel.gradients import (
    LINEAR,
    LR,
    VOCAB_SIZE,
    check_learning,
    recorded,
    uneven_part,
    whole,
)
from tests.parallel.test_parity import own_arrays
from tests.parallel.worlds import assign, numbers, ragged, recipe, role_of, run_ranks
from tests.samples.responses import response

pytestmark = pytest.mark.slow

ONE_RANK = TrainLayout(1, 1, 1, 1)
FAMILIES = ("qwen3-moe", "deepseek-v3", "qwen3-next")
CASES = [
    ("qwen3-moe", TrainLayout(4, 1, 2, 1, cp=2, vpp=2)),
    ("deepseek-v3", TrainLayout(2, 1, 1, 1)),
    ("deepseek-v3", TrainLayout(4, 2, 2, 2)),
    ("qwen3-moe", TrainLayout(4, 1, 1, 2, max_cp=4)),
    ("qwen3-next", TrainLayout(2, 1, 2, 1)),
]
STEPS = 2
Scored = Any  # (a path, what one rank makes of it)


def learn(rank: int, meet: Address, made: Any, takes_turns: bool, count: int) -> dict[str, Any]:
    """Values, then steps on uneven micro-batches, giving the memory back between them if it is shared."""
    from megarl.training.auxiliary import AuxiliaryRank

    critic: Any = AuxiliaryRank(rank, role_of(made, "critic", has_scores=True), meet, "values")
    part = uneven_part(critic)
    metrics, (values,) = [], critic.values_of([part.micro_batches])
    with recorded(critic) as learning:
        for _ in range(count):
            if takes_turns:
                critic.offload()
                assert not any(
                    param.untyped_storage().nbytes() for param in critic.params().values()
                )
                critic.onload()
            metrics.append(numbers(critic.train_step(part.micro_batches, values, part.norms, LR)))
    return {"values": values.values, "metrics": metrics, "learning": learning}


def world(
    path: Path, layout: TrainLayout, takes_turns: bool = False, count: int = STEPS
) -> list[dict[str, Any]]:
    run_recipe = recipe(path, layout, weight_decay=0.1, aux_loss=0.02)
    return run_ranks(layout.world_size, learn, run_recipe, takes_turns, count)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scored]:
    by_family = {}
    for family in FAMILIES:
        keys: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": None, "num_labels": 1}
        folder = tmp_path_factory.mktemp(family)
        path = write(folder, family, head="ForSequenceClassification", **keys)
        by_family[family] = path, world(path, ONE_RANK)[0]
    return by_family


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_transformers(one_rank: dict[str, Scored], family: str) -> None:
    from transformers import AutoModelForSequenceClassification

    path, result = one_rank[family]
    model: Any = AutoModelForSequenceClassification.from_pretrained(path)
    in_order = [
        sequence
        for batch in assign(ragged(14, VOCAB_SIZE, seed=3), 0, 1, micro_batches=4)
        for sequence in batch
    ]
    for sequence, value_T in zip(in_order, result["values"], strict=True):
        with torch.no_grad():
            hidden = model.model(torch.from_numpy(sequence.token_ids_T)[None]).last_hidden_state
            expected_T = model.score(hidden)[0, :, 0].numpy()
        np.testing.assert_allclose(value_T[1:], expected_T[:-1], atol=2e-4)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_layout_learns_what_one_rank_does(
    one_rank: dict[str, Scored], family: str, layout: TrainLayout
) -> None:
    path, expected = one_rank[family]
    ranks = world(path, layout, takes_turns=True)
    for rank, result in enumerate(ranks):
        at = layout.coords(rank)
        is_last = at.pp == layout.pp - 1
        assert (result["values"] is None) == (not is_last)
        values = own_arrays(expected["values"], layout, at.dp) if is_last else ()
        for value_T, expected_T in zip(result["values"] or (), values, strict=True):
            np.testing.assert_allclose(value_T, expected_T, atol=1e-4)
        for metrics, reference in zip(result["metrics"], expected["metrics"], strict=True):
            assert (metrics.keys() == reference.keys()) == is_last
            assert metrics == pytest.approx({key: reference[key] for key in metrics}, rel=1e-4)
    check_learning(
        [rank["learning"] for rank in ranks],
        [expected["learning"]],
        rounding=LINEAR if family == "qwen3-next" else 1.0,
    )


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3.5-moe"])
def test_a_language_models_critic_begins_with_0_and_learns(tmp_path: Path, family: str) -> None:
    """Its multi-token prediction layers have no part in it, and neither has a vision tower."""
    path = write(tmp_path, family, mtp_layers=1, vocab_size=VOCAB_SIZE, pad_token_id=None)
    (rank,) = world(path, ONE_RANK, count=3)
    assert all(not value_T.any() for value_T in rank["values"])
    weights = whole([rank["learning"]]).after
    assert (
        weights
        and weights["score.weight"].any()
        and not any("layers.4." in name or "mtp." in name for name in weights)
    )
    losses = [metrics["loss"] for metrics in rank["metrics"]]
    assert losses[0] > losses[1] > losses[2]


def conversations() -> list[SampleGroup]:
    """Groups of one to three responses, of other lengths each."""

    def group(number: int) -> SampleGroup:
        question, count = f"{100 + 37 * number}+{number}=", 1 + number % 3
        samples = tuple(
            response((1,), np.zeros(1, np.int64), text="12345"[: 1 + (number + index) % 5])
            for index in range(count)
        )
        prompt = Prompt(str(number), question, (1,), "1", messages=question)
        return SampleGroup(prompt, samples, np.zeros(count, np.float32), np.zeros(count, np.bool_))

    return [group(number) for number in range(5)]


def scores_of(model: Any, path: Path) -> list[list[float]]:
    """transformers' scores of the conversations, by the chat template of the tokenizer in `path`."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    scores = []
    for group in conversations():
        chats = [
            [
                {"role": "user", "content": group.prompt.text},
                {"role": "assistant", "content": sample.text},
            ]
            for sample in group.samples
        ]
        rows = tokenizer.apply_chat_template(chats, tokenize=True, return_dict=False)
        with torch.no_grad():
            scores.append([float(model(torch.tensor([row])).logits[0, 0]) for row in rows])
    return scores


def score(rank: int, meet: Address, made: Any) -> Any:
    from megarl.training.reward_model import RewardModelRank

    reward_model: Any = RewardModelRank(rank, role_of(made, "reward_model", has_scores=True), meet)
    layout = reward_model.layout
    at = layout.coords(rank)
    scores = reward_model.score(ScoreCall(conversations()[at.dp :: layout.dp]))
    reward_model.offload()
    reward_model.onload()
    again = reward_model.score(ScoreCall(conversations()[at.dp :: layout.dp]))
    if at.pp < layout.pp - 1:
        assert scores is again is None
        return None
    assert all(np.array_equal(array, other) for array, other in zip(scores, again, strict=True))
    return at.dp, scores


@pytest.fixture(scope="module")
def classifier(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The quickstart's model with one score, in its own tokenizer's words."""
    folder = tmp_path_factory.mktemp("classifier")
    return folder, write_classifier(tiny_model, folder)


@pytest.mark.parametrize(
    "layout",
    [TrainLayout(4, 2, 1, 2), TrainLayout(4, 1, 2, 1, vpp=2)],
    ids=["tp2 ep2", "vpp2 dp2"],
)
def test_scores_are_those_of_transformers(
    classifier: tuple[Path, Any], layout: TrainLayout
) -> None:
    """The last token's, of a chat by the model's own template; ranks have unequal numbers of groups."""
    path, model = classifier
    run_recipe = recipe(path, layout, tokens_per_micro_batch=40)
    scores_by_dp = dict(filter(None, run_ranks(layout.world_size, score, run_recipe)))
    for index, expected in enumerate(scores_of(model, path)):
        np.testing.assert_allclose(
            scores_by_dp[index % layout.dp][index // layout.dp], expected, atol=1e-4
        )
