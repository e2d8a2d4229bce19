"""The critic's values, updates and checkpoints do not depend on packing or parallel sizes; and they are the right ones.

One group of one rank and one of four run all jobs; the tests look at what they left. The reference for the one-rank
runs is transformers' base model with a linear head, autograd and torch's AdamW, one sample at a time.
"""

import math

import critic_worker
import model_launch
import pytest
import torch
import trainer_rows
from transformers import AutoModel

from megatron_agent.model_folders.tiny_qwen3 import build
from parallel.losses.value import value_loss

PACKINGS = [name for name in trainer_rows.PACKINGS if name != "one_sample_a_row"]
DISTRIBUTED = {"distributed_optimizer": True}
ONE_RANK = {"full_recompute": {"recompute": "full"}, "distributed_optimizer": DISTRIBUTED}
FOUR_RANKS = {
    "tp2_dp2": {"tensor": 2},
    "pp2_dp2": {"pipeline": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_sp_dp2": {"tensor": 2, "sequence": True},
    "tp2_sp_pp2_recompute": {"tensor": 2, "pipeline": 2, "sequence": True, "recompute": "full"},
    "dp4": {},
    "dp4_distributed_optimizer": DISTRIBUTED,
    "tp2_sp_dp2_distributed_optimizer": {"tensor": 2, "sequence": True} | DISTRIBUTED,
}
CLIP = 0.4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    build(folder / "tied")
    build(folder / "untied", tied=False, seed=1)

    def job(name: str, **options) -> dict:
        return {"kind": "critic", "name": name, "model": str(folder / "tied"), "packing": "four_rows"} | options

    def stored(name: str) -> str:
        return str(folder / f"{name}_checkpoints")

    one_rank = [job("base", packing="one_sample_a_row"), job("clip", value_clip=CLIP)]
    one_rank += [job(packing, packing=packing) for packing in PACKINGS]
    one_rank += [job(name, parallel=parallel) for name, parallel in ONE_RANK.items()]
    one_rank += [job("untied", model=str(folder / "untied"), updates=1)]
    one_rank += [job("other_backbone", critic_path=str(folder / "untied"), model=str(folder / "tied"), updates=1)]
    for kind, options in (
        ("plain", {}), ("sharded", {"parallel": DISTRIBUTED}), ("bf16", {"dtype": "bf16"}),
        ("bf16_sharded", {"dtype": "bf16", "parallel": DISTRIBUTED}),
    ):  # fmt: skip
        one_rank += [job(kind, updates=4, save_after=2, save=stored(kind), **options)]
        one_rank += [job(f"{kind}_resumed", load=stored(kind), updates=2, **options)]
    one_rank += [job("full_disk", save=stored("full_disk"), save_after=1, updates=1, disk_fills_up=True)]
    one_rank += [job("no_critic_writer", save_without_critic=stored("no_critic"), updates=0)]
    one_rank += [job("no_critic", load=stored("no_critic"), updates=0)]

    shuffled = {"packing": "four_rows_shuffled"}  # on dp4, one rank has nothing but padding
    four_ranks = [job(name, parallel=sizes, **shuffled) for name, sizes in FOUR_RANKS.items()]
    four_ranks += [job("clip_tp2_sp_pp2", parallel=FOUR_RANKS["tp2_sp_pp2_recompute"], value_clip=CLIP, **shuffled)]
    four_ranks += [job("bf16_tp2_sp_dp2", dtype="bf16", parallel=FOUR_RANKS["tp2_sp_dp2"], **shuffled)]
    for kind, extra in (("plain", {}), ("sharded", DISTRIBUTED)):
        for sizes in ("tp2_pp2", "tp2_sp_dp2"):
            parallel = FOUR_RANKS[sizes] | extra
            four_ranks += [job(f"{kind}_to_{sizes}", load=stored(kind), parallel=parallel, updates=2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_launch, "WORKER", model_launch.WORKER.with_name("critic_worker.py"))
        model_launch.launch({1: one_rank, 4: four_ranks}, folder)
    return folder


def result(folder, name: str) -> dict:
    return torch.load(folder / f"{name}.pt")


def assert_same_updates(got: dict, want: dict, rel: float) -> None:
    """All metrics of each update and all weights after the last one."""
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=rel, abs=1e-7)
    assert got["weights"].keys() == want["weights"].keys()
    for key, weight in want["weights"].items():
        assert (got["weights"][key] - weight).norm() <= rel * weight.norm(), key


@pytest.mark.parametrize("name", [*PACKINGS, *ONE_RANK, *FOUR_RANKS])
def test_updates_depend_on_no_packing_and_no_parallel_size(runs, name):
    assert_same_updates(result(runs, name), result(runs, "base"), rel=1e-5)


def test_clipped_updates_depend_on_no_parallel_size(runs):
    assert_same_updates(result(runs, "clip_tp2_sp_pp2"), result(runs, "clip"), rel=1e-5)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_ranks_agree(runs, name):
    assert result(runs, name)["equal_metrics"]
    assert result(runs, name)["equal_values"]


class PlainCritic:
    """Transformers' base model with a linear head."""

    def __init__(self, folder, head: torch.Tensor):
        self.backbone = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.head = torch.nn.Linear(head.shape[1], 1, bias=False)
        self.head.weight.data.copy_(head)

    def values(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T]: at t the head of the hidden state at t - 1; 0 at the first token."""
        hidden = self.backbone(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
        return torch.cat([torch.zeros(1), self.head(hidden[:-1]).squeeze(1)])


def plain_updates(folder, *, value_clip: float | None, num_updates: int = 2) -> tuple[list[dict[str, float]], dict]:
    """Metrics of each update and the parameters after the last."""
    model = PlainCritic(folder, critic_worker.head_weight(64))
    named = dict(model.backbone.named_parameters()) | {"head": model.head.weight}
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
    metrics = []
    for update in range(num_updates):
        lr = 1e-3 * (0.1 + 0.9 * (1 - update / 9))  # linear to a tenth at the tenth update
        values, targets, clipped, loss_value = [], [], 0, 0.0
        adam.zero_grad()
        for sample, columns in zip(trainer_rows.make_samples(), critic_worker.value_columns(), strict=True):
            trained = columns.weights != 0
            value, target = model.values(sample.token_ids)[trained], columns.targets[trained]
            terms = (value - target) ** 2
            if value_clip is not None:
                old = columns.old_values[trained]
                bounded = torch.min(torch.max(value, old - value_clip), old + value_clip)
                clipped += int(((bounded - target) ** 2 > terms).sum())
                terms = torch.max(terms, (bounded - target) ** 2)
            loss = (columns.weights[trained] * 0.5 * terms).sum() / critic_worker.denominator()
            loss.backward()
            loss_value += loss.item()
            values.append(value.detach().double())
            targets.append(target.double())
        value, target = torch.cat(values), torch.cat(targets)
        gradients = [parameter.grad for parameter in named.values() if parameter.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.5 / (norm + 1e-6)))
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        metrics.append(
            {
                "value_loss": loss_value,
                "value_mean": value.mean().item(),
                "value_clip_frac": clipped / len(value),
                "value_explained_var": 1 - ((target - value).var() / target.var()).item(),
                "critic_grad_norm": norm,
                "critic_lr": lr,
            }
        )
    return metrics, {key: parameter.detach() for key, parameter in named.items()}


@pytest.mark.parametrize(("name", "value_clip"), [("base", None), ("clip", CLIP)])
def test_updates_equal_plain_transformers(runs, name, value_clip):
    metrics, weights = plain_updates(runs / "tied", value_clip=value_clip)
    outcome = result(runs, name)
    for got, want in zip(outcome["metrics"], metrics, strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert 0 < metrics[0]["value_clip_frac"] < 1 or value_clip is None
    for key, weight in outcome["weights"].items():
        want = weights[key.removeprefix("model.")]
        assert (weight - want).norm() <= 1e-5 * want.norm(), key


@pytest.mark.parametrize(
    ("name", "packing", "backbone"),
    [
        ("base", "one_sample_a_row", "tied"),
        ("four_rows", "four_rows", "tied"),
        ("one_row", "one_row", "tied"),
        ("tp2_pp2", "four_rows_shuffled", "tied"),
        ("untied", "four_rows", "untied"),
        ("other_backbone", "four_rows", "untied"),
    ],
)
def test_values_equal_plain_transformers(runs, name, packing, backbone):
    """The value of an entry at token t is the head's of the hidden state at t - 1 of the same sample."""
    model = PlainCritic(runs / backbone, critic_worker.head_weight(64))
    samples, columns = trainer_rows.make_samples(), critic_worker.value_columns()
    outcome = result(runs, name)
    assert all(not values.any() for values in outcome["values_at_start"])
    sizes = FOUR_RANKS.get(name, {})
    data_size = 4 // (sizes.get("tensor", 1) * sizes.get("pipeline", 1)) if sizes else 1
    members = trainer_rows.PACKINGS[packing][::data_size]
    for values, indices in zip(outcome["values"], members, strict=True):
        assert values.dtype == torch.float32
        assert (values != 0).all()
        start = 0
        for index in indices:
            with torch.no_grad():
                want = model.values(samples[index].token_ids)[columns[index].mask]
            torch.testing.assert_close(values[start : start + len(want)], want, rtol=1e-5, atol=1e-5)
            start += len(want)
        assert start == len(values) or not indices


@pytest.mark.parametrize("name", ["bf16", "bf16_sharded", "bf16_tp2_sp_dp2"])
def test_bf16(runs, name):
    """Near the fp32 run, and values have more digits than bf16."""
    outcome, base = result(runs, name), result(runs, "base")
    values = torch.cat(outcome["values"])
    assert not torch.equal(values, values.bfloat16().float())
    assert {weight.dtype for weight in outcome["weights"].values()} == {torch.bfloat16}
    for got, want in zip(outcome["metrics"][:2], base["metrics"], strict=True):
        assert got["value_loss"] == pytest.approx(want["value_loss"], rel=0.05)
        assert got["critic_grad_norm"] == pytest.approx(want["critic_grad_norm"], rel=0.05)


@pytest.mark.parametrize("kind", ["plain", "sharded", "bf16", "bf16_sharded"])
def test_resumed_equals_uninterrupted_bit_for_bit(runs, kind):
    uninterrupted, resumed = result(runs, kind), result(runs, f"{kind}_resumed")
    assert resumed["metrics"] == uninterrupted["metrics"][2:]
    assert all(weight.equal(resumed["weights"][key]) for key, weight in uninterrupted["weights"].items())
    assert resumed["extra"] == {"row": 16}


@pytest.mark.parametrize("sizes", ["tp2_pp2", "tp2_sp_dp2"])
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_loads_under_other_parallel_sizes(runs, kind, sizes):
    uninterrupted = result(runs, kind)
    assert_same_updates(
        result(runs, f"{kind}_to_{sizes}"), uninterrupted | {"metrics": uninterrupted["metrics"][2:]}, rel=1e-5
    )


def test_policy_of_a_checkpoint_with_a_critic_loads_without_one(runs):
    outcome = result(runs, "plain_resumed")
    assert outcome["without_critic"] == {"row": 16}
    assert outcome["policy_step"] == 2


def test_checkpoint_without_a_critic(runs):
    """A run with a critic is told so; a run without one reads it as ever."""
    outcome = result(runs, "no_critic")
    assert "holds no critic" in outcome["error"]
    assert outcome["without_critic"] == {"row": 16}


def test_disk_that_is_full_at_the_critic_leaves_the_previous_checkpoint(runs):
    """The policy's part of the new one is written by then, and goes too."""
    outcome = result(runs, "full_disk")
    assert "earlier checkpoints are untouched" in outcome["error"]
    assert outcome["left"] == ["step_00000002"]


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 3.0, 3.0, 0.0], requires_grad=True)
    targets = torch.tensor([2.0, 4.0, 0.0, 0.0])
    old_values = torch.tensor([1.25, 1.0, 1.0, 2.0])
    terms, stopped = value_loss(values, targets)
    assert terms.tolist() == [0.5, 0.5, 4.5, 0.0]
    assert not stopped.any()
    # Within the clip; clipped at 1.5, further away than 3; clipped at 1.5, nearer than 3; clipped at 1.5.
    terms, stopped = value_loss(values, targets, old_values=old_values, value_clip=0.5)
    assert terms.tolist() == [0.5, 0.5 * 2.5**2, 4.5, 0.5 * 1.5**2]
    assert stopped.tolist() == [False, True, False, True]
    terms.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [-1.0, 0.0, 3.0, 0.0]
