"""Videos of episodes: GIF, MP4, a strip of images, and many episodes side by side."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from pirl.data.lerobot.video import encode_video
from pirl.errors import ConfigError
from pirl.files import write_file, writing

Frames = UInt8[np.ndarray, "T H W 3"]
VideoFormat = Literal["gif", "mp4", "png"]
_GREEN, _RED, _GRAY = (46, 160, 67), (218, 54, 51), (90, 96, 105)
_GIF_RATE = 25  # images per second: what browsers show reliably, and half the bytes of 50
_HOLD = 100  # hundredths of a second that a GIF rests on its last image before it begins again
_BORDER = 2


@dataclass(frozen=True)
class Video:
    """The images of one episode, and whether it succeeded; None where that is not known."""

    frames: Frames
    success: bool | None


def video_format(path: Path) -> VideoFormat:
    suffix = path.suffix.lower().removeprefix(".")
    for known in ("gif", "mp4", "png"):
        if suffix == known:
            return known
    raise ConfigError(f"{path}: the name of a video should end in .gif, .mp4 or .png.")


def write_videos(path: Path, videos: Sequence[Video], fps: int, *, columns: int | None = None, side: int = 128) -> None:
    """Write episodes side by side (GIF, MP4), or a strip of each below the other (PNG), as the file name asks."""
    kind = video_format(path)
    if kind == "png":
        file = io.BytesIO()
        Image.fromarray(strips(videos, side=side)).save(file, "png", optimize=True)
        content = file.getvalue()
    elif kind == "gif":
        content = encode_gif(mosaic(videos, columns, side=side), fps)
    else:
        frames = mosaic(videos, columns, side=side)
        # H.264 in 4:2:0, which every player and browser shows, takes even sizes.
        frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
        content = encode_video(frames, fps=fps, codec="h264")
    with writing("the video", path.parent, "Choose another directory."):
        write_file(path, content)


def mosaic(videos: Sequence[Video], columns: int | None = None, *, side: int = 128) -> Frames:
    """Episodes in a grid. One that ends earlier holds its last image, framed in green (success) or red.

    Images smaller than `side` are enlarged by a whole factor, so that their pixels stay pixels.
    """
    tiles = [_enlarge(video.frames, side) for video in videos]
    height, width = (max(tile.shape[axis] for tile in tiles) + 2 * _BORDER for axis in (1, 2))
    columns = columns or math.ceil(math.sqrt(len(videos) * height / width))
    # One image more than the longest episode, so that its outcome is shown as well.
    length = max(len(tile) for tile in tiles) + 1
    canvas = np.full((length, -(-len(videos) // columns) * height, columns * width, 3), _GRAY, np.uint8)
    for slot, (tile, video) in enumerate(zip(tiles, videos, strict=True)):
        top, left = slot // columns * height, slot % columns * width
        cell = canvas[:, top : top + height, left : left + width]
        cell[len(tile) :] = _GRAY if video.success is None else _GREEN if video.success else _RED
        inside = cell[:, _BORDER : _BORDER + tile.shape[1], _BORDER : _BORDER + tile.shape[2]]
        inside[: len(tile)] = tile
        inside[len(tile) :] = tile[-1]
    return canvas


def strips(videos: Sequence[Video], *, images: int = 8, side: int = 128) -> UInt8[np.ndarray, "H W 3"]:
    """Each episode as a row of images, evenly spaced from its first to its last, framed by its outcome."""
    rows = []
    for video in videos:
        chosen = video.frames[np.linspace(0, len(video.frames) - 1, images).round().astype(int)]
        framed = [mosaic([Video(image[None], video.success)], side=side)[-1] for image in chosen]
        rows.append(np.concatenate(framed, axis=1))
    return np.concatenate(rows)


def encode_gif(frames: Frames, fps: int) -> bytes:
    """An animation that repeats, at most 25 images per second, with one palette for all of them."""
    every = max(1, math.ceil(fps / _GIF_RATE))
    # Always with the last image, which shows how it ended.
    shown = [*range(0, len(frames) - 1, every), len(frames) - 1]
    times = [round(100 * index / fps) for index in shown] + [round(100 * len(frames) / fps) + _HOLD]
    durations = [10 * int(step) for step in np.diff(times)]
    first, *others = _with_palette(frames[shown])
    file = io.BytesIO()
    first.save(file, "gif", save_all=True, append_images=others, duration=durations, loop=0, optimize=True)
    return file.getvalue()


def _enlarge(frames: Frames, side: int) -> UInt8[np.ndarray, "T H2 W2 3"]:
    factor = max(1, side // min(frames.shape[1:3]))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def _with_palette(frames: Frames) -> list[Image.Image]:
    """The images in the same 255 colors, each pixel in the nearest of them (Pillow's own search is approximate).

    One of 256 is left to Pillow, for what does not change from one image to the next: that makes small files.
    """
    packed = [frame.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32) for frame in frames]
    is_used = np.zeros(2**24, bool)
    for frame in packed:
        is_used[frame] = True
    used = np.flatnonzero(is_used)
    colors = np.stack([used >> 16, used >> 8 & 255, used & 255], axis=-1)
    # The colors of outcomes, thin lines all, are always kept.
    palette = np.concatenate([[_GREEN, _RED, _GRAY], colors])
    if len(palette) > 255:
        sample = np.concatenate([*frames[:: max(1, len(frames) // 16)], frames[-1]])
        common = Image.fromarray(sample).quantize(252, Image.Quantize.MEDIANCUT)
        palette = np.concatenate([[_GREEN, _RED, _GRAY], np.reshape(common.getpalette() or [], (-1, 3))])
    nearest = np.zeros(2**24, np.uint8)
    for some in np.array_split(np.arange(len(used)), -(-len(used) // 4096)):
        nearest[used[some]] = np.square(colors[some, None] - palette).sum(axis=-1).argmin(axis=-1)
    images = [Image.fromarray(nearest[frame]) for frame in packed]
    for image in images:
        image.putpalette(palette.astype(np.uint8).tobytes())
    return images
