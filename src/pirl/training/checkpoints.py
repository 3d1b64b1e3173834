"""Checkpoints of a run: in each the OpenPI policy, to deploy, and what else it takes to resume bit for bit."""

import concurrent.futures
import contextlib
import functools
import gc
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from pirl.config import CheckpointConfig
from pirl.envs.evaluation import versions
from pirl.errors import CheckpointError, in_one_line
from pirl.files import (
    DamageError,
    atomic_replace,
    check_files,
    read_record,
    remove_directory,
    restore_replaced,
    write_file,
    write_record,
)
from pirl.interop.checkpoint import DESCRIPTION_FILE, PolicyFiles, check_path, params_tree
from pirl.interop.norm_stats import NormStats
from pirl.interop.orbax import OrbaxArrays, open_arrays, open_params, quiet_orbax
from pirl.models import Pi0, get_parameters
from pirl.models.pi0 import nest
from pirl.run_files import TRAIN_STATE, RunFiles, saved_steps
from pirl.training.distributed import all_gather, barrier, broadcast, is_main_process
from pirl.training.sharding import named_leaves

RECORD_FILE = "state.json"
_PATIENCE = 7 * 24 * 3600  # seconds
_SMALL = 2.0**20  # bytes: larger files hold arrays
_logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and restores the checkpoints of a run.

    One is `STEP/` with the policy (`params/`, `assets/`, `pirl.json`), `train_state/` with those arrays of the state that
    are not in `params/`, and `state.json`. A save goes on in the background once the arrays are copied. The directory
    appears whole, in one rename; a killed process leaves only hidden remains, which the next one removes.
    Kept are the newest `max_to_keep`, and the policies of one in every `keep_period` and of the best by `best_metric`
    (the earliest of equals), which `checkpoints/best.json` names.
    """

    def __init__(self, run: RunFiles, config: CheckpointConfig) -> None:
        self._run, self._config = run, config
        check_path(run.checkpoints)
        if is_main_process():
            _sweep(run)
            held = sorted(entry.name for entry in run.checkpoints.glob("*") if entry.is_dir())
            if held and not saved_steps(run.checkpoints, resumable=True):
                raise CheckpointError(
                    f"{run.checkpoints} has no state to resume from, only {', '.join(held)}: put one back from a copy, "
                    f"or begin another run (--exp-name) from a policy of this one (--checkpoint {run.path}). To begin "
                    "this one again, and lose them, give --overwrite."
                )
            _record_best(run, config)
        barrier()  # nobody looks before it is swept
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet_orbax())
        # Orbax gives up after ten minutes, which a large state may need; of several hosts one may be gone.
        patience = _PATIENCE if jax.process_count() == 1 else None
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), timeout_secs=patience)
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._pending: concurrent.futures.Future[None] | None = None

    def save(
        self,
        step: int,
        state: PyTree,
        host: Mapping[str, Any],
        policy: Pi0,
        norm_stats: Mapping[str, Mapping[str, NormStats]],
        metadata: Mapping[str, Any],
        metrics: Mapping[str, float],
        progress: int | None = None,
    ) -> None:
        """Begin to save; the state may be donated afterwards. Raises what went wrong in the save before.

        `state` is a pytree of arrays; `host` (what else a resumed run needs) and `metadata` (what a reader wants to know)
        are JSON; `metrics` are those of this step. `progress` is what `keep_period` counts, by default steps.
        """
        self.wait()
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        known = {"step": step, "progress": step if progress is None else progress, "metrics": finite}
        params, leaves = get_parameters(policy), named_leaves(state)
        facts = {**known, "host": dict(host), "metadata": dict(metadata), "versions": versions()}
        record = make_record(leaves, params, facts)
        partial = self._run.checkpoints / f".{step}.partial"
        try:
            files = PolicyFiles(params, policy.config, norm_stats, {**record["metadata"], **known})
            if is_main_process():
                self._run.checkpoints.mkdir(parents=True, exist_ok=True)
                _sweep(self._run)
            barrier()  # nobody writes into what is not there
            own = nest({name: leaf for name, leaf in leaves.items() if record["leaves"][name][2] is None})
            items = {"params": ocp.args.PyTreeSave(params_tree(params)), TRAIN_STATE: ocp.args.PyTreeSave(own)}
            self._checkpointer.save(partial, args=ocp.args.Composite(**items))
        except Exception as error:
            raise self._failure(step, _reason(error)) from error

        def complete() -> None:
            files.write(partial)
            write_record(partial / RECORD_FILE, record)
            atomic_replace(partial, self._run.checkpoints / str(step))
            _record_best(self._run, self._config)
            make_room(self._run, self._config, step)

        def finish() -> None:
            reasons = all_gather(_attempt(step, self._checkpointer.wait_until_finished), "checkpoints")
            if not any(reasons):
                reasons = [broadcast(functools.partial(_attempt, step, complete), "checkpoints")]
            if reason := next(filter(None, reasons), None):
                # Not from the error: its frames hold Orbax's other failed writes, which complain when they go.
                raise self._failure(step, reason)

        self._pending = self._background.submit(finish)

    def wait(self) -> None:
        """Until the last save is complete. Raises what went wrong in it; older checkpoints are still there then."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])  # it is forgotten only when it has ended: this can be interrupted
            pending, self._pending = self._pending, None
            pending.result()

    def saved(self) -> list[int]:
        """The steps to resume from, as the first host sees them: others may see them a little later."""
        return broadcast(lambda: saved_steps(self._run.checkpoints, resumable=True))

    def saved_between_iterations(self) -> list[int]:
        """Of these, the steps that a run can go back to with other rollouts."""
        return broadcast(lambda: _between_iterations(self._run))

    def latest(self) -> int | None:
        return max(self.saved(), default=None)

    def restore(
        self, like: PyTree, step: int | None = None, *, among: Sequence[int] | None = None
    ) -> tuple[PyTree, dict[str, Any], int]:
        """The state of a step (by default the newest that is whole), laid out as `like` is, its `host`, and the step."""
        self.wait()
        failures = []
        for candidate in choose_steps(self._run, self.saved() if among is None else among, step):
            directory = self._run.checkpoints / str(candidate)
            found, damage = None, None
            try:
                # The contents are the same for all; it is enough that one host reads them twice.
                found = read_state(directory, like, contents_up_to=math.inf if is_main_process() else 0.0)
            except DamageError as error:
                damage = str(error)
            # What one host cannot see, none of them takes.
            damage = next(filter(None, all_gather(damage)), None)
            if found is not None and damage is None:
                return (*found, candidate)
            failures.append(f"{directory} is damaged: {damage}")
            if step is None:
                _logger.warning("%s. The checkpoint before it is taken, if there is one.", failures[-1])
        listing = "\n  ".join(failures)
        raise CheckpointError(
            f"no checkpoint could be restored:\n  {listing}\nPut one back from a copy, or begin another run (--exp-name) "
            f"from the policy of this one (--checkpoint {self._run.path}), or this one again (--overwrite)."
        )

    def discard_after(self, step: int) -> None:
        self.wait()
        if is_main_process():
            kept = {saved for saved in saved_steps(self._run.checkpoints) if saved <= step}
            _keep_only(self._run, resumable=kept, deployable=kept)
        barrier()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            _logger.error("%s", failure)  # what ended the run matters more
        finally:
            self._background.shutdown()
            with contextlib.suppress(Exception):  # of a save that failed, which was reported
                self._checkpointer.close()
            self._quiet.close()

    def _failure(self, step: int, reason: str) -> CheckpointError:
        with contextlib.suppress(Exception):  # the arrays may still be on their way, and fail for the same reason
            self._checkpointer.wait_until_finished()
        gc.collect()
        for partial in self._run.checkpoints.glob(f".{step}.partial*"):
            remove_directory(partial)
        saved = saved_steps(self._run.checkpoints, resumable=True)  # asking nobody: the others may not have failed
        older = f"The newest that is whole is that of step {saved[-1]}" if saved else "There is no other one"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written in {self._run.checkpoints}: {reason}. "
            f"{older}. See to the cause (a full disk, missing rights), then continue with --resume."
        )


def _attempt(step: int, work: Callable[[], None]) -> str | None:
    try:
        work()
        return None
    except Exception as error:
        _logger.debug("the checkpoint of step %d failed", step, exc_info=True)
        return _reason(error)


def _reason(error: Exception) -> str:
    """Of what TensorStore says only the system's error, such as a full disk."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else in_one_line(error)


# --- which are kept ---------------------------------------------------------------------------------------------------


def _record_best(run: RunFiles, config: CheckpointConfig) -> None:
    """Bring best.json up to date with the policies there are: the best one so far is always among them."""
    metric = config.best_metric
    metrics = {step: _described(run, step).get("metrics", {}) for step in saved_steps(run.checkpoints)}
    if values := {step: of_step[metric] for step, of_step in metrics.items() if metric in of_step}:
        sign = 1 if config.best_mode == "max" else -1
        best = max(values, key=lambda step: (sign * values[step], -step))
        found = {"step": best, "metric": metric, "value": values[best]}
        if found != _read_object(run.best_file):
            write_file(run.best_file, json.dumps(found) + "\n")


def make_room(run: RunFiles, config: CheckpointConfig, step: int) -> None:
    """Delete what need not be kept after the save of a step; later ones, from before a rollback, too."""
    steps = [saved for saved in saved_steps(run.checkpoints) if saved <= step]
    between = [saved for saved in _between_iterations(run) if saved <= step]
    periodic: set[int] = set()
    if period := config.keep_period:
        # The first of each period: where several updates are made at a time, progress does not meet its multiples.
        progress = [0, *(_described(run, saved).get("progress", saved) for saved in steps)]
        passed = [now // period > before // period for before, now in itertools.pairwise(progress)]
        periodic = set(itertools.compress(steps, passed))
    _keep_only(run, resumable={step, *between[-config.max_to_keep :]}, deployable=periodic)


def _keep_only(run: RunFiles, *, resumable: Set[int], deployable: Set[int]) -> None:
    """Delete all but these, of those to deploy, and of the best, what it takes to resume."""
    best = _read_object(run.best_file).get("step")
    for step in saved_steps(run.checkpoints):
        if step in resumable:
            continue
        directory, hidden = run.checkpoints / str(step), run.checkpoints / f".{step}.discarded"
        discarded = directory / TRAIN_STATE if step in deployable or step == best else directory
        if discarded.is_dir():
            discarded.rename(hidden)  # in one step, as it came
            shutil.rmtree(hidden, ignore_errors=True)
        (directory / RECORD_FILE).unlink(missing_ok=True)


def _between_iterations(run: RunFiles) -> list[int]:
    """Without the states of a run that was stopped within an iteration, which need the rollouts of that iteration."""
    return [
        step
        for step in saved_steps(run.checkpoints, resumable=True)
        if not _read_object(run.checkpoints / str(step) / RECORD_FILE).get("host", {}).get("within_iteration")
    ]


def _sweep(run: RunFiles) -> None:
    """Remove what a process that died left behind, and put back what it had only put aside."""
    for entry in run.checkpoints.glob(".*.replaced"):
        restore_replaced(entry.with_name(entry.name.removeprefix(".").removesuffix(".replaced")))
    for entry in run.checkpoints.glob(".*"):
        entry.unlink() if entry.is_file() else shutil.rmtree(entry, ignore_errors=True)


def _described(run: RunFiles, step: int) -> dict[str, Any]:
    """What pirl.json says."""
    return _read_object(run.checkpoints / str(step) / DESCRIPTION_FILE)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


# --- reading a state --------------------------------------------------------------------------------------------------


def choose_steps(run: RunFiles, saved: Sequence[int], step: int | None) -> list[int]:
    """Of the saved steps the one that is wanted, or all, the newest first; an error if there is none."""
    if step is None and saved:
        return sorted(saved, reverse=True)
    if step is not None and step in saved:
        return [step]
    of_step = "" if step is None else f" of step {step}"
    there = f"; it has {', '.join(map(str, saved))}" if saved else ""
    raise CheckpointError(f"{run.checkpoints} has no state{of_step}{there}.")


def read_state(directory: Path, like: PyTree, *, contents_up_to: float = math.inf) -> tuple[PyTree, dict[str, Any]]:
    """The state in a checkpoint, laid out as `like` is, and its `host`; `contents_up_to` as of `check_files`."""
    record = read_record(directory / RECORD_FILE)
    check_files(directory, record, contents_up_to=contents_up_to)
    wanted = named_leaves(like)
    check_leaves(directory, record, wanted)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        arrays = open_state_arrays(directory, record)
        leaves = [arrays.read(name, leaf, leaf.sharding or default) for name, leaf in wanted.items()]
    except CheckpointError as error:
        raise DamageError(in_one_line(error)) from error
    return jax.tree.unflatten(jax.tree.structure(like), leaves), record["host"]


def open_state_arrays(directory: Path, record: Mapping[str, Any]) -> OrbaxArrays:
    """The arrays of the state in a checkpoint: its own, and those that are the policy's."""
    try:
        own, params = open_arrays(directory / TRAIN_STATE), open_params(directory / "params")[0]
        leaves = record["leaves"].items()
        return OrbaxArrays({name: own[name] if path is None else params[path] for name, (_, _, path) in leaves})
    except (CheckpointError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamageError(in_one_line(error)) from error


def newest_whole(run: RunFiles) -> Path | None:
    """The newest checkpoint to resume from, as far as can be told without reading its arrays."""
    for step in reversed(saved_steps(run.checkpoints, resumable=True)):
        directory = run.checkpoints / str(step)
        with contextlib.suppress(DamageError):
            check_files(directory, read_record(directory / RECORD_FILE), contents_up_to=_SMALL)
            return directory
    return None


def make_record(leaves: Mapping[str, Any], params: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The record as it will be read again, taken now: what it was made from changes while it is being written.

    Of each leaf it has the shape, the dtype, and, where it is the very array of a parameter, which one.
    """
    paths = {id(leaf): path for path, leaf in params.items()}
    described = {name: (leaf.shape, str(leaf.dtype), paths.get(id(leaf))) for name, leaf in leaves.items()}
    try:
        return dict(json.loads(json.dumps({**facts, "leaves": described})))
    except TypeError as error:
        raise CheckpointError(f"the host's state and the metadata cannot be written as JSON: {error}.") from error


def check_leaves(directory: Path, record: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raise with every leaf that is missing, extra, or of another shape or dtype."""
    saved = {name: f"{dtype}{shape}" for name, (shape, dtype, _) in record["leaves"].items()}
    wanted = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}
    differing = [name for name in sorted(saved.keys() | wanted.keys()) if saved.get(name) != wanted.get(name)]
    if differing:
        listing = "".join(
            f"\n  {name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in the run"
            for name in differing
        )
        raise CheckpointError(
            f"the checkpoint {directory} is not of this learner; {len(differing)} of its arrays differ:{listing}"
        )
