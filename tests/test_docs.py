"""What the documents show is true: their examples are executed."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.commands import episode_check
from megarl.config import AlgorithmConfig, Recipe, RewardConfig
from megarl.config.loading import load_recipe
from megarl.config.timeline import TimelineConfig
from megarl.environments.agents.agent_thread import AgentThread, agent_settings
from megarl.environments.agents.chat import ChatAnswer, ChatRequest
from megarl.environments.runtime.environment import Observation
from megarl.environments.runtime.environment_thread import EnvironmentThread, environment_settings
from megarl.environments.runtime.results import CallError, CallResult
from megarl.environments.runtime.tool_loading import load_environment, load_tools
from megarl.episodes.demonstrated_episode import demonstrate
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.model.families import FAMILIES
from megarl.model.families.blocks import Layer, usual_mlp
from megarl.model.families.family import Family, read_dense
from megarl.model.hf_config import model_shape
from megarl.model.shape import ModelShape
from megarl.model.tensors import tensors
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import resolve
from megarl.placement.train_layout import TrainLayout
from megarl.preflight.layout_checks import node_errors, slot_errors
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.traffic import count_traffic
from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.tracking.metrics import train_metrics
from megarl.types import (
    EpisodeEnd,
    EpisodeFacts,
    Hyperparameters,
    Transcript,
    TranscriptCall,
    UserError,
    episode_dict,
)
from megarl.types.episodes import DropReason
from megarl.types.reward_result import RewardResult
from megarl.types.worker_faults import ServiceFaults
from scripts.draw_architecture import own_modules
from tests.episodes.chatml_families import HERMES
from tests.episodes.families import stop_ids, tokenizer_of
from tests.http_server import Handler, serving
from tests.model.page_family import NAME, write_family

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


TABLES: list[dict[str, Any]] = [ALGORITHMS]


@pytest.fixture(autouse=True)
def unchanged_tables() -> Iterator[None]:
    """What an example adds to a table is taken out again."""
    before = [dict(table) for table in TABLES]
    yield
    for table, rows in zip(TABLES, before, strict=True):
        table.clear()
        table.update(rows)


def blocks(name: str, language: str = "python") -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
PEERS = ("verl/", "slime/", "backends/")  # files of other projects
FILE = r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|sh|yaml|txt|sbatch))\b"


def is_there(name: str) -> bool:
    """Whether a dotted name is a module or package of megarl, or is defined in one (`megarl.x.y.Class`)."""
    module, _, attribute = name.rpartition(".")
    if name in own_modules() or module not in own_modules():
        return name in own_modules()
    defined = set()
    for node in ast.parse(own_modules()[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):  # `import x as x` hands a name on
            defined |= {alias.asname for alias in node.names if alias.asname == alias.name}
    return attribute in defined


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    """Modules (`megarl.x.y`), files (`x/y.py`, from the root, from megarl/ or from the page) and links to files."""
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"\bmegarl(?:\.[a-zA-Z_]\w*)+", text)) - {
        "megarl.sbatch",
        "megarl.sif",
        "megarl.sqsh",
    }
    missing = [name for name in names if not is_there(name)]
    files = [name for name in re.findall(FILE, text) if not name.startswith(PEERS)]
    missing += [
        name
        for name in files
        if not any((f / name).exists() for f in (ROOT, ROOT / "megarl", page.parent))
    ]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#:]+)\)", prose)
    assert missing + [link for link in links if not (page.parent / link).exists()] == []


def execute(page: str) -> dict[str, Any]:
    """The names that a page's Python blocks make, executed in order, and its tests, which pass."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, f"docs/{page}", "exec"), names)
    tests = [name for name in names if name.startswith("test_")]
    assert tests
    for name in tests:
        names[name]()
    return names


def test_the_example_of_a_new_algorithm() -> None:
    """Its test passes, and a recipe that names it gets its loss."""
    names = execute("algorithms.md")
    hyperparameters = hyperparameters_of(
        "topr", AlgorithmConfig(name="topr", entropy_coefficient=0.5)
    )
    assert hyperparameters == Hyperparameters(aggregation="sequence_sum", entropy_coefficient=0.5)
    ones_T = torch.ones(2)
    targets = names["SimpleNamespace"](
        loss_mask_T=ones_T > 0, loss_weight_T=ones_T, advantage_T=ones_T, engine_logp_T=ones_T, nll_weight_T=ones_T,
        is_stale_T=ones_T < 0, sampled_T=ones_T > 0,
        sequence_T=ones_T.long(), reference_logp_T=None,
    )  # fmt: skip
    loss, statistics = ALGORITHMS["topr"].loss(hyperparameters)(
        -ones_T, 4 * ones_T, -ones_T, targets
    )
    assert float(loss) == 2 * (1 - 0.5 * 4)
    update = {
        statistic: tuple(value.reshape(-1).tolist()) for statistic, value in statistics.items()
    }
    assert train_metrics([update])["train/good"] == 1.0, (
        "its own statistic is published without another line"
    )


def test_the_example_of_a_new_model_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of its own is found by its name, and a reshard from any rank of any layout finds every element."""
    (own, block) = blocks("models.md")
    assert write_family(tmp_path) == own and own.count("\n") <= 100
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 64}
    config |= {
        "architectures": ["OlmoeForCausalLM"],
        "intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shape(tmp_path, NAME)
    assert (shape.family, shape.num_experts) == (NAME, 4)
    assert tensors(shape)["model.layers.1.self_attn.k_norm.weight"] == (1, 16, 1)
    check_reshard(shape)
    (tmp_path / "config.json").write_text(json.dumps(config | {"clip_qkv": 8.0}))
    with pytest.raises(UserError, match="clip_qkv is 8.0; use a checkpoint where it is None"):
        model_shape(tmp_path, NAME)

    names: dict[str, Any] = {}
    exec(compile(block, "docs/models.md", "exec"), names)
    packed = Family("Packed", read_dense, layer=lambda shape, number: Layer(
        names["packed_attention"](shape), usual_mlp(shape, number)
    ))  # fmt: skip
    monkeypatch.setitem(FAMILIES, "Packed", packed)
    shape = ModelShape(2, 16, 4, 2, 4, 64, num_dense_layers=2, ffn_size=32, family="Packed")
    assert tensors(shape)["model.layers.1.self_attn.W_pack.weight"] == (1, 32, 16)
    check_reshard(shape)


def check_reshard(shape: ModelShape) -> None:
    for tp in (1, 2, 4):
        engine = EngineLayout(count=1, tp=tp, ep=1)
        targets = sglang_map.parts(shape, engine)
        for layout in (TrainLayout(4, tp=4, pp=1, ep=1), TrainLayout(4, tp=1, pp=2, ep=1)):
            traffic = count_traffic(
                megatron_map.parts(shape, layout), targets, 4, gpus_per_node=4, dtype="bfloat16"
            )
            shard_bytes = [
                2 * sum(shard.area for shard in sglang_map.shards(shape, engine, rank))
                for rank in range(tp)
            ]
            assert traffic.dest.tolist() == shard_bytes + [0] * (4 - tp)


def test_the_families_of_the_page_are_the_rows() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    rows = [
        f"| `{family.architecture}` | {family.models} | {family.attention} | {family.layers} |"
        for family in FAMILIES.values()
    ]
    assert "\n".join(["|---|---|---|---|", *rows, ""]) in text


def test_the_recipes_of_the_first_step_are_there_and_load() -> None:
    """Each command of docs/cluster.md that takes a recipe, with its overlays."""
    steps = (DOCS / "cluster.md").read_text(encoding="utf-8").partition("\n## Slurm\n")[0]
    commands = re.findall(r"^ +((?:sbatch|megarl|srun) .*)$", steps, re.MULTILINE)
    recipes = [
        [word for word in shlex.split(command) if word.endswith(".yaml")] for command in commands
    ]
    assert len(recipes) >= 5
    for path, *overlays in recipes:
        assert load_recipe(
            str(ROOT / path), [str(ROOT / overlay) for overlay in overlays]
        ).run.steps


def test_every_algorithm_and_rule_is_described() -> None:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    assert [name for name in ALGORITHMS if f"`{name}`" not in text] == []
    assert "(recipe_reference.md#algorithm)" in text, "every hyperparameter is described there"


def test_the_placements_that_are_shown_share_what_is_said(tmp_path: Path) -> None:
    (page,) = blocks("layouts.md", "yaml")
    num_shared = {}
    for example in re.split(r"^# ", page, flags=re.MULTILINE)[1:]:
        title, _, keys = example.partition("\n")
        overlay = tmp_path / "overlay.yaml"
        overlay.write_text(keys)
        settings = [
            "train.tp=4",
            "train.pp=1",
            "algorithm.name=ppo",
            "critic.lr=1e-5",
            "placement.network=nodes",
        ]
        recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", [str(overlay), *settings])
        roles = resolve(recipe, learns=title[0] == "m")
        assert slot_errors(roles) + node_errors(roles) == [], title
        num_shared[title.partition(":")[0]] = len(roles.shared_slots)
    assert num_shared == {"shared": 16, "split": 0, "elastic": 0, "mixed": 12}


def test_the_examples_of_data_are_recipes(tmp_path: Path) -> None:
    sections = []
    _, *examples = blocks("data.md", "yaml")  # tests/end_to_end/test_own_data.py runs the first
    for number, example in enumerate(examples):
        overlay = tmp_path / f"{number}.yaml"
        overlay.write_text(example)
        sections.append(load_recipe(ROOT / "recipes" / "quickstart.yaml", [str(overlay)]).data)
    columns, weights = sections
    assert columns.eval["math500"].prompt == "problem" and columns.eval["aime2024"].prompt is None
    assert [file.weight for file in weights.train] == [3.0, 1.0]


def test_the_examples_of_trackers_and_of_a_timeline_are_recipes(tmp_path: Path) -> None:
    recipes = []
    for number, example in enumerate(blocks("tracking.md", "yaml")):
        overlay = tmp_path / f"{number}.yaml"
        overlay.write_text(example)
        recipes.append(load_recipe(ROOT / "recipes" / "quickstart.yaml", [str(overlay)]))
    trackers, timeline = recipes
    run = trackers.run
    assert (run.trackers, run.project) == (("tensorboard", "wandb", "mlflow"), "math")
    assert timeline.run.timeline == TimelineConfig(steps=(5, 50), profile_ranks=(0,))


@pytest.fixture
def episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The page's recipes, of a tool and of an environment, whose modules can be imported as the page writes them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks("environments.md"):
        (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    recipes = []
    for number, example in enumerate(blocks("environments.md", "yaml")):
        overlay = tmp_path / f"{number}.yaml"
        overlay.write_text(example)
        recipes.append(load_recipe(ROOT / "recipes" / "quickstart.yaml", [str(overlay)]))
    return recipes


def test_the_example_of_a_reward_of_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its process: right if a tool has given the answer, and each call costs something."""
    _, block = blocks("rewards.md")
    (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    facts, no_call = EpisodeFacts(2, 1, 0, 0.1, "answered", 9), list[TranscriptCall]()
    call: TranscriptCall = {
        "name": "price",
        "arguments": {"fruit": "apple"},
        "result": "3",
        "error": None,
    }
    turns: list[Transcript] = [
        ({"role": "assistant", "text": "", "calls": calls, "reward": 0.0},)
        for calls in (no_call, [call])
    ]
    judges = RewardWorkers(RewardConfig(function="my_rewards:score", workers=1), 60.0)
    try:
        episodes = [episode_dict(facts, entries) for entries in turns]
        results = judges.wait_for_rewards("3", {}, ["3"] * 2, episodes)
    finally:
        judges.shutdown()
    assert results == [RewardResult(-0.01, False), RewardResult(0.99, True)]
    text = (DOCS / "rewards.md").read_text(encoding="utf-8")
    names = {*episodes[1], *turns[1][0], *call, *get_args(CallError), "bad_call"} - {"unknown"}
    assert [name for name in names if f"`{name}`" not in text] == [], (
        "and all that an episode has is described"
    )


def test_the_example_of_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tries are repeated, and each of them is counted."""
    block, _ = blocks("rewards.md")
    (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    statuses = [503, 200]

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        assert body == {"response": "3", "answer": "4"}
        handler.send(statuses.pop(0), b'{"reward": 0.5}')

    with serving(answer) as url:
        reward = RewardConfig(function="my_judge:score", workers=1, arguments={"url": url})
        judges = RewardWorkers(reward, 60.0)
        try:
            assert judges.wait_for_rewards("4", {}, ["3"]) == [RewardResult(0.5, False)]
            assert judges.take_faults().services == (ServiceFaults("grader", retries=1),)
        finally:
            judges.shutdown()


Calls = list[tuple[str, object]]


def play(
    recipe: Recipe, row: dict[str, Any], calls: Calls
) -> tuple[str | None, list[CallResult], RewardResult | None]:
    """What an episode begins with, the results of its calls, one a turn, and its verdict, in a worker process."""

    async def episode() -> tuple[str | None, list[CallResult], RewardResult | None]:
        pool = EnvironmentThread(environment_settings(recipe, workers=1))
        try:
            opening = await pool.open("an episode", row, 1)
            results = [(await pool.call("an episode", [call]))[0] for call in calls]
            return opening, results, await pool.finish("an episode")
        finally:
            pool.shutdown()

    return asyncio.run(episode())


def test_the_example_of_a_tool(episodes: list[Recipe]) -> None:
    """The model gets its price, or what the page says that it is told."""
    calls: Calls = [("price", {"fruit": fruit}) for fruit in ("apple", "plum")]
    opening, (answered, failed), reward_result = play(episodes[0], {}, calls)
    assert (opening, answered.text, answered.error, reward_result) == (None, "3", None, None)
    assert failed.error == "raised" and f"| `{failed.text}` |" in (
        DOCS / "environments.md"
    ).read_text("utf-8")


def test_the_example_of_an_environment(episodes: list[Recipe]) -> None:
    """Its prices are the seed's, its mistakes cost something, and the last coin ends the episode."""
    recipe = episodes[1]
    assert recipe.episode and recipe.episode.environment and recipe.reward.function is None
    shop = load_environment(recipe.episode.environment, recipe.episode.arguments)
    assert (sorted(shop.tools), sorted(shop.has)) == (["buy", "price"], ["reset", "reward"])
    game: Any = shop.make(1)
    game.reset({"money": 99})
    price = game.price("pear")
    assert 1 <= price <= 5
    buy = ("buy", {"fruit": "pear", "count": 1})
    calls: Calls = [
        ("price", {"fruit": "pear"}),
        ("buy", {"fruit": "pear", "count": 3}),
        ("buy", {"fruit": "pear"}),
    ]
    opening, results, reward_result = play(recipe, {"money": 2 * price}, [*calls, buy])
    assert opening and opening.startswith(f"You have {2 * price} coins.")
    assert [(result.text, result.reward) for result in results[:2]] == [
        (str(price), 0.0), (f"That costs {3 * price} coins, and you have {2 * price}.", -0.1)
    ]  # fmt: skip
    assert (results[2].error, results[3].done, reward_result) == (
        "arguments",
        False,
        RewardResult(0.5, False),
    )
    _, results, reward_result = play(recipe, {"money": 2 * price}, [buy, buy])
    assert ([result.done for result in results], reward_result) == (
        [False, True],
        RewardResult(1.0, True),
    )


def test_what_episode_check_says_of_the_environment_is_what_it_says(
    episodes: list[Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the turn that the page shows; only seconds differ, and `...` stands for lines that are left out."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "environments.md").read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    plain = [block for language, block in fences if not language]
    (turn,) = (block for block in plain if block.startswith("[{"))
    (shown,) = (block for block in plain if block.endswith("result: nothing to correct\n"))
    Path("turns.jsonl").write_text(turn)
    Path("shop.jsonl").write_text(
        json.dumps({"prompt": "Buy fruit.", "answer": "-", "money": 20}) + "\n"
    )
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", ["1.yaml", "data.train=shop.jsonl"])
    assert recipe.episode == episodes[1].episode
    episode_check.check(recipe, 1, Path("turns.jsonl"), None)
    printed, expected = (
        re.sub(r"\d+\.\d{3} s", "SECONDS", text) for text in (capsys.readouterr().out, shown)
    )
    for part in expected.split("...\n"):
        before, match, printed = printed.partition(part)
        assert match and (not before or before.endswith("\n")), part
    assert printed == ""


class Words:
    """Answers an agent with the words that are in order."""

    def __init__(self, *words: str) -> None:
        self.words, self.asked = list(words), list[str]()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        self.asked.append(request.messages[-1]["content"])
        return ChatAnswer(self.words[len(self.asked) - 1], (), "stop", 1, 1)


def test_the_example_of_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts at once, the choice, and a question where the choice is wrong."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = next(block for block in blocks("agents.md") if block.startswith("# my_agent.py"))
    (tmp_path / "my_agent.py").write_text(module)
    (tmp_path / "agent.yaml").write_text(*blocks("agents.md", "yaml"))
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", [str(tmp_path / "agent.yaml")])
    assert (
        recipe.episode and recipe.episode.agent == "my_agent:run" and recipe.reward.function is None
    )
    thread, words = AgentThread(agent_settings(recipe, workers=1)), Words("one", "two", "one", "6")
    prompt = [{"role": "user", "content": "What do two apples cost?"}]
    try:
        reward_result = asyncio.run(thread.run({"answer": "6"}, prompt, 1, words, None, 60.0))
    finally:
        thread.shutdown()
    assert reward_result == RewardResult(1.0, True) and words.asked[-1] == "Are you sure?"
    assert sorted(words.asked[:2]) == ["Write draft 0.", "Write draft 1."] and words.asked[
        2
    ].endswith("one\ntwo")


def test_the_demonstration_that_is_shown_is_learnt_from(episodes: list[Recipe]) -> None:
    """Of its conversation the model learns the two turns, and not the result of the call."""
    assert episodes[0].episode
    schemas = [tool.schema for tool in load_tools(episodes[0].episode.tools, {}).tools.values()]
    (example,) = blocks("environments.md", "json")
    row, turn_tokenizer = (
        json.loads(example),
        TurnTokenizer(tokenizer_of(HERMES), stop_ids(HERMES), schemas),
    )
    demonstration = demonstrate(turn_tokenizer, row["prompt"], row["messages"])
    learnt = [
        token
        for token, sampled in zip(demonstration.response_ids, demonstration.sampled, strict=True)
        if sampled
    ]
    text = turn_tokenizer.template.decode(learnt)
    assert demonstration.text == row["answer"] and "apple" in text and "tool_response" not in text


def test_every_end_and_metric_of_episodes_is_described() -> None:
    text = (DOCS / "environments.md").read_text(encoding="utf-8")
    metrics = set(
        re.findall(
            r'"(episode/\w+)"', (ROOT / "megarl/tracking/metrics.py").read_text(encoding="utf-8")
        )
    )
    metrics |= {f"episode/dropped/{reason}" for reason in get_args(DropReason)}
    assert (
        metrics
        and [name for name in (*metrics, *get_args(EpisodeEnd)) if f"`{name}`" not in text] == []
    )
    signature = f"Observation(text, reward={Observation('').reward}, done={Observation('').done})"
    assert f"`{signature}`" in text
