"""The policy losses by the name used in `algorithm.loss.name`. A new one is one file and one line here."""

from megatron_agent.errors import ConfigError, did_you_mean
from parallel.losses.base import PolicyLoss
from parallel.losses.ppo_clip import ppo_clip

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
}


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss of that name. Raises ConfigError that names the nearest known one."""
    if name not in POLICY_LOSSES:
        hint = did_you_mean(name, POLICY_LOSSES)
        raise ConfigError(f"algorithm.loss.name: there is no policy loss {name!r}; {hint}")
    return POLICY_LOSSES[name]
