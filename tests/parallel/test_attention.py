"""Packed attention and norm by themselves, against their definitions in fp64."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from parallel.attention import PackedAttention, packed_row

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


def row_of(lengths: list[int]):
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    return packed_row(position_ids, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


def by_definition(query, key, value, lengths: list[int]) -> torch.Tensor:
    """softmax(q k / sqrt D) v over the earlier tokens of the own segment, each pair turned by position * frequency."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths]).double()
    turn = torch.exp(1j * torch.outer(position, INV_FREQ.double()))[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    query, key = rotate(query), rotate(key).repeat_interleave(HEADS // GROUPS, 1)
    value = value.repeat_interleave(HEADS // GROUPS, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    visible = (segment[:, None] == segment[None]) & torch.ones(len(segment), len(segment), dtype=torch.bool).tril()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_values_and_gradients_equal_the_definition(lengths):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    upstream = torch.randn((sum(lengths), HEADS * DIM), generator=generator, dtype=torch.float64)
    exact = [x.clone().requires_grad_() for x in inputs]
    ours = [x.float().requires_grad_() for x in inputs]

    want = by_definition(*exact, lengths)
    want.backward(upstream)
    got = attention()(*ours, packed_seq_params=row_of(lengths))
    got.backward(upstream.float())

    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    for mine, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_batches_hold_each_token_once_and_little_padding(lengths):
    batches, slot_of_token = row_of(lengths).plan
    slots = sum(batch.num_segments * batch.longest for batch in batches)
    assert sum(lengths) <= slots <= 1.25 * sum(lengths)
    assert sum(batch.num_segments for batch in batches) == sum(length > 0 for length in lengths)
    if slot_of_token is not None:
        assert len(set(slot_of_token.tolist())) == sum(lengths)


def test_many_short_segments_need_few_calls():
    lengths = torch.randint(20, 200, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(row_of(lengths).plan[0]) <= 10


def test_segments_do_not_see_each_other():
    lengths = [5, 7, 4]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((16, heads, DIM), generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    before = attention()(query, key, value, packed_seq_params=row_of(lengths))
    key[5:12], value[5:12] = torch.nan, torch.nan
    after = attention()(query, key, value, packed_seq_params=row_of(lengths))
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
