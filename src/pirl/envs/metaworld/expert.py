"""Scripted experts: the package's own policies, which see the simulator's true state, made to err as asked."""

import warnings

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import Expert
from pirl.envs.experts import ExpertConfig, Flaws, with_flaws
from pirl.envs.metaworld.simulator import Simulator
from pirl.envs.mujoco_rendering import import_simulator

# How long an expert usually takes, in steps.
EPISODE_LENGTH = 80
# The largest motion of one step is an action of 1; noise leaves the gripper alone.
MOTION = np.array([1.0, 1.0, 1.0, 0.0])
# Where the package's policies find positions of objects and of the goal in what they see.
SEEN_POSITIONS = (slice(4, 7), slice(11, 14), slice(36, 39))


def make_expert(simulator: Simulator, config: ExpertConfig, seed: int) -> Expert:
    """The expert of the simulator's task. Its aim errs as with a badly calibrated camera: all it sees is displaced."""
    policy = import_simulator("metaworld.policies", "metaworld").ENV_POLICY_MAP[simulator.task]()
    rng = np.random.default_rng(seed)
    flaws = Flaws.draw(config, rng, EPISODE_LENGTH)
    gripper = -1.0

    def act() -> Float32[np.ndarray, "4"]:
        nonlocal gripper
        seen = simulator.full_observation()
        for position in SEEN_POSITIONS:
            seen[position] += flaws.aim
        with warnings.catch_warnings():
            # It warns whenever it asks for more than the largest motion, which is most of the time.
            warnings.simplefilter("ignore")
            action = np.clip(policy.get_action(seen), -1.0, 1.0).astype(np.float32)
        gripper = float(action[3])
        return action

    def hold() -> Float32[np.ndarray, "4"]:
        return np.array([0.0, 0.0, 0.0, gripper], np.float32)

    flawed = with_flaws(act, hold, flaws, rng, MOTION)
    return lambda: np.clip(flawed(), -1.0, 1.0)
