"""Qwen3 (dense): query and key heads are normed before the rotary positions."""

from parallel.families.dense import DenseFamily

QWEN3 = DenseFamily(model_type="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True)
