"""Qwen2 and Qwen2.5: query, key and value projections have a bias."""

from parallel.families.dense import DenseFamily

QWEN2 = DenseFamily(model_type="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True)
