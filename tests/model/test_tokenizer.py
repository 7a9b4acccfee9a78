"""A tokenizer is loaded without the imports that no tokenizer needs, and transformers works as before afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_tokenizer_needs_no_model(tiny_model: Path) -> None:
    """Models and torch._dynamo are most of the seconds; a model that is built afterwards still generates."""
    program = f"""
import sys
from megarl.model.tokenizer import load_tokenizer
ours = load_tokenizer({str(tiny_model)!r})
print(sorted({{"torch._dynamo", "accelerate", "transformers.modeling_utils"}} & {{*sys.modules}}))
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel
theirs = AutoTokenizer.from_pretrained({str(tiny_model)!r})
text = "12+3=15"
print(type(ours) is type(theirs), ours(text) == theirs(text), ours.all_special_ids == theirs.all_special_ids)
model = AutoModelForCausalLM.from_pretrained({str(tiny_model)!r})
print(isinstance(model, GenerationMixin), hasattr(GenerationMixin, "generate"))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "True True True", "True True"], done.stderr
