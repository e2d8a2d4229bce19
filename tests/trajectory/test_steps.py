"""The records refuse what cannot be trained on."""

import numpy as np
import pytest
from made_records import make_step, make_trajectory

from trajectory.steps import StopReason


def test_every_response_id_needs_a_logprob_and_a_mask_entry():
    with pytest.raises(ValueError, match="3 response ids but 2 log-probs and 3 mask entries"):
        make_step([1], [2, 3, 4], rollout_logprobs=np.zeros(2, dtype=np.float32))
    with pytest.raises(ValueError, match="3 response ids but 3 log-probs and 1 mask entries"):
        make_step([1], [2, 3, 4], response_mask=np.ones(1, dtype=bool))


def test_a_step_without_prompt_is_refused():
    """Its first response token would be trained from no logits at all."""
    with pytest.raises(ValueError, match="at least one prompt token"):
        make_step([], [2, 3])


def test_forced_tokens_are_not_trained_tokens():
    assert make_step([1, 2], [3, 4], forced=[5]).num_trained_tokens == 2


def test_no_step_follows_one_that_ended_the_episode():
    for last in (make_step([1], [2], terminated=True), make_step([1], [2], truncated=True)):
        with pytest.raises(ValueError, match="step 0 ended the episode but more follow"):
            make_trajectory(last, make_step([1, 2], [3]))


def test_the_return_counts_the_outcome_once():
    steps = [make_step([1], [2], reward=0.25), make_step([1, 2], [3], reward=0.5, terminated=True)]
    assert make_trajectory(*steps, reward=1.0).episode_return == 1.75


def test_only_limits_are_truncations():
    assert {reason for reason in StopReason if not reason.is_truncation} == {
        StopReason.NONE,
        StopReason.TERMINATED,
        StopReason.ENV_FAILED,
    }
