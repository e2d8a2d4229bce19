"""The model types that `parallel/families` implements, for checks that must not load torch. A test keeps both equal."""

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
