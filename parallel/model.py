"""Megatron's GPTModel for a Hugging Face folder: configuration, layer spec, wrapping for training, forward pass.

With Transformer Engine on CUDA its layers and attention run; otherwise Megatron's local layers with our packed
attention and norm. Both take the same packed rows.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from transformers import AutoConfig

from megatron_agent.config import ExperimentConfig, ParallelConfig
from megatron_agent.errors import ConfigError, ModelFolderError
from parallel import process_groups
from parallel.asked_outputs import AskedOutputs
from parallel.attention import PackedAttention, packed_row
from parallel.families.dense import DenseFamily, padded_vocab_size, rotary_frequencies
from parallel.families.registry import family_for
from parallel.norm import RMSNorm
from parallel.value_head import ValueHead
from trajectory.packing import PackedMicrobatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_hf_config(folder: str | Path) -> Any:
    """The folder's transformers config object. Raises ModelFolderError where it has none or it is not supported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelFolderError(f"{folder}: no config.json; model.path must be a folder in Hugging Face format")
    try:
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError) as error:
        raise ModelFolderError(f"{path}: transformers cannot read it: {error}") from error
    family_for(hf_config)
    return hf_config


def build_model(
    hf_folder: str | Path, *, config: ExperimentConfig, for_training: bool, value_head: bool = False
) -> list[torch.nn.Module]:
    """This rank's part of the model, as a list of one chunk. Weights are not set: see hf_folder.load_hf_weights.

    With `value_head` it is a critic: a ValueHead, at 0, stands in the place of the output layer, and the embedding is
    tied to nothing.

    For training the chunk is wrapped in Megatron's DistributedDataParallel, which sums gradients over data ranks in
    fp32 without averaging. Otherwise its parameters need no gradient.
    """
    hf_config = read_hf_config(hf_folder)
    family = family_for(hf_config)
    _check_split(hf_config, config.parallel)
    use_te = _use_transformer_engine()
    transformer_config = _transformer_config(family, hf_config, config, use_te=use_te)
    inv_freq = rotary_frequencies(hf_config).to(process_groups.device())
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_block_spec(transformer_config, inv_freq, use_te=use_te),  # type: ignore[arg-type]
        vocab_size=padded_vocab_size(hf_config.vocab_size, config.parallel.tensor),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=process_groups.is_first_stage(),
        post_process=process_groups.is_last_stage(),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings and not value_head,
        position_embedding_type="none",  # PackedAttention turns queries and keys itself
    )
    if process_groups.is_last_stage():
        if value_head:
            model.output_layer = ValueHead(transformer_config)  # pyright: ignore[reportAttributeAccessIssue]
        model.asked_outputs = AskedOutputs(  # pyright: ignore[reportArgumentType]
            model.output_layer, sequence_parallel=transformer_config.sequence_parallel
        )
    model.to(process_groups.device())
    if not for_training:
        model.requires_grad_(False).eval()
        return [model]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=process_groups.device().type == "cuda",
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    return [DistributedDataParallel(config=transformer_config, ddp_config=ddp_config, module=model)]


def unwrap(chunk: torch.nn.Module) -> Any:
    """The GPTModel inside a chunk."""
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def forward_row(chunk: torch.nn.Module, microbatch: PackedMicrobatch) -> torch.Tensor:
    """Run one packed row through this stage.

    With sequence parallelism T is a multiple of the tensor-parallel size. Returns, on the last stage, the outputs of
    the R tokens that `microbatch.asked` names: the logits [R, V / tensor_size] in the model's type (V with padding), or
    a critic's values [R, 1] in fp32. Elsewhere the hidden states [T, 1, hidden_size] (T / tensor_size with sequence
    parallelism).
    """
    device = process_groups.device()
    position_ids = microbatch.position_ids.to(device)
    row = packed_row(position_ids, microbatch.node_bounds, microbatch.node_parents)
    if process_groups.is_last_stage():
        unwrap(chunk).asked_outputs.tokens = microbatch.asked.to(device)
    output = chunk(microbatch.token_ids.to(device)[None], position_ids[None], None, packed_seq_params=row)
    return output.squeeze(0) if process_groups.is_last_stage() else output


def _use_transformer_engine() -> bool:
    return process_groups.device().type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def _check_split(hf_config: Any, parallel: ParallelConfig) -> None:
    heads, groups, layers = (
        hf_config.num_attention_heads, hf_config.num_key_value_heads, hf_config.num_hidden_layers
    )  # fmt: skip
    if heads % parallel.tensor or max(groups, parallel.tensor) % min(groups, parallel.tensor):
        raise ConfigError(
            f"parallel.tensor {parallel.tensor} does not divide the model's {heads} attention heads and {groups} "
            "key-value heads; choose a size that does"
        )
    if layers % parallel.pipeline:
        raise ConfigError(
            f"parallel.pipeline {parallel.pipeline} does not divide the model's {layers} layers; "
            "choose a size that does"
        )


def _transformer_config(
    family: DenseFamily, hf_config: Any, config: ExperimentConfig, *, use_te: bool
) -> TransformerConfig:
    dtype = DTYPES[config.model.dtype]
    parallel = config.parallel
    on_cuda = process_groups.device().type == "cuda"
    return TransformerConfig(
        **family.transformer_options(hf_config),
        **_recompute_options(parallel),
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights come from a folder. Initialization still runs, with nothing to do: it is also what marks a weight as
        # split over tensor ranks, which the gradient norm reads to count each element once.
        init_method=_leave_uninitialized,
        output_layer_init_method=_leave_uninitialized,
        variable_seq_lengths=True,  # rows differ in length between microbatches
        moe_token_dispatcher_type="alltoall",  # the only one that allows it, also in a model without experts
        deallocate_pipeline_outputs=True,
        # The driver divides by one denominator for the whole batch, so neither the schedule nor
        # DistributedDataParallel may divide by microbatches or data ranks.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
    )


def _leave_uninitialized(_weight: torch.Tensor) -> None:
    pass


def _recompute_options(parallel: ParallelConfig) -> dict[str, Any]:
    if parallel.recompute == "none":
        return {}
    if parallel.recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _block_spec(config: TransformerConfig, inv_freq: torch.Tensor, *, use_te: bool) -> Any:
    attend = functools.partial(PackedAttention, inv_freq=inv_freq)
    if use_te:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        layer.submodules.self_attention.submodules.core_attention = functools.partial(  # type: ignore[union-attr]
            attend, varlen=TEDotProductAttention
        )
        return layer
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = attend
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config),
        layer_norm=RMSNorm,  # type: ignore[arg-type]
    )
