"""The launchers, with stand-ins for Ray and megarl on PATH: what they start, hand on, refuse and leave."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.desk import ROOT, Desk, ended, output_of, stub, wait_until

RUNS = sorted((ROOT / "scripts").glob("run_*.sh"))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Desk(tmp_path) as job_desk:
        yield job_desk


# --- run_*.sh ----------------------------------------------------------------------------------------------------


def test_there_is_a_launcher_for_every_algorithm_and_model() -> None:
    models = ("qwen3_30b", "qwen3_235b", "deepseek671b")
    names = {f"{algorithm}_{model}" for algorithm in ("grpo", "dapo", "vapo") for model in models}
    names |= {"dapo_qwen2_5_32b", "grpo_lora_kimi_k2", "retool_qwen3_30b", "search_r1_qwen3_30b"}
    names |= {"grpo_glm4_5_air", "grpo_glm4_6", "grpo_qwen3_30b_128k"}
    names |= {
        "grpo_qwen3_next",
        "grpo_minimax_m2",
        "grpo_hy_v3",
        "grpo_qwen3_5_35b",
        "grpo_qwen3_5_397b",
    }
    assert {path.stem.removeprefix("run_") for path in RUNS} == names


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_launchers_differ_in_their_recipe_alone(path: Path) -> None:
    name = path.stem.removeprefix("run_")
    (recipe,) = re.findall(
        r"^exec megarl train recipes/(\w+)\.yaml ", path.read_text(), re.MULTILINE
    )
    assert (
        recipe.removesuffix("_64gpus") == name and (ROOT / "recipes" / f"{recipe}.yaml").is_file()
    )
    plain = path.read_text().replace(recipe, "NAME").replace(name, "NAME")
    assert plain == RUNS[0].read_text().replace(RUNS[0].stem[4:], "NAME")


def test_a_launcher_hands_everything_on(desk: Desk) -> None:
    arguments = ["recipes/overlays/one.yaml", "run.name=a b", "--dry-run", "--resume"]
    command = ["bash", ROOT / "scripts" / "run_dapo_deepseek671b.sh", *arguments]
    output_of(desk.start(*command, lives="75", NCCL_DEBUG="INFO", MEGARL_INTERFACE="eth7"), 75)
    (life,) = desk.lives()
    assert life["argv"] == ["train", "recipes/dapo_deepseek671b.yaml", *arguments]
    assert life["cwd"] == str(ROOT)
    expected = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "=eth7", "GLOO_SOCKET_IFNAME": "eth7"}
    expected |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert expected.items() <= life["env"].items()


def test_a_missing_megarl_is_said_in_a_line(desk: Desk, tmp_path: Path) -> None:
    scripts = tmp_path / "elsewhere" / "scripts"
    scripts.mkdir(parents=True)
    for name in ("launch_env.sh", RUNS[0].name):
        (scripts / name).write_text((ROOT / "scripts" / name).read_text())
    out = output_of(desk.start("bash", scripts / RUNS[0].name, PATH="/usr/bin:/bin"), 2)
    assert out == (
        f"megarl: megarl is neither on PATH nor in {tmp_path}/elsewhere/.venv/bin: install it there, or activate its "
        "environment\n"
    )


# --- ray_node.sh -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "more", "says"),
    [
        (("head",), {}, "usage: ray_node.sh head FILE | worker HOST:PORT"),
        (("worker", "h:1"), {}, "RAY_AUTH_TOKEN_PATH names no file"),
        (
            ("worker", "h:1"),
            {"RAY_AUTH_TOKEN": "x", "SLURMD_NODENAME": "127.0.0.2"},
            "this node has no GPU",
        ),
    ],
)
def test_what_a_node_lacks_is_said_in_a_line(
    desk: Desk, arguments: tuple[str, ...], more: dict[str, str], says: str
) -> None:
    gpus = {"MEGARL_GPUS_PER_NODE": "0"}
    code, out = ended(
        desk.start("bash", ROOT / "scripts" / "ray_node.sh", *arguments, **more, **gpus)
    )
    assert code == 2
    assert out.startswith(f"megarl: {says}") and out.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {},
            "this node has several addresses (10.0.0.7, 192.168.0.7): set MEGARL_NODE_ADDRESS or MEGARL_INTERFACE",
        ),
        (
            {"MEGARL_NODE_ADDRESS": "node7"},
            "MEGARL_NODE_ADDRESS is node7: write a numeric IPv4 address",
        ),
        (
            {"MEGARL_NODE_ADDRESS": "fe80::7"},
            "MEGARL_NODE_ADDRESS is fe80::7: write a numeric IPv4 address",
        ),
    ],
)
def test_the_address_of_a_node_is_not_guessed(
    desk: Desk, tmp_path: Path, more: dict[str, str], says: str
) -> None:
    stub(tmp_path, "getent", "echo '127.0.1.1 STREAM node7'")
    stub(
        tmp_path,
        "hostname",
        "[[ $# == 0 ]] && echo node7 || echo '127.0.1.1 10.0.0.7 192.168.0.7 fe80::7'",
    )
    path = os.pathsep.join([str(tmp_path), desk.path])
    command = ["bash", ROOT / "scripts" / "ray_node.sh", "worker", "h:1"]
    code, out = ended(desk.start(*command, PATH=path, RAY_AUTH_TOKEN="x", **more))
    assert (code, out) == (2, f"megarl: {says}\n")


def test_paths_are_of_the_callers_folder(desk: Desk, tmp_path: Path) -> None:
    """Overlays, and what the environment names; a recipe of the repository is found from everywhere."""
    caller = tmp_path / "elsewhere"
    caller.mkdir()
    for name in ("own.yaml", "token"):
        (caller / name).touch()
    arguments = ["own.yaml", "recipes/overlays/smoke.yaml", "run.name=own.yaml"]
    command = ["bash", ROOT / "scripts" / "run_dapo_deepseek671b.sh", *arguments]
    desk.folder = caller
    output_of(desk.start(*command))
    assert desk.lives()[0]["argv"][2:] == [f"{caller}/own.yaml", *arguments[1:]]
    variables = {
        "MEGARL_RAY_DIR": ".",
        "RAY_AUTH_TOKEN_PATH": "token",
        "MEGARL_NODE_ADDRESS": "127.0.0.2",
    }
    node = desk.start(
        "bash",
        ROOT / "scripts" / "ray_node.sh",
        "head",
        "address",
        MEGARL_GPUS_PER_NODE="1",
        **variables,
    )
    wait_until((caller / "address").exists)
    (folder,) = caller.glob("megarl-ray-*")
    assert desk.ray("127.0.0.2")["env"]["TMPDIR"] == f"{caller}/./{folder.name}/tmp"
    wait_until((desk.room / "nodes" / "127.0.0.2").exists)
    node.send_signal(signal.SIGTERM)
    ended(node)
    assert not folder.exists()


def test_every_variable_is_described() -> None:
    files = [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts" / "slurm").iterdir()]
    names = {name for file in files for name in re.findall(r"MEGARL_[A-Z_]+", file.read_text())}
    text = (ROOT / "docs" / "cluster.md").read_text()
    # Of the set-up (MEGARL_VENV for the GPU check alone), between the GPU check and its tests, and inside enroot's.
    elsewhere = {
        "MEGARL_TORCH_INDEX",
        "MEGARL_VENV",
        "MEGARL_GPU_RESULTS",
        "MEGARL_SIMULATED_VENV",
        "MEGARL_DIRECTORY",
    }
    assert {name for name in names if f"`{name}`" not in text} == elsewhere
