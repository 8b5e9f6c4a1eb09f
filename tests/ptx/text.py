"""PTX text to instructions: scopes of names, parameters, shared variables, and the source line of each instruction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple


class PtxError(Exception):
    """PTX that this interpreter does not know, or that does what PTX does not allow."""


class Address(NamedTuple):
    """[base + offset], or [base, {coordinates}] of a tensor."""

    base: str
    offset: int
    coordinates: tuple[str, ...] = ()


Operand = str | tuple[str, ...] | Address
"""A register, number or name; a vector {a, b}, also of the form a|b; an address."""


class Instruction(NamedTuple):
    """One instruction; `line` is its line in the PTX, `source` where the compiler says it comes from."""

    guard: str | None
    negated: bool
    opcode: str
    operands: tuple[Operand, ...]
    line: int
    source: str

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        words = ", ".join(op if isinstance(op, str) else _words(op) for op in self.operands)
        return f"{guard}{self.opcode} {words}  (PTX line {self.line}, {self.source or 'no source line'})"


def _words(operand: tuple[str, ...] | Address) -> str:
    if isinstance(operand, Address):
        inside = f"{operand.base}+{operand.offset}" if operand.offset else operand.base
        return f"[{inside}{', {' + ', '.join(operand.coordinates) + '}' if operand.coordinates else ''}]"
    return "{" + ", ".join(operand[:4]) + (", ..." if len(operand) > 4 else "") + "}"


class Variable(NamedTuple):
    """Memory with a name: a parameter, or shared memory."""

    offset: int
    size: int


@dataclass
class Kernel:
    """An entry point."""

    name: str
    target: str
    threads: int | None
    """of a block, if the PTX says so"""
    parameters: dict[str, Variable]
    shared: dict[str, Variable]
    """static first; `dynamic` names begin where they end"""
    static_shared: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """register, or prefix of registers declared as %r<100>, to pred, b16, b32 or b64"""

    def kind(self, register: str) -> str | None:
        """pred, b16, b32 or b64; None if it is no register."""
        found = self.kinds.get(register)
        return found or self.kinds.get(re.sub(r"\d+$", "#", register))

    @property
    def parameter_bytes(self) -> int:
        """Size of all parameters."""
        return max((v.offset + v.size for v in self.parameters.values()), default=0)


SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_SIZED = {"pred": "pred", "b8": "b16", "s8": "b16", "u8": "b16", "b128": "b128"} | {
    f"{letter}{bits}": f"b{bits}" for letter in "bsuf" for bits in (16, 32, 64)
}


def parse(text: str, name: str | None = None) -> Kernel:
    """The entry point of that name, or the only one."""
    target = re.search(r"^\.target\s+(\w+)", text, re.M)
    files = {int(n): PurePath(path).name for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(", text))
    chosen = [e for e in entries if name is None or e[1] == name]
    if len(chosen) != 1:
        raise PtxError(f"expected one entry point{f' {name}' if name else ''}; got {[e[1] for e in entries]}")
    entry = chosen[0]
    brace = re.compile(r"^\{", re.M).search(text, entry.end())
    assert brace is not None
    head = re.sub(r"//[^\n]*", "", text[entry.end() : brace.start()])
    threads = re.search(r"\.reqntid\s+(\d+)", head)
    shared, static = _shared_variables(re.sub(r"//[^\n]*", "", text[: entry.start()]))
    kernel = Kernel(
        entry[1], target[1] if target else "", int(threads[1]) if threads else None, _parameters(head), shared, static
    )
    _Body(kernel, files).read(text[brace.end() :], first_line=text.count("\n", 0, brace.end()) + 1)
    return kernel


def _parameters(head: str) -> dict[str, Variable]:
    found, end = {}, 0
    head = head[: head.index(")")] if ")" in head else head
    for declared in re.findall(r"\.param\s+([^,)]*)", head):
        align = re.search(r"(?<!\.ptr )(?<!\.ptr \.global )\.align\s+(\d+)", declared.split(".ptr")[0])
        kind = re.search(r"\.([a-z])(8|16|32|64)\b", declared)
        name = re.search(r"([\w$]+)\s*(?:\[(\d+)\])?\s*$", declared)
        assert kind is not None, declared
        assert name is not None, declared
        size = SIZES[kind[2]] * int(name[2] or 1)
        alignment = int(align[1]) if align else SIZES[kind[2]]
        end = -(-end // alignment) * alignment
        found[name[1]] = Variable(end, size)
        end += size
    return found


def _shared_variables(module: str) -> tuple[dict[str, Variable], int]:
    found, end = {}, 0
    declared = re.findall(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;", module)
    for align, bits, name, count in declared:
        if count == "":
            continue
        alignment = int(align or SIZES[bits])
        end = -(-end // alignment) * alignment
        found[name] = Variable(end, SIZES[bits] * int(count))
        end += found[name].size
    end = -(-end // 1024) * 1024 if found else 0
    for _, _, name, count in declared:
        if count == "":
            found[name] = Variable(end, 0)  # dynamic: of the size that the launch asks for
    return found, end


class _Body:
    """Reads statements; names declared inside { } are renamed, since each scope has its own."""

    def __init__(self, kernel: Kernel, files: dict[int, str]) -> None:
        self.kernel, self.files = kernel, files
        self.scopes: list[dict[str, str]] = [{}]
        self.source = ""
        self.number = 0

    def read(self, text: str, first_line: int) -> None:
        # labels of a scope may be used before they are defined: names are found first, one pass later used
        pending: list[tuple[str, int, str, list[dict[str, str]]]] = []
        for statement, line in self._statements(text, first_line):
            if statement == "{":
                self.scopes.append({})
            elif statement == "}":
                self.scopes.pop()
                if not self.scopes:
                    break
            elif statement.startswith(".reg"):
                self._declare(statement)
            elif statement.endswith(":"):
                label = self._own(statement[:-1].strip())
                self.kernel.labels[label] = len(pending)
            elif not statement.startswith("."):
                pending.append((statement, line, self.source, list(self.scopes)))
            elif not statement.startswith((".pragma", ".branchtargets")):
                raise PtxError(f"directive {statement.split()[0]!r} at PTX line {line} is not known here")
        self.kernel.instructions = [self._instruction(*each) for each in pending]

    def _own(self, name: str) -> str:
        if len(self.scopes) > 1:
            self.number += 1
            self.scopes[-1][name] = f"{name}@{self.number}"
            return self.scopes[-1][name]
        return name

    def _declare(self, statement: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            many = re.match(r"\s*([%\w$]+)<\d+>", name)
            self.kernel.kinds[f"{many[1]}#" if many else self._own(name.strip())] = _SIZED[kind]

    def _statements(self, text: str, line: int) -> Iterator[tuple[str, int]]:
        rest, start = "", line
        for raw in text.split("\n"):
            located = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:[^/]*//\s*(.*))?", raw)
            if located and not rest:
                file, row, column, chain = located.groups()
                self.source = chain or f"{self.files.get(int(file), '?')}:{row}:{column}"
            elif not re.match(r"\s*\.(file|section)\b", raw) or rest:
                rest += re.sub(r"//.*", "", raw) + " "
                while found := re.match(r"\s*([{}]|[\w$%.]+:(?!:)|(?:[^;{}]|\{[^{}]*\})+;)", rest):
                    rest = rest[found.end() :]
                    yield found[1].rstrip(";").strip(), start
                    start = line
            line += 1
            if not rest.strip():
                rest, start = "", line

    def _instruction(self, statement: str, line: int, source: str, scopes: list[dict[str, str]]) -> Instruction:
        found = re.match(r"(?:@(!?)\s*([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", statement, re.S)
        if found is None:
            raise PtxError(f"{statement!r} at PTX line {line} is no instruction")
        negated, guard, opcode, operands = found.groups()

        def known(name: str) -> str:
            for scope in reversed(scopes):
                if name in scope:
                    return scope[name]
            return name

        parsed = tuple(_operand(text, known) for text in _split(operands))
        return Instruction(known(guard) if guard else None, bool(negated), opcode, parsed, line, source)


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _operand(text: str, known: object) -> Operand:
    if text[0] == "{":
        return tuple(known(part) for part in _split(text[1:-1]))  # type: ignore[operator]
    if text[0] == "[":
        inside = _split(text[1:-1])
        found = re.match(r"^([%\w$]+)\s*(?:\+\s*(-?\w+))?$", inside[0])
        if found is None:
            raise PtxError(f"address {text!r} is not understood")
        coordinates = _split(inside[1][1:-1]) if len(inside) > 1 else []
        return Address(known(found[1]), int(found[2] or "0", 0), tuple(map(known, coordinates)))  # type: ignore[operator, arg-type]
    if "|" in text:
        return tuple(known(part.strip()) for part in text.split("|"))  # type: ignore[operator]
    return known(text)  # type: ignore[operator]
