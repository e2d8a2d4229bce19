"""A fixed batch of samples, and several ways of packing it into rows, for the trainer's numerics tests."""

import dataclasses

import numpy as np
import torch

from trajectory import samples
from trajectory.packing import PackedMicrobatch, pack_row

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


def asked(sample: Sample) -> torch.Tensor:
    """bool [length]: the trained tokens, and the last one in any case, whose value a critic is asked for."""
    mask = sample.mask.clone()
    mask[-1] = True
    return mask


def row(members: list[Sample], kind: str, *, pad_multiple: int = 1, poison: bool = True) -> PackedMicrobatch:
    """Pack samples. What masked entries hold is NaN where it may be."""
    masked = float("nan") if poison else 0.0
    converted = [as_packed(index, sample, kind) for index, sample in enumerate(members)]
    packed = pack_row(converted, pad_multiple=pad_multiple)

    def floats(name: str) -> torch.Tensor:
        values = torch.cat([torch.zeros(0 if members else 1), *(getattr(s, name)[asked(s)] for s in members)])
        return torch.where(packed.loss_mask, values, masked)

    return dataclasses.replace(
        packed,
        advantages=floats("advantages"),
        rollout_logprobs=floats("old_logprobs"),
        old_logprobs=floats("old_logprobs"),
        reference_logprobs=floats("reference_logprobs"),
    )


def as_packed(index: int, sample: Sample, kind: str) -> samples.Sample:
    """The sample as trajectories' samples are."""
    mask = sample.mask.numpy()
    return samples.Sample(
        trajectory_index=index,
        first_trained=0,
        token_ids=sample.token_ids.numpy(),
        loss_mask=mask,
        value_mask=asked(sample).numpy(),
        step_index=np.where(mask, 0, -1).astype(np.int32),
        rollout_logprobs=sample.old_logprobs.numpy(),
        loss_weights=weights(sample, kind).numpy(),
    )


# Which samples share a row, by name of the packing; an empty row is padding only. Each has 4 or 8 or 2 or 1 rows.
PACKINGS: dict[str, list[list[int]]] = {
    "one_sample_a_row": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "four_rows": [[0, 1], [2], [3, 4, 6], [5, 7]],
    "four_rows_shuffled": [[7, 0, 6], [4, 2, 1, 3], [], [5]],
    "two_rows": [[0, 2, 4, 6], [7, 5, 3, 1]],
    "one_row": [[0, 1, 2, 3, 4, 5, 6, 7]],
}


def plan(packing: str, kind: str, *, data_size: int, pad_multiple: int = 4) -> list[list[PackedMicrobatch]]:
    """The batch as [data rank][microbatch], rows dealt out in turn."""
    everyone = make_samples()
    rows = [row([everyone[i] for i in members], kind, pad_multiple=pad_multiple) for members in PACKINGS[packing]]
    return [rows[rank::data_size] for rank in range(data_size)]
