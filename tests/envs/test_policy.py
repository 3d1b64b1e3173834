"""Planning: the same episode gets the same actions whoever else is planned for, and only a policy that fits may act."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pirl.data import PolicyIO, Robot
from pirl.envs import EnvDescription
from pirl.envs.base import Policy
from pirl.envs.policy import Pi0Policy, find_policy, load_trained_policy
from pirl.errors import CheckpointError, ConfigError
from pirl.interop import NormStats, save_policy
from pirl.models import Pi0, Tokenizer, create_model, get_model_config

_TINY = get_model_config("tiny")
MODEL = dataclasses.replace(
    _TINY,
    vision=dataclasses.replace(_TINY.vision, depth=1),
    language=dataclasses.replace(_TINY.language, depth=1),
    action_expert=dataclasses.replace(_TINY.action_expert, depth=1),
)
ROBOT = Robot(
    "arm",
    cameras={"base_0_rgb": "top", "left_wrist_0_rgb": "wrist"},
    state=("joints", "grip"),
    actions=("action",),
    state_dim=3,
    action_dim=2,
)
DESCRIPTION = EnvDescription(
    name="arms",
    robot=ROBOT,
    tasks=("go",),
    fps=10,
    max_steps=20,
    shapes={"top": (40, 60, 3), "wrist": (56, 56, 3), "joints": (2,), "grip": (1,)},
    has_expert=False,
)
BATCH = 5


def stats(width: int, padding: int = 0) -> NormStats:
    def vector(value: float) -> np.ndarray:
        return np.concatenate([np.full(width, value), np.zeros(padding)])

    return NormStats(mean=vector(0.5), std=vector(2.0))


STATISTICS = {"state": stats(3), "actions": stats(2)}


def observations(count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: random.integers(0, 256, (count, *shape), np.uint8)
        if len(shape) == 3
        else random.normal(size=(count, *shape)).astype(np.float32)
        for name, shape in DESCRIPTION.shapes.items()
    }


@pytest.fixture(scope="module")
def policy() -> Pi0:
    return create_model(MODEL, jax.random.key(1))


@pytest.fixture(scope="module")
def acting(policy: Pi0) -> Pi0Policy:
    io = PolicyIO(ROBOT, MODEL, STATISTICS, Tokenizer.for_model(MODEL))
    return Pi0Policy(policy, io, batch_size=BATCH, num_steps=3)


def plan(acting: Pi0Policy, rows: list[int]) -> np.ndarray:
    """Chunks for some rows of a larger set, in that order."""
    seen = {name: values[rows] for name, values in observations(12).items()}
    prompts = [("go there", "come back")[row % 2] for row in rows]
    return acting.infer(seen, prompts, [2**33 + row for row in rows], [7 * row for row in rows])


def test_a_chunk_does_not_depend_on_the_rest_of_the_batch_nor_on_its_filling(acting: Pi0Policy) -> None:
    assert isinstance(acting, Policy)
    whole = plan(acting, list(range(12)))  # more than one batch, the last of them not full
    assert whole.shape == (12, acting.horizon, 2)
    for rows in ([0], [11], [3, 1], [8, 0, 7, 5, 2], [4, 4, 4, 9, 4, 4, 10]):
        np.testing.assert_array_equal(plan(acting, rows), whole[rows])


def test_noise_comes_from_seed_and_step_and_from_all_of_their_digits(acting: Pi0Policy) -> None:
    seen = {name: values[[0] * 5] for name, values in observations(1).items()}
    same, *others = acting.infer(seen, ["go"] * 5, [3, 3, 4, 3 + 2**32, 3], [0, 5, 0, 0, 0])
    np.testing.assert_array_equal(same, others.pop())
    for one in others:
        assert np.abs(one - same).max() > 1e-3


def test_actions_are_those_of_the_policy_in_the_robots_units(policy: Pi0, acting: Pi0Policy) -> None:
    """By hand: the robot's state padded, one encoding, one sampling, statistics undone."""
    io, seen = acting.policy_io, observations(BATCH)
    state = np.concatenate([seen["joints"], seen["grip"]], axis=1)
    prepared = io.observation({"base_0_rgb": seen["top"], "left_wrist_0_rgb": seen["wrist"]}, state, ["go"] * BATCH)
    np.testing.assert_allclose(prepared.state[:, :3], (state - 0.5) / 2.0, rtol=1e-5)
    noise = []
    for row in range(BATCH):
        key = jax.random.key(0)
        for number in (row, 0, 2):
            key = jax.random.fold_in(key, number)
        noise.append(jax.random.normal(key, (1, MODEL.action_horizon, MODEL.action_dim)))
    sample = jax.jit(lambda policy, seen, noise: policy.sample(policy.encode(seen), num_steps=3, noise=noise))
    sampled = sample(policy, prepared, jax.numpy.stack(noise))[:, 0, :, :2]
    planned = acting.infer(seen, ["go"] * BATCH, list(range(BATCH)), [2] * BATCH)
    np.testing.assert_allclose(planned, np.asarray(sampled) * 2.0 + 0.5, rtol=1e-4, atol=1e-4)


def test_guidance_goes_from_the_plain_prompt_to_the_indicated_one_and_beyond(policy: Pi0) -> None:
    """With one Euler step, chunks are linear in the flow, and so in the guidance."""
    io, seen = PolicyIO(ROBOT, MODEL, STATISTICS, Tokenizer.for_model(MODEL)), observations(BATCH)

    def plans(prompt: str, guidance: float) -> np.ndarray:
        acting = Pi0Policy(policy, io, batch_size=BATCH, num_steps=1, guidance=guidance)
        return acting.infer(seen, [prompt] * BATCH, list(range(BATCH)), [0] * BATCH)

    plain, asked = plans("go", 0.0), plans("go. Advantage: positive", 0.0)
    assert np.abs(asked - plain).max() > 1e-3
    np.testing.assert_array_equal(plans("go", 1.0), asked)
    np.testing.assert_allclose(plans("go", 3.0), plain + 3 * (asked - plain), rtol=1e-4, atol=1e-4)


def test_only_a_model_with_a_prompt_can_be_guided_and_only_forwards(policy: Pi0, acting: Pi0Policy) -> None:
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(ConfigError, match="guidance = .* should be a number of at least 0"):
            Pi0Policy(policy, acting.policy_io, batch_size=BATCH, guidance=wrong)
    blind = PolicyIO(ROBOT, dataclasses.replace(MODEL, max_token_len=0), STATISTICS, None)
    with pytest.raises(ConfigError, match="guidance needs a prompt"):
        Pi0Policy(policy, blind, batch_size=BATCH, guidance=1.0)


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(policy: Pi0, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policies") / "one", policy, norm_stats={"arm": STATISTICS})


def with_statistics(checkpoint: Path, target: Path, assets: Mapping[str, Mapping[str, NormStats]]) -> Path:
    """The same policy with other statistics, without writing its parameters again."""
    target.mkdir()
    (target / "params").symlink_to(checkpoint / "params")
    (target / "pirl.json").write_bytes((checkpoint / "pirl.json").read_bytes())
    for asset_id, entries in assets.items():
        (target / "assets" / asset_id).mkdir(parents=True)
        content = {"norm_stats": {key: entry.to_json() for key, entry in entries.items()}}
        (target / "assets" / asset_id / "norm_stats.json").write_text(json.dumps(content))
    return target


def load(path: Path, description: EnvDescription = DESCRIPTION, **options: Any) -> Pi0Policy:
    return load_trained_policy(path, description, batch_size=BATCH, num_steps=3, **options)


def test_a_checkpoint_says_how_it_is_guided_unless_told_otherwise(checkpoint: Path, tmp_path: Path) -> None:
    assert load(checkpoint).guidance == 0
    path = with_statistics(checkpoint, tmp_path / "guided", {"arm": STATISTICS})
    described = json.loads((path / "pirl.json").read_text()) | {"guidance": 2.5}
    (path / "pirl.json").write_text(json.dumps(described))
    assert (load(path).guidance, load(path, guidance=0.0).guidance) == (2.5, 0)


def test_a_run_means_its_newest_policy(tmp_path: Path) -> None:
    assert find_policy(tmp_path) == tmp_path
    policies = tmp_path / "checkpoints"
    policies.mkdir()
    for name in ("config.yaml", "metadata.json"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="has not written a policy yet"):
        find_policy(tmp_path)
    for name in ("9", "100", "20", ".101.partial", "notes", "10²", "1٠١", "0200"):
        (policies / name).mkdir()
    (policies / "1000").write_text("a file")
    assert find_policy(tmp_path) == policies / "100"


def test_statistics_are_the_only_ones_or_chosen_ones_or_explicitly_none(checkpoint: Path, tmp_path: Path) -> None:
    two = with_statistics(checkpoint, tmp_path / "two", {"arm": STATISTICS, "leg": STATISTICS})
    with pytest.raises(ConfigError, match="has several statistics. It has arm, leg: choose with --asset-id"):
        load(two)
    with pytest.raises(ConfigError, match=r"no statistics 'lge'. Did you mean leg\?"):
        load(two, asset_id="lge")
    assert load(two, asset_id="leg").horizon == MODEL.action_horizon
    bare = with_statistics(checkpoint, tmp_path / "bare", {})
    with pytest.raises(ConfigError, match="has no statistics .* --asset-id none"):
        load(bare)
    load(bare, asset_id="none")


@pytest.mark.parametrize(
    ("assets", "complaint"),
    [
        (
            {"state": stats(4), "actions": stats(2)},
            "state has 4 dimensions .* statistics; in arms there are 3",
        ),
        (
            {"state": stats(3), "actions": stats(1)},
            "actions has 1 dimensions .* statistics; .* there are 2",
        ),
        ({"state": stats(3)}, "no statistics of 'actions'"),
        ({"state": stats(3, 5), "actions": stats(2, 6)}, None),
    ],
)
def test_statistics_of_another_robot_are_refused_but_padded_ones_are_not(
    checkpoint: Path, tmp_path: Path, assets: dict[str, NormStats], complaint: str | None
) -> None:
    path = with_statistics(checkpoint, tmp_path / "other", {"arm": assets})
    if complaint is None:
        load(path)
        return
    with pytest.raises(ConfigError, match=complaint):
        load(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"robot": dataclasses.replace(ROBOT, action_dim=7)},
            "actions has 2 dimensions .* in arms there are 7",
        ),
        ({"robot": dataclasses.replace(ROBOT, action_dim=9)}, "8 numbers of actions at most; arms has 9"),
        (
            {"robot": dataclasses.replace(ROBOT, cameras={"right_wrist_0_rgb": "top"})},
            "sees through base_0_rgb, left_wrist_0_rgb, but arms has only right_wrist_0_rgb",
        ),
        ({"shapes": {"top": (4, 4, 3), "joints": (2,), "grip": (1,)}}, "observes 'wrist'"),
        (
            {"shapes": {**DESCRIPTION.shapes, "joints": (6,)}},
            "state has 3 dimensions .* in arms there are 7",
        ),
    ],
)
def test_a_policy_that_does_not_fit_the_environment_is_refused(
    checkpoint: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(checkpoint, dataclasses.replace(DESCRIPTION, **changes))


def test_the_robot_can_be_described_otherwise(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "delta.json"
    delta = dataclasses.replace(ROBOT, name="delta", delta=(2,))
    file.write_text(json.dumps(delta.to_dict()))
    shifted, plain = load(checkpoint, robot=str(file)), load(checkpoint)
    origin = observations(12)["joints"][[0, 1]]
    np.testing.assert_allclose(plan(shifted, [0, 1]), plan(plain, [0, 1]) + origin[:, None], rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="robot 'libero' observes 'image'"):
        load(checkpoint, robot="libero")
