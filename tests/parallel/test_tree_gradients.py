"""A row laid out as a prefix tree has the loss and the gradients of its samples laid out apart."""

import model_folders
import pytest
import torch
from model_launch import launch

TREES = 50
LAYOUTS = {
    "one_rank": {},
    "recompute": {"recompute": "full"},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2_sp_pp2": {"tensor": 2, "pipeline": 2, "sequence": True},
}
RANKS = {"one_rank": 1, "recompute": 1, "tp2": 2, "pp2": 2, "tp2_sp_pp2": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    jobs: dict[int, list[dict]] = {1: [], 2: [], 4: []}
    for name in ("llama3_tied", "qwen3"):
        model_folders.build(folder / name, name)
    for layout, sizes in LAYOUTS.items():
        for name in ("llama3_tied", "qwen3"):
            job = {"kind": "trees", "name": f"{name}-{layout}", "model": str(folder / name), "parallel": sizes}
            jobs[RANKS[layout]].append(job | {"trees": TREES if layout == "one_rank" else 12})
    launch(jobs, folder)
    return folder


def test_the_trees_are_trees():
    """Some share nothing, most do, and tokens that several samples train are among what is shared."""
    shared, trained_twice = 0, 0
    for seed in range(TREES):
        samples = model_folders.tree_samples(seed)
        row = model_folders.pack_row(samples)
        shared += row.num_tokens < row.num_unshared
        read = torch.stack([row.asked_index, row.target_ids], dim=1)
        trained_twice += len(read.unique(dim=0)) < len(read)
    assert TREES > shared > TREES // 2
    assert trained_twice > TREES // 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama3_tied", "qwen3"])
def test_loss_and_gradients_are_those_of_the_samples_apart(runs, model, layout):
    found = torch.load(runs / f"{model}-{layout}.pt")
    apart, tree = found["losses"].unbind(dim=1)
    torch.testing.assert_close(tree, apart, rtol=1e-5, atol=1e-5)
    assert apart.abs().max() > 1
    assert found["errors"].max() <= 1e-5, f"tree {int(found['errors'].argmax())}"
