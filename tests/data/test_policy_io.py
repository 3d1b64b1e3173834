"""A robot's data reach the model as OpenPI brings them there, and the model's actions come back to the robot."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import ROOT, arrays, assert_close, content, model_config, needs_golden
from pirl.data.policy_io import PolicyIO
from pirl.data.robots import Robot, get_robot
from pirl.data.transforms import indicate, to_uint8_hwc
from pirl.errors import ConfigError, DataError, ObservationError
from pirl.interop import NormStats, load_policy, read_norm_stats
from pirl.models import Tokenizer, get_model_config
from pirl.models.config import OPENPI_CAMERAS

TINY = get_model_config("tiny")
STATE_ONLY = dataclasses.replace(TINY, cameras=(), max_token_len=0)
ARM = Robot(name="arm", cameras={"base_0_rgb": "front"}, state=("state",), actions=("action",), delta=(2, -1))

# --- recordings of OpenPI's whole policies -----------------------------------------------------------------------------

ROBOTS = {
    "pi0_aloha_delta": "aloha",
    "pi0_aloha_sim": "aloha_sim",
    "pi05_libero": "libero",
    "pi0_libero_extra_delta": "libero_delta",
}
# What OpenPI calls cameras and state in an observation, and in a dataset.
SLOTS = {
    "images/cam_high": "base_0_rgb",
    "images/cam_left_wrist": "left_wrist_0_rgb",
    "images/cam_right_wrist": "right_wrist_0_rgb",
    "observation|image": "base_0_rgb",
    "observation|wrist_image": "left_wrist_0_rgb",
    "observation.images.top": "base_0_rgb",
    "image": "base_0_rgb",
    "wrist_image": "left_wrist_0_rgb",
}
STATES = {"state", "observation|state", "observation.state"}
every_case = pytest.mark.parametrize("name", ROBOTS)


def below(recorded, prefix):
    return {key.removeprefix(prefix): value for key, value in recorded.items() if key.startswith(prefix)}


def recorded_config(name):
    case = content("e2e", "cases.json")[name]
    fields = case["model"] | {"image_resolution": tuple(case["model"]["image_resolution"])}
    return model_config(case["checkpoint"].split("/")[1], **fields)


def recorded_case(name, given, robot=None):
    """The policy's robot and model, and a batch of one as it was recorded: images, state and prompt."""
    case, raw = content("e2e", "cases.json")[name], below(arrays("e2e", f"{name}.npz"), given)
    # OpenPI's data side always resizes to 224; the small model then resizes once more by itself.
    config = dataclasses.replace(recorded_config(name), image_resolution=(224, 224))
    tokenizer = Tokenizer.from_file(
        ROOT / "tokenizer" / "tiny_spm.model", config.max_token_len, discrete_state=config.discrete_state_input
    )
    io = PolicyIO(robot or get_robot(ROBOTS[name]), config, read_norm_stats(ROOT / case["norm_stats"]), tokenizer)
    images = {SLOTS[key]: to_uint8_hwc(value[None]) for key, value in raw.items() if key in SLOTS}
    (state,) = (value[None] for key, value in raw.items() if key in STATES)
    prompts = None if case["prompt"] is None else [case["prompt"]]
    return io, images, state, prompts, raw


def assert_is(observation, expected):
    """Bit by bit what OpenPI hands its model, once that is rounded to float32."""
    assert set(observation.images) == set(below(expected, "image/"))
    for slot, image in below(expected, "image/").items():
        np.testing.assert_array_equal(observation.images[slot][0], image)
        assert observation.image_masks[slot][0] == expected[f"image_mask/{slot}"]
    assert observation.state.dtype == np.float32
    np.testing.assert_array_equal(observation.state[0], expected["state"].astype(np.float32))
    np.testing.assert_array_equal(observation.tokenized_prompt[0], expected["tokenized_prompt"])
    np.testing.assert_array_equal(observation.tokenized_prompt_mask[0], expected["tokenized_prompt_mask"])


@needs_golden
@every_case
def test_an_observation_equals_openpi(name):
    io, images, state, prompts, _ = recorded_case(name, "raw/")
    assert_is(io.observation(images, state, prompts), below(arrays("e2e", f"{name}.npz"), "model_in/"))


@needs_golden
@every_case
def test_a_training_example_equals_openpi(name):
    # OpenPI's dataset for all ALOHA cases has one camera.
    robot = get_robot(ROBOTS[name])
    if name.endswith("aloha_delta"):
        robot = dataclasses.replace(robot, cameras=get_robot("aloha_sim").cameras)
    io, images, state, prompts, raw = recorded_case(name, "train_raw/", robot)
    expected = below(arrays("e2e", f"{name}.npz"), "train_in/")
    assert_is(io.observation(images, state, prompts), expected)
    actions = io.actions(raw[robot.actions[0]][None], state)
    assert actions.dtype == np.float32
    np.testing.assert_array_equal(actions[0], expected["actions"].astype(np.float32))


@functools.cache  # the π₀ cases share one model; each of the π₀.₅ ones would compile its own
def recorded_sampler(checkpoint, config):
    # A policy that acts has its weights rounded, as in OpenPI.
    policy = load_policy(ROOT / checkpoint, config, param_dtype="bfloat16")
    sample = jax.jit(lambda model, observation, noise: model.sample(model.encode(observation), noise=noise))
    return functools.partial(sample, policy)


@needs_golden
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name.startswith("pi05") else []) for name in ROBOTS]
)
def test_from_raw_observation_to_robot_actions_equals_openpi(name):
    io, images, state, prompts, _ = recorded_case(name, "raw/")
    recorded = arrays("e2e", f"{name}.npz")
    sample = recorded_sampler(content("e2e", "cases.json")[name]["checkpoint"], recorded_config(name))
    chunks = sample(io.observation(images, state, prompts), recorded["noise"][None, None])
    assert_close(io.robot_actions(chunks, state)[0, 0], recorded["actions"])


@needs_golden
@pytest.mark.parametrize(
    ("robot", "case"),
    [("libero", "libero_float_chw"), ("droid", "droid_pi0")],
)
def test_cameras_and_states_are_placed_as_in_openpi(robot, case):
    recorded, robot = arrays("transforms", "libero_droid.npz"), get_robot(robot)
    vision = dataclasses.replace(TINY.vision, patch_size=(4, 4))
    config = dataclasses.replace(
        STATE_ONLY, cameras=OPENPI_CAMERAS, vision=vision, image_resolution=(12, 16), action_dim=32
    )
    inputs = below(recorded, f"{case}/in/observation|")
    images = {slot: to_uint8_hwc(inputs[key][None]) for slot, key in robot.cameras.items()}
    state = np.concatenate([inputs[column] for column in robot.state])[None]
    observation = PolicyIO(robot, config, None, None).observation(images, state)
    expected = below(recorded, f"{case}/out/")
    for slot in OPENPI_CAMERAS:
        np.testing.assert_array_equal(observation.images[slot][0], expected[f"image/{slot}"])
        assert observation.image_masks[slot].tolist() == [expected[f"image_mask/{slot}"]]
    padded = np.zeros(32, np.float32)
    padded[: len(expected["state"])] = expected["state"]
    np.testing.assert_array_equal(observation.state[0], padded)


@needs_golden
@pytest.mark.parametrize(("robot", "case"), [("libero", "libero_outputs"), ("droid", "droid_outputs")])
def test_outputs_are_cut_as_in_openpi(robot, case):
    recorded, robot = arrays("transforms", "libero_droid.npz"), get_robot(robot)
    io = PolicyIO(robot, dataclasses.replace(STATE_ONLY, cameras=OPENPI_CAMERAS, action_dim=32), None, None)
    actions = io.robot_actions(recorded[f"{case}/in/actions"], np.zeros(8))
    np.testing.assert_array_equal(actions, recorded[f"{case}/out/actions"])


# --- there and back --------------------------------------------------------------------------------------------------


def random_stats(rng, dims):
    low = rng.normal(size=dims)
    return NormStats(rng.normal(size=dims), rng.uniform(0.5, 2, dims), low, low + rng.uniform(0.5, 2, dims))


@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 4),
    chunks=st.integers(1, 3),
    dims=st.tuples(st.integers(3, 34), st.integers(3, 34)),
    robot=st.sampled_from(["arm", "aloha"]),
    pi05=st.booleans(),
    declared=st.booleans(),
)
@settings(max_examples=50)
def test_robot_actions_undo_the_training_targets(seed, batch, chunks, dims, robot, pi05, declared):
    rng = np.random.default_rng(seed)
    if robot == "aloha":
        dims, robot = (14, 14), dataclasses.replace(get_robot("aloha"), cameras={})
    else:
        robot = dataclasses.replace(ARM, cameras={})
    state_dim, action_dim = dims
    robot = dataclasses.replace(
        robot, state_dim=state_dim if declared else None, action_dim=action_dim if declared else None
    )
    # π₀.₅ has no use for a state it cannot read; here it only selects the quantiles.
    config = dataclasses.replace(STATE_ONLY, action_dim=40, pi05=pi05, max_token_len=8 if pi05 else 0)
    stats = {"state": random_stats(rng, state_dim), "actions": random_stats(rng, action_dim)}
    io = PolicyIO(robot, config, stats, Tokenizer.for_model(config))
    state = rng.uniform(0, 1, (batch, state_dim))
    actions = rng.normal(size=(batch, chunks, 5, action_dim))
    for value in (state, actions):
        value.flags.writeable = False  # so that a modification would raise
    targets = io.actions(actions, state)
    assert targets.shape == (batch, chunks, 5, 40)
    assert not targets[..., action_dim:].any()
    np.testing.assert_allclose(io.robot_actions(targets, state), actions, rtol=0, atol=2e-5)
    # A batch of states is served as each of its states alone; several chunks as each of them.
    np.testing.assert_array_equal(io.actions(actions[0, 0], state[0]), targets[0, 0])
    alone = io.robot_actions(targets[-1, -1], state[-1])
    np.testing.assert_array_equal(alone, io.robot_actions(targets, state)[-1, -1])


def padded(stats, width):
    return NormStats(*(np.pad(values, (0, width - len(values))) for values in stats.to_json().values()))


def test_statistics_that_were_padded_for_the_model_tell_the_robots_width():
    """As those of OpenPI's checkpoints are, with zeros."""
    rng = np.random.default_rng(0)
    robot, config = dataclasses.replace(ARM, cameras={}), dataclasses.replace(STATE_ONLY, action_dim=32)
    stats = {"state": random_stats(rng, 3), "actions": random_stats(rng, 4)}
    io = PolicyIO(robot, config, {key: padded(entry, 32) for key, entry in stats.items()}, None)
    state, actions = rng.normal(size=(2, 3)), rng.normal(size=(2, 5, 4))
    expected = PolicyIO(robot, config, stats, None)
    np.testing.assert_array_equal(io.observation({}, state).state, expected.observation({}, state).state)
    targets = io.actions(actions, state)
    np.testing.assert_array_equal(targets, expected.actions(actions, state))
    np.testing.assert_allclose(io.robot_actions(targets, state), actions, rtol=0, atol=2e-5)


def test_a_dimension_that_is_always_0_is_not_taken_for_padding():
    robot, config = dataclasses.replace(ARM, cameras={}), dataclasses.replace(STATE_ONLY, action_dim=32)
    stats = padded(random_stats(np.random.default_rng(0), 3), 4)
    io = PolicyIO(robot, config, {"state": stats, "actions": stats}, None)
    assert io.robot_actions(np.zeros((2, 5, 32), np.float32), np.zeros((2, 4))).shape == (2, 5, 4)
    # Where the statistics are as wide as the model, who knows better has to say so.
    narrow = dataclasses.replace(STATE_ONLY, action_dim=4)
    with pytest.raises(DataError, match="4 dimensions instead of 3.*give the robot its state_dim and action_dim"):
        PolicyIO(robot, narrow, {"state": stats, "actions": stats}, None).observation({}, np.zeros((2, 4)))
    declared = dataclasses.replace(robot, state_dim=4, action_dim=4)
    PolicyIO(declared, narrow, {"state": stats, "actions": stats}, None).observation({}, np.zeros((2, 4)))


# --- batches -----------------------------------------------------------------------------------------------------------


def random_batch(size, dims=3):
    rng = np.random.default_rng(0)
    images = {"base_0_rgb": rng.integers(0, 256, (size, 40, 30, 3), dtype=np.uint8)}
    return images, rng.uniform(-0.9, 0.9, (size, dims)), [f"take block {index % 3}" for index in range(size)]


def test_tokens_alone_are_those_of_an_observation_with_these_prompts():
    config = get_model_config("tiny_pi05")
    io = PolicyIO(ARM, config, {"state": random_stats(np.random.default_rng(1), 3)}, Tokenizer.for_model(config))
    images, state, prompts = random_batch(5)
    others = [indicate(prompt, positive=index % 2 == 0) for index, prompt in enumerate(prompts)]
    given, expected = io.observation(images, state, prompts), io.observation(images, state, others)
    changed = given.with_prompt(*io.prompt_tokens(others, state))
    assert changed.tokenized_prompt.dtype == np.int32
    for ours, theirs in zip(jax.tree.leaves(changed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (changed.tokenized_prompt != given.tokenized_prompt).any(axis=1).all()
    with pytest.raises(ConfigError, match="takes no prompts"):
        PolicyIO(dataclasses.replace(ARM, cameras={}), STATE_ONLY, None, None).prompt_tokens(prompts, state)


def test_an_indicator_follows_the_task():
    assert indicate("put it there", True) == "put it there. Advantage: positive"
    assert indicate(" Put it there. ", False) == "Put it there. Advantage: negative"
    assert indicate("", True) == "Advantage: positive"


# --- what does not fit is named ----------------------------------------------------------------------------------------


def test_prompts_that_do_not_fit_are_refused():
    io = PolicyIO(ARM, TINY, None, Tokenizer.for_model(TINY))
    images, state, _ = random_batch(2)
    with pytest.raises(DataError, match="robot 'arm' has no default_prompt"):
        io.observation(images, state)
    for prompts in (["one"], "ab"):
        with pytest.raises(DataError, match="should be 2 texts, one per state"):
            io.observation(images, state, prompts)
    with pytest.raises(ObservationError, match="max_token_len = 16"):
        io.observation(images, state, ["put the red block in the blue zone and " * 4] * 2)
    with pytest.raises(ConfigError, match="a tokenizer is needed"):
        PolicyIO(ARM, TINY, None, None)


def test_a_camera_is_never_lost_in_silence():
    images, state, prompts = random_batch(2)
    tokenizer = Tokenizer.for_model(TINY)
    io = PolicyIO(ARM, TINY, None, tokenizer)
    with pytest.raises(DataError, match=r"no image for 'base_0_rgb' \('front' of robot 'arm'\); got \['front'\]"):
        io.observation({"front": images["base_0_rgb"]}, state, prompts)
    with pytest.raises(ConfigError, match=r"'aloha' maps the cameras \['right_wrist_0_rgb'\]"):
        PolicyIO(get_robot("aloha"), dataclasses.replace(TINY, action_dim=14), None, tokenizer)
    # What the robot does not map is left aside, and its slot is black.
    observation = io.observation(images | {"left_wrist_0_rgb": images["base_0_rgb"]}, state, prompts)
    assert not observation.images["left_wrist_0_rgb"].any()
    assert observation.images["base_0_rgb"].shape == (2, 56, 56, 3)
    masks = {slot: mask.tolist() for slot, mask in observation.image_masks.items()}
    assert masks == {"base_0_rgb": [True, True], "left_wrist_0_rgb": [False, False]}
