"""Frames of a video by their number: counted, not looked up by time, since recorded times cannot be trusted."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import av.container
import numpy as np
from jaxtyping import Int64, UInt8

from pirl.data.lerobot.layout import first_line, pointer_advice
from pirl.errors import DataError

# Decoders are named by their library, and info.json may use yet another name.
_CODEC_NAMES = {"libdav1d": "av1", "libaom-av1": "av1", "libsvtav1": "av1", "mp4v": "mpeg4", "h265": "hevc"}

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

    def nearest(self, seconds: float) -> int:
        """Number of the frame shown closest to a time."""
        if not len(self.pts):
            return 0
        return int(np.abs((self.pts - self.pts[0]) * self.seconds_per_tick - seconds).argmin())

    def time(self, frame: int) -> float:
        """When a frame is shown, in seconds from the first."""
        return float(self.pts[frame] - self.pts[0]) * self.seconds_per_tick if len(self.pts) else 0.0


def codec_name(name: str) -> str:
    """The codec, whichever of its names is given."""
    return _CODEC_NAMES.get(name, name)


def index_video(path: Path) -> VideoIndex:
    """Read the times of all frames from the packets."""
    try:
        with _open(path) as container:
            if not container.streams.video:
                raise DataError("holds no video")
            stream = container.streams.video[0]
            context = stream.codec_context
            times = [
                packet.pts for packet in container.demux(stream) if packet.pts is not None and not packet.is_discard
            ]
            return VideoIndex(
                path,
                np.sort(np.asarray(times, np.int64)),
                float(stream.time_base or 1),
                codec_name(context.name),
                (context.height, context.width),
            )
    except DataError:
        raise
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"cannot be read as video: {first_line(error)}") from error


def decode_frames(index: VideoIndex, first: int, count: int) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """Frames number first, …, first + count - 1 as RGB. Seeks to the key frame before them."""
    if first < 0 or first + count > len(index):
        raise DataError(f"{index.path} has {len(index)} frames; frames {first} to {first + count - 1} were wanted.")
    done, back = 0, 0
    cause: Exception | None
    while done < count:
        problem, cause = "is damaged or missing", None
        try:
            for picture in _decode_from(index, first - back, index.pts[first : first + count]):
                yield picture
                done += 1
        except (av.FFmpegError, OSError) as error:
            problem, cause = f"cannot be decoded: {first_line(error)}", error
        if done < count and (done or back == first):
            raise DataError(f"{index.path}: frame {first + done} of {len(index)} {problem}.") from cause
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
