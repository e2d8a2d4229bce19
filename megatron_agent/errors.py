"""Errors a user can cause and mend: each names what, where and the remedy. The CLI prints them without a traceback."""

import difflib
from collections.abc import Iterable, Sequence


class MegatronAgentError(Exception):
    """Base of all errors with a remedy; `exit_code` is what the command line returns."""

    exit_code = 2


class ConfigError(MegatronAgentError, ValueError):
    """A YAML file, override or combination of options that cannot run."""


class DataError(MegatronAgentError, ValueError):
    """A dataset file or row that cannot be used; names file and line."""


class ModelFolderError(MegatronAgentError, ValueError):
    """An HF folder that is missing something, or a model family that is not supported."""


class CheckpointError(MegatronAgentError, RuntimeError):
    """A checkpoint that cannot be written or read."""

    exit_code = 3


class FleetError(MegatronAgentError, RuntimeError):
    """The rollout fleet could not start, answer in time, or be restarted."""

    exit_code = 4


class WeightSyncError(MegatronAgentError, RuntimeError):
    """Weights did not arrive whole; names the tensor and both checksums."""

    exit_code = 5


def list_problems(problems: Sequence[str]) -> str:
    """One message for several mistakes, so that they can be mended in one go."""
    if len(problems) == 1:
        return problems[0]
    return "\n  - ".join([f"{len(problems)} problems:", *problems])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy for a wrong name: the nearest known one, whatever its case, or all of them when none is near."""
    names = sorted(known)
    by_lower = {known_name.lower(): known_name for known_name in names}
    nearest = difflib.get_close_matches(name, names, n=1)
    nearest = nearest or [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=1)]
    return f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names) or 'none'}"


class TrainingError(MegatronAgentError, RuntimeError):
    """An update that would have ruined the weights; they are still those of the update before."""

    exit_code = 6
