"""Films of episodes for people: GIF, MP4, a strip of pictures, and many episodes side by side."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int32, UInt8
from PIL import Image

from pirl.data.lerobot.video import encode_video
from pirl.errors import ConfigError
from pirl.files import write_file, writing

Frames = UInt8[np.ndarray, "T H W 3"]
FilmFormat = Literal["gif", "mp4", "png"]
_GREEN, _RED, _GREY = (46, 160, 67), (218, 54, 51), (90, 96, 105)
_GIF_RATE = 25  # pictures per second: what browsers show reliably, and half the bytes of 50
_HOLD = 100  # hundredths of a second that a GIF rests on its last picture before it begins again


@dataclass(frozen=True)
class Film:
    """What one episode looked like, and how it ended; None where that is not known."""

    frames: Frames
    success: bool | None


def film_format(path: Path) -> FilmFormat:
    """The format that a file name asks for."""
    suffix = path.suffix.lower().removeprefix(".")
    for known in ("gif", "mp4", "png"):
        if suffix == known:
            return known
    raise ConfigError(f"{path}: the name of a film should end in .gif, .mp4 or .png.")


def write_films(path: Path, films: Sequence[Film], fps: int, *, columns: int | None = None, side: int = 128) -> None:
    """Write episodes side by side (GIF, MP4), or a strip of each below the other (PNG), as the file name asks."""
    kind = film_format(path)
    if kind == "png":
        write_png(path, strips(films, side=side))
    elif kind == "gif":
        write_gif(path, mosaic(films, columns, side=side), fps)
    else:
        write_mp4(path, mosaic(films, columns, side=side), fps)


def mosaic(films: Sequence[Film], columns: int | None = None, *, side: int = 128, border: int = 2) -> Frames:
    """Episodes in a grid. One that ends earlier holds its last picture, framed in green (success) or red.

    Pictures smaller than `side` are enlarged by a whole factor, so that their pixels stay pixels.
    """
    tiles = [_enlarge(film.frames, side) for film in films]
    height, width = (max(tile.shape[axis] for tile in tiles) + 2 * border for axis in (1, 2))
    columns = columns or math.ceil(math.sqrt(len(films) * height / width))
    # One picture more than the longest episode, so that its outcome is seen as well.
    length = max(len(tile) for tile in tiles) + 1
    canvas = np.full((length, -(-len(films) // columns) * height, columns * width, 3), _GREY, np.uint8)
    for place, (tile, film) in enumerate(zip(tiles, films, strict=True)):
        top, left = place // columns * height, place % columns * width
        cell = canvas[:, top : top + height, left : left + width]
        cell[len(tile) :] = _colour(film)
        inside = cell[:, border : border + tile.shape[1], border : border + tile.shape[2]]
        inside[: len(tile)] = tile
        inside[len(tile) :] = tile[-1]
    return canvas


def strips(films: Sequence[Film], *, pictures: int = 8, side: int = 128, border: int = 2) -> UInt8[np.ndarray, "H W 3"]:
    """Each episode as a row of pictures, evenly spaced from its first to its last, framed by its outcome."""
    rows = []
    for film in films:
        chosen = film.frames[np.linspace(0, len(film.frames) - 1, pictures).round().astype(int)]
        framed = [mosaic([Film(picture[None], film.success)], side=side, border=border)[-1] for picture in chosen]
        rows.append(np.concatenate(framed, axis=1))
    return np.concatenate(rows)


def write_gif(path: Path, frames: Frames, fps: int) -> None:
    """An animation that repeats, at most 25 pictures per second, with one palette for all of them."""
    every = max(1, math.ceil(fps / _GIF_RATE))
    # Always with the last picture, which shows how it ended.
    shown = [*range(0, len(frames) - 1, every), len(frames) - 1]
    times = [round(100 * index / fps) for index in shown] + [round(100 * len(frames) / fps) + _HOLD]
    durations = [10 * int(step) for step in np.diff(times)]
    first, *others = _with_palette(frames[shown])
    file = io.BytesIO()
    first.save(file, "gif", save_all=True, append_images=others, duration=durations, loop=0, optimize=True)
    _write(path, file.getvalue())


def write_mp4(path: Path, frames: Frames, fps: int) -> None:
    """H.264 in 4:2:0 colour, which every player and browser shows."""
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    _write(path, encode_video(frames, fps=fps, codec="h264"))


def write_png(path: Path, picture: UInt8[np.ndarray, "H W 3"]) -> None:
    """One picture."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png", optimize=True)
    _write(path, file.getvalue())


def _write(path: Path, content: bytes) -> None:
    with writing("the film", path.parent, "Choose another place."):
        write_file(path, content)


def _colour(film: Film) -> tuple[int, int, int]:
    return _GREY if film.success is None else _GREEN if film.success else _RED


def _enlarge(frames: Frames, side: int) -> UInt8[np.ndarray, "T H2 W2 3"]:
    factor = max(1, side // min(frames.shape[1:3]))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2) if factor > 1 else frames


def _with_palette(frames: Frames) -> list[Image.Image]:
    """The pictures in the same 255 colours, each pixel in the nearest of them (Pillow's own search is approximate).

    One of 256 is left to Pillow, for what does not change from one picture to the next: that makes small files.
    """
    packed = [_pack(frame) for frame in frames]
    present = np.zeros(2**24, bool)
    for picture in packed:
        present[picture] = True
    used = np.flatnonzero(present)
    colours = np.stack([used >> 16, used >> 8 & 255, used & 255], axis=-1)
    # The colours of outcomes, thin lines all, are always kept.
    reserved = np.array([_GREEN, _RED, _GREY])
    palette = np.concatenate([reserved, colours])
    if len(palette) > 255:
        sample = np.concatenate([*frames[:: max(1, len(frames) // 16)], frames[-1]])
        common = Image.fromarray(sample).quantize(255 - len(reserved), Image.Quantize.MEDIANCUT)
        palette = np.concatenate([reserved, np.reshape(common.getpalette() or [], (-1, 3))])
    nearest = np.zeros(2**24, np.uint8)
    for some in np.array_split(np.arange(len(used)), -(-len(used) // 4096)):
        distances = np.square(colours[some, None] - palette).sum(axis=-1)
        nearest[used[some]] = distances.argmin(axis=-1)
    images = [Image.fromarray(nearest[picture]) for picture in packed]
    for image in images:
        image.putpalette(palette.astype(np.uint8).tobytes())
    return images


def _pack(frame: UInt8[np.ndarray, "H W 3"]) -> Int32[np.ndarray, "H W"]:
    red, green, blue = np.moveaxis(frame.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue
