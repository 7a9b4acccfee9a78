"""An SGLang server that others have started, as an engine: sampled over HTTP, filled with weights by files."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Mapping
from secrets import token_hex
from typing import Any
from uuid import uuid4

from megarl.isolation.loop_thread import LoopThread, in_own_thread
from megarl.isolation.service import Service, ServiceError
from megarl.model.tokenizer import load_auto_tokenizer
from megarl.rollout.external.answer_checks import refuse_odd
from megarl.rollout.external.client import ServerClient, ServerFault, server_key
from megarl.rollout.external.server_checks import ServerFacts, WantedServer, fitting_facts
from megarl.rollout.external.weight_files import WeightFiles
from megarl.rollout.load_balancing import Capacity, CompletedSample
from megarl.rollout.request_spans import RequestSpans
from megarl.rollout.sampling_engine import SamplingEngine
from megarl.rollout.sglang.arguments import EngineSettings
from megarl.rollout.sglang.group_queue import GroupQueue
from megarl.rollout.sglang.host import EngineError, EngineLost, EngineStandstill
from megarl.types.json_objects import JsonObject

# between two looks whether the server's schedulers still answer
_LOOK_S = 10.0
# of an answer: of each token SGLang writes its id, and its log-probability with its id
_TOKEN_BYTES = 200
_ANSWER_BYTES = 1 << 20


class ExternalEngine(SamplingEngine):
    """One SGLang server. It is asked in a thread of its own; the methods may be awaited in any loop.

    The constructor blocks until the server answers and fits the run, see `server_checks`. Raises EngineLost where it
    does not for settings.timeout_s.
    """

    def __init__(
        self,
        settings: EngineSettings,
        wanted: WantedServer,
        key_variable: str | None = None,
        wait_s: float = 0.0,
    ) -> None:
        """wanted: what the run needs of it. key_variable: with the API key. wait_s: before it is asked at all."""
        servers = settings.engine.external
        self._settings = settings
        self._tokenizer = load_auto_tokenizer(settings.model_path)
        self._name = f"the SGLang server at {servers[settings.number]}"
        self._wanted = wanted
        self._weights: WeightFiles | None = None
        self._stale: str | None = "the server has no weights of this run yet"
        self._loading = asyncio.Lock()
        # when a scheduler has answered last
        self._answered_s = time.monotonic()
        self._is_stopped = False
        self._prefix = token_hex(8)
        self.thread = LoopThread("external-engine")
        _allow_connections()
        try:
            key = server_key(key_variable)
            self._client = self.thread.make(
                lambda: ServerClient(servers[settings.number], key, settings.timeout_s)
            )
            unlimited = Capacity(sys.maxsize, sys.maxsize)
            self.queue = self.thread.make(lambda: GroupQueue(unlimited, 1, settings.context_tokens))
            self._spans = RequestSpans()
            self._facts = self.thread.submit(self._connected(wait_s)).result()
        except ServerFault as fault:
            self.shutdown()
            raise EngineLost(f"{self._name} {fault}") from None
        except BaseException:
            self.shutdown()
            raise

    @property
    def capacity(self) -> Capacity:
        """What the server can run at once, all of its attention groups together."""
        return self._facts.capacity

    @property
    def version(self) -> int:
        """The version of the weights; raises EngineLost where the server states other ones."""
        return self.thread.submit(self._stated_version()).result()

    @in_own_thread
    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        """As of `Engine`."""
        await self.queue.place(conversation, prompt_tokens)

    @in_own_thread
    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        """As of `Engine`."""
        await self.queue.complete(conversation, prompt_tokens, response_tokens)

    @in_own_thread
    async def take_completed(self) -> list[CompletedSample]:
        """The samples that the server has finished since the last call, as soon as there are any."""
        return await self.queue.take_completed()

    @in_own_thread
    async def take_files(self, weights: WeightFiles) -> None:
        """Have the server load weights from files, between two phases. Raises EngineError where it does not.

        It is idle first: SGLang's schedulers end if a request is left when they drop their cache after an update.
        """
        async with self._loading:
            self._stale = f"the server has half-written weights: version {weights.version}"
            self._weights = None
            try:
                await self._load(weights)
            except ServerFault as fault:
                raise EngineError(f"{self._name} {fault}") from None
            self._weights = weights
            self._stale = None
            self._answered_s = time.monotonic()

    @in_own_thread
    async def weights_checksum(self) -> str:
        """SGLang's checksum of the weights with the layout that it is of; "" where the server cannot compute it."""
        try:
            answer = await self._client.post("/weights_checker", {"action": "checksum"})
        except ServerFault:
            return ""
        server = self._facts.server
        layout = [server.get(size) for size in ("tp_size", "ep_size", "dp_size", "pp_size")]
        return f"{layout} {answer.get('per_engine_checksum')}"

    async def fail(self) -> None:
        """Raises EngineLost when the server's schedulers have not answered for too long.

        It does not return, and is silent after `shutdown`.
        """
        try:
            await self.thread.run(self._watch())
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
        await asyncio.Event().wait()

    def shutdown(self) -> None:
        """End the thread; requests that are open are aborted, because SGLang notices that nobody waits."""
        self._is_stopped = True
        self.thread.end(self._close())

    async def _watch(self) -> None:
        """Look from time to time whether a scheduler answers, but not while the server loads weights."""
        while True:
            await asyncio.sleep(_LOOK_S)
            async with self._loading:
                try:
                    await self._client.get("/server_info")
                    self._answered_s = time.monotonic()
                except ServerFault as fault:
                    silent_s = time.monotonic() - self._answered_s
                    if silent_s >= self._settings.timeout_s:
                        raise EngineStandstill(f"{self._name} {fault}") from None

    async def _close(self) -> None:
        if hasattr(self, "_client"):
            await self._client.close()

    async def _connected(self, wait_s: float) -> ServerFacts:
        """The facts of the server once it fits; it is asked again and again, less and less often."""
        await asyncio.sleep(wait_s)
        service = Service(self._name, tries=sys.maxsize, timeout_s=self._settings.timeout_s)
        try:
            return await service.call(lambda: fitting_facts(self._client, self._wanted))
        except ServiceError as error:
            raise EngineLost(str(error)) from None

    async def _stated_version(self) -> int:
        try:
            stated = str((await self._client.get("/model_info")).get("weight_version"))
        except ServerFault as fault:
            raise EngineLost(f"{self._name} {fault}") from None
        return self._known_version(stated)

    def _known_version(self, stated: str) -> int:
        """The version of the weights that a server calls `stated`. Raises EngineLost for other weights than the run's.

        Somebody else has written them, or has started the server anew.
        """
        if self._weights is None or stated != self._weights.label:
            expected = self._weights.label if self._weights else "none"
            raise EngineLost(
                f"{self._name} has weights of version {stated!r:.80}, and the run gave it {expected}"
            )
        return self._weights.version

    async def _load(self, weights: WeightFiles) -> None:
        """Raises ServerFault."""
        timeout_s = self._settings.timeout_s
        flush = self._client.text("POST", f"/flush_cache?timeout={timeout_s:g}")
        await self._client.within(timeout_s, flush)
        update = {
            "model_path": weights.folder,
            "load_format": "auto",
            "weight_version": weights.label,
            "flush_cache": True,
        }
        answer = await self._client.post("/update_weights_from_disk", update)
        if not answer.get("success"):
            raise ServerFault(f"has not loaded {weights.folder}: {answer.get('message')!r:.300}")
        stated = await self._client.get("/model_info")
        if stated.get("weight_version") != weights.label:
            raise ServerFault(
                f"has loaded {weights.folder} and states the weight version {stated.get('weight_version')!r:.80}"
            )

    @in_own_thread
    async def _ask(
        self,
        input_ids: list[list[int]],
        parameters: list[JsonObject],
        rows: int,
        requests: list[str] | None = None,
    ) -> list[JsonObject]:
        names = requests or [uuid4().hex for _ in input_ids]
        asked = zip(names, input_ids, parameters, strict=True)
        return await asyncio.gather(*(self._generate(*each) for each in asked))

    async def _generate(
        self, name: str, input_ids: list[int], parameters: Mapping[str, Any]
    ) -> JsonObject:
        """The answer to one request. Raises EngineLost: nothing else is known of a server that does not give it."""
        content = {
            # names of turns begin anew with each process, and the server may still have those of the one before
            "rid": f"{self._prefix}-{name}",
            "input_ids": input_ids,
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        most_bytes = _ANSWER_BYTES + _TOKEN_BYTES * parameters["max_new_tokens"]
        self._spans.begin(name, len(input_ids))
        await self.queue.place(name, len(input_ids))
        try:
            answer = await self._client.object("POST", "/generate", content, most_bytes)
            refuse_odd(answer, parameters["max_new_tokens"], self._wanted.shape.vocab_size)
        except ServerFault as fault:
            self._spans.finish(name, None)
            self.queue.withdraw(name)
            raise EngineLost(f"{self._name} {fault}") from None
        self._spans.finish(name, len(answer["output_ids"]))
        self.queue.finish(name, len(answer["output_ids"]))
        return answer

    def _version_of(self, meta: Mapping[str, Any]) -> int:
        """All tokens of an answer must come from the weights that the server was given: raises EngineLost otherwise."""
        (version,) = {self._known_version(span["version"]) for span in meta["weight_versions"]}
        return version


def _allow_connections() -> None:
    """Every request that runs has a connection: let this process open as many files as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
