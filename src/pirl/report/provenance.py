"""Where the numbers come from: the commands, the differences of the configurations, versions, machine and time."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from pirl.processes import usable_cores
from pirl.report.page import Column, Section, code_block, figure, table


def describe_machine() -> dict[str, str]:
    """What the times depend on."""
    return {"System": f"{platform.system()} {platform.machine()}", "Cores": str(usable_cores())}


def differing_settings(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """The fields, by dotted name, in which configurations differ, with the value in each; empty where it has none."""
    flat = [_flatten(config) for config in configs.values()]
    names = dict.fromkeys(name for config in flat for name in config)
    values = {name: [config.get(name, "") for config in flat] for name in names}
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def provenance_section(
    *,
    commands: Sequence[str],
    facts: Mapping[str, str],
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    title: str = "How to reproduce this",
    introduction: str = "",
) -> Section:
    """The commands to copy, the fields in which the runs differ, and facts: versions, machine, date, durations."""
    body = code_block("\n".join(commands))
    if configs and (differences := differing_settings(configs)):
        columns = [Column("Setting"), *(Column(name) for name in configs)]
        rows = [(name, *values) for name, values in differences.items()]
        body += figure(table(columns, rows), "Only settings that differ between these runs.", "Settings")
    if facts:
        body += table([Column("Circumstances"), Column("")], list(facts.items()))
    return Section(title, body, introduction)


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {
            name: text
            for key, inner in value.items()
            for name, text in _flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: "none" if value is None else str(value)}
