"""Tool calls in text: read in order, and nothing that began as a call is taken for an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_agent.errors import ConfigError
from megatron_agent.tools.formats import BrokenCall, HermesFormat, ToolCall, get_tool_format

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = ToolCall(name="add", arguments={"a": 1})


def parse(text: str, *, is_cut_off: bool = False):
    return HermesFormat().parse(text, is_cut_off=is_cut_off)


def kinds(text: str, *, is_cut_off: bool = False) -> list[str]:
    return [call.kind if isinstance(call, BrokenCall) else call.name for call in parse(text, is_cut_off=is_cut_off)]


def test_text_without_a_call_is_an_answer():
    assert parse("#### 42") == []
    assert parse("a < b and <tool> too") == []


def test_several_calls_in_order():
    second = '<tool_call>\n{"arguments": {"b": [2]}, "name": "mul"}\n</tool_call>'
    assert parse(f"first {CALL} then {second} done") == [ADD, ToolCall(name="mul", arguments={"b": [2]})]


def test_no_arguments_is_an_empty_object():
    assert parse('<tool_call>{"name": "now"}</tool_call>') == [ToolCall(name="now", arguments={})]


def test_a_string_may_hold_line_breaks_and_the_closing_tag():
    text = '<tool_call>{"name": "write", "arguments": {"code": "a\nb </tool_call> <tool_call> c"}}</tool_call>' + CALL
    assert parse(text) == [ToolCall(name="write", arguments={"code": "a\nb </tool_call> <tool_call> c"}), ADD]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1}',
        "{'name': 'add'}",
        "add(1)",
        "",
        '{"arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '["add", 1]',
        '{"name": "add", "arguments": {}} and more',
    ],
)
def test_a_malformed_call_is_broken_and_the_next_one_is_read(body):
    assert kinds(f"<tool_call>{body}</tool_call>{CALL}") == ["bad_json", "add"]


def test_a_complete_call_without_its_closing_tag_is_a_call():
    assert parse('<tool_call>{"name": "add", "arguments": {"a": 1}}') == [ADD]


@pytest.mark.parametrize("length", range(len(CALL)))
@pytest.mark.parametrize("before", ["", "Let me add. ", CALL + "\n"])
def test_a_cut_off_call_is_never_an_answer(length, before):
    calls = parse(before + CALL[:length], is_cut_off=True)
    assert calls or before + CALL[:length] in ("", "Let me add. ")
    if not before and 0 < length < CALL.index("</tool_call>"):
        assert [call.kind for call in calls if isinstance(call, BrokenCall)] == ["cut_off"]


def test_the_same_text_that_was_not_cut_off_is_bad_json():
    assert kinds('<tool_call>{"name": "ad') == ["bad_json"]
    assert kinds('<tool_call>{"name": "ad', is_cut_off=True) == ["cut_off"]
    assert kinds(CALL + '<tool_call>{"name": "ad', is_cut_off=True) == ["add", "cut_off"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    calls=st.lists(
        st.builds(
            ToolCall,
            name=st.text(),
            arguments=st.dictionaries(
                st.text(), json_values | st.sampled_from(["</tool_call>", "<tool_call>{}"]), max_size=3
            ),
        ),
        max_size=3,
    )
)
def test_round_trip(calls):
    text = "\n".join(HermesFormat().render(call) for call in calls)
    assert parse(text) == calls


def test_tools_in_a_system_message_for_templates_that_take_none():
    tool = {"type": "function", "function": {"name": "add"}}
    user = {"role": "user", "content": "1 + 1?"}
    system, same = HermesFormat().with_tools([user], [tool])
    assert same == user
    assert system["role"] == "system"
    assert '"name": "add"' in system["content"]
    merged, same = HermesFormat().with_tools([{"role": "system", "content": "Be brief."}, user], [tool])
    assert merged["content"].startswith("Be brief.\n\n")
    assert same == user


def test_formats_by_name():
    assert isinstance(get_tool_format("hermes"), HermesFormat)
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        get_tool_format("hermse")
