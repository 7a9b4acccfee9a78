"""A family of models in the tests of conversations: its chat template, its tokens, and what must come out of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Work out an expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "What to work out."},
                "digits": {"type": "integer", "description": "How many digits to give."},
            },
            "required": ["expression"],
        },
    },
}
LOOKUP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find a page.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to find."},
                "filters": {"type": "object", "description": "What to leave out."},
            },
            "required": ["query"],
        },
    },
}
TOOLS = (CALC, LOOKUP)
_CORPUS = (
    "the result of a call is 42.\n\nwhat follows?\n",
    '{"name": "calc", "arguments": {"expression": "1+2"}}\n' * 3,
)


@dataclass(frozen=True)
class Family:
    """A chat template with its tokens.

    calls: a turn with a call of calc (expression 1+2), as the model samples it, and its stop token. one, two, user: the
    text to append after a turn for the result "three", for the results "three" and "four", and for a user's "more?".
    They are None where the template cannot have them.
    """

    name: str
    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    calls: str | None
    one: str | None
    two: str | None
    user: str | None
    answer_stop: str = ""

    @property
    def last_stop(self) -> str:
        """The stop token of a turn without calls."""
        return self.answer_stop or self.stops[0]


@cache
def tokenizer_of(family: Family) -> Any:
    """A byte-level BPE tokenizer with merges, and the family's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in family.special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.stops[0], bos_token=family.special[0]
    )
    fast.chat_template = family.template
    return fast


def stop_ids(family: Family) -> frozenset[int]:
    return frozenset(tokenizer_of(family).convert_tokens_to_ids(list(family.stops)))


def stop_id(family: Family, token: str) -> int:
    return tokenizer_of(family).convert_tokens_to_ids(token)
