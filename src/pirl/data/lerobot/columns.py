"""Parquet columns as NumPy arrays, whatever list type a writer chose for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int64

from pirl.errors import DataError


class ParquetDamageError(DataError):
    """A file that is no readable parquet."""


class ColumnError(DataError):
    """A column with a value that does not fit; `row` counts within the file."""

    def __init__(self, message: str, row: int | None = None, value: str | None = None):
        super().__init__(message)
        self.row, self.value = row, value


def read_table(path: Path, names: Sequence[str]) -> tuple[pa.Table, list[str]]:
    """Those of the named columns that one file has, and the names of all columns it has."""
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            return file.read([name for name in names if name in present]), present
    except FileNotFoundError as error:
        raise ParquetDamageError("is missing") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ParquetDamageError(f"cannot be read: {_reason(error)}") from error


def read_cells(path: Path, name: str, rows: Int64[np.ndarray, " rows"]) -> pa.ChunkedArray:
    """Some rows of one column; of a large file only the row groups that hold them are read."""
    try:
        with pq.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            ends = np.cumsum(sizes)
            groups = np.unique(np.searchsorted(ends, rows, side="right"))
            table = file.read_row_groups(groups.tolist(), columns=[name])
            offsets = np.cumsum([0, *(sizes[group] for group in groups)])
            group_of_row = np.searchsorted(ends, rows, side="right")
            local = rows - (ends - sizes)[group_of_row] + offsets[np.searchsorted(groups, group_of_row)]
            return table[name].take(pa.array(local))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise ParquetDamageError(f"cannot be read: {_reason(error)}") from error


def to_numpy(column: pa.ChunkedArray, shape: tuple[int, ...] | None) -> np.ndarray:
    """Values as [rows, *shape]; a shape of (1,), in scalars or in lists of one, gives [rows]. None: as the data is."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    rows = len(array)
    sizes: list[int] = []
    if array.null_count:
        raise ColumnError("has empty cells", row=int(np.flatnonzero(np.asarray(array.is_null()))[0]), value="null")
    while _is_list(array.type):
        widths = np.asarray(pc.list_value_length(array))
        width = int(widths[0]) if len(widths) else 0
        if not sizes and shape is not None and len(shape) == 1:
            width = shape[0]
        if len(wrong := np.flatnonzero(widths != width)):
            row = int(wrong[0]) // int(np.prod(sizes, initial=1))
            many = f", as in {len(wrong)} cells in all" if len(wrong) > 1 else ""
            raise ColumnError(
                f"should have {width} values per frame{many}", row=row, value=f"{widths[wrong[0]]} values"
            )
        sizes.append(width)
        array = array.flatten()
        if array.null_count:
            raise ColumnError("has empty values inside its lists", value="null")
    try:
        values = array.to_numpy(zero_copy_only=False)
    except (pa.ArrowException, NotImplementedError) as error:
        raise ColumnError(f"holds {array.type}, which is not a number") from error
    per_row = int(np.prod(sizes, initial=1))
    wanted = per_row if shape is None else int(np.prod(shape, initial=1))
    if per_row != wanted:
        raise ColumnError(f"should have {wanted} values per frame as declared", value=f"{per_row} values")
    final = tuple(sizes) if shape is None else shape
    return values.reshape(rows) if final in ((), (1,)) else values.reshape(rows, *final)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _reason(error: BaseException) -> str:
    """Arrow's messages go on with its own stack; the first line says it."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
