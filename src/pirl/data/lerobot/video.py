"""Frames of a video by their number: counted, not looked up by time, since recorded times cannot be trusted."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from jaxtyping import Int64, UInt8

from pirl.errors import DataError

# Decoders are named by their library, and info.json may use yet another name.
_CODEC_NAMES = {"libdav1d": "av1", "libaom-av1": "av1", "libsvtav1": "av1", "mp4v": "mpeg4", "h265": "hevc"}


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


def codec_name(name: str) -> str:
    """The codec, whichever of its names is given."""
    return _CODEC_NAMES.get(name, name)


def index_video(path: Path) -> VideoIndex:
    """Read the times of all frames from the packets."""
    try:
        with av.open(str(path)) as container:
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
    except (av.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot be read as video: {_reason(error)}") from error


def decode_frames(index: VideoIndex, first: int, count: int) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """Frames number first, …, first + count - 1 as RGB. Seeks to the key frame before them."""
    if first < 0 or first + count > len(index):
        raise DataError(f"{index.path} has {len(index)} frames; frames {first} to {first + count - 1} were wanted.")
    wanted = index.pts[first : first + count]
    done = 0
    try:
        with av.open(str(index.path)) as container:
            stream = container.streams.video[0]
            # Episodes are decoded side by side; threads inside each decoder would only get in each other's way.
            stream.codec_context.thread_count = 1
            if first:
                container.seek(int(wanted[0]), stream=stream, backward=True)
            for frame in container.decode(stream):
                if frame.pts is None or done == count or frame.pts < wanted[done]:
                    continue
                if frame.pts != wanted[done]:
                    break
                yield frame.to_ndarray(format="rgb24")
                done += 1
                if done == count:
                    return
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"{index.path}: frame {first + done} cannot be decoded: {_reason(error)}.") from error
    if done < count:
        raise DataError(f"{index.path}: frame {first + done} of {len(index)} is damaged or missing.")


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
