"""The policy losses by the name used in `algorithm.loss.name`. A new one is one file and one line here."""

import functools

from megatron_agent.config_algorithm import LossConfig
from megatron_agent.registry import resolve
from parallel.losses.base import PolicyLoss

POLICY_LOSSES: dict[str, str] = {
    "ppo_clip": "parallel.losses.ppo_clip:ppo_clip",
    "dapo": "parallel.losses.dapo:dapo",
    "dr_grpo": "parallel.losses.dr_grpo:dr_grpo",
    "gspo": "parallel.losses.gspo:gspo",
    "step_gspo": "parallel.losses.gspo:step_gspo",
    "cispo": "parallel.losses.cispo:cispo",
    "sapo": "parallel.losses.sapo:sapo",
    "reinforce": "parallel.losses.reinforce:reinforce",
}
"""name -> the PolicyLoss."""


def policy_loss(config: LossConfig) -> PolicyLoss:
    """The loss of that name, a registered one or `package.module:function`, with the options that are set.

    Raises ConfigError that names the nearest known one.
    """
    function = resolve("policy loss", config.name, POLICY_LOSSES)
    return functools.partial(function, **config.options())
