"""The one place where a robot's data becomes what a policy takes, and what a policy gives becomes the robot's actions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8

from pirl.data.images import resize_with_pad
from pirl.data.robots import Robot
from pirl.data.transforms import Normalize, PadToWidth, Pipeline
from pirl.errors import ConfigError, DataError
from pirl.interop.norm_stats import NormStats
from pirl.models.config import Pi0Config
from pirl.models.observation import Observation
from pirl.models.tokenizer import Tokenizer
from pirl.models.types import Array

Tokens = tuple[Int[np.ndarray, "*batch tokens"], Bool[np.ndarray, "*batch tokens"]]
# Prompts remembered with their tokens; a robot in the field may be told anything, so there is a limit.
_MAX_REMEMBERED = 10_000


class PolicyIO:
    """Batches between one robot and one model: prepared as OpenPI prepares them, and brought back.

    The order is OpenPI's: the robot's own transforms, normalisation (quantiles for π₀.₅), tokens, padding. Without
    statistics nothing is normalised.
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
                f"the model takes prompts (max_token_len = {config.max_token_len}): a tokeniser is needed."
            )
        self.robot = robot
        self.config = config
        self._adapt = robot.transforms()
        self._scale = Pipeline(() if norm_stats is None else (Normalize(norm_stats, quantiles=config.pi05),))
        # Where the robot leaves its widths open, its statistics tell them.
        widths = {key: stats.width_in(config.action_dim) for key, stats in (norm_stats or {}).items()}
        state_dim = robot.state_dim or widths.get("state")
        action_dim = robot.action_dim or widths.get("actions")
        self._pad = PadToWidth(config.action_dim, state_dim, action_dim)
        self._tokenizer = tokenizer
        self._remembered: dict[str, Tokens] = {}

    def observation(
        self,
        images: Mapping[str, UInt8[np.ndarray, "b _ _ 3"]],
        state: Float[np.ndarray, "b state_dim"],
        prompts: Sequence[str] | None = None,
    ) -> Observation:
        """What the model sees of a batch: images by camera slot, raw states, and a prompt each (or the robot's own).

        Every camera the robot maps must be given; slots of the model that it does not map are black and masked, and
        images of other cameras are left aside.
        """
        scaled = self._scale(self._adapt({"state": state}))
        data: dict[str, Any] = {"state": self._pad(scaled)["state"].astype(np.float32), "image": {}, "image_mask": {}}
        for slot in self.config.cameras:
            data["image"][slot] = self._image(slot, images, len(state))
            data["image_mask"][slot] = np.full(len(state), slot in self.robot.cameras)
        if self._tokenizer is not None and self.config.max_token_len:
            tokens = self._tokenize(self._tokenizer, self._prompts(prompts, len(state)), scaled["state"])
            data["tokenized_prompt"], data["tokenized_prompt_mask"] = tokens
        return Observation.from_dict(data, self.config)

    def prompt_tokens(self, prompts: Sequence[str], state: Float[np.ndarray, "b state_dim"]) -> Tokens:
        """Tokens and masks alone, for other prompts of observations whose pictures are prepared; states are raw."""
        if self._tokenizer is None or not self.config.max_token_len:
            raise ConfigError("the model takes no prompts (max_token_len = 0), so there is nothing to tokenise.")
        scaled = self._scale(self._adapt({"state": state}))
        tokens, masks = self._tokenize(self._tokenizer, self._prompts(prompts, len(state)), scaled["state"])
        return tokens.astype(np.int32), masks

    def check_prompts(self, prompts: Sequence[str], state_dim: int) -> None:
        """Raise if a prompt does not fit the model, as it might otherwise only hours into a run."""
        if self._tokenizer is not None and self.config.max_token_len and prompts:
            # Where the prompt spells the state, three digits for each number are the most it takes.
            self._tokenize(self._tokenizer, list(prompts), np.ones((len(prompts), state_dim)))

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
        """What the model gave as actions of the robot. Several chunks per state, [B, n, H, D] and [B, S], are welcome."""
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

    def _prompts(self, prompts: Sequence[str] | None, batch: int) -> Sequence[str]:
        if prompts is None:
            if self.robot.default_prompt is None:
                raise DataError(f"no prompts, and robot {self.robot.name!r} has no default_prompt: give one of them.")
            return [self.robot.default_prompt] * batch
        if isinstance(prompts, str) or len(prompts) != batch:
            raise DataError(f"prompts should be {batch} texts, one per state; got {prompts!r:.80}.")
        return prompts

    def _tokenize(self, tokenizer: Tokenizer, prompts: Sequence[str], state: Float[np.ndarray, "b s"]) -> Tokens:
        """Tokens and masks of a batch. Only prompts that do not spell the state can be met again."""
        if self.config.discrete_state_input:
            pairs = [tokenizer(prompt, values) for prompt, values in zip(prompts, state, strict=True)]
        else:
            known = {prompt: self._remembered.get(prompt) or tokenizer(prompt) for prompt in set(prompts)}
            if len(self._remembered) < _MAX_REMEMBERED:
                self._remembered.update(known)
            pairs = [known[prompt] for prompt in prompts]
        tokens, masks = zip(*pairs, strict=True)
        return np.stack(tokens), np.stack(masks)
