"""The trainer's weights as a stream of Hugging Face tensors: what export writes and weight sync sends.

One tensor at a time is whole, never the model: the ranks of the tensor group that owns it pass their shards to the
first of them, which passes the joined tensor to the first pipeline stage.

    stage 1:  tensor rank 1 --gather--> tensor rank 0 --send--+
    stage 0:  tensor rank 1 --gather--> tensor rank 0 <-------+   yields (name, tensor)
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel import process_groups
from parallel.families.layout import Weight, assemble
from parallel.stage_weights import all_weights, stage_parameters


class TensorMeta(NamedTuple):
    """What iteration will yield, in vLLM's terms (ParamMeta)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class MegatronWeightSource:
    """Iterates the model's weights under their Hugging Face names, in the folder's order; vLLM's WeightSource.

    All ranks must iterate at the same time and to the end. Tensors are contiguous, in the parameters' type, and may be
    views of the parameters: valid until the next optimizer step. `to_all_ranks` False: only world rank 0 gets the
    values, the others see an empty tensor beside each name, and data-parallel copies stay out of the traffic. True
    (CUDA IPC, where each rank feeds the engine on its own GPU): every rank gets every tensor.

    The class does not import vLLM, which costs seconds and 500 MB in each rank; `as_vllm_source` wraps it where one
    of vLLM's own trainer engines asks for its base class.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], hf_config: Any, *, to_all_ranks: bool = False) -> None:
        self._hf_config = hf_config
        self._parameters = stage_parameters(chunks, hf_config)
        self._dtype = next(iter(self._parameters.values())).dtype
        self._to_all_ranks = to_all_ranks

    def metadata(self) -> list[TensorMeta]:
        """Every tensor of the model, on every rank, without communication."""
        return [
            TensorMeta(source.name, self._dtype, source.shape)
            for _, weight in all_weights(self._hf_config)
            for source in weight.sources
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        nothing = torch.empty(0, dtype=self._dtype, device=process_groups.device())
        takes_part = self._to_all_ranks or process_groups.data_rank() == 0
        for stage, weight in all_weights(self._hf_config):
            tensors = self._collect(stage, weight) if takes_part else {}
            for source in weight.sources:
                yield source.name, tensors.get(source.name, nothing)

    def _collect(self, stage: int, weight: Weight) -> dict[str, torch.Tensor]:
        """The weight's tensors on the ranks that get them, nothing on the others."""
        is_owner = process_groups.pipeline_rank() == stage
        tensors: dict[str, torch.Tensor] = {}
        if is_owner:
            shards = self._gather_shards(weight)
            tensors = assemble(weight, shards) if shards else {}
        if self._to_all_ranks:
            return self._broadcast_from_stage(stage, weight, tensors)
        if stage == 0 or process_groups.tensor_rank() != 0:
            return tensors
        return self._send_to_first_stage(stage, weight, tensors)

    def _gather_shards(self, weight: Weight) -> list[torch.Tensor]:
        """All shards in tensor-rank order, on tensor rank 0 (or all); empty elsewhere. Collective in the stage."""
        shard = self._parameters[weight.megatron_name].data
        group = process_groups.tensor_group()
        if weight.dim is None or group.size() == 1:
            return [shard] if self._to_all_ranks or group.rank() == 0 else []
        shard = shard.contiguous()
        if self._to_all_ranks:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(shards, shard, group=group)
            return shards
        shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
        dist.gather(shard, shards, group=group, group_dst=0)
        return shards or []

    def _broadcast_from_stage(
        self, stage: int, weight: Weight, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        group = process_groups.pipeline_group()
        if group.size() == 1:
            return tensors
        for source in weight.sources:
            if process_groups.pipeline_rank() != stage:
                tensors[source.name] = self._empty(source.shape)
            dist.broadcast(tensors[source.name], group=group, group_src=stage)
        return tensors

    def _send_to_first_stage(
        self, stage: int, weight: Weight, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        group, rank = process_groups.pipeline_group(), process_groups.pipeline_rank()
        if rank == stage:
            for source in weight.sources:
                dist.send(tensors[source.name], group=group, group_dst=0)
            return {}
        if rank == 0:
            for source in weight.sources:
                tensors[source.name] = self._empty(source.shape)
                dist.recv(tensors[source.name], group=group, group_src=stage)
        return tensors

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=process_groups.device())


def as_vllm_source(source: MegatronWeightSource) -> Any:
    """`source` as an instance of vLLM's WeightSource, for vLLM's own `nccl` and `ipc` trainer engines."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class VllmSource(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(*meta) for meta in source.metadata()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(source)

    return VllmSource()
