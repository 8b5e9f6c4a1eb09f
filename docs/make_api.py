"""Writes docs/api.md from the docstrings of the public modules, read from the source without importing it.

python docs/make_api.py            # after a docstring has changed
python docs/make_api.py --check    # fails if the page is not up to date; the tests run this
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
MODULES: dict[str, tuple[str, ...]] = {
    "grpo_fused": (),
    "grpo_fused.rewards": (),
    "grpo_fused.trainer": (),
    "grpo_fused.trainer.recipe": ("Recipe", "Reward", "LoRA"),
    "grpo_fused.integrations.trl": (),
    "grpo_fused.integrations.verl": ("SUPPORTED", "patch_verl", "unpatch_verl"),
    "grpo_fused.integrations.torchtitan": ("SUPPORTED", "FusedLossWrapper"),
    "grpo_fused.integrations.prime_rl": ("SUPPORTED", "FusedOutputLinear", "GemmaFusedOutputLinear"),
    "grpo_fused.integrations.liger": (),
}
"""Public modules, and the names to document; none means those of `__all__`."""


class Definition(NamedTuple):
    """A public name and where it is defined."""

    name: str
    node: ast.stmt
    doc: str
    source: str


def file_of(module: str) -> Path:
    """The source file of a module of the package."""
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def find(module: str, name: str) -> Definition:
    """The definition of a name, through `from ... import`.

    Raises:
        ValueError: The module neither defines the name nor imports it from the package.
    """
    source = file_of(module).read_text(encoding="utf-8")
    body = ast.parse(source).body
    for i, node in enumerate(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return Definition(name, node, ast.get_docstring(node) or "", source)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return Definition(name, node, _string(body[i + 1 : i + 2]), source)
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return find(str(node.module), name)
    raise ValueError(f"expected a definition of {name} in {module}; found none")


def public_names(module: str) -> tuple[str, ...]:
    """`__all__`."""
    for node in ast.parse(file_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return tuple(ast.literal_eval(node.value))
    raise ValueError(f"expected __all__ in {module}; found none")


def _string(body: list[ast.stmt]) -> str:
    """The string that the statements begin with, if they do: the docstring of the assignment before it."""
    value = body[0].value if body and isinstance(body[0], ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else ""
    return _flat(text) if isinstance(text, str) else ""


def signature(found: Definition) -> str:
    """A function's header, a class's header and fields, or an assignment, as in the source."""
    lines, node = found.source.splitlines(), found.node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _dedented(lines[node.lineno - 1 : node.body[0].lineno - 1])
    if not isinstance(node, ast.ClassDef):
        return _dedented(lines[node.lineno - 1 : node.end_lineno])
    fields = [
        line
        for item in node.body
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_")
        for line in lines[item.lineno - 1 : item.end_lineno]
    ]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            fields = lines[item.lineno - 1 : item.body[0].lineno - 1]
    return "\n".join([lines[node.lineno - 1], *fields])


def _dedented(lines: list[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)


def markdown(doc: str) -> str:
    """A docstring in Google's style as Markdown."""
    parts = []
    for block in re.split(r"\n\s*\n", doc):
        title, _, rest = block.partition("\n")
        if re.fullmatch(r"(Args|Raises|Returns|Yields):", title):
            parts += [f"**{title[:-1]}**", _entries(rest) if title in ("Args:", "Raises:") else _flowing(rest)]
        elif block.startswith("    "):
            parts.append("```text\n" + _dedented(block.splitlines()) + "\n```")
        else:
            parts.append(_flowing(re.sub(r"::$", ":", block)))
    return "\n\n".join(part for part in parts if part)


def _entries(text: str) -> str:
    """`name: what` lines, indented, as a list."""
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=    \S)", text)]
    return "\n".join(re.sub(r"^([\w, *.]+): ", r"- `\1`: ", entry) for entry in entries)


def _flowing(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def section(found: Definition) -> Iterator[str]:
    """Markdown of one public name, with the methods of a class."""
    yield f"### {found.name}"
    yield f"```python\n{signature(found)}\n```"
    yield markdown(found.doc)
    if not isinstance(found.node, ast.ClassDef):
        return
    body = found.node.body
    fields = []
    for item, after in zip(body, [*body[1:], None], strict=True):
        text = _string([after]) if isinstance(item, ast.AnnAssign) and after is not None else ""
        if text and isinstance(item, ast.AnnAssign):
            fields.append(f"- `{ast.unparse(item.target)}`: {text}")
    yield "\n".join(fields)
    methods = [item for item in body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]
    short = [item for item in methods if "\n\n" not in (ast.get_docstring(item) or "")]
    yield "\n".join(
        f"- `{item.name}{'' if _is_property(item) else '(' + _arguments(item) + ')'}`: {_flat(ast.get_docstring(item))}"
        for item in short
        if ast.get_docstring(item)
    )
    for item in methods:
        if item not in short:
            doc = ast.get_docstring(item) or ""
            header = signature(Definition(item.name, item, doc, found.source))
            yield f"#### {found.name}.{item.name}\n\n```python\n{header}\n```\n\n{markdown(doc)}"


def _is_property(item: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in item.decorator_list)


def _arguments(item: ast.FunctionDef) -> str:
    arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
    return ", ".join(argument.arg for argument in arguments if argument.arg not in ("self", "cls"))


def _flat(doc: str | None) -> str:
    return " ".join((doc or "").split())


def page() -> str:
    """The whole page."""
    parts = ["# API", "Generated from the docstrings by `python docs/make_api.py`."]
    for module, names in MODULES.items():
        doc = ast.get_docstring(ast.parse(file_of(module).read_text(encoding="utf-8"))) or ""
        parts += [f"## {module}", markdown(doc)]
        definitions = [find(module, name) for name in names or public_names(module)]
        for found in sorted(definitions, key=lambda d: isinstance(d.node, ast.ClassDef)):  # functions first
            parts += section(found)
    return "\n\n".join(part for part in parts if part) + "\n"


def main(argv: list[str]) -> None:
    """Write, or check."""
    if argv not in ([], ["--check"]):
        sys.exit("usage: python docs/make_api.py [--check]")
    if argv and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page()):
        sys.exit(f"{PAGE} is not up to date: run python docs/make_api.py")
    if not argv:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
