"""Which frames of which video file belong to which episode, found by counting frames."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pirl.data.lerobot.layout import Info, fill, pointer_advice, resolve_inside
from pirl.data.lerobot.metadata import Listing
from pirl.data.lerobot.rows import Rows
from pirl.data.lerobot.video import VideoIndex, index_video
from pirl.data.problems import Problem
from pirl.errors import DataError

MISSING, UNLISTED = "the video file is missing", "no video is listed for this episode"


@dataclass(frozen=True)
class Segment:
    """An episode's frames: from number `first` of a video file on."""

    video: VideoIndex
    first: int


def find_segments(
    root: Path, info: Info, listing: Listing, rows: Rows, wanted: Collection[int], camera: str
) -> tuple[dict[int, Segment], list[Problem]]:
    """Where episodes are in a camera's videos, by number, and what is wrong there.

    Only files of `wanted` episodes are opened, but all episodes (`rows`) count in the placing of those.
    """
    problems: list[Problem] = []
    by_file: dict[str, list[int]] = {}
    for position, episode in enumerate(rows.episode_ids.tolist()):
        relative = _video_file(info, listing, episode, camera)
        if relative is None:
            problems.append(Problem(UNLISTED, episode=episode, column=camera))
        else:
            by_file.setdefault(relative, []).append(position)
    numbers = rows.episode_ids.tolist()
    opened = {file: positions for file, positions in by_file.items() if any(numbers[p] in wanted for p in positions)}
    segments: dict[int, Segment] = {}
    # Most of the time goes into waiting for the disk.
    with ThreadPoolExecutor(16, "open-videos") as pool:
        videos = list(pool.map(lambda relative: _open_video(root, relative), opened))
    for (relative, video), positions in zip(videos, opened.values(), strict=True):
        if isinstance(video, str):
            problems += [Problem(video, "problem", numbers[position], relative, camera) for position in positions]
            continue
        if relative not in opened:
            message = f"info.json says videos/, the files are in {Path(relative).parts[0]}/; read from there"
            if not any(problem.message == message for problem in problems):
                problems.append(Problem(message, severity="note"))
        if info.is_v3:
            found = _split(video, relative, positions, info, listing, rows, camera, problems)
        else:
            found = _whole(video, relative, positions[0], rows, camera, problems)
        segments |= {numbers[position]: segment for position, segment in found.items()}
    return segments, problems


def _open_video(root: Path, relative: str) -> tuple[str, VideoIndex | str]:
    """The index of a video, or why there is none, and where the file is."""
    try:
        path = resolve_inside(root, relative, links=True)
        # Seen in hand-made data: the directory is called video, info.json says videos.
        if not path.is_file() and relative.startswith("videos/"):
            other = relative.replace("videos", "video", 1)
            if (place := resolve_inside(root, other, links=True)).is_file():
                path, relative = place, other
        if not path.is_file():
            return relative, pointer_advice(path) or MISSING
        return relative, index_video(path)
    except (OSError, ValueError, DataError) as error:
        return relative, str(error)


def _video_file(info: Info, listing: Listing, episode: int, camera: str) -> str | None:
    if not info.is_v3:
        return fill(info.video_path, chunk=episode // info.chunks_size, file=episode, camera=camera)
    listed = listing.episodes.get(episode)
    place = listed.videos.get(camera) if listed else None
    return fill(info.video_path, chunk=place.chunk, file=place.file, camera=camera) if place else None


def _whole(
    video: VideoIndex, relative: str, position: int, rows: Rows, camera: str, problems: list[Problem]
) -> dict[int, Segment]:
    """v2: a file is an episode. Frames beyond those of the data are left out, as LeRobot does by going by time."""
    length, episode = int(rows.starts[position + 1] - rows.starts[position]), int(rows.episode_ids[position])
    if len(video) > length:
        message = f"the video has {len(video)} frames, the data {length}; the first {length} frames are used"
        problems.append(Problem(message, "note", episode, relative, camera))
    elif len(video) < length:
        message = f"the video has {len(video)} frames, the data {length}, so which belong together cannot be told"
        problems.append(Problem(message, "problem", episode, relative, camera))
    return {position: Segment(video, 0)} if len(video) >= length else {}


def _split(
    video: VideoIndex,
    relative: str,
    positions: list[int],
    info: Info,
    listing: Listing,
    rows: Rows,
    camera: str,
    problems: list[Problem],
) -> dict[int, Segment]:
    """v3: episodes lie one after the other.

    If their lengths add up to the frames of the file, counting places them exactly: sums of durations drift, so start
    times may be slowly off, but a jump says that frames are missing from one episode and too many in another.
    Otherwise (episodes were removed from the lists, say) start times have to do. One can be believed if it is that of a
    frame, to a quarter of one, and the episode shares no frames with another.
    """
    starts_s = {p: listing.episodes[int(rows.episode_ids[p])].videos[camera].start_s for p in positions}
    positions = sorted(positions, key=lambda position: (starts_s[position], position))
    times = np.array([starts_s[position] for position in positions])
    lengths = rows.starts[np.array(positions) + 1] - rows.starts[positions]

    def complain(message: str, severity: Literal["problem", "note"] = "problem", place: int | None = None) -> None:
        episode = None if place is None else int(rows.episode_ids[positions[place]])
        problems.append(Problem(message, severity, episode, relative, camera))

    if lengths.sum() == len(video):
        firsts = np.cumsum(lengths) - lengths
        off = times * info.fps - firsts
        steps = np.diff(off, prepend=0)
        is_off = np.abs(off) > 0.5
        after_jump = np.logical_or.accumulate(is_off & (np.abs(steps) > 0.75))
        lost = "the video or the lists have lost frames"
        for place in np.flatnonzero(is_off).tolist():
            said = f"from_timestamp is {times[place]:.4f} s; counting frames gives {firsts[place] / info.fps:.4f} s"
            if after_jump[place]:
                complain(f"{said}: {lost}", place=place)
            else:
                complain(f"{said}, which is used", "note", place)
        for place in np.flatnonzero((steps[1:] < -0.75) & is_off[1:] & ~is_off[:-1]).tolist():
            complain(f"the next episode begins {-steps[place + 1]:.1f} frames too early: {lost}", place=place)
        return {position: Segment(video, first) for position, first in zip(positions, firsts.tolist(), strict=True)}
    firsts = np.array([video.nearest(time) for time in times.tolist()])
    shown = np.array([video.time(first) for first in firsts.tolist()])
    is_frame = np.abs(shown - times) * info.fps <= 0.25
    overlaps = firsts[:-1] + lengths[:-1] > firsts[1:]
    said = f"the video has {len(video)} frames, its {len(positions)} episodes have {lengths.sum()}"
    found = {}
    for place, (position, first, length) in enumerate(zip(positions, firsts.tolist(), lengths.tolist(), strict=True)):
        if first + length > len(video):
            complain(f"needs {length} frames from frame {first} on; {said}", place=place)
        elif not is_frame[place]:
            complain(f"from_timestamp {times[place]:.4f} s is that of no frame; {said}", place=place)
        elif overlaps[max(place - 1, 0) : place + 1].any():
            complain(f"shares frames with another episode, by from_timestamp; {said}", place=place)
        else:
            found[position] = Segment(video, first)
    if found:
        complain(f"{said}; they are placed by from_timestamp", "note")
    return found
