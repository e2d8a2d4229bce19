"""Tools: the schema comes from the signature and the docstring, arguments are checked against it."""

import asyncio
import json
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from megatron_agent.errors import ConfigError
from megatron_agent.tools.base import BaseTool, ToolArgumentError, make_tools
from megatron_agent.tools.calculator import Calculator


class Unit(Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclass
class Place:
    city: str
    zip_code: int = 0


class Window(typing.TypedDict):
    start: str
    end: typing.NotRequired[str]


class Options(BaseModel):
    title: str
    verbose: bool = False


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Everything(BaseTool):
    """Not shown: execute has a docstring of its own."""

    name = "everything"

    def execute(
        self,
        text: str,
        count: int,
        ratio: float,
        flag: bool,
        tags: list[str],
        place: Place,
        window: Window,
        options: Options,
        mode: Literal["fast", "slow"],
        unit: Unit,
        windows: list[Window] | None = None,
        limit: Optional[int] = None,  # noqa: UP045
        default: str = "x",
    ) -> Any:
        """Do everything.

        Second paragraph.

        Args:
            text: What to read,
                in two lines.
            count (int): How often.
            mode: One of two: fast or slow.

        Returns:
            What it was given.
        """
        return locals()


GOOD: dict[str, Any] = {
    "text": "t",
    "count": 2,
    "ratio": 0.5,
    "flag": True,
    "tags": ["a"],
    "place": {"city": "Bonn"},
    "window": {"start": "8"},
    "options": {"title": "T"},
    "mode": "fast",
    "unit": "c",
}


@pytest.fixture
def properties() -> dict[str, Any]:
    return Everything().schema()["function"]["parameters"]["properties"]


def test_schema_of_plain_types(properties):
    assert properties["text"] == {"type": "string", "description": "What to read, in two lines."}
    assert properties["count"] == {"type": "integer", "description": "How often."}
    assert properties["ratio"] == {"type": "number"}
    assert properties["flag"] == {"type": "boolean"}
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}}


def test_schema_of_choices(properties):
    assert properties["mode"] == {
        "type": "string",
        "enum": ["fast", "slow"],
        "description": "One of two: fast or slow.",
    }
    assert properties["unit"] == {"type": "string", "enum": ["c", "f"]}


def test_schema_of_nested_objects(properties):
    place = properties["place"]
    assert place["properties"] == {"city": {"type": "string"}, "zip_code": {"type": "integer", "default": 0}}
    assert place["required"] == ["city"]
    assert properties["window"]["properties"] == {"start": {"type": "string"}, "end": {"type": "string"}}
    assert properties["window"]["required"] == ["start"]
    assert properties["options"]["properties"] == {
        "title": {"type": "string"},
        "verbose": {"type": "boolean", "default": False},
    }


def test_schema_of_optional_arguments_and_defaults(properties):
    assert properties["limit"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
    assert properties["default"] == {"type": "string", "default": "x"}
    assert Everything().schema()["function"]["parameters"]["required"] == list(GOOD)


def test_schema_is_compact_json_without_references():
    """Titles repeat the names and references make the model look things up; both cost tokens of every prompt."""
    text = json.dumps(Everything().schema())
    assert "$ref" not in text
    assert "$defs" not in text
    assert text.count('"title"') == 2  # the field of that name, and that it is required


def test_a_type_that_holds_itself_stays_a_reference():
    class Tree(BaseTool):
        name = "tree"

        def execute(self, node: Node) -> int:
            return node.value

    parameters = Tree().schema()["function"]["parameters"]
    assert parameters["properties"]["node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    assert parameters["$defs"]["Node"]["properties"]["value"] == {"type": "integer"}
    nested = Tree().parse_arguments({"node": {"value": 1, "children": [{"value": 2}]}})
    assert nested["node"].children[0].value == 2


def test_description_without_the_arguments():
    description = Everything().schema()["function"]["description"]
    assert description == "Do everything.\n\nSecond paragraph.\n\nReturns:\n    What it was given."


def test_description_from_the_class():
    class Described(BaseTool):
        """Look something up.

        Args:
            key: The key.
        """

        name = "described"

        def execute(self, key: str) -> str:
            return key

    function = Described().schema()["function"]
    assert function["description"] == "Look something up."
    assert function["parameters"]["properties"]["key"]["description"] == "The key."


def test_a_tool_without_docstring_does_not_show_the_base_class():
    class Bare(BaseTool):
        name = "bare"

        def execute(self) -> str:
            return ""

    function = Bare().schema()["function"]
    assert function["description"] == ""
    assert function["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_annotated_constraints_and_descriptions():
    class Limited(BaseTool):
        name = "limited"

        def execute(self, count: Annotated[int, Field(ge=1, le=5, description="1 to 5.")]) -> int:
            return count

    schema = Limited().schema()["function"]["parameters"]["properties"]["count"]
    assert schema == {"type": "integer", "minimum": 1, "maximum": 5, "description": "1 to 5."}
    with pytest.raises(ToolArgumentError, match="count: Input should be less than or equal to 5, not 6"):
        Limited().parse_arguments({"count": 6})


def test_arguments_arrive_as_the_annotated_types():
    parsed = Everything().parse_arguments(GOOD)
    assert parsed["place"] == Place(city="Bonn")
    assert parsed["options"] == Options(title="T")
    assert parsed["window"] == {"start": "8"}
    assert parsed["unit"] is Unit.CELSIUS
    assert (parsed["limit"], parsed["default"], parsed["windows"]) == (None, "x", None)
    assert Everything().execute(**parsed)["count"] == 2


def test_a_number_in_quotes_is_taken():
    assert Everything().parse_arguments({**GOOD, "count": "3"})["count"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "three"}, "count: Input should be a valid integer.* not 'three'"),
        ({"text": 5}, "text: Input should be a valid string, not 5"),
        ({"tags": "a"}, "tags: Input should be a valid list, not 'a'"),
        ({"mode": "medium"}, "mode: Input should be 'fast' or 'slow', not 'medium'"),
        ({"unit": "k"}, "unit: Input should be 'c' or 'f', not 'k'"),
        ({"place": {}}, r"place\.city: missing"),
        ({"cuont": 1}, "cuont: there is no such argument; there are text, count"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ToolArgumentError, match=f"bad arguments for everything: {message}"):
        Everything().parse_arguments({**GOOD, **change})


def test_all_problems_at_once():
    with pytest.raises(ToolArgumentError, match=r"text: missing; .*count: Input should"):
        Everything().parse_arguments({**{k: v for k, v in GOOD.items() if k != "text"}, "count": []})


@pytest.mark.parametrize("signature", ["self, query", "self, *words: str", "self, **options: str", "self, q: str, /"])
def test_a_signature_without_schema_is_refused(signature):
    scope: dict[str, Any] = {}
    exec(f"def execute({signature}): return ''", scope)
    tool = type("Odd", (BaseTool,), {"name": "odd", "execute": scope["execute"]})()
    with pytest.raises(ConfigError, match=r"tool 'odd': parameter '.*' of execute needs a type annotation"):
        tool.schema()


def test_tools_by_name_and_by_reference():
    assert isinstance(make_tools("calculator")[0], Calculator)
    assert isinstance(make_tools("megatron_agent.tools.calculator:Calculator")[0], Calculator)
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        make_tools("calculatr")
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_tools("no_such_package.tools:Tool")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 34", "408"),
        (" (1 + 2) * -3 ", "-9"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("1e3", "1000"),
        ("123456789 * 987654321", "121932631112635269"),
    ],
)
def test_calculator(expression, value):
    assert Calculator().execute(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()",
        "(1).__class__",
        "[1 for _ in (1,)]",
        "x + 1",
        "'a' * 3",
        "True + 1",
        "2j",
        "1 +",
        "",
        "1, 2",
        "9 ** 9 ** 9",
        "(10 ** 60) * (10 ** 60)",
        "1e999",
        "1e999 - 1e999",
        "(-8) ** 0.5",
        "9" * 200,
        "1" + " + 1" * 300,
        "(" * 300 + "1" + ")" * 300,
        "1\0",
    ],
)
def test_calculator_refuses_with_a_reason(expression):
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
        Calculator().execute(expression)


def test_calculator_schema():
    function = Calculator().schema()["function"]
    assert function["name"] == "calculator"
    assert function["parameters"]["required"] == ["expression"]
    assert function["parameters"]["properties"]["expression"]["type"] == "string"


def test_an_async_tool_is_a_tool():
    class Slow(BaseTool):
        name = "slow"

        async def execute(self, seconds: float) -> str:
            await asyncio.sleep(seconds)
            return "done"

    assert asyncio.run(Slow().execute(**Slow().parse_arguments({"seconds": 0}))) == "done"
