"""A model's way to hold conversations, proven on its own chat template: the splice, and the format of its calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.episodes.agent_tools import ToolSets
from megarl.episodes.template import TemplateRefusal, user
from megarl.episodes.template_check import TemplateFacts, check
from megarl.episodes.tool_calls import CallFormat
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.types import UserError
from megarl.types.json_objects import ToolSchema

_RENDERED = TemplateFacts(parallel=True, kept=(), notes=())


@dataclass(frozen=True)
class Prepared:
    """calls: None without tools. facts: what is so with the template and is no fault."""

    turn_tokenizer: TurnTokenizer
    calls: CallFormat | None
    facts: TemplateFacts


def prepare(
    tokenizer: Any,
    stop_ids: Collection[int],
    schemas: Sequence[ToolSchema],
    *,
    has_reply: bool,
    has_reset: bool,
    renders: bool = False,
) -> Prepared:
    """For episodes with the tools of these schemas, and an environment that replies or adds to the prompt.

    renders: the history is rendered at every turn, so that nothing is spliced. Imports SGLang (seconds) where there are
    tools. Raises UserError(episode), (episode.tools), (episode.environment).
    """
    turn_tokenizer = TurnTokenizer(tokenizer, stop_ids, schemas)
    if has_reset:
        try:
            turn_tokenizer.first([user("a"), user("b")])
        except TemplateRefusal as refusal:
            problem = f"the chat template refuses the text of `reset` after a prompt ({refusal})"
            hint = "let reset return None, and write its text into the prompts"
            raise UserError("episode.environment", problem, hint) from refusal
    if renders:
        facts = _RENDERED
    else:
        facts = check(turn_tokenizer, users=has_reply, tools=bool(schemas))
    if not schemas:
        return Prepared(turn_tokenizer, None, facts)
    calls = CallFormat.find(tokenizer, stop_ids, schemas)
    return Prepared(
        turn_tokenizer, replace(calls, parallel=calls.parallel and facts.parallel), facts
    )


def prepare_agents(
    tokenizer: Any, stop_ids: Collection[int], *, renders: bool = False
) -> tuple[ToolSets, TemplateFacts]:
    """For agents, which name their tools when they ask. Imports SGLang (seconds). Raises UserError(episode)."""
    tool_sets = ToolSets(tokenizer, stop_ids)
    if renders:
        facts = _RENDERED
    else:
        facts = check(TurnTokenizer(tokenizer, stop_ids), users=True, tools=False)
    if refusal := tool_sets.refusal():
        note = f"requests of the agent with tools are refused: {refusal}"
        facts = replace(facts, notes=(*facts.notes, note))
    return tool_sets, facts
