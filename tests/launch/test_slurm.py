"""The SLURM script: what it says, and what it does when `srun`, `scontrol`, `ray` and `python` are stand-ins that note
their calls."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import slurm
from launch.slurm import TEMPLATE, render_script, submit
from megatron_agent import config_loading
from megatron_agent.errors import ConfigError

EXPERIMENT = """\
run: {name: walk}
model: {path: models/none}
data: {train: rows.jsonl}
"""
GPU = ["cluster.gpus_per_node=8"]

# Each stand-in appends its name and arguments to $CALLS. srun runs its command here, as the node it was asked for.
SRUN = """#!/usr/bin/env bash
printf 'srun %s\\n' "$*" >> "$CALLS"
nodes=1
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) list=${1#*=} ;; --nodes=*) nodes=${1#*=} ;; esac
    shift
done
IFS=, read -ra names <<< "$list"
pids=()
for index in "${!names[@]}"; do
    NODE=${names[$index]} SLURM_NODEID=$index "$@" &
    pids+=($!)
done
trap 'kill "${pids[@]}"; wait; exit 143' TERM
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
"""
NOTE = """#!/usr/bin/env bash
printf -v words ' %q' "$@"
printf '%s\n' "$(basename "$0") $NODE CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-} \
OMP_NUM_THREADS=${OMP_NUM_THREADS-}$words" >> "$CALLS"
"""
# The wait for Ray's nodes, and the ranks, which do what the test says.
PYTHON = """
case "$*" in
    *"launch.ray_cluster"*"--nodes"*) until (($(grep -c '^ray ' "$CALLS") == ${!#})); do sleep 0.02; done ;;
    *launch.torchrun*) eval "${TRAINER:-true}" ;;
esac
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then tr , '\\n' <<< "$3"; else echo "scontrol $*" >> "$CALLS"; fi
"""
STAND_INS = {
    "srun": SRUN,
    "ray": NOTE + "exec sleep 60\n",
    "python": NOTE + PYTHON,
    "hostname": "#!/usr/bin/env bash\necho 10.0.0.7 172.17.0.1\n",
    "ip": "#!/usr/bin/env bash\necho '3: ib0    inet 10.9.9.1/24 brd 10.9.9.255 scope global ib0'\n",
    "nproc": "#!/usr/bin/env bash\necho 12\n",
    "scontrol": SCONTROL,
}


def render(folder: Path, overrides: list[str], text: str = EXPERIMENT, **options) -> str:
    path = folder / "walk.yaml"
    path.write_text(text)
    return render_script(config_loading.load_config(path, overrides), path, overrides, **options)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with the stand-ins, which the rendered script finds first; returns a function that starts a script."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setattr(slurm.sys, "executable", str(programs / "python"))

    def start(script: str, nodes: str, **environment: str) -> subprocess.Popen:
        path = tmp_path / "job.sh"
        path.write_text(script)
        job = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "4711", "CALLS": str(tmp_path / "calls")}
        inherited = {
            key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
        }
        pipe, everything = subprocess.PIPE, inherited | job | environment
        return subprocess.Popen(["bash", str(path)], env=everything, text=True, stdout=pipe, stderr=pipe)

    return start


def calls(folder: Path, program: str) -> list[str]:
    """The noted calls of a program, without the order in which the background ones came."""
    lines = (folder / "calls").read_text().splitlines()
    return sorted(line for line in lines if line.startswith(f"{program} "))


def finish(job: subprocess.Popen) -> tuple[int, str]:
    output, errors = job.communicate(timeout=60)
    return job.returncode, output + errors


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*GPU, "cluster.trainer_nodes=2", "cluster.rollout_nodes=1"],
        [*GPU, "parallel.tensor=4"],
        [*GPU, "cluster.colocate=true"],
        ["run.name=a b'$(touch x)\"", "data.train=my rows;.jsonl"],
    ],
)
def test_rendered_script_is_valid_bash(tmp_path, overrides):
    script = render(tmp_path, overrides, partition="gpu", account="me")
    assert "@@" not in script
    result = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_sbatch_lines(tmp_path):
    overrides = [*GPU, "cluster.trainer_nodes=3", "cluster.rollout_nodes=2"]
    script = render(tmp_path, overrides, partition="gpu", account="lab", time_limit="8:00:00")
    lines = re.findall(r"^#SBATCH --(.*)$", script, flags=re.MULTILINE)
    for expected in (
        "job-name=walk",
        f"chdir={Path.cwd()}",
        f"output={Path.cwd()}/runs/walk/logs/slurm-%j.log",
        "nodes=5",
        "time=8:00:00",
        "gpus-per-node=8",
        "partition=gpu",
        "account=lab",
        "requeue",
        "signal=B:USR1@180",
    ):
        assert expected in lines
    # sbatch reads options up to the first command only.
    assert script.rindex("#SBATCH") < script.index("set -euo pipefail")


def test_without_gpus_none_are_asked_for(tmp_path):
    script = render(tmp_path, [])
    assert not re.search(r"^#SBATCH --(gpus-per-node|partition|account)", script, flags=re.MULTILINE)


def test_every_placeholder_is_documented():
    text = TEMPLATE.read_text()
    comment = " ".join(line for line in text.splitlines() if line.startswith("# "))
    for name in set(re.findall(r"@@(\w+)", text)):
        assert re.search(rf"\b{name}\b", comment), f"{name} is not explained at the top of {TEMPLATE}"


def test_fleet_and_trainer_on_nodes_of_their_own(cluster, tmp_path):
    overrides = [*GPU, "cluster.trainer_nodes=2", "cluster.rollout_nodes=2", "parallel.tensor=4"]
    code, output = finish(cluster(render(tmp_path, overrides), "n1,n2,n3,n4"))
    assert code == 0, output
    address = f"10.0.0.7:{25000 + 4711}"
    start = "OMP_NUM_THREADS= start --block --disable-usage-stats --num-gpus"
    gpus = "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"
    assert calls(tmp_path, "ray") == [
        f"ray n1 CUDA_VISIBLE_DEVICES= {start} 0 --num-cpus 1 --address {address}",
        f"ray n3 {gpus} {start} 8 --head --node-ip-address 10.0.0.7 --port {25000 + 4711} --include-dashboard false",
        f"ray n4 {gpus} {start} 8 --address {address}",
    ]
    waits = [line for line in calls(tmp_path, "python") if "launch.ray_cluster" in line]
    assert [line.partition("launch.ray_cluster ")[2] for line in waits] == [
        f"{address} --head-only",
        f"{address} --nodes 3",  # two for the fleet, and the driver's
    ]
    assert all(line.startswith("python n1 ") for line in waits)
    ranks = [line for line in calls(tmp_path, "python") if "launch.torchrun" in line]
    assert [line.split()[1] for line in ranks] == ["n1", "n2"]
    for index, line in enumerate(ranks):
        assert "OMP_NUM_THREADS=1 " in line  # 12 cores, 8 ranks
        assert f"--nproc-per-node 8 --node-rank {index} " in line
        assert f"--nnodes 2 --master-addr n1 --master-port {20000 + 4711} " in line
        assert line.endswith(
            f"-m megatron_agent.train {tmp_path}/walk.yaml {' '.join(overrides)} cluster.ray_address={address}"
        )


def test_shared_nodes_split_their_gpus(cluster, tmp_path):
    overrides = [*GPU, "cluster.trainer_nodes=2", "parallel.data=8"]  # 4 ranks a node
    code, output = finish(cluster(render(tmp_path, overrides), "n1,n2"))
    assert code == 0, output
    nodes = [line.split()[1:3] for line in calls(tmp_path, "ray")]
    assert nodes == [["n1", "CUDA_VISIBLE_DEVICES=4,5,6,7"], ["n2", "CUDA_VISIBLE_DEVICES=4,5,6,7"]]
    assert all("--num-gpus 4 " in line for line in calls(tmp_path, "ray"))
    assert [("--head" in line) for line in calls(tmp_path, "ray")] == [True, False]
    assert any("--nodes 2" in line for line in calls(tmp_path, "python"))
    assert all("OMP_NUM_THREADS=3 " in line for line in calls(tmp_path, "python") if "torchrun" in line)


def test_slurm_numbers_of_gpus_are_kept(cluster, tmp_path):
    script = render(tmp_path, ["cluster.gpus_per_node=4", "parallel.tensor=2"])
    finish(cluster(script, "n1", CUDA_VISIBLE_DEVICES="3,5,6,7"))
    assert [line.split()[2] for line in calls(tmp_path, "ray")] == ["CUDA_VISIBLE_DEVICES=6,7"]


def test_colocated_fleet_gets_all_gpus(cluster, tmp_path):
    script = render(tmp_path, ["cluster.gpus_per_node=2", "parallel.tensor=2", "cluster.colocate=true"])
    finish(cluster(script, "n1"))
    (head,) = calls(tmp_path, "ray")
    assert "CUDA_VISIBLE_DEVICES=0,1 " in head
    assert "--num-gpus 2 " in head


def test_on_cpu_ray_runs_on_the_first_node_alone(cluster, tmp_path):
    script = render(tmp_path, ["cluster.trainer_nodes=2", "parallel.data=2", "parallel.threads_per_rank=5"])
    code, output = finish(cluster(script, "n1,n2"))
    assert code == 0, output
    (head,) = calls(tmp_path, "ray")
    assert head.startswith("ray n1 CUDA_VISIBLE_DEVICES= ")
    assert "--num-gpus 0 --head" in head
    ranks = [line for line in calls(tmp_path, "python") if "launch.torchrun" in line]
    assert [line.split()[1] for line in ranks] == ["n1", "n2"]
    assert all("OMP_NUM_THREADS=5 " in line for line in ranks)


def test_overrides_reach_the_ranks_unchanged(cluster, tmp_path):
    overrides = ["run.name=a b'$(touch stray)\"", "agent.stop=[';', \"*\"]"]
    code, output = finish(cluster(render(tmp_path, overrides), "n1"))
    assert code == 0, output
    (rank,) = [line for line in calls(tmp_path, "python") if "launch.torchrun" in line]
    # bash's %q writes words that a shell reads back as they were.
    assert shlex.split(rank)[-3:-1] == overrides
    assert not (tmp_path / "stray").exists()


def test_network_interface(cluster, tmp_path):
    script = render(tmp_path, [])
    code, output = finish(
        cluster(
            script, "n1", MEGATRON_AGENT_INTERFACE="ib0", TRAINER='echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME" >&2'
        )
    )
    assert code == 0, output
    assert "ib0 ib0" in output
    assert "--node-ip-address 10.9.9.1 " in calls(tmp_path, "ray")[0]


def test_exit_code_of_the_trainer_and_no_step_left(cluster, tmp_path):
    started = time.monotonic()
    code, _ = finish(cluster(render(tmp_path, []), "n1", TRAINER="exit 4"))
    assert code == 4
    assert time.monotonic() - started < 30, "it waited for Ray, which never ends by itself"


def test_wrong_number_of_nodes(cluster, tmp_path):
    code, output = finish(cluster(render(tmp_path, []), "n1,n2"))
    assert code == 2
    assert "the job has 2 nodes, but 1 trainer + 0 rollout nodes need 1" in output


def reach_time_limit(folder: Path, job: subprocess.Popen) -> tuple[int, str]:
    """What SLURM does: SIGUSR1 to the script, once the trainer runs."""
    deadline = time.monotonic() + 30
    while not (folder / "training").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    return finish(job)


def test_time_limit_queues_the_job_again(cluster, tmp_path):
    trainer = "mkdir -p runs/walk/checkpoints/step_00000003; touch training; exec sleep 60"
    job = cluster(render(tmp_path, []), "n1", TRAINER=trainer)
    code, output = reach_time_limit(tmp_path, job)
    assert code == 0
    assert "to go on from runs/walk/checkpoints/step_00000003" in output
    assert calls(tmp_path, "scontrol") == ["scontrol requeue 4711"]


def test_time_limit_without_a_new_checkpoint_is_the_end(cluster, tmp_path):
    (tmp_path / "runs/walk/checkpoints/step_00000003").mkdir(parents=True)
    job = cluster(render(tmp_path, []), "n1", TRAINER="touch training; exec sleep 60")
    code, output = reach_time_limit(tmp_path, job)
    assert code == 1
    assert "no checkpoint was written within the time limit" in output
    assert not calls(tmp_path, "scontrol")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.ray_address=10.0.0.1:6379", "starts a Ray cluster itself; remove it"),
        ("run.resume=never", "reached its time limit resumes; set it to auto"),
    ],
)
def test_options_against_the_script(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        render(tmp_path, [override])


def test_submit_needs_sbatch(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch on the PATH"):
        submit("", tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def put_sbatch(folder: Path, monkeypatch, text: str) -> None:
    (folder / "sbatch").write_text(f"#!/bin/bash\n{text}\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_submit(tmp_path, monkeypatch):
    put_sbatch(tmp_path, monkeypatch, 'cat "$1"')
    assert submit("#!/bin/bash\ntrue", tmp_path / "logs") == "#!/bin/bash\ntrue"
    assert (tmp_path / "logs" / "train.sbatch").exists()


def test_submit_refused(tmp_path, monkeypatch):
    put_sbatch(tmp_path, monkeypatch, "echo 'invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"sbatch refused .*: invalid partition specified: gpu"):
        submit("", tmp_path)


def test_command_line():
    """Sizes given as options count before the check, and reach the ranks as overrides."""
    result = subprocess.run(
        [
            *(sys.executable, "-c", "import sys; from megatron_agent.cli import main; sys.exit(main())"),
            *("launch", "slurm", "yaml_configs/quickstart.yaml", "run.steps=2"),
            *("--nodes", "2", "--rollout-nodes", "1", "--gpus-per-node", "8", "--dry-run"),
        ],
        text=True,
        capture_output=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "#SBATCH --nodes=3" in result.stdout
    sizes = "cluster.trainer_nodes=2 cluster.rollout_nodes=1 cluster.gpus_per_node=8"
    assert f"overrides=(run.steps=2 {sizes})" in result.stdout
