"""Secrets in a recipe are refused before a run; trackers get no value whose name may mean one."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight.limit_checks import secret_errors
from megarl.tracking.secrets import is_secret, without_secrets
from tests.preflight.test_reward_checks import small_recipe

VALUE = "s3cr3t-of-mine"
SECRETS = [
    "api_key", "apikey", "apiKey", "API_KEY", "X-Api-Key", "api_keys", "judge_key", "private_key", "access_key",
    "token", "hf_token", "hf.token", "auth-token", "access_token", "api_token", "secret", "client_secret", "password",
    "passwd", "credentials", "Authorization", "bearer",
]  # fmt: skip
HARMLESS = [
    "stop_token", "eos_token", "pad_token", "bos_token", "tokens", "max_tokens", "tokenizer", "answer_key", "sort_key",
    "key", "keys", "monkey", "key_env", "api_key_env", "password_env", "secretary",
]  # fmt: skip


def recipe_of(reward: dict[str, Any], **sglang: Any) -> Recipe:
    return small_recipe(reward={"function": "some:score", **reward}, engine={"sglang": sglang})


def told(reward: dict[str, Any], **sglang: Any) -> list[str]:
    lines = [str(error) for error in secret_errors(recipe_of(reward, **sglang))]
    assert VALUE not in "".join(lines)
    return lines


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_is_refused_and_withheld(key: str) -> None:
    (line,) = told({"arguments": {key: VALUE, "names": ["a"]}})
    assert line.startswith(
        f"reward.arguments.{key}: holds a secret, and the run saves its recipe; give the name of an"
    )
    assert without_secrets({"arguments": {key: VALUE}}) == {"arguments": {key: "(withheld)"}}


@pytest.mark.parametrize("key", HARMLESS)
def test_other_names_are_not_refused(key: str) -> None:
    assert told({"arguments": {key: VALUE}}) == []


@pytest.mark.parametrize(
    "key", ["tokens", "max_tokens", "tokenizer", "monkey", "key_env", "secretary"]
)
def test_what_no_name_of_a_secret_ends_is_sent(key: str) -> None:
    assert without_secrets({key: VALUE}) == {key: VALUE}


def test_what_may_be_a_secret_is_withheld() -> None:
    assert without_secrets({"openai_key": VALUE, "github_token": VALUE}) == dict.fromkeys(
        ("openai_key", "github_token"), "(withheld)"
    )


@pytest.mark.parametrize("value", ["", None, 7, True, "JUDGE_KEY", "MEGARL_JUDGE_KEY_2"])
def test_numbers_and_names_of_variables_are_no_secrets(value: object) -> None:
    assert not is_secret("api_key", value)


def test_secrets_are_found_wherever_they_are() -> None:
    arguments = {
        "headers": {"Authorization": f"Bearer {VALUE}"},
        "judges": [{"x": 1}, {"hf_token": VALUE}],
    }
    url = f"http://me:{VALUE}@host/"
    reward = {
        "arguments": {**arguments, "api_keys": [VALUE]},
        "by_source": {"math": {"function": "a:b"}},
    }
    reward["by_source"]["math"]["arguments"] = {
        "urls": [url, "http://host:80/me@there", "http://me@host/"]
    }
    lines = told(reward, ssl_keyfile_password=VALUE, stop_token="</s>")
    assert [line.partition(": ")[0] for line in lines] == [
        "reward.arguments.headers.Authorization",
        "reward.arguments.judges[1].hf_token",
        "reward.arguments.api_keys[0]",
        "reward.by_source.math.arguments.urls[0]",
        "rollout.engine.sglang.ssl_keyfile_password",
    ]
    assert "holds a URL with a password" in lines[3]
    assert lines[4].endswith("; remove it from the recipe")
