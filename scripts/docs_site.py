"""The hook of `make docs`: pages made from what they describe, links that leave docs/, and no request to anyone."""

import contextlib
import io
import os
import posixpath
import re
import textwrap
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Files beside the sources, and where the site has them.
PLACES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE",
    "benchmarks/README.md": "benchmarks.md",
    "examples/cluster/README.md": "examples/cluster.md",
    "examples/custom_env/README.md": "examples/custom_env.md",
    "examples/custom_env/point_reach.py": "examples/point_reach.py",
    "examples/custom_env/point_reach_adapter.py": "examples/point_reach_adapter.py",
}
# Where a command is explained, if the page is not called like it.
MANUAL = {"train": "training", "eval": "environments", "collect": "environments", "envs": "environments"}
MANUAL |= {"convert": "checkpoints", "configs": "training", "demo": "training", "plan": "scale"}
# Rooms that are not for users: commands have pages of their own, and the demos are commands.
NOT_IN_REFERENCE = {"cli", "demo"}
# Of the help, in characters; as much as a page shows without scrolling.
WIDTH = 86
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
LOADS = {"script", "img", "iframe", "source", "video", "audio", "embed"}


def on_config(config: Any) -> Any:
    """Put the generated pages into the navigation."""
    commands = [f"commands/{name}.md" for name in _commands()]
    reference = [f"api/{room}.md" for room in _rooms()]
    filled = {"Commands": ["commands/index.md", *commands], "Reference": ["api/index.md", *reference]}
    config.nav = [{title: filled.get(title, pages) for title, pages in entry.items()} for entry in config.nav]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    for origin, place in PLACES.items():
        files.append(File.generated(config, place, content=(ROOT / origin).read_text()))
    for place, content in [*_command_pages(), *_reference_pages()]:
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links between files of the project be links between pages."""
    here = page.file.src_uri
    origins = {place: origin for origin, place in PLACES.items()}
    folder = posixpath.dirname(origins.get(here, f"docs/{here}"))

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        place = PLACES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if place is None or not (ROOT / target).exists():
            return match[1]
        return posixpath.relpath(place, posixpath.dirname(here) or ".")

    return LINK.sub(lead, markdown)


def on_post_build(config: Any) -> None:
    """Refuse a site whose pages would load anything from elsewhere."""
    site = Path(config.site_dir)
    found = {
        f"{file.relative_to(site)}: {address}"
        for pattern, read in (("*.html", _loaded_by_page), ("*.css", _loaded_by_style))
        for file in site.rglob(pattern)
        for address in read(file.read_text())
    }
    if found:
        raise PluginError("pages would load from elsewhere:\n" + "\n".join(sorted(found)))


# --- commands ----------------------------------------------------------------------------------------------------------


def _commands() -> dict[str, list[list[str]]]:
    """By command, the words of each call that its page shows the help of."""
    from pirl.cli.main import COMMANDS

    pages = {}
    for name, command in COMMANDS.items():
        below = [[name, verb] for verb in command] if isinstance(command, dict) else []
        pages[name] = [[name], *below]
    pages["train"].append(["train", "demo"])
    return pages


def _command_pages() -> Iterator[tuple[str, str]]:
    yield "commands/index.md", f"# Commands\n\nEach command has a page, generated from its `--help`.\n\n{_help([])}"
    for name, calls in _commands().items():
        page = MANUAL.get(name, name)
        explained = (ROOT / "docs" / f"{page}.md").exists()
        link = f"Manual: [{page}](../{page}.md).\n\n" if explained else ""
        first, *more = calls
        sections = [f"# pirl {name}\n\n{link}{_help(first)}"]
        sections += [f"## pirl {' '.join(words)}\n\n{_help(words)}" for words in more]
        yield f"commands/{name}.md", "\n".join(sections)


def _help(words: list[str]) -> str:
    from pirl.cli.main import main

    os.environ["COLUMNS"] = str(WIDTH)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    lines = text.getvalue().rstrip().splitlines()
    wrapped = "\n".join(textwrap.fill(line, WIDTH) if len(line) > WIDTH else line for line in lines)
    return f"```text\n$ {' '.join(['pirl', *words, '--help'])}\n{wrapped}\n```\n"


# --- reference ---------------------------------------------------------------------------------------------------------


def _rooms() -> list[str]:
    rooms = (file.parent.name for file in (ROOT / "src/pirl").glob("*/__init__.py"))
    return sorted(set(rooms) - NOT_IN_REFERENCE)


def _reference_pages() -> Iterator[tuple[str, str]]:
    lines = ["# Reference", "", "Every public name by package, generated from the docstrings.", ""]
    for room in _rooms():
        modules = sorted((ROOT / "src/pirl" / room).rglob("*.py"))
        opening = _opening(ROOT / "src/pirl" / room / "__init__.py")
        lines.append(f"- [`pirl.{room}`]({room}.md): {opening}")
        names = [
            ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
            for file in modules
            if not file.name.startswith("_")
        ]
        blocks = "\n\n".join(f"::: {name}" for name in names)
        yield f"api/{room}.md", f"# pirl.{room}\n\n{opening}\n\n{blocks}\n"
    yield "api/index.md", "\n".join(lines) + "\n"


def _opening(file: Path) -> str:
    match = re.match(r'"""(.*?)(?:"""|\n\n)', file.read_text(), flags=re.DOTALL)
    assert match is not None, file
    return match[1].replace("\n", " ")


# --- no request to anyone ----------------------------------------------------------------------------------------------


class _Loads(HTMLParser):
    """Collects what a browser fetches for a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Look at one element."""
        given = {name: value or "" for name, value in attributes}
        address = given.get("src", "") if tag in LOADS else ""
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            address = given.get("href", "")
        self.addresses += [address, *_addresses_in_style(given.get("style", ""))]


def _loaded_by_page(text: str) -> list[str]:
    page = _Loads()
    page.feed(text)
    return [address for address in page.addresses if re.match(r"(https?:)?//", address)]


def _loaded_by_style(text: str) -> list[str]:
    return [address for address in _addresses_in_style(text) if re.match(r"(https?:)?//", address)]


def _addresses_in_style(text: str) -> list[str]:
    return re.findall(r"(?:url\(|@import\s+)[\"']?([^\"')\s;]+)", text)
