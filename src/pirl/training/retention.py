"""Which checkpoints of a run are kept: the newest, the periodic ones, and the best."""

import contextlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from pirl.config import CheckpointConfig
from pirl.errors import CheckpointError
from pirl.files import restore_replaced, write_file
from pirl.interop.checkpoint import DESCRIPTION_FILE
from pirl.run_files import saved_steps
from pirl.training.records import FILE_NAME, DamageError, read_record
from pirl.training.run import RunDirectory


def record_best(run: RunDirectory, config: CheckpointConfig) -> None:
    """Bring best.json up to date with the states there are: a process may have died before it got to it."""
    metric = config.best_metric
    if metric is None:
        return
    best = _read_best(run)
    values = {best["step"]: best["value"]} if best.get("metric") == metric else {}
    for step in saved_steps(run.states):
        with contextlib.suppress(DamageError):
            metrics = read_record(run.states / str(step))["metrics"]
            if metric in metrics and (run.policies / str(step)).is_dir():
                values[step] = metrics[metric]
    if values:
        sign = 1 if config.best_mode == "max" else -1
        step = max(values, key=lambda step: (sign * values[step], -step))
        now = {"step": step, "metric": metric, "value": values[step]}
        if now != best:
            write_file(run.best_file, json.dumps(now) + "\n")


def make_room(run: RunDirectory, config: CheckpointConfig, step: int) -> None:
    """Delete what need not be kept after the save of a step.

    What lies beyond that step goes too: it is from before the run was taken back to an earlier checkpoint, and would be
    taken for the newest.
    """
    states, policies = saved_steps(run.states), saved_steps(run.policies)
    # States within an iteration are for a run that was stopped there; those that it could go back to are not theirs.
    between = [saved for saved in states if saved <= step and not is_within_iteration(run, saved)]
    kept = {step, *between[-config.max_to_keep :]}
    if period := config.keep_period:
        # The first of each period: where several updates are made at a time, the clock does not meet its multiples.
        every = sorted({saved for saved in (*states, *policies) if saved <= step})
        clocks = [0, *(_clock(run, saved) for saved in every)]
        passed = [now // period > before // period for before, now in itertools.pairwise(clocks)]
        kept |= set(itertools.compress(every, passed))
    # The state before its policy, so that none is ever without.
    for saved in states:
        if saved not in kept:
            _discard(run.states / str(saved))
    for saved in policies:
        if saved not in kept and saved != _read_best(run).get("step"):
            _discard(run.policies / str(saved))


def is_within_iteration(run: RunDirectory, step: int) -> bool:
    """Whether a state needs the attempts that its updates were being made from; it was saved because the run stopped."""
    host = _read_object(run.states / str(step) / FILE_NAME).get("host")
    return isinstance(host, dict) and host.get("within_iteration") is True


def discard_after(run: RunDirectory, step: int) -> None:
    """Delete the states, and the policies but for the best, of all later steps."""
    for saved in saved_steps(run.states):
        if saved > step:
            _discard(run.states / str(saved))
    for saved in saved_steps(run.policies):
        if saved > step and saved != _read_best(run).get("step"):
            _discard(run.policies / str(saved))


def sweep(run: RunDirectory) -> None:
    """Remove what a process that died left behind, and put back what it had only put aside."""
    for entry in [*run.states.glob(".*.replaced"), *run.policies.glob(".*.replaced")]:
        restore_replaced(entry.with_name(entry.name.removeprefix(".").removesuffix(".replaced")))
    for entry in run.states.glob(".*.partial"):
        discard_early(run, entry.name.removeprefix(".").removesuffix(".partial"))
    for entry in [*run.states.glob(".*"), *run.policies.glob(".*")]:
        shutil.rmtree(entry, ignore_errors=True)


def discard_early(run: RunDirectory, step: str) -> None:
    """Delete the first policy of a run if its state did not follow: so where there are policies, states were, too."""
    if not saved_steps(run.states) and (run.policies / step).is_dir():
        _discard(run.policies / step)


def refuse_without_states(run: RunDirectory) -> None:
    """Raise if there is nothing to go on from where there was once: a run that begins again takes the place of all."""
    if not saved_steps(run.states) and (policies := saved_steps(run.policies)):
        raise CheckpointError(
            f"{run.policies} has policies up to step {policies[-1]}, but {run.states} has no state to resume from: put "
            "one back from a copy, or begin another run (--exp-name) from the policy of this one (--checkpoint "
            f"{run.path}). To begin this one again, and lose them, give --overwrite."
        )


def _discard(directory: Path) -> None:
    """Delete a directory that is at no time seen half deleted."""
    hidden = directory.with_name(f".{directory.name}.discarded")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _clock(run: RunDirectory, step: int) -> int:
    """What the clock of checkpoints said at a step; earlier versions did not write it down."""
    files = (run.policies / str(step) / DESCRIPTION_FILE, run.states / str(step) / FILE_NAME)
    return next((about["clock"] for about in map(_read_object, files) if "clock" in about), step)


def _read_best(run: RunDirectory) -> dict[str, Any]:
    return _read_object(run.best_file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return {}
