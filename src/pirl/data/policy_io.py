"""Between a robot and a policy: the robot's data become the policy's inputs, the policy's outputs the robot's actions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8

from pirl.data.robots import Robot
from pirl.data.transforms import Normalize, PadToWidth, Pipeline, resize_with_pad
from pirl.errors import ConfigError, DataError
from pirl.interop.norm_stats import NormStats
from pirl.models.config import Pi0Config
from pirl.models.observation import Observation
from pirl.models.tokenizer import Tokenizer
from pirl.models.types import Array

Tokens = tuple[Int[np.ndarray, "*batch tokens"], Bool[np.ndarray, "*batch tokens"]]
# Prompts whose tokens are cached; a deployed robot may be given any number of them.
_MAX_CACHED = 10_000


class PolicyIO:
    """Batches between one robot and one model: prepared as OpenPI prepares them, and brought back.

    The order is OpenPI's: the robot's own transforms, normalization (quantiles for π₀.₅), tokens, padding. Without
    statistics nothing is normalized.
    """

    def __init__(
        self,
        robot: Robot,
        config: Pi0Config,
        norm_stats: Mapping[str, NormStats] | None,
        tokenizer: Tokenizer | None,
    ):
        """`tokenizer` may be None for a model without a prompt (max_token_len = 0)."""
        if unknown := sorted(set(robot.cameras) - set(config.cameras)):
            raise ConfigError(
                f"robot {robot.name!r} maps the cameras {unknown}, which the model does not have; it has "
                f"{list(config.cameras)}. Take them out of the robot, or use a model with these cameras."
            )
        if tokenizer is None and config.max_token_len:
            raise ConfigError(
                f"the model takes prompts (max_token_len = {config.max_token_len}): a tokenizer is needed."
            )
        self.robot = robot
        self.config = config
        self._adapt = robot.transforms()
        self._scale = Pipeline(() if norm_stats is None else (Normalize(norm_stats, quantiles=config.pi05),))
        # Where the robot leaves its widths open, they follow from its statistics.
        widths = {key: stats.width_in(config.action_dim) for key, stats in (norm_stats or {}).items()}
        state_dim = robot.state_dim or widths.get("state")
        action_dim = robot.action_dim or widths.get("actions")
        self._pad = PadToWidth(config.action_dim, state_dim, action_dim)
        self._tokenizer = tokenizer
        self._cached: dict[str, Tokens] = {}

    def observation(
        self,
        images: Mapping[str, UInt8[np.ndarray, "b _ _ 3"]],
        state: Float[np.ndarray, "b state_dim"],
        prompts: Sequence[str] | None = None,
    ) -> Observation:
        """The model's input: images by camera slot, raw states, and a prompt each (or the robot's default).

        Every camera the robot maps must be given; slots of the model that it does not map are black and masked, and
        images of other cameras are ignored.
        """
        scaled = self._scale(self._adapt({"state": state}))
        data: dict[str, Any] = {"state": self._pad(scaled)["state"].astype(np.float32), "image": {}, "image_mask": {}}
        for slot in self.config.cameras:
            data["image"][slot] = self._image(slot, images, len(state))
            data["image_mask"][slot] = np.full(len(state), slot in self.robot.cameras)
        if (tokens := self._tokenize(prompts, len(state), scaled["state"])) is not None:
            data["tokenized_prompt"], data["tokenized_prompt_mask"] = tokens
        return Observation.from_dict(data, self.config)

    def prompt_tokens(self, prompts: Sequence[str], state: Float[np.ndarray, "b state_dim"]) -> Tokens:
        """Tokens and masks alone, for other prompts of the same observations; states are raw."""
        scaled = self._scale(self._adapt({"state": state}))
        tokens = self._tokenize(prompts, len(state), scaled["state"])
        if tokens is None:
            raise ConfigError("the model takes no prompts (max_token_len = 0), so there is nothing to tokenize.")
        return tokens[0].astype(np.int32), tokens[1]

    def check_prompts(self, prompts: Sequence[str], state_dim: int) -> None:
        """Raise if a prompt does not fit the model, as it might otherwise only hours into a run."""
        if prompts:
            # Where the prompt spells the state, three digits for each number are the most it takes.
            self._tokenize(prompts, len(prompts), np.ones((len(prompts), state_dim)))

    def actions(
        self, actions: Float[np.ndarray, "*batch horizon robot_dim"], state: Float[np.ndarray, "*state_batch state_dim"]
    ) -> Float32[np.ndarray, "*batch horizon action_dim"]:
        """Raw actions, with the raw state at the beginning of their chunk, as the targets the model is trained on."""
        adapted = self._adapt({"state": state, "actions": actions})
        return self._pad(self._scale({"actions": adapted["actions"]}))["actions"].astype(np.float32)

    def robot_actions(
        self,
        model_actions: Float[Array, "*batch horizon action_dim"],
        state: Float[np.ndarray, "*state_batch state_dim"],
    ) -> Float32[np.ndarray, "*batch horizon robot_dim"]:
        """The model's actions in the robot's units. There may be several chunks per state: [B, n, H, D] and [B, S]."""
        unscaled = self._scale.inverse(self._pad.inverse({"actions": np.asarray(model_actions, np.float32)}))
        return self._adapt.inverse(self._adapt({"state": state}) | unscaled)["actions"].astype(np.float32)

    def _image(
        self, slot: str, images: Mapping[str, UInt8[np.ndarray, "b _ _ 3"]], batch: int
    ) -> UInt8[np.ndarray, "b h w 3"]:
        height, width = self.config.image_resolution
        if slot not in self.robot.cameras:
            return np.zeros((batch, height, width, 3), np.uint8)
        if slot not in images:
            raise DataError(
                f"no image for {slot!r} ({self.robot.cameras[slot]!r} of robot {self.robot.name!r}); got "
                f"{sorted(images)}. A camera that the robot lacks should not be among the robot's cameras."
            )
        return resize_with_pad(images[slot], height, width)

    def _tokenize(self, prompts: Sequence[str] | None, batch: int, state: Float[np.ndarray, "b s"]) -> Tokens | None:
        """Tokens and masks of a batch of prompts and scaled states; None for a model without prompts."""
        if self._tokenizer is None or not self.config.max_token_len:
            return None
        if prompts is None:
            if self.robot.default_prompt is None:
                raise DataError(f"no prompts, and robot {self.robot.name!r} has no default_prompt: give one of them.")
            prompts = [self.robot.default_prompt] * batch
        elif isinstance(prompts, str) or len(prompts) != batch:
            raise DataError(f"prompts should be {batch} texts, one per state; got {prompts!r:.80}.")
        if self.config.discrete_state_input:  # the prompt spells the state: no two are the same
            pairs = [self._tokenizer(prompt, values) for prompt, values in zip(prompts, state, strict=True)]
        else:
            known = {prompt: self._cached.get(prompt) or self._tokenizer(prompt) for prompt in set(prompts)}
            if len(self._cached) < _MAX_CACHED:
                self._cached.update(known)
            pairs = [known[prompt] for prompt in prompts]
        tokens, masks = zip(*pairs, strict=True)
        return np.stack(tokens), np.stack(masks)
