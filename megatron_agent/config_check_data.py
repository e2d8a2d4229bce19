"""Checks of datasets: files exist, their first rows are well formed, row functions take their arguments."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_check_names import arguments_problem, name_problem
from megatron_agent.data import load_records, parse_row, require_privileged
from megatron_agent.errors import DataError

ROWS_READ = 20
"""Rows of each file that are looked at; the others are when the run reads them."""


def check_train_rows(config: ExperimentConfig) -> Iterator[str]:
    """data.train and its arguments."""
    critic = config.algorithm.critic
    yield from _check_source(
        "data.train",
        config.data.train,
        config.data.train_args,
        has_messages=False,
        privileged=critic.privileged if critic else None,
    )


def check_eval_rows(config: ExperimentConfig) -> Iterator[str]:
    """data.eval and its arguments."""
    if config.data.eval is not None:
        yield from _check_source("data.eval", config.data.eval, config.data.eval_args, has_messages=False)
    elif config.data.eval_args:
        yield "data.eval_args is given, but data.eval is not; name the rows or remove the arguments"


def check_sft_rows(config: ExperimentConfig) -> Iterator[str]:
    """sft.data and its arguments."""
    if config.sft is not None:
        yield from _check_source("sft.data", config.sft.data, config.sft.data_args, has_messages=True)


def _check_source(
    option: str, source: str, arguments: Mapping[str, Any], *, has_messages: bool, privileged: str | None = None
) -> Iterator[str]:
    if is_function(source):
        problem = name_problem(option, source, ())
        if problem:
            yield problem
        else:
            yield from arguments_problem(f"{option}_args", source, arguments, given_later=())
        return
    if arguments:
        yield f"{option}_args is given, but {option} {source} is a file, which takes none; remove it"
    try:
        records = list(islice(load_records(source, {}), ROWS_READ))
        if not records:
            yield f"{option}: {source} holds no rows"
        for index, (where, record) in enumerate(records):
            if not has_messages:
                row = parse_row(record, index=index, where=where)
                if privileged is not None:
                    require_privileged(row, privileged, where=where)
            elif not _has_messages(record):
                yield f"{option}: {where}: `messages` must be a list of chat messages"
                return
    except DataError as error:
        yield f"{option}: {error}"


def _has_messages(record: Any) -> bool:
    messages = record.get("messages") if isinstance(record, Mapping) else None
    return isinstance(messages, list) and len(messages) > 0


def is_function(source: str) -> bool:
    """Whether a data source is `package.module:function` and not a file."""
    return ":" in source and not source.endswith((".jsonl", ".json", ".parquet"))
