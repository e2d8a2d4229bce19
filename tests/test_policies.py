"""Rules of this repository that nothing else would hold: who imports whom, what stays light, how large things get."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_agent.config_check import check_config
from megatron_agent.config_loading import load_config
from megatron_agent.errors import ConfigError

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("megatron_agent", "parallel", "rollout", "trajectory", "launch")
MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((REPOSITORY / package).rglob("*.py"))
}
ASSEMBLY = {
    "megatron_agent.batching",
    "megatron_agent.chat",
    "megatron_agent.cli",
    "megatron_agent.console",
    "megatron_agent.credit",
    "megatron_agent.dynamic_sampling",
    "megatron_agent.evaluate",
    "megatron_agent.export",
    "megatron_agent.metrics",
    "megatron_agent.overlap",
    "megatron_agent.process",
    "megatron_agent.report",
    "megatron_agent.report_charts",
    "megatron_agent.report_episodes",
    "megatron_agent.report_page",
    "megatron_agent.report_steps",
    "megatron_agent.rollout_metrics",
    "megatron_agent.rollout_side",
    "megatron_agent.scoring",
    "megatron_agent.session",
    "megatron_agent.train",
    "megatron_agent.warm_start",
}
"""Modules of megatron_agent that wire the others together; all its other modules are contracts."""
MAY_IMPORT = {
    "assembly": {"assembly", "contracts", "launch", "rollout", "parallel", "trajectory"},
    "contracts": {"contracts", "trajectory.steps"},
    "rollout": {"rollout", "contracts", "trajectory"},
    "parallel": {"parallel", "contracts", "trajectory"},
    "trajectory": {"trajectory"},
    "launch": {
        "launch",
        "megatron_agent.config",
        "megatron_agent.config_layout",
        "megatron_agent.config_loading",
        "megatron_agent.errors",
    },
}
"""Part of the code -> parts or modules that it may import."""
HEAVY = ("torch", "vllm", "megatron", "ray", "transformers")
TEACHER_MISSING = (
    "algorithm.teacher.path {path} has no config.json; point it at an HF folder (checkpoint.export_hf writes a run's)"
)
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80


def part_of(module: str) -> str:
    package = module.partition(".")[0]
    if package != "megatron_agent":
        return package
    return "assembly" if module in ASSEMBLY else "contracts"


def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def own_imports(module: str) -> Iterator[str]:
    """This repository's modules that a module imports, inside functions too."""
    for node in ast.walk(tree_of(module)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: write imports with the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] in PACKAGES:
                # `from package.module import name`: what is no module itself is a name in one.
                yield name if name in MODULES else name.rpartition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports(module):
    part = part_of(module)
    for imported in own_imports(module):
        allowed = imported in MAY_IMPORT[part] or part_of(imported) in MAY_IMPORT[part]
        hint = "; or add it to ASSEMBLY, if wiring others together is all it does" if part == "contracts" else ""
        assert allowed, f"{part} ({module}) may not import {imported}, only {sorted(MAY_IMPORT[part])}{hint}"


def test_one_module_reads_megatrons_groups():
    """Everyone else asks parallel.process_groups, so that groups can be laid out differently in one place."""
    readers = [name for name, path in MODULES.items() if "parallel_state" in path.read_text(encoding="utf-8")]
    assert set(readers) <= {"parallel.process_groups", "parallel.cpu"}


@pytest.mark.parametrize(
    "module", ["megatron_agent", "megatron_agent.config", "megatron_agent.cli", "trajectory", "trajectory.steps"]
)
def test_light_imports(module):
    program = f"import sys, {module}; print(*({set(HEAVY)} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_only_packing_of_trajectory_loads_torch():
    """The rest of the folder runs where no torch is installed, for example in a tool that reads trajectories."""
    programs = {
        name: f"import sys, {name}; print(*({set(HEAVY)} & set(sys.modules)))"
        for name in MODULES
        if part_of(name) == "trajectory"
    }
    loaded = {
        name: subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY).stdout
        for name, program in programs.items()
    }
    assert {name for name, output in loaded.items() if output.strip()} <= {"trajectory.packing"}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_this_repositorys(package):
    """Their names are common words: another installed package, or a folder of tests, could come first."""
    origin = importlib.import_module(package).__file__
    assert origin == str(REPOSITORY / package / "__init__.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_found_from_elsewhere(package, tmp_path):
    """As Ray's actors and user scripts import them: not from the repository's folder."""
    program = f"import {package}; print({package}.__file__)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.strip() == str(REPOSITORY / package / "__init__.py"), result.stderr


def test_every_package_is_installed():
    """pyproject.toml names packages one by one, so a new folder has to be added there."""
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    named = set(project["tool"]["setuptools"]["packages"])
    assert named == {name for name, path in MODULES.items() if path.name == "__init__.py"}


@pytest.mark.parametrize("path", sorted((REPOSITORY / "yaml_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_experiments_pass(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # their paths are relative
    config = load_config(path)
    teacher = config.algorithm.teacher
    if teacher and not Path(teacher.path).exists():  # what another experiment leaves
        with pytest.raises(ConfigError) as error:
            check_config(config)
        assert str(error.value) == TEACHER_MISSING.format(path=teacher.path)
    else:
        check_config(config)


@pytest.mark.parametrize("module", MODULES)
def test_sizes(module):
    lines = MODULES[module].read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_MODULE_LINES, f"{module} has {lines} lines; split it"
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{module}.{node.name} has {length} lines; split it"
