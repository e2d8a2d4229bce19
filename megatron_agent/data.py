"""Dataset rows: JSONL or parquet in the layout of verl and Agent-R1 files, or a function that yields them."""

import inspect
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_agent.errors import DataError
from megatron_agent.registry import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt. `index` is its position in the file."""

    index: int
    prompt: list[dict[str, Any]]
    """Chat messages; may be empty where the environment shows everything."""
    agent_name: str | None = None
    """Flow that plays the row; None takes agent.flow."""
    ground_truth: Any = None
    reward_style: str | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)

    def privileged_text(self, name: str) -> str | None:
        """What algorithm.critic.privileged `name`s: the ground truth, or an entry of `extra_info`; as JSON where it is
        no text, and None where the row has none."""
        value = self.ground_truth if name == "ground_truth" else self.extra_info.get(name)
        if value is None or isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def require_privileged(row: Row, name: str, *, where: str) -> None:
    """Raise DataError naming `where` if the row has nothing of that name for the critic to see."""
    if row.privileged_text(name) is None:
        place = "reward_model.ground_truth" if name == "ground_truth" else f"extra_info.{name}"
        raise DataError(f"{where}: no {place}, which algorithm.critic.privileged {name} shows the critic; add it")


def parse_row(record: Mapping[str, Any], *, index: int, where: str) -> Row:
    """A record as a Row; raises DataError naming `where` and what is wrong."""
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a row must be an object with a `prompt`, not {record!r:.80}")
    reward_model = _object(record.get("reward_model"), where, "reward_model")
    return Row(
        index=index,
        prompt=_messages(record.get("prompt"), where),
        agent_name=record.get("agent_name"),
        ground_truth=reward_model.get("ground_truth"),
        reward_style=reward_model.get("style"),
        env_kwargs=_object(record.get("env_kwargs"), where, "env_kwargs"),
        data_source=record.get("data_source") or "",
        extra_info=_object(record.get("extra_info"), where, "extra_info"),
    )


def _messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Text is one user message. Lists may be numpy's arrays, which pandas makes of parquet's lists."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Iterable) and not isinstance(prompt, Mapping):
        messages: list[Any] = list(prompt)
        if all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
            return [dict(message) for message in messages]
    raise DataError(f"{where}: `prompt` must be a list of messages with role and content, not {prompt!r:.80}")


def _object(value: Any, where: str, name: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: `{name}` is not valid JSON: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: `{name}` must be an object, not {type(value).__name__}")
    return dict(value)


def load_records(source: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, record) pairs of a JSONL or parquet file, or of `package.module:function` called with `arguments`."""
    if not source.endswith((".jsonl", ".json", ".parquet")) and ":" in source:
        function = resolve("data function", source, {})
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise DataError(f"{source}: {error}; see its signature {inspect.signature(function)}") from error
        for index, record in enumerate(function(**arguments)):
            yield f"{source} row {index}", record
        return
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{path}: no such file; data.train and data.eval name a JSONL or parquet file")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise DataError(f"{path}: cannot be read as parquet: {error}") from error
        for index, record in enumerate(table.to_pylist()):
            yield f"{path} row {index}", _without_padding(record)
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"{path}:{number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}:{number}: not valid JSON: {error}") from error


def _without_padding(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without the nulls that parquet puts for the keys that only other rows' objects have."""
    padded = {"env_kwargs", "extra_info", "reward_model"}
    cleaned = {name: _drop_nulls(value) if name in padded else value for name, value in record.items()}
    if isinstance(messages := record.get("prompt"), list):
        cleaned["prompt"] = [
            {"content": None, **_drop_nulls(m)} if isinstance(m, Mapping) and "content" in m else m for m in messages
        ]
    return cleaned


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _drop_nulls(part) for name, part in value.items() if part is not None}
    return [_drop_nulls(part) for part in value] if isinstance(value, list) else value


def load_rows(source: str, arguments: Mapping[str, Any]) -> list[Row]:
    """All rows of a source; raises DataError where one is malformed or there are none."""
    rows = [
        parse_row(record, index=index, where=where)
        for index, (where, record) in enumerate(load_records(source, arguments))
    ]
    if not rows:
        raise DataError(f"{source}: no rows")
    return rows


class RowIterator:
    """Endless passes over the rows; each pass in an order of its own that depends on seed and pass alone."""

    def __init__(self, rows: Iterable[Row], *, seed: int, shuffle: bool) -> None:
        self._rows = list(rows)
        if not self._rows:
            raise DataError("no rows to iterate over")
        self._seed = seed
        self._shuffle = shuffle
        self._pass = 0
        self._position = 0

    def take(self, count: int) -> list[Row]:
        """The next `count` rows."""
        taken: list[Row] = []
        while len(taken) < count:
            order = self._order()
            chunk = order[self._position : self._position + count - len(taken)]
            taken += [self._rows[index] for index in chunk]
            self._position += len(chunk)
            if self._position >= len(order):
                self._pass, self._position = self._pass + 1, 0
        return taken

    def _order(self) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._pass}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, int]:
        """Where the iterator stands."""
        return {"pass": self._pass, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state`."""
        self._pass, self._position = state["pass"], state["position"]
