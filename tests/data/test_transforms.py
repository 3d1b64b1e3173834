"""Every step between a robot and a model equals OpenPI's, and can be undone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import arrays, content, needs_golden
from pirl.data.transforms import (
    AlohaJoints,
    DeltaActions,
    Normalize,
    PadToWidth,
    Pipeline,
    make_mask,
    resize_with_pad,
    to_uint8_hwc,
)
from pirl.errors import DataError
from pirl.interop import NormStats

# Where everything else is equal bit by bit, arcsines differ in the last bit between versions of NumPy.
ARCSINE = 1e-15


def in_and_out(recorded, case):
    """The states and actions a recorded case was given, and what it made of them."""
    return [
        {key: recorded[f"{case}/{way}/{key}"] for key in ("state", "actions") if f"{case}/{way}/{key}" in recorded}
        for way in ("in", "out")
    ]


def assert_equal(actual, expected, atol=0.0):
    assert set(actual) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=0, atol=atol)
        assert actual[key].dtype == value.dtype


def recorded_stats(recorded):
    return {
        key: NormStats(*[recorded[f"stats/{key}/{name}"] for name in ("mean", "std", "q01", "q99")])
        for key in ("state", "actions")
    }


# --- equal to OpenPI -----------------------------------------------------------------------------------------------


@needs_golden
def test_aloha_inputs_equal_openpi():
    for case in ("three_cam_with_actions", "one_cam_float_chw", "four_cam"):
        given, expected = in_and_out(arrays("transforms", "aloha.npz"), f"inputs_adapt1/{case}")
        assert_equal(AlohaJoints()(given), expected, ARCSINE)


@needs_golden
def test_aloha_outputs_equal_openpi():
    given, expected = in_and_out(arrays("transforms", "aloha.npz"), "outputs_adapt1/padded32")
    del given["state"]
    assert_equal(Pipeline((AlohaJoints(), PadToWidth(32, 14, 14))).inverse(given), expected)


@needs_golden
def test_aloha_grippers_and_joints_equal_openpi():
    recorded = arrays("transforms", "aloha.npz")
    values = recorded["gripper/value"]
    robot = np.ones((len(values), 14))
    robot[:, [6, 13]] = values[:, None]
    flips = recorded["joint_flip_mask"]

    def grippers(converted):
        np.testing.assert_array_equal(np.delete(converted, [6, 13], -1), np.tile(np.delete(flips, [6, 13]), (29, 1)))
        np.testing.assert_array_equal(converted[:, 6], converted[:, 13])
        return converted[:, 6]

    given = {"state": robot, "actions": robot}
    to_pi = grippers(AlohaJoints()(given)["state"])
    np.testing.assert_allclose(to_pi, recorded["gripper/to_angular"], rtol=0, atol=ARCSINE)
    np.testing.assert_array_equal(grippers(AlohaJoints()(given)["actions"]), recorded["gripper/from_angular_inv"])
    np.testing.assert_array_equal(grippers(AlohaJoints().inverse(given)["actions"]), recorded["gripper/from_angular"])
    # OpenPI has no way back for the state; where the linkage does not clip, ours is the inverse of its way in.
    back = AlohaJoints().inverse(AlohaJoints()(given))["state"][:, 6]
    within = (values >= -0.11) & (values <= 1)
    np.testing.assert_allclose(back[within], values[within], rtol=0, atol=1e-13)
    np.testing.assert_allclose(back[values > 1], 1.0, rtol=0, atol=1e-13)


@needs_golden
def test_delta_and_absolute_actions_equal_openpi():
    recorded, arm = arrays("transforms", "actions.npz"), (6, -1)
    for case, dims in {"aloha": arm * 2, "aloha_padded32": arm * 2, "libero": arm, "droid": (7, -1)}.items():
        given, expected = in_and_out(recorded, f"delta/{case}")
        assert_equal(DeltaActions(make_mask(*dims))(given), expected)
        given, expected = in_and_out(recorded, f"absolute/{case}")
        assert_equal(DeltaActions(make_mask(*dims)).inverse(given), expected)


@needs_golden
def test_masks_equal_openpi():
    recorded = {k.split("/")[1]: v for k, v in arrays("transforms", "actions.npz").items() if k.startswith("bool_mask")}
    assert len(recorded) == 5
    for name, mask in recorded.items():
        assert list(make_mask(*map(int, name.split("_")[1:]))) == mask.tolist()


@needs_golden
def test_padding_equals_openpi():
    for case, width in {"with_actions": 32, "state_only": 32, "already_wide": 14}.items():
        given, expected = in_and_out(arrays("transforms", "actions.npz"), f"pad/{case}")
        assert_equal(PadToWidth(width, 14, None)(given), expected)


@needs_golden
@pytest.mark.parametrize("kind", ["zscore", "quantile"])
def test_normalization_equals_openpi(kind):
    recorded = arrays("transforms", "normalize.npz")
    transform = Normalize(recorded_stats(recorded), quantiles=kind == "quantile")
    for case in ("normalize", "normalize_short_state_only"):
        given, expected = in_and_out(recorded, f"{kind}/{case}")
        assert_equal(transform(given), expected)
    for case in ("unnormalize", "unnormalize_padded32"):
        given, expected = in_and_out(recorded, f"{kind}/{case}")
        assert_equal(transform.inverse(given), expected)


@needs_golden
def test_what_openpi_cannot_normalise_is_refused_by_name():
    errors = content("transforms", "normalize_errors.json")
    assert {"normalize_wider_data_than_stats", "quantile_without_q"} < set(errors)
    stats = recorded_stats(arrays("transforms", "normalize.npz"))
    with pytest.raises(DataError, match="state has 32 dimensions, but its statistics have 14"):
        Normalize(stats, quantiles=False)({"state": np.zeros(32)})
    without = {"state": NormStats(stats["state"].mean, stats["state"].std)}
    with pytest.raises(DataError, match="'state' have no quantiles"):
        Normalize(without, quantiles=True)


# --- the same in numbers written down, where there are no recordings ---------------------------------------------------


def test_normalization_is_that_of_its_formula():
    """With OpenPI's constant, which is all there is where nothing moves."""
    vectors = np.array([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [3.0, 0.0]])
    given, stats = {"state": np.array([5.0, 0.5])}, {"state": NormStats(*vectors)}
    scores, shares = (Normalize(stats, quantiles=quantiles) for quantiles in (False, True))
    np.testing.assert_allclose(scores(given)["state"], [4 / 2.000001, 0.5 / 1e-6], rtol=1e-14)
    np.testing.assert_allclose(shares(given)["state"], [2 * 6 / 4.000001 - 1, 2 * 0.5 / 1e-6 - 1], rtol=1e-14)
    for transform in (scores, shares):
        np.testing.assert_allclose(transform.inverse(transform(given))["state"], given["state"], rtol=1e-14)


# What a gripper at 0.25 becomes in OpenPI's recordings: its angle, what is commanded for it, and what is learned.
GRIPPER = (-0.5130776068814178, 0.6717322350044973, -0.640825)


def test_aloha_turns_two_joints_of_each_arm_around_and_measures_grippers_as_angles():
    value, (angle, commanded, learned) = 0.25, GRIPPER
    arm = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, value])
    given = {"state": np.tile(arm, 2), "actions": np.tile(arm, (4, 2))}
    turned = np.array([0.1, -0.2, -0.3, 0.4, 0.5, 0.6])
    there, back = AlohaJoints()(given), AlohaJoints().inverse({"actions": given["actions"]})
    np.testing.assert_allclose(there["state"], np.tile([*turned, angle], 2), rtol=1e-13)
    np.testing.assert_allclose(there["actions"], np.tile([*turned, learned], (4, 2)), rtol=1e-13)
    np.testing.assert_allclose(back["actions"], np.tile([*turned, commanded], (4, 2)), rtol=1e-13)


# --- every step can be undone ------------------------------------------------------------------------------------------


def random_stats(rng, dims):
    low = rng.normal(size=dims)
    return NormStats(rng.normal(size=dims), rng.uniform(0.1, 2, dims), low, low + rng.uniform(0.1, 2, dims))


def build(kind, rng, state_dim, action_dim):
    """A transform for these widths."""
    stats = {"state": random_stats(rng, state_dim), "actions": random_stats(rng, action_dim)}
    delta = DeltaActions(tuple((rng.random(min(state_dim, action_dim)) < 0.5).tolist()))
    steps = {
        "aloha": [AlohaJoints()],
        "delta": [delta],
        "zscore": [Normalize(stats, quantiles=False)],
        "quantiles": [Normalize(stats, quantiles=True)],
        "pad": [PadToWidth(40, state_dim, action_dim)],
    }
    steps["all"] = [*steps["aloha"], delta, *steps["quantiles"], *steps["pad"]]
    return Pipeline(tuple(steps[kind]))


@pytest.mark.parametrize("kind", ["delta", "zscore", "all"])
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.lists(st.integers(1, 3), max_size=2),
    chunks=st.lists(st.integers(1, 3), max_size=1),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
@settings(max_examples=30)
def test_the_inverse_undoes_every_transform_and_nothing_given_is_modified(kind, seed, batch, chunks, dims):
    rng = np.random.default_rng(seed)
    state_dim, action_dim = (14, 14) if kind in ("aloha", "all") else dims
    transform = build(kind, rng, state_dim, action_dim)
    # Within [-0.1, 1] a gripper's state is not clipped.
    given = {
        "state": rng.uniform(-0.1, 1, (*batch, state_dim)),
        "actions": rng.normal(size=(*batch, *chunks, 5, action_dim)),
        "other": np.ones(3),
    }
    for value in given.values():
        value.flags.writeable = False
    there = transform(given)
    for value in there.values():
        value.flags.writeable = False
    back = transform.inverse(there)
    for key, value in given.items():
        np.testing.assert_allclose(back[key], value, rtol=0, atol=1e-10)
    # And the other way round: from the model to the robot and back.
    again = transform(back)
    np.testing.assert_allclose(again["actions"], there["actions"], rtol=0, atol=1e-9)


# --- what does not fit is named ------------------------------------------------------------------------------------


def test_data_wider_than_the_model_is_never_cut():
    for key, shape in (("state", (34,)), ("actions", (5, 34))):
        with pytest.raises(DataError, match=r"34.*takes 32: use a model with action_dim >= 34.*\(action_dim=34\)"):
            PadToWidth(32, None, None)({key: np.zeros(shape)})
    with pytest.raises(DataError, match="actions has 33 dimensions, but the model takes 32"):
        PadToWidth(32, 26, 33)
    padded = PadToWidth(32, 26, 26)({"state": np.ones(26)})["state"]
    assert padded.tolist() == [1.0] * 26 + [0.0] * 6


def test_data_that_does_not_fit_is_refused():
    for transform, data, message in (
        (AlohaJoints(), {"state": np.zeros(7)}, "state has 7 dimensions; ALOHA has 14"),
        (DeltaActions((True,)), {"actions": np.zeros((5, 3))}, "need the state"),
        (DeltaActions((True,) * 4), {"state": np.zeros(9), "actions": np.zeros((5, 3))}, "makes 4 dim.*9.*3"),
        (DeltaActions((True,)), {"state": np.zeros((4, 3)), "actions": np.zeros((2, 5, 3))}, r"\(4, 3\).*\(2, 5, 3\)"),
        (Normalize({}, quantiles=False), {"state": np.zeros(3)}, "no statistics of 'state'"),
        (PadToWidth(32, 14, 14), {"state": np.zeros(13)}, "state has 13 dimensions instead of 14"),
        (PadToWidth(32, 14, 14), {"actions": np.zeros(14)}, r"actions has shape \(14,\).*horizon"),
        (PadToWidth(32, 14, 14), {"state": np.array("0")}, "state should be numbers"),
    ):
        with pytest.raises(DataError, match=message):
            transform(data)
    for transform, message in (
        (PadToWidth(32, None, None), "is not known: give the robot"),
        (PadToWidth(8, 7, 7), "should have 8.*not 32"),
    ):
        with pytest.raises(DataError, match=message):
            transform.inverse({"actions": np.zeros((5, 32))})


# --- images ----------------------------------------------------------------------------------------------------------


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
