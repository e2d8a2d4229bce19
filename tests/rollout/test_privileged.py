"""What only the critic sees of a row: on the trajectory, in a recording, and nowhere that the policy looks."""

from pathlib import Path

import numpy as np
import pytest
from scripted_model import END, ScriptedModel, ids_of, make_config, make_row, play, text_of

from megatron_agent.batching import BatchBuilder
from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import DataError
from megatron_agent.model_folders.tiny_qwen3 import build
from rollout.recorder import TrajectoryRecorder
from rollout.replay import RecordedEpisodes
from trajectory.steps import Trajectory, TrajectoryGroup

ROW = {"prompt": "go", "extra_info": {"answer": "xyzzy"}, "reward_model": {"ground_truth": {"b": [1], "a": "é"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build(path)
    return path


def with_critic(folder: Path, **critic: str) -> ExperimentConfig:
    sections = make_config(folder, agent={"flow": "single_step"}).model_dump(exclude_unset=True)
    sections["algorithm"] = {"advantage": {"name": "gae_token"}, "critic": critic}
    return ExperimentConfig.model_validate(sections)


def played(folder: Path, row: dict, **critic: str) -> tuple[Trajectory, ScriptedModel]:
    model = ScriptedModel("left" + END)
    return play(with_critic(folder, **critic), model, make_row(**row)), model


def test_the_policy_is_asked_the_same_with_and_without_it(folder: Path) -> None:
    shown, model = played(folder, ROW, privileged="answer")
    assert shown.privileged_ids is not None
    assert (shown.privileged_ids.dtype, text_of(shown.privileged_ids)) == (np.int32, "xyzzy\n")
    plain, without = played(folder, ROW)
    assert plain.privileged_ids is None
    assert model.prompts == without.prompts
    assert "xyzzy" not in text_of(model.prompts[0])


def test_what_is_no_text_is_json(folder: Path) -> None:
    shown, _ = played(folder, ROW, privileged="ground_truth")
    assert shown.privileged_ids is not None
    assert shown.privileged_ids.tolist() == ids_of('{"a": "é", "b": [1]}\n')


def test_held_out_rows_need_no_answer(folder: Path) -> None:
    shown, _ = played(folder, {"prompt": "go"}, privileged="answer")
    assert shown.privileged_ids is None


def test_a_recorded_run_is_replayed_with_it(folder: Path, tmp_path: Path) -> None:
    shown, _ = played(folder, ROW, privileged="answer")
    group = TrajectoryGroup(group_id=shown.group_id, trajectories=(shown, shown))
    recorder = TrajectoryRecorder(tmp_path)
    recorder.write([group], step=1, phase="train")
    episodes = RecordedEpisodes(recorder.path)
    episodes.start([], step=1, group_size=2, temperature=1.0)
    result = episodes.run()
    assert result is not None
    read = result.groups[0].trajectories[0].privileged_ids
    assert read is not None
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read, shown.privileged_ids)
    builder = BatchBuilder(with_critic(folder, privileged="answer"), data_parallel_size=1, pad_multiple=1)
    expected, found = (builder.build(groups, step=1).minibatches[0].critic_rows for groups in ([group], result.groups))
    assert expected
    assert found
    assert found[0][0].token_ids.tolist() == expected[0][0].token_ids.tolist()


def test_a_recording_without_it_cannot_be_replayed_with_it(folder: Path) -> None:
    plain, _ = played(folder, ROW)
    builder = BatchBuilder(with_critic(folder, privileged="answer"), data_parallel_size=1, pad_multiple=1)
    with pytest.raises(DataError, match=r"recorded without what algorithm\.critic\.privileged answer names"):
        builder.build([TrajectoryGroup(group_id="g", trajectories=(plain, plain))], step=1)
