"""A tiny model's rank on a device: what it computes, with its memory lent between steps, and how it is resumed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.device import DEVICE
from tests.gpu import tiny
from tests.gpu.child import ON_CPU, Child
from tests.gpu.conftest import Record
from tests.gpu.simulated.world import SETTINGS

pytestmark = pytest.mark.slow

ON_GPU = DEVICE == "cuda"
HAS_ENGINE = ON_GPU and importlib.util.find_spec("transformer_engine") is not None
STEPS = 4
# a step after a resume, where the device sums in any order: bfloat16, float32
RESUMED = 0.01 if HAS_ENGINE else 1e-5
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.fixture(  # what is on CPU seen here is that these tests work
    scope="module",
    params=[
        pytest.param("qwen3-moe", marks=() if DEVICE == "cuda" else pytest.mark.nightly),
        "deepseek-v3",
    ],
)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def reference(path: Path, family: str) -> dict[str, Any]:
    return on_cpu(path, family)


def on_cpu(path: Path, family: str) -> dict[str, Any]:
    """Logprobs and steps on the CPU in float32, nothing moved in between."""
    with rank(path, family, ON_CPU) as child:
        assert child.ask("device") == "cpu"
        before = child.ask("logprobs")
        return {
            "before": before,
            "steps": [child.ask("step") for _ in range(STEPS)],
            "after": child.ask("logprobs"),
        }


def rank(path: Path, family: str, environment: dict[str, str] | None = None, **more: Any) -> Child:
    settings = SETTINGS.get(family, {"weight_decay": 0.1})
    return Child("tests.gpu.rank:Rank", environment, folder=str(path), **settings, **more)


@pytest.mark.skipif(
    HAS_ENGINE, reason="TransformerEngine's attention takes packed rows in 16-bit types alone"
)
def test_the_device_learns_what_the_cpu_does_with_its_memory_lent_between_steps(
    path: Path, family: str, reference: dict[str, Any], record: Record
) -> None:
    """Unverified on a GPU.

    parallel/local_spec.py: without TransformerEngine: attention copies the segment bounds to the host once a layer;
    with it: the gradients of latent attention's duplicated down projections at TP > 1. To check first: the parity
    test of DeepSeek-V3.

    training/policy.py, training/auxiliary.py, training/reward_model.py: `torch.cuda.set_device` by slot; the
    critic's and the reward model's slots begin at `ranks.first_gpu`; all ranks are built before any gives its
    memory back; NCCL in `groups.join`; the local layer spec on CUDA where TransformerEngine is absent
    (`train.local_layers`). To check first: one rank a GPU.
    """
    with rank(path, family) as child:
        assert child.ask("device") == DEVICE
        before, steps = child.ask("logprobs"), []
        for _ in range(STEPS):
            steps.append(child.ask("step"))
            away = child.ask("offload")
            assert away["on_host"] and away["pinned"]
            child.ask("onload")
        after = child.ask("logprobs")
    if ON_GPU:
        assert away["after_bytes"] < away["before_bytes"]
    np.testing.assert_allclose(before, reference["before"], atol=1e-4)
    for step, other in zip(steps, reference["steps"], strict=True):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
    np.testing.assert_allclose(after, reference["after"], atol=5e-3)
    diffs = [
        np.abs(np.subtract(*pair)).max()
        for pair in ((before, reference["before"]), (after, reference["after"]))
    ]
    record("logprob gap before", diffs[0], "")
    record("logprob gap after", diffs[1], "")
    record("step", steps[-1]["seconds"], "s")
    record("offload", away["seconds"], "s")


@pytest.mark.skipif(not ON_GPU or HAS_ENGINE, reason="of Megatron's own layers on a GPU")
def test_bfloat16_stays_near_the_cpus_float32(
    path: Path, family: str, reference: dict[str, Any], record: Record
) -> None:
    check_bfloat16(path, family, reference, record)


@pytest.mark.skipif(
    not HAS_ENGINE, reason="TransformerEngine runs on a GPU, and is not on every one"
)
def test_transformer_engine_stays_near_the_cpus_float32(
    path: Path, family: str, reference: dict[str, Any], record: Record
) -> None:
    """Unverified on a GPU.

    resharding/megatron_map.py: parameter names of the TransformerEngine layer spec, for all families. Simulated: by
    these names the checkpoint is loaded, trained and saved in both families with TP2 EP2. To check first:
    `verify_params` against a built model: it names every parameter that differs.

    parallel/model.py: TransformerEngine specs of all families (latent attention, dense layers, multi-token
    prediction), grouped GEMM, RoPE fusion, optimizer state moved to the host; `select_layers` refuses float32, as
    read of TransformerEngine. Simulated: both families with TP2 EP2; DeepSeek-V3 also with TP2, CP2, PP2, TP2 EP2
    ETP2 and TP2 PP2 EP2, and in bfloat16 on one rank with the optimizer on the GPU and on the host. To check first:
    the parity test, with the same checkpoint, on one GPU against the CPU reference.

    parallel/latent.py has_fused_rope: the rotary positions of latent attention are fused where every width is a
    power of two, as read in the Triton kernels. To check first: the logprobs of DeepSeek-V3 with
    `train.megatron.apply_rope_fusion` true and false.

    cpu/megatron_patches.py step_without_engine: torch's AdamW and Megatron's own loops on the CPU of a machine that
    has TransformerEngine or apex. Simulated: the references that the simulated ranks are held against. To check
    first: the CPU reference of the test steps there.

    docs/install.md, TransformerEngine's interface: read, not run: 2.14.1 against megatron-core 0.16.1, whose extra
    names 2.9 to 2.11. To check first: a training step of each family, and a checkpoint saved and loaded, in
    bfloat16 and in fp8.
    """
    check_bfloat16(path, family, reference, record)


# on CPU seen here is that the test works
@(pytest.mark.slow if ON_GPU else pytest.mark.nightly)
@pytest.mark.parametrize("family", ["qwen3-next", "minimax-m2", "glm-5"])
def test_attention_of_other_kinds_stays_near_the_cpus_float32(
    family: str, tmp_path: Path, record: Record
) -> None:
    """Unverified on a GPU.

    parallel/model.py _specs: TransformerEngine's layer spec of gated attention and of norms whose weights are
    centred on 0, beside layers of linear attention, and the parameter names that megatron_map.py expects there
    (Qwen3-Next). To check first: `verify_params` of a built rank; then the mean gap of log-probabilities.

    parallel/wide_norm.py use_wide_norms: the norm of queries and keys over all heads in TransformerEngine's layer
    spec (MiniMax-M2). To check first: the same, and with `train.tp` 2 in tests/parallel/test_parity.py.

    parallel/sparse_attention.py use_sparse_attention: attention in torch in TransformerEngine's layer spec of latent
    attention, with frozen weights beside it (GLM-5); the indexer itself has no work in so short sequences. To check
    first: tests/parallel/test_parity.py with deepseek-v3.2 in float32, then the memory of a row of 32,768 tokens.

    parallel/delta_net.py: the delta net's projections, convolution and gated norm on CUDA, with the kernel's rule or
    torch's. To check first: the gap with and without the package flash-linear-attention.
    """
    path = tiny.write(tmp_path, family)
    check_bfloat16(path, family, on_cpu(path, family), record)


@pytest.mark.skipif(not ON_GPU, reason="an optimizer on the host is for weights on a GPU")
def test_an_optimizer_on_the_host_takes_the_same_steps(
    path: Path, family: str, record: Record
) -> None:
    """Unverified on a GPU.

    parallel/optimizer.py offloads, _moved: `train.optimizer_offload`: Megatron's HybridDeviceOptimizer in
    precision-aware mode on two streams, its masters on the host alone and not pinned; pinned host memory.
    Simulated: DeepSeek-V3 on one rank in bfloat16. To check first: device memory with and without (12 bytes an
    element of the rank's share); the step's loss equal; the time of a step, and whether pinning the masters pays.
    """
    steps = {}
    for is_on_host in (False, True):
        with rank(path, family, dtype="bfloat16", optimizer_offload=is_on_host) as child:
            steps[is_on_host] = [child.ask("step") for _ in range(STEPS)]
            record(f"a step, on the host: {is_on_host}", steps[is_on_host][-1]["seconds"], "s")
    for step, other in zip(steps[True], steps[False], strict=True):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(other[name], rel=0.02, abs=1e-3), name


ADAPTED = {"weight_decay": 0.1, "adapters": True}


@pytest.mark.skipif(
    not ON_GPU, reason="on the CPU tests/parallel/test_lora.py holds adapters against transformers"
)
def test_adapters_stay_near_the_cpus_float32(
    path: Path, reference: dict[str, Any], record: Record
) -> None:
    """Of TransformerEngine's layers where it runs: norms inside, and the experts' weights together.

    Unverified on a GPU.

    parallel/lora.py CUTS, GroupedAdapter: adapters of TransformerEngine's layers: the norm of a fused layer is
    computed once more, and each expert of a grouped layer has its own factors. Simulated: both families with TP2
    EP2. To check first: logprobs and gradient norms against the CPU; the time of a step beside one of full
    training, which shows whether weight gradients are left out.
    """
    results = {}
    for name, options in {"cpu": {"environment": ON_CPU}, "device": {"dtype": "bfloat16"}}.items():
        with Child(
            "tests.gpu.rank:Rank",
            options.pop("environment", None),
            folder=str(path),
            **ADAPTED,
            **options,
        ) as child:
            alone = child.ask("logprobs_without_adapters")
            results[name] = child.ask("logprobs"), [child.ask("step") for _ in range(STEPS)], alone
    (expected, steps, alone), (logprobs, own_steps, own_alone) = results["cpu"], results["device"]
    np.testing.assert_allclose(alone, reference["before"], atol=1e-5)
    delta = np.abs(np.subtract(expected, alone)).mean()
    diff, diff_alone = (
        np.abs(np.subtract(*pair)).mean() for pair in ((logprobs, expected), (own_alone, alone))
    )
    record("mean logprob gap with adapters", diff, "")
    record("what the adapters change", delta, "")
    assert diff < 0.1 * delta + 2 * diff_alone
    for step, other in zip(own_steps, steps, strict=True):
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.2)


def check_bfloat16(path: Path, family: str, reference: dict[str, Any], record: Record) -> None:
    with rank(path, family, dtype="bfloat16") as child:
        diff = np.abs(np.subtract(child.ask("logprobs"), reference["before"]))
        steps = [child.ask("step") for _ in range(STEPS)]
    record("mean logprob gap", diff.mean(), "")
    assert diff.mean() < 0.1
    assert steps[0]["grad_norm"] == pytest.approx(reference["steps"][0]["grad_norm"], rel=0.2)


def test_a_rank_is_resumed_with_all_its_generators(
    path: Path, family: str, tmp_path: Path, record: Record
) -> None:
    """To the last bit as it was saved. Its next steps are the same, too, but for what the device sums in any order.

    Unverified on a GPU.

    parallel/dist_checkpoint.py: device tensors staged on the host; a fused optimizer, or one on the host, saved
    before its first step (`critic_warmup_steps`); TransformerEngine's FusedAdam and `_extra_state`; the CUDA
    generator. Simulated: saved, resumed and stepped again in each layout of `parallel/model.py`. To check first:
    exact resume on one GPU, with `optimizer_offload` too; a host's memory while a checkpoint is written, against
    `megarl plan`.
    """
    folder = tmp_path / "saved"
    folder.mkdir()
    with rank(path, family, REPEATABLE, deterministic=True) as child:
        child.ask("step")
        child.ask("draws")
        child.ask("save", folder=str(folder))
        saved = child.ask("digest"), child.ask("draws")
        steps = [child.ask("step") for _ in range(2)]
    with rank(path, family, REPEATABLE, deterministic=True) as child:
        child.ask("load", folder=str(folder))
        assert (child.ask("digest"), child.ask("draws")) == saved
        resumed = [child.ask("step") for _ in range(2)]
    pairs = [
        (step[name], again[name])
        for step, again in zip(steps, resumed, strict=True)
        for name in ("loss", "grad_norm")
    ]
    is_exact = all(value == again for value, again in pairs)
    record("the next steps are exact", is_exact, "")
    assert is_exact or ON_GPU
    for value, again in pairs:
        assert value == pytest.approx(again, rel=RESUMED)


def test_a_rank_that_has_not_stepped_is_saved(path: Path, family: str, tmp_path: Path) -> None:
    """Its optimizer has no state yet."""
    folder = tmp_path / "saved"
    folder.mkdir()
    with rank(path, family) as child:
        child.ask("save", folder=str(folder))
        saved = child.ask("digest")
        child.ask("step")
        child.ask("load", folder=str(folder))
        assert child.ask("digest") == saved
