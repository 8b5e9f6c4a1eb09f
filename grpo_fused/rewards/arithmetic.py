"""A bounded evaluator of arithmetic: the policy's text is parsed and its tree evaluated, without `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

# Powers are not supported, so a value has at most about as many digits as its text: the limit bounds the work.
_MAX_CHARACTERS = 512
_CHARACTERS = frozenset("0123456789.+-*/() \t\n\r")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Arithmetic(NamedTuple):
    """The exact value of an expression and the numbers in it, from left to right."""

    value: Fraction
    numbers: tuple[Fraction, ...]


def evaluate_arithmetic(text: str) -> Arithmetic | None:
    """Evaluates `+ - * /`, unary minus, parentheses, integers and decimals exactly; None for anything else.

    Anything else is every other character or operator (`**` and `//` too), a division by zero, and more than 512
    characters. No text makes it raise, hang or use memory: `9**9**9` is None at once.
    """
    if len(text) > _MAX_CHARACTERS or not _CHARACTERS.issuperset(text):
        return None
    line = " ".join(text.split())  # one line: a new line would end the expression
    numbers: list[Fraction] = []
    try:
        return Arithmetic(_value(ast.parse(line, mode="eval").body, line, numbers), tuple(numbers))
    # The parser fails on deep nesting with different errors in different Python versions.
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError, ValueError):
        return None


def _value(node: ast.expr, line: str, numbers: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant):
        numbers.append(Fraction(line[node.col_offset : node.end_col_offset]))  # from the text: a float would be rounded
        return numbers[-1]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, line, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, line, numbers), _value(node.right, line, numbers))
    raise ValueError("no arithmetic")
