"""The first line of a hang's page, from planted evidence: each illness is named, and nothing else in its place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megarl.diagnosis.collectives import Collective, absence
from megarl.diagnosis.culprit import culprit, named_culprit, seems_hung
from megarl.diagnosis.evidence import (
    RAYLET,
    Evidence,
    Frame,
    NodeEvidence,
    ProcessEvidence,
    ThreadStack,
    WorkerEvidence,
)
from megarl.diagnosis.page import hang_page
from megarl.diagnosis.phases import Phase
from megarl.types.conditions import RunningJob, TimedCall, WorkerCondition, WorkLoad

SECONDS = 90.0
NO_LOAD = WorkLoad()
BASE = [
    Frame("run", "concurrent/futures/thread.py", 58),
    Frame("_worker", "concurrent/futures/thread.py", 83),
    Frame("run", "threading.py", 982),
]
IDLE = ThreadStack("idle", [Frame("wait", "threading.py", 327), *BASE[1:]])


def reduction(line: int = 80) -> ThreadStack:
    """A rank's thread in an all_reduce, as py-spy shows it."""
    frames = [
        Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2812),
        Frame("wrapper", "torch/distributed/c10d_logger.py", 83),
        Frame("_allreduce_norm", "megatron/core/optimizer/clip_grads.py", 110),
        Frame("step", "megarl/training/policy.py", line),
    ]
    return ThreadStack("work", [*frames, *BASE])


def at_work(function: str = "forward", file: str = "megarl/parallel/model.py") -> ThreadStack:
    return ThreadStack("work", [Frame(function, file, 7), *BASE])


def worker(
    name: str,
    *,
    calls: Sequence[TimedCall] = (TimedCall("train", SECONDS),),
    load: WorkLoad = NO_LOAD,
    is_awaited: bool = True,
    answers: bool = True,
    node: str = "10.0.0.1",
) -> WorkerEvidence:
    condition = WorkerCondition(1, calls, TimedCall("compute_logprobs", 95.0), load)
    return WorkerEvidence(name, node, 1, is_awaited, condition if answers else None)


def process(
    name: str,
    *threads: ThreadStack,
    state: str = "S",
    cpu_share: float = 0.0,
    title: str = "",
) -> ProcessEvidence:
    return ProcessEvidence(
        pid=70,
        title=title,
        worker=name,
        is_own=not title,
        state=state,
        cpu_share=cpu_share,
        threads=threads or (IDLE,),
        node="10.0.0.2",
    )


def evidence(
    workers: Sequence[WorkerEvidence],
    processes: Sequence[ProcessEvidence] = (),
    nodes: Sequence[NodeEvidence] = (NodeEvidence("10.0.0.1", 0.5),),
) -> Evidence:
    return Evidence("a test", Phase(3, "train", 0.0), SECONDS, workers, processes, nodes)


def reward(seconds: float) -> WorkLoad:
    return WorkLoad(jobs=[RunningJob("reward function", "my:score", "the row 'x'", seconds, 71)])


RANKS = [worker(f"training rank {rank}") for rank in range(3)]
IN_REDUCTION = [process(f"training rank {rank}", IDLE, reduction()) for rank in range(3)]
IN_ENGINE = [TimedCall("sample", 80.0)]
FINISHED = [worker(f"engine {index}", calls=(), is_awaited=False) for index in range(2)]
PLANTED = {
    "a dead raylet": (
        evidence(
            [*RANKS, worker("engine 0", node="10.0.0.2", answers=False)],
            IN_REDUCTION[:2],
            [NodeEvidence("10.0.0.1"), NodeEvidence("10.0.0.2", is_dead=True)],
        ),
        "node 10.0.0.2: its raylet does not answer, and with it engine 0 of the run",
    ),
    "a stopped raylet": (
        evidence([*RANKS], [process(RAYLET, state="T")]),
        "Ray's raylet on node 10.0.0.2 (pid 70): a signal has stopped the process (SIGSTOP or Ctrl-Z)",
    ),
    "a stopped scheduler": (
        evidence(
            [worker("engine 0", calls=IN_ENGINE)],
            [process("engine 0"), process("engine 0", state="T", title="scheduler")],
        ),
        "scheduler of engine 0 (pid 70): a signal has stopped the process (SIGSTOP or Ctrl-Z)",
    ),
    "a rank that has returned": (
        evidence(
            [*RANKS[:2], worker("training rank 2", calls=())],
            [*IN_REDUCTION[:2], process("training rank 2")],
        ),
        "training rank 2 is not in the all_reduce, called by step (megarl/training/policy.py:80) in which training "
        "rank 0 and training rank 1 wait; training rank 2 has no call open, has finished compute_logprobs 95 s ago, "
        "idle",
    ),
    "a rank that sleeps": (
        evidence(RANKS, [*IN_REDUCTION[:2], process("training rank 2", IDLE, at_work("nap"))]),
        "training rank 2 is not in the all_reduce, called by step (megarl/training/policy.py:80) in which training "
        "rank 0 and training rank 1 wait; training rank 2 in train for 90 s, at nap (megarl/parallel/model.py:7), "
        "without a processor",
    ),
    "a rank in another collective": (
        evidence(RANKS, [*IN_REDUCTION[:2], process("training rank 2", reduction(line=99))]),
        "training rank 2 is not in the all_reduce, called by step (megarl/training/policy.py:80) in which training "
        "rank 0 and training rank 1 wait; training rank 2 in train for 90 s, in the all_reduce, called by step "
        "(megarl/training/policy.py:99)",
    ),
    "a full store": (
        evidence(
            [*RANKS[:2], worker("training rank 2", calls=())],
            IN_REDUCTION[:2],
            [NodeEvidence("10.0.0.1", 0.4), NodeEvidence("10.0.0.2", 0.993)],
        ),
        "the object store of node 10.0.0.2 is full (99%): results and samples that are made there, or needed there, "
        "wait for room",
    ),
    "a sleeping reward": (
        evidence([worker("engine 0", calls=IN_ENGINE, load=reward(61.0))], [process("engine 0")]),
        "reward function my:score (pid 71) has been running for 61 s on the row 'x', for engine 0",
    ),
    "an actor that does not answer": (
        evidence([worker("engine 0", answers=False)], [process("engine 0", at_work())]),
        "engine 0 does not answer; engine 0 at forward (megarl/parallel/model.py:7), without a processor",
    ),
    "an actor that has not begun": (
        evidence([WorkerEvidence("engine 0", "10.0.0.1", None, True, None)]),
        "engine 0 has never answered yet: its process is still being started",
    ),
    "schedulers that stand still": (
        evidence(
            [worker("engine 1", calls=IN_ENGINE, load=WorkLoad(8, 2))],
            [process("engine 1"), process("engine 1", at_work("recv"), title="scheduler")],
        ),
        "engine 1: 8 requests are with its schedulers, which use no processor; scheduler (pid 70) is at "
        "recv (megarl/parallel/model.py:7), without a processor",
    ),
    "the last of all": (
        evidence(
            [*FINISHED, worker("engine 2", calls=IN_ENGINE)],
            [process("engine 2", at_work(), cpu_share=1.0)],
        ),
        "engine 2 is the last: engine 0 and engine 1 have finished; engine 2 in sample for 80 s, at forward "
        "(megarl/parallel/model.py:7), using a processor",
    ),
}  # fmt: skip
SOUND = {
    "all compute": (
        evidence(RANKS, [process(each.name, at_work(), cpu_share=0.9) for each in RANKS]),
        "every process computes: training rank 0, training rank 1 and training rank 2",
    ),
    "a job of a moment": (
        evidence(
            [worker("engine 0", calls=IN_ENGINE, load=reward(2.0))],
            [process("engine 0", at_work(), cpu_share=0.9)],
        ),
        "every process computes: engine 0",
    ),
    "nobody is waited for": (
        evidence([worker("engine 0", calls=(), is_awaited=False)]),
        "no call of a worker is waited for: the controller itself is at work, see its stack",
    ),
}


@pytest.mark.parametrize("name", [*PLANTED, *SOUND])
def test_the_first_line_names_what_was_planted(name: str):
    planted, line = (PLANTED | SOUND)[name]
    assert culprit(planted) == line
    assert hang_page(planted).splitlines()[0] == line
    assert bool(named_culprit(planted)) == (name in PLANTED)


OF_MOMENTS = {
    "a rank that computes while others wait": evidence(
        RANKS, [*IN_REDUCTION[:2], process("training rank 2", at_work(), cpu_share=0.9)]
    ),
    "the last of all": PLANTED["the last of all"][0],
    "a full store": evidence(
        RANKS,
        [process(each.name, at_work(), cpu_share=0.9) for each in RANKS],
        [NodeEvidence("10.0.0.2", 0.993)],
    ),
    "a job of two thirds": PLANTED["a sleeping reward"][0],
    "a server of others samples": evidence(
        [worker("engine 0", calls=IN_ENGINE, load=WorkLoad(8, 2))], [process("engine 0")]
    ),
}
OF_NO_HEALTHY_PHASE = {
    "a job of the whole phase": evidence(
        [worker("engine 0", calls=IN_ENGINE, load=reward(85.0))], [process("engine 0", at_work())]
    ),
    "all ranks sleep": evidence(RANKS, [process(each.name, at_work("nap")) for each in RANKS]),
    "an actor that does not answer": PLANTED["an actor that does not answer"][0],
    "schedulers that stand still": PLANTED["schedulers that stand still"][0],
    "a rank that sleeps": PLANTED["a rank that sleeps"][0],
    "a stopped scheduler": PLANTED["a stopped scheduler"][0],
    "a dead raylet": PLANTED["a dead raylet"][0],
}


@pytest.mark.parametrize("name", [*SOUND, *OF_MOMENTS])
def test_a_healthy_phase_may_last_as_long_as_it_likes(name: str):
    assert not seems_hung(OF_MOMENTS[name] if name in OF_MOMENTS else SOUND[name][0])


@pytest.mark.parametrize("name", OF_NO_HEALTHY_PHASE)
def test_what_a_healthy_phase_has_for_a_moment_at_most(name: str):
    planted = OF_NO_HEALTHY_PHASE[name]
    assert seems_hung(planted) and named_culprit(planted)


def test_stages_of_a_pipeline_wait_each_in_its_own_way():
    """Sends and receives of neighbours: none of them is missing from another's."""
    calls = [Collective(name, None) for name in ("send", "recv", "batch_isend_irecv")]
    assert absence({f"rank {index}": call for index, call in enumerate(calls)}) is None
    assert absence({"rank 0": None, "rank 1": None}) is None
    assert absence(dict.fromkeys(("rank 0", "rank 1"), calls[0])) is None


def test_the_page_has_every_process_and_no_control_characters():
    hostile = ThreadStack("\x1b[2J", [Frame("f\n", "x.py", 1)])
    planted = evidence(
        [worker("engine 0", calls=IN_ENGINE, load=reward(61.0))],
        [process("engine 0", hostile, IDLE), process("engine 0", title="reward_host")],
    )
    page = hang_page(planted)
    assert "\x1b" not in page and "reward_host of engine 0" in page
    assert "the longest sample for 80.0 s" in page and "object store 50% full" in page
    assert "and 1 threads that wait for work" in page
