"""YAML as configuration needs it: plain data only, every key once, numbers and booleans as YAML 1.2 spells them."""

import os
import re
from pathlib import Path
from typing import Any

import yaml

from pirl.errors import ConfigError

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
# PyYAML's own rules are those of YAML 1.1, for which 3e-4 is text, and off is false.
_IS_FLOAT = re.compile(r"([-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
_MOST_BITS = 4096  # of a number that is read at all: Python prints none of more than 4300 digits
_IS_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")


class _Loader(yaml.SafeLoader):
    """Refuses what has no place in a configuration: repeated keys, and references to other parts of the file."""

    # Repetition by reference is how a small file becomes an endless one.
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"references (*{event.anchor}) are not used here", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: Any) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > _MOST_BITS:
            raise yaml.MarkedYAMLError(problem="this number is too large", problem_mark=node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"{key!r} is no name of a field", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} stands here twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what one reader or another would not take for text."""


def _represent_text(dumper: Any, text: str) -> Any:
    # Line breaks of other scripts come back as other white space unless they are escaped, which double quotes do.
    style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, True))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag not in (_BOOL, _FLOAT)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(_BOOL, _IS_BOOL, list("tTfF"))
_Loader.add_implicit_resolver(_FLOAT, _IS_FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(_FLOAT, _IS_FLOAT, list("-+.0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """The data of a YAML text."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise ConfigError(f"{source or 'the value'} is no YAML that can be used: {place}: {error.problem}.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{source or 'the value'} is no YAML that can be used: {str(error).splitlines()[0]}."
        ) from error
    except RecursionError:
        raise ConfigError(f"{source or 'the value'} is no YAML that can be used: it is nested too deeply.") from None


def read_yaml(file: Path) -> Any:
    """The data of a YAML file."""
    try:
        path = Path(os.path.expanduser(file))
        if path.exists() and not path.is_file():
            raise ConfigError(f"{file} is not a regular file: save the configuration as one.")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} cannot be read as a configuration: it is not text in UTF-8.") from error
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # a path with a NUL in it is a wrong value
        raise ConfigError(f"{file} cannot be read as a configuration: {getattr(error, 'strerror', error)}.") from error
    return parse_yaml(text, str(file))


def dump_yaml(value: Any) -> str:
    """Plain data as a YAML text, in its order."""
    try:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    except yaml.YAMLError as error:
        raise ConfigError(f"this cannot be written as YAML: {error.args[-1]!r:.60}.") from error
