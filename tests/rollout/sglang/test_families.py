"""Every family in a real SGLang engine: its logprobs, its parameters against the map, its derived tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.models import RopeScalingConfig
from megarl.model.families import without_tower
from megarl.model.hf_config import model_shape
from megarl.numerics import operations
from megarl.numerics.differences import compare, first_difference
from megarl.numerics.parts import StoredPart, read_parts
from megarl.placement.engine_layout import EngineLayout
from megarl.rollout.engine_settings import engine_settings
from megarl.rollout.sglang.engine import Engine, EngineError
from megarl.types.sampling import Sampling
from tests.parallel import checkpoints
from tests.parallel.checkpoints import SHORT, YARN
from tests.parallel.test_layer_outputs import ONE_RANK, recorded, sequences
from tests.parallel.worlds import recipe
from tests.rollout.sglang.test_engine import TOLERANCE, diffs, sample_all, worst_diff
from tests.tiny_engines import Reference, write_tokenizer

pytestmark = pytest.mark.slow

CASES = {
    "deepseek-v3 tp2 ep2 dp2, whole": (
        "deepseek-v3",
        EngineLayout(1, 2, 2, dp=2, whole_dense=True, whole_shared=True, group_head=True),
    ),
    "deepseek-v3 tp2": ("deepseek-v3", EngineLayout(1, 2, 1)),
    "qwen3-moe tp2 dp2": (
        "qwen3-moe",
        EngineLayout(1, 2, 1, dp=2, whole_dense=True, group_head=True),
    ),
    "moonlight tp2": ("moonlight", EngineLayout(1, 2, 1)),
    "kimi-k25 tp2": ("kimi-k25", EngineLayout(1, 2, 1)),
    "glm4-moe-lite tp2": ("glm4-moe-lite", EngineLayout(1, 2, 1)),
    "glm4-moe tp2": ("glm4-moe", EngineLayout(1, 2, 1)),
    "minimax-m2 tp2": ("minimax-m2", EngineLayout(1, 2, 1)),
    "hy-v3 tp2": ("hy-v3", EngineLayout(1, 2, 1)),
    "mixtral tp2 ep2": ("mixtral", EngineLayout(1, 2, 2)),
    "qwen2-moe tp2": ("qwen2-moe", EngineLayout(1, 2, 1)),
    "qwen3-next tp2": ("qwen3-next", EngineLayout(1, 2, 1)),
    "qwen3.5-moe tp2": ("qwen3.5-moe", EngineLayout(1, 2, 1)),
    "qwen3, tied, tp2": ("qwen3", EngineLayout(1, 2, 1)),
    "qwen2 tp2": ("qwen2", EngineLayout(1, 2, 1)),
    "llama tp1": ("llama", EngineLayout(1, 1, 1)),
}

LINEAR_PLANTED = ("layers.2.linear_attn.out_proj.weight", operations.ATTENTION, 2)
PLANTED = [
    ("layers.1.post_attention_layernorm.weight", operations.MLP_NORM, 1),
    ("layers.2.self_attn.o_proj.weight", operations.ATTENTION, 2),
    ("layers.3.{mlp}.gate.weight", operations.ROUTER_LOGITS, 3),
]


class Served:
    """One engine with the checkpoint it serves."""

    def __init__(self, case: str, folder: Path, build_engine: Callable[..., Engine]) -> None:
        family, self.layout = CASES[case]
        self.folder = folder
        self.reference = Reference(
            checkpoints.write(folder, family, mtp_layers=int(family == "deepseek-v3"))
        )
        self.shape = model_shape(folder)
        self.mlp = "block_sparse_moe" if family in ("mixtral", "minimax-m2") else "mlp"
        write_tokenizer(folder)
        self.engine = build_engine(
            layout=self.layout,
            model_path=str(folder),
            config_values=without_tower(self.shape),
        )

    def reshard(self, **message: Any) -> None:
        asyncio.run(self.engine.reshard(message, self.engine.version + 1))

    def diff(self, num_samples: int = 4) -> float:
        """The largest |engine - transformers| over all sampled tokens of all prompts."""

        groups = asyncio.run(sample_all(self.engine, Sampling(num_samples, 8)))
        return worst_diff(groups, self.reference)


# what they have is in the other cases, too: HY-V3 has the layers of GLM-4.5, in a class that needs no patch on a CPU,
# Kimi-K2.5 those of DeepSeek-V3, and SGLang's Qwen3 is its Qwen2 with norms, whose biases Qwen2-MoE has
BY_NIGHT = {"glm4-moe-lite tp2", "mixtral tp2 ep2", "hy-v3 tp2", "deepseek-v3 tp2", "qwen2 tp2"}
# whose layers are DeepSeek-V3's or Qwen3's, with the same names in SGLang's modules
ALIKE = {"moonlight tp2", "qwen2 tp2", "llama tp1"}
BY_CASE = {
    case: pytest.param(case, marks=[pytest.mark.nightly] * (case in BY_NIGHT)) for case in CASES
}
WITH_LAYERS = [param for case, param in BY_CASE.items() if case not in ALIKE]


@pytest.fixture(scope="module", params=BY_CASE.values())
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    build_engine: Callable[..., Engine],
) -> Iterator[Served]:
    serving = Served(request.param, tmp_path_factory.mktemp("model"), build_engine)
    yield serving
    serving.engine.shutdown()


def test_logprobs_beyond_the_length_of_pretraining(
    tmp_path: Path, build_engine: Callable[..., Engine]
) -> None:
    """The recipe's scaling reaches the engine; transformers reads it from the config.json that exports have."""
    path = checkpoints.write(tmp_path / "short", "qwen3-moe", max_position_embeddings=SHORT)
    write_tokenizer(path)
    made = recipe(path, ONE_RANK)
    model = made.model.model_copy(update={"rope_scaling": RopeScalingConfig(**YARN)})
    settings = engine_settings(made.model_copy(update={"model": model}), 0)
    assert settings.model_context == 4 * SHORT
    engine = build_engine(
        layout=EngineLayout(1, 1, 1),
        model_path=str(path),
        context_tokens=4 * SHORT,
        model_context=settings.model_context,
        config_values=settings.config_values,
    )
    prompt = [3, *range(5, 44), *range(5, 44)]
    group = asyncio.run(engine.generate(prompt, Sampling(4, 16)))
    engine.shutdown()
    scaled = Reference(checkpoints.rescaled(path, tmp_path / "long", YARN))
    assert diffs(group, scaled, prompt, 1.0).max() < TOLERANCE
    assert diffs(group, Reference(path), prompt, 1.0).max() > 100 * TOLERANCE


def test_the_layout_is_one_that_is_accepted(served: Served) -> None:
    assert (
        served.layout.errors(served.shape, served.layout.tp)
        + served.layout.cpu_errors(served.shape)
        == []
    )


def test_logprobs_are_those_of_transformers(served: Served) -> None:
    assert served.diff() < TOLERANCE
    assert served.diff(num_samples=1) < TOLERANCE, (
        "with DP attention a group may have nothing to do"
    )


@pytest.mark.parametrize("served", WITH_LAYERS, indirect=True)
def test_the_layers_give_what_those_of_a_training_rank_give(served: Served, tmp_path: Path) -> None:
    """And where one rank has a wrong weight the operation is named, and the rank."""
    expected = recorded(served.folder, tmp_path / "rank", ONE_RANK, {})("clean")
    differences = compare(expected, layers_of(served, tmp_path / "clean"), "float32")
    assert first_difference(differences) is None
    named = {(each.layer, each.operation) for each in differences}
    wanted = {
        (part.layer, part.operation) for part in expected if part.operation in operations.ORDER
    }
    # its log-probabilities are answers; with DP attention a rank has experts' sums of all groups
    left_out = {operations.LOGPROBS, *({operations.EXPERTS} if served.layout.dp > 1 else ())}
    assert {operation for _, operation in wanted - named} == left_out
    if served.layout.dp > 1:  # which of the groups computes a sequence is SGLang's choice
        return
    last = served.layout.tp - 1
    planted = PLANTED
    if served.shape.delta:
        planted = [PLANTED[0], LINEAR_PLANTED, PLANTED[2]]
    for number, (weight, operation, layer) in enumerate(planted):
        if operation == operations.ROUTER_LOGITS and not served.shape.num_experts:
            continue
        weight = weight.format(mlp=served.mlp)
        served.reshard(plant=[weight, last, 2.0])
        found = first_difference(
            compare(expected, layers_of(served, tmp_path / str(number)), "float32")
        )
        served.reshard(plant=[weight, last, 0.5])
        assert found and (found.layer, found.operation) == (layer, operation)
        if operation == operations.ATTENTION:  # a sum over the ranks
            assert found.ranks[1] == (last,)
        else:  # what every rank has
            assert found.deviating[1] == ((last,) if last else ())


def test_the_map_describes_the_parameters(served: Served) -> None:
    served.reshard(shape=asdict(served.shape), engine=asdict(served.layout))
    other = replace(served.shape, hidden_size=served.shape.hidden_size + 1)
    with pytest.raises(EngineError, match="the map needs"):
        served.reshard(shape=asdict(other), engine=asdict(served.layout))


def layers_of(served: Served, folder: Path) -> list[StoredPart]:
    folder.mkdir()
    tokens = [token_ids_T.tolist() for token_ids_T in sequences()]
    logprobs = asyncio.run(served.engine.record_layers(folder, tokens, served.layout.tp))
    assert [len(of_sequence) + 1 for of_sequence in logprobs] == [*map(len, tokens)]
    return [part for file in sorted(folder.iterdir()) for part in read_parts(file)]


def test_written_parameters_are_used_in_every_form(served: Served) -> None:
    """Latent attention multiplies with tensors that are derived from a parameter: those of the old one are refused."""
    if served.shape.mla:
        with pytest.raises(
            EngineError, match=r"self_attn\.w_kc differs from its kv_b_proj\.weight"
        ):
            served.reshard(scale=1.05, refresh=False)
    else:
        served.reshard(scale=1.05)
    served.reshard()
    assert served.diff() > 10 * TOLERANCE
    served.reference.scale(1.05)
    assert served.diff() < TOLERANCE
