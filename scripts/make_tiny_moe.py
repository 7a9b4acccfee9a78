"""Write the quickstart's model: a small Qwen3-MoE with random weights, as an ordinary Hugging Face folder.

The tokenizer is real and reads one character a token: all printable ASCII, with a chat template. Nothing is downloaded.
With --tools its template knows tools and their calls, and what surrounds the arguments of a call is a few tokens.
"""

from __future__ import annotations

import argparse
import re
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

TOOL_SPECIAL = ["<tools>", "<tool>", "<tool_call>", "</tool_call>"]
# Of a call of megarl.environments.calculator; other calls are read and written with more tokens.
PIECES = ['{"name": "', '", "arguments": {"', '": "', '"}}', "calculate", "expression"]
# Each message ends with a stop token. Of the tools the prompt has the names alone: a schema has hundreds of characters.
# Calls are written as Hermes 2 Pro writes them.
TOOLS_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<tools>{{ tools | map(attribute='function.name') | join(' ') }}{{ eos_token }}{% endif %}"
    "{% for message in messages %}<{{ message.role if message.role in ('assistant', 'tool') else 'user' }}>"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(*, tools: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, and with tools one for each of PIECES; what is not printable ASCII becomes <unk>."""
    special, pieces = [*SPECIAL, *(TOOL_SPECIAL if tools else ())], PIECES if tools else []
    vocabulary = {token: id for id, token in enumerate([*special, *CHARACTERS, *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    token = Regex("|".join([*map(re.escape, pieces), r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(token, "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special[SPECIAL.index("<user>") :],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=TOOLS_TEMPLATE if tools else CHAT_TEMPLATE,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, head_length: float
) -> Qwen3MoeForCausalLM:
    """4 layers, 8 experts of which a token takes 2, grouped-query attention, normed queries and keys: 0.5M.

    head_length: of the rows of the output layer. Adapters leave it and the final norm as they are, so that hidden
    states keep a length of 8 and no logit is beyond 8 * head_length; with the 0.02 of transformers it would be 1.3.
    """
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
    torch.nn.init.normal_(model.lm_head.weight, std=head_length * config.hidden_size**-0.5)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("models/tiny-qwen3-moe"), help="folder of the checkpoint"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tools", action="store_true", help="with a tokenizer and a chat template that know tools"
    )
    args = parser.parse_args()
    tokenizer = make_tokenizer(tools=args.tools)
    # as their recipes' rates want it
    model = make_model(tokenizer, args.seed, head_length=1.0 if args.tools else 2.0)
    # renamed at the end: the folder is whole or absent
    draft = args.out.with_name(f"{args.out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    shutil.rmtree(args.out, ignore_errors=True)
    draft.rename(args.out)
    print(
        f"{args.out}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens"
    )


if __name__ == "__main__":
    main()
