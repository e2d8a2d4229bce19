"""A fixed batch of samples, and several ways of packing it into rows, for the trainer's numerics tests."""

import dataclasses

import torch

from trajectory.packing import PackedMicrobatch

VOCAB_LIMIT = 250
LENGTHS = (17, 5, 30, 12, 9, 24, 8, 15)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One trajectory's tokens; every tensor [length]."""

    token_ids: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor


def make_samples(seed: int = 0) -> list[Sample]:
    """Eight samples whose old log-probs are near those of a random model, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in LENGTHS:
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0] = False
        samples.append(
            Sample(
                token_ids=torch.randint(0, VOCAB_LIMIT, (length,), generator=generator),
                mask=mask,
                advantages=torch.randn(length, generator=generator),
                old_logprobs=-5.8 + 0.3 * torch.randn(length, generator=generator),
                reference_logprobs=-5.8 + 0.3 * torch.randn(length, generator=generator),
            )
        )
    return samples


def denominator(samples: list[Sample], kind: str) -> float:
    return float(sum(int(s.mask.sum()) for s in samples)) if kind == "token" else float(len(samples))


def weights(sample: Sample, kind: str) -> torch.Tensor:
    """Each trained token's weight: 1, or one vote per trajectory."""
    value = 1.0 if kind == "token" else 1.0 / int(sample.mask.sum())
    return torch.where(sample.mask, value, 0.0)


def row(samples: list[Sample], kind: str, *, length: int = 0, poison: bool = True) -> PackedMicrobatch:
    """Pack samples one after the other, padded at the end to `length`. Masked positions hold NaN where they may."""
    masked = float("nan") if poison else 0.0
    lengths = [len(s.token_ids) for s in samples]
    padding = max(0, length - sum(lengths))
    segments = lengths + ([padding] if padding else [])

    def column(values: list[torch.Tensor], fill) -> torch.Tensor:
        return torch.cat([*values, torch.full((padding,), fill, dtype=values[0].dtype if values else None)])

    mask = column([s.mask for s in samples], False) if samples else torch.zeros(padding, dtype=torch.bool)

    def floats(name: str, fill: float) -> torch.Tensor:
        values = column([getattr(s, name) for s in samples], fill) if samples else torch.zeros(padding)
        return torch.where(mask, values, fill)

    return PackedMicrobatch(
        token_ids=column([s.token_ids for s in samples], 0) if samples else torch.zeros(padding, dtype=torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in segments]),
        cu_seqlens=torch.tensor([0, *segments]).cumsum(0).to(torch.int32),
        loss_mask=mask,
        step_index=torch.where(mask, 0, -1).to(torch.int32),
        trajectory_index=torch.cat(
            [torch.full((n,), -1 if padding and i == len(lengths) else i) for i, n in enumerate(segments)]
        ).to(torch.int32),
        advantages=floats("advantages", masked),
        loss_weights=column([weights(s, kind) for s in samples], 0.0) if samples else torch.zeros(padding),
        rollout_logprobs=floats("old_logprobs", masked),
        old_logprobs=floats("old_logprobs", masked),
        reference_logprobs=floats("reference_logprobs", masked),
        num_padding=padding,
    )


# Which samples share a row, by name of the packing; an empty row is padding only. Each has 4 or 8 or 2 or 1 rows.
PACKINGS: dict[str, list[list[int]]] = {
    "one_sample_a_row": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "four_rows": [[0, 1], [2], [3, 4, 6], [5, 7]],
    "four_rows_shuffled": [[7, 0, 6], [4, 2, 1, 3], [], [5]],
    "two_rows": [[0, 2, 4, 6], [7, 5, 3, 1]],
    "one_row": [[0, 1, 2, 3, 4, 5, 6, 7]],
}


def plan(packing: str, kind: str, *, data_size: int, length_multiple: int = 4) -> list[list[PackedMicrobatch]]:
    """The batch as [data rank][microbatch], rows dealt out in turn."""
    samples = make_samples()
    rows = []
    for members in PACKINGS[packing]:
        chosen = [samples[i] for i in members]
        total = sum(len(s.token_ids) for s in chosen)
        rows.append(row(chosen, kind, length=max(8, -(-total // length_multiple) * length_multiple)))
    return [rows[rank::data_size] for rank in range(data_size)]
