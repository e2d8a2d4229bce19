"""Which family a model folder belongs to."""

from typing import Any

from megatron_agent.errors import ModelFolderError
from parallel.families.dense import DenseFamily
from parallel.families.llama import LLAMA
from parallel.families.qwen2 import QWEN2
from parallel.families.qwen3 import QWEN3

FAMILIES: dict[str, DenseFamily] = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3)}


def family_for(hf_config: Any) -> DenseFamily:
    """The family of a transformers config object.

    Raises ModelFolderError for a model type without a family, or an option that the family does not support.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ModelFolderError(
            f"config.json: model type {hf_config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    family.check(hf_config)
    return family
