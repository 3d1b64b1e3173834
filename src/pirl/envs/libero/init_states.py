"""Reads the initial states that LIBERO ships, which are pickles, without running what a pickle can contain."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from pirl.errors import DataError


def read_init_states(path: Path) -> Float64[np.ndarray, "states values"]:
    """The initial states in a file that `torch.save` made of one float64 array."""
    if not path.is_file():
        raise DataError(
            f"{path} does not exist. LIBERO has the initial states of a task there: install hf-libero again."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl")
            described = _ArrayUnpickler(archive.read(name), path).load()
        return _as_array(described)
    except DataError:
        raise
    except Exception as error:  # damaged archives and pickles fail in every way there is
        raise DataError(
            f"{path} is damaged, or not initial states as LIBERO has them, an array saved by torch "
            f"({type(error).__name__}: {error}). Install hf-libero again."
        ) from error


class _Array:
    """What a pickle says of an array: shape, type, whether columns come first, and bytes."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.fortran_order, self.data = state


class _DataType:
    """What a pickle says of the type of an array's elements: such as f8, and the order of its bytes."""

    def __init__(self, kind: str, *_: Any) -> None:
        self.kind = kind

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = state[1]


def _encode(text: str, encoding: str) -> bytes:
    # Protocol 2 has no bytes: they are text, one letter each.
    if encoding != "latin1":
        raise ValueError(f"bytes as {encoding!r} text")
    return text.encode("latin1")


# What an array's pickle calls, and what is called instead: descriptions, so that not even numpy sees its content.
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DataType,
    ("_codecs", "encode"): _encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise DataError(
                f"{self._path} wants to call {module}.{name}, which an array does not need. Nothing was run, but do not "
                "open this file with other programs: install hf-libero again, from a source you trust."
            )
        return _STAND_INS[module, name]


def _as_array(described: Any) -> Float64[np.ndarray, "states values"]:
    if not isinstance(described, _Array):
        raise TypeError(f"it holds {type(described).__name__}, not an array")
    dtype, shape = described.dtype, described.shape
    if not isinstance(dtype, _DataType) or (dtype.kind, dtype.byte_order) != ("f8", "<") or len(shape) != 2:
        raise TypeError(f"it holds an array of shape {shape} that is not a table of float64 numbers")
    # Copied, because an array on bytes cannot be written to.
    return np.frombuffer(described.data, "<f8").reshape(shape, order="F" if described.fortran_order else "C").copy()
