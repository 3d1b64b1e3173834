"""Checkpoints of a run: the full state, to resume bit for bit, and the OpenPI policy, to deploy; which are kept."""

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
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from pirl.config import CheckpointConfig
from pirl.envs.evaluation import versions
from pirl.errors import CheckpointError, in_one_line
from pirl.files import atomic_replace, remove_directory, restore_replaced, write_file
from pirl.interop.checkpoint import DESCRIPTION_FILE, CheckpointWriter, check_target
from pirl.interop.norm_stats import NormStats
from pirl.interop.orbax import quiet_orbax
from pirl.models import Pi0, get_parameters
from pirl.models.pi0 import nest
from pirl.run_files import RunFiles, saved_steps
from pirl.training.distributed import all_gather, barrier, broadcast, is_main_process
from pirl.training.sharding import named_leaves

FILE_NAME = "state.json"
ARRAYS = "arrays"
_PATIENCE = 7 * 24 * 3600  # seconds
_logger = logging.getLogger(__name__)


class DamageError(Exception):
    """Why a saved state cannot be read."""


class Checkpoints:
    """Saves and restores the state of a run, and the policy with it.

    A save goes on in the background once the arrays are copied. The policy appears first, then the state, each in one
    rename: a state always has its policy, and a killed process leaves only hidden remains, which the next one removes.
    Kept are the newest `max_to_keep` steps, one of every `keep_period`, and the policy that was best by `best_metric`
    (the earliest of equals), which `checkpoints/best.json` names.
    """

    def __init__(self, run: RunFiles, config: CheckpointConfig) -> None:
        self._run, self._config = run, config
        if is_main_process():
            _sweep(run)
            if not saved_steps(run.states) and (policies := saved_steps(run.policies)):
                raise CheckpointError(
                    f"{run.policies} has policies up to step {policies[-1]}, but {run.states} has no state to resume "
                    "from: put one back from a copy, or begin another run (--exp-name) from the policy of this one "
                    f"(--checkpoint {run.path}). To begin this one again, and lose them, give --overwrite."
                )
            _record_best(run, config)
        barrier()  # nobody looks before it is swept
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet_orbax())
        # Orbax gives up after ten minutes, which a large state may need; of several hosts one may be gone.
        patience = _PATIENCE if jax.process_count() == 1 else None
        self._checkpointer, self._policy_checkpointer = (
            ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=patience) for _ in range(2)
        )
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
        leaves = named_leaves(state)
        record = make_record(leaves, {**known, "host": dict(host), "metadata": dict(metadata), "versions": versions()})
        partials = [directory / f".{step}.partial" for directory in (self._run.states, self._run.policies)]
        try:
            writer = CheckpointWriter(
                get_parameters(policy), policy.config, norm_stats=norm_stats, metadata={**record["metadata"], **known}
            )
            if is_main_process():
                check_target(self._run.policies / str(step), overwrite=True)
                for partial in partials:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
            barrier()  # nobody writes into what is not there
            self._checkpointer.save(partials[0] / ARRAYS, args=ocp.args.PyTreeSave(nest(leaves)))
            writer.save_arrays(partials[1], self._policy_checkpointer)
        except Exception as error:
            raise self._failure(step, partials, _reason(error)) from error

        def complete_policy() -> None:
            writer.complete(partials[1])
            atomic_replace(partials[1], self._run.policies / str(step))

        def complete_state() -> None:
            write_record(partials[0], record)
            atomic_replace(partials[0], self._run.states / str(step))
            _record_best(self._run, self._config)
            make_room(self._run, self._config, step)

        parts = ((self._policy_checkpointer, complete_policy), (self._checkpointer, complete_state))

        def finish() -> None:
            for checkpointer, complete in parts:
                reasons = all_gather(_attempt(step, checkpointer.wait_until_finished), "checkpoints")
                if not any(reasons):
                    reasons = [broadcast(functools.partial(_attempt, step, complete), "checkpoints")]
                if reason := next(filter(None, reasons), None):
                    # Not from the error: its frames hold Orbax's other failed writes, which complain when they go.
                    raise self._failure(step, partials, reason)

        self._pending = self._background.submit(finish)

    def wait(self) -> None:
        """Until the last save is complete. Raises what went wrong in it; older checkpoints are still there then."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])  # it is forgotten only when it has ended: this can be interrupted
            pending, self._pending = self._pending, None
            pending.result()

    def saved(self) -> list[int]:
        """The steps there are full states of, as the first host sees them: others may see them a little later."""
        return broadcast(lambda: saved_steps(self._run.states))

    def saved_between_iterations(self) -> list[int]:
        """Of these, the steps that a run can go back to with other rollouts."""
        return broadcast(lambda: _between_iterations(self._run, saved_steps(self._run.states)))

    def latest(self) -> int | None:
        return max(self.saved(), default=None)

    def restore(
        self, like: PyTree, step: int | None = None, *, among: Sequence[int] | None = None
    ) -> tuple[PyTree, dict[str, Any], int]:
        """The state of a step (by default the newest that is whole), laid out as `like` is, its `host`, and the step."""
        self.wait()
        failures = []
        for candidate in choose_steps(self._run.states, self.saved() if among is None else among, step):
            directory = self._run.states / str(candidate)
            try:
                self._check_on_all_hosts(directory)
                return (*read_state(directory, like, self._checkpointer, contents=False), candidate)
            except DamageError as damage:
                failures.append(f"{directory} is damaged: {damage}")
                if step is None:
                    _logger.warning("%s. The checkpoint before it is taken, if there is one.", failures[-1])
        listing = "".join(f"\n  {failure}" for failure in failures)
        raise CheckpointError(
            f"no checkpoint could be restored:{listing}\nPut one back from a copy, or begin another run (--exp-name) "
            f"from the policy of this one (--checkpoint {self._run.path}), or this one again (--overwrite)."
        )

    def _check_on_all_hosts(self, directory: Path) -> None:
        """Raise a DamageError on all hosts if one of them cannot see all of it."""
        damage = None
        try:
            # Its contents are the same for all; it is enough that one reads them twice.
            check_files(directory, read_record(directory), contents=is_main_process())
        except DamageError as error:
            damage = str(error)
        if found := next(filter(None, all_gather(damage)), None):
            raise DamageError(found)

    def discard_after(self, step: int) -> None:
        self.wait()
        if is_main_process():
            _keep_only(self._run, lambda saved: saved <= step)
        barrier()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()
            for checkpointer in (self._checkpointer, self._policy_checkpointer):
                with contextlib.suppress(Exception):  # of a save that failed, which was reported
                    checkpointer.close()
            self._quiet.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _logger.error("%s", failure)  # what ended the run matters more

    def _failure(self, step: int, partials: Sequence[Path], reason: str) -> CheckpointError:
        for checkpointer in (self._checkpointer, self._policy_checkpointer):
            with contextlib.suppress(Exception):  # the arrays may still be on their way, and fail for the same reason
                checkpointer.wait_until_finished()
        gc.collect()
        for partial in partials:
            remove_directory(partial)
        if is_main_process():
            with contextlib.suppress(OSError):  # why the save failed matters more
                _discard_first_policy(self._run, str(step))
        saved = saved_steps(self._run.states)  # asking nobody: the others may not have failed
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
    """Bring best.json up to date with the states there are: a process may have died before it got to it."""
    metric, best = config.best_metric, _read_object(run.best_file)
    if metric is None:
        return
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


def make_room(run: RunFiles, config: CheckpointConfig, step: int) -> None:
    """Delete what need not be kept after the save of a step; later ones, from before a rollback, too."""
    states, policies = ([s for s in saved_steps(place) if s <= step] for place in (run.states, run.policies))
    kept = {step, *_between_iterations(run, states)[-config.max_to_keep :]}
    if period := config.keep_period:
        # The first of each period: where several updates are made at a time, progress does not meet its multiples.
        about = [_read_object(run.policies / str(saved) / DESCRIPTION_FILE) for saved in policies]
        progress = [0, *(found.get("progress", saved) for found, saved in zip(about, policies, strict=True))]
        passed = [now // period > before // period for before, now in itertools.pairwise(progress)]
        kept |= set(itertools.compress(policies, passed))
    _keep_only(run, lambda saved: saved in kept)


def _keep_only(run: RunFiles, is_kept: Callable[[int], bool]) -> None:
    """Delete all other states, then policies but for the best, so that no state is ever without its policy."""
    best = _read_object(run.best_file).get("step")
    for place in (run.states, run.policies):
        for step in saved_steps(place):
            if not is_kept(step) and not (place == run.policies and step == best):
                _discard(place / str(step))


def _between_iterations(run: RunFiles, steps: Sequence[int]) -> list[int]:
    """Without the states of a run that was stopped within an iteration, which need the rollouts of that iteration."""
    hosts = (_read_object(run.states / str(step) / FILE_NAME).get("host", {}) for step in steps)
    return [step for step, host in zip(steps, hosts, strict=True) if not host.get("within_iteration")]


def _sweep(run: RunFiles) -> None:
    """Remove what a process that died left behind, and put back what it had only put aside."""
    for entry in [*run.states.glob(".*.replaced"), *run.policies.glob(".*.replaced")]:
        restore_replaced(entry.with_name(entry.name.removeprefix(".").removesuffix(".replaced")))
    for entry in run.states.glob(".*.partial"):
        _discard_first_policy(run, entry.name.removeprefix(".").removesuffix(".partial"))
    for entry in [*run.states.glob(".*"), *run.policies.glob(".*")]:
        shutil.rmtree(entry, ignore_errors=True)


def _discard_first_policy(run: RunFiles, step: str) -> None:
    """Delete the first policy of a run if its state did not follow: so where there are policies, states were, too."""
    if not saved_steps(run.states) and (run.policies / step).is_dir():
        _discard(run.policies / step)


def _discard(directory: Path) -> None:
    hidden = directory.with_name(f".{directory.name}.discarded")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


# --- reading a state --------------------------------------------------------------------------------------------------


def choose_steps(states: Path, saved: Sequence[int], step: int | None) -> list[int]:
    """Of the saved steps the one that is wanted, or all, the newest first; an error if there is none."""
    if step is None and saved:
        return sorted(saved, reverse=True)
    if step is not None and step in saved:
        return [step]
    of_step, there = (
        "" if step is None else f" of step {step}",
        f"; it has {', '.join(map(str, saved))}" if saved else "",
    )
    raise CheckpointError(f"{states} has no state{of_step}{there}.")


def read_state(
    directory: Path, like: PyTree, checkpointer: Any, *, contents: bool = True
) -> tuple[PyTree, dict[str, Any]]:
    """The state in a directory, laid out as `like` is, and its `host`; looks for changed bytes first (`contents`)."""
    record = read_record(directory)
    check_files(directory, record, contents=contents)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default)
        for name, leaf in named_leaves(like).items()
    }
    check_leaves(directory, record, leaves)
    tree = nest(leaves)
    arguments = ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    try:
        arrays = named_leaves(checkpointer.restore(directory / ARRAYS, args=arguments))
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # TensorStore's arrive as bare Exceptions
        raise DamageError(in_one_line(error)) from error
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in leaves]), record["host"]


# --- the record beside the arrays -------------------------------------------------------------------------------------


def make_record(leaves: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The record as it will be read again, taken now: what it was made from changes while it is being written."""
    try:
        return dict(json.loads(json.dumps({**facts, "leaves": _describe(leaves)})))
    except TypeError as error:
        raise CheckpointError(f"the host's state and the metadata cannot be written as JSON: {error}.") from error


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write it with the sizes and checksums of all files: TensorStore does not notice changed bytes."""
    files = {str(file.relative_to(directory)): file for file in directory.rglob("*") if file.is_file()}
    sizes = [file.stat().st_size for file in files.values()]
    whole = {**record, "files": dict(zip(files, zip(sizes, _checksums(files.values()), strict=True), strict=True))}
    text = json.dumps(whole)
    with (directory / FILE_NAME).open("w", encoding="utf-8") as file:
        file.write(json.dumps({**whole, "checksum": zlib.crc32(text.encode())}))
        file.flush()
        os.fsync(file.fileno())  # older states are deleted next, and the power may fail


def read_record(directory: Path) -> dict[str, Any]:
    try:
        record = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
        checksum = record.pop("checksum")
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise DamageError(f"{FILE_NAME} cannot be read ({in_one_line(error)})") from error
    if checksum != zlib.crc32(json.dumps(record).encode()):
        raise DamageError(f"{FILE_NAME} does not hold what was written")
    return dict(record)


def check_files(directory: Path, record: Mapping[str, Any], *, contents: bool = True) -> None:
    """Raise a DamageError if a file is missing, of another size, or (by its `contents`, all of them) changed."""
    for name, (size, _) in record["files"].items():
        file = directory / name
        if not file.is_file():
            raise DamageError(f"{name} is missing")
        if (found := file.stat().st_size) != size:
            raise DamageError(f"{name} has {found} bytes instead of {size}")
    if not contents:
        return
    try:
        checksums = _checksums(directory / name for name in record["files"])
    except OSError as error:
        raise DamageError(f"it cannot be read ({in_one_line(error)})") from error
    for (name, (_, checksum)), seen in zip(record["files"].items(), checksums, strict=True):
        if seen != checksum:
            raise DamageError(f"{name} does not hold what was written")


def check_leaves(directory: Path, record: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raise with every leaf that is missing, extra, or of another shape or dtype."""
    saved, wanted = record["leaves"], _describe(leaves)
    problems = [f"{name}: not in the checkpoint" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"{name}: only in the checkpoint" for name in sorted(saved.keys() - wanted.keys())]
    for name, (shape, dtype) in wanted.items():
        if name in saved and saved[name] != [shape, dtype]:
            there = f"{saved[name][1]}{saved[name][0]}"
            problems.append(f"{name}: {there} in the checkpoint, {dtype}{shape} in the run")
    if problems:
        listing = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(
            f"the checkpoint {directory} is not of this learner; {len(problems)} of its arrays differ:{listing}"
        )


def _describe(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()}


def _checksums(files: Iterable[Path]) -> list[int]:
    """Of each file, several at a time: states are large, and this lets other threads go on."""

    def checksum(file: Path) -> int:
        value = 0
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                value = zlib.crc32(block, value)
        return value

    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(checksum, files))
