"""Packed rows: each entry with its own, samples apart where they differ, padding never trained."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import make_step, make_trajectory

from trajectory.advantages.inputs import Credit
from trajectory.packing import RowCredit, pack_row, plan_microbatches, row_cost
from trajectory.samples import merge_steps, with_prefix


def sample(index: int, prompt: int, response: int):
    ids = range(100 * index, 100 * index + prompt + response)
    step = make_step(ids[:prompt], ids[prompt:], logprob=-float(index + 1))
    return merge_steps(make_trajectory(step), trajectory_index=index, step_weights=np.array([0.5]))[0]


def test_one_row_of_two_samples_and_padding():
    row = pack_row([sample(1, 1, 3), sample(0, 2, 1)], pad_multiple=4, share=False)
    assert row.token_ids.tolist() == [100, 101, 102, 103, 0, 1, 2, 0]
    assert row.node_bounds.tolist() == [0, 4, 7, 8]
    assert row.node_parents.tolist() == [-1, -1, -1]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert row.asked.tolist() == [0, 1, 2, 5], "the tokens before the trained ones"
    assert row.asked_index.tolist() == [0, 1, 2, 3]
    assert row.target_ids.tolist() == [101, 102, 103, 2]
    assert row.loss_mask.tolist() == [True] * 4
    assert row.step_index.tolist() == [0] * 4
    assert row.trajectory_index.tolist() == [1, 1, 1, 0]
    assert row.sample_index.tolist() == [0, 0, 0, 1]
    assert row.advantages.tolist() == [0] * 4
    assert row.trained_index is not None
    assert row.trained_index.tolist() == [0, 1, 2, 0]
    assert row.loss_weights.tolist() == [0.5] * 4
    assert row.rollout_logprobs.tolist() == [-2, -2, -2, -1]
    assert (row.num_tokens, row.num_padding, row.num_unshared) == (8, 1, 7)
    credit = Credit(advantages=np.array([0.5, 1.0, 1.5, 2.0]))
    credited = RowCredit.on_row(row, credit, np.array([1, 2, 3, 0])).put_on(row)
    assert credited.advantages.tolist() == [1, 1.5, 2, 0.5]
    assert row.old_logprobs is None
    assert row.reference_logprobs is None


def test_what_two_samples_share_is_laid_out_once_and_trained_for_both():
    """The same prompt and first two tokens, sampled with unequal log-probs; then they part."""
    one = merge_steps(make_trajectory(make_step([1, 2], [3, 4, 5], logprob=-1.0)), trajectory_index=0)
    other = merge_steps(make_trajectory(make_step([1, 2], [3, 4, 6], logprob=-2.0)), trajectory_index=1)
    row = pack_row([*one, *other], pad_multiple=4)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 0, 1]
    assert row.node_bounds.tolist() == [0, 4, 5, 6, 8]
    assert row.node_parents.tolist() == [-1, 0, 0, -1]
    assert row.asked.tolist() == [1, 2, 3], "token 3 is what both of the last ones follow"
    assert row.asked_index.tolist() == [0, 1, 2, 0, 1, 2]
    assert row.target_ids.tolist() == [3, 4, 5, 3, 4, 6]
    assert row.trajectory_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert row.rollout_logprobs.tolist() == [-1, -1, -1, -2, -2, -2]
    assert (row.num_tokens, row.num_padding, row.num_unshared) == (8, 2, 10)
    assert row_cost(row, pair_cost=0.1) == pytest.approx(8 + 0.1 * (1 + 2 + 3 + 4 + 5 + 5 + 1 + 2))


def test_a_prefix_stays_in_front_of_its_sample():
    samples = [with_prefix(sample(1, 1, 3), np.array([901, 902])), with_prefix(sample(0, 2, 1), np.array([900]))]
    row = pack_row(samples, pad_multiple=4, share=False)
    assert row.token_ids.tolist() == [901, 902, 100, 101, 102, 103, 900, 0, 1, 2, 0, 0]
    assert row.node_bounds.tolist() == [0, 6, 10, 12]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1]
    assert row.asked[row.asked_index].tolist() == [2, 3, 4, 8]
    assert row.trajectory_index.tolist() == [1, 1, 1, 0]
    assert row.trained_index is not None
    assert row.trained_index.tolist() == [0, 1, 2, 0]


def test_types_are_those_that_the_record_promises():
    row = pack_row([sample(0, 2, 2)])
    names = ("token_ids", "position_ids", "asked", "asked_index", "target_ids", "sample_index")
    assert {getattr(row, name).dtype for name in names} == {torch.int64}
    names = ("node_bounds", "node_parents", "step_index", "trajectory_index")
    assert {getattr(row, name).dtype for name in names} == {torch.int32}
    assert row.loss_mask.dtype == torch.bool
    assert row.advantages.dtype == row.loss_weights.dtype == row.rollout_logprobs.dtype == torch.float32
    assert row.num_padding == 0


@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_a_rank_without_samples_gets_a_row_of_padding(pad_multiple):
    ranks = plan_microbatches([sample(0, 2, 2)], tokens_per_row=10, data_parallel_size=3, pad_multiple=pad_multiple)
    assert [len(rows) for rows in ranks] == [1, 1, 1]
    for (row,) in ranks[1:]:
        assert row.num_tokens == row.num_padding == pad_multiple
        assert row.loss_mask.tolist() == [False], "one entry, so that everything downstream has something to read"
        assert row.trajectory_index.tolist() == [-1]
        assert row.node_bounds.tolist() == [0, pad_multiple]


def test_samples_in_which_nothing_was_sampled_have_a_masked_entry():
    nothing = merge_steps(make_trajectory(make_step([1, 2, 3], [], forced=[4])), trajectory_index=0)
    row = pack_row(nothing)
    assert row.token_ids.tolist() == [1, 2, 3, 4]
    assert (row.asked.tolist(), row.loss_mask.tolist(), row.trajectory_index.tolist()) == ([0], [False], [-1])


@settings(max_examples=50)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=20),
    common=st.integers(0, 12),
    data_parallel_size=st.integers(1, 3),
    pad_multiple=st.sampled_from([1, 2, 4]),
    share=st.booleans(),
)
def test_any_packing_keeps_every_sample_whole(shapes, common, data_parallel_size, pad_multiple, share):
    """Each sample is found on the path of its entries, with all that belongs to each."""
    samples = [sample(index, *shape) for index, shape in enumerate(shapes)]
    for one in samples:
        one.token_ids[:common] = range(min(common, one.num_tokens))
    ranks = plan_microbatches(
        samples,
        tokens_per_row=16,
        data_parallel_size=data_parallel_size,
        pad_multiple=pad_multiple,
        families=np.arange(len(samples)) // 3,
        share=share,
    )
    assert len({len(rows) for rows in ranks}) == 1
    seen = []
    for row in (row for rows in ranks for row in rows):
        assert row.num_tokens % pad_multiple == 0
        assert row.node_bounds.tolist()[-1] == row.num_tokens
        assert row.node_bounds.tolist() == sorted(row.node_bounds.tolist())
        if not share:
            assert row.node_parents.max() == -1
        before = row.asked[row.asked_index]
        for index in sorted({int(i) for i in row.trajectory_index} - {-1}):
            own, entries = samples[index], row.trajectory_index == index
            trained = own.loss_mask.nonzero()[0]
            assert row.target_ids[entries].tolist() == own.token_ids[trained].tolist()
            assert row.position_ids[before[entries]].tolist() == (trained - 1).tolist()
            assert path_ids(row, int(before[entries][-1])) == own.token_ids[: trained[-1]].tolist()
            assert row.loss_weights[entries].tolist() == own.loss_weights[trained].tolist()
            seen.append(index)
    assert sorted(seen) == list(range(len(samples)))


def path_ids(row, token: int) -> list[int]:
    """The ids on a token's path, from the row's nodes."""
    bounds, parents = row.node_bounds.tolist(), row.node_parents.tolist()
    node = next(k for k, end in enumerate(bounds[1:]) if token < end)
    ids = row.token_ids[bounds[node] : token + 1].tolist()
    while (node := parents[node]) >= 0:
        ids = row.token_ids[bounds[node] : bounds[node + 1]].tolist() + ids
    return ids
