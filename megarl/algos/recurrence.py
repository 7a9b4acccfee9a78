"""First-order linear recurrences from the last token to the first."""

from __future__ import annotations

import torch

_WIDTH = 32  # places of a chunk: so many steps, each on all chunks at once


def from_the_end(own_T: torch.Tensor, decay_T: torch.Tensor) -> torch.Tensor:
    """x_T with x_t = own_t + decay_t x_t+1, and nothing behind the last.

    O(T): within chunks of a few places step by step, all chunks together, noting the product of the decays to the
    chunk's end; then the same of the chunks' first places, which brings to each chunk what is behind it (Blelloch,
    "Prefix sums and their applications", 1990, section 1.4).
    """
    own_WN, decay_WN = _places_first(own_T), _places_first(decay_T)
    for place in range(_WIDTH - 2, -1, -1):
        own_WN[place].addcmul_(decay_WN[place], own_WN[place + 1])
        decay_WN[place].mul_(decay_WN[place + 1])
    if own_WN.shape[1] > 1:
        first_N = from_the_end(own_WN[0], decay_WN[0])
        own_WN[:, :-1].addcmul_(decay_WN[:, :-1], first_N[1:])
    return own_WN.t().reshape(-1)[: len(own_T)]


def _places_first(values_T: torch.Tensor) -> torch.Tensor:
    """A copy [places of a chunk, chunks], the last chunk filled with 0: neighbours in memory are done in one step."""
    missing = -len(values_T) % _WIDTH
    whole_T = torch.nn.functional.pad(values_T, (0, missing)) if missing else values_T
    return whole_T.view(-1, _WIDTH).t().clone(memory_format=torch.contiguous_format)
