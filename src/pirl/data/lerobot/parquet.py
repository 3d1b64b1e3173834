"""Parquet columns as NumPy arrays, whatever list type a writer chose for them, and the images in their cells."""

import io
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int64, UInt8

from pirl.data.lerobot.format import ParquetDamageError, first_line, pointer_advice, unique_names
from pirl.errors import DataError

# PIL knows many more, some of which run other programs.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


class ColumnError(DataError):
    """A column with values that do not fit, in these `rows` of what was read; without any, in all of them."""

    def __init__(self, message: str, rows: Int64[np.ndarray, " rows"] | None = None, value: str | None = None):
        super().__init__(message)
        self.rows, self.value = rows, value


class DepthImageError(DataError):
    """An image of something else than colors; `size` is its height and width."""

    def __init__(self, mode: str, size: tuple[int, int]):
        super().__init__(f"its values (mode {mode}) are not colors but, say, depths")
        self.size = size


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            unique_names(file.schema_arrow)
            yield file
    except ParquetDamageError:
        raise
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        message = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {first_line(error)}"
        raise ParquetDamageError(pointer_advice(path) or message) from error


def read_table(path: Path, names: Sequence[str], most_values: int) -> tuple[pa.Table, pa.Schema]:
    """Those of the named columns that one file has, and the types of all columns it has.

    A small file can unpack to more than the memory holds, so that no column may have more than `most_values`.
    """
    with _opened(path) as file:
        counts = dict.fromkeys(names, 0)
        for group in map(file.metadata.row_group, range(file.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                for name in names:
                    if f"{column.path_in_schema}.".startswith(f"{name}."):
                        counts[name] += column.num_values
        for name, count in counts.items():
            if count > most_values:
                raise ParquetDamageError(f"holds {count:,} values of {name}, far more than are declared")
        return file.read([name for name in names if name in file.schema_arrow.names]), file.schema_arrow


class CellReader:
    """Reads some rows of a column, and remembers per thread and column the row group that it read last.

    A file of many episodes may have a single group, which is not to be read for each.
    """

    def __init__(self) -> None:
        self._last = threading.local()

    def read(self, path: Path, name: str, rows: Int64[np.ndarray, " rows"]) -> pa.ChunkedArray:
        known = self._last.__dict__
        with _opened(path) as file:
            ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
            group_of_row = np.searchsorted(ends, rows, side="right")
            chunks, positions, offset = [], rows.copy(), 0
            for group in np.unique(group_of_row).tolist():
                if name not in known or known[name][:2] != (path, group):
                    known[name] = (path, group, file.read_row_group(group, columns=[name])[name])
                cells = known[name][2]
                positions[group_of_row == group] += offset + len(cells) - ends[group]
                offset += len(cells)
                chunks += cells.chunks
            return pa.chunked_array(chunks).take(pa.array(positions))


def decode_image(cell: Any) -> UInt8[np.ndarray, "h w 3"]:
    """The image that a cell holds; DataError says why it cannot be decoded."""
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        path = cell.get("path") if isinstance(cell, dict) else None
        instead = ", only the name of a file" if path else ", but bare numbers" if content else ""
        raise DataError(f"there is none{instead}; as LeRobot writes them, the bytes of a PNG or JPEG file belong here")
    try:
        with PIL.Image.open(io.BytesIO(content), formats=_IMAGE_FORMATS) as image:
            if image.mode == "F" or image.mode.startswith("I"):
                raise DepthImageError(image.mode, (image.height, image.width))
            return np.asarray(image.convert("RGB"))
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise DataError(first_line(error)) from error


def to_numpy(column: pa.ChunkedArray, shape: tuple[int, ...] | None) -> np.ndarray:
    """Values as [rows, *shape]; a shape of (1,), in scalars or in lists of one, gives [rows]. None: as the data is."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    rows = len(array)
    sizes: list[int] = []
    if array.null_count:
        raise ColumnError("has empty cells", np.flatnonzero(np.asarray(array.is_null())), "null")
    while _is_list(array.type):
        widths = np.asarray(pc.list_value_length(array))
        width = int(widths[0]) if len(widths) else 0
        if not sizes and shape is not None and len(shape) == 1:
            width = shape[0]
        if len(wrong := np.flatnonzero(widths != width)):
            found = np.unique(wrong // math.prod(sizes))
            raise ColumnError(f"should have {width} values per frame", found, f"{widths[wrong[0]]} values")
        sizes.append(width)
        array = array.flatten()
        if array.null_count:
            empty = np.flatnonzero(np.asarray(array.is_null())) // math.prod(sizes)
            raise ColumnError("has empty values inside its lists", np.unique(empty), "null")
    try:
        values = array.to_numpy(zero_copy_only=False)
    except (pa.ArrowException, NotImplementedError) as error:
        raise ColumnError(f"holds {array.type}, which is not a number") from error
    found_shape = tuple(sizes)
    if shape is not None:
        are_moved = len(shape) > 1 and len(sizes) > 1 and found_shape != shape
        if are_moved or math.prod(sizes) != math.prod(shape):
            raise ColumnError(f"should be {_times(shape)} values per frame as declared", value=_times(found_shape))
    final = found_shape if shape is None else shape
    return values.reshape(rows) if final in ((), (1,)) else values.reshape(rows, *final)


def is_numeric(kind: pa.DataType) -> bool:
    """Whether a column of this type holds numbers, or lists of them."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while _is_list(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _times(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes)) or "1"


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
