"""Llama 2 and 3, SmolLM2 and other models saved as LlamaForCausalLM."""

from parallel.families.dense import DenseFamily

LLAMA = DenseFamily(model_type="llama", architecture="LlamaForCausalLM")
