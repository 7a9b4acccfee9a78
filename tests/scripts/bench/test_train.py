"""The training bench: one run compares equal steps and prints its figures."""

from __future__ import annotations

import pytest

from scripts.bench.train import main
from tests.scripts.bench.benches import figures, refusal


@pytest.mark.slow
@pytest.mark.nightly  # a bench, of parts that other tests run by day
def test_a_run_on_two_ranks() -> None:
    """The script itself fails where a step's loss or gradient norm is not the bare loop's.

    Unverified on a GPU.

    scripts/bench/train.py: both contenders with TransformerEngine, and MFU. To check first: the ratio on a GPU.
    """
    small = "--steps 2 --samples 6 --longest 64 --layers 2"
    row = figures("train", f"{small} --gpus 2 --ep 2")
    assert row["megarl_tokens_per_s"] > 0 and row["ratio"] > 0
    assert row["tokens"] > 6 * 8 - 1
    assert row["flops"] > 0
    shorter = figures("train", f"{small} --old-logprobs train --updates 2")
    assert shorter["whole_pass_tokens_per_s"] > 0
    by_length = figures("train", f"{small} --gpus 4 --cp-auto --budget 16")
    assert by_length["fixed_cp_tokens_per_s"] > 0
    uncompared = figures("train", f"{small} --gpus 2 --without comparison")
    assert uncompared["without_comparison_tokens_per_s"] > 0
    again = figures("train", f"{small} --pp 2 --gpus 2 train.recompute.layer=1")
    assert again["without_keys_tokens_per_s"] > 0


@pytest.mark.parametrize("other", ["--without guard", "--old-logprobs train", "--cp-auto"])
def test_two_comparisons_at_once_are_refused(
    other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", *other.split(), "train.recompute.layer=1"])
    with pytest.raises(SystemExit, match="2"):
        main()
    problem = f"argument keys: not allowed with argument {other.split()[0]}"
    assert capsys.readouterr().err.endswith(f"{problem}\n")


@pytest.mark.slow
def test_keys_of_the_layout_are_refused() -> None:
    assert "the keys change the layout" in refusal("train", "--gpus 2 train.tp=2")
