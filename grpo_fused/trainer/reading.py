"""YAML and words of a command line into dataclasses; an error names the option and its place.

Both become settings, mappings of option to value and place, later ones over earlier ones. Then the dataclasses are
made: they check numbers, choices and ranges themselves (`call/options.py`); here texts, lists and mappings are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

MAX_VALUES = 20_000  # of a YAML text with its aliases expanded; a recipe has about 40 values
COMMAND_LINE = "command line"
WORDS = {str: "a text", tuple: "a list", dict: "a mapping", NoneType: "null"}


class OptionError(ValueError):
    """An option that is unknown, missing or wrong; the text begins with its place, if it has one."""


class Setting(NamedTuple):
    """A value and where it was given; of a nested dataclass, a mapping of settings."""

    value: Any
    place: str


Settings = dict[str, Setting]


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which 1e-6 is a number (as in YAML 1.2), and a date is a text."""


Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if not pair[0].endswith(":timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789"))


def compose(text: str, name: str) -> yaml.Node | None:
    """The nodes of a YAML text of bounded size: aliases of aliases can represent more values than fit in memory.

    Raises:
        OptionError: It is not valid, it has more than `MAX_VALUES` values with aliases expanded, or it is nested too
            deeply, for example by an alias of itself.
    """

    @cache
    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        children = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        return 1 + sum(map(size, children))

    try:
        loader = Loader(text)
        loader.name = name
        root = loader.get_single_node()
        if root is not None and size(root) > MAX_VALUES:
            raise OptionError(f"{name}: YAML must have at most {MAX_VALUES} values with aliases expanded; got more")
        check_keys(root)
        return root
    except RecursionError as error:
        raise OptionError(f"{name}: YAML must not be nested deeply or contain an alias of itself; it does") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise OptionError(f"{name}: line {line} must be valid YAML; {error.problem}") from error
    except yaml.YAMLError as error:
        raise OptionError(f"{name}: a recipe must be valid YAML; {error}") from error


def check_keys(node: yaml.Node | None) -> None:
    """Raises OptionError if a mapping has a key twice: YAML would take the last one."""
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if key.value in lines:
                raise OptionError(f"{place_of(key)}: {key.value} is given twice, first in line {lines[key.value]}")
            lines[key.value] = key.start_mark.line + 1
        check_keys(value)
    for value in node.value if isinstance(node, yaml.SequenceNode) else ():
        check_keys(value)


def read_text(text: str, name: str, settings: Settings, hints: Mapping[str, Any]) -> None:
    """Adds the options of a YAML text to the settings; `hints` are the types of all options."""
    root = compose(text, name)
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise OptionError(f"{name}: a recipe must be a mapping of options to values")
    for key, node in pairs_of(root):
        put(settings, hints, key.value, node, place_of(key))


def read_word(name: str, text: str, settings: Settings, hints: Mapping[str, Any]) -> None:
    """Adds an option of the command line to the settings."""
    tag = "null" if text == "null" else "str"
    put(settings, hints, name, yaml.ScalarNode(f"tag:yaml.org,2002:{tag}", text), COMMAND_LINE)


def put(settings: Settings, hints: Mapping[str, Any], name: str, node: yaml.Node, place: str, prefix: str = "") -> None:
    """Sets an option, or one of a nested dataclass or mapping: `loss.beta`."""
    key, nested, rest = name.partition(".")
    before = settings[key].value if key in settings else None
    group, kinds = group_of(hints.get(key)), kinds_of(hints.get(key))
    if key not in hints:
        raise unknown(name, place, hints, prefix)
    if nested and group is None and dict not in kinds:
        raise OptionError(f"{place}: unknown option {prefix + name!r}; did you mean {prefix + key!r}?")
    if not nested:
        settings[key] = Setting(read_node(node, hints[key], f"{prefix}{key}", before), place)
        return
    inner = dict(before) if isinstance(before, dict) else {}
    if group is None:
        inner[rest] = plain(compose(node.value, COMMAND_LINE) if node.start_mark is None else node)
    else:
        put(inner, hints_of(group), rest, node, place, f"{prefix}{key}.")
    settings[key] = Setting(inner, place)


def read_node(node: yaml.Node, hint: Any, name: str, before: Any = None) -> Any:
    """The value of an option: settings of a nested dataclass (over those before), a list, or a plain value."""
    kinds, group = kinds_of(hint), group_of(hint)
    is_nested = group is not None or kinds.keys() & {tuple, dict}
    if node.start_mark is None and is_nested and (str not in kinds or node.value.startswith("[")):
        node = compose(node.value, COMMAND_LINE) or node
    if group is not None and isinstance(node, yaml.MappingNode):
        inner = dict(before) if isinstance(before, dict) else {}
        for key, value in pairs_of(node):
            put(inner, hints_of(group), key.value, value, place_of(key), f"{name}.")
        return inner
    if tuple in kinds and isinstance(node, yaml.SequenceNode):
        return [read_node(item, get_args(kinds[tuple])[0], name) for item in node.value]
    if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null"):
        if Literal in kinds:
            return node.value  # "no" is a choice
        if kinds.keys() & {int, float, bool}:  # also as a text: '1e-6'
            node = yaml.ScalarNode(Loader("").resolve(yaml.ScalarNode, node.value, (True, False)), node.value)
    return plain(node)


def build(kind: Any, settings: Settings, prefix: str = "", place: str = "") -> Any:
    """The dataclass with these settings; `prefix` and `place` are those of a nested one.

    Raises:
        OptionError: An option is missing or wrong.
    """
    hints = hints_of(kind)
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in settings]:
        raise OptionError(f"the following arguments are required: {', '.join(missing)}")
    try:
        return kind(**{name: convert(*settings[name], hints[name], name) for name in settings})
    except OptionError:
        raise
    except (TypeError, ValueError) as error:
        name = str(re.match(r"\w*", str(error))[0])  # type: ignore[index]  # errors begin with the option
        where = dict(places_of(settings)).get(name, place)
        raise OptionError(f"{where}{': ' if where else ''}{prefix if name in hints else ''}{error}") from error


def convert(value: Any, place: str, hint: Any, name: str) -> Any:
    """A plain value as its option has it: a tuple for a list, a float for an int, a dataclass for settings."""
    kinds, group = kinds_of(hint), group_of(hint)
    if group is not None and isinstance(value, dict):
        return build(group, value, f"{name}.", place)
    if tuple in kinds and isinstance(value, list):
        of_item = get_args(kinds[tuple])[0]
        return tuple(
            convert(item, place, of_item, name if isinstance(item, dict) else f"{name}: an entry") for item in value
        )
    words = WORDS if group is None else {**WORDS, group: "a mapping of options"}
    if kinds.keys() <= words.keys() and type(value) not in kinds:
        raise TypeError(f"{name} must be {' or '.join(words[kind] for kind in kinds)}; got {value!r}")
    return float(value) if float in kinds and type(value) is int else value


_ELSEWHERE = {
    "max_steps": "steps", "lr": "learning_rate", "batch_size": "prompts_per_step", "output": "output_dir",
    "max_new_tokens": "max_completion_length",
}  # fmt: skip
"""What other programs call an option."""


def unknown(name: str, place: str, hints: Mapping[str, Any], prefix: str = "") -> OptionError:
    """The error of an option that does not exist, with the nearest that does."""
    name, known = f"{prefix}{name}", list(names_of(hints, prefix))
    same = [option for option in known if option.rpartition(".")[2] == name.rpartition(".")[2]]
    near = [_ELSEWHERE[name]] if name in _ELSEWHERE else same or get_close_matches(name, known, 1)
    return OptionError(f"{place}: unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def names_of(hints: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """All options, `loss.beta` too."""
    for name, hint in hints.items():
        yield f"{prefix}{name}"
        group = group_of(hint) or group_of(next(iter(get_args(hint)), None))
        if group is not None:
            yield from names_of(hints_of(group), f"{prefix}{name}.")


def places_of(settings: Settings) -> Iterator[tuple[str, str]]:
    """The place of each option; of options with one name, that of the outermost comes last."""
    for setting in settings.values():
        if isinstance(setting.value, dict) and all(isinstance(inner, Setting) for inner in setting.value.values()):
            yield from places_of(setting.value)
    yield from ((name, setting.place) for name, setting in settings.items())


def place_of(key: yaml.Node) -> str:
    """The file and line of a key, or the command line."""
    mark = key.start_mark
    return COMMAND_LINE if mark.name == COMMAND_LINE else f"{mark.name}:{mark.line + 1}"


def hints_of(kind: Any) -> dict[str, Any]:
    """The types of the options of a dataclass."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def kinds_of(hint: Any) -> dict[Any, Any]:
    """The alternatives of a type, by their origin: {tuple: tuple[str, ...], NoneType: NoneType}."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(kind) or kind: kind for kind in kinds}


def group_of(hint: Any) -> Any:
    """The dataclass of an option with options of its own, or None."""
    return next((kind for kind in kinds_of(hint) if is_dataclass(kind)), None)


def pairs_of(node: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a mapping, with those that it merges (`<<`)."""
    if node is None:
        return []
    Loader("").flatten_mapping(node)
    return list(node.value)


def plain(node: yaml.Node | None) -> Any:
    """The value of a node."""
    return None if node is None else Loader("").construct_document(node)
