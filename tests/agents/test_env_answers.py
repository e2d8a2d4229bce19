"""What an environment returns is checked where it comes in: a wrong number costs the episode, not the run."""

import numpy as np
import pytest

from megatron_agent.envs.base import EnvStep
from megatron_agent.flows.agent_env_loop import checked


@pytest.mark.parametrize("reward", [1, 0.5, -2.0, np.float32(0.5), np.int64(3), True])
def test_numbers_pass(reward) -> None:
    assert checked(EnvStep(reward=reward, reward_parts={"part": reward})).reward == reward


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (None, "returned NoneType, not an EnvStep"),
        (EnvStep(reward=float("nan")), "reward nan, which is not a finite number"),
        (EnvStep(reward="1.0"), "reward '1.0', which is not a finite number"),  # type: ignore[arg-type]
        (EnvStep(reward_parts={"x": float("inf")}), "'x'"),
    ],
)
def test_anything_else_is_refused(outcome, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked(outcome)
