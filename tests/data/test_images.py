"""Images are parsed and resized as OpenPI's data side does it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import arrays, needs_golden
from pirl.data.transforms import resize_with_pad, to_uint8_hwc
from pirl.errors import DataError


@needs_golden
def test_resizing_equals_openpi_bit_by_bit():
    recorded = arrays("transforms", "images.npz")
    cases = [key.split("/")[1] for key in recorded if key.startswith("pil/") and key.endswith("/in")]
    assert len(cases) == 8
    for case in cases:
        image, size = recorded[f"pil/{case}/in"], [int(side) for side in recorded[f"pil/{case}/target_hw"]]
        expected = recorded[f"pil/{case}/out"]
        np.testing.assert_array_equal(resize_with_pad(image, *size), expected)
        # A batch is its images one by one, whatever its axes.
        batch = np.stack([image, image[::-1], image]).reshape(3, 1, *image.shape)
        np.testing.assert_array_equal(resize_with_pad(batch, *size)[[0, 2], 0], [expected, expected])
        np.testing.assert_array_equal(resize_with_pad(batch, *size)[1, 0], resize_with_pad(image[::-1], *size))


@needs_golden
@pytest.mark.parametrize(
    ("file", "given", "expected"),
    [
        ("aloha", "inputs_adapt1/one_cam_float_chw/in/images/cam_high", "out/image/base_0_rgb"),
        ("aloha", "inputs_adapt1/four_cam/in/images/cam_left_wrist", "out/image/left_wrist_0_rgb"),
        ("libero_droid", "libero_float_chw/in/observation|image", "out/image/base_0_rgb"),
        ("libero_droid", "libero_pi0/in/observation|wrist_image", "out/image/left_wrist_0_rgb"),
    ],
)
def test_images_are_parsed_as_in_openpi(file, given, expected):
    recorded = arrays("transforms", f"{file}.npz")
    wanted = recorded[f"{given.split('/in/')[0]}/{expected}"]
    np.testing.assert_array_equal(to_uint8_hwc(recorded[given]), wanted)
    np.testing.assert_array_equal(to_uint8_hwc(np.stack([recorded[given]] * 2)), [wanted, wanted])


@given(
    size=st.tuples(st.integers(2, 60), st.integers(2, 60)),
    target=st.tuples(st.integers(30, 40), st.integers(30, 40)),
    color=st.tuples(*[st.integers(1, 255)] * 3),
)
@settings(max_examples=50)
def test_a_plain_image_keeps_its_color_and_shape_and_is_centred_on_black(size, target, color):
    resized = resize_with_pad(np.broadcast_to(np.uint8(color), (*size, 3)), *target)
    covered = resized.any(axis=-1)
    assert (resized[covered] == color).all()
    rows, columns = np.flatnonzero(covered.any(axis=1)), np.flatnonzero(covered.any(axis=0))
    assert covered.sum() == len(rows) * len(columns)
    for lines, side in ((rows, target[0]), (columns, target[1])):
        before, after = lines[0], side - 1 - lines[-1]
        assert after - before in (0, 1)
    # One side fills the target; the other follows the proportions to within a pixel.
    scale = min(target[0] / size[0], target[1] / size[1])
    assert len(rows) == pytest.approx(size[0] * scale, abs=1.001)
    assert len(columns) == pytest.approx(size[1] * scale, abs=1.001)
    assert target[0] - len(rows) <= 1 or target[1] - len(columns) <= 1


@pytest.mark.usefixtures("unchecked_signatures")
def test_what_is_no_image_is_refused():
    for image, message in [
        (np.zeros((8, 8), np.uint8), r"shape \(8, 8\)"),
        (np.zeros((8, 8, 4), np.uint8), r"shape \(8, 8, 4\)"),
        (np.zeros((8, 8, 3), np.int64), "dtype int64"),
        (np.full((8, 8, 3), 200.0), r"from 0 to 200.*\[0, 1\]"),
        (np.full((8, 8, 3), -0.5), "from -0.5 to 0"),
        (np.full((8, 8, 3), np.nan), "nan"),
    ]:
        with pytest.raises(DataError, match=message):
            to_uint8_hwc(image)
    for image, message in [
        (np.zeros((8, 8, 3), np.float32), "dtype float32"),
        (np.zeros((3, 8, 8), np.uint8), r"\(3, 8, 8\)"),
        (np.zeros((0, 8, 3), np.uint8), r"\(0, 8, 3\)"),
        (np.zeros((1, 100, 3), np.uint8), "1 × 100 is too narrow"),
    ]:
        with pytest.raises(DataError, match=message):
            resize_with_pad(image, 28, 28)
