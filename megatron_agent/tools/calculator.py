"""A calculator: arithmetic on numbers, and nothing else that Python could do."""

import ast
import operator
from collections.abc import Callable

from megatron_agent.tools.base import BaseTool

MAX_EXPONENT = 64
MAX_DIGITS = 100
MAX_LENGTH = 500

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Calculator(BaseTool):
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses.
    """

    name = "calculator"

    def execute(self, expression: str) -> str:
        if len(expression) > MAX_LENGTH:
            raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # all of them mean: not parsed
            raise ValueError(f"not an arithmetic expression: {expression!r}") from error
        value = _evaluate(tree.body)
        return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _evaluate(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _limited(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > MAX_EXPONENT or abs(left) > 10**9):
            raise ValueError(f"powers stop at 10**9 to the {MAX_EXPONENT}")
        return _limited(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _limited(value: float | complex) -> float:
    if isinstance(value, complex) or abs(value) > 10**MAX_DIGITS:
        raise ValueError(f"numbers have at most {MAX_DIGITS} digits and are real")
    return value
