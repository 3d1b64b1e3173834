"""One environment driven request by request: what a worker process does, and anyone who has a single environment."""

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import EnvObservation, Expert, RobotEnv, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pools import Pictures, Segment, Started, stack_observations
from pirl.errors import ConfigError, EnvError


class Stepper:
    """Begins episodes of an environment and executes actions in them; whatever it should not say is an `EnvError`."""

    def __init__(self, env: RobotEnv) -> None:
        self.env = env
        self.description = env.describe()
        self._expert: Expert | None = None
        self._is_running = False

    def start(self, start: Start, expert: ExpertConfig | None = None) -> Started:
        """Begin an episode; the seed of the start is also the expert's."""
        self.env.cameras_on = True
        options = {"task": start.task} | ({} if start.state is None else {"state": start.state})
        observation, info = self.env.reset(seed=start.seed, options=options)
        observation = self._checked(observation)
        self._expert = None if expert is None else self.env.make_expert(expert, start.seed)
        self._is_running = True
        try:
            state = self.env.get_state()
        except ConfigError:  # it cannot tell its state, which most do not need
            state = {}
        return Started(observation, str(info["prompt"]), str(info["task"]), state)

    def execute(self, actions: Float32[np.ndarray, "k action_dim"] | int, pictures: Pictures = "all") -> Segment:
        """Take these actions, or so many steps of the expert, as far as the episode goes."""
        if not self._is_running:
            raise ValueError("the episode has ended, or has not begun: start one first.")
        count = actions if isinstance(actions, int) else len(actions)
        taken, observations, rewards = [], [], []
        terminated = truncated = success = False
        for index in range(count):
            action = self._ask_expert() if isinstance(actions, int) else actions[index]
            self.env.cameras_on = pictures == "all" or index == count - 1
            observation, reward, terminated, truncated, info = self.env.step(action)
            taken.append(action)
            observations.append(self._checked(observation))
            rewards.append(float(reward))
            if not np.isfinite(rewards[-1]):
                raise EnvError(f"the reward is {rewards[-1]}.")
            success = bool(info["success"])
            if terminated or truncated:
                self._is_running = False
                break
        return Segment(
            observations=stack_observations(observations),
            actions=np.stack(taken).astype(np.float32),
            rewards=np.array(rewards, np.float32),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=success,
        )

    def _ask_expert(self) -> Float32[np.ndarray, " action_dim"]:
        if self._expert is None:
            raise ValueError("the episode was started without an expert.")
        return np.asarray(self._expert(), np.float32)

    def _checked(self, observation: EnvObservation) -> EnvObservation:
        columns, shapes = self.description.robot.state, self.description.shapes
        wanted = {name: shape for name, shape in shapes.items() if self.env.cameras_on or name in columns}
        if not wanted.keys() <= observation.keys() <= shapes.keys():
            raise EnvError(f"an observation has {sorted(observation)} instead of {sorted(wanted)}.")
        checked = {}
        for name, shape in wanted.items():
            # A copy, because simulators like to write the next observation over the last.
            values = np.array(observation[name], np.float32 if name in columns else None)
            if name not in columns and values.dtype != np.uint8:
                raise EnvError(f"{name!r} has the dtype {values.dtype} instead of uint8.")
            if values.shape != shape:
                raise EnvError(f"{name!r} has the shape {values.shape} instead of {shape}.")
            if name in columns and not np.all(np.isfinite(values)):
                raise EnvError(f"{name!r} holds {values[~np.isfinite(values)][0]}.")
            checked[name] = values
        return checked
