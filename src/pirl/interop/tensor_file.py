"""The safetensors file format: a JSON header that says where each tensor lies, then their bytes.

Written and read tensor by tensor, so that a policy of 14 GB never is in memory twice.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from pirl.errors import CheckpointError

_DTYPES = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
# The largest header that the format's own library accepts.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Tensor:
    """The shape and dtype of a tensor, and where its bytes begin in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


@dataclass(frozen=True)
class TensorFile:
    """An opened file: its tensors are known, none has been read."""

    path: Path
    tensors: dict[str, Tensor]

    def read(self, name: str) -> np.ndarray:
        """One tensor, as a view of the file."""
        tensor = self.tensors[name]
        if not math.prod(tensor.shape):
            return np.zeros(tensor.shape, tensor.dtype)
        return np.memmap(self.path, tensor.dtype, mode="r", offset=tensor.offset, shape=tensor.shape)


def open_tensor_file(path: Path) -> TensorFile:
    """Read the header; whatever does not fit the file is named."""
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, end = 8 + length, os.fstat(file.fileno()).st_size
            if length > _LONGEST_HEADER or begin > end:
                raise ValueError(f"its header should take {length:,} bytes, and the file has {end:,}")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        tensors = {name: _tensor(name, about, begin, end) for name, about in header.items() if name != "__metadata__"}
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path} is damaged or incomplete: {reason}. Copy the checkpoint again.") from error
    return TensorFile(path, tensors)


def _tensor(name: str, about: Any, begin: int, end: int) -> Tensor:
    if not isinstance(about, dict):
        raise ValueError(f"what its header says of {name!r:.100} is not an object")
    if str(about.get("dtype")) not in _DTYPES:
        raise ValueError(f"{name!r:.100} has the dtype {about.get('dtype')!r:.40}, none of {', '.join(_DTYPES)}")
    shape, offsets, dtype = about.get("shape"), about.get("data_offsets"), np.dtype(_DTYPES[about["dtype"]])
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"shape and data_offsets of {name!r:.100} should be lists of sizes")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize or begin + offsets[1] > end:
        raise ValueError(f"{name!r:.100} of shape {shape} should lie at bytes {offsets}, and does not fit there")
    return Tensor(tuple(shape), dtype, begin + offsets[0])


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    contents: Callable[[], Iterable[tuple[str, np.ndarray]]],
) -> None:
    """Write tensors of known shapes and dtypes, whose `contents` come one after the other in the same order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what PyTorch's libraries look for
    offset = 0
    for name, (shape, dtype) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at multiples of their size
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, array), (expected, (shape, dtype)) in zip(contents(), tensors.items(), strict=True):
            assert (name, array.shape, array.dtype) == (expected, shape, dtype), (name, array.shape, array.dtype)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
