"""Groups of ranks give each rank its own samples, its own state and the token values of its samples, and no others.

Ray and the ranks are stood in for: a call is made at once in this process, and a reference is its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.algos.statistics import GRAD_NORM
from megarl.cluster.topology import DevicePlacement
from megarl.config.loading import overlaid
from megarl.fleet import rank_groups
from megarl.fleet.rank_groups import AuxiliaryRanks, PolicyRanks
from megarl.placement.roles import resolve
from megarl.training.batching import Key, SampleRef, Update, key_of, own_samples, values_by_reader
from megarl.training.calls import TokenValuesCall, TokenValuesResult, TrainCall
from megarl.training.row_diffs import RowDiffs
from megarl.types import FaultMember, FloatArray, Prompt, SampleGroup, SilentFault
from tests.plan import plans
from tests.samples.responses import response

PROMPT, GROUPS, SAMPLES, UPDATES = 3, 6, 4, 2


@dataclass(frozen=True, eq=False)
class Ref:
    value: Any


class Rank:
    """Computes 10 x group + sample as the value of every token, and checks everything that it is given."""

    grad_norm = 0.5
    raising: int | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def compute_logprobs(self, call: TokenValuesCall) -> TokenValuesResult[int]:
        return self.values(call)

    def values(self, call: TokenValuesCall) -> TokenValuesResult[int]:
        refs = self._checked(call.updates, call.groups)
        values = [np.full(ref.length, 10 * ref.group + ref.sample) for ref in refs]
        # of TP 2
        by_reader = values_by_reader(refs, values, call.readers, dp_rank=self.rank // 2)
        return TokenValuesResult([*by_reader], self.rank)

    def train(self, call: TrainCall[int | None]) -> list[dict[Any, Any]]:
        refs = self._checked(call.updates, call.groups)
        values_by_key: dict[Key, FloatArray] = {}
        for piece in call.token_values:
            assert not values_by_key.keys() & piece.keys(), "each sample's values come once"
            values_by_key |= piece
        assert values_by_key.keys() == ({key_of(ref) for ref in refs} if values_by_key else set())
        for ref in refs if values_by_key else ():
            np.testing.assert_array_equal(
                values_by_key[key_of(ref)],
                np.full(ref.response_length, 10 * ref.group + ref.sample),
            )
        assert call.state in (None, self.rank)
        state = -1 if call.state is None else call.state
        if self.rank == self.raising:
            raise SilentFault("replicas", "differed", [FaultMember(5)])
        metrics = {f"rank {self.rank}": call.lr, "state": state, "values": len(values_by_key)}
        return [metrics | {GRAD_NORM: (self.grad_norm,)} for _ in call.updates]

    def row_diffs(self) -> RowDiffs:
        return RowDiffs(np.array([[self.rank, 0, 0]]), np.zeros(1, np.float32))

    def _checked(
        self, updates: Sequence[Update], by_id: Mapping[int, SampleGroup]
    ) -> list[SampleRef]:
        refs = [ref for update in updates for batch in update.micro_batches[0] for ref in batch]
        assert all(
            by_id[ref.group].samples[ref.sample].num_trained == ref.response_length for ref in refs
        )
        tokens = sum(sample.num_trained for group in by_id.values() for sample in group.samples)
        assert tokens == sum(ref.response_length for ref in refs), (
            "no tokens of other shares travel"
        )
        return refs


class Worker:
    def __init__(self, name: str, slot: int) -> None:
        self.name, self.slot, self.returned = name, slot, 0

    def start(self, target: str, rank: int, *_: Any) -> Ref:
        self.rank = Rank(rank)
        return Ref(None)

    def call(self, method: str, call: Any) -> Ref:
        arguments = {field.name: arrived(getattr(call, field.name)) for field in fields(call)}
        try:
            return Ref(getattr(self.rank, method)(replace(call, **arguments)))
        except SilentFault as fault:
            return Ref(fault)

    def call_many(self, count: int, method: str, call: Any) -> list[Ref]:
        results = [*self.call(method, call).value]
        assert len(results) == count
        self.returned += count
        return [Ref(result) for result in results]

    def compute(self, function: str, *args: Any) -> Ref:
        assert function == "megarl.training.batching:own_samples"
        updates, ids, *groups = map(arrived, args)
        return Ref(own_samples(updates, ids, *groups))


def arrived(value: Any) -> Any:
    """A field of a call as the rank gets it."""
    if isinstance(value, list):
        return [arrived(item) for item in value]
    return value.value if isinstance(value, Ref) else value


class Cluster:
    host = "127.0.0.1"

    def worker(self, name: str, slot: int, on_loss: object, *, computes: bool) -> Worker:
        return Worker(name, slot)

    def placements(self, workers: Sequence[Worker], _: Any) -> list[DevicePlacement]:
        return [DevicePlacement("gpu-17", "10.0.0.5", "", "") for _ in workers]

    def call_all(self, workers: Sequence[Worker], method: str) -> list[Any]:
        return [getattr(worker.rank, method)() for worker in workers]

    def put(self, value: object) -> Ref:
        return Ref(value)

    def gather(self, calls: dict[Ref, str], among: object = None) -> list[Any]:
        results = [ref.value for ref in calls]
        for result in results:
            if isinstance(result, SilentFault):
                raise result
        return results

    def await_all(self, calls: dict[Ref, str]) -> None: ...


def samples() -> tuple[list[SampleRef], list[Any]]:
    """Groups of responses, each of another length, so that a mixed-up sample shows."""
    rng = np.random.default_rng(0)
    refs: list[SampleRef] = []
    groups: list[Any] = []
    for group in range(GROUPS):
        lengths = 1 + rng.permutation(20)[:SAMPLES]
        responses = [
            response(tuple(range(PROMPT)), np.zeros(length, np.int64)) for length in lengths
        ]
        nothing = np.zeros(SAMPLES, np.float32)
        prompt = Prompt("", "", tuple(range(PROMPT)), "")
        groups.append(Ref(SampleGroup(prompt, tuple(responses), nothing, nothing > 0)))
        refs += [
            SampleRef(group, at, PROMPT + int(length), int(length))
            for at, length in enumerate(lengths)
        ]
    return refs, groups


@pytest.fixture(params=[1, "auto"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PolicyRanks, AuxiliaryRanks]:
    """A policy of 2 data-parallel ranks with TP 2 and PP 2, and a critic of 4 data-parallel ranks with TP 2.

    With `cp: auto` two ranks share a row with one of the longer samples.
    """
    recipe = plans.recipe(
        tmp_path, "tiny", 8, tp=2, pp=2, ep=2, algorithm={"name": "ppo"}, critic={"ranks": {"pp": 1}},
        updates_per_step=UPDATES, cp=request.param, tokens_per_micro_batch=23 if request.param == 1 else 12,
    )  # fmt: skip
    lengths = {"data": {"max_prompt_tokens": PROMPT}, "rollout": {"max_response_tokens": 20}}
    recipe = overlaid(recipe, lengths)
    cluster: Any = Cluster()
    roles = resolve(recipe)
    assert roles.critic
    assert roles.policy.layout.max_cp == (1 if request.param == 1 else 2)
    return PolicyRanks(cluster, roles.policy, frozenset()), AuxiliaryRanks(
        cluster, roles.critic, frozenset()
    )


def test_each_rank_gets_its_own_state_and_the_token_values_of_its_samples(
    ranks: tuple[PolicyRanks, AuxiliaryRanks],
) -> None:
    policy, critic = ranks
    refs, groups = samples()
    logprobs = policy.compute_logprobs("ppo", refs, groups, critic.plan_of(refs))
    token_values = critic.values(refs, groups, policy.plan_of("ppo", refs))
    learnt = critic.train(token_values, 0.5, logprobs)
    trained = policy.train("ppo", refs, groups, 0.5, token_values=token_values, logprobs=logprobs)
    for group, updates in ((critic, learnt), (policy, trained.updates)):
        assert len(updates) == UPDATES
        assert updates[0].keys() >= {f"rank {rank}" for rank in range(len(group.workers))}
    assert trained.speed


def test_a_prompt_counts_in_each_update_that_computes_it(
    ranks: tuple[PolicyRanks, AuxiliaryRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each sample once, where several ranks have parts of its row too, with a pass of old logprobs and without."""
    policy, critic = ranks
    counted: list[list[list[Key]]] = []

    def speed(_: object, by_update: Sequence[Sequence[SampleRef]], *__: Any, **___: Any) -> Any:
        counted.append([sorted(map(key_of, refs)) for refs in by_update])
        return {}

    monkeypatch.setattr(rank_groups, "speed", speed)
    refs, groups = samples()
    policy.train("ppo", refs, groups, 0.5)
    logprobs = policy.compute_logprobs("ppo", refs, groups, critic.plan_of(refs))
    policy.train("ppo", refs, groups, 0.5, logprobs=logprobs)
    assert counted[0] == counted[1] and len(counted[0]) == UPDATES
    assert sorted(key for keys in counted[0] for key in keys) == sorted(map(key_of, refs))


def test_each_rank_returns_its_state_and_few_of_them_token_values(
    ranks: tuple[PolicyRanks, AuxiliaryRanks],
) -> None:
    """The first rank of the last stage of each data-parallel rank: on the others a reference would be for nothing."""
    policy, critic = ranks
    refs, groups = samples()
    policy.compute_logprobs("ppo", refs, groups, critic.plan_of(refs))
    critic.values(refs, groups, policy.plan_of("ppo", refs))
    assert [worker.returned for worker in policy.workers] == [1, 1, 1, 1, 5, 1, 5, 1]  # type: ignore[attr-defined]
    assert [worker.returned for worker in critic.workers] == [3, 1, 3, 1, 3, 1, 3, 1]  # type: ignore[attr-defined]


def test_a_step_without_an_auxiliary_model_has_neither(
    ranks: tuple[PolicyRanks, AuxiliaryRanks],
) -> None:
    policy, _ = ranks
    refs, groups = samples()
    updates: Any = policy.train("ppo", refs, groups, 0.5).updates
    assert [(metrics["state"], metrics["values"]) for metrics in updates] == [(-1, 0)] * UPDATES


def test_the_fault_of_a_rank_gets_its_name_gpu_and_node(
    ranks: tuple[PolicyRanks, AuxiliaryRanks],
) -> None:
    policy, _ = ranks
    rank: Any = policy.workers[2]
    rank.rank.raising = 2
    with pytest.raises(SilentFault) as caught:
        policy.train("ppo", *samples(), 0.5)
    assert str(caught.value) == "training rank 5 (GPU 5 of gpu-17, 10.0.0.5) differed"


def test_an_engines_fault_that_comes_while_ranks_train_is_not_a_ranks(
    ranks: tuple[PolicyRanks, AuxiliaryRanks],
) -> None:
    policy, _ = ranks
    fault = SilentFault("engine", "gave nothing", [FaultMember(1, "engine 1")])
    assert policy.located(fault) is fault


def test_all_ranks_have_the_same_norm_of_the_gradient_to_the_last_bit(
    ranks: tuple[PolicyRanks, AuxiliaryRanks],
) -> None:
    policy, _ = ranks
    rank: Any = policy.workers[6]
    rank.rank.grad_norm = np.nextafter(0.5, 1.0)
    with pytest.raises(SilentFault, match="training rank 6 .* another norm of the reduced grad"):
        policy.train("ppo", *samples(), 0.5)


def test_one_rank_reports_the_rows_of_each_data_parallel_rank(
    ranks: tuple[PolicyRanks, AuxiliaryRanks],
) -> None:
    policy, _ = ranks
    assert policy.row_diffs().keys[:, 0].tolist() == [4, 6]


def test_ranks_that_were_started_anew_are_attended_from_their_first_checkpoint(
    ranks: tuple[PolicyRanks, AuxiliaryRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number that each call has, of which new processes know no earlier ones."""
    policy, _ = ranks
    saved: list[int] = []
    attended: list[int] = []

    def call(self: Worker, method: str, *args: Any) -> Ref:
        if method == "attend_disk":
            attended.append(args[0])
        elif method == "save":
            saved.append(args[-1])
        return Ref(None)

    monkeypatch.setattr(Worker, "call", call)
    policy.save(Path("first"))
    policy.save(Path("second"))
    policy.processes.start()
    policy.save(Path("third"))
    count = len(policy.workers)
    assert attended == saved == [1] * count + [2] * count + [3] * count
