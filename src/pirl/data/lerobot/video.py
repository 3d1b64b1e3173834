"""The videos of a dataset: frames by their number, which of them belong to which episode, and encoding."""

import io
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import av.container
import numpy as np
from jaxtyping import Float64, Int64, UInt8

from pirl.data.lerobot.format import Info, Listing, fill, first_line, pointer_advice, resolve_inside
from pirl.data.problems import Problem
from pirl.errors import DataError

Codec = Literal["libsvtav1", "h264"]
CODEC_NAMES = {"libsvtav1": "av1", "h264": "h264"}
"""What info.json calls the video that each encoder makes."""

SMALLEST_SIDE = {"libsvtav1": 64, "h264": 2}
"""The least height and width. The AV1 encoder refuses smaller frames in some releases, and hangs on some in others."""

# Every second frame is a key frame, as in LeRobot's own recordings: training reads frames in random order. LeRobot's
# default is AV1, whose encoder was seen to hang once in a while (SVT-AV1 4.1); h264 is ours.
_ENCODERS = {
    "libsvtav1": {"g": "2", "crf": "30", "preset": "10"},
    "h264": {"g": "2", "crf": "23"},
}

os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder prints a page per file unless told to report errors only

_CODEC_NAMES = {"libdav1d": "av1", "libaom-av1": "av1"}  # decoders are named by their library

MISSING, UNLISTED = "the video file is missing", "no video is listed for this episode"

# Files that hold their frames themselves: a playlist would have FFmpeg open whatever it names.
_OPTIONS = {"format_whitelist": "mov,mp4,matroska,webm,avi", "protocol_whitelist": "file"}


@dataclass(frozen=True)
class VideoIndex:
    """What a file holds, found without decoding: presentation times of its frames, in order."""

    path: Path
    pts: Int64[np.ndarray, " frames"]
    seconds_per_tick: float
    codec: str
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def seconds(self) -> Float64[np.ndarray, " frames"]:
        """When each frame is shown, from the first on."""
        return (self.pts - self.pts[:1]) * self.seconds_per_tick


def index_video(path: Path) -> VideoIndex:
    """Read the times of all frames from the packets."""
    try:
        with _open(path) as container:
            if not container.streams.video:
                raise DataError("holds no video")
            stream = container.streams.video[0]
            context = stream.codec_context
            packets = container.demux(stream)
            times = [packet.pts for packet in packets if packet.pts is not None and not packet.is_discard]
            return VideoIndex(
                path,
                np.sort(np.asarray(times, np.int64)),
                float(stream.time_base or 1),
                _CODEC_NAMES.get(context.name, context.name),
                (context.height, context.width),
            )
    except DataError:
        raise
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"cannot be read as video: {first_line(error)}") from error


def decode_frames(index: VideoIndex, frames: Sequence[int]) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """Frames by their numbers, which increase, as RGB. Seeks to the key frame before them."""
    wanted = np.asarray(frames, np.int64)
    first, last, count = int(wanted[0]), int(wanted[-1]), len(wanted)
    if first < 0 or last >= len(index):
        raise DataError(f"{index.path} has {len(index)} frames; frames {first} to {last} were wanted.")
    done, back = 0, 0
    cause: Exception | None
    while done < count:
        problem, cause = "is damaged or missing", None
        try:
            for pixels in _decode_from(index, first - back, index.pts[wanted]):
                yield pixels
                done += 1
        except (av.FFmpegError, OSError) as error:
            problem, cause = f"cannot be decoded: {first_line(error)}", error
        if done < count and (done or back == first):
            raise DataError(f"{index.path}: frame {wanted[done]} of {len(index)} {problem}.") from cause
        # A seek may land past the frame (open groups of pictures, fragments): start ever further in front of it.
        back = min(first, max(8, 2 * back))


def _decode_from(
    index: VideoIndex, start: int, wanted: Int64[np.ndarray, " wanted"]
) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """The frames of these times, up to the first that does not come."""
    done = 0
    with _open(index.path) as container:
        stream = container.streams.video[0]
        # Episodes are decoded side by side; threads inside each decoder would only get in each other's way.
        stream.codec_context.thread_count = 1
        if start:
            container.seek(int(index.pts[start]), stream=stream, backward=True)
        for frame in container.decode(stream):
            if frame.pts is None or frame.pts < wanted[done]:
                continue
            if frame.pts != wanted[done]:
                return
            yield frame.to_ndarray(format="rgb24")
            done += 1
            if done == len(wanted):
                return


def _open(path: Path) -> av.container.InputContainer:
    try:
        return av.open(f"file:{path}", options=_OPTIONS)
    except (av.ArgumentError, av.InvalidDataError) as error:
        raise DataError(pointer_advice(path) or "is no whole mp4, matroska or avi file") from error


@dataclass(frozen=True)
class Segment:
    """An episode's frames, by their numbers in a video file: a range, unless some are left out."""

    video: VideoIndex
    frames: range | list[int]


def find_segments(
    root: Path,
    info: Info,
    listing: Listing,
    lengths: Mapping[int, int],
    wanted: Collection[int],
    camera: str,
    times: Callable[[int], np.ndarray | None],
) -> tuple[dict[int, Segment], list[Problem]]:
    """Where episodes are in a camera's videos, by number, and what is wrong there.

    Only files of `wanted` episodes are opened, but all episodes (`lengths`, by number) count in the placing of those.
    `times` are the timestamps of an episode, as far as there are any.
    """
    problems: list[Problem] = []
    by_file: dict[str, list[int]] = {}
    for episode in lengths:
        relative = _video_file(info, listing, episode, camera)
        if relative is None:
            problems.append(Problem(UNLISTED, episode=episode, column=camera))
        else:
            by_file.setdefault(relative, []).append(episode)
    chosen = set(wanted)
    opened = {file: episodes for file, episodes in by_file.items() if not chosen.isdisjoint(episodes)}
    segments: dict[int, Segment] = {}
    with ThreadPoolExecutor(16, "open-videos") as pool:  # most of the time goes into waiting for the disk
        videos = list(pool.map(lambda relative: _open_video(root, relative), opened))
    elsewhere = {Path(relative).parts[0] for relative, _ in videos} - {Path(relative).parts[0] for relative in opened}
    if elsewhere:
        message = f"info.json says videos/, the files are in {elsewhere.pop()}/; read from there"
        problems.append(Problem(message, severity="note"))
    for (relative, video), episodes in zip(videos, opened.values(), strict=True):
        if isinstance(video, str):
            problems += [Problem(video, "problem", episode, relative, camera) for episode in episodes]
            continue
        if info.is_v3:
            starts_s = {episode: listing.episodes[episode].videos[camera].start_s for episode in episodes}
            firsts, complaints = _split(video, starts_s, lengths, info.fps)
        else:
            firsts, complaints = _whole(video, episodes[0], lengths[episodes[0]])
        ends = sorted([*firsts.values(), len(video)])
        for episode, first in firsts.items():
            room, length = ends[ends.index(first) + 1] - first, lengths[episode]
            frames: range | list[int] = range(first, first + length)
            if room > length and episode in chosen:
                named = _frames_of_times(video.seconds[first : first + room], times(episode), info.fps)
                used = "" if info.is_v3 else "the first ones"
                if named is not None and not np.array_equal(named, np.arange(length)):
                    frames, used = (first + named).tolist(), "those that timestamp names"
                if used:
                    message = f"the video has more frames than the data; {used} are used"
                    complaints.append(Problem(message, "note", episode))
            segments[episode] = Segment(video, frames)
        problems += [replace(complaint, file=relative, column=camera) for complaint in complaints]
    return segments, problems


def _video_file(info: Info, listing: Listing, episode: int, camera: str) -> str | None:
    if not info.is_v3:
        return fill(info.video_path, chunk=episode // info.chunks_size, file=episode, camera=camera)
    listed = listing.episodes.get(episode)
    position = listed.videos.get(camera) if listed else None
    return fill(info.video_path, chunk=position.chunk, file=position.file, camera=camera) if position else None


def _open_video(root: Path, relative: str) -> tuple[str, VideoIndex | str]:
    try:
        path = resolve_inside(root, relative, links=True)
        # Seen in hand-made data: the directory is called video, info.json says videos.
        if not path.is_file() and relative.startswith("videos/"):
            other = relative.replace("videos", "video", 1)
            if (candidate := resolve_inside(root, other, links=True)).is_file():
                path, relative = candidate, other
        if not path.is_file():
            return relative, pointer_advice(path) or MISSING
        return relative, index_video(path)
    except (OSError, ValueError) as error:
        return relative, str(error)


Placing = tuple[dict[int, int], list[Problem]]
"""The first frame of each episode that has a place in a video, and what is wrong."""


def _whole(video: VideoIndex, episode: int, length: int) -> Placing:
    """v2: a file is an episode."""
    said = f"the video has {len(video)} frames, the data {length}"
    if len(video) < length:
        return {}, [Problem(f"{said}, so which belong together cannot be told", episode=episode)]
    return {episode: 0}, []


def _frames_of_times(
    seconds: Float64[np.ndarray, " frames"], times: np.ndarray | None, fps: float
) -> Int64[np.ndarray, " rows"] | None:
    """Which frames, shown at `seconds`, an episode's times name; None if its clock is not that of the video.

    Where rows were removed, as of a robot that stood still, and the video was left as it is, time alone tells.
    """
    if times is None:
        return None
    at = seconds[0] + times
    frames = np.searchsorted((seconds[1:] + seconds[:-1]) / 2, at)
    is_named = (np.abs(seconds[frames] - at) * fps < 0.05).all() and (np.diff(frames) > 0).all()
    return frames if is_named else None


def _split(video: VideoIndex, starts_s: Mapping[int, float], lengths: Mapping[int, int], fps: float) -> Placing:
    """v3: episodes lie one after the other.

    If their lengths add up to the frames of the file, counting places them exactly: sums of durations drift, so start
    times may be slowly off, but a jump says that frames are missing from one episode and too many in another.
    Otherwise (episodes were removed from the lists, say) start times have to do. One can be believed if it is that of a
    frame, to a quarter of one, and the episode shares no frames with another.
    """
    episodes = sorted(starts_s, key=lambda episode: (starts_s[episode], episode))
    times = np.array([starts_s[episode] for episode in episodes])
    counts = np.array([lengths[episode] for episode in episodes])
    problems: list[Problem] = []
    if counts.sum() == len(video):
        firsts = np.cumsum(counts) - counts
        off = times * fps - firsts
        steps = np.diff(off, prepend=0)
        is_off = np.abs(off) > 0.5
        after_jump = np.logical_or.accumulate(is_off & (np.abs(steps) > 0.75))
        lost = "the video or the lists have lost frames"
        for i in np.flatnonzero(is_off).tolist():
            said = f"from_timestamp is {times[i]:.4f} s; counting frames gives {firsts[i] / fps:.4f} s"
            if after_jump[i]:
                problems.append(Problem(f"{said}: {lost}", episode=episodes[i]))
            else:
                problems.append(Problem(f"{said}, which is used", "note", episodes[i]))
        for i in np.flatnonzero((steps[1:] < -0.75) & is_off[1:] & ~is_off[:-1]).tolist():
            said = f"the next episode begins {-steps[i + 1]:.1f} frames too early"
            problems.append(Problem(f"{said}: {lost}", episode=episodes[i]))
        return dict(zip(episodes, firsts.tolist(), strict=True)), problems
    seconds = video.seconds if len(video) else np.zeros(1)
    firsts = np.array([np.abs(seconds - time).argmin() for time in times])
    is_frame = np.abs(seconds[firsts] - times) * fps <= 0.25
    overlaps = firsts[:-1] + counts[:-1] > firsts[1:]
    said = f"the video has {len(video)} frames, its {len(episodes)} episodes have {counts.sum()}"
    found = {}
    for i, (episode, first, count) in enumerate(zip(episodes, firsts.tolist(), counts.tolist(), strict=True)):
        if first + count > len(video):
            problems.append(Problem(f"needs {count} frames from frame {first} on; {said}", episode=episode))
        elif not is_frame[i]:
            message = f"from_timestamp {times[i]:.4f} s is that of no frame; {said}"
            problems.append(Problem(message, episode=episode))
        elif overlaps[max(i - 1, 0) : i + 1].any():
            message = f"shares frames with another episode, by from_timestamp; {said}"
            problems.append(Problem(message, episode=episode))
        else:
            found[episode] = first
    if found:
        problems.append(Problem(f"{said}; they are placed by from_timestamp", severity="note"))
    return found, problems


def encode_video(frames: UInt8[np.ndarray, "T H W 3"], *, fps: int, codec: Codec) -> bytes:
    """The frames as an mp4 file in 4:2:0 color, checked by decoding it; height and width must be even."""
    time_base = Fraction(1, fps)
    file = io.BytesIO()
    try:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream(codec, rate=fps, options=_ENCODERS[codec])
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            stream.codec_context.time_base = time_base
            for index, pixels in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                frame.pts, frame.time_base = index, time_base
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        height, width = frames.shape[1:3]
        raise DataError(f"{codec} cannot encode frames of {height} × {width}: {error}") from error
    _check_video(file, frames.shape, fps)
    return file.getvalue()


def _check_video(file: io.BytesIO, shape: tuple[int, ...], fps: int) -> None:
    """A frame that the encoder dropped, added or moved would shift every later image against its action."""
    file.seek(0)
    with av.open(file, "r") as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        decoded = [
            (frame.pts * frame.time_base, frame.height, frame.width)  # type: ignore[operator]  # an mp4 has both
            for frame in container.decode(stream)
        ]
    if decoded != [(Fraction(index, fps), *shape[1:3]) for index in range(shape[0])]:
        raise DataError(
            f"the encoder did not keep the frames: {shape[0]} of {shape[1]} × {shape[2]} at {fps} fps went in, "
            f"{len(decoded)} came out"
        )
