"""megarl.sbatch, with stand-ins for Slurm, Ray and megarl on PATH: what takes a real Slurm longer than a test may.

That is many lives of one job, time limits, and nodes that do not start; tests/end_to_end/test_slurm.py has the rest.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.desk import ROOT, SLURM, Desk, ended, output_of, stub, wait_until

pytestmark = pytest.mark.slow


# A stand-in for `enroot start`, which does as enroot's _do_environ and _do_rc do. An image's own /etc/rc changes the
# directory. What the stand-ins for Slurm and Ray need of the environment stays.
_ENROOT = """
[[ $1 == --of=x ]] || exit 1
source {root}/scripts/slurm/enroot_conf.sh
export IN_IMAGE=1 "$(environ | grep ^MEGARL_DIRECTORY=)"
script='cd {image} && exec "$@"'
[[ $(type -t rc) != function ]] || script=$(declare -f rc | sed '1,2d;$d')
cd {image}
PATH="{path}" exec sh -c "$script" rc "${{@:2}}"
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Desk(tmp_path) as job_desk:
        yield job_desk


def test_a_job_gives_megarl_a_ray_of_all_its_nodes(desk: Desk) -> None:
    out = desk.done("recipes/dapo_deepseek671b.yaml", "run.name=a b", nodes=3)
    assert out.splitlines()[-1] == "megarl: job 4711: the run is done"
    (life,) = desk.lives()
    keys = ["placement.network=nodes", "run.name=a b"]
    assert life["argv"] == ["train", "recipes/dapo_deepseek671b.yaml", *keys, "--resume"]
    assert life["nodes"] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"], (
        "all of them were there before it began"
    )
    assert life["env"]["RAY_ADDRESS"] == "127.0.0.2:6001"
    assert life["env"]["RAY_AUTH_MODE"] == "token"
    assert "--address=127.0.0.2:6001" in desk.ray("127.0.0.4")["argv"]
    assert list((desk.room / "nodes").iterdir()) == [], "Ray was ended on every node, by SIGTERM"
    assert list(desk.room.glob("megarl-*")) == []
    assert list(desk.jobs.iterdir()) == []


def test_with_a_container_nothing_of_megarl_is_needed_outside(desk: Desk) -> None:
    """MEGARL_CONTAINER's command, whose words go before the others, starts Ray and megarl where it was called."""
    outside, image = desk.room / "outside", desk.room / "image"
    for folder in (outside, image):
        folder.mkdir()
    stub(outside, "python3", f'exec {sys.executable} "$@"')  # of the stand-ins for Slurm
    stub(image, "run", _ENROOT.format(image=image, root=ROOT, path=desk.path))
    path = os.pathsep.join(map(str, (SLURM, outside, "/usr/bin", "/bin")))
    desk.done("r.yaml", PATH=path, MEGARL_CONTAINER=f"{image}/run --of=x")
    (life,) = desk.lives()
    assert life["argv"] == ["train", "r.yaml", "placement.network=nodes", "--resume"]
    assert life["cwd"] == str(ROOT)
    for process in (life, desk.ray("127.0.0.2"), desk.ray("127.0.0.3")):
        assert process["env"]["IN_IMAGE"] == "1"
        assert "MEGARL_CONTAINER" not in process["env"], "what runs inside looks for megarl there"


def test_enroot_is_told_what_a_job_needs_of_the_hosts_environment() -> None:
    variables = {
        "RAY_AUTH_TOKEN_PATH": "/t",
        "SLURM_JOB_ID": "7",
        "TMPDIR": "/x",
        "LD_LIBRARY_PATH": "/l",
    }
    command = ["bash", "-c", f"source {ROOT}/scripts/slurm/enroot_conf.sh && environ"]
    environment = variables | {"PATH": os.environ["PATH"]}
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert sorted(output.splitlines()) == [
        f"MEGARL_DIRECTORY={os.getcwd()}",
        "RAY_AUTH_TOKEN_PATH=/t",
        "SLURM_JOB_ID=7",
        "TMPDIR=/x",
    ]


def test_the_token_is_in_a_file_of_the_users_own_alone(desk: Desk) -> None:
    out = desk.done("r.yaml", RAY_AUTH_TOKEN="of another cluster")
    (life,) = desk.lives()
    processes = [desk.ray("127.0.0.2"), desk.ray("127.0.0.3"), life]
    (token,) = {process["token"] for process in processes[:2]}
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    assert {process["mode"] for process in processes[:2]} == {0o600}
    for process in processes:
        assert process["env"]["RAY_AUTH_TOKEN_PATH"].startswith(str(desk.jobs))
        assert token not in " ".join([*process["argv"], *process["env"].values()])
        assert "RAY_AUTH_TOKEN" not in process["env"]
    assert token not in out


def test_a_job_from_elsewhere_is_answered_in_a_line(desk: Desk, tmp_path: Path) -> None:
    out = desk.done("r.yaml", MEGARL_ROOT=str(tmp_path), code=2)
    assert (
        out
        == f"megarl: {tmp_path} is not the repository: submit the job there, or set MEGARL_ROOT\n"
    )


def test_each_job_has_ports_of_its_own(desk: Desk) -> None:
    """Two on one node: what Ray would take a fixed port for gets a free one."""
    desk.done("r.yaml", nodes=1)
    head = desk.ray("127.0.0.2")
    assert {"--port=0", "--min-worker-port=0", "--max-worker-port=0"} <= set(head["argv"])
    port = next(arg for arg in head["argv"] if arg.startswith("--ray-client-server-port="))
    assert 24711 <= int(port.split("=")[1]) < 32000, (
        "by the job's number, unless another job has it"
    )
    assert {
        "--num-gpus=2",
        "--num-cpus=2",
        "--include-dashboard=false",
        "--disable-usage-stats",
    } <= set(head["argv"])
    variables = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    assert int(next(arg for arg in head["argv"] if "--object-store" in arg).split("=")[1]) <= 2**35
    variables |= {"RAY_memory_usage_threshold": "0.99", "RAY_health_check_timeout_ms": "5000"}
    variables |= {"RAY_health_check_failure_threshold": "3"}
    assert (variables | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}).items() <= head[
        "env"
    ].items()


@pytest.mark.parametrize(
    ("lives", "last_line", "code"),
    [
        ("1 75 1 0", "the run is done", 0),
        ("137 1", "failed (exit code 1) and is not queued again after 1 restarts", 1),
        ("75 75 0", "the run is done", 0),
        ("2", "something is to be mended, see above; it is not queued again", 2),
        ("143", "ended by a signal; it is not queued again", 143),
        ("79", "ended by megarl drain; it is not queued again, and the same sbatch goes on", 79),
    ],
)
def test_what_is_queued_again(desk: Desk, lives: str, last_line: str, code: int) -> None:
    """A failure so many times between two ends that were asked for; the user's fault never."""
    (desk.jobs / "4711-killed").mkdir(parents=True)  # left by a life that ended with its node
    exit_code, out = ended(desk.submit("r.yaml", nodes=1, lives=lives, MEGARL_MAX_RESTARTS="1"))
    assert exit_code == code, out
    assert out.splitlines()[-1] == f"megarl: job 4711: {last_line}"
    assert len(desk.lives()) == len(lives.split())
    kept = [str(index) for index, end in enumerate(lives.split()) if end not in ("0", "75", "79")]
    assert {path.name for path in desk.jobs.iterdir()} <= {"4711.logs"}, (
        "neither a token nor a count is left"
    )
    assert sorted(path.name for path in desk.jobs.glob("4711.logs/*")) == kept, (
        "of each life that failed"
    )
    tokens = {life["env"]["RAY_AUTH_TOKEN_PATH"] for life in desk.lives()}
    assert len(tokens) == len(lives.split()), "each life has a cluster of its own"


def test_a_step_that_outlasts_the_time_limit_goes_on_from_its_checkpoint(desk: Desk) -> None:
    """SIGUSR1 twice, by the user and by Slurm, then the limit: megarl would take a second one as SIGTERM."""
    job = desk.submit("r.yaml", lives="BUSY 0", MEGARL_MAX_RESTARTS="0", FAKE_REASON="TimeLimit")
    desk.wait_for_life(1)
    job.send_signal(signal.SIGUSR1)
    wait_until(lambda: desk.heard() == ["SIGUSR1"])
    job.send_signal(signal.SIGUSR1)
    job.send_signal(signal.SIGTERM)
    out = output_of(job)
    assert desk.heard() == ["SIGUSR1", "SIGTERM"]
    assert "megarl: job 4711: ended before its time limit and is queued again" in out.splitlines()
    assert len(desk.lives()) == 2


def test_at_the_limit_the_job_is_queued_before_ray_is_ended(desk: Desk, tmp_path: Path) -> None:
    """Slurm kills the job's script half a minute after its SIGTERM."""
    first, order = tmp_path / "bin", tmp_path / "order"
    first.mkdir()
    for name in ("scontrol", "scancel"):
        stub(first, name, f'echo {name} >>{order}\nexec {SLURM / name} "$@"')
    path = os.pathsep.join([str(first), desk.path])
    job = desk.submit("r.yaml", nodes=1, lives="BUSY 0", PATH=path, FAKE_REASON="TimeLimit")
    desk.wait_for_life(1)
    job.send_signal(signal.SIGUSR1)
    wait_until(lambda: desk.heard() == ["SIGUSR1"])
    job.send_signal(signal.SIGTERM)
    output_of(job)
    assert order.read_text().split() == ["scontrol", "scancel", "scancel"]


def test_a_megarl_that_hears_no_signal_is_killed(desk: Desk) -> None:
    """As in a call into a Ray that is gone; else Slurm would kill the job's script too, with the token on the disk."""
    job = desk.submit("r.yaml", nodes=1, lives="DEAF", MEGARL_END_S="1")
    desk.wait_for_life(1)
    job.send_signal(signal.SIGTERM)
    out = output_of(job, 143)
    assert out.splitlines()[-1] == "megarl: job 4711: ended by a signal; it is not queued again"
    assert {path.name for path in desk.jobs.iterdir()} == {"4711.logs"}


def test_a_job_that_makes_no_progress_is_not_queued_for_ever(desk: Desk, tmp_path: Path) -> None:
    arguments = ["recipes/quickstart.yaml", f"run.dir={tmp_path}", "run.name=x", "--dry-run"]
    saves = str(tmp_path / "x" / "checkpoints")
    lives = "75 75+ 75+ 75 75"
    out = desk.done(
        *arguments, nodes=1, lives=lives, FAKE_SAVES=saves, MEGARL_MAX_RESTARTS="1", code=75
    )
    messages = [
        line.removeprefix("megarl: job 4711: ")
        for line in out.splitlines()
        if "queued again" in line
    ]
    early = "ended before its time limit"
    assert messages == [
        *[f"{early} and is queued again"] * 3,
        f"{early} with no newer checkpoint than last time and is queued again, restart 1 of 1",
        f"{early} with no newer checkpoint than last time and is not queued again after 1 restarts",
    ]
    assert list(desk.jobs.iterdir()) == []


def test_one_node_of_many_that_does_not_start_is_noticed(desk: Desk) -> None:
    """srun itself goes on for as long as any node of its step does."""
    out = desk.done("r.yaml", nodes=3, FAKE_BROKEN="127.0.0.4", MEGARL_MAX_RESTARTS="0", code=1)
    reason = "127.0.0.4: Ray ended (exit code 7), this node is broken"
    assert (
        f"megarl: Ray ended on a node while Ray on all 3 nodes was awaited: {reason}"
        in out.splitlines()
    )
    assert list((desk.room / "nodes").iterdir()) == []


def told(out: str) -> list[str]:
    """What the job's script said of nodes."""
    lines = [line.removeprefix("megarl: job 4711: ") for line in out.splitlines()]
    return [line for line in lines if line.startswith("node ")]


def test_bad_nodes_add_up_over_restarts(desk: Desk) -> None:
    """A fault makes a node bad at once, a suspicion the second time; a node that is down is none of those left."""
    out = desk.done("r.yaml", lives="1!3 1?4 1!9 1?4 1 0", MEGARL_MAX_RESTARTS="5")
    assert desk.exclusions() == [
        "127.0.0.3",
        "127.0.0.3",
        "127.0.0.3,127.0.0.9",
        "127.0.0.3,127.0.0.4,127.0.0.9",
        "127.0.0.3,127.0.0.4,127.0.0.9",
    ]
    first, second, *_ = told(out)
    assert first == second == "node 127.0.0.3 is excluded: it fell in life 0"
    assert "node 127.0.0.4 is excluded: it fell in life 3" in told(out)
    assert {path.name for path in desk.jobs.iterdir()} == {"4711.logs"}


def test_as_many_are_excluded_as_may_be_the_newest_first(desk: Desk) -> None:
    out = desk.done("r.yaml", nodes=1, lives="1!3 1!4 1!5 0", MEGARL_MAX_EXCLUDED="2")
    assert desk.exclusions()[-1] == "127.0.0.4,127.0.0.5"
    assert told(out)[-1] == "node 127.0.0.3 is not excluded, 2 others are: it fell in life 0"


def test_the_job_keeps_as_many_nodes_as_it_needs(desk: Desk) -> None:
    """Of four, one is down: the job would wait for ever."""
    out = desk.done("r.yaml", nodes=2, lives="1!3 1!4 0", FAKE_LAST_NODE="5")
    assert desk.exclusions() == ["127.0.0.3", "127.0.0.4"]
    assert told(out)[1:] == [
        "node 127.0.0.4 is excluded: it fell in life 1",
        "node 127.0.0.3 is not excluded, too few would be left: it fell in life 0",
    ]


def test_what_others_exclude_stays_and_what_they_forgive_is_forgiven(
    desk: Desk, tmp_path: Path
) -> None:
    """The user excluded a node at the start; then a line is taken out of the file by hand, as soon as it is there."""
    (desk.room / "excluded").write_text("127.0.0.7\n")
    forgiving = tmp_path / "bin"
    forgiving.mkdir()
    forgive = f"[[ $SLURM_RESTART_COUNT != 1 ]] || rm {desk.jobs}/4711.bad_nodes"
    stub(forgiving, "megarl", f'{forgive}\nexec {SLURM / "stubs" / "megarl"} "$@"')
    path = os.pathsep.join([str(forgiving), desk.path])
    desk.done("r.yaml", lives="1!3 1!4 0", PATH=path)
    assert desk.exclusions() == ["127.0.0.3,127.0.0.7", "127.0.0.4,127.0.0.7"]


def test_a_node_that_is_none_of_slurms_excludes_no_other(desk: Desk) -> None:
    out = desk.done("r.yaml", lives="1!77 0")
    assert desk.exclusions() == [""]
    assert "127.0.0.77 is no node of partition all and is not excluded: it fell in life 0" in out


def test_a_node_that_does_not_start_twice_is_excluded(desk: Desk) -> None:
    out = desk.done("r.yaml", nodes=3, FAKE_BROKEN="127.0.0.4", MEGARL_MAX_RESTARTS="2", code=1)
    assert (desk.room / "excluded").read_text() == "127.0.0.4\n"
    reason = "127.0.0.4: Ray ended (exit code 7), this node is broken"
    assert told(out) == [f"node 127.0.0.4 is excluded: {reason}"]


def test_a_node_with_fewer_gpus_than_slurm_says_does_not_start(desk: Desk, tmp_path: Path) -> None:
    first = tmp_path / "bin"
    first.mkdir()
    stub(first, "nvidia-smi", "echo GPU 0: NVIDIA H800")
    path = os.pathsep.join([str(first), desk.path])
    out = desk.done("r.yaml", nodes=1, MEGARL_MAX_RESTARTS="0", PATH=path, code=1)
    assert "127.0.0.2: this node is to give 2 GPUs, and nvidia-smi lists 1" in out


def test_the_death_of_the_first_node_with_the_script_is_suspicious(desk: Desk) -> None:
    for life, node in (("killed", "127.0.0.8"), ("kill-2", "127.0.0.8")):
        folder = desk.jobs / f"4711-{life}"
        folder.mkdir(parents=True)
        (folder / "head").write_text(f"{node}\n")
    out = desk.done("r.yaml", lives="1 0")
    assert told(out) == ["node 127.0.0.8 is excluded: the job's script ended there without a word"]


def test_a_node_that_died_counts_as_no_failure_where_the_run_went_on(
    desk: Desk, tmp_path: Path
) -> None:
    arguments = ["recipes/quickstart.yaml", f"run.dir={tmp_path}", "run.name=x", "--dry-run"]
    saves = str(tmp_path / "x" / "checkpoints")
    lives = "1+!3 1+!4 1+!5 1!6"
    out = desk.done(*arguments, lives=lives, FAKE_SAVES=saves, MEGARL_MAX_RESTARTS="1", code=1)
    assert out.count("is queued again, restart 1 of 1") == 3
    assert out.splitlines()[-1].endswith("is not queued again after 1 restarts")


def test_the_logs_of_a_run_that_failed_outlive_its_nodes(desk: Desk) -> None:
    out = desk.done("r.yaml", lives="1", MEGARL_MAX_RESTARTS="0", code=1)
    logs = desk.jobs / "4711.logs" / "0"
    assert f"megarl: job 4711: the logs of its nodes are in {logs}" in out.splitlines()
    for address in ("127.0.0.2", "127.0.0.3"):
        assert (logs / address / "logs" / "worker.out").read_text() == f"of {address}"
        assert desk.ray(address)["env"]["NCCL_DEBUG_FILE"] == f"{logs}/nccl.%h.%p"
    assert list(desk.room.glob("megarl-*")) == []


@pytest.mark.parametrize("broken", ["127.0.0.2", "127.0.0.3"])
def test_a_node_whose_ray_does_not_start_is_a_failure(desk: Desk, broken: str) -> None:
    out = desk.done("r.yaml", FAKE_BROKEN=broken, MEGARL_MAX_RESTARTS="1", code=1)
    assert f"megarl: Ray ended on {broken} (exit code 7)" in out
    assert "megarl: Ray ended on a node while Ray" in out
    assert out.count("is queued again, restart 1 of 1") == 1
    assert out.splitlines()[-1].endswith(
        "failed (exit code 1) and is not queued again after 1 restarts"
    )
    assert desk.lives() == []


def test_ray_is_not_waited_for_without_end(desk: Desk) -> None:
    out = desk.done("r.yaml", FAKE_MUTE="1", MEGARL_START_S="1", MEGARL_MAX_RESTARTS="0", code=1)
    assert "megarl: waited 1 s in vain for Ray's head" in out.splitlines()


def test_a_signal_while_ray_starts_queues_the_job_again(desk: Desk, tmp_path: Path) -> None:
    """In the job's first life Ray never says that all nodes have joined."""
    first, asked, real = tmp_path / "bin", tmp_path / "asked", SLURM / "stubs" / "ray"
    first.mkdir()
    ready = "[[ $1 == start || $SLURM_RESTART_COUNT == 1 ]]"
    stub(first, "ray", f'{ready} && exec {real} "$@"\n: >{asked}')
    job = desk.submit("r.yaml", PATH=os.pathsep.join([str(first), desk.path]))
    wait_until(asked.exists)
    job.send_signal(signal.SIGUSR1)
    out = output_of(job)
    assert "ended before its time limit and is queued again" in out
    assert len(desk.lives()) == 1
