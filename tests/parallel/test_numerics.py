"""The Megatron model computes what transformers computes: logits and every gradient, under every parallel layout.

One packed row of six segments against transformers run on each segment alone. One group of one rank and one of four
run all jobs; the tests look at what they left.
"""

from pathlib import Path

import model_folders
import pytest
import torch
from model_launch import launch
from transformers import AutoModelForCausalLM

ONE_RANK = {
    "one_rank": {},
    "recompute_full": {"recompute": "full"},
    "recompute_selective": {"recompute": "selective"},
}
FOUR_RANKS = {
    "tp2_dp2": {"tensor": 2},
    "tp2_sp_dp2": {"tensor": 2, "sequence": True},
    "tp4_over_2_kv_heads": {"tensor": 4},
    "pp2_dp2": {"pipeline": 2},
    "pp4": {"pipeline": 4},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_pp2_sp_recompute": {"tensor": 2, "pipeline": 2, "sequence": True, "recompute": "full"},
    "tp2_sp_selective": {"tensor": 2, "sequence": True, "recompute": "selective"},
}
# Every layout for the three families; the other way of tying where it matters, which is under PP.
ALL_LAYOUTS = ("llama3_tied", "qwen2", "qwen3_tied")
GRADIENT_JOBS = {
    **{(name, layout): ONE_RANK[layout] for name in model_folders.MODELS for layout in ONE_RANK},
    **{(name, layout): FOUR_RANKS[layout] for name in ALL_LAYOUTS for layout in FOUR_RANKS},
    **{(name, "tp2_pp2"): FOUR_RANKS["tp2_pp2"] for name in model_folders.MODELS},
}
LOGIT_LAYOUTS = {"one_rank": {}, "tp2_pp2": {"tensor": 2, "pipeline": 2}, "tp2_sp_dp2": FOUR_RANKS["tp2_sp_dp2"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numerics")
    for name in model_folders.MODELS:
        model_folders.build(folder / name, name)
    jobs = [
        {"kind": "gradient", "name": f"gradient-{name}-{layout}", "model": str(folder / name), "parallel": sizes}
        for (name, layout), sizes in GRADIENT_JOBS.items()
    ]
    jobs += [
        {"kind": "logits", "name": f"logits-{name}-{layout}", "model": str(folder / name), "parallel": sizes}
        | {"training": False}
        for name in model_folders.MODELS
        for layout, sizes in LOGIT_LAYOUTS.items()
    ]
    on_one_rank = [job for job in jobs if job["name"].split("-")[2] in ONE_RANK]
    launch({1: on_one_rank, 4: [job for job in jobs if job not in on_one_rank]}, folder)
    return folder


def reference(folder: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [T, vocab], summed negative log-likelihood and its gradients by transformers, one segment at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    row = model_folders.row()
    logits = []
    loss = torch.zeros(())
    for segment in row.token_ids.tensor_split(row.node_bounds[1:-1].long()):
        logits.append(model(input_ids=segment[None], use_cache=False).logits[0])
        log_p = logits[-1][:-1].log_softmax(-1)
        loss = loss - log_p.gather(1, segment[1:, None]).sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.cat(logits).detach(), loss.detach(), gradients


@pytest.mark.parametrize("layout", LOGIT_LAYOUTS)
@pytest.mark.parametrize("name", model_folders.MODELS)
def test_logits_equal_transformers(runs, name, layout):
    logits = torch.load(runs / f"logits-{name}-{layout}.pt")
    want, _, _ = reference(runs / name)
    vocab_size = model_folders.SIZES["vocab_size"]
    largest = want.abs().max()
    assert largest > 1  # a model whose logits say something
    assert (logits[:, :vocab_size] - want).abs().max() <= 1e-5 * largest
    assert logits.shape[1] == 384  # 301 padded to a multiple of 128
    assert (logits[:, vocab_size:] == 0).all()


@pytest.mark.parametrize(("name", "layout"), GRADIENT_JOBS)
def test_loss_and_gradients_equal_transformers(runs, name, layout):
    got = torch.load(runs / f"gradient-{name}-{layout}.pt")
    _, loss, gradients = reference(runs / name)
    assert got["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert got["gradients"].keys() == gradients.keys()
    for key, want in gradients.items():
        assert want.norm() > 0, key
        assert (got["gradients"][key] - want).norm() <= 1e-5 * want.norm(), key
