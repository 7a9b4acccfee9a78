"""Tiny models with a real tokenizer and transformers' logprobs to compare with; judges that end with their test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megarl.config import RewardConfig
from megarl.isolation.sandbox import sandbox_errors
from megarl.model.tokenizer import load_tokenizer
from tests.parallel.wrapped import of_text

if TYPE_CHECKING:  # torch and SGLang are imported with the first fixture that needs them
    import torch

    from megarl.placement.engine_layout import EngineLayout
    from megarl.rollout.reward_workers.by_source import RewardWorkers
    from megarl.rollout.sglang.arguments import EngineSettings
    from megarl.rollout.sglang.engine import Engine

START_S = 120.0  # of a judge
SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
CHARACTERS = "0123456789+-*=? abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-qwen3-moe")
    write_tokenizer(folder)
    from tests.parallel import checkpoints

    return checkpoints.write(folder, "qwen3-moe")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One without a chat template."""
    folder = tmp_path_factory.mktemp("plain-tokenizer")
    write_tokenizer(folder, template=None)
    return load_tokenizer(str(folder))


_TIE = (
    4e-6  # between the scores of experts, which are some tenths; float32 rounds them by up to 1e-6
)


class Reference:
    """The same checkpoint in transformers, fp32."""

    def __init__(self, folder: Path) -> None:
        import torch

        from megarl.cpu import sglang_patches

        sglang_patches.declare_torchvision_operators()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(of_text(folder), dtype=torch.float32)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]"""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([list(token_ids)])).logits[0]

    def logprobs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Of each response token, given all before it."""
        import torch

        logits = self.logits([*prompt, *response])[len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]

    def decided_logprobs(self, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        """The same at temperature 1, NaN behind the first token whose experts rounding decides.

        Two were chosen by as much, up to _TIE: another kernel, or another CPU, may compute with other experts.
        """
        import torch

        num_chosen = self.model.config.num_experts_per_tok
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            outputs = self.model(ids, output_router_logits=True)
        scores = torch.stack([layer.view(ids.shape[1], -1) for layer in outputs.router_logits])
        best = scores.topk(num_chosen + 1, dim=-1).values
        has_tie_T = (best[..., num_chosen - 1] - best[..., num_chosen]).amin(0) < _TIE
        logp_TV = outputs.logits[0, :-1].log_softmax(-1)
        logp_T = logp_TV.gather(1, ids[0, 1:, None])[:, 0]
        logp_T[has_tie_T.cumsum(0)[:-1] > 0] = torch.nan
        return logp_T[len(prompt) - 1 :]

    def scale(self, factor: float) -> None:
        import torch

        biases = [
            buffer
            for name, buffer in self.model.named_buffers()
            if name.endswith("e_score_correction_bias")
        ]
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *biases):
                tensor.mul_(factor)


@pytest.fixture
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def loader_path() -> str:
    """The name by which SGLang's processes import the tests' own weight loader."""
    sys.path.append(str(Path(__file__).parent / "rollout" / "sglang"))
    return "engine_loader.load"


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """Kept from engine to engine: its imports are most of an engine's start."""
    from megarl.cpu import sglang_patches
    from megarl.device import DEVICE
    from megarl.rollout.sglang import scheduler

    scheduler.set_environment()
    if DEVICE == "cpu":
        sglang_patches.start_fork_server("megarl.rollout.sglang.preload")
    yield
    if DEVICE == "cpu":
        sglang_patches.stop_fork_server()


def tiny_settings(
    tp: int = 1,
    ep: int = 1,
    dp: int = 1,
    layout: EngineLayout | None = None,
    sglang: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EngineSettings:
    """The settings of an engine of a tiny model. layout: in place of tp, ep and dp."""
    from megarl.config import EngineConfig
    from megarl.placement.engine_layout import EngineLayout
    from megarl.rollout.sglang.arguments import EngineSettings

    defaults = {"dtype": "float32", "seed": 3, "context_tokens": 512, "concurrency": 256}
    return EngineSettings(
        layout=layout or EngineLayout(1, tp, ep, dp),
        engine=EngineConfig(sglang=dict(sglang or {})),
        **(defaults | settings),
    )


@pytest.fixture(scope="session")
def build_engine(checkpoint: Path, loader_path: str, fork_server: None) -> Iterator[Any]:
    from megarl.rollout.sglang.engine import Engine

    engines: list[Engine] = []

    def build(*layout: Any, **changes: Any) -> Engine:
        settings = tiny_settings(*layout, **{"model_path": str(checkpoint), **changes})
        engines.append(Engine(settings, loader_path))
        return engines[-1]

    yield build
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def odd_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "rollout" / "rewards"))


@pytest.fixture
def judges() -> Iterator[Callable[..., RewardWorkers]]:
    """Build judges of a recipe's keys; whatever a test does, none of their processes survives."""
    from megarl.rollout.reward_workers.by_source import RewardWorkers

    built: list[RewardWorkers] = []

    def build(function: str | None, **keys: Any) -> RewardWorkers:
        built.append(RewardWorkers(RewardConfig(function=function, **keys), START_S))
        return built[-1]

    yield build
    for workers in built:
        workers.shutdown()


@pytest.fixture
def isolation() -> None:
    """Or a skip that says why not."""
    for error in sandbox_errors("reward.function"):
        pytest.skip(str(error))
