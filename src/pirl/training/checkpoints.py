"""The two checkpoints of a run: the full state, to resume bit for bit, and the OpenPI policy, to deploy."""

import concurrent.futures
import contextlib
import functools
import gc
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from pirl.config import CheckpointConfig
from pirl.envs.evaluation import versions
from pirl.errors import CheckpointError, in_one_line
from pirl.files import atomic_replace, remove_directory
from pirl.interop import NormStats, check_target
from pirl.interop.checkpoint import CheckpointWriter
from pirl.interop.orbax import quiet_orbax
from pirl.models import Pi0, get_parameters
from pirl.models.pi0 import nest
from pirl.run_files import saved_steps
from pirl.training.distributed import all_gather, barrier, broadcast, is_main_process
from pirl.training.records import (
    ARRAYS,
    DamageError,
    check_files,
    check_leaves,
    choose_steps,
    make_record,
    named_leaves,
    read_record,
    write_record,
)
from pirl.training.retention import (
    discard_after,
    discard_early,
    is_within_iteration,
    make_room,
    record_best,
    refuse_without_states,
    sweep,
)
from pirl.training.run import RunDirectory

_PATIENCE = 7 * 24 * 3600  # seconds
_logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and restores the state of a run, and the policy with it.

    A save returns as soon as the arrays are copied; the rest happens in the background, one save at a time. The policy
    appears first, whole, then the state, in one rename: a state that is there has its policy, and a process that dies at
    any moment leaves only hidden remains, which the next one removes. With several processes each writes the arrays it
    holds; when all have, the first one puts the whole in place.

    Kept are the newest `max_to_keep` steps and one of every `keep_period`, state and policy both, as OpenPI does; and the
    policy (not the state) of the step that was best by `best_metric`, the earliest of equals, which
    `checkpoints/best.json` names. A run goes on from the newest state that is whole. The episodes of a replay buffer are
    there for the last two.
    """

    def __init__(self, run: RunDirectory, config: CheckpointConfig) -> None:
        self._run = run
        self._config = config
        if is_main_process():
            sweep(run)
            refuse_without_states(run)
            record_best(run, config)
        barrier()  # nobody looks before it is swept
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet_orbax())
        # Orbax gives up after ten minutes by the wall clock, which may jump, and which a large state may need. Several
        # hosts wait for each other as long, and one of them may be gone.
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
        clock: int | None = None,
    ) -> None:
        """Begin to save; the state may be donated afterwards. Raises what went wrong in the save before.

        `state` is a pytree of arrays; `host` is what else a resumed run needs and `metadata` what a reader wants to
        know, both as JSON; `metrics` are those of this step. `clock` is what checkpoints are counted by, unless by steps.
        """
        self.wait()
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        known = {"step": step, "clock": step if clock is None else clock, "metrics": finite}
        leaves = named_leaves(state)
        record = make_record(leaves, {**known, "host": dict(host), "metadata": dict(metadata), "versions": versions()})
        description = {**record["metadata"], **known}
        partials = [directory / f".{step}.partial" for directory in (self._run.states, self._run.policies)]
        try:
            writer = CheckpointWriter(
                get_parameters(policy), policy.config, norm_stats=norm_stats, metadata=description
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

        def place_policy() -> None:
            writer.complete(partials[1])
            atomic_replace(partials[1], self._run.policies / str(step))

        def place_state() -> None:
            write_record(partials[0], record)
            atomic_replace(partials[0], self._run.states / str(step))
            record_best(self._run, self._config)
            make_room(self._run, self._config, step)

        def finish() -> None:
            for checkpointer, place in ((self._policy_checkpointer, place_policy), (self._checkpointer, place_state)):
                reasons = all_gather(self._attempt(step, checkpointer.wait_until_finished), "checkpoints")
                if not any(reasons):
                    reasons = [broadcast(functools.partial(self._attempt, step, place), "checkpoints")]
                if reason := next(filter(None, reasons), None):
                    # Not from the error: its frames hold Orbax's other failed writes, which complain when they go.
                    raise self._failure(step, partials, reason)

        self._pending = self._background.submit(finish)

    def _attempt(self, step: int, work: Callable[[], None]) -> str | None:
        """Do a part of a save; returns why it failed."""
        try:
            work()
            return None
        except Exception as error:
            _logger.debug("the checkpoint of step %d failed", step, exc_info=True)
            return _reason(error)

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
        return broadcast(
            lambda: [step for step in saved_steps(self._run.states) if not is_within_iteration(self._run, step)]
        )

    def latest(self) -> int | None:
        """The newest step there is a full state of."""
        return max(self.saved(), default=None)

    def restore(
        self, like: PyTree, step: int | None = None, *, among: Sequence[int] | None = None
    ) -> tuple[PyTree, dict[str, Any], int]:
        """The state of a step, what was saved as `host` with it, and the step: the newest that is whole, if not told.

        `like` has the structure, and says where each leaf is to lie: arrays, or shapes with their shardings.
        """
        self.wait()
        failures = []
        for candidate in choose_steps(self._run.states, self.saved() if among is None else among, step):
            directory = self._run.states / str(candidate)
            try:
                self._agree_that_it_is_whole(directory)
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

    def _agree_that_it_is_whole(self, directory: Path) -> None:
        """Raise a DamageError on all hosts if one of them cannot see all of it: reading it is something all do."""
        damage = None
        try:
            # Its contents are the same for all; it is enough that one reads them twice.
            check_files(directory, read_record(directory), contents=is_main_process())
        except DamageError as error:
            damage = str(error)
        if found := next(filter(None, all_gather(damage)), None):
            raise DamageError(found)

    def discard_after(self, step: int) -> None:
        """Delete all checkpoints of later steps but for the best policy: the run goes another way from there."""
        self.wait()
        if is_main_process():
            discard_after(self._run, step)
        barrier()

    def close(self) -> None:
        """Finish what is being saved, and let go. Raises what went wrong in it."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            for checkpointer in (self._checkpointer, self._policy_checkpointer):
                with contextlib.suppress(Exception):  # of a save that failed, which was said in our words
                    checkpointer.close()
            self._quiet.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _logger.error("%s", failure)  # what ended the run matters more

    def _failure(self, step: int, partials: Sequence[Path], reason: str) -> CheckpointError:
        """What to say about a save that failed, with its remains removed."""
        for checkpointer in (self._checkpointer, self._policy_checkpointer):
            with contextlib.suppress(Exception):  # the arrays may still be on their way, and fail for the same reason
                checkpointer.wait_until_finished()
        gc.collect()
        for partial in partials:
            remove_directory(partial)
        if is_main_process():
            with contextlib.suppress(OSError):  # why the save failed matters more
                discard_early(self._run, str(step))
        saved = saved_steps(self._run.states)  # asking nobody: the others may not have failed
        older = f"The newest that is whole is that of step {saved[-1]}" if saved else "There is no other one"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written in {self._run.checkpoints}: {reason}. "
            f"{older}. See to the cause (a full disk, missing rights), then continue with --resume."
        )


def _reason(error: Exception) -> str:
    """Why it failed. What the system said, a full disk say, TensorStore tells after all that it had to do with it."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else in_one_line(error)


def read_state(
    directory: Path, like: PyTree, checkpointer: Any, *, contents: bool = True
) -> tuple[PyTree, dict[str, Any]]:
    """The state that was saved in a directory, as `like` has it, and what was saved as `host`. Raises a DamageError.

    `contents`: look for changed bytes first, unless that has been done.
    """
    record = read_record(directory)
    check_files(directory, record, contents=contents)
    leaves = {name: _placed(leaf) for name, leaf in named_leaves(like).items()}
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


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
