"""Episodes that an agent runs: a user's own program, which asks the model as often as it likes."""

from __future__ import annotations

from itertools import count

from megarl.config.episode import EpisodeConfig
from megarl.environments.agents.agent_thread import AgentFailure, AgentThread, AgentTimeout
from megarl.environments.endpoint.chat_endpoint import ChatEndpoint
from megarl.episodes.agent_episode import AgentEpisode
from megarl.episodes.agent_tools import ToolSets
from megarl.episodes.request_sampling import PolicySampling
from megarl.episodes.rows import EpisodeResult, EpisodeRows, TurnSampler
from megarl.model.tokenizer import chat_messages
from megarl.types import Prompt
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.sampling import Sampling


class AgentRunner:
    """Runs the episodes of one engine as `EpisodeRunner`, by an agent.

    endpoint: None where it is off. policy: None: temperature and top_p are 1.
    """

    def __init__(
        self,
        config: EpisodeConfig,
        sampler: TurnSampler,
        agents: AgentThread,
        endpoint: ChatEndpoint | None,
        tool_sets: ToolSets,
        *,
        max_prompt_tokens: int,
        policy: PolicySampling | None = None,
    ) -> None:
        self._policy = policy
        self._config = config
        self._sampler = sampler
        self._agents = agents
        self._endpoint = endpoint
        self._tool_sets = tool_sets
        self._numbers = count()
        self._max_prompt_tokens = max_prompt_tokens

    async def run(self, prompt: Prompt, sampling: Sampling, place: int) -> EpisodeResult:
        """One episode, sample number `place` of its prompt. sampling.max_tokens: of a turn.

        Raises what the sampler raises, and UserError where the agent can no longer be used.
        """
        rows = EpisodeRows(
            self._sampler,
            f"episode-{next(self._numbers)}",
            prompt,
            sampling,
            place,
            self._max_prompt_tokens,
            self._config.max_tokens,
        )
        await rows.begin(len(prompt.token_ids))
        episode = AgentEpisode(rows, self._tool_sets, self._config, self._policy)
        try:
            reward_result = await self._ended(episode, prompt, sampling.group_seed)
        finally:
            await rows.end(len(prompt.token_ids))
        if rows.error:
            raise rows.error
        if not rows.tally.kept_tokens and not isinstance(reward_result, Failure):
            reward_result = Failure("no turn of the model has reached the agent")
        return EpisodeResult(rows.sample(episode.end), reward_result, episode.refused_fields)

    async def _ended(
        self, episode: AgentEpisode, prompt: Prompt, seed: int
    ) -> RewardResult | Failure | None:
        """Run the agent to its end; what it gave, or why it failed."""
        messages = chat_messages(prompt.messages)
        if self._endpoint:
            access = self._endpoint.open(episode)
        else:
            access = None
        try:
            timeout_s = self._config.timeout_s
            return await self._agents.run(
                prompt.row, messages, seed, episode, access, timeout_s, episode.begin
            )
        except AgentTimeout as late:
            episode.stop("timeout", str(late))
        except AgentFailure as failure:
            if not episode.is_at_limit:  # else it has failed because the model answers no more
                episode.stop("agent", "the agent has failed")
                return Failure(f"the agent {failure}")
        finally:
            try:
                if self._endpoint and access:
                    episode.refused_fields = await self._endpoint.close(access.key)
            finally:
                await episode.close()
        return None
