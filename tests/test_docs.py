"""The documents: their code runs, their experiments pass, links and paths lead somewhere, what they show works."""

import ast
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from made_records import make_group, make_step, make_trajectory
from scripted_model import END, ScriptedModel, make_row, play

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_algorithm import LossConfig
from megatron_agent.config_check import check_config
from megatron_agent.config_loading import load_config
from megatron_agent.data import load_rows, parse_row
from megatron_agent.model_folders.tiny_qwen3 import build
from parallel.losses.base import LossInputs
from parallel.losses.registry import POLICY_LOSSES, policy_loss
from trajectory import filters
from trajectory.advantages.inputs import estimator_inputs
from trajectory.advantages.registry import ESTIMATORS, NEEDS, compute_credit
from trajectory.samples import merge_steps
from trajectory.steps import ContextChange, StopReason, TrajectoryStatus

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w.-]+\.(?:py|yaml))\n")
LEADING_COMMENTS = re.compile(r"\A(?:#.*\n)+")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:megatron_agent|parallel|rollout|trajectory|launch|tests|yaml_configs|benchmarks)/[\w/.-]+)`")
METRIC_ROW = re.compile(r"^\| ((?:`[a-z0-9_<>]+`(?:, )?)+) \| (.*)\|$", re.MULTILINE)
REGISTRY = re.compile(r"`([A-Z_]{4,})` in `([\w/]+\.py)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """Of the file that the block is, where its first line says so."""
        match = FILE_NAME.match(self.text)
        return match[1] if match else None

    @property
    def is_experiment(self) -> bool:
        return self.language == "yaml" and LEADING_COMMENTS.sub("", self.text).startswith(("run:", "base:"))

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
EXPERIMENTS = [block for block in BLOCKS if block.is_experiment]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The blocks with a file name as files, in a folder that is the current one and can be imported from."""
    folder = tmp_path_factory.mktemp("documents")
    for block in BLOCKS:
        if block.file_name:
            assert not (folder / block.file_name).exists(), f"{block}: there is another {block.file_name}"
            (folder / block.file_name).write_text(block.text, encoding="utf-8")
    (folder / "yaml_configs").symlink_to(REPOSITORY / "yaml_configs")
    build(folder / "model")
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    os.chdir(before)
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs(folder: Path, block: Block) -> None:
    if block.file_name:
        importlib.import_module(Path(block.file_name).stem)
    else:
        exec(compile(block.text, str(block), "exec"), {"__name__": "document"})


@pytest.mark.parametrize("block", EXPERIMENTS, ids=str)
def test_experiments_pass(folder: Path, block: Block) -> None:
    path = folder / (block.file_name or "experiment.yaml")
    path.write_text(block.text, encoding="utf-8")
    config = load_config(path)
    if block.file_name:
        check_config(config)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors_of(linked), f"{page.name} links to {target}, which has no such heading"


def anchors_of(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    for name in PATH.findall(page.read_text(encoding="utf-8")):
        assert "NAME" in name or (REPOSITORY / name).exists(), f"{page.name} names {name}, which does not exist"


@pytest.mark.parametrize(("name", "path"), REGISTRY.findall((REPOSITORY / "docs/architecture.md").read_text()))
def test_registries_are_where_the_page_says(name: str, path: str) -> None:
    assert re.search(rf"^{name}\b.*=", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)


# What agents.md shows, played with a scripted model.


def experiment(folder: Path, name: str) -> ExperimentConfig:
    config = load_config(folder / name)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder / "model")})})


def call(item: str) -> str:
    return f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>{END}'


def test_the_tool_answers_and_its_error_is_shown(folder: Path) -> None:
    row = load_rows("shop:rows", {})[0]
    trajectory = play(experiment(folder, "shop.yaml"), ScriptedModel(call("apple"), call("pear"), f"#### 21{END}"), row)
    assert [step.feedback[0]["content"] for step in trajectory.steps[:2]] == ["3", "error: KeyError: 'pear'"]
    assert trajectory.steps[1].info["tool_errors"] == 1
    assert (trajectory.outcome_reward, trajectory.success) == (1.0, True)


def test_the_tools_schema(folder: Path) -> None:
    function: dict[str, Any] = importlib.import_module("shop").Price().schema()["function"]
    assert function["description"] == "Look up what one piece costs."
    assert function["parameters"]["properties"]["item"]["description"] == "Name of the good, in singular."


def test_the_environment_gives_hints(folder: Path) -> None:
    row = load_rows("guess:rows", {})[4]
    trajectory = play(experiment(folder, "guess.yaml"), ScriptedModel(f"3{END}", f"7{END}", f"5{END}"), row)
    assert [step.feedback[0]["content"] for step in trajectory.steps[:2]] == ["higher", "lower"]
    assert [step.reward for step in trajectory.steps] == [0, 0, 1]
    assert (trajectory.status, trajectory.success) == (TrajectoryStatus.OK, True)


def test_the_reward_adds_its_parts(folder: Path) -> None:
    row = make_row("6 * 7?", reward_model={"ground_truth": "42"})
    trajectory = play(experiment(folder, "brief.yaml"), ScriptedModel(f"42{END}"), row)
    assert trajectory.reward_parts == {"correct": 1.0, "length": -0.002, "success": 1.0}
    assert trajectory.outcome_reward == pytest.approx(0.998)
    assert trajectory.success is True


def test_each_fork_is_a_sequence_of_its_own(folder: Path) -> None:

    row = load_rows("guess:rows", {})[4]
    model = ScriptedModel(*[f"{guess}{END}" for guess in (1, 9, 2, 8, 3)])
    trajectory = play(experiment(folder, "newest.yaml"), model, row)
    changes = [step.context_change for step in trajectory.steps]
    assert changes == [ContextChange.FIRST, *[ContextChange.FORK] * 4]
    assert trajectory.steps[-1].stop_reason is StopReason.MAX_STEPS
    assert (trajectory.status, trajectory.success) == (TrajectoryStatus.TRUNCATED, False)
    assert model.prompts[1] == model.prompts[3], "only the newest observation is shown"
    samples = merge_steps(trajectory, trajectory_index=0)
    assert [len(sample.token_ids) for sample in samples] == [
        len(step.prompt_ids) + len(step.response_ids) for step in trajectory.steps
    ]


def test_the_row(folder: Path) -> None:
    (block,) = [b for b in BLOCKS if b.language == "json" and b.page.name == "agents.md"]
    row = parse_row(json.loads(block.text), index=0, where="agents.md")
    trajectory = play(experiment(folder, "shop.yaml"), ScriptedModel(f"#### 42{END}"), row)
    assert (trajectory.outcome_reward, trajectory.data_source) == (1.0, "arithmetic")


def test_the_smallest_ones_are_small() -> None:
    code = {block.file_name: block.text.splitlines()[1:] for block in PYTHON}
    assert len([line for line in code["shop.py"] if line.strip()]) < 25
    assert len([line for line in code["guess.py"] if line.strip()]) < 25


# What algorithms.md says and shows, the latter on a batch made by hand.


@pytest.mark.parametrize(("registry", "column"), [(ESTIMATORS, "needs"), (POLICY_LOSSES, "denominator")])
def test_every_estimator_and_loss_has_its_row(registry: dict[str, str], column: str) -> None:
    page = (REPOSITORY / "docs/algorithms.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| name \|[^\n]* {column} \|.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    lines = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    at = lines[0].index(column)
    told = {line[0]: line[at] for line in lines[2:]}
    if column == "needs":
        assert told == {name: NEEDS.get(name, "nothing").replace("greedy", "greedy episode") for name in registry}
    else:
        assert told == {name: LossConfig(name=name).resolved_denominator() for name in registry}


def test_the_estimator_compares_steps_of_one_number(folder: Path) -> None:
    config = load_config(folder / "my_credit.yaml")
    check_config(config)
    group = make_group(
        make_trajectory(make_step([1], [2, 3]), make_step([1, 2, 3, 4], [5], terminated=True), reward=1.0),
        make_trajectory(make_step([1], [2]), make_step([1, 2, 4], [5], terminated=True), reward=0.0),
        make_trajectory(make_step([1], [5], terminated=True), reward=0.55),
    )
    other = make_group(make_trajectory(make_step([1], [2], terminated=True), reward=7.0))
    options = config.algorithm.advantage
    credit = compute_credit(options.name, estimator_inputs([group, other]), options.options())
    # First steps: 0.95, 0, 0.55, mean 0.5; second ones: 1, 0, mean 0.5; the other group has nobody to compare with.
    assert credit.advantages == pytest.approx([0.45, 0.45, 0.5, -0.5, -0.5, 0.05, 0.0])


def test_the_loss_weighs_what_is_near(folder: Path) -> None:
    config = load_config(folder / "my_credit.yaml", ["algorithm.loss={name: my_loss:near, args: {width: 0.3}}"])
    check_config(config)
    logprobs = torch.tensor([-1.0, -1.3, 0.0], requires_grad=True)
    inputs = LossInputs(
        mask=torch.tensor([True, True, False]),
        weights=torch.ones(3),
        advantages=torch.tensor([2.0, -1.0, 0.0]),
        logprobs=logprobs,
        old_logprobs=torch.tensor([-1.0, -1.0, 0.0]),
        rollout_logprobs=torch.zeros(3),
        entropy=torch.zeros(3),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
        step_ids=torch.zeros(3, dtype=torch.int64),
    )
    terms, sums = policy_loss(config.algorithm.loss)(inputs)
    terms.sum().backward()
    far = math.exp(-1)  # one width away
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, far, 0.0])
    assert sums["gate_mean"].item() == pytest.approx(1.0 + far)


# metrics.md against the code that gives metrics their names.

METRIC_FUNCTIONS = {
    "megatron_agent/rollout_metrics.py": ["rollout_metrics"],
    "megatron_agent/rollout_side.py": ["RolloutSide.step_metrics"],
    "megatron_agent/batching.py": ["BatchBuilder.build", "advantage_metrics", "_packing_metrics"],
    "megatron_agent/credit.py": ["CreditGiver.kl_metrics"],
    "megatron_agent/metrics.py": ["PhaseClock.seconds"],
    "parallel/train_step.py": ["PolicyTrainer._update", "_gap_terms"],
    "parallel/critic.py": ["CriticTrainer.update", "_metrics"],
    "parallel/weight_sender.py": ["WeightSender.send"],
    "parallel/losses/metrics.py": ["batch_metrics"],
    "parallel/losses/objective.py": ["rl_objective"],
    "parallel/losses/correction.py": ["correction_weights", "_divergence"],
} | {reference.partition(":")[0].replace(".", "/") + ".py": [""] for reference in POLICY_LOSSES.values()}
"""Every function that names metrics; "" stands for all functions of the file."""
NO_METRICS = {"num_sequences", "correction_weight_square"}
"""Sums that batch_metrics turns into others."""


def named_metrics(file: str, functions: list[str]) -> Iterator[str]:
    """The names that functions give as keys of a dict; what is only known when they run is `<>` in it."""
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    found = {
        f"{outer.name}.{node.name}" if isinstance(outer, ast.ClassDef) else node.name: node
        for outer in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in outer.body
        if isinstance(node, ast.FunctionDef)
    }
    for name in found if functions == [""] else functions:
        for node in ast.walk(found[name]):
            keys: list[ast.expr | None] = []
            if isinstance(node, ast.Dict):
                keys = [*node.keys]
            elif isinstance(node, ast.DictComp):
                keys = [node.key]
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                keys = [node.slice]
            elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
                keys = [
                    key
                    for entry in node.iter.elts
                    for key in (entry.value.elts if isinstance(entry, ast.Starred) else [entry])
                ]
            for key in keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value
                elif isinstance(key, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "<>" for part in key.values]
                    yield "".join(str(part) for part in parts)


def test_the_metrics_page_has_every_metric_and_no_other() -> None:
    page = (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8")
    rows = {name: told for names, told in METRIC_ROW.findall(page) for name in re.findall(r"`(.+?)`", names)}
    named = {name for file, functions in METRIC_FUNCTIONS.items() for name in named_metrics(file, functions)}
    loop = (REPOSITORY / "megatron_agent/train.py").read_text(encoding="utf-8")
    named |= {f"{phase}_s" for phase in re.findall(r'with clock\("(\w+)"\)', loop)}
    assert {re.sub("<.+?>", "<>", name) for name in rows} == named - NO_METRICS - {"<>_s"}
    reasons = [value for name, value in vars(filters).items() if name.isupper() and isinstance(value, str)]
    for row, words in (
        ("ended_<reason>_frac", [reason.value for reason in StopReason]),
        ("context_<change>", [change.value for change in ContextChange]),
        ("dropped_<reason>", reasons),
    ):
        assert all(f"`{word}`" in rows[row] for word in words), row
