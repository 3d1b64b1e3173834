"""The documentation site: whole, in step with the commands, read without a network (`make docs` installs its tools)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

exceptions = pytest.importorskip("mkdocs.exceptions", reason="the site's tools are not installed: make docs")

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
docs_site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs_site)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("page.html", '<script src="https://elsewhere.org/a.js"></script>'),
        ("page.html", '<link rel="stylesheet" href="//elsewhere.org/a.css">'),
        ("page.html", '<link rel="preconnect" href="https://elsewhere.org">'),
        ("page.html", '<p style="background: url(https://elsewhere.org/a.png)">'),
        ("deep/style.css", '@import "https://elsewhere.org/a.css";'),
        ("deep/style.css", "@font-face { src: url(https://elsewhere.org/a.woff2) }"),
    ],
)
def test_a_page_that_would_load_from_elsewhere_is_refused(name, content, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(exceptions.PluginError, match=f"{name}: .*elsewhere.org"):
        docs_site.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))


def test_a_page_may_link_to_elsewhere_and_load_its_own(tmp_path):
    own = '<a href="https://elsewhere.org"></a><img src="images/a.svg"><link rel="canonical" href="https://here.org">'
    (tmp_path / "page.html").write_text(own)
    docs_site.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))


def test_links_between_files_become_links_between_pages():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/fit.md"))
    text = "[a](../data.md#robots) [b](../../benchmarks/README.md) [c](../../README.md) [d](https://x.org/README.md)"
    there = "[a](../data.md#robots) [b](../benchmarks.md) [c](../index.md) [d](https://x.org/README.md)"
    assert docs_site.on_page_markdown(text, page, None, None) == there
    page.file.src_uri = "index.md"
    assert docs_site.on_page_markdown("![p](docs/images/report.png)", page, None, None) == "![p](images/report.png)"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_can_be_searched(tmp_path):
    from pirl.cli.main import COMMANDS

    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    pages = {file.relative_to(tmp_path / "site").as_posix() for file in (tmp_path / "site").rglob("*.html")}
    assert {f"commands/{name}.html" for name in COMMANDS} <= pages
    script = (tmp_path / "site" / "search" / "search_index.js").read_text()
    index = json.loads(script.removeprefix("var __index = "))
    found = {entry["location"].split("#")[0] for entry in index["docs"] if "success_rate_target" in entry["text"]}
    assert "ript.html" in found
