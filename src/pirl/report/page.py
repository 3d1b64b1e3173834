"""The page that holds a report together, and the few kinds of things that stand on it. Text given here is escaped."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pirl.report.style import SCRIPT, STYLE
from pirl.report.svg import colour_class

_ICON = "data:image/svg+xml,%3Csvg viewBox='0 0 1 1'/%3E"


@dataclass(frozen=True)
class Section:
    """A part of the page. `body` is HTML, made by the functions of this package; the rest is text."""

    title: str
    body: str
    introduction: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers stand to the right, so that their digits line up. What is short stays in a line."""

    title: str
    numeric: bool = False
    short: bool = False


def build_page(title: str, lead: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """The whole report: the result in one sentence, then the sections. It asks nothing of the network."""
    small = f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="{_ICON}"><style>{STYLE}</style></head>\n<body><main>'
        f'<header>{small}<h1>{escape(title)}</h1><p class="lead">{_keep_rates_whole(escape(lead))}</p></header>\n'
        f"{''.join(_section(section) for section in sections)}</main>\n<script>{SCRIPT}</script></body></html>\n"
    )


def figure(body: str, caption: str, title: str = "") -> str:
    """Something to look at, its name above and how to read it below."""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{heading}{body}{below}</figure>"


def plot(chart: str) -> str:
    """Room for the labels around a chart."""
    return f'<div class="plot">{chart}</div>'


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table; on a narrow screen every row becomes a card. A row begins with its name; empty cells are dashes.

    A column of which nothing is known is left out.
    """
    known = [index for index in range(len(columns)) if index == 0 or any(row[index] for row in rows)]
    columns, rows = [columns[index] for index in known], [[row[index] for index in known] for row in rows]
    head = "".join(f'<th scope="col"{_kind(column)}>{escape(column.title)}</th>' for column in columns)
    body = "".join(f"<tr>{_cells(columns, row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def legend(names: Sequence[tuple[str, int]], note: str = "", signs: Sequence[tuple[str, str]] = ()) -> str:
    """Which colour is what; and what signs mean, each by its class."""
    entries = "".join(f'<li><i class="{colour_class(colour)}"></i>{escape(name)}</li>' for name, colour in names)
    entries += "".join(f'<li class="note"><i class="{sign}"></i>{escape(word)}</li>' for sign, word in signs)
    note = f'<li class="note">{escape(note)}</li>' if note else ""
    return f'<ul class="legend">{entries}{note}</ul>'


def code_block(text: str) -> str:
    """Text to copy exactly; the page's script adds a button for it."""
    return f'<div class="code"><pre><code>{escape(text)}</code></pre></div>'


def _section(section: Section) -> str:
    introduction = f"<p>{escape(section.introduction)}</p>" if section.introduction else ""
    return f"<section><h2>{escape(section.title)}</h2>{introduction}{section.body}</section>\n"


def _keep_rates_whole(text: str) -> str:
    """No line ends inside of 81.5 % [75.5, 86.3]."""
    return re.sub(r"\S+ % \[[^]<]*\]", r'<span class="number">\g<0></span>', text)


def _kind(column: Column) -> str:
    return ' class="number"' if column.numeric else ' class="short"' if column.short else ""


def _cells(columns: Sequence[Column], row: Sequence[str]) -> str:
    first, *rest = row
    cells = [f'<th scope="row">{escape(first)}</th>']
    for column, cell in zip(columns[1:], rest, strict=True):
        empty = "" if cell else " data-empty"
        label = escape(column.title)
        cells.append(f'<td{_kind(column)} data-label="{label}"{empty}>{escape(cell) or "–"}</td>')
    return "".join(cells)
