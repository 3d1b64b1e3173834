"""Images of many tables at once in plain numpy: everything on the table is a sprite, drawn once and then pasted."""

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt8

from pirl.envs.tabletop.world import BLOCK, BLOCK_COLORS, FINGERS, TABLE, ZONE, ZONE_COLORS, Tables

OVERHEAD, WRIST = 0.215, 0.10  # half the side of what each camera sees, in metres

_RGB = {"red": (206, 58, 52), "blue": (48, 98, 190), "yellow": (240, 186, 44), "green": (54, 150, 88)}
_BLOCKS, _ZONES = (np.array([_RGB[name] for name in names], np.float32) for names in (BLOCK_COLORS, ZONE_COLORS))
_DISTRACTORS = np.array([(150, 98, 168), (226, 132, 168), (96, 178, 196), (238, 238, 232)], np.float32)
# Half-way between black and white, which is zero to the policy: a table that says nothing lets it see what is on it.
_TOP, _FLOOR = np.array((126, 129, 132), np.float32), np.array((92, 94, 100), np.float32)
_STEEL, _DARK, _WHITE = (np.array(rgb, np.float32) for rgb in ((196, 200, 208), (52, 55, 62), (255, 255, 255)))
_OPENINGS = 25  # the fingers are drawn in so many positions


@dataclass(frozen=True)
class View:
    """A square camera that looks straight down: half the side of what it sees, in metres, and its size in pixels."""

    half: float
    size: int

    @property
    def scale(self) -> float:
        return self.size / (2 * self.half)

    @property
    def phases(self) -> int:
        """Into how many positions within a pixel sprites are drawn, along each side."""
        return 4 if self.size < 200 else 1


def draw(
    tables: Tables, objects: int, view: View, centers: Float64[np.ndarray, "n 2"]
) -> UInt8[np.ndarray, "n size size 3"]:
    """The tables from above, each around its centre; up is +y. The first `objects` bodies are blocks."""
    canvas = _bare_tables(view, centers)
    for zone in range(tables.zones.shape[1]):
        _paste(canvas, view, tables.zones[:, zone] - centers, _zone(view, zone))
    for body in range(tables.bodies.shape[1]):
        sprite = _body(view, body if body < objects else body - objects, body < objects)
        lifted = (tables.held == body).astype(np.int64)
        _paste(canvas, view, tables.bodies[:, body] - centers, sprite, lifted)
    opening = np.rint(tables.opening * (_OPENINGS - 1)).astype(np.int64)
    _paste(canvas, view, tables.gripper - centers, _gripper(view), opening)
    canvas += 0.5  # mixtures of colors are colors: nothing to clip
    return canvas.astype(np.uint8)


def _bare_tables(view: View, centers: Float64[np.ndarray, "n 2"]) -> Float32[np.ndarray, "n size size 3"]:
    axis = (np.arange(view.size) + 0.5) / view.scale - view.half
    x, y = axis + centers[:, :1], axis + centers[:, 1:]
    # Grain runs along y, so that the table is a product of one row and one column.
    grain = 1.0 + 0.018 * np.sin(x * 91.0) + 0.014 * np.sin(x * 237.0 + 1.0) + 0.01 * np.sin(x * 613.0 + 2.0)
    on_x, on_y = (np.clip(0.5 + (TABLE - np.abs(along)) * view.scale, 0, 1).astype(np.float32) for along in (x, y))
    column = on_x[:, None, :, None] * (grain.astype(np.float32)[:, None, :, None] * _TOP - _FLOOR)
    canvas = on_y[:, ::-1, None, None] * column
    canvas += _FLOOR
    return canvas


# --- sprites ----------------------------------------------------------------------------------------------------------


class Sprite:
    """A drawing with soft edges, in several variants, at every position within a pixel.

    A sprite is what it adds to an image (`paint`) and how much of the image it lets through (`gap`).
    """

    def __init__(self, view: View, reach: float, variants: int = 1) -> None:
        self.scale, self.phases = view.scale, view.phases
        self.reach = int(np.ceil(reach * view.scale)) + 2
        side = 2 * self.reach + 1
        shape = (variants, self.phases**2, side, side)
        self.paint, self.gap = np.zeros((*shape, 3), np.float32), np.ones((*shape, 1), np.float32)

    def box(
        self,
        variant: int,
        center: tuple[float, float],
        half: tuple[float, float],
        color: Float32[np.ndarray, "3"],
        *,
        alpha: float = 1.0,
        corner: float = 0.3,
        softness: float = 0.0,
        rim: float | None = None,
    ) -> None:
        """Draw a rounded box, in metres from the middle; `rim` is the width of a frame (None: filled)."""
        width, height = half[0] * self.scale, half[1] * self.scale
        pixel = np.arange(2 * self.reach + 1) - self.reach + 0.5
        phase = (np.arange(self.phases) + 0.5) / self.phases
        x = pixel - phase[:, None] - center[0] * self.scale
        y = pixel - phase[:, None] + center[1] * self.scale
        radius = corner * min(width, height)
        dx = (np.abs(x) - width + radius)[None, :, None, :]
        dy = (np.abs(y) - height + radius)[:, None, :, None]
        outside = np.hypot(np.maximum(dx, 0), np.maximum(dy, 0))
        distance = outside + np.minimum(np.maximum(dx, dy), 0) - radius
        if rim is not None:
            line = max(rim * self.scale, 1.0) / 2
            distance = np.abs(distance + line) - line
        cover = alpha * np.clip(0.5 - distance / max(1.0, softness * self.scale), 0, 1)
        cover = cover.reshape(*self.gap.shape[1:]).astype(np.float32)
        self.paint[variant] += cover * (color - self.paint[variant])
        self.gap[variant] *= 1 - cover


def _paste(
    canvas: Float32[np.ndarray, "n size size 3"],
    view: View,
    positions: Float64[np.ndarray, "n 2"],
    sprite: Sprite,
    variants: Int64[np.ndarray, " n"] | None = None,
) -> None:
    """Put a sprite on every table, in metres from the middle of the image. What is out of sight costs nothing."""
    at = positions * view.scale * (1, -1) + view.size / 2
    whole = np.floor(at)
    column_phase, row_phase = np.floor((at - whole) * view.phases).astype(np.int64).T
    columns, rows = (whole.astype(np.int64) - sprite.reach).T
    side = 2 * sprite.reach + 1
    seen = (np.maximum(columns, rows) < view.size) & (np.minimum(columns, rows) > -side)
    phases = (row_phase * view.phases + column_phase).tolist()
    chosen = [0] * len(positions) if variants is None else variants.tolist()
    # A loop over tables, because slices are several times faster than indexing every pixel of every table.
    for table, column, row in zip(
        np.flatnonzero(seen).tolist(), columns[seen].tolist(), rows[seen].tolist(), strict=True
    ):
        left, top = max(column, 0), max(row, 0)
        right, bottom = min(column + side, view.size), min(row + side, view.size)
        part = (
            chosen[table],
            phases[table],
            slice(top - row, bottom - row),
            slice(left - column, right - column),
        )
        below = canvas[table, top:bottom, left:right]
        below *= sprite.gap[part]
        below += sprite.paint[part]


@functools.lru_cache(maxsize=64)
def _zone(view: View, color: int) -> Sprite:
    sprite, rgb = Sprite(view, ZONE), _ZONES[color]
    sprite.box(0, (0.0, 0.0), (ZONE, ZONE), 0.72 * rgb + 0.28 * _WHITE, alpha=0.6, corner=0.25)
    sprite.box(0, (0.0, 0.0), (ZONE, ZONE), rgb, corner=0.25, rim=0.007)
    return sprite


@functools.lru_cache(maxsize=128)
def _body(view: View, number: int, is_block: bool) -> Sprite:
    """A block or a distractor on the table (variant 0) or lifted from it (1)."""
    rgb, corner = (_BLOCKS[number], 0.28) if is_block else (_DISTRACTORS[number], 1.0)
    sprite = Sprite(view, BLOCK + 0.018, variants=2)
    for variant, height in enumerate((0.005, 0.012)):
        shadow = (0.6 * height, -height)
        sprite.box(variant, shadow, (BLOCK, BLOCK), _DARK, alpha=0.35, corner=corner, softness=0.008)
        sprite.box(variant, (0.0, 0.0), (BLOCK, BLOCK), 0.78 * rgb, corner=corner)
        sprite.box(variant, (-0.0015, 0.0015), (0.84 * BLOCK, 0.84 * BLOCK), rgb, corner=corner)
        shine = (0.22 * BLOCK, 0.22 * BLOCK)
        sprite.box(variant, (-0.010, 0.010), shine, _WHITE, alpha=0.35, corner=1.0, softness=0.006)
    return sprite


@functools.lru_cache(maxsize=16)
def _gripper(view: View) -> Sprite:
    """A bar with two fingers, open towards -y so that what they hold stays in sight; one variant for every opening."""
    bar, finger = (FINGERS + 0.013, 0.009), (0.0065, 0.024)
    sprite = Sprite(view, FINGERS + 0.026, variants=_OPENINGS)
    for variant in range(_OPENINGS):
        aside = FINGERS * variant / (_OPENINGS - 1) + finger[0]
        parts = [((0.0, 0.034), bar), ((-aside, 0.004), finger), ((aside, 0.004), finger)]
        for (x, y), half in parts:
            sprite.box(variant, (x + 0.008, y - 0.013), half, _DARK, alpha=0.25, corner=0.6, softness=0.008)
        for (x, y), half in parts:
            sprite.box(variant, (x, y), half, _DARK, corner=0.6)
            inner = (half[0] - 0.003, half[1] - 0.003)
            sprite.box(variant, (x - 0.001, y + 0.001), inner, _STEEL, corner=0.6)
    return sprite
