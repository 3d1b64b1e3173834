"""Damage to files, videos and pictures."""

import functools
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np

from sample_datasets.broken_rows import POINTER, broken, damage, data_of, outside, replaced, video_of
from sample_datasets.build import CAMERAS, Built, _encoded, draw_bars, edit_column, edit_info, info_of, write_video

# Damage to whole files.


def file_damage(name: str, description: str, change: Callable[[Path], object], instead: str = "") -> None:
    """List a damaged parquet file and a damaged video: a complaint names the file, or what is said instead."""
    damage(f"{name}_parquet", description, lambda built: void(change(data_of(built))), f"<data>{instead}")
    options = {"cameras": "video"}
    damage(f"{name}_video", description, lambda built: void(change(video_of(built))), f"<video>{instead}", **options)


def void(_: object) -> None:
    """Turns an expression's value into none, so that it is not taken for a new truth."""


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path) -> None:
    content = path.read_bytes()
    if path.suffix == ".mp4":
        start, stop = content.index(b"mdat") + 4, len(content)
    else:
        start, stop = 4, len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:start] + b"\xff" * (stop - start) + content[stop:])


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


file_damage("missing", "The file is absent.", Path.unlink, "|episode 1")
file_damage("truncated", "The second half of the file is gone.", cut)
file_damage("garbled", "The index of the file is sound, what it points at is overwritten.", garble)
file_damage("pointer_for", "The file is a pointer of Git LFS.", lambda path: path.write_bytes(POINTER))
file_damage("empty", "The file has no bytes.", lambda path: path.write_bytes(b""))
file_damage("directory_for", "In place of the file there is a directory.", become_directory)
damage("no_data", "There is no data/ at all: name it.", lambda built: shutil.rmtree(built.root / "data"), "data")
damage(
    "no_videos",
    "There is no videos/ at all.",
    lambda built: shutil.rmtree(built.root / "videos"),
    "video",
    cameras="video",
)


def frames_damage(name: str, description: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """List a sound video of wrong frames: a complaint names the camera and the episode, or the file."""

    def variant(built: Built) -> None:
        members = [episode for episode in built.episodes if episode.video_files[CAMERAS[0]] == video_of(built)]
        frames = np.concatenate([episode.frames[CAMERAS[0]] for episode in members])
        write_video(video_of(built), change(frames), built.fps, built.codec)

    damage(name, description, variant, "cam_high|<video>", "episode|<video>", cameras="video")


frames_damage("short_video", "The video has two frames too few.", lambda frames: frames[:-2])
frames_damage(
    "long_video", "The video has two frames too many: warn.", lambda frames: frames[[*range(len(frames)), 0, 0]]
)
frames_damage(
    "other_size", "Pictures twice as large as in other files.", lambda frames: frames.repeat(2, 1).repeat(2, 2)
)


@broken("<video>", cameras="video")
def sound_for_video(built: Built) -> None:
    """A video file has a sound track and no picture: name it."""
    with av.open(str(video_of(built)), "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def image_damage(name: str, description: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """List the damage of one stored image: a complaint names the camera and the episode."""
    variant = functools.partial(edit_column, column=CAMERAS[0], change=replaced(2, change))
    damage(name, description, lambda built: variant(built), "cam_high", "episode 1", cameras="image")


def enormous(png: bytes) -> bytes:
    """The same PNG with a header that promises 60000 × 60000 pixels."""
    header = b"IHDR" + struct.pack(">II", 60000, 60000) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


image_damage("truncated_png", "Half of a PNG is gone.", lambda image: image | {"bytes": image["bytes"][:60]})
image_damage("text_for_png", "The bytes of an image are text.", lambda image: image | {"bytes": b"not an image"})
image_damage("empty_png", "An image has no bytes.", lambda image: image | {"bytes": b""})
image_damage("null_image", "An image is null.", lambda image: None)
image_damage("enormous_png", "A PNG claims 3.6e9 pixels.", lambda image: image | {"bytes": enormous(image["bytes"])})
image_damage("other_image_size", "An image is smaller than others.", lambda _: _encoded(draw_bars(0, 1, 2, (16, 32))))


@broken("cam_high", "episode 1", cameras="image")
def image_elsewhere(built: Built) -> None:
    """An image has no bytes but the path of a picture outside the dataset: do not follow it; name camera and episode."""
    picture = outside(built) / "secret.png"
    picture.write_bytes(_encoded(draw_bars(0, 1, 2, (32, 48)))["bytes"])
    edit_column(built, CAMERAS[0], replaced(2, {"bytes": None, "path": str(picture)}))


def ghost_camera(built: Built) -> None:
    """info.json declares a camera of which there is neither video nor column: name it."""
    edit_info(built, ["features", "observation.images.ghost"], info_of(built)["features"][CAMERAS[0]])


for kind in ("video", "image"):
    description = f"info.json declares a camera of dtype {kind} that is nowhere."
    damage(f"ghost_{kind}_camera", description, lambda built: ghost_camera(built), "images.ghost", cameras=kind)
