"""Rows: every sample once, within the budget, as many rows on each data rank."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectory.row_plan import assign_rows


@given(
    lengths=st.lists(st.integers(1, 120), max_size=60),
    tokens_per_row=st.integers(10, 100),
    data_parallel_size=st.integers(1, 5),
)
def test_every_plan(lengths, tokens_per_row, data_parallel_size):
    rows = assign_rows(lengths, tokens_per_row=tokens_per_row, data_parallel_size=data_parallel_size)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert len(rows) % data_parallel_size == 0
    assert rows
    for row in rows:
        assert sum(lengths[index] for index in row) <= tokens_per_row or len(row) == 1


def test_a_sample_above_the_budget_has_a_row_to_itself():
    rows = assign_rows([5, 50, 4], tokens_per_row=10, data_parallel_size=1)
    assert sorted(map(sorted, rows)) == [[0, 2], [1]]


def test_no_samples_still_give_each_rank_a_row():
    assert assign_rows([], tokens_per_row=10, data_parallel_size=4) == [[], [], [], []]


def test_no_more_rows_than_the_tokens_need():
    assert len(assign_rows([5] * 8, tokens_per_row=10, data_parallel_size=1)) == 4
    assert len(assign_rows([5] * 8, tokens_per_row=10, data_parallel_size=3)) == 6


def test_rows_are_balanced():
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 400, size=500).tolist()
    rows = assign_rows(lengths, tokens_per_row=4096, data_parallel_size=2)
    totals = [sum(lengths[index] for index in row) for row in rows]
    assert max(totals) - min(totals) < 400
    assert len(rows) <= 1.05 * sum(lengths) / 4096 + 2


@pytest.mark.parametrize("low", [0.34, 0.51])
def test_awkward_lengths_do_not_take_long(low):
    """Samples of little more than a third or a half of a row leave much of every row empty."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(int(low * 4096), int((low + 0.05) * 4096), size=8192).tolist()
    started = time.process_time()
    rows = assign_rows(lengths, tokens_per_row=4096, data_parallel_size=8)
    assert time.process_time() - started < 2
    per_row = int(1 / low)
    assert len(rows) <= 1.03 * 8192 / per_row + 8
