"""Answers for verifiers of reasoning-gym that evaluate them: only those that cannot run code."""

from __future__ import annotations

import ast
import math
import re

from grpo_fused.rewards.arithmetic import evaluate_arithmetic

# fmt: off
EVALUATE_ANSWERS = frozenset([
    "binary_matrix", "n_queens", "spiral_matrix", "string_insertion",  # by eval
    "countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration",  # by SymPy
])
"""The data sets of reasoning-gym 0.1.25 whose verifiers evaluate the answer as Python code."""

_NODES = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.Call,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd,
)
_FUNCTIONS = frozenset([
    "exp", "log", "ln", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh",
    "tanh", "Abs",
])
_EXPONENTIALS = frozenset(["exp", "sinh", "cosh"])  # a function of one may need as many digits as it is large
# fmt: on
_MAX_CHARACTERS = 10_000
_MAX_EXPONENT = 100
_MAX_DIGITS = 10_000  # of the largest number that an answer can make
_WORDS = re.compile(r"[\w\s-]*")


def is_harmless(answer: str) -> bool:
    """Whether evaluating the answer runs no code of the policy's and makes no number of more than 10,000 digits.

    These are words and numbers (a row of a matrix, a board), lists of numbers and single characters, and formulas of
    numbers, symbols, `+ - * / **` and SymPy's elementary functions; powers have a number as exponent.
    """
    if len(answer) > _MAX_CHARACTERS:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
        nodes = list(ast.walk(tree))
        has_text = any(isinstance(node, (ast.List, ast.Tuple)) or _is_text(node) for node in nodes)
        is_allowed = all(_is_allowed(node) and not (has_text and isinstance(node, ast.Mult)) for node in nodes)
        return is_allowed and _digits(tree.body) <= _MAX_DIGITS
    except SyntaxError:  # also for the verifier, but SymPy reads more than Python, such as 9!
        return bool(_WORDS.fullmatch(answer))
    # Deep nesting and null bytes raise different errors in different versions of Python.
    except (ValueError, RecursionError, MemoryError):
        return False


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return len(node.value) == 1  # SymPy evaluates a longer text, too
        return isinstance(node.value, (int, float))
    if isinstance(node, ast.Call):
        inner = [each for argument in node.args for each in ast.walk(argument)]
        return _calls(node, _FUNCTIONS) and not any(_calls(each, _EXPONENTIALS) for each in inner)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _exponent(node) <= _MAX_EXPONENT
    return isinstance(node, _NODES)


def _exponent(power: ast.BinOp) -> float:
    """Its size; infinite if it is no number."""
    found = evaluate_arithmetic(ast.unparse(power.right))
    return math.inf if found is None else float(abs(found.value))


def _digits(node: ast.AST) -> float:
    """At least the decimal digits of an allowed formula's value; a symbol counts as a number of one digit."""
    if isinstance(node, (ast.Constant, ast.Name)):
        value = getattr(node, "value", None)
        return math.log10(max(value, 1)) + 1 if isinstance(value, (int, float)) else 1.0  # 1e999 is infinite
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _digits(node.left) * max(_exponent(node), 1.0)
    return sum(_digits(child) for child in ast.iter_child_nodes(node))


def _calls(node: ast.AST, names: frozenset[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
