"""What the engines of a run and external ones have in common: what they are asked, and the samples of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.rollout.sglang.arguments import EngineSettings
from megarl.rollout.sglang.host import EngineError
from megarl.samples.expert_load import ExpertLoad
from megarl.types import FaultMember, Row, Sample, SamplePart, SilentFault, with_part
from megarl.types.json_objects import JsonObject
from megarl.types.sampling import Sampling, sample_seed


class SamplingEngine:
    """Makes samples of SGLang's answers; subclasses say how SGLang is asked, and set these attributes."""

    _settings: EngineSettings
    _tokenizer: Any
    # the reason why the weights cannot be sampled from
    _stale: str | None
    # of the tokens sampled since it was last taken
    expert_load: ExpertLoad

    async def _ask(
        self,
        input_ids: list[list[int]],
        parameters: list[JsonObject],
        rows: int,
        requests: list[str] | None = None,
    ) -> list[JsonObject]:
        """SGLang's answers to a batch. rows: of the tokens whose experts are known; requests: their names."""
        raise NotImplementedError

    def _version_of(self, meta: Mapping[str, Any]) -> int:
        """The version of the weights that made all tokens of an answer; meta: SGLang's `meta_info`."""
        raise NotImplementedError

    def _experts(self, meta: Mapping[str, Any], before: Row, num_rows: int) -> np.ndarray:
        """The routed experts of a row, and of `num_rows` further tokens, where samples carry them."""
        raise NotImplementedError

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, begun: Sequence[Sample] = ()
    ) -> list[Sample]:
        """`sampling.num_samples` responses to one prompt; begun: those of an earlier phase, whose open ones go on.

        The logprobs are those of softmax(logits / temperature), not truncated, so that the trainer's logprobs of the
        same tokens equal them. Those of greedy samples are of temperature 1.
        Raises EngineError when a scheduler has died or a reshard has failed, SilentFault for a log-probability that is
        not finite.
        """
        if self._stale is not None:
            raise EngineError(self._stale)
        samples = list(begun) or [unbegun(prompt_ids)] * sampling.num_samples
        # those that are open are equally long
        places = [place for place, sample in enumerate(samples) if sample.is_open]
        responses = [samples[place].only_row.response_ids_T.tolist() for place in places]
        # a random number depends on the seed and the token's position alone, so that it is that of a whole response
        outputs = await self._ask(
            [[*prompt_ids, *response_ids] for response_ids in responses],
            [self._parameters(sampling, place, len(responses[0])) for place in places],
            rows_before(samples[places[0]]),
        )
        for place, output in zip(places, outputs, strict=True):
            sample = samples[place]
            samples[place] = self._continued(sample, output, sampling, rows_before(sample))
        return samples

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        """One response to a conversation so far, as a sample whose prompt is all of that; `number` counts its turns.

        A conversation keeps its attention group, and a random stream as that of sample `place` of its prompt. rows: of
        its tokens whose routed experts are known; the sample has those of all others but the last. Raises as
        `generate`.
        """
        if self._stale is not None:
            raise EngineError(self._stale)
        limits = replace(sampling, num_samples=1, phase_tokens=None)
        context_ids = list(context_ids)  # the conversation may grow meanwhile
        (output,) = await self._ask(
            [context_ids],
            [self._parameters(limits, place, 0)],
            rows,
            [f"{conversation}/{number}"],
        )
        sample = self._continued(unbegun(context_ids), output, limits, rows)
        return replace(sample, cached_tokens=output["meta_info"]["cached_tokens"])

    def text(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _parameters(self, sampling: Sampling, place: int, response_tokens: int) -> JsonObject:
        """SGLang's parameters of sample `place` of a prompt, which has so many tokens already."""
        parameters: JsonObject = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.new_tokens(response_tokens),
        }
        if self._settings.seeded:
            parameters["sampling_seed"] = sample_seed(sampling.stream, place)
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        return parameters

    def _continued(
        self,
        sample: Sample,
        output: Mapping[str, Any],
        sampling: Sampling,
        rows: int,
    ) -> Sample:
        """The sample with the tokens of SGLang's output after its own; rows: as of `_ask`."""
        meta = output["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort":
            raise EngineError(f"SGLang aborted a request: {reason.get('message')}")
        before = sample.only_row
        new_ids_T = np.asarray(output["output_ids"], dtype=np.int64)
        new_logp_T = np.asarray(
            [logp for logp, *_ in meta["output_token_logprobs"]], dtype=np.float32
        )
        if not np.isfinite(new_logp_T).all():
            raise self._not_finite()
        part = SamplePart(self._version_of(meta), len(new_ids_T), self._settings.number)
        row = Row.response(
            before.prompt_ids,
            np.concatenate([before.response_ids_T, new_ids_T]),
            np.concatenate([before.engine_logp_T, new_logp_T]),
            with_part(before.parts, part),
        )
        if self._settings.routed_experts:
            experts = self._experts(meta, before, row.num_tokens - 1 - rows)
            known = 0 if before.routed_experts is None else len(before.routed_experts)
            self.expert_load.add(experts[known:])
            row = replace(row, routed_experts=experts)
        most_new = sampling.new_tokens(len(before.response_ids_T))
        is_at_limit = reason["type"] == "length" and len(new_ids_T) == most_new
        is_open = is_at_limit and len(row.response_ids_T) < sampling.max_tokens
        return replace(
            sample,
            rows=(row,),
            text="" if is_open else self.text(row.response_ids_T.tolist()),
            finished=reason["type"] == "stop",
            verifications=sample.verifications + meta.get("spec_verify_ct", 0),
            prefills=sample.prefills + 1,
            is_open=is_open,
        )

    def _not_finite(self) -> SilentFault:
        number = self._settings.number
        what = "returned a log-probability that is not a finite number"
        return SilentFault("engine", what, [FaultMember(number, f"engine {number}")])


def unbegun(prompt_ids: Sequence[int]) -> Sample:
    """A sample of which nothing was sampled yet."""
    row = Row.response(prompt_ids, np.zeros(0, np.int64), np.zeros(0, np.float32), ())
    return Sample((row,), "", finished=False, is_open=True, prefills=0)


def rows_before(sample: Sample) -> int:
    """The tokens whose experts the sample has: all but its last, which no engine has computed."""
    row = sample.only_row
    if row.parts:
        return row.num_tokens - 1
    return 0
