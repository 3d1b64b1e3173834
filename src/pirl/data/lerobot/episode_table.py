"""An episode to be written: its declared features, its columns checked against them, and its parquet file."""

import io
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pirl.data.lerobot.layout import DEFAULT_COLUMNS
from pirl.data.lerobot.video_writer import CODEC_NAMES, SMALLEST_SIDE, Codec
from pirl.errors import DataError

Features = dict[str, dict[str, Any]]
"""Features by name, as info.json has them: `dtype`, `shape`, `names`, and for videos `info`."""

CAMERAS = ("image", "video")
# For each kind of column, the kinds of array that may be given for it.
_ACCEPTED = {"b": "b", "i": "iu", "u": "iu", "f": "fiu"}
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")


def declare_features(features: Mapping[str, Mapping[str, Any]], *, fps: int, codec: Codec) -> Features:
    """The caller's features, checked, and those every dataset has; only `dtype`, `shape` and `names` are read."""
    declared: Features = {}
    for name, feature in features.items():
        if not name or any(part in name for part in ("/", "\\", "..", "\0")):
            raise DataError(f"feature {name!r}: a name becomes part of file names and must not contain / or ..")
        if name in DEFAULT_COLUMNS:
            raise DataError(f"feature {name!r}: the writer adds this one itself; leave it out")
        dtype, shape = feature.get("dtype"), tuple(feature.get("shape", ()))
        if dtype not in (*_DTYPES, *CAMERAS):
            raise DataError(
                f"feature {name!r}: dtype should be one of {', '.join((*_DTYPES, *CAMERAS))}, got {dtype!r}"
            )
        wanted = "(height, width, 3)" if dtype in CAMERAS else "(width,)"
        if len(shape) != (3 if dtype in CAMERAS else 1) or min(shape) < 1 or (dtype in CAMERAS and shape[2] != 3):
            raise DataError(f"feature {name!r}: the shape of {dtype} should be {wanted}, got {shape}")
        if dtype == "video" and (shape[0] % 2 or shape[1] % 2):
            raise DataError(
                f"feature {name!r}: video keeps colour for 2 × 2 pixels, so height and width must be even, got "
                f"{shape[0]} × {shape[1]}; crop or resize the frames, or store them with dtype 'image'"
            )
        if dtype == "video" and min(shape[:2]) < (side := SMALLEST_SIDE[codec]):
            raise DataError(
                f"feature {name!r}: {codec} needs frames of at least {side} × {side}, got {shape[0]} × {shape[1]}; "
                "enlarge them, choose codec 'h264', or store them with dtype 'image'"
            )
        names = feature.get("names")
        if dtype in CAMERAS:
            names = names or ["height", "width", "channels"]  # LeRobot's policies look here for the order of the axes
        declared[name] = {"dtype": dtype, "shape": list(shape), "names": names}
        if dtype == "video":
            declared[name]["info"] = _video_info(shape, fps, codec)
    for name in DEFAULT_COLUMNS:
        declared[name] = {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
    return json.loads(json.dumps(declared))  # as it will be read back: tuples become lists


def _video_info(shape: tuple[int, ...], fps: int, codec: Codec) -> dict[str, Any]:
    return {
        "video.height": shape[0],
        "video.width": shape[1],
        "video.codec": CODEC_NAMES[codec],
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def check_columns(columns: Mapping[str, np.ndarray], features: Features, episode: int) -> dict[str, np.ndarray]:
    """The caller's columns as [T, *shape] of the declared dtype.

    Floats are rounded to the declared precision; everything else must fit exactly.
    """
    expected = [name for name in features if name not in DEFAULT_COLUMNS]
    if missing := [name for name in expected if name not in columns]:
        raise DataError(f"episode {episode}: no column for {', '.join(map(repr, missing))}; given: {sorted(columns)}")
    if unknown := [name for name in columns if name not in expected]:
        raise DataError(f"episode {episode}: unknown columns {', '.join(map(repr, unknown))}; declared: {expected}")
    checked = {}
    for name in expected:
        try:
            checked[name] = _check_column(np.asarray(columns[name]), features[name])
        except DataError as error:
            raise DataError(f"episode {episode}, feature {name!r}: {error}") from None
    lengths = {name: len(column) for name, column in checked.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"episode {episode}: every column needs a row for every frame, but their lengths are {lengths}")
    if not lengths or not min(lengths.values()):
        raise DataError(f"episode {episode}: there are no frames")
    return checked


def _check_column(values: np.ndarray, feature: dict[str, Any]) -> np.ndarray:
    shape = tuple(feature["shape"])
    if shape == (1,) and values.ndim == 1:
        values = values[:, None]
    if values.shape[1:] != shape or not values.ndim:
        raise DataError(f"expected the shape {('T', *shape)}, got {values.shape}")
    if feature["dtype"] in CAMERAS:
        if values.dtype != np.uint8:
            raise DataError(f"expected frames of uint8 in [0, 255], got {values.dtype}")
        return values
    dtype = np.dtype(feature["dtype"])
    if values.dtype.kind not in _ACCEPTED[dtype.kind]:
        raise DataError(f"expected {dtype}, got {values.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
        fits = np.isfinite(cast) if values.dtype.kind == "f" else cast.astype(values.dtype) == values
    if not fits.all():
        frame, component = np.argwhere(~fits)[0].tolist()
        wanted = "finite numbers" if values.dtype.kind == "f" else f"numbers that fit {dtype}"
        raise DataError(f"expected {wanted}, got {values[frame, component]} at frame {frame}, component {component}")
    return cast


def episode_parquet(columns: Mapping[str, np.ndarray], features: Features) -> bytes:
    """The parquet file of an episode: one row group of all its columns but the videos.

    The description for Hugging Face's `datasets` says "Sequence", which every release understands; without it, older
    releases do not find the images.
    """
    kept = {name: feature for name, feature in features.items() if feature["dtype"] != "video"}
    arrays = [_arrow_array(columns[name], feature) for name, feature in kept.items()]
    description = {"info": {"features": {name: _description(feature) for name, feature in kept.items()}}}
    table = pa.table(arrays, names=list(kept)).replace_schema_metadata({"huggingface": json.dumps(description)})
    return parquet_bytes(table)


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a parquet file of one row group, compressed as LeRobot does."""
    file = io.BytesIO()
    pq.write_table(table, file, compression="snappy", row_group_size=max(table.num_rows, 1))
    return file.getvalue()


def _arrow_array(values: np.ndarray, feature: dict[str, Any]) -> pa.Array:
    if feature["dtype"] == "image":
        paths = [f"frame-{index:06d}.png" for index in range(len(values))]
        with ThreadPoolExecutor() as pool:  # compressing leaves the interpreter to others
            files = pa.array(pool.map(_png, values), pa.binary())
        return pa.StructArray.from_arrays([files, pa.array(paths)], ["bytes", "path"])
    flat = pa.array(np.ravel(values))
    width = feature["shape"][0]
    return flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)


def _description(feature: dict[str, Any]) -> dict[str, Any]:
    if feature["dtype"] == "image":
        return {"_type": "Image"}
    value = {"dtype": feature["dtype"], "_type": "Value"}
    width = feature["shape"][0]
    return value if width == 1 else {"feature": value, "length": width, "_type": "Sequence"}


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png", compress_level=1)
    return file.getvalue()
