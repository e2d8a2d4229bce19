"""Steps become samples: each sampled token is trained once, at its own place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from made_records import make_step, make_trajectory

from trajectory.samples import merge_steps, with_prefix
from trajectory.steps import ContextChange


def merge(*steps, **options):
    return merge_steps(make_trajectory(*steps), trajectory_index=7, **options)


def test_steps_that_only_append_become_one_sample():
    first = make_step([1, 2], [3, 4], logprob=-1.0)
    second = make_step([1, 2, 3, 4, 5], [6], logprob=-2.0, context_change=ContextChange.CLEAN)
    (sample,) = merge(first, second, step_weights=np.array([0.5, 0.25]))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.step_index.tolist() == [-1, -1, 0, 0, -1, 1]
    assert sample.rollout_logprobs.tolist() == [0, 0, -1, -1, 0, -2]
    assert sample.loss_weights.tolist() == [0, 0, 0.5, 0.5, 0, 0.25]
    assert sample.value_mask.tolist() == sample.loss_mask.tolist()
    assert sample.trajectory_index == 7


def test_rewritten_history_starts_a_new_sample_and_its_turns_are_not_trained_again():
    first = make_step([1, 2], [3, 4])
    rewritten = make_step([1, 2, 4, 5], [6, 7], context_change=ContextChange.FORK)
    one, two = merge(first, rewritten)
    assert one.token_ids.tolist() == [1, 2, 3, 4]
    assert two.token_ids.tolist() == [1, 2, 4, 5, 6, 7]
    assert two.loss_mask.tolist() == [False, False, False, False, True, True]
    assert two.step_index.tolist() == [-1, -1, -1, -1, 1, 1]


def test_other_ids_split_even_where_the_step_says_clean():
    first = make_step([1, 2], [3, 4])
    assert len(merge(first, make_step([1, 2, 3, 9, 5], [6], context_change=ContextChange.CLEAN))) == 2
    assert len(merge(first, make_step([1, 2, 3], [6], context_change=ContextChange.CLEAN))) == 2


def test_a_turn_shared_by_two_samples_is_trained_once():
    """Step 2 extends step 1, step 3 goes back to step 1's context."""
    steps = [
        make_step([1], [2]),
        make_step([1, 2, 3], [4]),
        make_step([1, 2, 5], [6], context_change=ContextChange.FORK),
    ]
    samples = merge(*steps)
    trained = [(i, t) for s in samples for i, t, m in zip(s.step_index, s.token_ids, s.loss_mask, strict=True) if m]
    assert trained == [(0, 2), (1, 4), (2, 6)]


def test_a_forced_token_has_no_logprob_and_is_not_trained():
    (sample,) = merge(make_step([1, 2], [3, 4], forced=[9]), make_step([1, 2, 3, 4, 9, 5], [6]))
    assert sample.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert sample.rollout_logprobs[4] == 0


def test_nan_at_a_masked_token_stays_out():
    step = make_step([1, 2], [3], forced=[4], rollout_logprobs=np.array([-1.0, np.nan], dtype=np.float32))
    (sample,) = merge(step)
    assert np.isfinite(sample.rollout_logprobs).all()


def test_the_trained_tokens_of_all_samples_are_numbered_through():
    forked = make_step([1, 9], [5, 6, 7], forced=[8], context_change=ContextChange.FORK)
    samples = merge(make_step([1, 2], [3, 4]), forked, make_step([1], [2], context_change=ContextChange.FORK))
    assert [sample.first_trained for sample in samples] == [0, 2, 5]


def test_a_marker_stands_behind_what_a_truncated_agent_would_have_seen_next():
    last = make_step([1, 2], [3], truncated=True, next_prompt_ids=np.array([1, 2, 3, 4, 5], dtype=np.int32))
    (sample,) = merge(last, mark_next=True)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 0]
    assert sample.loss_mask.tolist() == [False, False, True, False, False, False]
    assert sample.value_mask.tolist() == [False, False, True, False, False, True]
    assert sample.loss_weights.tolist() == [0, 0, 1, 0, 0, 0]
    assert sample.step_index.tolist() == [-1, -1, 0, -1, -1, -1]


def test_without_a_next_prompt_the_marker_follows_the_response():
    (sample,) = merge(make_step([1, 2], [3], truncated=True), mark_next=True)
    assert sample.token_ids.tolist() == [1, 2, 3, 0]


def test_a_rewritten_next_prompt_is_a_sample_of_its_own():
    last = make_step([1, 2], [3], truncated=True, next_prompt_ids=np.array([7, 8], dtype=np.int32))
    one, two = merge(last, mark_next=True)
    assert one.token_ids.tolist() == [1, 2, 3]
    assert (two.token_ids.tolist(), two.value_mask.tolist()) == ([7, 8, 0], [False, False, True])
    assert not two.loss_mask.any()


def test_only_truncated_trajectories_are_marked_and_only_for_a_critic():
    assert len(merge(make_step([1], [2], terminated=True), mark_next=True)[0].token_ids) == 2
    assert len(merge(make_step([1], [2], truncated=True))[0].token_ids) == 2


def test_a_prefix_is_neither_trained_nor_valued_and_moves_the_rest():
    last = make_step([1, 2], [3], truncated=True, next_prompt_ids=np.array([1, 2, 3, 4], dtype=np.int32), logprob=-1.0)
    (plain,) = merge(last, mark_next=True, step_weights=np.array([0.5]))
    sample = with_prefix(plain, np.array([8, 9], dtype=np.int32))
    assert sample.token_ids.tolist() == [8, 9, 1, 2, 3, 4, 0]
    assert sample.loss_mask.tolist() == [False, False, False, False, True, False, False]
    assert sample.value_mask.tolist() == [False, False, False, False, True, False, True]
    assert sample.step_index.tolist() == [-1, -1, -1, -1, 0, -1, -1]
    assert sample.rollout_logprobs.tolist() == [0, 0, 0, 0, -1, 0, 0]
    assert sample.loss_weights.tolist() == [0, 0, 0, 0, 0.5, 0, 0]
    assert (sample.trajectory_index, sample.first_trained) == (7, 0)
    for name in ("token_ids", "loss_mask", "value_mask", "step_index", "rollout_logprobs", "loss_weights"):
        assert getattr(sample, name).dtype == getattr(plain, name).dtype, name


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=6))
def test_every_response_token_is_trained_exactly_once(turns):
    context, steps = [0], []
    for number, (num_shown, num_said, forks) in enumerate(turns):
        if forks and number:
            context = [1000 + number]
        context += [100 * number + 10 + place for place in range(num_shown)]
        said = [100 * number + 50 + place for place in range(num_said)]
        change = ContextChange.FORK if forks and number else ContextChange.CLEAN
        steps.append(make_step(context, said, context_change=change))
        context = context + said
    samples = merge(*steps)
    trained = np.concatenate([sample.token_ids[sample.loss_mask] for sample in samples]).tolist()
    assert trained == [token for step in steps for token in step.response_ids.tolist()]
    assert len(samples) == 1 + sum(forks for number, (_, _, forks) in enumerate(turns) if number)
