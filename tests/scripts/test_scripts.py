"""The scripts: what they make, and that the set-up is repeatable, exact and clear about what it lacks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.calculator import calculate

ROOT = Path(__file__).parents[2]
SHELL_FILES = [
    *sorted((ROOT / "scripts").glob("*.sh")),
    *sorted((ROOT / "scripts" / "slurm").iterdir()),
    *(ROOT / "tests" / "slurm" / name for name in ("scancel", "scontrol", "squeue")),
    ROOT / ".ci" / "run",
]


def make(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# --- data --------------------------------------------------------------------------------------------------------


def test_arithmetic_is_right_and_its_evaluation_is_held_out(arithmetic: Path) -> None:
    train, evaluation = rows(arithmetic / "train.jsonl"), rows(arithmetic / "eval.jsonl")
    assert len(evaluation) == 256
    for row in [*train, *evaluation]:
        match = re.fullmatch(r"([1-9]\d\d)\+(\d)=", row["prompt"])
        assert match, row
        assert row["answer"] == str(int(match[1]) + int(match[2]))
    assert not {row["prompt"] for row in evaluation} & {row["prompt"] for row in train}
    prompts = [row["prompt"] for row in [*train, *evaluation]]
    assert len(set(prompts)) == len(prompts) == 9000


def test_arithmetic_is_the_same_for_the_same_seed(arithmetic: Path, tmp_path: Path) -> None:
    make("make_arithmetic.py", "--out", tmp_path / "same")
    make("make_arithmetic.py", "--out", tmp_path / "other", "--seed", "2")
    assert digests(tmp_path / "same") == digests(arithmetic)
    assert digests(tmp_path / "other")["train.jsonl"] != digests(arithmetic)["train.jsonl"]


def test_multiplications_are_right_and_a_quarter_of_them_is_demonstrated_with_the_calculator(
    tmp_path: Path,
) -> None:
    make("make_arithmetic.py", "--tools", "--out", tmp_path)
    train, evaluation = rows(tmp_path / "train.jsonl"), rows(tmp_path / "eval.jsonl")
    assert (len(train), len(evaluation)) == (8100 - 256, 256)
    assert len({row["prompt"] for row in [*train, *evaluation]}) == 8100
    for row in [*train, *evaluation]:
        match = re.fullmatch(r"([1-9]\d)\*([1-9]\d)=", row["prompt"])
        assert match, row
        assert row["answer"] == str(int(match[1]) * int(match[2]))
    with_calls = [row for row in train if len(row["messages"]) > 1]
    assert len(with_calls) == len(train) // 4
    for row in train:
        assert row["messages"][-1] == {"role": "assistant", "content": row["answer"]}
    for row in with_calls:
        called, result, _ = row["messages"]
        arguments = json.loads(called["tool_calls"][0]["function"]["arguments"])
        assert arguments == {"expression": row["prompt"].removesuffix("=")}
        assert result["content"] == calculate(**arguments)


# --- model -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_model_is_the_same_for_the_same_seed(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()  # an older folder is replaced, whole
    (tmp_path / "same" / "junk").touch()
    make("make_tiny_moe.py", "--out", tmp_path / "same")
    assert digests(tmp_path / "same") == digests(tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_the_model_is_what_the_quickstart_promises(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_hidden_layers"] >= 4
    assert config.get("num_experts", config.get("num_local_experts")) == 8
    assert config["num_experts_per_tok"] == 2
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert not config["tie_word_embeddings"]


def test_the_tokenizer_reads_one_character_a_token_and_chats(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "".join(map(chr, range(32, 127))) + "\n 12+34=  46 "
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert len(tokenizer) == json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    question = [{"role": "user", "content": "12+34="}]
    answered = [*question, {"role": "assistant", "content": "46"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert (
        tokenizer.apply_chat_template(answered, tokenize=False)
        == f"{prompt}46{tokenizer.eos_token}"
    )
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert prompt_ids[0] == tokenizer.bos_token_id
    assert len(prompt_ids) == len("12+34=") + 3
    assert (
        tokenizer.decode(
            [*tokenizer.encode("46"), tokenizer.eos_token_id], skip_special_tokens=True
        )
        == "46"
    )


def test_the_model_with_tools_differs_in_its_vocabulary_alone(
    tiny_model: Path, quickstart_tools_inputs: list[str]
) -> None:
    with_tools = Path(quickstart_tools_inputs[0].removeprefix("model.path="))
    config, plain = (
        json.loads((folder / "config.json").read_text()) for folder in (with_tools, tiny_model)
    )
    assert config.pop("vocab_size") == 112 and plain.pop("vocab_size") == 102
    assert config == plain


# --- shell -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: path.name)
def test_shell_files_are_sound(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    subprocess.run([shellcheck, "-x", "--source-path=SCRIPTDIR", path], check=True)


# A stand-in for a Python: `-m venv --clear DIR` puts the stand-in itself there, anything else does nothing.
MAKES_VENV = '[[ $2 == venv ]] && mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; exit 0'
NO_VENV = "[[ -z $2 || $1 != -c ]] || exit 1"  # of one that runs, and lacks the module


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "torch==2.13.0"
PIP = "REPO/.venv/bin/python -m pip install -qq --no-deps --no-compile"
FROM_CPU_INDEX = "--retries 1 --timeout 15"
NO_CPU_BUILD = '[[ "$*" == *+cpu ]] && { echo noise; echo "ERROR: none" >&2; exit 1; }'


def bash_file(path: Path, body: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)
    return path


class Sandbox:
    """A copy of what the set-up reads, a PATH with nothing on it but our stand-ins and the usual tools."""

    TOOLS = [
        *("bash", "cat", "df", "awk", "dirname", "flock", "grep", "sha256sum", "mkdir", "mktemp"),
        *("rm", "cp", "readlink"),
    ]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repo, self.bin, self.log = folder / "repo", folder / "bin", folder / "log"
        for part in ("scripts", "requirements"):
            shutil.copytree(ROOT / part, self.repo / part)
        for part in ("setup.py", "pyproject.toml"):
            shutil.copy(ROOT / part, self.repo)
        self.bin.mkdir()
        for tool in self.TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or f"/missing/{tool}")
        self.stand_in("python3.11", MAKES_VENV)

    def stand_in(self, name: str, body: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        bash_file(self.bin / name, f'echo "$0" "$@" >>{self.log}\n{body}')

    def set_up(self, cwd: str | Path = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Source setup_env.sh; the environment is the caller's, with PATH ours."""
        script = f'source {self.repo}/scripts/setup_env.sh; echo "at $PWD ${{PYTHONPATH-clean}}"'
        return self.run("bash", "-c", script, cwd=cwd, **environment)

    def test(self) -> subprocess.CompletedProcess[str]:
        """Run test.sh."""
        return self.run("bash", f"{self.repo}/scripts/test.sh")

    def run(
        self, *command: str, cwd: str | Path = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), **environment}
        return subprocess.run(
            command, cwd=cwd or self.folder, env=env, capture_output=True, text=True
        )

    def says(self, **environment: str) -> str:
        """What a set-up says that succeeds."""
        done = self.set_up(**environment)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def refuses(self, **environment: str) -> str:
        """The line with which a set-up stops."""
        done = self.set_up(**environment)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        return line

    def commands(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [
            line.replace(str(self.repo), "REPO").replace(str(self.bin), "BIN") for line in lines
        ]


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_set_up_installs_the_lock_once_and_then_reuses_it(sandbox: Sandbox) -> None:
    first = sandbox.set_up(PYTHONPATH="/junk", PYTHONHOME="/junk", CDPATH="/")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == f"at {sandbox.repo} clean"
    assert f"making {sandbox.repo}/.venv" in first.stdout
    assert [line for line in sandbox.commands() if "-c" not in line.split()] == [
        "BIN/python3.11 -m venv --clear REPO/.venv",
        f"{PIP} {FROM_CPU_INDEX} --index-url {CPU_INDEX} {TORCH}+cpu",
        f"{PIP} -r requirements/cpu.txt",
        f"{PIP} --no-build-isolation -e .",
        "REPO/.venv/bin/python -m compileall -q -j 0 REPO/.venv/lib megarl",
    ]
    second = sandbox.set_up(Path("/"))
    assert second.stdout.splitlines() == [
        f"megarl: using {sandbox.repo}/.venv",
        f"at {sandbox.repo} clean",
    ]
    assert sandbox.commands() == []


@pytest.mark.parametrize(
    ("environment", "index", "otherwise"),
    [
        ({}, CPU_INDEX, ""),
        ({"MEGARL_TORCH_INDEX": "https://i"}, "https://i", "--index-url https://i "),
    ],
    ids=["default", "named"],
)
def test_where_the_cpu_index_has_no_torch_another_build_without_cuda_is_taken(
    sandbox: Sandbox, environment: dict[str, str], index: str, otherwise: str
) -> None:
    sandbox.stand_in("python3.11", f"{NO_CPU_BUILD}\n{MAKES_VENV}")
    output = sandbox.says(**environment)
    assert (
        f"megarl: no torch 2.13.0+cpu from {index} (ERROR: none): looking for another build"
        in output
    )
    assert [line for line in sandbox.commands() if "torch==" in line] == [
        f"{PIP} {FROM_CPU_INDEX} --index-url {index} {TORCH}+cpu",
        f"{PIP} {otherwise}--dry-run --ignore-installed --report - {TORCH}",
        f"{PIP} {otherwise}{TORCH}",
    ]


@pytest.mark.parametrize(
    "report", ['echo \'["nvidia-cublas; platform_system == \\"Linux\\""]\'', "exit 1"]
)
@pytest.mark.parametrize(("name", "tag"), [("python3.11", "cp311"), ("python3.12", "cp312")])
def test_where_only_the_cuda_build_is_in_reach_the_file_to_fetch_is_named(
    sandbox: Sandbox, name: str, tag: str, report: str
) -> None:
    (sandbox.bin / "python3.11").unlink()
    sandbox.stand_in(name, f'{NO_CPU_BUILD}\n[[ "$*" == *--report* ]] && {report}\n{MAKES_VENV}')
    line = sandbox.refuses()
    assert line.startswith(
        "megarl: pip finds no build of torch that runs without CUDA: fetch "
        f"torch-2.13.0+cpu-{tag}-{tag}-manylinux_2_28_x86_64.whl from {CPU_INDEX}/torch/ and run this again"
    )
    assert "PIP_FIND_LINKS=" in line
    assert "MEGARL_TORCH_INDEX=" in line
    assert not [
        command
        for command in sandbox.commands()
        if "-r " in command or command.endswith(TORCH) and "--dry-run" not in command
    ]


TWO_GPUS = 'echo "GPU 0: NVIDIA H800 (UUID: GPU-0)"; echo "GPU 1: NVIDIA H800 (UUID: GPU-1)"'
NO_DRIVER = (
    'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9'
)
TOOLKIT = 'echo "Cuda compilation tools, release 13.0, V13.0.88"'
CUDA_BUILD = '[[ "$*" == *--report* ]] && echo \'["nvidia-cudnn-cu13"]\''
ENGINE = "transformer-engine-torch==2.14.1"


def with_gpus(sandbox: Sandbox, python: str = CUDA_BUILD, nvcc: str | None = TOOLKIT) -> None:
    sandbox.stand_in("nvidia-smi", TWO_GPUS)
    shows_lock = f'[[ "$*" == *" -r "* ]] && cat "${{@: -1}}" >>{sandbox.log}'
    sandbox.stand_in("python3.11", f"{python}\n{shows_lock}\n{MAKES_VENV}")
    if nvcc:
        sandbox.stand_in("nvcc", nvcc)


def test_where_there_are_gpus_their_lock_is_installed(sandbox: Sandbox) -> None:
    """TransformerEngine's torch part last and in the environment itself: apart, it would be built for another torch."""
    with_gpus(sandbox)
    sandbox.says()
    done = sandbox.commands()
    installs = [re.sub(r"/dev/fd/\d+", "FILE", line) for line in done if line.startswith(PIP)]
    assert installs == [
        f"{PIP} --dry-run --ignore-installed --report - {TORCH}",
        f"{PIP} -r FILE",
        f"{PIP} --no-build-isolation {ENGINE}",
        f"{PIP} --no-build-isolation -e .",
    ]
    whole = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    assert [line for line in whole if line not in done] == [
        line for line in whole if line.startswith(ENGINE)
    ]
    assert sandbox.set_up().stdout.startswith(f"megarl: using {sandbox.repo}/.venv")


# A stand-in for nvcc: says its release, what it was compiled with, and where it was called.
NVCC = 'if [[ $1 == --dryrun ]]; then echo "#\\$ _HERE_=$(dirname "$0")" >&2; else echo "release 13.0, V13.0.88"; fi'
KEEPS_SETTINGS = (
    '[[ "$*" != *transformer-engine-torch==* ]] '
    '|| echo "CUDA_HOME $CUDA_HOME, first on PATH ${{PATH%%:*}}" >>{log}'
)


@pytest.mark.parametrize(
    "kind", ["itself", "link", "wrapper", "wrapper of a link", "CUDA_HOME", "CUDA_HOME is wrong"]
)
def test_transformer_engine_is_compiled_by_the_toolkit_of_nvcc_and_the_locks_ninja(
    sandbox: Sandbox, tmp_path: Path, kind: str
) -> None:
    """torch compiles with $CUDA_HOME/bin/nvcc, and by itself takes the folder above the nvcc on PATH for CUDA_HOME."""
    with_gpus(sandbox, python=f"{CUDA_BUILD}\n{KEEPS_SETTINGS.format(log=sandbox.log)}", nvcc=None)
    real = bash_file(tmp_path / "toolkit" / "bin" / "nvcc", NVCC)
    environment, on_path = {}, sandbox.bin / "nvcc"
    if kind == "itself":
        environment["PATH"] = f"{real.parent}:{sandbox.bin}"
    elif kind == "link":
        on_path.symlink_to(real)
    elif kind.startswith("wrapper"):
        (tmp_path / "alias").symlink_to(tmp_path / "toolkit")
        called = tmp_path / "alias" / "bin" / "nvcc" if kind.endswith("link") else real
        bash_file(on_path, f'exec {called} "$@"')
    elif kind == "CUDA_HOME":
        bash_file(on_path, 'echo "release 12.9, V12.9.86"')
        environment["CUDA_HOME"] = str(tmp_path / "toolkit")
    else:
        on_path.symlink_to(real)
        environment["CUDA_HOME"] = str(tmp_path / "nothing")
    sandbox.says(**environment)
    (line,) = [line for line in sandbox.commands() if line.startswith("CUDA_HOME")]
    assert line == f"CUDA_HOME {tmp_path}/toolkit, first on PATH REPO/.venv/bin"


@pytest.mark.parametrize(
    ("nvidia_smi", "environment", "lock"),
    [
        (NO_DRIVER, {}, "cpu"),
        ("exit 0", {}, "cpu"),
        (TWO_GPUS, {"MEGARL_DEVICE": "cpu"}, "cpu"),
        ("exit 0", {"MEGARL_DEVICE": "cuda"}, "gpu"),
    ],
    ids=["no driver", "no GPU", "CPU is asked for", "GPUs are elsewhere"],
)
def test_which_lock_is_installed(
    sandbox: Sandbox, nvidia_smi: str, environment: dict[str, str], lock: str
) -> None:
    with_gpus(sandbox)
    sandbox.stand_in("nvidia-smi", nvidia_smi)
    output = sandbox.says(**environment)
    assert f"pinned packages from requirements/{lock}.txt" in output


def test_another_device_makes_a_new_environment(sandbox: Sandbox) -> None:
    with_gpus(sandbox)
    sandbox.set_up(MEGARL_DEVICE="cpu")
    assert "making" in sandbox.set_up().stdout


@pytest.mark.parametrize(
    ("python", "nvcc", "environment", "says"),
    [
        (CUDA_BUILD, None, {}, "no CUDA toolkit 13 (nvcc)"),
        (
            CUDA_BUILD,
            'echo "Cuda compilation tools, release 12.9, V12.9.86"',
            {},
            "no CUDA toolkit 13 (nvcc)",
        ),
        (
            '[[ "$*" == *--report* ]] && echo \'["filelock"]\'',
            TOOLKIT,
            {},
            "pip would install torch's CPU build",
        ),
        ('[[ "$*" == *--report* ]] && exit 1', TOOLKIT, {}, "pip finds no torch 2.13.0"),
        (CUDA_BUILD, TOOLKIT, {"MEGARL_DEVICE": "gpu"}, "MEGARL_DEVICE is gpu: write cpu or cuda"),
    ],
    ids=["no toolkit", "an older toolkit", "CPU build", "no torch", "unknown device"],
)
def test_what_gpus_lack_is_said_in_a_line(
    sandbox: Sandbox,
    python: str,
    nvcc: str | None,
    environment: dict[str, str],
    says: str,
) -> None:
    with_gpus(sandbox, python, nvcc)
    line = sandbox.refuses(**environment)
    assert line.startswith(f"megarl: {says}")
    assert not [command for command in sandbox.commands() if " -r " in command], (
        "nothing is installed"
    )


@pytest.mark.parametrize("file", ["requirements/cpu.txt", "setup.py"])
def test_a_changed_lock_makes_a_new_environment(sandbox: Sandbox, file: str) -> None:
    sandbox.set_up()
    sandbox.commands()
    with (sandbox.repo / file).open("a") as text:
        text.write("# changed\n")
    assert "making" in sandbox.set_up().stdout
    assert "BIN/python3.11 -m venv --clear REPO/.venv" in sandbox.commands()


def own_environment(venv: Path, stamp: str = "") -> Path:
    """A file of an environment that another clone or another program has made."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "precious").touch()
    if stamp:
        (venv / "megarl.stamp").write_text(f"{stamp}\n")
    return venv / "bin" / "precious"


@pytest.mark.parametrize("stamp", ["", "/another/clone"], ids=["no stamp", "of another clone"])
def test_an_environment_of_others_is_not_emptied(sandbox: Sandbox, stamp: str) -> None:
    kept = own_environment(sandbox.repo / ".venv", stamp)
    line = sandbox.refuses()
    assert kept.exists() and not sandbox.commands()
    assert line.startswith(
        f"megarl: {sandbox.repo}/.venv was made by {stamp or 'another program'}, and an"
    )
    assert line.endswith(f"remove it (rm -r {sandbox.repo}/.venv) and run this again")


def test_a_folder_of_hidden_files_alone_is_not_empty(sandbox: Sandbox) -> None:
    kept = sandbox.repo / ".venv" / ".precious"
    kept.parent.mkdir()
    kept.touch()
    assert f"{sandbox.repo}/.venv was made by another program" in sandbox.refuses()
    assert kept.exists() and not sandbox.commands()


def test_what_a_link_leads_to_is_not_emptied(sandbox: Sandbox, tmp_path: Path) -> None:
    """Not even where the other clone once lay where this one lies: its own stamp names this folder then."""
    kept = own_environment(tmp_path / "theirs", str(sandbox.repo))
    (sandbox.repo / ".venv").symlink_to(tmp_path / "theirs")
    line = sandbox.refuses()
    assert kept.exists() and not sandbox.commands()
    assert line.startswith(
        f"megarl: {sandbox.repo}/.venv is a link to {tmp_path}/theirs, and an installation"
    )
    assert line.endswith(f"remove the link (rm {sandbox.repo}/.venv) and run this again")


def test_a_moved_repository_asks_to_remove_its_environment(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """A container sees the host's clone under another name, too: the host still needs what is there."""
    sandbox.set_up()
    before = sandbox.repo
    sandbox.repo = sandbox.repo.rename(tmp_path / "elsewhere")
    message = f".venv was made by {before}, and an installation would empty it: remove it (rm -r "
    assert message in sandbox.refuses()


def test_an_empty_folder_on_another_disk_takes_the_environment(sandbox: Sandbox) -> None:
    (sandbox.repo / ".venv").mkdir()
    sandbox.says()


def test_an_interrupted_installation_is_done_again(sandbox: Sandbox) -> None:
    sandbox.stand_in("python3.11", f'[[ "$*" == *" -r "* ]] && exit 1\n{MAKES_VENV}')
    assert sandbox.set_up().returncode == 1
    sandbox.stand_in("python3.11", MAKES_VENV)
    assert "making" in sandbox.set_up().stdout
    assert "using" in sandbox.set_up().stdout


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("df", "echo head; echo disk 9 9 1048576 1% /", "1 GiB free on the disk of"),
        (
            "python3.11",
            NO_VENV,
            "python3.11 cannot make environments: install its venv package (python3.11-venv)",
        ),
    ],
)
def test_what_the_machine_lacks_is_said_in_a_line(
    sandbox: Sandbox, name: str, body: str, says: str
) -> None:
    sandbox.stand_in(name, body)
    line = sandbox.refuses()
    assert line.startswith(f"megarl: {says}")
    assert "run this again" in line


def test_a_missing_python_is_said_in_a_line(sandbox: Sandbox) -> None:
    (sandbox.bin / "python3.11").unlink()
    missing = "python3.11 and python3.12 are missing: install Python 3.11 or 3.12"
    assert sandbox.refuses() == f"megarl: {missing} and run this again"


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (MAKES_VENV, MAKES_VENV, "python3.11"),
        (None, MAKES_VENV, "python3.12"),
        ("echo 'not this version' >&2; exit 127", MAKES_VENV, "python3.12"),
        (NO_VENV, MAKES_VENV, "python3.12"),
    ],
    ids=["both", "3.12 alone", "3.11 does not run", "3.11 makes no environments"],
)
def test_the_set_up_takes_the_python_that_is_there(
    sandbox: Sandbox, first: str | None, second: str, chosen: str
) -> None:
    (sandbox.bin / "python3.11").unlink()
    for name, body in (("python3.11", first), ("python3.12", second)):
        if body is not None:
            sandbox.stand_in(name, body)
    output = sandbox.says()
    assert f"making {sandbox.repo}/.venv with {chosen}" in output
    assert f"BIN/{chosen} -m venv --clear REPO/.venv" in sandbox.commands()


# --- gpu_check.sh ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "first", "others"), [(None, "560", "480"), ("77", "77", "77")])
def test_the_first_tier_has_more_time(
    tmp_path: Path, limit: str | None, first: str, others: str
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" != tests.gpu.tiers ] || [ -n "$3" ] || echo 1 2 3\n')
    python.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "LIMIT_S"} | {
        "PYTHON": str(python)
    }
    variables |= {"LIMIT_S": limit} if limit else {}
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "gpu_check.sh"], env=variables, capture_output=True, text=True
    )
    lines = [f"tier {tier}: at most {first if tier == 1 else others} s" for tier in (1, 2, 3)]
    assert (done.returncode, done.stdout.splitlines()) == (0, lines)


# --- test.sh -----------------------------------------------------------------------------------------------------

PROGRAMS = {
    "bwrap": ("bubblewrap", "the tests of the sandbox"),
    "chromedriver": ("Chromium", "the tests of the run page"),
    "slurmctld": ("Slurm", "the tests of Slurm jobs"),
}
PACKAGES = {
    "bwrap": "bubblewrap",
    "chromedriver": "chromium chromium-driver",
    "slurmctld": "munge slurm-client slurmctld slurmd",
}
MISSING = "{name} ({program}) is missing: {tests} will be skipped"
INSTALLING = "installing {name} for {tests}"
INSTALL = "BIN/apt-get install -y --no-install-recommends {packages}"


@pytest.fixture
def ready(sandbox: Sandbox) -> Sandbox:
    """With an environment whose checkers do nothing."""
    sandbox.set_up()
    sandbox.commands()
    for tool in ("ruff", "pyright", "python"):
        bash_file(sandbox.repo / ".venv" / "bin" / tool)
    return sandbox


def run_test_sh(sandbox: Sandbox) -> list[str]:
    """What the script says."""
    result = sandbox.test()
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


SLOW = "-m slow and not nightly"
PARTS = [
    *(" --ignore=tests/end_to_end/test_slurm.py", " tests/end_to_end/test_slurm.py", "-m not slow"),
    *(f" tests/rollout {SLOW}", f" tests/parallel {SLOW}"),
    *(f" tests/slurm {SLOW}", f" tests/tracking {SLOW}", f"--ignore=tests/parallel {SLOW}"),
    "pyright --pythonpath",
]


@pytest.mark.parametrize("fails", PARTS)
def test_test_sh_fails_where_any_part_does(ready: Sandbox, fails: str) -> None:
    for program in PROGRAMS:
        ready.stand_in(program, "")
    body = f'line="part: ${{0##*/}} $*"; echo "$line"\n[[ $line != *"{fails}"* ]] || exit 3\n'
    for tool in ("python", "pyright"):
        bash_file(ready.repo / ".venv/bin" / tool, body)
    done = ready.test()
    assert done.returncode == 3, done.stderr
    lines = [
        line
        for line in done.stdout.splitlines()
        if line.startswith("part: ") and "fetch_trace_processor" not in line
    ]
    run = [[part for part in PARTS if part in line] for line in lines]
    assert sorted(run) == sorted([part] for part in PARTS), "each by one lane alone"


def test_test_sh_goes_on_without_perfettos_trace_processor(ready: Sandbox) -> None:
    for program in PROGRAMS:
        ready.stand_in(program, "")
    body = "[[ $1 != scripts/fetch_trace_processor.py ]] || exit 1\n"
    bash_file(ready.repo / ".venv/bin/python", body)
    missing = [line for line in run_test_sh(ready) if "trace processor" in line]
    assert len(missing) == 1 and missing[0].endswith("will be skipped")


def test_test_sh_installs_no_slurm_beside_a_clusters_own(ready: Sandbox) -> None:
    for program in ("bwrap", "chromedriver", "scontrol"):
        ready.stand_in(program, "")
    for program, body in {"id": "echo 0", "apt-get": "exit 1"}.items():
        ready.stand_in(program, body)
    (line,) = [line for line in run_test_sh(ready) if "Slurm" in line]
    assert line.startswith("megarl: this machine belongs to a Slurm cluster")
    assert not [line for line in ready.commands() if "apt-get" in line]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("uid", "apt_get", "says", "does"),
    [
        ("0", "cp {file} BIN/{program}", [INSTALLING], [INSTALL]),
        (
            "0",
            "[[ $1 == update ]] && : >{updated}; [[ -e {updated} ]] && cp {file} BIN/{program}",
            [INSTALLING],
            [INSTALL, "BIN/apt-get update", INSTALL],
        ),
        ("0", "exit 100", [INSTALLING, MISSING], [INSTALL, "BIN/apt-get update"]),
        ("0", None, [MISSING], []),
        ("1000", "cp {file} BIN/{program}", [MISSING], []),
        ("0", "there already", [], []),
    ],
    ids=[
        "at once",
        "after an update",
        "not at all",
        "without apt-get",
        "without rights",
        "there already",
    ],
)
def test_test_sh_provides_a_program_where_it_can(
    ready: Sandbox,
    tmp_path: Path,
    program: str,
    uid: str,
    apt_get: str | None,
    says: list[str],
    does: list[str],
) -> None:
    file = bash_file(tmp_path / "program")
    name, tests = PROGRAMS[program]
    fields = {"program": program, "name": name, "tests": tests, "packages": PACKAGES[program]}
    for other in PROGRAMS:
        if other != program or apt_get == "there already":
            ready.stand_in(other, "")
    ready.stand_in("id", f"echo {uid}")
    if apt_get not in (None, "there already"):
        body = apt_get.format(file=file, program=program, updated=tmp_path / "updated").replace(
            "BIN", str(ready.bin)
        )
        ready.stand_in("apt-get", f"echo noise; echo noise >&2; {body}")
    lines = [line for line in run_test_sh(ready) if name in line or "noise" in line]
    assert lines == [f"megarl: {line.format(**fields)}" for line in says]
    assert [line for line in ready.commands() if "apt-get" in line] == [
        line.format(**fields) for line in does
    ]
