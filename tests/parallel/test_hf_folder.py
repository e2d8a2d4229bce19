"""Loading and exporting Hugging Face folders, and the weight stream: bit exact in both directions."""

import json
import re
import shutil

import model_folders
import pytest
import torch
from model_launch import launch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_agent.errors import CheckpointError
from parallel.hf_export import check_export_target

LAYOUTS = {
    "one_rank": {},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp4": {"tensor": 4},
    "pp4": {"pipeline": 4},
    "dp4": {},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Model, type, layout. All models with both types on one rank; each way of splitting with both ways of tying.
EXPORTS = [(name, dtype, "one_rank") for name in model_folders.MODELS for dtype in DTYPES]
EXPORTS += [(name, "bf16", "tp2_pp2") for name in model_folders.MODELS]
EXPORTS += [(name, "fp32", layout) for name in ("qwen2", "qwen3_tied") for layout in ("tp4", "pp4", "dp4")]
SMALL_FILES = 60_000
BROKEN = {  # what is wrong with a folder (see break_folder) -> the error
    "missing": r"no tensor model\.layers\.3\.mlp\.up_proj\.weight \(one of 1 missing\)",
    "unplaced": r"model\.layers\.0\.self_attn\.o_proj\.bias \(one of 1 tensors\) has no place in a qwen3 model",
    "shape": r"model\.norm\.weight has shape \(47,\), but config\.json asks for \(48,\)",
    "no_weights": r"neither model\.safetensors nor model\.safetensors\.index\.json",
    "truncated": r"model\.safetensors: cannot be read",
    "no_config": r"no config\.json",
    "moe": r"model type 'qwen3_moe' is not supported; supported: llama, qwen2, qwen3",
}
SPLITS = {  # parallel sizes that do not fit the model -> the error
    "tensor_3": ({"tensor": 3}, r"parallel\.tensor 3 does not divide the model's 8 attention heads and 2 key-value"),
    "pipeline_3": ({"pipeline": 3}, r"parallel\.pipeline 3 does not divide the model's 4 layers"),
    "world_size": ({"tensor": 2}, r"3 ranks cannot be split into parallel\.tensor 2 x parallel\.pipeline 1 = 2"),
    "data": ({"data": 2}, r"3 ranks were started, but .* x parallel\.data 2 needs 2"),
}


def break_folder(folder, kind: str) -> None:
    weights_file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights_file)
    if kind == "missing":
        del tensors["model.layers.3.mlp.up_proj.weight"]
    elif kind == "unplaced":
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(48)
    elif kind == "shape":
        tensors["model.norm.weight"] = torch.zeros(47)
    elif kind == "moe":
        config_file.write_text(json.dumps({"model_type": "qwen3_moe"}))
    elif kind == "no_config":
        config_file.unlink()
    if kind == "no_weights":
        weights_file.unlink()
    elif kind == "truncated":
        weights_file.write_bytes(weights_file.read_bytes()[:1000])
    else:
        save_file(tensors, weights_file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf_folder")
    for name in model_folders.MODELS:
        for dtype, torch_dtype in DTYPES.items():
            model_folders.build(folder / f"{name}_{dtype}", name, dtype=torch_dtype)
            (folder / f"{name}_{dtype}" / "tokenizer.json").write_text("{}")
    model_folders.build(folder / "many_files", "qwen3", max_shard_size="50KB")
    model_folders.build(folder / "target", "llama")  # an earlier export, which a failing one leaves alone
    jobs: dict[int, list[dict]] = {1: [], 3: [], 4: []}
    for name, dtype, layout in EXPORTS:
        job = {"kind": "export", "name": f"out-{name}-{dtype}-{layout}", "dtype": dtype, "parallel": LAYOUTS[layout]}
        jobs[1 if layout == "one_rank" else 4].append(job | {"model": str(folder / f"{name}_{dtype}")})
    for world_size in (1, 4):
        sizes = LAYOUTS["one_rank" if world_size == 1 else "tp2_pp2"]
        job = {"kind": "export", "name": f"many_files_{world_size}", "model": str(folder / "many_files")}
        jobs[world_size].append(job | {"parallel": sizes, "max_file_bytes": SMALL_FILES})
    jobs[1].append({"kind": "export", "name": "again", "model": str(folder / "qwen3_fp32")})
    jobs[1].append({"kind": "export", "name": "cast", "model": str(folder / "qwen3_fp32"), "dtype": "bf16"})
    full = {"kind": "full_disk", "name": "full_disk", "model": str(folder / "qwen3_fp32")}
    jobs[4].append(full | {"parallel": LAYOUTS["tp2_pp2"], "target": str(folder / "target")})
    shutil.copytree(folder / "qwen2_fp32", folder / "again")
    (folder / "again" / ".exported").touch()  # an earlier export, which may be replaced
    for kind in BROKEN:
        shutil.copytree(folder / "qwen3_fp32", folder / kind)
        break_folder(folder / kind, kind)
        jobs[1].append({"kind": "refusal", "name": f"refusal_{kind}", "model": str(folder / kind)})
    for kind, (sizes, _) in SPLITS.items():
        job = {"kind": "refusal", "name": f"refusal_{kind}", "model": str(folder / "qwen3_fp32"), "parallel": sizes}
        jobs[3].append(job)
    launch(jobs, folder)
    return folder


def weights(folder) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_equal_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(("name", "dtype", "layout"), EXPORTS)
def test_load_then_export_is_bit_exact(runs, name, dtype, layout):
    source, out = runs / f"{name}_{dtype}", runs / f"out-{name}-{dtype}-{layout}"
    assert_equal_bits(weights(out), weights(source))
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert {file.name for file in out.iterdir()} == {file.name for file in source.iterdir()} | {".exported"}


@pytest.mark.parametrize(("name", "dtype", "layout"), EXPORTS)
def test_weight_stream_is_bit_exact(runs, name, dtype, layout):
    """`to_all_ranks`: every rank gets all tensors; without it only rank 0, and the others see the names."""
    want = weights(runs / f"{name}_{dtype}")
    num_ranks = 1 if layout == "one_rank" else 4
    for rank in range(num_ranks):
        seen = torch.load(runs / f"out-{name}-{dtype}-{layout}_rank{rank}.pt")
        assert_equal_bits(seen["tensors"], want)
        described = {name: (dtype, shape) for name, dtype, shape in seen["metadata"]}
        assert described == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in want.items()}
        names = [name for name, *_ in seen["metadata"]]
        assert list(seen["tensors"]) == list(seen["numel"]) == names
        if rank == 0:
            assert seen["numel"] == {name: tensor.numel() for name, tensor in want.items()}


@pytest.mark.parametrize("world_size", [1, 4])
def test_many_files_both_ways(runs, world_size):
    source, out = runs / "many_files", runs / f"many_files_{world_size}"
    assert len(list(source.glob("*.safetensors"))) > 2
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert_equal_bits(weights(out), weights(source))
    loaded = AutoModelForCausalLM.from_pretrained(out)  # reads the index
    assert_equal_bits(dict(loaded.state_dict()), dict(AutoModelForCausalLM.from_pretrained(source).state_dict()))


def test_export_replaces_an_earlier_one(runs):
    assert_equal_bits(weights(runs / "again"), weights(runs / "qwen3_fp32"))


def test_fp32_folder_trained_in_bf16_says_so(runs):
    want = {name: tensor.bfloat16() for name, tensor in weights(runs / "qwen3_fp32").items()}
    assert_equal_bits(weights(runs / "cast"), want)
    assert json.loads((runs / "cast" / "config.json").read_text())["dtype"] == "bfloat16"


def test_full_disk_is_an_error_on_every_rank_and_leaves_the_earlier_export(runs):
    errors = torch.load(runs / "full_disk.pt")
    assert len(errors) == 4
    for error in errors:
        assert f"{runs / 'target'}: the model cannot be written" in error
    model_folders.build(runs / "fresh", "llama")
    assert_equal_bits(weights(runs / "target"), weights(runs / "fresh"))
    assert not [path.name for path in runs.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_folder_is_refused_by_name(runs, kind):
    message = (runs / f"refusal_{kind}.txt").read_text()
    assert message.startswith(f"ModelFolderError: {runs / kind}") or kind == "moe"
    assert re.search(BROKEN[kind], message), message


@pytest.mark.parametrize("kind", SPLITS)
def test_impossible_split_names_both_numbers(runs, kind):
    message = (runs / f"refusal_{kind}.txt").read_text()
    assert re.search(SPLITS[kind][1], message), message


def test_an_export_replaces_nothing_but_an_export(tmp_path):
    check_export_target(tmp_path / "new")
    check_export_target(tmp_path)  # empty
    (tmp_path / "thesis.tex").touch()
    for target in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(CheckpointError, match="no earlier export"):
            check_export_target(target)
