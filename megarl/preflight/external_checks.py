"""External engines: keys that they have no use for, and servers that do not answer or do not fit the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megarl.config import EngineConfig, Recipe
from megarl.disk import existing_folder, is_writable
from megarl.placement.roles import Roles
from megarl.rollout.external.client import ServerClient, ServerFault, server_key
from megarl.rollout.external.server_checks import ServerFacts, WantedServer, fitting_facts
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, Errors, listed

WHERE = "rollout.engine.external"
# of the engines that a run starts itself
_OWN_KEYS = (
    "max_count",
    "tp",
    "ep",
    "dp",
    "weights",
    "dense",
    "head",
    "experts",
    "place_experts",
    "draft",
    "sglang",
)
_ASKED_S = 10.0


@listed
def external_errors(roles: Roles) -> ErrorIterator:
    """Everything in a recipe that external engines do not have, or contradict; without external ones, their keys."""
    recipe = roles.recipe
    engine = recipe.rollout.engine
    if not engine.external:
        for key in ("external_key_env", "external_dir"):
            if getattr(engine, key):
                problem = "is set, and rollout.engine.external names no server"
                yield UserError(f"rollout.engine.{key}", problem, f"name some, or leave {key} out")
        return
    number = len(engine.external)
    if engine.count != number:
        problem = f"{engine.count}, and rollout.engine.external names {number}"
        yield UserError("rollout.engine.count", problem, f"set it to {number}, or leave it out")
    for server in sorted({name for name in engine.external if engine.external.count(name) > 1}):
        yield UserError(WHERE, f"names {server} several times", "name each server once")
    defaults = EngineConfig()
    for key in _OWN_KEYS:
        if getattr(engine, key) != getattr(defaults, key):
            problem = "is set, and a server that others have started has its own"
            yield UserError(
                f"rollout.engine.{key}", problem, "remove it: start the servers with it"
            )
    yield from _placement_errors(recipe)
    yield from _capability_errors(roles)


def _placement_errors(recipe: Recipe) -> ErrorIterator:
    placement = recipe.placement
    if placement.first_engine_gpu:
        problem = (
            f"{placement.first_engine_gpu}, and external engines are on none of the run's GPUs"
        )
        yield UserError("placement.first_engine_gpu", problem, "remove it")
    if placement.train_gpus not in (None, placement.gpus):
        problem = f"{placement.train_gpus} of {placement.gpus}, and external engines use no others"
        hint = f"remove it, and set placement.gpus to {placement.train_gpus}"
        yield UserError("placement.train_gpus", problem, hint)


def _capability_errors(roles: Roles) -> ErrorIterator:
    """What needs engines that take part in the run's own exchange."""
    recipe = roles.recipe
    if recipe.train.replay == "r3":
        problem = "r3, and external engines are not asked for the experts that they chose"
        yield UserError("train.replay", problem, "set it to r2 or off")
    if recipe.lora and recipe.lora.sync == "adapters":
        problem = "adapters, and external engines get whole weights, as files"
        yield UserError("lora.sync", problem, "set it to merged")
    if recipe.reshard.verify == "full":
        problem = "full, and external engines send no weights back"
        yield UserError("reshard.verify", problem, "set it to checksum or off")
    if recipe.model.rope_scaling:
        problem = "external engines keep the config.json that they were started with"
        hint = "leave it out, and write rope_scaling into the config.json of model.path"
        yield UserError("model.rope_scaling", problem, hint)
    facts = roles.policy.model.facts
    if facts and facts.quantisation:
        problem = "has quantised weights, and servers that were started with it cannot load others"
        hint = "name a copy in model.dtype, and start the servers with that"
        yield UserError("model.path", problem, hint)


@listed
def server_errors(roles: Roles) -> ErrorIterator:
    """An error for each server that does not answer, or does not fit, and of the folder of their weights.

    Nothing where the model cannot be read.
    """
    engine = roles.recipe.rollout.engine
    if not engine.external or roles.policy.model.known_shape is None:
        return
    if engine.external_dir and not is_writable(existing_folder(Path(engine.external_dir))):
        problem = f"{engine.external_dir} is not a folder that can be written to"
        yield UserError("rollout.engine.external_dir", problem, "name another folder")
    try:
        wanted = WantedServer.of(roles.recipe)
    except UserError as error:
        yield error
        return
    try:
        key = server_key(engine.external_key_env)
    except ServerFault:
        problem = f"{engine.external_key_env} is no variable with an API key"
        hint = "export it before the command, and on each node of a cluster that is joined"
        yield UserError("rollout.engine.external_key_env", problem, hint)
        return
    yield from asyncio.run(_asked(engine.external, key, wanted))


async def _asked(servers: Sequence[str], key: str | None, wanted: WantedServer) -> Errors:
    answers = await asyncio.gather(*(_facts_of(server, key, wanted) for server in servers))
    errors = []
    server_by_seed: dict[object, str] = {}
    for number, (server, answer) in enumerate(zip(servers, answers, strict=True)):
        problem = ""
        if isinstance(answer, ServerFault):
            problem = f"{server} {answer}"
        elif not wanted.is_seeded and answer.random_seed in server_by_seed:
            other = server_by_seed[answer.random_seed]
            problem = f"{server} draws the same random numbers as {other} (--random-seed)"
        else:
            server_by_seed[answer.random_seed] = server
        if problem:
            hint = "start it as docs/recovery.md says, or name another"
            errors.append(UserError(f"{WHERE}[{number}]", problem, hint))
    return errors


async def _facts_of(
    server: str, key: str | None, wanted: WantedServer
) -> ServerFacts | ServerFault:
    client = ServerClient(server, key, _ASKED_S)
    try:
        return await fitting_facts(client, wanted)
    except ServerFault as fault:
        return fault
    finally:
        await client.close()
