"""How a scripted expert errs: what is common to the experts of all environments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float, Float32

from pirl.errors import Checked, NotNegative, Weight

Action = Float32[np.ndarray, " action_dim"]


@dataclass(frozen=True)
class ExpertConfig(Checked):
    """The quality of a scripted expert. The defaults are its best; each flaw causes a different kind of failure."""

    aim_bias: Weight = 0.0
    """Standard deviation of its aiming error, in metres; drawn once per episode."""
    noise: Weight = 0.0
    """Standard deviation of the action noise, as a fraction of the largest motion of one step."""
    delay: NotNegative = 0
    """It starts up to this many steps late."""
    detour: NotNegative = 0
    """At some point of the episode it wanders off in a random direction for up to this many steps."""
    give_up: Annotated[float, "[0, 1]"] = 0.0
    """Probability that it gives up at some point of the episode."""
    flawed: Annotated[float, "[0, 1]"] = 1.0
    """Fraction of the episodes with these flaws; in the others it does its best."""


@dataclass(frozen=True)
class Flaws:
    """What goes wrong in one episode, drawn from an `ExpertConfig`."""

    aim: Float[np.ndarray, " 3"]
    noise: float
    late: int
    stops_after: int | None
    detour: range
    """The steps in which it wanders off."""
    direction: Float[np.ndarray, " 3"]
    """Where to: a unit vector."""

    @classmethod
    def draw(cls, config: ExpertConfig, rng: np.random.Generator, episode_length: int) -> "Flaws":
        """Draw the flaws of an episode that usually takes `episode_length` steps."""
        # Everything is drawn whatever the config, so that episodes of the same seed differ in the flaws alone.
        flawed, gives_up, lateness, stop = rng.random(4)
        aim = rng.normal(size=3)
        detour_rng = rng.spawn(1)[0]  # its own, so that experts without a detour act as they always did
        begin, length = detour_rng.random(2)
        direction = detour_rng.normal(size=3)
        direction /= np.linalg.norm(direction)
        if flawed >= config.flawed:
            return cls(np.zeros(3), 0.0, 0, None, range(0), direction)
        late = int(lateness * (config.delay + 1))
        stops_after = int(stop * episode_length) if gives_up < config.give_up else None
        first = late + int(begin * episode_length)
        detour = range(first, first + int(length * (config.detour + 1)))
        return cls(aim * config.aim_bias, config.noise, late, stops_after, detour, direction)


def with_flaws(
    act: Callable[[], Action],
    hold: Callable[[], Action],
    flaws: Flaws,
    rng: np.random.Generator,
    motion: Float[np.ndarray, " action_dim"],
) -> Callable[[], Action]:
    """The expert `act` with noise, a late start and giving up; `hold` is the action of doing nothing.

    `motion` is the largest motion of one step in each action dimension: the unit of the noise (0: none there).
    Where it aims is up to the expert itself.
    """
    steps = 0

    def flawed() -> Action:
        nonlocal steps
        steps += 1
        waits = steps <= flaws.late or (flaws.stops_after is not None and steps > flaws.stops_after)
        action = hold() if waits else act()
        if steps - 1 in flaws.detour:
            action = hold() + np.resize(flaws.direction, action.shape) * motion
        return (action + rng.normal(size=action.shape) * flaws.noise * motion).astype(np.float32)

    return flawed
