"""Trajectories come back from JSONL as they were."""

import dataclasses

import numpy as np
from made_records import make_group, make_step, make_trajectory, one_step_group

from megatron_agent.metrics import cut_jsonl
from rollout.recorder import TrajectoryRecorder, read_trajectories
from trajectory.steps import ContextChange, StopReason, TrajectoryStatus


def full_trajectory():
    message = {"role": "user", "content": "größer\n\u2028 <|im_end|>"}
    first = make_step(
        [1, 2],
        [3, 4],
        forced=[5],
        logprob=-1 / 3,
        observation=[message],
        response_text="left",
        feedback=[message],
        reward=0.1,
        reward_parts={"moves": 0.1},
        info={"tool_calls": 2, "num_cached_tokens": np.int64(1)},
        policy_version=7,
    )
    last = make_step(
        [1, 2, 3, 4, 5, 6],
        [7],
        truncated=True,
        next_prompt_ids=np.array([1, 2, 3, 4, 5, 6, 7, 8], dtype=np.int32),
        stop_reason=StopReason.TIME_LIMIT,
        next_observation=[],
        context_change=ContextChange.CLEAN,
    )
    return make_trajectory(
        first,
        last,
        reward=1 / 3,
        status=TrajectoryStatus.TRUNCATED,
        success=False,
        error="episode time-out",
        reward_parts={"outcome": 1 / 3},
        data_source="lake",
        row_index=4,
        timings={"total_s": 0.25},
    )


def assert_equal(read, written):
    for field in dataclasses.fields(written):
        if field.name != "steps":
            assert getattr(read, field.name) == getattr(written, field.name), field.name
    for one, other in zip(read.steps, written.steps, strict=True):
        for field in dataclasses.fields(other):
            left, right = getattr(one, field.name), getattr(other, field.name)
            if isinstance(right, np.ndarray):
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)
            else:
                assert left == right, field.name


def test_round_trip(tmp_path):
    written = full_trajectory()
    recorder = TrajectoryRecorder(tmp_path / "run")
    recorder.write([make_group(written)], step=3, phase="train")
    ((step, phase, read),) = read_trajectories(recorder.path)
    assert (step, phase) == (3, "train")
    assert_equal(read, written)


def test_each_write_appends_one_line_for_each_episode(tmp_path):
    for step in (1, 2):
        TrajectoryRecorder(tmp_path).write([one_step_group(0, 1), one_step_group(1)], step=step, phase="train")
    records = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    assert [step for step, _, _ in records] == [1, 1, 1, 2, 2, 2]
    assert [trajectory.outcome_reward for _, _, trajectory in records] == [0, 1, 1] * 2


def test_a_half_written_last_line_is_left_out(tmp_path):
    recorder = TrajectoryRecorder(tmp_path)
    recorder.write([one_step_group(0, 1)], step=1, phase="train")
    text = recorder.path.read_text()
    recorder.path.write_text(text + text[:100])
    assert len(list(read_trajectories(recorder.path))) == 2


def test_what_environments_put_into_their_records_never_ends_a_run(tmp_path):
    odd = make_step([1], [2], info={"where": tmp_path, "seen": {1}}, feedback=[{"role": "user", "content": object()}])
    recorder = TrajectoryRecorder(tmp_path)
    recorder.write([make_group(make_trajectory(odd))], step=1, phase="train")
    ((_, _, read),) = read_trajectories(recorder.path)
    assert read.steps[0].info["where"] == str(tmp_path)


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    recorder = TrajectoryRecorder(tmp_path)
    for step in (1, 2, 3):
        recorder.write([one_step_group(0, 1)], step=step, phase="train")
    cut_jsonl(recorder.path, 2)
    assert [step for step, _, _ in read_trajectories(recorder.path)] == [1, 1, 2, 2]
