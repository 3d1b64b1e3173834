"""One episode of one camera as an mp4 file, frame k at exactly k/fps seconds."""

import io
import os
from fractions import Fraction
from typing import Literal

import av
import numpy as np
from jaxtyping import UInt8

from pirl.errors import DataError

Codec = Literal["libsvtav1", "h264"]
CODEC_NAMES = {"libsvtav1": "av1", "h264": "h264"}
"""What info.json calls the video that each encoder makes."""

SMALLEST_SIDE = {"libsvtav1": 64, "h264": 2}
"""The least height and width. The AV1 encoder refuses smaller frames in some releases, and hangs on some in others."""

# Every second frame is a key frame, as in LeRobot's own recordings: training reads frames in random order. LeRobot's
# default is AV1, whose encoder was seen to hang once in a while (SVT-AV1 4.1); h264 is ours.
_OPTIONS = {
    "libsvtav1": {"g": "2", "crf": "30", "preset": "10"},
    "h264": {"g": "2", "crf": "23"},
}

os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder prints a page per file unless told to report errors only


def encode_video(frames: UInt8[np.ndarray, "T H W 3"], *, fps: int, codec: Codec) -> bytes:
    """The frames as an mp4 file in 4:2:0 colour, checked by decoding it; height and width must be even."""
    time_base = Fraction(1, fps)
    file = io.BytesIO()
    try:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream(codec, rate=fps, options=_OPTIONS[codec])
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
            f"{len(decoded)} came out, starting with {[f'{h} × {w} at {float(t)} s' for t, h, w in decoded[:3]]}"
        )
