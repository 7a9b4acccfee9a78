"""What is wrong with a recipe's episodes: its keys, its tools, environment or agent, and the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config import Recipe
from megarl.data.files import BadRow, RowErrors, column
from megarl.environments.agents.agent_thread import AgentThread, agent_settings
from megarl.environments.runtime.environment_thread import EnvironmentThread, environment_settings
from megarl.episodes.demonstrated_episode import demonstrate
from megarl.episodes.prepared import prepare, prepare_agents
from megarl.episodes.template_check import TemplateFacts
from megarl.episodes.tool_calls import CallFormat
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.model.hf_config import end_token_ids
from megarl.types import Prompt, UserError
from megarl.types.json_objects import ToolSchema
from megarl.types.listed import ErrorIterator, listed


@dataclass(frozen=True)
class EpisodeRead:
    """What preflight learns of a recipe's episodes. tools: the schemas that prompts are rendered with.

    has_reward: the environment gives rewards itself; None: the agent may. notes: sentences to print. turn tokenizer:
    None where the tokenizer could not be loaded.
    """

    tools: Sequence[ToolSchema] = ()
    has_reward: bool | None = False
    notes: Sequence[str] = ()
    errors: list[UserError] = field(default_factory=list)
    turn_tokenizer: TurnTokenizer | None = None


def read_episode(recipe: Recipe, tokenizer: Any | None, *, prepares: bool = True) -> EpisodeRead:
    """Load the recipe's tools or environment as a run does, and prove the model's chat template for them.

    tokenizer: None where it could not be loaded: then nothing is proven. prepares: whether their `prepare` is called,
    which may need what only the run's machines have.
    """
    if recipe.episode is None:
        return EpisodeRead()
    if errors := key_errors(recipe):
        return EpisodeRead(errors=errors)
    if recipe.episode.agent:
        return _read_agent(recipe, tokenizer, prepares=prepares)
    try:
        thread = EnvironmentThread(environment_settings(recipe, workers=1, prepares=prepares))
    except UserError as error:
        return EpisodeRead(errors=[error])
    thread.shutdown()
    tools = thread.schemas
    notes = [_summary(recipe, tools)]
    turn_tokenizer = None
    if recipe.rollout.phase_tokens and not thread.is_replayable:
        notes.append(
            "episode: the environment is not replayable: an episode that a phase leaves open begins anew"
        )
    try:
        if tokenizer is not None:
            prepared = prepare(
                tokenizer,
                end_token_ids(recipe.model.path, recipe.model.family),
                tools,
                has_reply=thread.has_reply,
                has_reset=thread.has_reset,
                renders=recipe.episode.history == "render",
            )
            turn_tokenizer = prepared.turn_tokenizer
            notes += _notes(prepared.facts, prepared.calls)
    except UserError as error:
        return EpisodeRead(tools, thread.has_reward, errors=[error])
    return EpisodeRead(tools, thread.has_reward, notes, turn_tokenizer=turn_tokenizer)


def _read_agent(recipe: Recipe, tokenizer: Any | None, *, prepares: bool) -> EpisodeRead:
    """Load the recipe's agent as a run does, and prove the model's chat template for what agents may say."""
    assert recipe.episode
    notes = [_summary(recipe, [])]
    turn_tokenizer = None
    try:
        AgentThread(agent_settings(recipe, workers=1, prepares=prepares)).shutdown()
        if tokenizer is not None:
            renders = recipe.episode.history == "render"
            stop_ids = end_token_ids(recipe.model.path, recipe.model.family)
            _, facts = prepare_agents(tokenizer, stop_ids, renders=renders)
            turn_tokenizer = TurnTokenizer(tokenizer, stop_ids)
            notes += _notes(facts)
    except UserError as error:
        return EpisodeRead(has_reward=None, errors=[error])
    return EpisodeRead(has_reward=None, notes=notes, turn_tokenizer=turn_tokenizer)


@listed
def demonstration_errors(
    recipe: Recipe, episode: EpisodeRead, prompts: Sequence[Prompt]
) -> ErrorIterator:
    """Demonstrated episodes that supervised steps could not learn from."""
    # imports torch, which `megarl episode-check` does without
    from megarl.algos import learns_from_answers

    name = recipe.data.messages
    turn_tokenizer = episode.turn_tokenizer
    teaches = recipe.warm_start.steps or learns_from_answers(recipe.algorithm.name)
    if not (name and turn_tokenizer and teaches):
        return
    bad = RowErrors("data.messages")
    longest = 0
    for prompt in prompts:
        try:
            messages = column(prompt.row, name, "set data.messages to one of {columns}")
            demonstration = demonstrate(turn_tokenizer, prompt.messages, messages)
            longest = max(longest, len(demonstration.response_ids))
        except BadRow as error:
            bad.add(prompt.id, error)
    yield from bad.errors()
    if longest > recipe.longest_sample:
        yield UserError(
            "episode.max_tokens",
            f"{recipe.longest_sample} is less than the longest demonstrated episode ({longest} tokens)",
            f"set it to at least {longest}",
        )


def _summary(recipe: Recipe, schemas: Sequence[ToolSchema]) -> str:
    """What answers the model, and how far an episode goes."""
    episode = recipe.episode
    assert episode
    answers = [episode.agent or episode.environment or ""]
    if schemas:
        answers.append(f"tools {', '.join(schema['function']['name'] for schema in schemas)}")
    return (
        f"episode: {' with '.join(filter(None, answers))}; at most {episode.max_turns} turns, "
        f"{recipe.rollout.max_response_tokens} sampled tokens in a turn, {episode.max_tokens} tokens after the prompt"
    )


def _notes(facts: TemplateFacts, calls: CallFormat | None = None) -> list[str]:
    """What a user should know of the model's template."""
    notes = list(facts.notes)
    if calls:
        notes.append(calls.why)
    if facts.kept:
        notes.append(
            f"episodes keep what the chat template would leave out later: {', '.join(facts.kept)}"
        )
    return [f"episode: {note}" for note in notes]


@listed
def key_errors(recipe: Recipe) -> ErrorIterator:
    """What the recipe's keys alone say; nothing without episodes."""
    episode = recipe.episode
    if episode is None:
        return
    rollout = recipe.rollout
    named = [key for key in ("tools", "environment", "agent") if getattr(episode, key)]
    if len(named) != 1:
        if named:
            problem = f"it names {' and '.join(named)}"
        else:
            problem = "it names no tools, environment or agent"
        yield UserError("episode", problem, "name one of the three")
    if episode.endpoint != "off" and not episode.agent:
        yield UserError(
            "episode.endpoint", f"{episode.endpoint}, but only an agent asks there", "leave it out"
        )
    if episode.max_tokens < rollout.max_response_tokens:
        most = rollout.max_response_tokens
        yield UserError(
            "episode.max_tokens",
            f"{episode.max_tokens} is less than a turn may have: rollout.max_response_tokens is {most}",
            f"set it to at least {most}",
        )
    for key, value in (("phase_tokens", rollout.phase_tokens), ("ahead", rollout.ahead)):
        if value and episode.agent:
            yield UserError(
                f"rollout.{key}",
                f"{value}, but an agent's episode is sampled whole",
                "leave it out",
            )
    if rollout.phase_tokens and episode.phase_tool_s < episode.call_timeout_s and not episode.agent:
        yield UserError(
            "episode.phase_tool_s",
            f"{episode.phase_tool_s:g}, and a longer call, which may take episode.call_timeout_s, would never end",
            f"set it to at least {episode.call_timeout_s:g}",
        )
