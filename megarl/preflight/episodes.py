"""What is wrong with the episodes of a recipe: its keys, its tools or environment, and the model's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.config.episode import EpisodeConfig
from megarl.parallel.hf_config import end_token_ids
from megarl.rollout.conversations.demonstrated import demonstrate
from megarl.rollout.conversations.prepared import Prepared, prepare
from megarl.rollout.conversations.splice import Splice
from megarl.rollout.data_files import BadRow, RowFaults, column
from megarl.rollout.environments.thread import EnvironmentThread, environment_settings
from megarl.types import Prompt, UserFault

Faults = list[UserFault]


@dataclass(frozen=True)
class EpisodeRead:
    """What preflight learns of a recipe's episodes. tools: the schemas that prompts are rendered with.

    has_reward: the environment gives rewards itself. notes: sentences to print. splice: None where the tokenizer could
    not be loaded.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    has_reward: bool = False
    notes: Sequence[str] = ()
    faults: Faults = field(default_factory=list)
    splice: Splice | None = None


def read_episode(recipe: Recipe, tokenizer: Any | None) -> EpisodeRead:
    """Load the recipe's tools or environment as a run does, and prove the model's chat template for them.

    tokenizer: None where it could not be loaded: then nothing is proven.
    """
    if recipe.episode is None:
        return EpisodeRead()
    if faults := key_faults(recipe):
        return EpisodeRead(faults=faults)
    try:
        thread = EnvironmentThread(environment_settings(recipe, workers=1))
    except UserFault as fault:
        return EpisodeRead(faults=[fault])
    thread.shutdown()
    tools, notes, splice = thread.schemas, [_found(recipe, thread.schemas)], None
    try:
        if tokenizer is not None:
            stop_ids, has_reset = end_token_ids(recipe.model.path), thread.has_reset
            prepared = prepare(tokenizer, stop_ids, tools, has_reply=thread.has_reply, has_reset=has_reset)
            splice, notes = prepared.splice, notes + _notes(prepared)
    except UserFault as fault:
        return EpisodeRead(tools, thread.has_reward, faults=[fault])
    return EpisodeRead(tools, thread.has_reward, notes, splice=splice)


def demonstration_faults(recipe: Recipe, episode: EpisodeRead, prompts: Sequence[Prompt]) -> Faults:
    """Demonstrated episodes that supervised steps could not learn from."""
    name, splice = recipe.data.messages, episode.splice
    if not (name and splice and (recipe.warm_start.steps or learns_from_answers(recipe.algorithm.name))):
        return []
    bad, longest = RowFaults("data.messages"), 0
    for prompt in prompts:
        try:
            messages = column(prompt.row, name, "set data.messages to one of {columns}")
            longest = max(longest, len(demonstrate(splice, prompt.messages, messages).response_ids))
        except BadRow as error:
            bad.add(prompt.id, error)
    faults = bad.faults()
    if longest > recipe.longest_sample:
        problem = f"{recipe.longest_sample} is less than the longest demonstrated episode ({longest} tokens)"
        faults.append(UserFault("episode.max_tokens", problem, f"set it to at least {longest}"))
    return faults


def _found(recipe: Recipe, schemas: Sequence[Mapping[str, Any]]) -> str:
    """What answers the model, and how far an episode goes."""
    episode = recipe.episode
    assert episode
    tools = f"tools {', '.join(schema['function']['name'] for schema in schemas)}" if schemas else ""
    answers = " with ".join(filter(None, (episode.environment, tools)))
    turns = f"at most {episode.max_turns} turns, {recipe.rollout.max_response_tokens} sampled tokens in a turn"
    return f"episode: {answers}; {turns}, {episode.max_tokens} tokens after the prompt"


def _notes(prepared: Prepared) -> list[str]:
    """What a user should know of the model's template."""
    facts, calls = prepared.facts, prepared.calls
    notes = [*facts.notes, *([calls.why] if calls else [])]
    if facts.kept:
        notes.append(f"episodes keep what the chat template would leave out later: {', '.join(facts.kept)}")
    return [f"episode: {note}" for note in notes]


def key_faults(recipe: Recipe) -> Faults:
    """What the recipe's keys alone say; nothing without episodes."""
    return list(_key_faults(recipe, recipe.episode)) if recipe.episode else []


def _key_faults(recipe: Recipe, episode: EpisodeConfig) -> Iterator[UserFault]:
    rollout = recipe.rollout
    if bool(episode.tools) == (episode.environment is not None):
        problem = "tools and an environment" if episode.tools else "neither tools nor an environment"
        yield UserFault("episode", f"it names {problem}", "name one of the two")
    if episode.max_tokens < rollout.max_response_tokens:
        problem = f"{episode.max_tokens} is less than a turn may have: rollout.max_response_tokens"
        mend = f"set it to at least {rollout.max_response_tokens}"
        yield UserFault("episode.max_tokens", f"{problem} is {rollout.max_response_tokens}", mend)
    for key, value in (("phase_tokens", rollout.phase_tokens), ("ahead", rollout.ahead)):
        if value:
            problem, mend = f"{value}, but an episode is sampled whole", "leave it out"
            yield UserFault(f"rollout.{key}", problem, mend)
