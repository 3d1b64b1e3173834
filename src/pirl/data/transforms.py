"""What happens to states and actions between a robot and a model, each step with its inverse, equal to OpenPI's.

A transform maps a dictionary with `state` [..., S] and `actions` [..., H, A] (either may be absent, other entries pass)
to a new one and leaves its input untouched. The axes in front are batches; actions may have more of them than the state,
which then serves all. Arithmetic follows OpenPI: the constants of ALOHA and the statistics are float64, so these steps
turn float32 data into float64; the others keep its dtype. Rounding for the model is left to the very end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from pirl.data.norm_stats import EPSILON
from pirl.errors import DataError
from pirl.interop.norm_stats import NormStats

Data = Mapping[str, np.ndarray]
Values = Float[np.ndarray, "..."]


def indicate(prompt: str, positive: bool) -> str:
    """The prompt with an advantage indicator, by which a policy can be asked for good actions."""
    task = prompt.strip().rstrip(".")
    return f"{task}{'. ' if task else ''}Advantage: {'positive' if positive else 'negative'}"


@runtime_checkable
class Transform(Protocol):
    """One step on the way to the model, and back."""

    def __call__(self, data: Data) -> dict[str, np.ndarray]: ...

    def inverse(self, data: Data) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class Pipeline:
    """Transforms one after the other; the inverse goes through them backwards."""

    transforms: tuple[Transform, ...]

    def __call__(self, data: Data) -> dict[str, np.ndarray]:
        result = dict(data)
        for transform in self.transforms:
            result = transform(result)
        return result

    def inverse(self, data: Data) -> dict[str, np.ndarray]:
        result = dict(data)
        for transform in reversed(self.transforms):
            result = transform.inverse(result)
        return result


# --- ALOHA ---------------------------------------------------------------------------------------------------------

ALOHA_DIM = 14
_FLIPS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
_GRIPPERS = [6, 13]
# The gripper's fingers are driven by a horn and an arm (meters); ALOHA reports how far they are apart, π₀ the angle.
_ARM, _HORN = 0.036, 0.022
_FINGER_RANGE = (0.01844, 0.05800)
_ANGLE_RANGE = (0.5476, 1.6296)
# ALOHA commands the gripper's joint; π₀'s angles begin where the other range does.
_COMMAND_RANGE = (-0.6213, 1.4910)


def _to_unit(value: Values, bounds: tuple[float, float]) -> Values:
    low, high = bounds
    return (value - low) / (high - low)


def _from_unit(value: Values, bounds: tuple[float, float]) -> Values:
    low, high = bounds
    return value * (high - low) + low


def _gripper_state_to_pi(value: Values) -> Values:
    opening = _from_unit(value, _FINGER_RANGE)
    sine = (_HORN**2 + opening**2 - _ARM**2) / (2 * _HORN * opening)
    return _to_unit(np.arcsin(np.clip(sine, -1.0, 1.0)), _ANGLE_RANGE)


def _gripper_state_from_pi(value: Values) -> Values:
    angle = _from_unit(value, _ANGLE_RANGE)
    opening = _HORN * np.sin(angle) + np.sqrt(_ARM**2 - (_HORN * np.cos(angle)) ** 2)
    return _to_unit(opening, _FINGER_RANGE)


@dataclass(frozen=True)
class AlohaJoints:
    """ALOHA's joints and grippers in the space π₀ was trained in: some joints flipped, grippers as angles.

    A gripper state outside what the linkage can do (about -0.11 to 1) is clipped on the way in, as in OpenPI, and comes
    back as that end. Grippers of actions go through another map, without clipping.
    """

    def __call__(self, data: Data) -> dict[str, np.ndarray]:
        return self._convert(data, _gripper_state_to_pi, lambda x: _from_unit(x, _COMMAND_RANGE) - _ANGLE_RANGE[0])

    def inverse(self, data: Data) -> dict[str, np.ndarray]:
        return self._convert(data, _gripper_state_from_pi, lambda x: _to_unit(x + _ANGLE_RANGE[0], _COMMAND_RANGE))

    def _convert(
        self, data: Data, gripper_state: Callable[[Values], Values], gripper_action: Callable[[Values], Values]
    ) -> dict[str, np.ndarray]:
        result = dict(data)
        for key, values in _states_and_actions(data).items():
            if values.shape[-1] != ALOHA_DIM:
                raise DataError(
                    f"{key} has {values.shape[-1]} dimensions; ALOHA has {ALOHA_DIM} (two arms of six joints and a "
                    "gripper). For another robot, use adapt = 'none'."
                )
            gripper = gripper_state if key == "state" else gripper_action
            converted = _FLIPS * values.astype(np.float64)
            converted[..., _GRIPPERS] = gripper(converted[..., _GRIPPERS])
            result[key] = converted
        return result


# --- delta actions ---------------------------------------------------------------------------------------------------


def make_mask(*dims: int) -> tuple[bool, ...]:
    """A mask in runs: n stands for n dimensions that are set, -n for n that are not; (6, -1) is one arm."""
    return tuple(value > 0 for value in dims for _ in range(abs(value)))


@dataclass(frozen=True)
class DeltaActions:
    """Actions as distances from the state at the beginning of their chunk, where the mask says so."""

    mask: tuple[bool, ...]

    def __call__(self, data: Data) -> dict[str, np.ndarray]:
        return self._shift(data, np.subtract)

    def inverse(self, data: Data) -> dict[str, np.ndarray]:
        return self._shift(data, np.add)

    def _shift(self, data: Data, combine: Callable[[Values, Values], Values]) -> dict[str, np.ndarray]:
        given = _states_and_actions(data)
        if "actions" not in given:
            return dict(data)
        if "state" not in given:
            raise DataError("actions relative to the state need the state; it is not in the data.")
        state, actions = given["state"], given["actions"]
        dims = max(np.flatnonzero(self.mask), default=-1) + 1  # the others are absolute
        if dims > min(state.shape[-1], actions.shape[-1]):
            raise DataError(
                f"the delta mask makes {dims} dimensions relative, but the state has {state.shape[-1]} and the actions "
                f"have {actions.shape[-1]}: both need them."
            )
        batch = state.shape[:-1]
        if batch != actions.shape[:-2][: len(batch)]:
            raise DataError(f"a state of shape {state.shape} does not belong to actions of shape {actions.shape}.")
        origin = np.where(self.mask[:dims], state[..., :dims], 0)
        origin = origin.reshape(*batch, *[1] * (actions.ndim - 1 - len(batch)), dims)
        shifted = combine(actions[..., :dims], origin)
        return {**data, "actions": np.concatenate([shifted, actions[..., dims:]], axis=-1)}


# --- normalization ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normalize:
    """States and actions to about unit size: by mean and deviation (π₀), or the 1 % and 99 % quantiles to ±1 (π₀.₅).

    Statistics wider than the data are cut to it. On the way back data may be wider than the statistics (padding): as in
    OpenPI, quantiles leave the rest alone and the z-score takes mean 0 and deviation 1 for it.
    """

    stats: Mapping[str, NormStats]
    quantiles: bool

    def __post_init__(self) -> None:
        for key, stats in self.stats.items():
            if self.quantiles and (stats.q01 is None or stats.q99 is None):
                raise DataError(
                    f"the statistics of {key!r} have no quantiles (q01, q99), which a π₀.₅ model is normalized with: "
                    "compute the statistics again from the data."
                )

    def __call__(self, data: Data) -> dict[str, np.ndarray]:
        result = dict(data)
        for key, values in _states_and_actions(data).items():
            width = values.shape[-1]
            offset, scale = self._offset_and_scale(key)
            if width > len(offset):
                raise DataError(
                    f"{key} has {width} dimensions, but its statistics have {len(offset)}: they are of another robot, "
                    "or of fewer columns. Compute the statistics of this data."
                )
            result[key] = (values - offset[:width]) / scale[:width]
            if self.quantiles:
                result[key] = result[key] * 2.0 - 1.0
        return result

    def inverse(self, data: Data) -> dict[str, np.ndarray]:
        result = dict(data)
        for key, values in _states_and_actions(data).items():
            offset, scale = self._offset_and_scale(key)
            width = min(values.shape[-1], len(offset))
            known, rest = np.split(values, [width], axis=-1)
            if self.quantiles:
                known = (known + 1.0) / 2.0
            else:
                rest = rest * np.float64(1.0 + EPSILON)
            result[key] = np.concatenate([known * scale[:width] + offset[:width], rest], axis=-1)
        return result

    def _offset_and_scale(self, key: str) -> tuple[Float[np.ndarray, " dims"], Float[np.ndarray, " dims"]]:
        if key not in self.stats:
            raise DataError(f"there are no statistics of {key!r}, only of {', '.join(self.stats) or 'nothing'}.")
        stats = self.stats[key]
        if not self.quantiles:
            return stats.mean, stats.std + EPSILON
        assert stats.q01 is not None
        assert stats.q99 is not None
        return stats.q01, stats.q99 - stats.q01 + EPSILON


# --- width -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PadToWidth:
    """Zeros behind states and actions up to the width of the model; the inverse cuts them off again.

    A width of None takes what comes; there is then no way back.
    """

    width: int
    state_dim: int | None
    action_dim: int | None

    def __post_init__(self) -> None:
        for key in ("state", "actions"):
            self._check_fits(key, self._dim(key) or 0)

    def __call__(self, data: Data) -> dict[str, np.ndarray]:
        result = dict(data)
        for key, values in _states_and_actions(data).items():
            given, dim = values.shape[-1], self._dim(key)
            if dim is not None and given != dim:
                raise DataError(
                    f"{key} has {given} dimensions instead of {dim}, which the robot, or its statistics, say it has. "
                    "Where the last dimensions are always 0, give the robot its state_dim and action_dim."
                )
            self._check_fits(key, given)
            result[key] = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, self.width - given)])
        return result

    def inverse(self, data: Data) -> dict[str, np.ndarray]:
        result = dict(data)
        for key, values in _states_and_actions(data).items():
            dim = self._dim(key)
            if dim is None:
                raise DataError(
                    f"how many dimensions of {key} belong to the robot is not known: give the robot its state_dim and "
                    "action_dim, or normalization statistics."
                )
            if values.shape[-1] != self.width:
                raise DataError(f"{key} of the model should have {self.width} dimensions, not {values.shape[-1]}.")
            result[key] = values[..., :dim]
        return result

    def _dim(self, key: str) -> int | None:
        return self.state_dim if key == "state" else self.action_dim

    def _check_fits(self, key: str, dim: int) -> None:
        if dim > self.width:
            raise DataError(
                f"{key} has {dim} dimensions, but the model takes {self.width}: use a model with action_dim >= {dim} "
                f"(e.g. Pi0Config(action_dim={dim}))."
            )


def _states_and_actions(data: Data) -> dict[str, Values]:
    """Those of the two that are present, as floats (integers become float64) with the axes they must have."""
    result = {}
    for key, axes in (("state", "(..., dimensions)"), ("actions", "(..., horizon, dimensions)")):
        if key in data:
            values = np.asarray(data[key])
            if values.dtype.kind not in "fiu":
                raise DataError(f"{key} should be numbers; it has dtype {values.dtype}.")
            if values.ndim < axes.count(","):
                raise DataError(f"{key} has shape {values.shape}; expected {axes}.")
            result[key] = values if values.dtype.kind == "f" else values.astype(np.float64)
    return result


# --- images ----------------------------------------------------------------------------------------------------------


def to_uint8_hwc(
    image: UInt8[np.ndarray, "*batch _ _ _"] | Float[np.ndarray, "*batch _ _ _"],
) -> UInt8[np.ndarray, "*batch h w 3"]:
    """Images with channels first or last, uint8 or float in [0, 1], as uint8 with channels last.

    As in OpenPI, floats are truncated rather than rounded, and where both ends have three entries channels are first.
    """
    if image.ndim < 3 or 3 not in (image.shape[-3], image.shape[-1]):
        raise DataError(
            f"an image has shape {image.shape}; expected three color channels, first (..., 3, height, width) or last "
            "(..., height, width, 3)."
        )
    if np.issubdtype(image.dtype, np.floating):
        low, high = float(np.min(image, initial=0.0)), float(np.max(image, initial=0.0))
        # Written so that NaN fails too.
        if not (low >= -1e-5 and high <= 1 + 1e-5):
            raise DataError(
                f"a float image has values from {low:.4g} to {high:.4g}; they should lie in [0, 1]. "
                "Pass pixels of 0 to 255 as uint8."
            )
        image = (255 * image).astype(np.uint8)
    elif image.dtype != np.uint8:
        raise DataError(f"an image has dtype {image.dtype}; expected uint8 (0 to 255) or floats in [0, 1].")
    return np.moveaxis(image, -3, -1) if image.shape[-3] == 3 else image


def resize_with_pad(
    image: UInt8[np.ndarray, "*batch _ _ 3"], height: int, width: int
) -> UInt8[np.ndarray, "*batch {height} {width} 3"]:
    """Scale images to fit inside height × width without distortion (PIL's bilinear) and center them on black."""
    if image.dtype != np.uint8 or image.ndim < 3 or image.shape[-1] != 3 or 0 in image.shape[-3:]:
        raise DataError(
            f"an image to be resized has dtype {image.dtype} and shape {image.shape}; expected uint8 with shape "
            "(..., height, width, 3)."
        )
    if image.shape[-3:-1] == (height, width):
        return image
    batch, (old_height, old_width) = image.shape[:-3], image.shape[-3:-1]
    ratio = max(old_width / width, old_height / height)
    new_height, new_width = int(old_height / ratio), int(old_width / ratio)
    if not (new_height and new_width):
        raise DataError(f"an image of {old_height} × {old_width} is too narrow to be fitted into {height} × {width}.")
    # The smaller half of an odd margin goes first.
    top, left = (height - new_height) // 2, (width - new_width) // 2
    result = np.zeros((*batch, height, width, 3), np.uint8)
    # One image at a time: PIL knows no batches, and its own work outweighs the loop. Rows before columns, because that
    # is how PIL did it until version 13 began to choose the order, and each pass rounds.
    for index in np.ndindex(batch):
        rows = Image.fromarray(image[index]).resize((new_width, old_height), Image.Resampling.BILINEAR)
        resized = rows.resize((new_width, new_height), Image.Resampling.BILINEAR)
        result[index][top : top + new_height, left : left + new_width] = resized
    return result
