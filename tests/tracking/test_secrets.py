"""Secrets do not leave the machine with a recipe or an error."""

from __future__ import annotations

import pytest

from megarl.config.loading import load_recipe
from megarl.tracking.secrets import redacted, without_secrets
from tests.tracking.test_run_log import QUICKSTART


def test_a_recipe_without_secrets_is_as_it_was() -> None:
    tree = load_recipe(QUICKSTART).model_dump(mode="json")
    assert without_secrets(tree) == tree, "max_prompt_tokens and the like are no secrets"


@pytest.mark.parametrize(
    "key", ["api_key", "apikey", "API_KEY", "hf.token", "auth-token", "password", "client_secret"]
)
def test_text_under_the_name_of_a_secret_is_withheld(key: str) -> None:
    tree = {
        "reward": {"arguments": {key: "s3cret", "url": "https://me:s3cret@judge/x", "names": ["a"]}}
    }
    arguments = {key: "(withheld)", "url": "https://(withheld)@judge/x", "names": ["a"]}
    assert without_secrets(tree) == {"reward": {"arguments": arguments}}


@pytest.mark.parametrize("key", ["api_key_env", "tokens", "max_tokens", "monkey", "tokenizer"])
def test_other_names_are_shown(key: str) -> None:
    assert without_secrets({key: "JUDGE_KEY"}) == {key: "JUDGE_KEY"}
    assert without_secrets({"key": 7, "token": None}) == {"key": 7, "token": None}, (
        "a number is no secret"
    )


def test_the_environments_secrets_are_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("SOME_TOKEN", "a")
    monkeypatch.setenv("SOME_WORD", "harmless word")
    assert (
        redacted("key 0123456789 is bad, harmless word") == "key (withheld) is bad, harmless word"
    )
