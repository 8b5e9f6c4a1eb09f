"""YAML and words of a command line into dataclasses; an error names the option and its place.

Both become settings, mappings of option to YAML node and place, later ones over earlier ones. Then the dataclasses are
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
    """A value and where it was given: a node, or the settings of a nested dataclass."""

    value: Any
    place: str


Settings = dict[str, Setting]


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with decimal numbers: 1e-6 is one (as in YAML 1.2), dates, 1:30 (90 in YAML 1.1) and 010 (8) are texts."""


Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0].rpartition(":")[2] not in ("timestamp", "int", "float")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form in {
    "int": r"[-+]?(0|[1-9][\d_]*)$",
    "float": r"[-+]?((\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.inf)$|\.nan$",
}.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_form, re.IGNORECASE), list("-+.0123456789"))


def compose(text: str, name: str) -> yaml.Node | None:
    """The nodes of a YAML text of bounded size: aliases of aliases can represent more values than fit in memory.

    Raises:
        OptionError: It is not valid, a value is not one of its tag (`!!int ten`), it has more than `MAX_VALUES` values
            with aliases expanded, or it is nested too deeply, for example by an alias of itself.
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
        if root is not None:
            loader.construct_document(root)  # raises for tags and keys that it does not know
        return root
    except RecursionError as error:
        raise OptionError(f"{name}: YAML must not be nested deeply or contain an alias of itself; it does") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise OptionError(f"{name}: line {line} must be valid YAML; {error.problem}") from error
    except yaml.YAMLError as error:
        raise OptionError(f"{name}: a recipe must be valid YAML; {error}") from error
    except OptionError:
        raise
    except (ValueError, LookupError, AttributeError) as error:  # of Python, for a value that its tag cannot have
        raise OptionError(f"{name}: each value must be one of its YAML tag; {error}") from error


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
    if root is not None:
        put_all(settings, hints, root)


def read_word(name: str, text: str, settings: Settings, hints: Mapping[str, Any]) -> None:
    """Adds an option of the command line to the settings."""
    key = yaml.ScalarNode(Loader.DEFAULT_SCALAR_TAG, name, yaml.Mark(COMMAND_LINE, 0, 0, 0, None, None))
    tag = "tag:yaml.org,2002:null" if text == "null" else Loader.DEFAULT_SCALAR_TAG
    put(settings, hints, key, yaml.ScalarNode(tag, text))


def put_all(settings: Settings, hints: Mapping[str, Any], node: yaml.MappingNode, prefix: str = "") -> Settings:
    """Sets the options of a mapping, with those that it merges (`<<`)."""
    Loader("").flatten_mapping(node)
    for key, value in node.value:
        put(settings, hints, key, value, prefix)
    return settings


def put(settings: Settings, hints: Mapping[str, Any], key: yaml.Node, node: yaml.Node, prefix: str = "") -> None:
    """Sets an option; `loss.beta` is an entry of the mapping `loss`."""
    name, nested, rest = key.value.partition(".")
    if name not in hints:
        raise unknown(key.value, place_of(key), hints, prefix)
    group, kinds = group_of(hints[name]), kinds_of(hints[name])
    if nested and group is None and dict not in kinds:
        raise OptionError(f"{place_of(key)}: unknown option {prefix + key.value!r}; did you mean {prefix + name!r}?")
    before: Any = settings[name].value if name in settings else None
    if not (nested and group is not None):
        node = parsed(node, hints[name])
    if nested:
        others = before.value if isinstance(before, yaml.MappingNode) else []
        entry = yaml.ScalarNode(key.tag, rest, key.start_mark), node
        node = yaml.MappingNode(Loader.DEFAULT_MAPPING_TAG, [*others, entry])
    if group is not None and isinstance(node, yaml.MappingNode):
        node = put_all(before if isinstance(before, dict) else {}, hints_of(group), node, f"{prefix}{name}.")
    settings[name] = Setting(node, place_of(key))


def parsed(node: yaml.Node, hint: Any) -> yaml.Node:
    """The node; for a word of the command line, if its option is a list or a mapping, that of its YAML."""
    kinds = kinds_of(hint)
    may_be_yaml = group_of(hint) is not None or kinds.keys() & {tuple, dict}
    if node.start_mark is None and may_be_yaml and (str not in kinds or node.value[:1] + node.value[-1:] == "[]"):
        return compose(node.value, COMMAND_LINE) or yaml.ScalarNode("tag:yaml.org,2002:null", "")
    return node


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
        return kind(**{name: value_of(*settings[name], hints[name], name) for name in settings})
    except OptionError:
        raise
    except (TypeError, ValueError) as error:
        name = str(re.match(r"\w*", str(error))[0])  # type: ignore[index]  # errors begin with the option
        where = dict(places_of(settings)).get(name, place)
        raise OptionError(f"{where}{': ' if where else ''}{prefix if name in hints else ''}{error}") from error


def value_of(node: Any, place: str, hint: Any, name: str) -> Any:
    """The value that an option of this type has: a tuple for a list, a float for an int, a dataclass for settings."""
    kinds, group = kinds_of(hint), group_of(hint)
    if group is not None and isinstance(node, yaml.MappingNode):  # an entry of a list
        node = put_all({}, hints_of(group), node, f"{name}.")
    if isinstance(node, dict):
        return build(group, node, f"{name}.", place)
    if tuple in kinds and isinstance(node, yaml.SequenceNode):
        of_item = get_args(kinds[tuple])[0]
        names = (name if isinstance(item, yaml.MappingNode) else f"{name}: an entry" for item in node.value)
        return tuple(value_of(item, place, of_item, own) for item, own in zip(node.value, names, strict=True))
    if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null"):
        if Literal in kinds:
            return node.value  # "no" is a choice
        if kinds.keys() & {int, float, bool}:  # also as a text: '1e-6'
            node = yaml.ScalarNode(Loader("").resolve(yaml.ScalarNode, node.value, (True, False)), node.value)
    value = Loader("").construct_document(node)
    words = WORDS if group is None else {**WORDS, group: "a mapping of options"}
    if kinds.keys() <= words.keys() and type(value) not in kinds:
        raise TypeError(f"{name} must be {' or '.join(words[kind] for kind in kinds)}; got {value!r}")
    return float(value) if float in kinds and type(value) is int else value


_ELSEWHERE = {
    "max_steps": "steps", "lr": "learning_rate", "batch_size": "prompts_per_step", "output": "output_dir",
    "max_new_tokens": "max_completion_length", "response_length": "max_completion_length",
    "num_train_epochs": "steps", "train_batch_size": "prompts_per_step", "n": "num_generations",
    "num_return_sequences": "num_generations", "ppo_epochs": "num_iterations", "bf16": "mixed_precision",
    "fp16": "mixed_precision", "model_name_or_path": "model", "use_vllm": "rollout",
    "resume_from_checkpoint": "resume", "kl_coef": "loss.beta", "kl_loss_coef": "loss.beta",
    "cliprange": "loss.epsilon", "clip_ratio": "loss.epsilon", "clip_ratio_low": "loss.epsilon",
    "clip_ratio_high": "loss.epsilon_high", "clip_ratio_c": "loss.dual_clip", "loss_agg_mode": "loss.loss_type",
}  # fmt: skip
"""What other programs call an option."""


def unknown(name: str, place: str, hints: Mapping[str, Any], prefix: str = "") -> OptionError:
    """The error of an option that does not exist, with the nearest that does."""
    name, known = f"{prefix}{name}", list(names_of(hints, prefix))
    same = [option for option in known if option.rpartition(".")[2] == name.rpartition(".")[2]]
    elsewhere = _ELSEWHERE.get(name.removeprefix("loss."))
    near = [elsewhere] if elsewhere else same or get_close_matches(name, known, 1)
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
        if isinstance(setting.value, dict):
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
