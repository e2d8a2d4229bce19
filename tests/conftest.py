"""Environment of every test process: few threads, quiet libraries, no network look-ups of models."""

import os

# Before torch or vLLM is imported anywhere; subprocesses inherit it. Two-core machines run the whole suite.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

# A busy machine makes any example slow; what has to be fast is measured in CPU time by tests of its own.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")
