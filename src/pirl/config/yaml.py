"""YAML as configurations use it: plain data with the numbers and booleans of YAML 1.2, and every key once."""

import os
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from pirl.errors import ConfigError, UserError

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"([-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")


class _Loader(yaml.SafeLoader):
    """Plain data with the numbers and booleans of YAML 1.2; every key once; no references, which can make it endless."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"references (*{event.anchor}) are not supported", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"{key!r} is not the name of a field", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key!r}", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that some reader would not take for text."""


def _represent_text(dumper: Any, text: str) -> Any:
    # Only double quotes preserve the line breaks of other scripts.
    style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, True))


def parse_yaml(text: str, source: str) -> Any:
    """The data of a YAML text."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = f"{error.context} {error.problem}" if str(error.problem).startswith("but") else error.problem
        raise ConfigError(f"{source}{place}: {problem}.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source} is not valid YAML: {str(error).splitlines()[0]}.") from error
    except RecursionError:
        raise ConfigError(f"{source} is not valid YAML: it is nested too deeply.") from None


def read_yaml(file: Path) -> Any:
    """The data of a YAML file."""
    problem = "it is not text in UTF-8"
    try:
        path = Path(os.path.expanduser(file))
        if path.exists() and not path.is_file():
            raise ConfigError(f"{file} is not a regular file: save the configuration as one.")
        return parse_yaml(path.read_text(encoding="utf-8"), str(file))
    except UserError:
        raise
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        if not isinstance(error, UnicodeDecodeError):
            problem = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{file} cannot be read as a configuration: {problem}.") from error


def dump_yaml(value: Any) -> str:
    """Plain data as a YAML text, in its order."""
    try:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    except yaml.YAMLError as error:
        raise ConfigError(f"this cannot be written as YAML: {error.args[-1]!r:.60}.") from error
