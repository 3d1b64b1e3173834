"""The adapter for PointReach: the robot, how to read an observation, and what counts as success."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pirl.data import Robot
from pirl.envs import EnvAdapter, EnvObservation, Expert, ExpertConfig
from pirl.envs.experts import Flaws, with_flaws
from point_reach import LONGEST_STEP


class PointReachAdapter(EnvAdapter):
    """PointReach in the terms of a dataset: one camera, a state of two numbers, actions within ±1."""

    robot = Robot(
        name="point",
        cameras={"base_0_rgb": "observation.images.screen"},
        state=("observation.state",),
        actions=("action",),
        state_dim=2,
        action_dim=2,
    )
    fps = 10
    prompt = "bring the red point to the green disc"

    def observe(self, observation: Any, info: Mapping[str, Any]) -> EnvObservation:
        """Rename the entries; images may stay floats with channels first."""
        return {"observation.images.screen": observation["screen"], "observation.state": observation["agent"]}

    def action(self, action: np.ndarray) -> np.ndarray:
        """From ±1 to metres."""
        return np.clip(action, -1.0, 1.0).astype(np.float64) * LONGEST_STEP

    def success(self, reward: float, terminated: bool, info: Mapping[str, Any]) -> bool:
        """The environment counts successes; pirl needs a flag."""
        return bool(info["num_reached"] > 0)

    # The rest is optional: an expert.

    def make_expert(self, config: ExpertConfig, seed: int) -> Expert:
        """Straight to the disc, or beside it."""
        point: Any = self.env.unwrapped
        rng = np.random.default_rng(seed)
        flaws = Flaws.draw(config, rng, episode_length=10)

        def act() -> np.ndarray:
            return np.clip((point.goal + flaws.aim[:2] - point.agent) / LONGEST_STEP, -1, 1).astype(np.float32)

        return with_flaws(act, lambda: np.zeros(2, np.float32), flaws, rng, motion=np.ones(2))
