from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megarl.plan import model_size
from tests import forked

Requests = Sequence[dict[str, Any]]


@pytest.fixture(scope="session", autouse=True)
def models_are_built_once() -> Iterator[None]:
    """Forks of a process that has imported Megatron build them: the import takes most of the program's time.

    test_layout_search.py also runs `megarl plan`, and with it the program itself.
    """
    known: dict[str, dict[str, Any]] = {}

    def asked(requests: Requests) -> list[dict[str, Any]]:
        names = [json.dumps(request, sort_keys=True) for request in requests]
        new = {
            name: request
            for name, request in zip(names, requests, strict=True)
            if name not in known
        }
        known.update(zip(new, _in_child(list(new.values())) if new else [], strict=True))
        return [known[name] for name in names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_size, "_asked", asked)
        yield


def _in_child(requests: Requests) -> list[dict[str, Any]]:
    process, pipe = forked.start(_build, requests)
    try:
        answers, error = pipe.recv()
    finally:
        process.kill()
        process.join()
    if error:
        raise RuntimeError(error)
    return answers


def _build(pipe: Connection, requests: Requests) -> None:
    """As the program does it."""
    import torch

    from megarl.parallel import meta  # isort: skip  (before Megatron, which the patches import)
    from megarl.cpu import megatron_patches

    gc.disable()
    try:
        megatron_patches.patch_megatron(torch.device("meta"))
        pipe.send((meta.answer_requests(requests), ""))
    except BaseException:
        pipe.send(([], traceback.format_exc()))
