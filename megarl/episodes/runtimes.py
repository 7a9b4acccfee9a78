"""What answers the model in the episodes of one engine: tools, an environment or an agent, in worker processes."""

from __future__ import annotations

from functools import cached_property

from megarl.config import Recipe
from megarl.environments.agents.agent_thread import AgentThread, agent_settings
from megarl.environments.endpoint.chat_endpoint import ChatEndpoint
from megarl.environments.runtime.environment_thread import EnvironmentThread, environment_settings
from megarl.episodes.agent_runner import AgentRunner
from megarl.episodes.episode_runner import EpisodeRunner
from megarl.episodes.prepared import Prepared, prepare, prepare_agents
from megarl.episodes.request_sampling import PolicySampling
from megarl.episodes.rows import TurnSampler
from megarl.model.hf_config import end_token_ids
from megarl.model.tokenizer import load_tokenizer
from megarl.types.conditions import RunningJob
from megarl.types.worker_faults import WorkerFaults

Runner = EpisodeRunner | AgentRunner


class EnvironmentRuntime:
    """Tools or an environment, and the runner of their episodes. Raises UserError where they cannot be used."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.thread = EnvironmentThread(environment_settings(recipe))

    @cached_property
    def prepared(self) -> Prepared:
        """The splice and the format of calls, proven on the chat template of model.path. Raises UserError."""
        path = self._recipe.model.path
        episode = self._recipe.episode
        assert episode
        return prepare(
            load_tokenizer(path),
            end_token_ids(path, self._recipe.model.family),
            self.thread.schemas,
            has_reply=self.thread.has_reply,
            has_reset=self.thread.has_reset,
            renders=episode.history == "render",
        )

    def runner(self, sampler: TurnSampler) -> Runner:
        recipe = self._recipe
        assert recipe.episode
        return EpisodeRunner(
            recipe.episode,
            sampler,
            self.thread,
            self.prepared.turn_tokenizer,
            self.prepared.calls,
            max_prompt_tokens=recipe.data.max_prompt_tokens,
        )

    def take_faults(self) -> WorkerFaults:
        """The faults of the worker processes since the last call."""
        return self.thread.take_faults()

    async def running(self) -> list[RunningJob]:
        """The calls that the processes have."""
        return await self.thread.running()

    def shutdown(self) -> None:
        """End and reap the processes; may be called again."""
        self.thread.shutdown()


class AgentRuntime:
    """An agent with its endpoint, and the runner of its episodes. Raises UserError where it cannot be used."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.episode
        self._recipe = recipe
        self._thread = AgentThread(agent_settings(recipe))
        try:
            if recipe.episode.endpoint == "loopback":
                self._endpoint = ChatEndpoint()
            else:
                self._endpoint = None
        except BaseException:
            self._thread.shutdown()
            raise

    def runner(self, sampler: TurnSampler) -> Runner:
        recipe = self._recipe
        assert recipe.episode
        path = recipe.model.path
        renders = recipe.episode.history == "render"
        stop_ids = end_token_ids(path, recipe.model.family)
        tool_sets, _ = prepare_agents(load_tokenizer(path), stop_ids, renders=renders)
        return AgentRunner(
            recipe.episode,
            sampler,
            self._thread,
            self._endpoint,
            tool_sets,
            max_prompt_tokens=recipe.data.max_prompt_tokens,
            policy=PolicySampling(
                temperature=recipe.rollout.temperature, top_p=recipe.rollout.top_p
            ),
        )

    def take_faults(self) -> WorkerFaults:
        """The faults of the worker processes since the last call."""
        return self._thread.take_faults()

    async def running(self) -> list[RunningJob]:
        """The agents' runs that the processes have."""
        return await self._thread.running()

    def shutdown(self) -> None:
        """End and reap the processes, and stop listening; may be called again."""
        self._thread.shutdown()
        if self._endpoint:
            self._endpoint.shutdown()


def episode_runtime(recipe: Recipe) -> EnvironmentRuntime | AgentRuntime | None:
    """What the recipe names, with its processes started; None where samples are single responses."""
    if recipe.episode is None:
        return None
    if recipe.episode.agent:
        return AgentRuntime(recipe)
    return EnvironmentRuntime(recipe)
