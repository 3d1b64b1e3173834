"""Which frames of which video file belong to which episode, found by counting frames."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pirl.data.lerobot.layout import Info, fill, resolve_inside
from pirl.data.lerobot.metadata import Listing
from pirl.data.lerobot.rows import Rows
from pirl.data.lerobot.video import VideoIndex, index_video
from pirl.data.problems import Problem
from pirl.errors import DataError


@dataclass(frozen=True)
class Segment:
    """An episode's frames: from number `first` of a video file on."""

    video: VideoIndex
    first: int


def find_segments(
    root: Path, info: Info, listing: Listing, rows: Rows, camera: str
) -> tuple[list[Segment | None], list[Problem]]:
    """The place of every episode in a camera's videos (None where it cannot be told), and what is wrong there."""
    problems: list[Problem] = []
    by_file: dict[str, list[int]] = {}
    for position, episode in enumerate(rows.episode_ids.tolist()):
        relative = _video_file(info, listing, episode, camera)
        if relative is None:
            problems.append(Problem("no video is listed for this episode", episode=episode, column=camera))
        else:
            by_file.setdefault(relative, []).append(position)
    segments: list[Segment | None] = [None] * len(rows.episode_ids)
    for relative, positions in by_file.items():
        try:
            path, note = _existing(root, relative)
            if note and not any(problem.message == note.message for problem in problems):
                problems.append(note)
            video = index_video(path)
        except (OSError, ValueError) as error:
            for episode in rows.episode_ids[positions].tolist():
                problems.append(Problem(str(error), episode=episode, file=relative, column=camera))
            continue
        if info.is_v3:
            found = _split(video, relative, positions, info, listing, rows, camera, problems)
        else:
            found = _whole(video, relative, positions[0], rows, camera, problems)
        for position, segment in found.items():
            segments[position] = segment
    return segments, problems


def _video_file(info: Info, listing: Listing, episode: int, camera: str) -> str | None:
    if not info.is_v3:
        return fill(info.video_path, chunk=episode // info.chunks_size, file=episode, camera=camera)
    listed = listing.episodes.get(episode)
    place = listed.videos.get(camera) if listed else None
    return fill(info.video_path, chunk=place.chunk, file=place.file, camera=camera) if place else None


def _existing(root: Path, relative: str) -> tuple[Path, Problem | None]:
    path = resolve_inside(root, relative)
    if path.is_file():
        return path, None
    # Seen in hand-made data: the directory is called video, info.json says videos.
    if relative.startswith("videos/"):
        other = resolve_inside(root, relative.replace("videos", "video", 1))
        if other.is_file():
            return other, Problem("info.json says videos/, the files are in video/; read from there", severity="note")
    raise DataError("the video file is missing")


def _whole(
    video: VideoIndex, relative: str, position: int, rows: Rows, camera: str, problems: list[Problem]
) -> dict[int, Segment]:
    """v2: a file is an episode."""
    length, episode = int(rows.starts[position + 1] - rows.starts[position]), int(rows.episode_ids[position])
    if len(video) != length:
        problems.append(
            Problem(
                f"the video has {len(video)} frames, the data {length}, so which belong together cannot be told: mend "
                "the episode, or take it out of the dataset",
                file=relative,
                episode=episode,
                column=camera,
            )
        )
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
    Otherwise (episodes were removed from the lists, say) start times have to do. They can be believed if each is that
    of a frame, to a quarter of one, and no two episodes share frames.
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
        jumps = np.abs(np.diff(off, prepend=0)) > 0.75
        for place in np.flatnonzero(np.abs(off) > 0.5).tolist():
            said = f"from_timestamp is {times[place]:.4f} s; counting frames gives {firsts[place] / info.fps:.4f} s"
            if jumps[place]:
                complain(f"{said}: the video or the lists have lost frames", place=place)
            else:
                complain(f"{said}, which is used", "note", place)
    else:
        firsts = np.array([video.nearest(time) for time in times.tolist()])
        shown = np.array([video.time(first) for first in firsts.tolist()])
        whole = np.all(np.abs(shown - times) * info.fps <= 0.25)
        apart = np.all(firsts + lengths <= np.append(firsts[1:], len(video)))
        said = f"the video has {len(video)} frames, its {len(positions)} episodes have {lengths.sum()}"
        if whole and apart:
            complain(f"{said}; they are placed by from_timestamp", "note")
        else:
            complain(said)
    found = {}
    for place, (position, first, length) in enumerate(zip(positions, firsts.tolist(), lengths.tolist(), strict=True)):
        if first + length <= len(video):
            found[position] = Segment(video, first)
        else:
            complain(f"needs {length} frames from frame {first} on, the video has {len(video)}", place=place)
    return found
