"""Rows from JSONL, parquet and functions; the iterator that a resumed run picks up."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_agent.data import RowIterator, load_rows, parse_row
from megatron_agent.errors import ConfigError, DataError

VERL = {
    "data_source": "openai/gsm8k",
    "agent_name": "tool_agent",
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "6 * 7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "env_kwargs": '{"level": 3, "seed": null}',
    "extra_info": {"split": "train", "index": 0, "need_tools_kwargs": True},
}


def write_jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_a_verl_row_loads_unchanged(tmp_path):
    (row,) = load_rows(write_jsonl(tmp_path / "rows.jsonl", VERL), {})
    assert row.prompt == VERL["prompt"]
    assert (row.agent_name, row.data_source) == ("tool_agent", "openai/gsm8k")
    assert (row.reward_style, row.ground_truth) == ("rule", "42")
    assert row.env_kwargs == {"level": 3, "seed": None}
    assert row.extra_info == VERL["extra_info"]


def test_jsonl_and_parquet_give_the_same_rows(tmp_path):
    other = {**VERL, "reward_model": {"style": "rule", "ground_truth": "43"}}
    pq.write_table(pa.Table.from_pylist([VERL, other]), tmp_path / "rows.parquet")
    jsonl = write_jsonl(tmp_path / "rows.jsonl", VERL, other)
    assert load_rows(str(tmp_path / "rows.parquet"), {}) == load_rows(jsonl, {})


def test_parquet_pads_objects_with_nulls_that_are_not_arguments(tmp_path):
    """A column of objects has the keys of all rows; a key that a row does not have must not override a default."""
    records = [
        {"prompt": [{"role": "user", "content": "a", "name": "x"}], "env_kwargs": {"start": "a1"}},
        {"prompt": [{"role": "user", "content": "b"}], "env_kwargs": {"size": 4, "map": {"b": 1}}},
        {"prompt": [{"role": "assistant", "content": None}], "env_kwargs": {"map": {"c": 2}}},
    ]
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    maps = pa.struct([("b", pa.int64()), ("c", pa.int64())])
    arguments = pa.struct([("start", pa.string()), ("size", pa.int64()), ("map", maps)])
    schema = pa.schema([("prompt", pa.list_(message)), ("env_kwargs", arguments)])
    pq.write_table(pa.Table.from_pylist(records, schema=schema), tmp_path / "rows.parquet")
    rows = load_rows(str(tmp_path / "rows.parquet"), {})
    assert [row.prompt for row in rows] == [record["prompt"] for record in records]
    assert [row.env_kwargs for row in rows] == [record["env_kwargs"] for record in records]


def test_numpy_arrays_as_pandas_makes_them():
    record = {"prompt": np.array([{"role": "user", "content": "a"}], dtype=object)}
    assert parse_row(record, index=0, where="row").prompt == [{"role": "user", "content": "a"}]


def test_text_is_one_user_message():
    assert parse_row({"prompt": "6 * 7?"}, index=0, where="row").prompt == [{"role": "user", "content": "6 * 7?"}]


def test_an_empty_prompt_is_for_environments_that_show_everything():
    assert parse_row({"prompt": []}, index=0, where="row").prompt == []


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"question": "6 * 7?"}, "`prompt` must be a list of messages with role and content, not None"),
        ({"prompt": 5}, "`prompt` must be a list"),
        ({"prompt": {"role": "user", "content": "a"}}, "`prompt` must be a list"),
        ({"prompt": [{"role": "user"}]}, "`prompt` must be a list"),
        ({"prompt": ["a"]}, "`prompt` must be a list"),
        (["a"], "a row must be an object"),
        ({"prompt": "a", "env_kwargs": "{"}, "`env_kwargs` is not valid JSON"),
        ({"prompt": "a", "env_kwargs": "[1]"}, "`env_kwargs` must be an object, not list"),
        ({"prompt": "a", "reward_model": "rule"}, "`reward_model` is not valid JSON"),
        ({"prompt": "a", "extra_info": 3}, "`extra_info` must be an object, not int"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, record, problem):
    path = write_jsonl(tmp_path / "rows.jsonl", VERL, record)
    with pytest.raises(DataError) as caught:
        load_rows(path, {})
    assert str(caught.value).startswith(f"{path}:2: {problem}")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        load_rows(str(tmp_path / "none.jsonl"), {})
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl: no rows"):
        load_rows(str(tmp_path / "empty.jsonl"), {})
    (tmp_path / "bad.jsonl").write_text(json.dumps(VERL) + "\n\n{'prompt': 'a'}\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:3: not valid JSON"):
        load_rows(str(tmp_path / "bad.jsonl"), {})


def test_rows_of_a_function():
    rows = load_rows("megatron_agent.envs.arithmetic:rows", {"num_rows": 3, "seed": 1})
    assert [row.index for row in rows] == [0, 1, 2]
    with pytest.raises(DataError, match="arithmetic:rows: got an unexpected keyword argument 'num_row'"):
        load_rows("megatron_agent.envs.arithmetic:rows", {"num_row": 3})
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_rows("megatron_agent.envs.arithmetic:no_rows", {})


def iterator(num_rows: int = 5, **options) -> RowIterator:
    rows = [parse_row({"prompt": str(index)}, index=index, where="row") for index in range(num_rows)]
    return RowIterator(rows, **{"seed": 0, "shuffle": True, **options})


def indices(rows) -> list[int]:
    return [row.index for row in rows]


def test_each_pass_has_every_row_once_in_an_order_of_its_own():
    rows = iterator(20)
    passes = [indices(rows.take(20)) for _ in range(3)]
    assert all(sorted(order) == list(range(20)) for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    assert indices(iterator(20, seed=1).take(20)) != passes[0]


def test_without_shuffling_the_files_order_comes_again_and_again():
    assert indices(iterator(3, shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_taking_across_passes_is_the_same_as_one_by_one():
    together, single = iterator(), iterator()
    assert indices(together.take(13)) == [single.take(1)[0].index for _ in range(13)]


@pytest.mark.parametrize("taken", [0, 3, 5, 7, 11])
def test_a_resumed_iterator_goes_on_as_if_nothing_had_happened(taken):
    uninterrupted, stopped, resumed = iterator(), iterator(), iterator()
    uninterrupted.take(taken)
    stopped.take(taken)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert indices(resumed.take(9)) == indices(uninterrupted.take(9))


def test_no_rows_cannot_be_iterated():
    with pytest.raises(DataError, match="no rows"):
        iterator(0)
