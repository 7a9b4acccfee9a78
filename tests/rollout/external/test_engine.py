"""What an external engine asks its server, and what it makes of answers that are wrong; the server is a stand-in."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.external import engine as external_engine
from megarl.rollout.external.engine import ExternalEngine
from megarl.rollout.load_balancing import Capacity, CompletedSample
from megarl.rollout.sglang.host import EngineError, EngineLost
from megarl.types.sampling import Sampling, sample_seed
from tests.rollout.external.stand_in import WEIGHTS, StandIn, engine_of

SAMPLING = Sampling(2, 4, temperature=0.7, top_p=0.9, stream=(1, 2))


@pytest.fixture(autouse=True)
def tokenizer_of_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a checkpoint's."""
    digits = SimpleNamespace(decode=lambda ids, **_: "".join(map(str, ids)))
    monkeypatch.setattr(external_engine, "load_auto_tokenizer", lambda _: digits)


def filled(engine: ExternalEngine) -> ExternalEngine:
    asyncio.run(engine.take_files(WEIGHTS))
    return engine


def sample(engine: ExternalEngine, sampling: Sampling = SAMPLING) -> list[Any]:
    return asyncio.run(engine.generate([5, 6], sampling))


def test_samples_have_the_tokens_and_the_version_of_the_servers_answers() -> None:
    server = StandIn()
    with engine_of(server) as engine:
        assert engine.capacity == Capacity(16, 4096)
        samples = sample(filled(engine))
        assert engine.version == 3
        completed = asyncio.run(engine.take_completed())
    assert completed == [CompletedSample(0, 2, 4)] * 2
    for each in samples:
        row = each.only_row
        assert [*row.prompt_ids] == [5, 6] and row.response_ids_T.tolist() == [7] * 4
        (part,) = row.parts
        assert (part.version, part.num_tokens, part.engine) == (3, 4, 1)
        assert row.engine_logp_T.tolist() == [-0.5] * 4
    bodies = [body for path, body in server.asked if path == "/generate"]
    assert [body["input_ids"] for body in bodies] == [[5, 6]] * 2
    assert bodies[0]["sampling_params"] == {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 4}
    assert len({body["rid"] for body in bodies}) == 2


def test_seeded_requests_carry_the_seeds_of_the_runs_own_engines() -> None:
    server = StandIn()
    with engine_of(server, seeded=True) as engine:
        sample(filled(engine))
    bodies = [body for path, body in server.asked if path == "/generate"]
    seeds = {body["sampling_params"]["sampling_seed"] for body in bodies}
    assert seeds == {sample_seed((1, 2), 0), sample_seed((1, 2), 1)}


def test_a_phase_leaves_responses_open_and_the_next_one_goes_on() -> None:
    server = StandIn()
    phase = Sampling(1, 6, phase_tokens=4)
    with engine_of(server) as engine:
        (begun,) = sample(filled(engine), phase)
        assert begun.is_open
        (whole,) = asyncio.run(engine.generate([5, 6], phase, [begun]))
    assert not whole.is_open and len(whole.only_row.response_ids_T) == 6
    bodies = [body for path, body in server.asked if path == "/generate"]
    assert bodies[1]["input_ids"] == [5, 6, 7, 7, 7, 7]
    assert bodies[1]["sampling_params"]["max_new_tokens"] == 2


def test_turns_of_a_conversation_are_one_sample() -> None:
    server = StandIn()

    async def play(engine: ExternalEngine) -> list[CompletedSample]:
        await engine.begin("talk", 2)
        for number in range(2):
            await engine.turn("talk", number, [5, 6], Sampling(1, 4), 0, 0)
        await engine.complete("talk", 2, 8)
        return await engine.take_completed()

    with engine_of(server) as engine:
        assert asyncio.run(play(filled(engine))) == [CompletedSample(0, 2, 8)]
    bodies = [body for path, body in server.asked if path == "/generate"]
    assert [body["rid"].partition("-")[2] for body in bodies] == ["talk/0", "talk/1"]
    assert len({body["rid"].partition("-")[0] for body in bodies}) == 1


def test_weights_are_loaded_from_files_by_an_idle_server() -> None:
    server = StandIn()
    with engine_of(server) as engine:
        with pytest.raises(EngineError, match="no weights of this run"):
            sample(engine)
        filled(engine)
        assert asyncio.run(engine.weights_checksum()) == "[1, None, 1, None] a1"
    paths = [path for path, _ in server.asked]
    assert paths.index("/flush_cache") < paths.index("/update_weights_from_disk")
    update = dict(server.asked)["/update_weights_from_disk"]
    assert update["model_path"] == WEIGHTS.folder and update["weight_version"] == WEIGHTS.label


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"broken": {"/update_weights_from_disk": (400, "no such file")}}, "400: no such file"),
        ({"is_stubborn": True}, "states the weight version 'default'"),
        ({"broken": {"/flush_cache": (400, "busy")}}, "/flush_cache with status 400: busy"),
    ],
)
def test_a_server_that_does_not_load_the_weights_is_not_sampled(
    wrong: dict[str, Any], words: str
) -> None:
    server = StandIn()
    with engine_of(server) as engine:
        vars(server).update(wrong)
        with pytest.raises(EngineError, match=words) as raised:
            filled(engine)
        assert not isinstance(raised.value, EngineLost), "it may be filled once more"
        with pytest.raises(EngineError, match="half-written"):
            sample(engine)
    assert server.count("/generate") == 0


def test_tokens_of_other_weights_are_refused() -> None:
    server = StandIn()
    with engine_of(server) as engine:
        filled(engine)
        server.version = "somebody-else"
        with pytest.raises(
            EngineLost, match="version 'somebody-else', and the run gave it run-3-4"
        ):
            sample(engine)
        with pytest.raises(EngineLost, match="'somebody-else'"):
            _ = engine.version


def test_a_response_that_spans_an_update_is_refused() -> None:
    server = StandIn()
    with engine_of(server) as engine:
        filled(engine)
        server.meta = {"weight_versions": [{"version": "run-3-4"}, {"version": "run-4-5"}]}
        with pytest.raises(EngineLost, match="'run-4-5'"):
            sample(engine)


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (500, "out of\nmemory", r"status 500: out of\\nmemory"),
        (302, "", "a redirect, which is not followed"),
        (200, "<html>", "not JSON"),
        (200, "[1]", "not an object"),
        (200, "{}", "without tokens and their versions"),
        (200, json.dumps({"text": "x" * (2 << 20)}), "more than [0-9]+ bytes"),
    ],
)
def test_a_wrong_answer_loses_the_server(status: int, text: str, words: str) -> None:
    server = StandIn()
    with engine_of(server) as engine:
        filled(engine)
        server.broken["/generate"] = status, text
        with pytest.raises(EngineLost, match=f"the SGLang server at 127.0.0.1:[0-9]+ .*{words}"):
            sample(engine)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"finish_reason": {"type": "abort", "message": "shutdown"}}, "aborted a request"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "log-probabilities of other tokens"),
        ({"output_token_logprobs": [[-0.5, 8, None]] * 4}, "log-probabilities of other tokens"),
        ({"output_token_logprobs": [["-0.5", 7, None]] * 4}, "something else than 1 to 4 tokens"),
        ({"weight_versions": []}, "something else than 1 to 4 tokens"),
        ({"weight_versions": "run-3-4"}, "without tokens and their versions"),
    ],
)
def test_an_answer_that_is_not_whole_loses_the_server(meta: dict[str, Any], words: str) -> None:
    server = StandIn()
    with engine_of(server) as engine:
        filled(engine)
        server.meta = meta
        with pytest.raises(EngineLost, match=words):
            sample(engine)


@pytest.mark.parametrize("token_ids", [[], [7] * 5, [7, 7, 7, 32000], [7, 7, 7, -1], ["7"] * 4, 7])
def test_other_tokens_than_the_models_lose_the_server(token_ids: Any) -> None:
    class Odd(StandIn):
        def generate(self, body: dict[str, Any]) -> dict[str, Any]:
            return super().generate(body) | {"output_ids": token_ids}

    with engine_of(Odd()) as engine:
        filled(engine)
        with pytest.raises(EngineLost, match="/generate"):
            sample(engine)


@pytest.mark.parametrize("odd", [{"max_req_input_len": "many"}, {"internal_states": 3}])
def test_a_server_that_states_its_settings_otherwise_does_not_fit(odd: dict[str, Any]) -> None:
    words = "does not state its settings as SGLang 0.5.21 does"
    with pytest.raises(EngineLost, match=words), engine_of(StandIn(server=odd), timeout_s=0.5):
        pass


def test_a_server_that_is_busy_with_its_start_is_asked_again() -> None:
    class Starting(StandIn):
        def server_info(self, body: dict[str, Any]) -> dict[str, Any]:
            if self.count("/server_info") < 3:
                return {"version": "0.1"}
            return super().server_info(body)

    server = Starting()
    with engine_of(server) as engine:
        assert engine.capacity.sequences == 16
    assert server.count("/server_info") == 3


def test_a_server_that_never_fits_is_given_up() -> None:
    server = StandIn(server={"dtype": "float16"})
    words = "computes in dtype float16, and model.dtype is bfloat16"
    with pytest.raises(EngineLost, match=words), engine_of(server, timeout_s=1.0):
        pass
    assert server.count("/server_info") >= 1


def test_a_key_is_in_the_header_and_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", "s3cret-key")
    server = StandIn()
    with engine_of(server, "SERVERS_KEY") as engine:
        filled(engine)
        server.broken["/generate"] = 401, "unauthorized"
        with pytest.raises(EngineLost) as raised:
            sample(engine)
    assert server.keys == {"Bearer s3cret-key"}
    assert "s3cret" not in str(raised.value)


def test_silent_schedulers_are_lost_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_engine, "_LOOK_S", 0.05)
    server = StandIn()
    with engine_of(server) as engine:
        filled(engine)
        watch = asyncio.wait_for(engine.fail(), 0.3)
        with pytest.raises(TimeoutError):  # it answers: nothing is wrong
            asyncio.run(watch)
        engine._settings = replace(engine._settings, timeout_s=0.2)
        server.broken["/server_info"] = 503, "hangs"
        with pytest.raises(external_engine.EngineStandstill, match="503: hangs"):
            asyncio.run(engine.fail())
