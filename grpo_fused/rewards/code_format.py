"""The code-format reward: a `<code>` block that parses as Python, without dangerous names. Nothing is run."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence

from grpo_fused.rewards.text import Text, text_of

_MAX_CHARACTERS = 20_000  # 500 lines or so; Python's parser takes milliseconds for them
# fmt: off
_DANGEROUS = frozenset([
    "exec", "eval", "compile", "open", "input", "breakpoint", "globals", "locals", "vars", "getattr", "setattr",
    "delattr", "os", "sys", "subprocess", "shutil", "socket", "ctypes", "importlib", "builtins", "pickle", "signal",
    "multiprocessing", "threading",
])
# fmt: on
_DANGEROUS_WORDS = _DANGEROUS | {"import", "__import__"}
_HARMLESS_DUNDERS = frozenset(["__init__", "__name__", "__doc__", "__all__"])
_WORD = re.compile(r"\w+")


def code_format_reward(completions: Sequence[Text], **columns: object) -> list[float]:
    """1.0 for Python in `<code>…</code>`, 0.3 if it does not parse, 0.0 without code or with dangerous names.

    Judged from the syntax tree of the first block, which is never compiled or run. Dangerous are imports, names such
    as `open`, `eval` and `os`, and double-underscore attributes; in strings and comments they are allowed. If
    the block does not parse, its words are checked. A block without a statement or of more than 20,000 characters earns
    0.0.

    This reward does not make code safe to run: for that, use a sandbox.

    Args:
        completions: N completions.
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards, 0.0, 0.3 or 1.0.

    Source: the code reward of the multi-task example of the countdown exercise.
    """
    return [_judge(_code(text_of(completion))) for completion in completions]


def _code(text: str) -> str:
    _, opened, rest = text.partition("<code>")
    code, closed, _ = rest.partition("</code>")
    return code.strip() if opened and closed else ""


def _judge(code: str) -> float:
    if not code or len(code) > _MAX_CHARACTERS:
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in the policy's strings
            tree = ast.parse(code)
        nodes = list(ast.walk(tree))
    # Null bytes, lone surrogates and deep nesting raise different errors in different Python versions.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0 if _DANGEROUS_WORDS.intersection(_WORD.findall(code)) else 0.3
    imports = any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes)
    dangerous = imports or any(_is_dangerous(name) for node in nodes for name in _names(node))
    return 1.0 if tree.body and not dangerous else 0.0


def _names(node: ast.AST) -> Iterator[str]:
    """Every identifier of a node: variables, attributes, arguments, keywords, and the names it defines."""
    is_special = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("__")
    if is_special or isinstance(node, ast.Constant):  # a class may define its special methods
        return
    for _, value in ast.iter_fields(node):
        for name in value if isinstance(value, list) else [value]:  # global and nonlocal list theirs
            if isinstance(name, str):
                yield name


def _is_dangerous(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__") and name not in _HARMLESS_DUNDERS
    return dunder or name in _DANGEROUS
