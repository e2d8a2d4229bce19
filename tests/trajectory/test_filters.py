"""Every drop has a reason and is counted; the rest of the group stays."""

from dataclasses import replace

from made_records import make_group, make_step, make_trajectory, one_step_group

from trajectory.filters import Filters
from trajectory.filters import filter_groups as filter_with
from trajectory.steps import StopReason, TrajectoryStatus


def filter_groups(groups, need="group", step=1, **filters):
    return filter_with(groups, Filters(**filters), need=need, step=step)


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


def test_a_group_of_one_stays_where_nothing_is_compared_within_a_group():
    kept, drops = filter_groups([one_step_group(1)], need=None)
    assert len(kept) == 1
    assert not drops


def test_equal_returns_leave_where_that_is_asked_for():
    kept, drops = filter_groups([one_step_group(1, 1, 1), one_step_group(0, 1)], zero_variance=True)
    assert [len(group.trajectories) for group in kept] == [2]
    assert drops == {"zero_variance": 3}


def test_what_a_token_limit_cut_off_leaves_where_that_is_asked_for():
    cut = make_trajectory(make_step([1], [2], truncated=True, stop_reason=StopReason.RESPONSE_LENGTH))
    late = make_trajectory(make_step([1], [2], truncated=True, stop_reason=StopReason.MAX_STEPS))
    kept, drops = filter_groups([make_group(cut, late, late)], overlong=True)
    assert [len(group.trajectories) for group in kept] == [2]
    assert drops == {"overlong": 1}


def test_staleness_is_that_of_the_oldest_step():
    def played(*versions):
        steps = [make_step([1], [2], policy_version=version) for version in versions]
        return make_trajectory(*steps)

    group = make_group(played(6, 5), played(6, 6), played(4, 6))
    kept, drops = filter_groups([group], step=7, max_staleness=1)  # step 7 trains what version 6 played
    assert kept[0].trajectories == group.trajectories[:2]
    assert drops == {"stale": 1}


def test_a_group_whose_greedy_episode_failed_has_no_baseline():
    step = make_step([1], [2])
    with_greedy = replace(one_step_group(1), greedy=make_trajectory(step, reward=1.0))
    without = replace(one_step_group(0, 1), greedy=failed(step))
    kept, drops = filter_groups([with_greedy, without], need="greedy")
    assert kept == [with_greedy]
    assert drops == {"no_baseline": 2}
