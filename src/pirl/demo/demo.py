"""The demo from beginning to end: its directory, its steps, its results and its report."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pirl.demo.display import Display
from pirl.demo.plan import DemoConfig
from pirl.demo.results import make_results, write_results
from pirl.demo.running import run_steps
from pirl.demo.steps import Stages, all_steps
from pirl.errors import DataError
from pirl.files import write_file, writing
from pirl.processes import LOCK_FILE, alone_in
from pirl.report.sections import differing_settings

SETTINGS_FILE = "demo.json"
# What a demo makes besides its runs and datasets.
_OWN = ("evaluations", "logs", "steps", "results.json", "report.html", SETTINGS_FILE)
_SHOWN_DIFFERENCES = 10


def run_demo(config: DemoConfig, *, overwrite: bool = False, stages: Stages | None = None) -> dict[str, Any]:
    """Do what is not done yet, in the directory of the demo; returns what is then in its results.json."""
    stages = config.plan.stages(config) if stages is None else stages
    with open_directory(config, overwrite=overwrite) as lock:
        steps = list(all_steps(stages))
        with Display(steps) as display:
            records = run_steps(stages, config.out, display, lock)
        results = make_results(config, {step.name: records.read(step).seconds for step in steps})
        write_results(config, results)
        return results


@contextmanager
def open_directory(config: DemoConfig, *, overwrite: bool) -> Iterator[int]:
    """Begin a demo or go on with one, alone. Refuses a directory with something else in it, or made in another way.

    Gives the lock that keeps others out. Steps inherit it, so that those that outlive a demo that was killed are waited
    for.
    """
    with ExitStack() as stack:
        with writing("the demo", config.out, "Choose another place (--out)."):
            _refuse_foreign(config.out)
            config.out.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(alone_in(config.out, "pirl demo", "steps"))
            if overwrite:
                _clear(config)
            _check_settings(config)
        yield lock


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file: choose a directory for the demo (--out).")
    entries = {entry.name for entry in out.iterdir()} if out.is_dir() else set()
    if entries - {LOCK_FILE} and SETTINGS_FILE not in entries:
        raise DataError(f"{out} is not empty and contains no demo: choose another directory (--out).")


def _clear(config: DemoConfig) -> None:
    """Delete what a demo makes, what says that it is one at last."""
    for name in (*config.plan.runs, *config.plan.datasets, *_OWN):
        path = config.out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _check_settings(config: DemoConfig) -> None:
    """What is there must have been made as it would be made now, or old and new results would be mixed."""
    file = config.out / SETTINGS_FILE
    here = json.loads(json.dumps(config.settings(), default=str))
    if not file.exists():
        write_file(file, json.dumps(here, indent=2) + "\n")
        return
    try:
        there = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is damaged ({error}): start over with --overwrite.") from error
    if differences := differing_settings({"there": there, "here": here}):
        lines = [f"  {name}: {old} there, {new} now" for name, (old, new) in differences.items()]
        more = len(lines) - _SHOWN_DIFFERENCES
        raise DataError(
            f"{config.out} contains a demo with other settings:\n"
            + "\n".join([*lines[:_SHOWN_DIFFERENCES], *([f"  and {more} more"] if more > 0 else [])])
            + "\nUse the same settings, start over with --overwrite, or choose another directory with --out."
        )
