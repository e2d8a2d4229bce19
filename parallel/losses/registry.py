"""The policy losses by the name used in `algorithm.loss.name`. A new one is one file and one line here."""

import functools

from megatron_agent.config_algorithm import LossConfig
from megatron_agent.registry import resolve
from parallel.losses.base import PolicyLoss

POLICY_LOSSES: dict[str, str] = {
    "ppo_clip": "parallel.losses.ppo_clip:ppo_clip",
}
"""name -> the PolicyLoss."""


def policy_loss(config: LossConfig) -> PolicyLoss:
    """The loss of that name, a registered one or `package.module:function`, with the options that are set.

    Raises ConfigError that names the nearest known one.
    """
    function = resolve("policy loss", config.name, POLICY_LOSSES)
    return functools.partial(function, **config.options())
