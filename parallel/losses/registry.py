"""The policy losses by the name used in `algorithm.loss.name`. A new one is one file and one line here."""

import difflib

from megatron_agent.errors import ConfigError
from parallel.losses.base import PolicyLoss
from parallel.losses.ppo_clip import ppo_clip

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
}


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss of that name. Raises ConfigError that names the nearest known one."""
    if name not in POLICY_LOSSES:
        nearest = difflib.get_close_matches(name, POLICY_LOSSES, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(sorted(POLICY_LOSSES))}"
        raise ConfigError(f"algorithm.loss.name: there is no policy loss {name!r}; {hint}")
    return POLICY_LOSSES[name]
