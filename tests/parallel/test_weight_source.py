"""The weight stream in vLLM's own terms; its values and its behaviour over ranks are in test_hf_folder.py."""

import torch

from parallel.weight_source import TensorMeta, as_vllm_source


class Stream:
    """Stands for a MegatronWeightSource, which needs process groups."""

    tensors = {  # noqa: RUF012
        "model.embed_tokens.weight": torch.ones(3, 2),
        "model.layers.0.mlp.up_proj.weight": torch.ones(2, 2),
        "model.layers.1.mlp.up_proj.weight": torch.ones(2, 2),
        "model.norm.weight": torch.ones(2),
    }

    def metadata(self):
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self):
        return iter(self.tensors.items())


def test_vllm_accepts_and_groups_it_by_layer():
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    source = as_vllm_source(Stream())
    assert isinstance(source, WeightSource)
    assert source.metadata()[0] == ParamMeta("model.embed_tokens.weight", torch.float32, (3, 2))
    groups = [names for names, _ in source.iter_groups()]
    assert groups == [[name] for name in Stream.tensors]
    assert list(dict(source)) == list(dict(source)) == list(Stream.tensors)  # each pass is a fresh one
