"""Loading, checking and describing experiments: what is wrong is said with its key, its place and the remedy."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml

from megatron_agent import config_schema
from megatron_agent.config import ExperimentConfig, ToolConfig
from megatron_agent.config_check import INERT, check_config
from megatron_agent.config_layout import fleet_gpus, trainer_layout
from megatron_agent.config_loading import dump_config, load_config, option_paths
from megatron_agent.errors import ConfigError

REPOSITORY = Path(__file__).parents[1]
ROW = {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"style": "rule", "ground_truth": "4"}}
HF_CONFIG = {
    "model_type": "qwen3",
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def experiment(tmp_path):
    """A correct experiment with a model folder and rows; returns its file."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (model / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    values = {"run": {"name": "sums"}, "model": {"path": str(model)}, "data": {"train": str(tmp_path / "rows.jsonl")}}
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "sums.yaml"


def write(folder: Path, text: str, name: str = "case.yaml") -> Path:
    (folder / name).write_text(textwrap.dedent(text))
    return folder / name


def problem_of(call, *arguments) -> str:
    with pytest.raises(ConfigError) as failure:
        call(*arguments)
    return str(failure.value)


def check_problem(path: Path, *overrides: str) -> str:
    return problem_of(check_config, load_config(path, overrides), overrides)


# ---------------------------------------------------------------- files


def test_a_correct_experiment_passes(experiment):
    check_config(load_config(experiment))


def test_unknown_key_names_line_and_nearest(tmp_path):
    path = write(tmp_path, "run: {name: a}\nmodel: {path: m}\ndata: {train: t}\nrollout:\n  tempurature: 1\n")
    assert problem_of(load_config, path) == (f"{path}:5: unknown key rollout.tempurature; did you mean 'temperature'?")


def test_all_mistakes_at_once(tmp_path):
    path = write(tmp_path, "run: {name: a, steps: 0}\nmodel: {}\ndata: {train: t, evil: e}\n")
    message = problem_of(load_config, path)
    assert message.startswith("3 problems:")
    assert f"{path}:1: run.steps is 0; input should be greater than 0" in message
    assert f"{path}:2: model.path is missing; it has no default" in message
    assert f"{path}:3: unknown key data.evil; did you mean 'eval'?" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run:\n  name: [a\nmodel: 1\n", "case.yaml:3: not valid YAML: expected ',' or ']'"),
        ("run:\n\tname: a\n", "case.yaml:2: not valid YAML: found character '\\t'"),
        ("run: {name: a}\nrun: {name: b}\n", "case.yaml:2: the key 'run' is already set in line 1; keep one"),
        ("run: {1: a}\n", "case.yaml:1: the key 1 is not text; put it in quotes"),
        ("- run\n", "case.yaml: must hold sections such as `run:` and `model:`"),
        ("", "case.yaml: must hold sections such as `run:` and `model:`"),
        ("base: [a.yaml]\n", "case.yaml:1: `base` is ['a.yaml']; name one YAML file"),
        ("base: nowhere.yaml\n", "case.yaml): cannot be read: No such file or directory; check the path"),
        ("base: case.yaml\n", "case.yaml: its `base` chain comes back to itself: "),
        ("run: !!python/object:os.system {}\n", "case.yaml:1: not valid YAML: could not determine a constructor"),
    ],
)
def test_broken_files(tmp_path, text, expected):
    assert expected in problem_of(load_config, write(tmp_path, text))


def test_missing_file(tmp_path):
    path = tmp_path / "nowhere.yaml"
    assert problem_of(load_config, path) == f"{path}: cannot be read: No such file or directory; check the path"


def test_not_text(tmp_path):
    (tmp_path / "model.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in problem_of(load_config, tmp_path / "model.yaml")


def test_base_chain(tmp_path):
    (tmp_path / "shared").mkdir()
    write(
        tmp_path,
        """\
        run: {name: root, steps: 7}
        model: {path: m}
        data: {train: t, train_args: {a: 1, b: 2}}
        agent: {tools: [calculator, python]}
        """,
        "shared/root.yaml",
    )
    write(tmp_path, "base: root.yaml\nrun: {name: middle}\n", "shared/middle.yaml")
    path = write(tmp_path, "base: shared/middle.yaml\ndata: {train_args: {b: 3}}\nagent: {tools: [search]}\n")
    config = load_config(path, ["data.train_args.c=4"])
    assert (config.run.name, config.run.steps) == ("middle", 7)
    assert config.data.train_args == {"a": 1, "b": 3, "c": 4}  # mappings are merged key by key
    assert [tool.name for tool in config.agent.tools] == ["search"]  # everything else is replaced


def test_mistake_in_a_base_names_the_base(tmp_path):
    base = write(tmp_path, "run: {name: a}\nmodel: {path: m}\ndata: {train: t}\neval: {evry: 2}\n", "root.yaml")
    path = write(tmp_path, "base: root.yaml\n")
    assert problem_of(load_config, path) == f"{base}:4: unknown key eval.evry; did you mean 'every'?"


def test_aliased_mappings_stay_apart(tmp_path):
    path = write(
        tmp_path,
        """\
        run: {name: a}
        model: {path: m}
        data: {train: x:f, train_args: &rows {count: 1}, eval: x:f, eval_args: *rows}
        rollout: &lengths {max_model_len: 512}
        sync: {}
        eval:
          <<: {samples: 3}
          every: 2
        """,
    )
    config = load_config(path, ["data.train_args.count=9"])
    assert (config.data.train_args, config.data.eval_args) == ({"count": 9}, {"count": 1})
    assert (config.eval.samples, config.eval.every) == (3, 2)


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=many", "run.steps is 'many'; input should be a valid integer"),
        ("run.steps=true", "run.steps is True; input should be a valid integer"),
        ("run.steps='3'", "run.steps is '3'; input should be a valid integer"),
        ("run.steps=2.5", "run.steps is 2.5; input should be a valid integer"),
        ("run.steps=0", "run.steps is 0; input should be greater than 0"),
        ("run.steps=", "run.steps is None; input should be a valid integer"),
        ("run.seed=1e3", "run.seed is 1000.0; input should be a valid integer"),
        ("run.resume=maybe", "run.resume is 'maybe'; input should be 'auto', 'never' or 'must'"),
        ("optimizer.lr=.inf", "optimizer.lr is inf; input should be a finite number"),
        ("optimizer.lr=.nan", "optimizer.lr is nan; input should be a finite number"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1 is 1; input should be less than 1"),
        ("rollout.top_p=1.5", "rollout.top_p is 1.5; input should be less than or equal to 1"),
        ("agent.tools=calculator", "agent.tools is 'calculator'; input should be a valid list"),
        ("parallel.sequence=1", "parallel.sequence is 1; input should be a valid boolean"),
        ("cluster.master_port=70000", "cluster.master_port is 70000; input should be less than or equal to 65535"),
        ("sft.steps=3", "sft.data is missing; it has no default"),
        ("sft.data=rows.jsonl sft.steps=0", "sft.steps is 0; input should be greater than 0"),
        ("eval.samples=0", "eval.samples is 0; input should be greater than 0"),
        ("eval.temperature=-1", "eval.temperature is -1; input should be greater than or equal to 0"),
        ("model=tiny", "model is 'tiny'; it must be a mapping of keys"),
        (
            "algorithm.advantage=gae_step",
            "'gae_step'; it must be a mapping of keys, so write algorithm.advantage.name=gae_step",
        ),
    ],
)
def test_types(experiment, override, expected):
    assert expected in problem_of(load_config, experiment, override.split(" ") if "sft" in override else [override])


def test_numbers_as_yaml_1_2_writes_them(experiment):
    config = load_config(experiment, ["optimizer.lr=1e-6", "optimizer.eps=2E-8", "algorithm.kl.coef=0"])
    assert (config.optimizer.lr, config.optimizer.eps, config.algorithm.kl.coef) == (1e-6, 2e-8, 0.0)


# ---------------------------------------------------------------- overrides


def test_overrides_go_over_the_file(experiment):
    config = load_config(
        experiment,
        ["run.steps=3", "agent.tools=[calculator]", "rollout.engine_args.max_num_seqs=4", "agent.system_prompt=a=b"],
    )
    assert config.run.steps == 3
    assert config.agent.tools == [ToolConfig(name="calculator")]
    assert config.rollout.engine_args == {"max_num_seqs": 4}
    assert config.agent.system_prompt == "a=b"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.tempurature=1"], "unknown key rollout.tempurature; did you mean 'temperature'?"),
        (["temperature=1"], "unknown key temperature; did you mean 'rollout.temperature' or 'eval.temperature'?"),
        (["rollout.lr=1"], "unknown key rollout.lr; did you mean 'algorithm.critic.lr' or 'optimizer.lr' or 'sft.lr'?"),
        (["roll.temperature=1"], "unknown key roll.temperature; did you mean 'rollout'?"),
        (["run.steps.more=1"], "run.steps is a value and has no key 'more'"),
        (["run.steps"], "write it as key.sub=value, for example run.steps=20"),
        (["=1"], "write it as key.sub=value, for example run.steps=20"),
        (["run.steps=1", "run.steps=2"], "run.steps is overridden too; keep one of the two"),
        (["model.builder={name: a}", "model.builder.name=b"], "model.builder is overridden too; keep one"),
        (["agent.tools=[a"], "not valid YAML"),
    ],
)
def test_overrides_that_cannot_be(experiment, overrides, expected):
    message = problem_of(load_config, experiment, overrides)
    assert expected in message
    assert message.startswith(f"override {overrides[-1]!r}:")


EVAL = "data.eval={rows}"
GPUS = "cluster.gpus_per_node=2"
OVERLAP = ("rollout.overlap=true", "algorithm.correction.tis=token")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["algorithm.kl.estimator=k1"], "algorithm.kl.coef is 0"),
        (["algorithm.teacher.divergence=js", "algorithm.teacher.path=t"], "algorithm.teacher.top_k is 0"),
        (["algorithm.teacher.coef=2", "algorithm.teacher.path=t"], "algorithm.teacher.top_k is 0"),
        (["algorithm.advantage.eps=1e-3", "algorithm.advantage.std=false"], "algorithm.advantage.std is false"),
        (["algorithm.loss.clip_low=0.1"], "the ratio is 1 everywhere"),
        (["algorithm.loss.clip_high=0.3"], "the ratio is 1 everywhere"),
        (
            ["algorithm.loss.clip_high=4", "algorithm.loss.name=cispo"],
            "set algorithm.minibatches or algorithm.epochs to 2",
        ),
        (["algorithm.correction.cap=3"], "algorithm.correction.tis is none; set algorithm.correction.tis to token"),
        (["sync.delta=true", "rollout.replay=trajectories.jsonl"], "rollout.replay starts no fleet"),
        (["algorithm.loss.dual_clip=3"], "the ratio is 1 everywhere"),
        (["optimizer.min_lr_frac=0.5"], "optimizer.schedule is constant"),
        (["eval.samples=4"], "data.eval names no rows"),
        (["run.report_episodes=1", "logging.report=false"], "logging.report is false"),
        (["agent.bad_call=end", "agent.env=frozen_lake"], "agent.env is set"),
        (["agent.tool_format=hermes", "agent.env=frozen_lake"], "agent.env is set"),
        (["rollout.tool_timeout_s=5", "agent.env=frozen_lake"], "agent.env is set"),
        (["rollout.gpu_memory_utilization=0.5"], "the fleet runs on CPU"),
        (["rollout.kv_cache_gib=2", GPUS], "the fleet runs on GPUs"),
        (["rollout.engine_threads=2", GPUS], "the fleet runs on GPUs"),
        (["model.builder.name=tiny_qwen3"], "the folder model.path exists already"),
        (["algorithm.filters.max_staleness=1"], "every episode is played with the newest weights"),
        (["algorithm.filters.max_staleness=1", *OVERLAP], "with weights that are at most one step old"),
    ],
)
def test_override_without_effect(experiment, overrides, why):
    key = overrides[0].partition("=")[0]
    assert f"the override of {key} has no effect: " in (message := check_problem(experiment, *overrides))
    assert why in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl.estimator=k1", "algorithm.kl.coef=0.1"],
        ["algorithm.loss.clip_low=0.1", "algorithm.minibatches=2"],
        ["algorithm.loss.clip_low=0.1", "algorithm.old_logprobs=rollout"],
        ["optimizer.min_lr_frac=0.5", "optimizer.schedule=cosine"],
        ["rollout.gpu_memory_utilization=0.5", GPUS],
        ["agent.bad_call=end", "agent.tools=[calculator]"],
        [*OVERLAP],
        ["rollout.overlap=true", "algorithm.correction.mask=token_band"],
        ["rollout.overlap=true", "algorithm.old_logprobs=rollout"],
    ],
)
def test_override_with_effect(experiment, overrides):
    check_config(load_config(experiment, overrides), overrides)


def test_options_that_can_be_inert_exist():
    known = {".".join(path) for path in option_paths()}
    assert set(INERT) <= known


def test_with_overlap_no_remedy_is_refused(experiment):
    """0 drops everything, 1 drops nothing: both are told to go, and neither to become the other."""
    of_none = check_problem(experiment, *OVERLAP, "algorithm.filters.max_staleness=0")
    assert of_none.endswith("for they are one step old; remove it: none is older than that")
    check_problem(experiment, *OVERLAP, "algorithm.filters.max_staleness=1")


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.tensor=3"], "parallel.tensor 3 does not divide the model's 4 KV heads; use a divisor of 4"),
        (["parallel.tensor=5"], "parallel.tensor 5 does not divide the model's 12 attention heads"),
        (["parallel.pipeline=4"], "parallel.pipeline 4 does not divide the model's 6 layers; use a divisor of 6"),
        (["rollout.tensor_parallel=8", "cluster.gpus_per_node=16"], "rollout.tensor_parallel 8 does not divide"),
        (["rollout.max_model_len=9000"], "rollout.max_model_len 9000 is more than the model's 8192 positions"),
        (
            ["parallel.tensor=4", "cluster.trainer_nodes=3", "cluster.gpus_per_node=2"],
            "3 trainer nodes x 2 GPUs = 6 ranks cannot be divided by parallel.tensor 4 x parallel.pipeline 1 = 4 ranks",
        ),
        (
            ["parallel.data=3", "cluster.trainer_nodes=2"],
            "x 3 data parallel = 3, cannot be divided by cluster.trainer_nodes 2",
        ),
        (
            ["parallel.tensor=4", "cluster.gpus_per_node=2"],
            "4 trainer ranks per node (parallel.tensor 4 x parallel.pipeline 1 = 4 ranks, x 1 data parallel, on 1 "
            "nodes) need more than cluster.gpus_per_node 2",
        ),
        (["parallel.sequence=true"], "parallel.tensor is 1; raise it or drop it"),
        (
            ["rollout.replicas=2", "cluster.gpus_per_node=2"],
            "rollout.replicas 2 x rollout.tensor_parallel 1 = 2 GPUs, but 1 are left to the fleet",
        ),
        (
            ["agent.max_episode_tokens=5000"],
            "agent.max_episode_tokens 5000 is more than rollout.max_model_len 4096; raise the second or lower",
        ),
        (["agent.max_response_tokens=4096"], "agent.max_response_tokens 4096 leaves no room for a prompt"),
        (["rollout.group_size=1"], "rollout.group_size is 1, but grpo compares the episodes of a group"),
        (["algorithm.minibatches=65"], "algorithm.minibatches 65 is more than the 64 episodes of a step"),
    ],
)
def test_sizes_that_do_not_fit(experiment, overrides, expected):
    assert expected in check_problem(experiment, *overrides)


@pytest.mark.parametrize(
    ("overrides", "nodes", "ranks", "data", "gpus"),
    [
        ([], 1, 1, 1, []),
        (["parallel.tensor=2", "parallel.pipeline=3", "parallel.data=2"], 1, 12, 2, []),
        (["parallel.tensor=2", "cluster.gpus_per_node=8"], 1, 2, 1, [2, 3, 4, 5, 6, 7]),
        (["parallel.tensor=2", "cluster.gpus_per_node=4", "cluster.colocate=true"], 1, 2, 1, [0, 1]),
        (["parallel.tensor=4", "cluster.gpus_per_node=8", "cluster.trainer_nodes=2"], 2, 8, 4, []),
        (["parallel.data=4", "cluster.gpus_per_node=8", "cluster.trainer_nodes=2"], 2, 2, 4, [2, 3, 4, 5, 6, 7]),
        (["cluster.gpus_per_node=8", "cluster.rollout_nodes=1"], 1, 1, 1, []),
    ],
)
def test_layout(experiment, overrides, nodes, ranks, data, gpus):
    config = load_config(experiment, overrides)
    layout = trainer_layout(config)
    assert (layout.nodes, layout.ranks_per_node, layout.data) == (nodes, ranks, data)
    assert layout.world_size == nodes * ranks
    assert fleet_gpus(config) == gpus


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.device=cpu", GPUS], "cluster.device is cpu, but cluster.gpus_per_node is 2; set it to 0"),
        (["cluster.device=cuda"], "cluster.device is cuda, but cluster.gpus_per_node is 0"),
        (["cluster.colocate=true"], "cluster.colocate shares GPUs, and cluster.gpus_per_node is 0"),
        (["cluster.rollout_nodes=1"], "on CPU weights travel through shared memory"),
        (["cluster.colocate=true", "cluster.rollout_nodes=1", GPUS], "contradict each other; keep one"),
        (["rollout.tensor_parallel=4", GPUS, "cluster.rollout_nodes=2"], "a replica stays on one node"),
        (["sync.backend=nccl"], "sync.backend nccl needs GPUs"),
        (["sync.backend=shared_memory", GPUS], "sync.backend shared_memory is for CPU"),
        (["sync.backend=ipc", GPUS], "set cluster.colocate, or use nccl"),
        (["sync.backend=nccl", GPUS, "cluster.colocate=true"], "use ipc, or drop cluster.colocate"),
        (["sync.delta=true", GPUS], "sync.delta leaves out what did not change, but GPUs' nccl and ipc send the whole"),
        (["sync.verify=true", GPUS], "sync.verify compares what went through shared_memory, which GPUs do not use"),
    ],
)
def test_devices(experiment, overrides, expected):
    assert expected in check_problem(experiment, *overrides)


# ---------------------------------------------------------------- sampling, algorithm and names


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p is 0.9: the engine would sample from a cut distribution"),
        (["rollout.top_k=20"], "rollout.top_k is 20: the engine would sample from a cut distribution"),
        (["rollout.engine_args.seed=3"], "rollout.engine_args.seed is set by run.seed; remove it here"),
        (
            ["algorithm.advantage.name=gpro"],
            "algorithm.advantage.name: there is no 'gpro' (one of your own is package.module:name)",
        ),
        (
            ["algorithm.loss.name=ppo_clp"],
            "algorithm.loss.name: there is no 'ppo_clp' (one of your own is package.module:name)",
        ),
        (["algorithm.advantage.name=gpro"], "did you mean 'grpo'?"),
        (["algorithm.advantage.gamma=0.9"], "algorithm.advantage.gamma is not an option of grpo: it takes std, eps"),
        (["algorithm.advantage.args={a: 1}"], "algorithm.advantage.args are for one of your own"),
        (
            ["algorithm.advantage.name=gae_step"],
            "gae_step reads the values of a critic; add a section algorithm.critic",
        ),
        (["algorithm.advantage.name=opd"], "opd distils from a teacher; add a section algorithm.teacher"),
        (["algorithm.critic={lr: 1.0e-5}"], "algorithm.critic has no effect with grpo; remove it or use gae_step"),
        (
            ["algorithm.advantage.name=gae_step", "algorithm.critic.privileged=answer"],
            "rows.jsonl:1: no extra_info.answer, which algorithm.critic.privileged answer shows the critic; add it",
        ),
        (["algorithm.teacher={path: t}"], "algorithm.teacher has no effect with grpo; remove it or use opd"),
        (
            ["algorithm.advantage.name=opd", "algorithm.teacher={path: t, top_k: 8}"],
            "opd takes the advantages from it too, so it would count twice; set top_k to 0",
        ),
        (["algorithm.teacher={path: t}"], "algorithm.teacher.path t has no config.json"),
        (
            ["algorithm.advantage.name=gae_step", "algorithm.critic={warmup_steps: 100}"],
            "algorithm.critic.warmup_steps 100 leaves the policy no step of run.steps 100; lower it",
        ),
        (
            ["algorithm.correction.tis=token", "algorithm.old_logprobs=rollout"],
            "algorithm.old_logprobs rollout takes the engine's for both",
        ),
        (
            ["algorithm.loss.name=gspo", "algorithm.correction.tis=token"],
            "the ratio of gspo is that of a whole sequence; use algorithm.correction.tis sequence",
        ),
        (
            ["algorithm.loss.name=step_gspo", "algorithm.correction.tis=token"],
            "the ratio of step_gspo is that of a whole step; use algorithm.correction.tis step",
        ),
        (
            ["algorithm.loss.name=reinforce", "algorithm.epochs=2"],
            "reinforce has no ratio, so it is right for one update",
        ),
        (["algorithm.loss.tau_positive=1"], "algorithm.loss.tau_positive is not an option of ppo_clip"),
        (
            ["algorithm.loss.constant_tokens=9"],
            "algorithm.loss.constant_tokens has no effect: the denominator is token",
        ),
        (
            ["algorithm.reward.overlong.buffer_tokens=1000"],
            "algorithm.reward.overlong.buffer_tokens 1000 is more than agent.max_response_tokens 256; lower it",
        ),
        (["rollout.group_size=1"], "rollout.group_size is 1, but grpo compares the episodes of a group"),
        (["algorithm.loss.clip_low=1.5", "algorithm.epochs=2"], "a ratio is never below 0; use a number under 1"),
        (["algorithm.loss.dual_clip=0.5", "algorithm.epochs=2"], "it is a bound on the ratio, above 1"),
        (["agent.tool_format=hermess"], "agent.tool_format: there is no 'hermess'; did you mean 'hermes'?"),
        (
            ["algorithm.loss.name=GSPO"],
            "there is no 'GSPO' (one of your own is package.module:name); did you mean 'gspo'?",
        ),
        (["agent.flow=single_stp"], "agent.flow: there is no 'single_stp'"),
        (["agent.env=frozen_lak"], "did you mean 'frozen_lake'?"),
        (["agent.tools=[calculater]"], "agent.tools[0]: there is no 'calculater'"),
        (["agent.tools=[{name: calculator, args: {digits: 3}}]"], "agent.tools[0].args.digits"),
        (["agent.tools=[calculator, calculator]"], "agent.tools names a tool twice"),
        (["agent.env=frozen_lake", "agent.tools=[calculator]"], "remove one of the two"),
        (
            ["agent.env=frozen_lake", "agent.env_kwargs.sizes=4"],
            "agent.env_kwargs.sizes: megatron_agent.envs.frozen_lake",
        ),
        (["agent.reward=nowhere.module:score"], "agent.reward: there is no module 'nowhere.module'"),
        (["agent.reward=megatron_agent.rewards:exct"], "has no 'exct'; did you mean 'exact'?"),
        (["rollout.overlap=true"], "nothing corrects for that: set algorithm.correction.tis to token"),
        (
            ["rollout.overlap=true", "algorithm.old_logprobs=rollout", "algorithm.loss.name=reinforce"],
            "reinforce has no ratio that algorithm.old_logprobs rollout could correct",
        ),
        ([*OVERLAP, "algorithm.filters.max_staleness=0"], "max_staleness 0 drops every episode"),
        ([*OVERLAP, GPUS, "cluster.colocate=true"], "they take turns on the same GPUs; drop one of them"),
        (["eval.every=2"], "eval.every is 2, but data.eval names no rows"),
        (["run.name=a/b"], "run.name 'a/b' cannot be the name of a folder"),
        (["run.name=''"], "run.name '' cannot be the name of a folder"),
    ],
)
def test_values_that_cannot_run(experiment, overrides, expected):
    assert expected in check_problem(experiment, *overrides)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("own = 3", "3"),
        ("own: dict = {'a': 1}", "{'a': 1}"),
        ("def own(inputs): ...\nown = -1.5", "-1.5"),
        ("own = 3\ndef own(inputs): ...", None),
        ("own = 3\nfrom functools import partial as own", None),
        ("def other(inputs): ...\nown = other", None),
        ("own = 3\nif own:\n    def own(inputs): ...", None),
    ],
)
def test_a_plain_value_is_no_estimator(experiment, monkeypatch, source, value):
    module = f"own_{source.encode().hex()}"  # a source is read once
    (experiment.parent / f"{module}.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(experiment.parent)
    name = f"algorithm.advantage.name={module}:own"
    if value is None:
        check_config(load_config(experiment, [name]))
    else:
        said = (
            f"algorithm.advantage.name: '{module}:own' is {value}, which cannot be called; name a function or a class"
        )
        assert said in check_problem(experiment, name)


# ---------------------------------------------------------------- model


def change_model(experiment: Path, **changes) -> None:
    config = experiment.parent / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def test_a_teacher_in_the_loss(experiment):
    """Beside any estimator, with options of its own, and with no more tokens than there are."""
    change_model(experiment, vocab_size=100)
    teacher = f"algorithm.teacher.path={experiment.parent / 'model'}"
    options = [teacher, "algorithm.teacher.top_k=100", "algorithm.teacher.divergence=js", "algorithm.teacher.coef=2"]
    check_config(load_config(experiment, options), options)
    expected = "algorithm.teacher.top_k 101 is more than the model's 100 tokens; lower it"
    assert expected in check_problem(experiment, teacher, "algorithm.teacher.top_k=101")


def test_unsupported_family(experiment):
    change_model(experiment, model_type="mamba")
    message = check_problem(experiment)
    assert "has model_type 'mamba', which is not supported; supported: llama, qwen2, qwen3" in message


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("tokenizer_config.json", "{}", "has no chat template, so messages cannot become tokens"),
        ("tokenizer_config.json", None, "has no tokenizer_config.json"),
        ("model.safetensors", None, "holds no .safetensors file"),
        ("config.json", "[1", "is not a JSON object"),
        ("config.json", None, "has no config.json; point it at an HF folder, or set model.builder to make one"),
    ],
)
def test_incomplete_model_folder(experiment, file, text, expected):
    path = experiment.parent / "model" / file
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert expected in check_problem(experiment)


def test_chat_template_in_a_file_of_its_own(experiment):
    (experiment.parent / "model" / "tokenizer_config.json").write_text("{}")
    (experiment.parent / "model" / "chat_template.jinja").write_text("{{ messages }}")
    check_config(load_config(experiment))


def test_model_without_grouped_heads(experiment):
    """Where config.json says nothing about KV heads, there are as many as attention heads."""
    config = experiment.parent / "model" / "config.json"
    config.write_text(json.dumps({key: value for key, value in HF_CONFIG.items() if key != "num_key_value_heads"}))
    check_config(load_config(experiment, ["parallel.tensor=6"]))


@pytest.mark.parametrize(
    ("builder", "expected"),
    [
        ("{name: tiny_qwen}", "model.builder.name: there is no 'tiny_qwen'"),
        ("{name: tiny_qwen3, args: {hiden_size: 3}}", "did you mean 'hidden_size'?"),
        (
            "{name: tiny_qwen3, args: {num_kv_heads: 3, num_heads: 9}}",
            "parallel.tensor 2 does not divide the model's 3",
        ),
        ("{name: 'nowhere.builders:make'}", "model.builder.name: there is no module 'nowhere.builders'"),
    ],
)
def test_builder_of_a_folder_that_does_not_exist(experiment, builder, expected):
    overrides = ["model.path=models/none", f"model.builder={builder}", "parallel.tensor=2"]
    assert expected in check_problem(experiment, *overrides)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("data.train", '{"question": "2 + 2?"}\n', r"rows.jsonl:1: `prompt` must be a list of messages"),
        ("data.train", json.dumps(ROW) + "\nnot json\n", r"rows.jsonl:2: not valid JSON"),
        ("data.train", "", "holds no rows"),
        ("data.eval", '{"prompt": [{"content": "?"}]}\n', "data.eval: "),
        ("sft.data", '{"prompt": "2 + 2?"}\n', "rows.jsonl:1: `messages` must be a list of chat messages"),
    ],
)
def test_malformed_rows(experiment, tmp_path, option, text, expected):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(text)
    message = check_problem(experiment, f"{option}={folder / 'rows.jsonl'}")
    assert expected in message
    assert f"{option}: " in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.train=nowhere.jsonl"], "data.train: nowhere.jsonl: no such file"),
        (["data.train=nowhere:rows"], "data.train: there is no module 'nowhere'"),
        (["data.train=megatron_agent.envs.arithmetic:row"], "did you mean 'rows'?"),
        (
            ["data.train=megatron_agent.envs.arithmetic:rows", "data.train_args.rows=3"],
            "data.train_args.rows: megatron_agent.envs.arithmetic:rows has no such argument",
        ),
        (["data.train_args.seed=3"], "is a file, which takes none; remove it"),
        (["data.eval_args.seed=3"], "data.eval_args is given, but data.eval is not"),
        (["sft.data=nowhere.jsonl"], "sft.data: nowhere.jsonl: no such file"),
    ],
)
def test_row_sources(experiment, overrides, expected):
    assert expected in check_problem(experiment, *overrides)


# ---------------------------------------------------------------- described


def test_dumped_configuration_loads_back(experiment, tmp_path):
    config = load_config(experiment, ["optimizer.betas=[0.8, 0.9]", "agent.system_prompt='Grüße: #1'", "sft.data=x:y"])
    path = write(tmp_path, dump_config(config), "dumped.yaml")
    assert load_config(path) == config


def test_schema_file_is_current():
    assert (REPOSITORY / "yaml_configs/schema.json").read_text() == json.dumps(
        config_schema.json_schema(), indent=2
    ) + "\n"


def test_reference_page_is_current():
    assert (REPOSITORY / "docs/configuration.md").read_text() == config_schema.reference_page() + "\n"


def test_every_option_is_described():
    page = config_schema.reference_page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == [], "options without a docstring"
    for path in option_paths():
        # Sections inside sections are not rows of their own, unless they can be absent.
        is_section = any(other[: len(path)] == path and other != path for other in option_paths())
        assert is_section or any(row.startswith(f"| `{'.'.join(path[1:])}` ") for row in rows), path


def test_schema_refuses_what_loading_refuses():
    """Editors use the schema; it must know the sections and refuse unknown keys in all of them."""
    schema = config_schema.json_schema()
    assert set(schema["properties"]) == {"base", *ExperimentConfig.model_fields}
    assert all(section["additionalProperties"] is False for section in schema["$defs"].values())
