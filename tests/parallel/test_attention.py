"""Packed attention and norm by themselves, against their definitions in fp64."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from parallel.attention import PackedAttention, PackedRow, _nodes, _rotate, packed_row
from parallel.flex_attention import BLOCK, flex_attention

HEADS, GROUPS, DIM = 6, 2, 8
INV_FREQ = 1.0 / 10000.0 ** (torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
LENGTHS = [
    [40],
    [8, 8, 8, 8],  # equal: one batch that is a view of the row
    [1, 2, 3, 4, 5, 6, 7, 8, 9],
    [3, 30, 3, 29, 1, 3, 28],  # batches whose members lie apart
    [5, 0, 7],  # an empty segment is allowed
    [64, 1, 1, 1, 1, 1, 1],
]


def attention() -> PackedAttention:
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, attention_dropout=0.0)
    return PackedAttention(config, 1, inv_freq=INV_FREQ)


def row_of(lengths: list[int]) -> PackedRow:
    """Segments that share nothing."""
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return packed_row(position_ids, bounds, torch.full((len(lengths),), -1))


def tree_row(lengths: list[int], parents: list[int]) -> PackedRow:
    """Nodes of these lengths, in preorder."""
    depth = [0] * len(lengths)
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + lengths[parent] if parent >= 0 else 0
    position_ids = torch.cat([start + torch.arange(n) for start, n in zip(depth, lengths, strict=True)])
    return packed_row(position_ids, torch.tensor([0, *lengths]).cumsum(0), torch.tensor(parents))


def visible(row: PackedRow) -> torch.Tensor:
    """bool [T, T]: which key each query attends to, node by node."""
    bounds, parents = row.node_bounds.tolist(), row.node_parents.tolist()
    sees = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    for node, parent in enumerate(parents):
        own = slice(bounds[node], bounds[node + 1])
        sees[own, own] = torch.ones(len(sees[own]), len(sees[own]), dtype=torch.bool).tril()
        while parent >= 0:
            sees[own, bounds[parent] : bounds[parent + 1]] = True
            parent = parents[parent]
    return sees


def by_definition(query, key, value, row: PackedRow) -> torch.Tensor:
    """softmax(q k / sqrt D) v over the path, each pair turned by position * frequency."""
    turn = torch.exp(1j * torch.outer(row.position_ids.double(), INV_FREQ.double()))[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    query, key = rotate(query), rotate(key).repeat_interleave(HEADS // GROUPS, 1)
    value = value.repeat_interleave(HEADS // GROUPS, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    weights = scores.masked_fill(~visible(row), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


ROWS = {f"segments-{index}": row_of(lengths) for index, lengths in enumerate(LENGTHS)} | {
    "prompt_and_answers": tree_row([20, 5, 6, 5, 30], [-1, 0, 0, 0, 0]),
    "branches_of_branches": tree_row([7, 3, 4, 9, 2, 8, 6, 5], [-1, 0, 1, 1, 0, -1, 5, -1]),
    "a_chain": tree_row([3, 4, 5, 6], [-1, 0, 1, 2]),
    "long_nodes": tree_row([50, 600, 140, 10], [-1, 0, 1, 0]),
}


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_equal_the_definition(name):
    row = ROWS[name]
    num_tokens = len(row.position_ids)
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    upstream = torch.randn((num_tokens, HEADS * DIM), generator=generator, dtype=torch.float64)
    exact = [x.clone().requires_grad_() for x in inputs]
    ours = [x.float().requires_grad_() for x in inputs]

    want = by_definition(*exact, row)
    want.backward(upstream)
    got = attention()(*ours, packed_seq_params=row)
    got.backward(upstream.float())

    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    for mine, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ROWS)
def test_flex_attention_equals_the_definition(name):
    """As it is compiled for CUDA, here without the compiler, which looks at the mask but not at its blocks."""
    row = ROWS[name]
    num_tokens = len(row.position_ids)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((num_tokens, heads, DIM), generator=generator) for heads in (HEADS, GROUPS, GROUPS)
    )
    cos, sin = row.rotary(INV_FREQ, query.dtype)
    got = flex_attention(_rotate(query, cos, sin), _rotate(key, cos, sin), value, row.block_mask, scale=None)
    want = by_definition(query.double(), key.double(), value.double(), row)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_the_mask_are_those_that_the_tree_needs(seed):
    """Every block with a visible pair and no other; whole exactly where all its pairs are visible."""
    generator = torch.Generator().manual_seed(seed)
    count = 12
    lengths = torch.randint(1, 200, (count,), generator=generator).tolist()
    parents = [-1]
    for _ in range(1, count):  # in preorder a node's parent is on the path of the node before it
        path = [len(parents) - 1]
        while path[-1] >= 0:
            path.append(parents[path[-1]])
        parents.append(path[int(torch.randint(0, len(path), (1,), generator=generator))])
    row = tree_row(lengths, parents)
    sees = visible(row)
    blocks = -(-len(sees) // BLOCK)
    padded = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    padded[: len(sees), : len(sees)] = sees
    tiles = padded.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2).flatten(2)
    mask = row.block_mask
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    needed = listed(mask.kv_num_blocks, mask.kv_indices) | whole
    assert torch.equal(needed, tiles.any(-1))
    assert torch.equal(whole[:-1], tiles.all(-1)[:-1])  # the last row of blocks holds padding, which needs nothing
    assert not (whole & ~tiles.any(-1)).any()


def listed(counts: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """bool [Q, K] of the blocks that a BlockMask lists."""
    chosen = torch.zeros(blocks.shape[2:], dtype=torch.bool)
    for query, count in enumerate(counts[0, 0].tolist()):
        chosen[query, blocks[0, 0, query, :count].long()] = True
    return chosen


@pytest.mark.parametrize("name", ROWS)
def test_batches_hold_each_token_once_and_little_padding(name):
    row = ROWS[name]
    batches, slot_of_token = row.plan
    num_tokens = len(row.position_ids)
    areas = sum(batch.num_nodes * batch.num_queries * batch.num_keys for batch in batches)
    real = sum(node.num_queries * node.num_keys for node in _nodes(row.node_bounds, row.node_parents))
    assert real <= areas <= 1.25 * real
    if slot_of_token is not None:
        assert len(set(slot_of_token.tolist())) == num_tokens


def test_long_nodes_behind_a_short_one_do_not_copy_their_keys_again_and_again():
    """Two samples of 4,000 tokens that share one: a slot for each token and its path, and no more."""
    batches, _ = tree_row([1, 4000, 4000], [-1, 0, 0]).plan
    assert sum(batch.num_nodes * batch.num_keys for batch in batches) <= 1 + 2 * 4001
    assert len(batches) == 2


def test_many_short_segments_need_few_calls():
    lengths = torch.randint(20, 200, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(row_of(lengths).plan[0]) <= 10


def test_many_answers_to_one_prompt_need_few_calls():
    lengths = torch.randint(20, 200, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(tree_row([100, *lengths], [-1] + [0] * 300).plan[0]) <= 16


def test_segments_do_not_see_each_other():
    lengths = [5, 7, 4]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((16, heads, DIM), generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    before = attention()(query, key, value, packed_seq_params=row_of(lengths))
    key[5:12], value[5:12] = torch.nan, torch.nan
    after = attention()(query, key, value, packed_seq_params=row_of(lengths))
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[12:], after[12:])


def test_siblings_do_not_see_each_other():
    row = tree_row([5, 7, 4], [-1, 0, 0])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((16, heads, DIM), generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    before = attention()(query, key, value, packed_seq_params=row)
    key[5:12], value[5:12] = torch.nan, torch.nan
    after = attention()(query, key, value, packed_seq_params=row)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[12:], after[12:])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rms_norm_equals_the_definition(dtype, tolerance):
    from parallel.norm import _RMSNormFunction

    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn((11, 1, 64), generator=generator)).to(dtype).requires_grad_()
    weight = (1 + 0.2 * torch.randn(64, generator=generator)).to(dtype).requires_grad_()
    upstream = torch.randn((11, 1, 64), generator=generator).to(dtype)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))

    want = exact_x / (exact_x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * exact_weight
    want.backward(upstream.double())
    got = _RMSNormFunction.apply(x, weight, 1e-3)
    got.backward(upstream)

    for mine, reference in ((got, want), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert mine.dtype == dtype
        assert (mine.double() - reference).norm() <= tolerance * reference.norm()
