"""Hands each data-parallel rank its own microbatches, and small objects to all ranks.

    rank 0 --(gloo, its shard only)--> first rank of each model copy --(broadcast)--> the copy's other ranks

Rank 0 never sends the whole batch to anybody. Every transfer ends with the groups' time-out.
"""

from dataclasses import fields, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from parallel import process_groups
from trajectory.packing import PackedMicrobatch

T = TypeVar("T")


def broadcast_object(obj: T | None) -> T:
    """Rank 0's picklable object, on every rank; what the other ranks pass is ignored. Collective."""
    holder = [obj]
    dist.broadcast_object_list(holder, src=0, group=process_groups.cpu_group())
    return holder[0]  # pyright: ignore[reportReturnType]


def scatter_microbatches(per_data_rank: list[list[PackedMicrobatch]] | None) -> list[PackedMicrobatch]:
    """This rank's microbatches. Collective; only rank 0 passes the plan, one list per data-parallel rank.

    Raises ValueError on rank 0 where the plan does not fit: one list per data-parallel rank, all of one
    length, so that every rank runs the same collectives.
    """
    if per_data_rank is not None:
        _check_plan(per_data_rank, num_data_ranks=process_groups.data_size())
        per_data_rank = [[_compact(microbatch) for microbatch in shard] for shard in per_data_rank]
    return scatter_shards(per_data_rank)


def scatter_shards(per_data_rank: list[T] | None) -> T:
    """This data rank's entry of what rank 0 passes, on every rank of its model copy. Collective."""
    leaders = _leaders()
    mine: list[T | None] = [None]
    if dist.get_rank() == 0:
        assert per_data_rank is not None, "rank 0 has to pass what is handed out"
        for leader, shard in zip(leaders, per_data_rank, strict=True):
            if leader == 0:
                mine = [shard]
            else:
                dist.send_object_list([shard], dst=leader, group=process_groups.cpu_group())
    elif dist.get_rank() in leaders:
        dist.recv_object_list(mine, src=0, group=process_groups.cpu_group())
    group = process_groups.model_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(
            mine, src=leaders[process_groups.data_rank()], group=group, device=process_groups.device()
        )
    return mine[0]  # pyright: ignore[reportReturnType]


def gather_shards(shard: T) -> list[T] | None:
    """What each data rank passes, in order, on rank 0; None elsewhere. The ranks of a model copy hold equal ones.

    Collective.
    """
    leaders = _leaders()
    if dist.get_rank() != 0:
        if dist.get_rank() in leaders:
            dist.send_object_list([shard], dst=0, group=process_groups.cpu_group())
        return None
    gathered = []
    for leader in leaders:
        received: list[T] = [shard]
        if leader != 0:
            dist.recv_object_list(received, src=leader, group=process_groups.cpu_group())
        gathered.append(received[0])
    return gathered


def _leaders() -> list[int]:
    """For each data-parallel rank the first global rank of its model copy."""
    leader = dist.get_process_group_ranks(process_groups.model_parallel_group())[0]
    own = torch.tensor([process_groups.data_rank(), leader])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own, group=process_groups.cpu_group())
    by_data_rank = {int(data_rank): int(first) for data_rank, first in everyone}
    return [by_data_rank[rank] for rank in range(len(by_data_rank))]


def _check_plan(per_data_rank: list[list[PackedMicrobatch]], *, num_data_ranks: int) -> None:
    lengths = [len(shard) for shard in per_data_rank]
    if len(lengths) != num_data_ranks or len(set(lengths)) != 1 or lengths[0] == 0:
        raise ValueError(
            f"the plan has {lengths} microbatches per data-parallel rank; it needs {num_data_ranks} lists of one "
            "and the same length above 0"
        )


def _compact(microbatch: PackedMicrobatch) -> PackedMicrobatch:
    """The same values in storages of their own: pickling a slice would send the whole tensor it was cut from."""
    tensors = {field.name: getattr(microbatch, field.name) for field in fields(microbatch)}
    sliced = {
        name: value.clone()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes
    }
    return replace(microbatch, trained_index=None, **sliced)
