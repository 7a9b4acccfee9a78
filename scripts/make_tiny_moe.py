"""Write the quickstart's model: a small Qwen3-MoE with random weights, as an ordinary Hugging Face folder.

The tokenizer is real and reads one character a token: all printable ASCII, with a chat template. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = string.Template(
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}$assistant{{ message['content'] }}{{ eos_token }}"
    "{% else %}$user{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}$assistant{% endif %}"
).substitute(user="<user>", assistant="<assistant>")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; what is not printable ASCII becomes <unk>."""
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3MoeForCausalLM:
    """4 layers, 8 experts of which a token takes 2, grouped-query attention, normed queries and keys: 0.5M."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # type: ignore[call-arg]
        max_position_embeddings=512,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    # With transformers' 0.02 no logit is beyond about 1, and adapters, which leave the head as it is, could not help.
    torch.nn.init.normal_(model.lm_head.weight, std=config.hidden_size**-0.5)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/tiny-qwen3-moe"), help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    draft = args.out.with_name(f"{args.out.name}.draft")  # renamed at the end: the folder is whole or absent
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    shutil.rmtree(args.out, ignore_errors=True)
    draft.rename(args.out)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
