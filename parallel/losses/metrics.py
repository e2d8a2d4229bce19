"""From the sums over a whole batch to its metrics: the one place that knows what each sum is divided by."""

LIKE_THE_LOSS = ("loss", "policy_loss")
"""Weighted like the loss; over the batch's denominator."""
PER_SEQUENCE = ("rollout_kl_sequence_k1", "rollout_kl_sequence_k3")
"""Over the sequences with a trained token."""


def batch_metrics(sums: dict[str, float], denominator: float) -> dict[str, float]:
    """The metrics of the batch whose microbatches' sums, added up, are `sums`; everything not said otherwise is a mean
    over trained tokens.

    `correction_ess` is the effective sample size of the correction's weights as a share of the trained tokens,
    (sum w)^2 / (n sum w^2): 1 where all are equal, 0 where none is left.
    """
    sums = dict(sums)
    num_tokens = sums.pop("num_tokens")
    num_sequences = sums.pop("num_sequences", 0.0)
    square = sums.pop("correction_weight_square", None)
    metrics = {}
    if square is not None:
        metrics["correction_ess"] = sums["correction_weight_mean"] ** 2 / (num_tokens * square) if square else 0.0
    for name, value in sums.items():
        if name in LIKE_THE_LOSS:
            metrics[name] = value / denominator
        else:
            metrics[name] = value / max(1.0, num_sequences if name in PER_SEQUENCE else num_tokens)
    return metrics | {"num_tokens": num_tokens}
