"""Camera images as OpenPI's data side makes them: uint8, channels last, scaled without distortion onto black."""

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from pirl.errors import DataError


def to_uint8_hwc(
    image: UInt8[np.ndarray, "*batch _ _ _"] | Float[np.ndarray, "*batch _ _ _"],
) -> UInt8[np.ndarray, "*batch h w 3"]:
    """Images with channels first or last, uint8 or float in [0, 1], as uint8 with channels last.

    As in OpenPI, floats are truncated rather than rounded, and where both ends have three entries channels are first.
    """
    if image.ndim < 3 or 3 not in (image.shape[-3], image.shape[-1]):
        raise DataError(
            f"an image has shape {image.shape}; expected three color channels, first (..., 3, height, width) or last "
            "(..., height, width, 3)."
        )
    if np.issubdtype(image.dtype, np.floating):
        low, high = float(np.min(image, initial=0.0)), float(np.max(image, initial=0.0))
        # Written so that NaN fails too.
        if not (low >= -1e-5 and high <= 1 + 1e-5):
            raise DataError(
                f"a float image has values from {low:.4g} to {high:.4g}; they should lie in [0, 1]. "
                "Pass pixels of 0 to 255 as uint8."
            )
        image = (255 * image).astype(np.uint8)
    elif image.dtype != np.uint8:
        raise DataError(f"an image has dtype {image.dtype}; expected uint8 (0 to 255) or floats in [0, 1].")
    return np.moveaxis(image, -3, -1) if image.shape[-3] == 3 else image


def resize_with_pad(
    image: UInt8[np.ndarray, "*batch _ _ 3"], height: int, width: int
) -> UInt8[np.ndarray, "*batch {height} {width} 3"]:
    """Scale images to fit inside height × width without distortion (PIL's bilinear) and centre them on black."""
    if image.dtype != np.uint8 or image.ndim < 3 or image.shape[-1] != 3 or 0 in image.shape[-3:]:
        raise DataError(
            f"an image to be resized has dtype {image.dtype} and shape {image.shape}; expected uint8 with shape "
            "(..., height, width, 3)."
        )
    if image.shape[-3:-1] == (height, width):
        return image
    batch, (old_height, old_width) = image.shape[:-3], image.shape[-3:-1]
    ratio = max(old_width / width, old_height / height)
    new_height, new_width = int(old_height / ratio), int(old_width / ratio)
    if not (new_height and new_width):
        raise DataError(f"an image of {old_height} × {old_width} is too narrow to be fitted into {height} × {width}.")
    # The smaller half of an odd margin goes first.
    top, left = (height - new_height) // 2, (width - new_width) // 2
    result = np.zeros((*batch, height, width, 3), np.uint8)
    # One image at a time: PIL knows no batches, and its own work outweighs the loop. Rows before columns, because that
    # is how PIL did it until version 13 began to choose the order, and each pass rounds.
    for index in np.ndindex(batch):
        rows = Image.fromarray(image[index]).resize((new_width, old_height), Image.Resampling.BILINEAR)
        resized = rows.resize((new_width, new_height), Image.Resampling.BILINEAR)
        result[index][top : top + new_height, left : left + new_width] = resized
    return result
