"""One SGLang engine: sampling with logprobs, and weight updates in place."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.device import DEVICE
from megarl.resharding.peer_copy import PeerCopy, abandon, await_target
from megarl.rollout.load_balancing import Capacity, CompletedSample
from megarl.rollout.sampling_engine import SamplingEngine
from megarl.rollout.sglang import layer_outputs
from megarl.rollout.sglang.adapter_slot import ADAPTER_NAME
from megarl.rollout.sglang.arguments import EngineSettings
from megarl.rollout.sglang.group_queue import GroupQueue
from megarl.rollout.sglang.host import EngineError, EngineLost, Host
from megarl.rollout.sglang.scheduler_spans import SchedulerSpans
from megarl.samples.expert_load import ExpertLoad
from megarl.timeline import recorder
from megarl.types import Row
from megarl.types.json_objects import JsonObject

WEIGHT_LOADER = "megarl.rollout.sglang.weight_loader.load"
# in which schedulers begin or end to record; less than the controller waits for this process's answer
_CALL_S = 20.0
# One of so many tokens counts in the load of experts: all tokens of a large model's step would take seconds.
COUNTED_EVERY = 8
# SGLang's tags of the memory that training uses in between; CUDA graphs stay
_RELEASED = ("kv_cache", "weights")


class Engine(SamplingEngine):
    """One SGLang engine, whose schedulers are child processes; it listens on no port.

    The constructor blocks until the schedulers are ready. It may be called, and the methods awaited, in any thread,
    whether or not an event loop runs there. Raises EngineError when the engine does not start.
    """

    def __init__(self, settings: EngineSettings, weight_loader: str = WEIGHT_LOADER) -> None:
        self._settings = settings
        self._weight_loader = weight_loader
        self._host = Host(settings, weight_loader)
        self._manager: Any = self._host.server.tokenizer_manager
        from transformers import AutoTokenizer  # takes seconds, while the schedulers start

        self._tokenizer = AutoTokenizer.from_pretrained(
            settings.model_path, trust_remote_code=False
        )
        self._stale: str | None = None  # the reason why the weights cannot be sampled from
        self.expert_load = ExpertLoad(every=COUNTED_EVERY)
        if not settings.load_weights:
            self._stale = "the engine has no weights: none were resharded into it yet"
        self._is_released = False  # whether the weights have no memory
        self._spans = SchedulerSpans(self._call_schedulers, self._host.spans_files())
        recorder.attach(self._spans)

    @property
    def version(self) -> int:
        """SGLang's version of the weights."""
        return int(self._manager.config_value("weight_version"))

    def pids(self) -> list[int]:
        """The scheduler processes, by tensor-parallel rank."""
        return self._host.pids()

    @property
    def exchange_still_s(self) -> float:
        """For how long all schedulers in an exchange with others have stood still; 0 outside of one."""
        return self._host.exchange_still_s

    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        """Wait until the engine has a place for a conversation, which keeps it until `complete`."""
        await self._host.run(self._manager.queue.place(conversation, prompt_tokens))

    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        """A conversation has ended: it gives its place to others, and `take_completed` tells of it."""
        queue = self._manager.queue
        await self._host.run(queue.complete(conversation, prompt_tokens, response_tokens))

    @property
    def capacity(self) -> Capacity:
        """What the engine can run at once, all of its attention groups together."""
        groups = self._settings.layout.dp
        of_group = self._host.server.group_capacity
        return Capacity(groups * of_group.sequences, groups * of_group.tokens)

    @property
    def queue(self) -> GroupQueue:
        """The requests that it has."""
        return self._manager.queue

    async def take_completed(self) -> list[CompletedSample]:
        """The samples that it has finished since the last call, as soon as there are any.

        Raises EngineError when a scheduler has died.
        """
        return await self._host.run(self._manager.queue.take_completed())

    async def reshard(self, message: Mapping[str, Any], version: int) -> None:
        """Every scheduler runs the weight loader on `message` with `version` added, then drops its KV cache.

        Raises EngineError with what a loader raised, and on which rank; the engine then refuses to generate until a
        reshard succeeds.
        """
        await self._write(message, version, "reshard")

    async def receive_copy(self, message: Mapping[str, Any], version: int) -> None:
        """As `reshard`, with the weights of other engines; message: the target's of `copy_messages`."""
        copy = PeerCopy.from_json(message["copy"])
        async with self._in_copy(copy, copy.target):
            await self._write(message, version, "copy")

    async def send_copy(self, message: Mapping[str, Any]) -> None:
        """Send the weights to another engine: every scheduler does so between two batches, whatever requests run.

        message: a source's of `copy_messages`. Returns when the target has them. Raises EngineError where the copy
        fails, by whatever member's fault; this engine then samples on.
        """
        copy = PeerCopy.from_json(message["copy"])
        async with self._in_copy(copy, copy.engines[message["member"]]):
            self._refuse_to_send()
            await asyncio.to_thread(await_target, copy)
            failure = await self._host.run(self._sglang_send(message))
            if failure is not None:
                raise EngineError(f"the copy to engine {copy.target} failed: {failure}")

    async def forget_ranks(self) -> None:
        """Every scheduler unmaps the parameters of the training rank on its GPU, which is gone, and ends its groups.

        Its own weights stay. The next reshard needs new sessions. Raises EngineError.
        """
        if failure := await self._host.run(self._sglang_call("forget_ranks", {})):
            raise EngineError(f"the weights of lost training ranks are still mapped: {failure}")

    async def record_layers(
        self, folder: Path, sequences: Sequence[Sequence[int]], num_terms: int = 1
    ) -> list[list[float]]:
        """Prefill sequences, and have every scheduler write what its layers give into a file (`layer_outputs`).

        Returns the log-probabilities of each sequence's tokens from the second on, at temperature 1. Nothing else may
        be asked of the engine meanwhile. Raises EngineError.
        """
        if self._stale is not None:
            raise EngineError(self._stale)
        parameters = {"num_terms": num_terms}
        if failure := await self._host.run(self._sglang_call("begin_layers", parameters)):
            raise EngineError(f"the outputs of layers cannot be recorded: {failure}")
        logprobs = []
        first_token = 0
        for token_ids in sequences:
            # what is in the cache would not be computed
            await self._host.run(self._sglang_idle())
            name = layer_outputs.request_name(first_token)
            logprobs.append(await self._host.run(self._sglang_prefill(token_ids, name)))
            first_token += len(token_ids)
        await self._host.run(self._sglang_idle())
        if failure := await self._host.run(
            self._sglang_call("end_layers", {"folder": str(folder)})
        ):
            raise EngineError(f"the outputs of layers cannot be written: {failure}")
        return logprobs

    async def fail(self) -> None:
        """Raises EngineLost when a scheduler has died or hangs; does not return. A failed reshard does not count."""
        await self._host.fail()

    async def release_memory(self) -> None:
        """Release the GPU memory of weights and KV cache for training; does nothing on CPU.

        It waits for running requests. Raises EngineError where they do not end within run.timeout_s.
        """
        self._is_released = True
        if DEVICE != "cpu":
            from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

            await self._host.run(self._sglang_idle())
            request = ReleaseMemoryOccupationReqInput(tags=list(_RELEASED))
            await self._host.run(self._manager.release_memory_occupation(request))

    async def resume_memory(self, tags: Sequence[str] = _RELEASED) -> None:
        """Take GPU memory again: "weights" before a reshard, "kv_cache" after it; by default both."""
        if DEVICE != "cpu":
            from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

            request = ResumeMemoryOccupationReqInput(tags=list(tags))
            await self._host.run(self._manager.resume_memory_occupation(request))
        if "weights" in tags:
            self._is_released = False

    def shutdown(self) -> None:
        """End and reap the schedulers, and remove all files; may be called again."""
        recorder.detach(self._spans)
        self._host.stop()

    async def _ask(
        self,
        input_ids: list[list[int]],
        parameters: list[JsonObject],
        rows: int,
        requests: list[str] | None = None,
    ) -> list[JsonObject]:
        ask = self._host.server.async_generate(
            input_ids=input_ids,
            sampling_params=parameters,
            return_logprob=True,
            logprob_start_len=-1,
            lora_path=ADAPTER_NAME if self._settings.adapter else None,
            return_routed_experts=self._settings.routed_experts,
            routed_experts_start_len=rows,
            rid=requests,
        )
        return await self._host.run(ask)

    @asynccontextmanager
    async def _in_copy(self, copy: PeerCopy, index: int) -> AsyncIterator[None]:
        """Check the layout before a copy, and tell its members if this engine, which is `index`, fails in it.

        Raises EngineError.
        """
        try:
            own = replace(self._settings.layout, count=1, first=0)
            if replace(copy.layout, count=1, first=0) != own:
                raise EngineError(f"the copy is of engines of {copy.layout}, this one is {own}")
            yield
        except Exception as error:
            cause = (str(error) or type(error).__name__).splitlines()[-1]
            # a store that is gone has no members that wait
            with suppress(RuntimeError):
                await asyncio.to_thread(abandon, copy, index, cause)
            if isinstance(error, EngineError):
                raise
            raise EngineError(cause) from error

    def _refuse_to_send(self) -> None:
        """Raises EngineError where the engine's weights are not whole, or their memory is released."""
        if self._stale is not None:
            raise EngineError(self._stale)
        if self._is_released:
            raise EngineError("the engine has released the memory of its weights")

    async def _write(self, message: Mapping[str, Any], version: int, what: str) -> None:
        self._stale = (
            f"the engine has half-written weights: the {what} to version {version} did not finish"
        )
        failure = await self._host.run(
            self._sglang_reshard({**message, "version": version}, str(version))
        )
        if failure is not None:
            problem = f"the {what} to version {version} failed: {failure}"
            self._stale = f"the engine has half-written weights: {problem}"
            raise EngineError(problem)
        self._stale = None

    async def _sglang_send(self, message: Mapping[str, Any]) -> str | None:
        """Have all schedulers send a copy; returns an error's text or None."""
        # again, now in the order in which the schedulers get updates and releases
        self._refuse_to_send()
        return await self._sglang_call("send_copy", {"message": json.dumps(message)})

    def _call_schedulers(self, method: str) -> str | None:
        """As `_sglang_call`, for a caller outside of the event loop; returns an error's text or None."""
        answer = self._host.run(self._shielded_call(method))
        try:
            return asyncio.run(asyncio.wait_for(answer, _CALL_S))
        except TimeoutError:
            return f"no answer within {_CALL_S:g} s"
        except EngineError as error:
            return str(error).splitlines()[-1]

    async def _shielded_call(self, method: str) -> str | None:
        # goes on where it is no longer waited for: a late answer would be taken for that of the next call
        return await asyncio.shield(self._sglang_call(method, {}))

    async def _sglang_call(self, method: str, parameters: JsonObject) -> str | None:
        """Have all schedulers call one of our own methods; returns an error's text or None."""
        from sglang.srt.managers.io_struct import RpcReqInput

        self._manager.auto_create_handle_loop()
        request = RpcReqInput(method=method, parameters=parameters)
        answers = await self._manager.send_weights_to_remote_instance_communicator(request)
        failures = [answer.message for answer in answers if not answer.success]
        return failures[0] if failures else None

    async def _sglang_prefill(self, token_ids: Sequence[int], name: str) -> list[float]:
        """The log-probabilities of a sequence's tokens from the second on; name: of the request."""
        (output,) = await self._host.server.async_generate(
            input_ids=[list(token_ids)],
            sampling_params=[{"max_new_tokens": 1, "temperature": 1.0}],
            return_logprob=True,
            logprob_start_len=0,
            lora_path=ADAPTER_NAME if self._settings.adapter else None,
            rid=[name],
        )
        return [float(logp) for logp, *_ in output["meta_info"]["input_token_logprobs"][1:]]

    async def _sglang_idle(self) -> None:
        """Return when all schedulers are idle, without a KV cache.

        A scheduler sends the last response an iteration before it counts as idle, and dies of a release in between.
        SGLang's own waiting for that would take a second: an idle scheduler sleeps so long before it looks again.
        """
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        self._manager.auto_create_handle_loop()
        timeout_s = self._settings.timeout_s
        until = time.monotonic() + timeout_s
        while not all(
            answer.success
            for answer in await self._manager.flush_cache_communicator(FlushCacheReqInput())
        ):
            if time.monotonic() > until:
                raise EngineLost(
                    f"requests still run {timeout_s:g} s (run.timeout_s) after the engine was to release its memory"
                )
            await asyncio.sleep(0.01)

    async def _sglang_reshard(self, message: Mapping[str, Any], version: str) -> str | None:
        """Update the weights; returns an error's text or None. Ends the session either way, for a later reshard."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[_named_tensors(message)] * self._settings.layout.tp,
            load_format=self._weight_loader,
            flush_cache=True,
            torch_empty_cache=True,  # otherwise torch's allocator keeps the staging buffers
            weight_version=version,
        )
        opened, opening = await self._manager.begin_weight_update(BeginWeightUpdateReqInput())
        if not opened:
            return opening
        loaded, loading = await self._manager.update_weights_from_tensor(request)
        ended, ending = await self._manager.end_weight_update(EndWeightUpdateReqInput())
        if not loaded:
            return loading
        return None if ended else ending

    def _version_of(self, meta: Mapping[str, Any]) -> int:
        # a reshard waits for running requests: one version made all tokens
        (span,) = meta["weight_versions"]
        return int(span["version"])

    def _experts(self, meta: Mapping[str, Any], row: Row, num_rows: int) -> np.ndarray:
        """The row's routed experts, then those of `num_rows` further tokens, from SGLang's base64 int32."""
        config = self._manager.model_config.hf_text_config
        shape = num_rows, config.num_hidden_layers, config.num_experts_per_tok
        numbers = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
        num_experts = getattr(config, "n_routed_experts", None) or config.num_experts
        smallest = np.uint8 if num_experts <= 256 else np.int16
        num_dense = getattr(config, "first_k_dense_replace", 0)
        new = numbers.reshape(shape)[:, num_dense:].astype(smallest)
        if row.routed_experts is None:
            return new
        return np.concatenate([row.routed_experts, new])


class Schedulers:
    """An engine's schedulers on a node other than its first; the constructor blocks until all nodes are ready."""

    def __init__(self, settings: EngineSettings, weight_loader: str = WEIGHT_LOADER) -> None:
        self._host = Host(settings, weight_loader)

    def pids(self) -> list[int]:
        """The scheduler processes, by tensor-parallel rank."""
        return self._host.pids()

    async def fail(self) -> None:
        """Raises EngineLost when a scheduler has died or hangs; does not return."""
        await self._host.fail()

    def shutdown(self) -> None:
        """End and reap the schedulers, and remove all files."""
        self._host.stop()


def _named_tensors(message: Mapping[str, Any]) -> bytes:
    """The message in the form of SGLang's weight updates: a named tensor, pickled by value (no shared memory)."""
    content = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    buffer = io.BytesIO()
    pickle.Pickler(buffer).dump([("session", content)])
    return buffer.getvalue()
