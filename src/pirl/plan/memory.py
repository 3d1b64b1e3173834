"""Bytes on each device: those of the learner by what they are for, and those that come and go with the batch."""

import math
import re
from dataclasses import dataclass
from typing import Any

import jax

from pirl.agents.base import Agent
from pirl.training.dry_run import kind_of
from pirl.training.records import named_leaves


def device_bytes(tree: Any) -> int:
    """What the arrays of a tree, or shapes with layouts, take on one device."""
    return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def state_device_bytes(agent: Agent) -> dict[str, int]:
    """What the learner takes on one device, by what it is for."""
    found: dict[str, int] = {}
    for name, leaf in named_leaves(agent).items():
        found[kind_of(name)] = found.get(kind_of(name), 0) + _leaf_bytes(leaf)
    return found


def _leaf_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


@dataclass(frozen=True)
class Fit:
    """Temporary bytes as they grow with the batch of one device: fixed + slope · samples."""

    fixed: float
    slope: float

    def at(self, samples: float) -> float:
        """Temporary bytes for so many samples at a time on one device."""
        return self.fixed + self.slope * samples


def fit_line(points: list[tuple[float, float]]) -> Fit:
    """Through two measurements (samples, bytes); through one, all of it grows, so that no batch is promised too much."""
    if len(points) < 2:
        ((samples, size),) = points
        return Fit(0.0, size / samples)
    (few, small), (many, large) = sorted(points)
    slope = max(0.0, (large - small) / (many - few))
    return Fit(max(0.0, small - slope * few), slope)


def read_exhausted(message: str) -> float | None:
    """Bytes that a compiler says a program would need in all, or for temporaries, where it found that too much."""
    for pattern in (r"HLO temporaries \(([\d.]+)([KMGT])\)", r"Used ([\d.]+)([KMGT]) of"):
        if found := re.search(pattern, message):
            return float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1)
    return None
