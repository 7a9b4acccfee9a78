"""Whether a server's answer to a request is a response, before a sample is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.rollout.external.client import ServerFault


def refuse_odd(answer: Mapping[str, Any], most_new: int, vocab_size: int) -> None:
    """Raises ServerFault for anything but 1 to most_new tokens, each with its log-probability, and their versions.

    A log-probability that is not finite is null, and judged elsewhere.
    """
    try:
        meta = answer["meta_info"]
        ends_as = meta["finish_reason"]["type"]
        token_ids = [*answer["output_ids"]]
        entries = [(logprob, token) for logprob, token, *_ in meta["output_token_logprobs"]]
        versions = [span["version"] for span in meta["weight_versions"]]
    except (KeyError, TypeError, ValueError):
        raise ServerFault("answers /generate without tokens and their versions") from None
    if ends_as == "abort":
        raise ServerFault("has aborted a request")
    are_tokens = all(type(token) is int and 0 <= token < vocab_size for token in token_ids)
    are_numbers = all(logprob is None or type(logprob) in (int, float) for logprob, _ in entries)
    if not (are_tokens and are_numbers and versions and 1 <= len(token_ids) <= most_new):
        raise ServerFault(f"answers /generate with something else than 1 to {most_new} tokens")
    if [token for _, token in entries] != token_ids:
        raise ServerFault("answers /generate with log-probabilities of other tokens")
