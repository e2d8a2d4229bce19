"""The critic's squared error, with PPO2's optional clip around the values before the update.

Per token, with value v, its target t, the old value v_old and c = value_clip:

    L = 1/2 (v - t)^2
    L = 1/2 max((v - t)^2, (v_old + clip(v - v_old, -c, c) - t)^2)      where value_clip is set

Source: the PPO2 of OpenAI Baselines (Dhariwal et al. 2017); examined in Engstrom et al. 2020, "Implementation Matters
in Deep Policy Gradients". The maximum is pessimistic: a value outside the clip that is further from the target than
the clipped one still gets its gradient, one that is nearer gets none.
"""

import torch


def value_loss(
    values: torch.Tensor,
    targets: torch.Tensor,
    *,
    old_values: torch.Tensor | None = None,
    value_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss terms with gradient, bool: a clip stopped the gradient), both [N].

    `values` carry the gradient; all are float32 [N] and finite. `old_values` is read where `value_clip` is set.
    """
    unclipped = (values - targets).square()
    if value_clip is None:
        return 0.5 * unclipped, torch.zeros_like(values, dtype=torch.bool)
    assert old_values is not None, "value_clip needs old_values"
    # Inside the clip the value itself: old + (value - old) differs from it by rounding, which would look like a clip.
    bound = old_values + (values - old_values).detach().clamp(-value_clip, value_clip)
    near_old = torch.where((values - old_values).abs() > value_clip, bound, values)
    clipped = (near_old - targets).square()
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped
