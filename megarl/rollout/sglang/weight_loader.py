"""SGLang's custom weight loader: the scheduler process of an engine as a member of every exchange and copy of a run.

Frozen weights that are published in fp8 tiles come from the checkpoint's files instead: what training has of them is
dequantised, and to quantise it again would move the scales.
"""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.checkpoints.hf_import import load_hf
from megarl.model.families import family_of
from megarl.placement.expert_places import Places
from megarl.resharding import engine_model, sglang_map
from megarl.resharding.exchanges import Exchanges
from megarl.resharding.memory_handles import map_params
from megarl.resharding.peer_copy import TARGET, CopyMember, PeerCopy
from megarl.resharding.session import Session
from megarl.resharding.shards import first_of
from megarl.resharding.verify import VerifyError, VerifyMode
from megarl.rollout.sglang import expert_maps
from megarl.timeline.recorder import spanned
from megarl.types.tensors import ModelChunks

_exchanges: dict[str, Exchanges] = {}  # of this process, by run id
# of this process, by run id and attempt: the models for which SGLang has called `load` up to now
_loaded: defaultdict[tuple[str, int], list[torch.nn.Module]] = defaultdict(list)
# of this process: the versions that were begun since the last one that was written whole
_begun: list[int] = []


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: runs in each scheduler process and writes into the model's own parameters.

    With drafts SGLang calls it twice in one update, for the target model and then for the draft model
    (managers/scheduler_components/weight_updater.py); the second call writes and verifies both in one exchange.
    named_tensors is [("session", uint8 tensor of UTF-8 JSON)], the JSON being `Sessions.engine_message` or the
    target's message of `copy_messages`.
    """
    ((_, encoded),) = named_tensors
    message = json.loads(encoded.cpu().numpy().tobytes())
    models = _loaded[message["run_id"], message["attempt"]]
    models.append(model)
    if len(models) == message["models"]:
        _loaded.clear()  # with what earlier attempts have left
        _begun.append(message["version"])
        if "copy" in message:
            _receive(message, models)
        else:
            _exchange(message, models)
        _begun.clear()


def send(models: ModelChunks, message: Mapping[str, Any], version: int) -> None:
    """Send this rank's weights to a new engine; collective with that, and run between two batches of this one.

    models: as SGLang calls `load` for them. message: a source's of `copy_messages`. version: of these weights. Raises
    as `CopyMember.run`; nothing is changed here.
    """
    error = _layout_error(engine_model.joined(models), models)
    if _begun:
        error = RuntimeError(f"the engine has half-written weights of version {_begun[-1]}")
    # SGLang's KV cache leaves room for one communicator; the next exchange makes a new one
    for exchanges in _exchanges.values():
        exchanges.close()
    copy = PeerCopy.from_json(message["copy"])
    member = CopyMember(copy, message["member"], dist.get_rank())
    member.run(engine_model.copied(models), version, error)


def _receive(message: Mapping[str, Any], models: ModelChunks) -> None:
    """Take the weights of other engines as the target of a copy."""
    copy = PeerCopy.from_json(message["copy"])
    whole = engine_model.joined(models)
    member = CopyMember(copy, TARGET, dist.get_rank())
    places = places_of(message)
    error = _layout_error(whole, models) or expert_maps.error(models[0], places)
    member.run(engine_model.copied(models), message["version"], error)
    _finish(whole, models, copy.verify, places)


def places_of(message: Mapping[str, Any]) -> Places | None:
    """Where a message says that the engine's experts are from now on; None: as numbered, for the whole run."""
    places = message.get("places")
    return tuple(map(tuple, places)) if places else None


def forget_ranks() -> None:
    """End the exchanges with training ranks that are gone, and unmap their parameters; this engine's weights stay."""
    for exchanges in _exchanges.values():
        exchanges.close()
    _exchanges.clear()
    # a member is in cycles with its plan
    gc.collect()


def _layout_error(whole: torch.nn.Module, models: ModelChunks) -> Exception | None:
    """The reason why the weights of these models are not known to be all that they compute with; else None."""
    return engine_model.unknown_layout(whole) or engine_model.draft_error(models)


def _exchange(message: Mapping[str, Any], models: ModelChunks) -> None:
    """Carry out the steps of a reshard in this process. models: the target model, then its draft if there is one."""
    run_id = message["run_id"]
    version = message["version"]
    attempt = message["attempt"]
    if "sessions" in message:
        if run_id in _exchanges:  # whose handles are no longer valid
            _exchanges[run_id].close()
        session = Session.from_json(message["sessions"][str(dist.get_rank())])
        # the parameters of the training rank on the same GPU, if there is one
        params = map_params(session.source) if session.source else {}
        _exchanges[run_id] = Exchanges(session, params)
    exchanges = _exchanges[run_id]
    whole = engine_model.joined(models)
    places = places_of(message)
    unread: Exception | None = None  # why this rank lacks the weights that it reads itself
    for step in message["steps"]:
        if step == "factors":
            exchanges.of(step).run(
                version, attempt, engine_model.adapter_slots(models[0]), error=unread
            )
            continue
        error = _layout_error(whole, models)
        error = error or expert_maps.error(models[0], places)
        finish = partial(_finish, whole, models, exchanges.session.verify, places)
        if step == "read":
            unread = error or _error_of_reading(whole, exchanges.session, finish)
            continue
        member = exchanges.of(step)
        member.place(places)
        member.run(
            version,
            attempt,
            engine_model.params(whole),
            error=error,
            finish=finish,
        )
    if unread:
        raise unread


def _error_of_reading(
    whole: torch.nn.Module, session: Session, finish: Callable[[], None]
) -> Exception | None:
    """Take this rank's weights from the checkpoint; returns why it cannot, for the exchange that all members await."""
    at = session.engine.member(session.member)
    assert at and session.fp8_checkpoint
    try:
        shards = sglang_map.shards(session.shape, session.engine, at[1])
        wrapper = family_of(session.shape).wrapper
        load_hf(session.fp8_checkpoint, shards, engine_model.params(whole), wrapper=wrapper)
        finish()
    except Exception as error:
        return error
    return None


@spanned("derived weights")
def _finish(
    whole: torch.nn.Module, models: ModelChunks, verify: VerifyMode, places: Places | None
) -> None:
    """Write what the engine derives from its weights, and where its experts are. whole: of all its models."""
    if places:
        expert_maps.write(models[0], places)
    engine_model.write_constants(whole)
    for model in models:
        engine_model.refresh_derived(model)
    if verify == "off":
        return
    if errors := engine_model.constant_errors(whole) + engine_model.derived_errors(whole):
        raise VerifyError(first_of(errors))
