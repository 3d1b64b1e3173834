"""Saved states and policies: what they consist of, by metadata alone; how far two are apart; and the learner in one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Shaped

from pirl.agents.common import Agent
from pirl.config import RLTrainConfig, load_config
from pirl.data import PolicyIO
from pirl.errors import CheckpointError, ConfigError, did_you_mean
from pirl.files import DamageError, expand_home, read_record
from pirl.interop import open_checkpoint
from pirl.interop.checkpoint import Checkpoint
from pirl.interop.orbax import OrbaxArrays, StoredArray
from pirl.models import abstract_model
from pirl.run_files import TRAIN_STATE, RunFiles, refuse_directory_of_runs, saved_steps
from pirl.training import sharding
from pirl.training.checkpoints import RECORD_FILE, choose_steps, open_state_arrays, read_state
from pirl.training.setup import agent_shapes, create_learner, set_up
from pirl.training.sharding import named_leaves

_BLOCK = 1 << 22  # numbers compared together in float64
Leaves = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Layout:
    """Into how many pieces each axis of an array is split, and the devices that share the arrays."""

    pieces: Mapping[str, tuple[int, ...]]
    devices: int = 1
    fsdp_devices: int = 1

    def bytes_per_device(self, path: str, leaf: jax.ShapeDtypeStruct) -> int:
        """Bytes of an array on one device."""
        return _bytes(leaf) // math.prod(self.pieces[path])


@dataclass(frozen=True)
class SavedState:
    """A full state or a policy: title, arrays, layout, and the configuration it should match."""

    title: str
    store: Checkpoint
    layout: Layout
    config: RLTrainConfig | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def leaves(self) -> Leaves:
        """Shapes and dtypes by path."""
        return self.store.leaves

    def select(self, subtree: str) -> dict[str, str]:
        """The paths below a subtree, by what follows its name; of the whole, if the name is empty."""
        if subtree in self.leaves:
            return {subtree.split("/")[-1]: subtree}
        start = f"{subtree}/" if subtree else ""
        found = {path.removeprefix(start): path for path in self.leaves if path.startswith(start)}
        if not found:
            known = {_group(path, depth) for path in self.leaves for depth in (1, 2, 3)}
            tops = dict.fromkeys(_group(path, 1) for path in self.leaves)
            raise ConfigError(f"{self.title} has no {subtree}. {did_you_mean(subtree, known)}It has {', '.join(tops)}.")
        return found


@dataclass(frozen=True)
class Part:
    """A subtree in numbers; `shape` of an array that stands alone."""

    name: str
    leaves: int
    shape: tuple[int, ...] | None
    parameters: int
    dtypes: tuple[str, ...]
    bytes: int
    sharded: int
    bytes_per_device: int


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return int(leaf.size) * leaf.dtype.itemsize


def _group(path: str, depth: int) -> str:
    return "/".join(path.split("/")[:depth])


# --- opening ----------------------------------------------------------------------------------------------------------


def open_state(path: Path, step: int | None = None) -> SavedState:
    """The newest full state of a run (or that of a step), that of a checkpoint, or a policy alone."""
    directory = expand_home(path).absolute()
    run = RunFiles(directory)
    if saved_steps(run.checkpoints) or run.is_run:
        return _open_full(_find_state(run, step))
    refuse_directory_of_runs(expand_home(path))
    if step is not None:
        raise ConfigError(f"a step is one of a run, and {path} is none: leave --step out.")
    if (directory / TRAIN_STATE).is_dir():
        return _open_full(directory)
    policy = open_checkpoint(directory)
    layout = planned_layout(policy.leaves, 1, 1)
    if isinstance(policy.arrays, OrbaxArrays):
        layout = _saved_layout(policy.arrays.stored)
    return SavedState(f"the policy {path}", policy, layout)


def _find_state(run: RunFiles, step: int | None) -> Path:
    """The checkpoint of a step, or the newest one, with its train state."""
    chosen, *_ = choose_steps(run, saved_steps(run.checkpoints, resumable=True), step)
    return run.checkpoints / str(chosen)


def _open_full(directory: Path) -> SavedState:
    try:
        arrays = open_state_arrays(directory, read_record(directory / RECORD_FILE))
    except DamageError as error:
        raise CheckpointError(f"{directory} is damaged: {error}.") from error
    notes, config, run = [], None, directory.parent.parent
    try:
        config = load_config(RunFiles(run).config_file)
    except ConfigError as error:
        notes.append(f"dtypes were not compared with the configuration: {error}")
    store = Checkpoint(directory, "released", arrays, {})
    title = f"the state of step {directory.name} in {run.name}"
    return SavedState(title, store, _saved_layout(arrays.stored), config, notes)


def planned_layout(leaves: Leaves, devices: int, fsdp_devices: int) -> Layout:
    """The layout on so many devices."""
    if fsdp_devices < 1 or devices < 1 or devices % fsdp_devices:
        raise ConfigError(f"--fsdp {fsdp_devices} does not divide --devices {devices}.")
    pieces = {}
    for path, leaf in leaves.items():
        spec = sharding.state_spec(path, leaf.shape, leaf.dtype, fsdp_devices)
        pieces[path] = _pieces(leaf, spec, {"fsdp": fsdp_devices})
    return Layout(pieces, devices, fsdp_devices)


def _saved_layout(stored: Mapping[str, StoredArray]) -> Layout:
    """The layout when the arrays were saved; replicated, where it was not written."""
    pieces, devices, fsdp = {}, 1, 1
    for path, leaf in stored.items():
        lengths = map(int, getattr(leaf.sharding, "shape", ()))
        sizes = dict(zip(getattr(leaf.sharding, "axis_names", ()), lengths, strict=True))
        spec = PartitionSpec(*(getattr(leaf.sharding, "partition_spec", None) or ()))
        pieces[path] = _pieces(leaf, spec, sizes)
        devices = max(devices, math.prod(sizes.values()))
        fsdp = max(fsdp, sizes.get("fsdp", 1))
    return Layout(pieces, devices, fsdp)


def _pieces(leaf: Any, spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    axes = [() if axis is None else (axis,) if isinstance(axis, str) else tuple(axis) for axis in spec]
    split = [math.prod(sizes[name] for name in names) for names in axes]
    return (*split, *[1] * (len(leaf.shape) - len(split)))


# --- describing -------------------------------------------------------------------------------------------------------


def describe(state: SavedState, layout: Layout, depth: int, subtree: str = "") -> list[Part]:
    """The subtrees down to a depth, in the order of the state."""
    groups: dict[str, list[str]] = {}
    for relative, path in state.select(subtree).items():
        groups.setdefault(_group(relative, depth), []).append(path)
    parts = []
    for name, paths in groups.items():
        leaves = {path: state.leaves[path] for path in paths}
        parts.append(
            Part(
                name=name,
                leaves=len(paths),
                shape=leaves[paths[0]].shape if len(paths) == 1 else None,
                parameters=sum(int(leaf.size) for leaf in leaves.values()),
                dtypes=tuple(sorted({str(leaf.dtype) for leaf in leaves.values()})),
                bytes=sum(map(_bytes, leaves.values())),
                sharded=sum(math.prod(layout.pieces[path]) > 1 for path in paths),
                bytes_per_device=sum(layout.bytes_per_device(path, leaf) for path, leaf in leaves.items()),
            )
        )
    return parts


def unexpected(state: SavedState) -> list[str]:
    """Arrays that differ from the configuration: of another dtype, missing, or unexpected."""
    if state.config is None:
        return []
    create = partial(create_learner, state.config, None)  # without the robot's width of the critics' input
    agent = jax.eval_shape(create, abstract_model(state.config.model), jax.random.key(0))
    expected = {path: str(leaf.dtype) for path, leaf in named_leaves(agent).items()}
    saved = {path: str(leaf.dtype) for path, leaf in state.leaves.items()}
    return [
        *(
            f"{path}: {dtype}, by the configuration {expected[path]}"
            for path, dtype in saved.items()
            if path in expected and expected[path] != dtype
        ),
        *(f"{path}: missing" for path in expected if path not in saved),
        *(f"{path}: not of the configuration" for path in saved if path not in expected),
    ]


def left_whole(leaves: Leaves, layout: Layout) -> list[str]:
    """Large replicated arrays, other than the critics', that have an axis which the devices divide."""
    count = layout.fsdp_devices
    return [
        path
        for path, leaf in leaves.items()
        if count > 1
        and path.split("/")[0] != sharding.CRITICS
        and math.prod(layout.pieces[path]) == 1
        and _bytes(leaf) >= sharding.MIN_SHARD_BYTES
        and any(length % count == 0 for length in leaf.shape)
    ]


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """A subtree of two states: sums over the arrays that each has, differences over those that both have."""

    name: str
    leaves: int = 0
    differing: int = 0
    largest: float = 0.0
    only_first: int = 0
    only_second: int = 0
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    counts: list[int] = field(default_factory=lambda: [0, 0])
    common_square: float = 0.0  # of the second, where both have the array
    difference_square: float = 0.0

    @property
    def root_mean_squares(self) -> tuple[float, float]:
        """The typical size of a number, on both sides."""
        pairs = zip(self.squares, self.counts, strict=True)
        first, second = (math.sqrt(square / count) if count else 0.0 for square, count in pairs)
        return first, second

    @property
    def relative(self) -> float:
        """The norm of the difference over that of the second."""
        if self.difference_square == 0:
            return 0.0
        return math.sqrt(self.difference_square / self.common_square) if self.common_square else math.inf

    def add(self, first: Shaped[np.ndarray, "..."] | None, second: Shaped[np.ndarray, "..."] | None) -> None:
        """Count an array of each side, if it has it."""
        self.only_first += second is None
        self.only_second += first is None
        for index, array in enumerate((first, second)):
            if array is not None:
                self.counts[index] += array.size
                self.squares[index] += _square(array)
        if first is None or second is None or first.shape != second.shape:
            return
        self.leaves += 1
        self.common_square += _square(second)
        largest = 0.0
        for ours, theirs in zip(_blocks(first), _blocks(second), strict=True):
            # NaN on both sides is no difference; on one side, it is an infinite one.
            change = np.nan_to_num(np.abs(ours - theirs), nan=np.inf)
            change = np.where(np.isnan(ours) & np.isnan(theirs), 0.0, change)
            largest = max(largest, float(np.max(change, initial=0.0)))
            self.difference_square += float(np.sum(np.square(change)))
        self.differing += largest > 0
        self.largest = max(self.largest, largest)

    def to_json(self) -> dict[str, Any]:
        """As plain data; null for what is infinite."""
        first, second = self.root_mean_squares
        return {
            "subtree": self.name,
            "leaves": self.leaves,
            "differing": self.differing,
            "max_difference": self.largest if math.isfinite(self.largest) else None,
            "relative": self.relative if math.isfinite(self.relative) else None,
            "rms_first": first,
            "rms_second": second,
            "only_first": self.only_first,
            "only_second": self.only_second,
        }


def _blocks(array: Shaped[np.ndarray, "..."]) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    return (flat[start : start + _BLOCK].astype(np.float64) for start in range(0, flat.size, _BLOCK))


def _square(array: Shaped[np.ndarray, "..."]) -> float:
    return sum(float(np.sum(np.square(block))) for block in _blocks(array))


@dataclass(frozen=True)
class Comparison:
    """Subtrees that were compared, and arrays that could not be."""

    parts: list[Difference]
    only_first: list[str]
    only_second: list[str]
    other_shape: list[str]


def compare_states(
    first: SavedState, second: SavedState, *, depth: int, of: str = "", against: str | None = None
) -> Comparison:
    """Compare the subtree `of` the first state with `against` in the second (default: the same)."""
    ours, theirs = first.select(of), second.select(of if against is None else against)
    parts: dict[str, Difference] = {}
    other_shape = []
    for name in dict.fromkeys([*ours, *theirs]):
        part = parts.setdefault(_group(name, depth), Difference(_group(name, depth)))
        left = _read(first, ours[name]) if name in ours else None
        right = _read(second, theirs[name]) if name in theirs else None
        if left is not None and right is not None and left.shape != right.shape:
            other_shape.append(f"{name}: {left.shape} and {right.shape}")
        part.add(left, right)
    only_first, only_second = ([name for name in a if name not in b] for a, b in ((ours, theirs), (theirs, ours)))
    return Comparison(list(parts.values()), only_first, only_second, other_shape)


def _read(state: SavedState, path: str) -> Shaped[np.ndarray, "..."]:
    return np.asarray(state.store.read([path])[path])


# --- loading ----------------------------------------------------------------------------------------------------------


def load_agent(run: Path, step: int | None = None) -> tuple[Agent, PolicyIO]:
    """The learner of a run, by default at its newest step, and its conversion of the robot's data."""
    files = RunFiles(expand_home(run).resolve())
    directory = _find_state(files, step)
    config = load_config(files.config_file, None)
    # It may have been made where there are more devices, or others.
    config = replace(config, fsdp_devices=math.gcd(config.fsdp_devices, jax.device_count()))
    setup = set_up(config, resumed=files, progress=False)
    try:
        agent, _ = read_state(directory, agent_shapes(setup))
    except DamageError as damage:
        raise CheckpointError(f"{directory} is damaged: {damage}.") from damage
    return agent, setup.policy_io
