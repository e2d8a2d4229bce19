"""Learning rates by hand, and random number states that survive JSON."""

import json
import random

import numpy as np
import pytest
import torch

from megatron_agent.config import OptimizerConfig
from parallel.optimizer import LrScheduler, learning_rate
from parallel.random_state import random_state, set_random_state


def rates(total: int, **options) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0} | options)
    return [learning_rate(i, options=config, peak=config.lr, total_updates=total) for i in range(total)]


def test_constant_without_warmup():
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warmup_never_zero_and_peak_after_warmup_updates():
    assert rates(5, warmup_updates=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decay_ends_with_the_last_update():
    assert rates(5, schedule="linear", min_lr_frac=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay():
    assert rates(5, schedule="cosine", min_lr_frac=0.0) == pytest.approx([1.0, 0.85355339, 0.5, 0.14644661, 0.0])


def test_warmup_stable_decay():
    assert rates(10, schedule="wsd", min_lr_frac=0.0, decay_frac=0.4, warmup_updates=1) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    )
    assert rates(4, schedule="wsd", min_lr_frac=0.2, decay_frac=1.0) == pytest.approx([1.0, 11 / 15, 7 / 15, 0.2])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_no_update_before_the_last_has_rate_zero(schedule):
    for warmup in (0, 1, 4):
        values = rates(9, schedule=schedule, warmup_updates=warmup, min_lr_frac=0.0)
        assert min(values[:-1]) > 0
        assert values[warmup] == 1.0
        assert max(values) == 1.0


def test_rate_stays_at_the_end_beyond_the_plan():
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr_frac=0.1)
    assert learning_rate(50, options=config, peak=1.0, total_updates=5) == pytest.approx(0.1)


def test_scheduler_sets_groups_and_resumes():
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.AdamW([{"params": [p], "wd_mult": m} for p, m in zip(parameters, (1.0, 0.0), strict=True)])
    options = OptimizerConfig(lr=1.0, warmup_updates=3, weight_decay=0.1)
    scheduler = LrScheduler(optimizer, options, total_updates=10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    scheduler.step()
    resumed = LrScheduler(optimizer, options, total_updates=10)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.num_updates == 1
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_random_state_survives_json():
    state = json.loads(json.dumps(random_state()))
    first = random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()
    set_random_state(state)
    assert (random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()) == first
