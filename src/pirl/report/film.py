"""What the critics thought along an episode: a strip of its pictures, and under it the Q-value at the same moments."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Real, UInt8
from PIL import Image

from pirl.errors import DataError
from pirl.report.axes import Axis
from pirl.report.page import Section, figure
from pirl.report.svg import Mark, Series, line_chart

# On a narrow screen only the middle one of every three frames is shown, which is then the middle of their time.
FRAMES = 12
# Frames are shown about 80 pixels wide, on sharp screens with twice as many.
_WIDEST = 160


@dataclass(frozen=True)
class Episode:
    """The pictures of every step, and what each critic said at some steps. `title` says whose episode it is."""

    title: str
    frames: UInt8[np.ndarray, "t h w 3"]
    q_steps: Real[np.ndarray, " n"]
    q_values: Float[np.ndarray, "critics n"]
    success: bool


def episodes_section(
    episodes: Sequence[Episode], *, title: str = "What the critics see", introduction: str = ""
) -> Section:
    """Episodes under each other, with one scale for all of their Q-values."""
    scale = Axis.fit([episode.q_values for episode in episodes], margin=0.08)
    caption = (
        "Each picture is the middle of its stretch of the time axis below. The line is the mean of the critics, the "
        "band reaches from the most pessimistic to the most optimistic of them."
    )
    return Section(
        title,
        "".join(
            figure(_episode(episode, scale), caption if episode is episodes[-1] else "", episode.title)
            for episode in episodes
        ),
        introduction,
    )


def film_strip(frames: UInt8[np.ndarray, "t h w 3"]) -> str:
    """Pictures side by side that divide the time evenly; each shows the middle of its share."""
    return _strip({step: frames[step] for step in _shown(len(frames))})


def read_strip(film: Path) -> str:
    """The same of a film in a file; a DataError if it has no pictures that can be read."""
    import av

    try:
        with av.open(str(film)) as container:
            stream = container.streams.video[0]
            shown = set(_shown(stream.frames))
            pictures = {
                number: frame.to_ndarray(format="rgb24")
                for number, frame in enumerate(container.decode(stream))
                if number in shown
            }
    except (OSError, IndexError, ZeroDivisionError, av.FFmpegError) as error:
        raise DataError(f"{film} is no film that can be read: {error}.") from error
    if not pictures:
        raise DataError(f"{film} has no pictures.")
    return _strip(pictures)


def _shown(length: int) -> list[int]:
    count = min(FRAMES, length)
    count -= count % 3 if count > 3 else 0
    return [int((index + 0.5) * length / count) for index in range(count)]


def _strip(pictures: Mapping[int, UInt8[np.ndarray, "h w 3"]]) -> str:
    images = "".join(f'<img alt="step {step}" src="{encode_png(frame)}">' for step, frame in pictures.items())
    return f'<div class="strip{" thirds" * (len(pictures) % 3 == 0)}">{images}</div>'


def encode_png(frame: UInt8[np.ndarray, "h w 3"], widest: int = _WIDEST) -> str:
    """A picture as a `data:` address, made smaller if it is wider than it will be shown."""
    image = Image.fromarray(frame)
    if image.width > widest:
        image = image.resize((widest, max(1, round(image.height * widest / image.width))), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _episode(episode: Episode, scale: Axis) -> str:
    length = len(episode.frames)
    if not length:
        raise DataError(f"the episode {episode.title!r} has no pictures. Keep the images of the rollout.")
    outcome = Mark(float(length), f"success after {length} steps", "good")
    if not episode.success:
        outcome = Mark(float(length), f"no success in {length} steps", "bad")
    values = Series(
        "Q",
        episode.q_steps,
        episode.q_values.mean(axis=0),
        episode.q_values.min(axis=0),
        episode.q_values.max(axis=0),
    )
    chart = line_chart(
        [values],
        label=f"Q-value along {episode.title}: {outcome.text}",
        x_range=(0.0, float(length)),
        y_range=(scale.low, scale.high),
        marks=[outcome],
        height=140,
    )
    return f'<div class="plot"><div class="strip-frame {outcome.kind}">{film_strip(episode.frames)}</div>{chart}</div>'
