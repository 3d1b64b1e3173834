"""An environment as somebody may already have it, with conventions of its own: nothing here knows of pirl."""

from typing import Any

import gymnasium
import numpy as np

SIZE = 48
LONGEST_STEP = 0.05


class PointReach(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A point in a square of one metre is to be brought to a disc. Actions are metres; pictures are CHW floats."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, radius: float = 0.08, render_mode: str | None = "rgb_array") -> None:
        self.radius = radius
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Dict(
            {
                "screen": gymnasium.spaces.Box(0.0, 1.0, (3, SIZE, SIZE), np.float32),
                "agent": gymnasium.spaces.Box(0.0, 1.0, (2,), np.float64),
            }
        )
        self.action_space = gymnasium.spaces.Box(-LONGEST_STEP, LONGEST_STEP, (2,), np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Put the point and the disc anywhere."""
        super().reset(seed=seed)
        self.agent, self.goal = self.np_random.uniform(0.1, 0.9, (2, 2))
        return self.look(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Move the point; the price of a step is its distance to the disc."""
        self.agent = np.clip(self.agent + np.clip(action, -LONGEST_STEP, LONGEST_STEP), 0.0, 1.0)
        distance = float(np.linalg.norm(self.agent - self.goal))
        is_there = distance < self.radius
        return self.look(), -distance, is_there, False, {"num_reached": int(is_there)}

    def look(self) -> dict[str, np.ndarray]:
        """The observation: a white square, the disc in green, the point in red."""
        pixels = (np.arange(SIZE) + 0.5) / SIZE
        screen = np.ones((3, SIZE, SIZE), np.float32)
        for (x, y), radius, colour in ((self.goal, self.radius, (0.2, 0.7, 0.3)), (self.agent, 0.03, (0.9, 0.2, 0.2))):
            is_inside = (pixels - x) ** 2 + (pixels[:, None] - y) ** 2 < radius**2
            screen[:, is_inside] = np.array(colour, np.float32)[:, None]
        return {"screen": screen, "agent": self.agent.copy()}

    def render(self) -> np.ndarray:  # type: ignore[override]
        """The picture for people."""
        return (self.look()["screen"].transpose(1, 2, 0) * 255).astype(np.uint8)


gymnasium.register("PointReach-v0", PointReach, max_episode_steps=60)
