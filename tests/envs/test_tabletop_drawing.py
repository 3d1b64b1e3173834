"""Images of the tabletop show things where they are."""

import numpy as np
import pytest

from pirl.envs.tabletop.drawing import OVERHEAD, WRIST, View, draw
from pirl.envs.tabletop.env import TabletopEnv
from pirl.envs.tabletop.world import BLOCK, STEP, TABLE, TableConfig, Tables, lay_table

AWAY = 9.0  # meters: out of sight


def empty_tables(count: int, objects: int = 4, distractors: int = 0) -> Tables:
    """Tables with nothing in sight."""
    laid = lay_table(TableConfig(objects, 1, distractors, layout="free"), 0, 0)
    tables = Tables(**{name: np.repeat(value, count, axis=0) for name, value in laid.arrays().items()})
    tables.gripper[:], tables.bodies[:], tables.zones[:] = AWAY, AWAY, AWAY
    return tables


def overhead(tables: Tables, size: int, objects: int = 4) -> np.ndarray:
    return draw(tables, objects, View(OVERHEAD, size), np.zeros((len(tables), 2))).astype(np.float64)


def center_of_color(image: np.ndarray) -> np.ndarray:
    """Column and row of the middle of what is colored; the table, the gripper and shadows are gray."""
    color = image.max(axis=2) - image.min(axis=2)
    # How a block is shaded makes it less colorful in places, but not by half.
    weight = np.clip((color - 15) / (0.5 * color.max() - 15), 0, 1)
    rows, columns = np.mgrid[: len(image), : len(image)] + 0.5
    return np.array([(weight * columns).sum(), (weight * rows).sum()]) / weight.sum()


@pytest.mark.parametrize("size", [56, 224])
def test_blocks_are_seen_where_they_are(size: int) -> None:
    count = 60
    rng = np.random.default_rng(size)
    places = rng.uniform(-TABLE + BLOCK, TABLE - BLOCK, (count, 2))
    tables = empty_tables(count)
    tables.bodies[np.arange(count), rng.integers(4, size=count)] = places
    pixels_per_meter = size / (2 * OVERHEAD)
    for place, image in zip(places, overhead(tables, size), strict=True):
        error = center_of_color(image) - (size / 2 + place * (1, -1) * pixels_per_meter)
        assert np.abs(error).max() <= 0.5


def test_the_wrist_camera_stays_with_the_gripper() -> None:
    env = TabletopEnv(objects=1, zones=1)
    env.reset(seed=0)
    tables = env._scene.tables
    rng = np.random.default_rng(0)
    for _ in range(30):
        # The gripper is open towards -y, where nothing covers the block.
        away = np.array([rng.uniform(-0.7, 0.7), -0.7]) * WRIST
        gripper = rng.uniform(-0.1, 0.1, 2)
        tables.gripper[0], tables.bodies[0], tables.zones[0] = gripper, (gripper + away)[None], AWAY
        image = env._observe()[env.robot.cameras["left_wrist_0_rgb"]].astype(np.float64)
        error = center_of_color(image) - len(image) / 2 * (1 + away / WRIST * (1, -1))
        assert np.abs(error).max() <= 0.5


def test_in_the_wrist_camera_the_gripper_itself_does_not_move() -> None:
    rng = np.random.default_rng(1)
    tables = empty_tables(8)
    tables.gripper[:] = rng.uniform(-(TABLE - WRIST), TABLE - WRIST, (8, 2)) * 0.9
    images = draw(tables, 4, View(WRIST, 56), tables.gripper).astype(np.float64)
    grain = 15  # of the wood, which passes by below
    assert np.abs(images - images[0]).max() < grain
    aside = draw(tables, 4, View(WRIST, 56), tables.gripper + np.array([STEP, 0])).astype(np.float64)
    assert np.abs(aside - images).max() > 4 * grain


@pytest.mark.parametrize("body", [0, 4])
def test_moving_by_less_than_a_pixel_changes_a_image_a_little(body: int) -> None:
    pixel = 2 * OVERHEAD / 56
    # In steps of a quarter of a pixel, along a line across the table.
    tables = empty_tables(41, distractors=1)
    tables.bodies[:, body] = 0.013 + np.linspace(-5, 5, 41)[:, None] * pixel * (1, 0)
    images = overhead(tables, 56)
    quarter = np.abs(images[1:] - images[:-1])
    whole = np.abs(images[4:] - images[:-4])
    assert quarter.sum(axis=(1, 2, 3)).min() > 0
    assert quarter.max() < 0.45 * whole.max()
    # It goes there steadily: no step does much more than its share.
    changes = quarter.sum(axis=(1, 2, 3))
    assert changes.max() < 1.6 * changes.mean()
    assert whole.sum(axis=(1, 2, 3)).min() > 2 * changes.mean()


@pytest.mark.parametrize("number", range(4))
def test_distractors_are_drawn_and_look_like_no_block(number: int) -> None:
    place = np.random.default_rng(number).uniform(-0.15, 0.15, 2)
    tables = empty_tables(6, distractors=4)
    tables.bodies[0, 4 + number] = place
    for block in range(4):
        tables.bodies[1 + block, block] = place
    distractor, *blocks, bare = overhead(tables, 56)
    column, row = np.floor(28 + place * (1, -1) * 28 / OVERHEAD).astype(int)
    change = np.abs(distractor - bare).max(axis=2)
    assert change.max() > 25
    for block in blocks:
        assert np.abs(distractor - block)[row, column].max() > 40
    # Nothing changes elsewhere.
    rows, columns = np.nonzero(change)
    reach = 2 * BLOCK * 28 / OVERHEAD + 2
    assert max(np.abs(rows - row).max(), np.abs(columns - column).max()) < reach


def test_what_is_held_looks_lifted_and_fingers_show_how_open_they_are() -> None:
    tables = empty_tables(4)
    tables.gripper[:] = tables.bodies[:, 0] = 0.0
    tables.opening[:] = [1.0, 0.7, 0.0, 0.7]
    tables.held[3] = 0
    images = draw(tables, 4, View(WRIST, 56), tables.gripper).astype(np.float64)
    for left in range(4):
        for right in range(left):
            assert np.abs(images[left] - images[right]).max() > 10


def test_tables_are_drawn_each_for_itself() -> None:
    config = TableConfig(3, 2, 1)
    laid = [lay_table(config, seed, 0) for seed in range(5)]
    together = Tables(**{name: np.concatenate([one.arrays()[name] for one in laid]) for name in laid[0].arrays()})
    view = View(WRIST, 32)
    images = draw(together, 3, view, together.gripper)
    for image, alone in zip(images, laid, strict=True):
        np.testing.assert_array_equal(image, draw(alone, 3, view, alone.gripper)[0])
