"""Numbers about episodes, worked out by hand."""

import pytest
from made_records import make_group, make_step, make_trajectory, one_step_group

from megatron_agent.rollout_metrics import rollout_metrics
from trajectory.steps import ContextChange, StopReason, TrajectoryStatus


def test_numbers_of_one_group():
    won = make_trajectory(
        make_step([1, 2], [3, 4], policy_version=4, info={"tool_calls": 2, "tool_errors": 1, "cut_off": 0}),
        make_step(
            [1, 2, 3, 4, 5],
            [6],
            forced=[7],
            reward=0.5,
            terminated=True,
            stop_reason=StopReason.TERMINATED,
            context_change=ContextChange.CLEAN,
            policy_version=4,
            info={"tool_calls": 1, "cut_off": 0, "num_cached_tokens": 4},
            reward_parts={"form": 0.5},
        ),
        reward=1.0,
        reward_parts={"outcome": 1.0},
        success=True,
    )
    lost = make_trajectory(
        make_step(
            [1, 2, 3],
            [4, 5, 6],
            truncated=True,
            stop_reason=StopReason.MAX_STEPS,
            policy_version=3,
            info={"tool_calls": 0, "cut_off": 1},
        ),
        reward=0.5,
        reward_parts={"outcome": 0.5},
        success=False,
    )
    metrics = rollout_metrics([make_group(won, lost)], step=5)
    assert metrics == pytest.approx(
        {
            "episodes": 2,
            "return_mean": 1.0,
            "return_std": 0.5,
            "success_rate": 0.5,
            "steps_per_episode": 1.5,
            "response_tokens": 6,
            "response_tokens_per_step": 2,
            "prompt_tokens": 10,
            "env_failed_frac": 0,
            "equal_return_groups_frac": 0,
            "staleness_mean": 1 / 3,
            "staleness_max": 1,
            "prefix_cache_hit_frac": 0.4,
            "prefix_cache_ideal_frac": 0,
            "ended_max_steps_frac": 0.5,
            "ended_terminated_frac": 0.5,
            "context_first": 2,
            "context_clean": 1,
            "tool_calls": 3,
            "tool_errors": 1,
            "cut_off": 1,
            "reward_outcome_mean": 0.75,
            "reward_form_mean": 0.25,
        }
    )


def test_failed_episodes_are_counted_and_do_not_touch_the_returns():
    step = make_step([1], [2], stop_reason=StopReason.ENV_FAILED)
    failed = make_trajectory(step, status=TrajectoryStatus.ENV_FAILED)
    unborn = make_trajectory(status=TrajectoryStatus.ENV_FAILED)
    metrics = rollout_metrics([make_group(failed, unborn, *one_step_group(1, 1).trajectories)], step=1)
    assert metrics["env_failed_frac"] == 0.5
    assert metrics["return_mean"] == metrics["success_rate"] == 1
    assert metrics["ended_env_failed_frac"] == 0.25
    assert metrics["equal_return_groups_frac"] == 1


def test_without_a_verdict_a_positive_return_is_a_success():
    assert rollout_metrics([one_step_group(0, 0.1, -1, 1)], step=1)["success_rate"] == 0.5


def test_groups_without_a_difference_to_learn_from():
    split = make_trajectory(make_step([1], [2], reward=0.1), make_step([1, 2], [3], reward=0.2, terminated=True))
    whole = make_trajectory(make_step([1], [2], reward=0.3, terminated=True))
    groups = [one_step_group(1, 1), one_step_group(0, 1), make_group(split, whole), one_step_group(0, 0.001)]
    assert rollout_metrics(groups, step=1)["equal_return_groups_frac"] == 0.5


def test_no_episodes_and_only_failures():
    assert rollout_metrics([], step=1) == {"episodes": 0}
    metrics = rollout_metrics([make_group(make_trajectory(status=TrajectoryStatus.ENV_FAILED))], step=1)
    assert metrics["env_failed_frac"] == 1
    assert metrics["return_mean"] == metrics["response_tokens"] == 0


def test_what_the_prefix_cache_had_and_could_have_had():
    """Blocks of 4. First prompts of 9 tokens: two blocks, for all members but the first. The second prompts follow
    9 + 2 tokens, two blocks; the third, which a fork made shorter than 11 + 3 + 2, could have had all but its last."""
    block = {"cache_block_tokens": 4}
    first, second = list(range(9)), list(range(14))

    def member(*cached):
        infos = [block | {"num_cached_tokens": number} for number in cached]
        return make_trajectory(
            make_step(first, [1, 2], info=infos[0]),
            make_step(second, [1, 2, 3], info=infos[1], context_change=ContextChange.CLEAN),
            make_step(list(range(13)), [1], info=infos[2], context_change=ContextChange.FORK),
        )

    metrics = rollout_metrics([make_group(member(0, 8, 0), member(8, 8, 4), member(8, 8, 4))], step=1)
    prompt_tokens = 3 * (9 + 14 + 13)
    assert metrics["prompt_tokens"] == prompt_tokens
    assert metrics["prefix_cache_hit_frac"] == pytest.approx(48 / prompt_tokens)
    assert metrics["prefix_cache_ideal_frac"] == pytest.approx((2 * 8 + 3 * 8 + 3 * 12) / prompt_tokens)


def test_a_prompt_of_whole_blocks_computes_its_last_one():
    step = make_step(list(range(8)), [1], info={"cache_block_tokens": 4})
    metrics = rollout_metrics([make_group(make_trajectory(step), make_trajectory(step))], step=1)
    assert metrics["prefix_cache_ideal_frac"] == pytest.approx(4 / 16)
