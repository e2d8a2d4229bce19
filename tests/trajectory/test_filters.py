"""Every drop has a reason and is counted; the rest of the group stays."""

from made_records import make_group, make_step, make_trajectory, one_step_group

from trajectory.filters import filter_groups
from trajectory.steps import StopReason, TrajectoryStatus


def failed(*steps):
    return make_trajectory(*steps, status=TrajectoryStatus.ENV_FAILED, error="step 2: RuntimeError: no")


def test_a_failed_environment_costs_its_own_trajectory_only():
    step = make_step([1], [2], stop_reason=StopReason.ENV_FAILED)
    whole = one_step_group(1, 0)
    kept, drops = filter_groups([make_group(failed(step), *whole.trajectories)])
    assert [group.trajectories for group in kept] == [whole.trajectories]
    assert drops == {"env_failed": 1}


def test_a_trajectory_without_trained_tokens_has_no_vote():
    empty = make_trajectory(make_step([1], [], forced=[2], truncated=True), reward=5.0)
    nothing = make_trajectory(status=TrajectoryStatus.TRUNCATED)
    kept, drops = filter_groups([make_group(empty, nothing, *one_step_group(1, 0).trajectories)])
    assert [len(group.trajectories) for group in kept] == [2]
    assert drops == {"empty": 2}


def test_a_group_of_one_has_no_baseline():
    kept, drops = filter_groups([make_group(failed(), *one_step_group(1).trajectories), one_step_group(1, 0)])
    assert [len(group.trajectories) for group in kept] == [2]
    assert drops == {"env_failed": 1, "group_of_one": 1}


def test_nothing_is_dropped_from_whole_groups():
    groups = [one_step_group(1, 1), one_step_group(0, 1)]
    kept, drops = filter_groups(groups)
    assert kept == groups
    assert not drops
