"""Rows: every sample once, within the budget, as many rows on each data rank, siblings together, ranks balanced."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectory.prefix_tree import tree_tokens
from trajectory.row_plan import plan_rows


def flat(plan):
    return [row for rank in plan.rows for row in rank]


def unlike(lengths):
    """Samples of these lengths that share nothing."""
    return [np.full(length, index) for index, length in enumerate(lengths)]


def groups(rng, *, num_groups, size, prompt, response):
    """Token ids and family of the episodes of groups with a prompt each."""
    token_ids, families = [], []
    for group in range(num_groups):
        start = rng.integers(0, 50_000, rng.integers(*prompt))
        for _ in range(size):
            token_ids.append(np.concatenate([start, rng.integers(0, 50_000, rng.integers(*response))]))
            families.append(group)
    return token_ids, families


@given(
    prompts=st.lists(st.integers(1, 40), max_size=12),
    size=st.integers(1, 5),
    tokens_per_row=st.integers(10, 100),
    data_parallel_size=st.integers(1, 5),
    pair_cost=st.sampled_from([0.0, 0.01]),
)
def test_every_plan(prompts, size, tokens_per_row, data_parallel_size, pair_cost):
    rng = np.random.default_rng(sum(prompts))
    token_ids = [np.concatenate([np.full(n, n), rng.integers(0, 9, 7)]) for n in prompts for _ in range(size)]
    families = np.repeat(np.arange(len(prompts)), size)
    plan = plan_rows(
        token_ids, families, tokens_per_row=tokens_per_row, data_parallel_size=data_parallel_size, pair_cost=pair_cost
    )
    assert sorted(index for row in flat(plan) for index in row) == list(range(len(token_ids)))
    assert len(plan.rows) == data_parallel_size
    assert len({len(rank) for rank in plan.rows}) == 1
    assert plan.rows[0]
    for rank, costs in zip(plan.rows, plan.costs, strict=True):
        for row, cost in zip(rank, costs, strict=True):
            by_family = [[token_ids[index] for index in row if families[index] == f] for f in set(families)]
            assert sum(tree_tokens(ids) for ids in by_family) <= tokens_per_row or len(row) == 1
            if pair_cost == 0.0:
                assert cost == sum(tree_tokens(ids) for ids in by_family)


def test_attention_costs_by_the_pair():
    """A prompt of 3 and two answers of 2: 7 tokens, which look at 1 + 2 + 3 and twice at 4 + 5 tokens."""
    token_ids = [np.array([1, 2, 3, 4, 5]), np.array([1, 2, 3, 6, 7])]
    plan = plan_rows(token_ids, [0, 0], tokens_per_row=10, data_parallel_size=1, pair_cost=0.5)
    assert plan.costs == [[7 + 0.5 * (6 + 9 + 9)]]
    apart = plan_rows(token_ids, None, tokens_per_row=10, data_parallel_size=1, pair_cost=0.5)
    assert apart.costs == [[2 * (5 + 0.5 * 15)]]


def test_a_sample_above_the_budget_has_a_row_to_itself():
    plan = plan_rows(unlike([5, 50, 4]), None, tokens_per_row=10, data_parallel_size=1)
    assert sorted(map(sorted, flat(plan))) == [[0, 2], [1]]


def test_no_samples_still_give_each_rank_a_row():
    assert plan_rows([], None, tokens_per_row=10, data_parallel_size=4).rows == [[[]]] * 4
    assert plan_rows([], [], tokens_per_row=10, data_parallel_size=4).balance == 0


def test_no_more_rows_than_the_tokens_need():
    for ranks, rows in ((1, 4), (3, 6)):
        assert len(flat(plan_rows(unlike([5] * 8), None, tokens_per_row=10, data_parallel_size=ranks))) == rows


def test_siblings_stay_together_and_a_large_family_is_cut_for_the_ranks():
    rng = np.random.default_rng(0)
    token_ids, families = groups(rng, num_groups=6, size=4, prompt=(100, 101), response=(20, 21))
    plan = plan_rows(token_ids, families, tokens_per_row=400, data_parallel_size=2)
    assert {len({families[index] for index in row}) for row in flat(plan)} <= {1, 2}
    assert sum(map(sum, plan.costs)) == 6 * 180, "nothing is computed twice"
    token_ids, families = groups(rng, num_groups=1, size=16, prompt=(10, 11), response=(100, 101))
    plan = plan_rows(token_ids, families, tokens_per_row=10_000, data_parallel_size=4)
    assert [len(row) for row in flat(plan)] == [4] * 4


@pytest.mark.parametrize(
    ("num_groups", "size", "prompt", "response", "ranks"),
    [(4, 64, 4000, 20, 8), (1, 64, 3000, 10, 2), (4, 16, 6000, 100, 8), (2, 8, 2000, 50, 4), (8, 16, 3000, 200, 8)],
)
def test_few_families_with_long_prompts_are_not_cut_to_pieces(num_groups, size, prompt, response, ranks):
    """The busiest rank has no more to do than with whole families, and less where they can be halved."""
    token_ids, families = groups(
        np.random.default_rng(0),
        num_groups=num_groups,
        size=size,
        prompt=(prompt, prompt + 1),
        response=(response, response + 1),
    )
    plan = plan_rows(token_ids, families, tokens_per_row=8192, data_parallel_size=ranks)
    whole, halved = prompt + size * response, prompt + size // 2 * response
    assert max(sum(costs) for costs in plan.costs) <= (1.05 * halved if num_groups < ranks else whole)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ranks_are_balanced_and_little_is_computed_twice(ranks):
    rng = np.random.default_rng(0)
    token_ids, families = groups(rng, num_groups=256, size=8, prompt=(200, 800), response=(100, 1500))
    plan = plan_rows(token_ids, families, tokens_per_row=16384, data_parallel_size=ranks, pair_cost=1e-4)
    assert plan.balance <= 1.05
    by_family = [[token_ids[8 * group + member] for member in range(8)] for group in range(256)]
    bound = sum(tree_tokens(members) for members in by_family)
    assert sum(tree_tokens([token_ids[index] for index in row]) for row in flat(plan)) <= 1.05 * bound


def test_four_thousand_trajectories_take_less_than_a_second():
    rng = np.random.default_rng(0)
    token_ids, families = groups(rng, num_groups=512, size=8, prompt=(200, 800), response=(800, 2400))
    started = time.process_time()
    plan_rows(token_ids, families, tokens_per_row=16384, data_parallel_size=8, pair_cost=1e-4)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("low", [0.34, 0.51])
def test_awkward_lengths_do_not_take_long(low):
    """Samples of little more than a third or a half of a row leave much of every row empty."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(int(low * 4096), int((low + 0.05) * 4096), size=8192).tolist()
    started = time.process_time()
    plan = plan_rows(unlike(lengths), None, tokens_per_row=4096, data_parallel_size=8)
    assert time.process_time() - started < 2
    per_row = int(1 / low)
    assert len(flat(plan)) <= 1.03 * 8192 / per_row + 8
