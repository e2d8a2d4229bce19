"""Packed rows: each value at its token, segments apart, padding never trained."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import make_step, make_trajectory

from trajectory.advantages.inputs import Credit
from trajectory.packing import RowCredit, plan_microbatches
from trajectory.samples import merge_steps, with_prefix


def sample(index: int, prompt: int, response: int):
    ids = range(100 * index, 100 * index + prompt + response)
    step = make_step(ids[:prompt], ids[prompt:], logprob=-float(index + 1))
    return merge_steps(make_trajectory(step), trajectory_index=index, step_weights=np.array([0.5]))[0]


def test_one_row_of_two_samples_and_padding():
    ((row,),) = plan_microbatches(
        [sample(0, 2, 1), sample(1, 1, 3)], tokens_per_row=10, data_parallel_size=1, pad_multiple=4
    )
    assert row.token_ids.tolist() == [100, 101, 102, 103, 0, 1, 2, 0]
    assert row.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert row.loss_mask.tolist() == [False, True, True, True, False, False, True, False]
    assert row.step_index.tolist() == [-1, 0, 0, 0, -1, -1, 0, -1]
    assert row.trajectory_index.tolist() == [1, 1, 1, 1, 0, 0, 0, -1]
    assert row.advantages.tolist() == [0] * 8
    assert row.value_mask is not None
    assert row.value_mask.tolist() == row.loss_mask.tolist()
    assert row.trained_index is not None
    assert row.trained_index.tolist() == [0, 1, 2, 0]
    assert row.loss_weights.tolist() == [0, 0.5, 0.5, 0.5, 0, 0, 0.5, 0]
    assert row.rollout_logprobs.tolist() == [0, -2, -2, -2, 0, 0, -1, 0]
    assert (row.num_tokens, row.num_padding) == (8, 1)
    credit = Credit(advantages=np.array([0.5, 1.0, 1.5, 2.0]))
    credited = RowCredit.on_row(row, credit, np.array([1, 2, 3, 0])).put_on(row)
    assert credited.advantages.tolist() == [0, 1, 1.5, 2, 0, 0, 0.5, 0]
    assert row.old_logprobs is None
    assert row.reference_logprobs is None


def test_a_prefix_stays_in_the_segment_of_its_sample():
    samples = [with_prefix(sample(0, 2, 1), np.array([900])), with_prefix(sample(1, 1, 3), np.array([901, 902]))]
    ((row,),) = plan_microbatches(samples, tokens_per_row=10, data_parallel_size=1, pad_multiple=4)
    assert row.token_ids.tolist() == [901, 902, 100, 101, 102, 103, 900, 0, 1, 2, 0, 0]
    assert row.cu_seqlens.tolist() == [0, 6, 10, 12]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1]
    trained = [False, False, False, True, True, True, False, False, False, True, False, False]
    assert row.value_mask is not None
    assert row.loss_mask.tolist() == row.value_mask.tolist() == trained
    assert row.trajectory_index.tolist() == [1] * 6 + [0] * 4 + [-1] * 2
    assert row.trained_index is not None
    assert row.trained_index.tolist() == [0, 1, 2, 0]


def test_types_are_those_that_the_record_promises():
    ((row,),) = plan_microbatches([sample(0, 2, 2)], tokens_per_row=10, data_parallel_size=1)
    assert (row.token_ids.dtype, row.position_ids.dtype) == (torch.int64, torch.int64)
    assert row.cu_seqlens.dtype == row.step_index.dtype == row.trajectory_index.dtype == torch.int32
    assert row.loss_mask.dtype == torch.bool
    assert row.advantages.dtype == row.loss_weights.dtype == row.rollout_logprobs.dtype == torch.float32
    assert row.num_padding == 0


@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_a_rank_without_samples_gets_a_row_of_padding(pad_multiple):
    ranks = plan_microbatches([sample(0, 2, 2)], tokens_per_row=10, data_parallel_size=3, pad_multiple=pad_multiple)
    assert [len(rows) for rows in ranks] == [1, 1, 1]
    for (row,) in ranks[1:]:
        assert row.num_tokens == row.num_padding == pad_multiple
        assert not row.loss_mask.any()
        assert row.cu_seqlens.tolist() == [0, pad_multiple]


@settings(max_examples=50)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=20),
    data_parallel_size=st.integers(1, 3),
    pad_multiple=st.sampled_from([1, 2, 4]),
)
def test_any_packing_keeps_every_segment_whole(shapes, data_parallel_size, pad_multiple):
    samples = [sample(index, *shape) for index, shape in enumerate(shapes)]
    ranks = plan_microbatches(
        samples, tokens_per_row=16, data_parallel_size=data_parallel_size, pad_multiple=pad_multiple
    )
    assert len({len(rows) for rows in ranks}) == 1
    seen = []
    for row in (row for rows in ranks for row in rows):
        assert row.num_tokens % pad_multiple == 0
        bounds = row.cu_seqlens.tolist()
        assert bounds[-1] == row.num_tokens
        for start, end in pairwise(bounds):
            index = int(row.trajectory_index[start])
            assert not row.loss_mask[start]
            assert row.position_ids[start:end].tolist() == list(range(end - start))
            if index >= 0:
                seen.append(index)
                assert row.token_ids[start:end].tolist() == samples[index].token_ids.tolist()
                assert row.loss_mask[start:end].tolist() == samples[index].loss_mask.tolist()
                assert row.loss_weights[start:end].tolist() == samples[index].loss_weights.tolist()
    assert sorted(seen) == list(range(len(samples)))
