"""Keys that external engines have no use for, and servers that do not answer or do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.loading import load_recipe
from megarl.config.models import LoraConfig, RopeScalingConfig
from megarl.placement.roles import Roles, resolve
from megarl.preflight import external_checks
from megarl.preflight.external_checks import external_errors, server_errors
from megarl.rollout.external.server_checks import WantedServer
from megarl.types import UserErrors
from tests.http_server import serving
from tests.plan import plans
from tests.rollout.external.stand_in import WANTED, StandIn

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def roles_of(
    folder: Path, servers: list[str], lora: LoraConfig | None = None, **more: Any
) -> Roles:
    engine = {"external": servers, **more.pop("engine", {})}
    recipe = plans.recipe(folder, "tiny", 4, engine=engine, **more)
    return resolve(recipe.model_copy(update={"lora": lora}))


def wheres(roles: Roles) -> list[str]:
    return [error.where for error in external_errors(roles)]


def test_servers_are_counted_and_hold_no_gpu_of_the_run(tmp_path: Path) -> None:
    roles = roles_of(tmp_path, ["a:1", "b:2"])
    assert external_errors(roles) == []
    assert roles.recipe.rollout.engine.count == 2
    assert roles.engines.count == 0 and not roles.engine_slots and not roles.shared_slots
    assert roles.num_members == 4


@pytest.mark.parametrize("address", ["a", "a:0", "a:99999", "http://a:1", "a:1/x", "u@a:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserErrors, match="write host:port, as 10.0.0.7:30000"):
        load_recipe(QUICKSTART, [f"rollout.engine.external=['{address}']"])


def test_all_keys_of_own_engines_are_refused_at_once(tmp_path: Path) -> None:
    roles = roles_of(
        tmp_path,
        ["a:1", "a:1"],
        engine={"count": 3, "tp": 2, "ep": 2, "weights": "fp8", "draft": 1, "sglang": {"x": 1}},
        placement={"gpus": 4, "train_gpus": 2, "first_engine_gpu": 2},
        reshard={"verify": "full"},
    )
    assert wheres(roles) == [
        "rollout.engine.count", "rollout.engine.external", "rollout.engine.tp", "rollout.engine.ep",
        "rollout.engine.weights", "rollout.engine.draft", "rollout.engine.sglang", "placement.first_engine_gpu",
        "placement.train_gpus", "reshard.verify",
    ]  # fmt: skip


def test_what_needs_members_of_an_exchange_is_refused(tmp_path: Path) -> None:
    roles = roles_of(tmp_path, ["a:1"], LoraConfig(sync="adapters"), replay="r3")
    assert wheres(roles) == ["train.replay", "lora.sync"]
    roles = roles_of(tmp_path, ["a:1"], LoraConfig(sync="merged"), replay="r2")
    assert wheres(roles) == []
    scaling = RopeScalingConfig(factor=4.0, original_max_position_embeddings=32_768)
    model = roles.recipe.model.model_copy(update={"rope_scaling": scaling})
    scaled = resolve(roles.recipe.model_copy(update={"model": model}))
    assert wheres(scaled) == ["model.rope_scaling"]


def test_keys_of_external_engines_alone_need_some(tmp_path: Path) -> None:
    engine = {"external_key_env": "KEY", "external_dir": "/shared"}
    assert wheres(roles_of(tmp_path, [], engine=engine)) == [
        "rollout.engine.external_key_env",
        "rollout.engine.external_dir",
    ]


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WantedServer, "of", staticmethod(lambda recipe: WANTED))


def test_servers_that_do_not_answer_or_fit_are_told_with_their_number(
    tmp_path: Path, wanted: None
) -> None:
    good, odd = StandIn(), StandIn(server={"version": "0.4", "dtype": "float32"})
    with serving(good.answer) as first, serving(odd.answer) as second:
        addresses = [url.removeprefix("http://") for url in (first, second)]
        errors = server_errors(roles_of(tmp_path, [*addresses, "127.0.0.1:1"]))
    assert [error.where for error in errors] == [
        "rollout.engine.external[1]",
        "rollout.engine.external[2]",
    ]
    assert (
        "has SGLang 0.4, and the run has 0.5.21; it computes in dtype float32" in errors[0].problem
    )
    assert errors[1].problem == "127.0.0.1:1 does not answer /server_info (ConnectError)"


def test_servers_with_one_seed_are_refused(tmp_path: Path, wanted: None) -> None:
    server = StandIn()
    with serving(server.answer) as first, serving(server.answer) as second:
        addresses = [url.removeprefix("http://") for url in (first, second)]
        (error,) = server_errors(roles_of(tmp_path, addresses))
    assert f"draws the same random numbers as {addresses[0]}" in error.problem


def test_a_key_that_is_not_set_is_told_by_its_variable(
    tmp_path: Path, wanted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = roles_of(tmp_path, ["127.0.0.1:1"], engine={"external_key_env": "SERVERS_KEY"})
    monkeypatch.delenv("SERVERS_KEY", raising=False)
    (error,) = server_errors(roles)
    assert error.where == "rollout.engine.external_key_env"
    monkeypatch.setenv("SERVERS_KEY", "s3cret")
    (error,) = server_errors(roles)
    assert error.where == "rollout.engine.external[0]" and "s3cret" not in str(error)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, wanted: None) -> None:
    server = StandIn()
    with serving(server.answer) as url:
        engine = {"external_dir": "/proc/weights"}
        roles = roles_of(tmp_path, [url.removeprefix("http://")], engine=engine)
        (error,) = server_errors(roles)
    assert error.where == "rollout.engine.external_dir"


def test_own_engines_are_asked_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_checks, "ServerClient", None)
    assert server_errors(roles_of(tmp_path, [])) == []
