"""Videos: every frame can be reached by its number, however it was encoded; only files that hold frames are opened."""

import av
import numpy as np
import pytest

from pirl.data.lerobot.video import decode_frames, index_video
from pirl.data.validate import check_dataset
from pirl.errors import DataError
from sample_datasets import BROKEN, read_bars
from sample_datasets.build import draw_bars

FRAMES = 60
# Where a decoder has nothing to show for a while after a seek: codec, its options, options of the file.
ENCODINGS = {
    "hevc": ("hevc", {"g": "2", "crf": "30", "x265-params": "log-level=none"}, {}),
    "hevc_open": ("hevc", {"x265-params": "open-gop=1:keyint=12:bframes=4:log-level=none"}, {}),
    "h264_open": ("h264", {"x264-params": "open-gop=1:keyint=12:bframes=3"}, {}),
    "h264_fragments": ("h264", {"bf": "2", "g": "12"}, {"movflags": "frag_keyframe+empty_moov"}),
    "mpeg4_b_frames": ("mpeg4", {"bf": "2", "g": "12", "qmax": "4"}, {}),
}


def write(path, codec="mpeg4", options=None, file_options=None):
    with av.open(str(path), "w", options=file_options or {}) as container:
        stream = container.add_stream(codec, rate=10, options=options or {})
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for frame in range(FRAMES):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(draw_bars(0, 1, frame, (64, 96)), format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("name", ENCODINGS)
def test_decoding_may_start_at_any_frame(name, tmp_path):
    index = index_video(write(tmp_path / "video.mp4", *ENCODINGS[name]))
    assert len(index) == FRAMES
    for first in range(FRAMES):
        count = min(3, FRAMES - first)
        seen = [read_bars(frame)[2] for frame in decode_frames(index, range(first, first + count))]
        assert seen == list(range(first, first + count))


def test_a_frame_that_is_nowhere_is_called_missing(tmp_path):
    index = index_video(write(tmp_path / "video.mp4"))
    index.pts[40] += 1
    with pytest.raises(DataError, match="frame 40 of 60 is damaged or missing"):
        list(decode_frames(index, range(38, 43)))
    with pytest.raises(DataError, match="frame 40 of 60 is damaged or missing"):
        list(decode_frames(index, range(40, 45)))


def test_a_playlist_is_no_video(tmp_path):
    real = index_video(write(tmp_path / "real.mp4"))
    for text in ("ffconcat version 1.0\nfile real.mp4\n", "#EXTM3U\n#EXTINF:1.0,\nreal.mp4\n"):
        for file in ("list.mp4", "list.ffconcat", "list.m3u8"):
            (tmp_path / file).write_text(text)
            with pytest.raises(DataError, match="is no whole mp4, matroska or avi file"):
                index_video(tmp_path / file)
    # Nor if it takes the place of a video that was one.
    (tmp_path / "real.mp4").rename(tmp_path / "moved.mp4")
    (tmp_path / "real.mp4").write_text("ffconcat version 1.0\nfile moved.mp4\n")
    with pytest.raises(DataError, match="is no whole mp4"):
        list(decode_frames(real, [0]))


def test_other_containers_are_read(tmp_path):
    for file in ("video.mkv", "video.avi"):
        index = index_video(write(tmp_path / file, "mpeg4", {"qmax": "4"}))
        assert [read_bars(frame)[2] for frame in decode_frames(index, [17, 18])] == [17, 18]
        assert np.isclose(index.seconds[17], 1.7)


@pytest.mark.parametrize("name", ["garbled_video", "garbled_video_v30"])
def test_a_video_that_cannot_be_decoded_is_found_without_decoding_all(name, tmp_path):
    builder, _ = BROKEN[name]
    _, found = check_dataset(builder(tmp_path / "data").root)
    assert any("frame" in entry.message for entry in found if entry.severity == "problem")
