"""What a run is made of: which episodes are learned from and measured by, whose statistics, where arrays lie."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from builders import MICRO, random_model
from pirl.config import override_config
from pirl.data import Trajectories, load_robot, open_dataset
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.interop import NormStats, save_policy
from pirl.run_files import RunFiles
from pirl.training import setup as making
from pirl.training.setup import agent_shapes, agent_sharding, create_agent, hold_out, return_range, set_up


def episodes_of(setup, weights):
    """The episodes with a row of any weight."""
    return set(setup.trajectories.episode_of(np.flatnonzero(weights)).tolist())


def test_episodes_are_held_out_whole_and_by_the_seed(configure):
    setup = set_up(configure(data__validation_fraction=0.3))
    learned, measured = episodes_of(setup, setup.weights), episodes_of(setup, setup.held_out)
    assert not learned & measured
    assert (len(learned), len(measured)) == (14, 6)
    for number in measured:
        rows = slice(setup.trajectories.starts[number], setup.trajectories.ends[number])
        assert np.all(setup.weights[rows] == 0)
        assert np.all(setup.held_out[rows] > 0)
    again = set_up(configure(data__validation_fraction=0.3))
    np.testing.assert_array_equal(again.held_out, setup.held_out)
    other = set_up(configure(data__validation_fraction=0.3, seed=1))
    assert episodes_of(other, other.held_out) != measured


def test_only_episodes_that_are_used_are_held_out(data):
    dataset = open_dataset(str(data))
    used = np.repeat(np.arange(20) % 4 == 0, dataset.lengths).astype(float)
    learned, measured = hold_out(used, dataset, 0.4, seed=0)
    chosen = np.add.reduceat(measured, dataset.starts[:-1]) > 0
    assert chosen.sum() == 2
    assert not np.any(chosen & (np.arange(20) % 4 != 0))
    np.testing.assert_array_equal(learned + measured, used)


def episodes(rewards):
    """Trajectories with these rewards, one list per episode."""
    lengths, rows = [len(one) for one in rewards], sum(map(len, rewards))
    ends = np.cumsum(lengths)
    return Trajectories(
        states=np.zeros((rows, 1), np.float32),
        actions=np.zeros((rows, 1), np.float32),
        rewards=np.concatenate(rewards).astype(np.float32),
        terminals=np.isin(np.arange(rows), ends - 1),
        starts=ends - lengths,
        ends=ends,
        success=np.ones(len(rewards), np.int8),
        prompts=[""],
        prompt_of_row=np.zeros(rows, np.int64),
    )


def test_the_range_of_returns_is_that_of_all_rows_of_the_episodes_that_are_used():
    data = episodes([[0, 0, 4], [-1, 2, -2], [100]])
    used = np.array([0, 1, 0, 1, 1, 1, 0], bool)
    # Returns are 1, 2, 4 and, from the end, -2, 2 - 1, -1 + 0.5.
    assert return_range(data, used, 0.5) == (-2.0, 4.0)
    assert return_range(data, used & (np.arange(7) < 3), 0.5) == (1.0, 4.0)
    assert return_range(data, np.arange(7) == 4, 0.5) == (-2.0, 1.0)
    assert return_range(data, np.ones(7, bool), 0.5) == (-2.0, 100.0)
    assert return_range(data, np.arange(7) < 3, 1.0) == (4.0, 4.0)
    assert return_range(data, np.arange(7) < 3, 0.0) == (0.0, 4.0)


def test_the_range_of_returns_ends_with_the_episodes():
    data = dataclasses.replace(episodes([[0, 1, 50], [0, 3]]), ends=np.array([2, 5]))  # cut before the third row
    assert return_range(data, np.ones(5, bool), 0.5) == (0.5, 3.0)


def test_data_that_does_not_fit_is_refused_before_it_is_prepared(configure, tmp_path):
    robot = dataclasses.replace(load_robot("tabletop_state"), name="other", state=("observation.joints",))
    (tmp_path / "robot.json").write_text(json.dumps(robot.to_dict()))
    with pytest.raises(DataError, match="robot other has its state in observation.joints; the columns are"):
        set_up(configure(data__robot=str(tmp_path / "robot.json")))


def test_a_policy_of_another_model_is_refused_before_data_are_prepared(configure, tmp_path, monkeypatch):
    save_policy(tmp_path / "policy", random_model(MICRO))
    prepared = []
    monkeypatch.setattr(making, "load_trajectories", lambda *_, **__: prepared.append("frames"))
    with pytest.raises(CheckpointError, match="is not of this model"):
        set_up(configure(checkpoint=str(tmp_path / "policy"), from_scratch=False))
    assert prepared == []


@pytest.mark.usefixtures("toy")
def test_statistics_of_the_checkpoint_are_taken_by_name(configure, tmp_path):
    import toy_learner

    def statistics(mean):
        wide = {"state": 8, "actions": 3}
        return {name: NormStats(np.full(width, mean), np.ones(width)) for name, width in wide.items()}

    policy = toy_learner.load(configure(), None)
    save_policy(tmp_path / "policy", policy, norm_stats={"one": statistics(1.0), "two": statistics(2.0)})
    changes = {"data__norm_stats": "checkpoint", "checkpoint": str(tmp_path / "policy"), "from_scratch": False}
    setup = set_up(configure(**changes, data__asset_id="two"))
    assert setup.norm_stats["two"]["state"].mean[0] == 2.0
    with pytest.raises(ConfigError, match="no statistics 'tow'. Did you mean two"):
        set_up(configure(**changes, data__asset_id="tow"))
    with pytest.raises(
        ConfigError, match="no statistics 'tabletop_state'. It has one, two: choose with --data.asset-id"
    ):
        set_up(configure(**changes))
    for name, others in (("physical-intelligence/libero", {}), ("tabletop_state", {"one": statistics(1.0)})):
        save_policy(tmp_path / "policy", policy, norm_stats={name: statistics(3.0), **others}, overwrite=True)
        found = set_up(configure(**changes)).norm_stats
        assert list(found) == [name], "the policy is exported as its statistics were found"
        assert found[name]["state"].mean[0] == 3.0
    # A run that goes on has its own, whatever has become of the checkpoint that it began with.
    run = RunFiles(tmp_path / "run")
    assert set_up(configure(**changes), resumed=run).norm_stats.keys() == {"tabletop_state"}
    for step, mean in ((5, 6.0), (10, 7.0)):
        save_policy(run.policies / str(step), policy, norm_stats={"own": statistics(mean)})
    gone = dataclasses.replace(configure(**changes), checkpoint=str(tmp_path / "gone"))
    assert set_up(gone, resumed=run).norm_stats["own"]["state"].mean[0] == 7.0


@pytest.mark.usefixtures("toy")
def test_new_statistics_take_the_place_of_those_that_the_policy_had(configure, tmp_path):
    """Whoever serves the policy looks for them under the name that OpenPI gave them."""
    import toy_learner

    def name_of(**changes):
        (name,) = set_up(configure(from_scratch=False, **changes)).norm_stats
        return name

    wide = {"state": 8, "actions": 3}
    statistics = {name: NormStats(np.zeros(width), np.ones(width)) for name, width in wide.items()}
    policy, place = toy_learner.load(configure(), None), str(tmp_path / "policy")
    save_policy(place, policy, norm_stats={"me/fold_box": statistics})
    assert name_of(checkpoint=place) == "me/fold_box"
    assert name_of(checkpoint=place, data__asset_id="mine") == "mine"
    save_policy(place, policy, norm_stats={"trossen": statistics, "franka": statistics}, overwrite=True)
    assert name_of(checkpoint=place) == "tabletop_state"
    save_policy(place, policy, overwrite=True)
    assert name_of(checkpoint=place) == "tabletop_state"
    # A run that goes on keeps the name, whatever has become of the checkpoint that it began with.
    run = RunFiles(tmp_path / "run")
    gone = dataclasses.replace(configure(from_scratch=False, checkpoint=place), checkpoint=str(tmp_path / "gone"))
    assert list(set_up(gone, resumed=run).norm_stats) == ["tabletop_state"]
    save_policy(run.policies / "5", policy, norm_stats={"me/fold_box": statistics})
    assert list(set_up(gone, resumed=run).norm_stats) == ["me/fold_box"]


@pytest.mark.usefixtures("toy")
def test_only_critics_look_beyond_the_chunk(configure):
    """What is not looked at is not read, decoded or sent to a device."""
    for learner, looks in (("acrlpd", True), ("bc", False)):
        setup = set_up(override_config(configure(), {"agent": {"learner": learner}}))
        with setup.open_loader(None) as loader:
            assert (next(loader).next_observations is not None) == looks


@pytest.mark.usefixtures("toy")
def test_statistics_of_relative_actions_are_not_applied_to_absolute_ones(configure, tmp_path):
    import toy_learner

    statistics = {
        name: NormStats(np.zeros(width), np.ones(width)) for name, width in {"state": 8, "actions": 3}.items()
    }
    changes = {"data__norm_stats": "checkpoint", "checkpoint": str(tmp_path / "policy"), "from_scratch": False}

    def set_up_after(**trained_with):
        robot = dataclasses.replace(load_robot("tabletop_state"), name="trained", **trained_with)
        policy, about = toy_learner.load(configure(), None), {"robot": robot.to_dict()}
        save_policy(tmp_path / "policy", policy, norm_stats={"one": statistics}, metadata=about, overwrite=True)
        return set_up(configure(**changes))

    with pytest.raises(ConfigError, match=r"'trained', with delta = \(2, -1\); 'tabletop_state' has delta = \(\)"):
        set_up_after(delta=(2, -1))
    # Nothing is relative, in other words.
    assert set_up_after(delta=(-3,)).norm_stats["one"]["state"] == statistics["state"]


@pytest.mark.usefixtures("toy")
def test_padding_of_the_statistics_is_not_taken_for_actions_of_the_robot(configure, tmp_path):
    import toy_learner

    def padded(width):
        return NormStats(*(np.pad(np.ones(width), (0, 8 - width)) for _ in range(2)))

    robot = dataclasses.replace(load_robot("tabletop_state"), name="open", state_dim=None, action_dim=None)
    (tmp_path / "robot.json").write_text(json.dumps(robot.to_dict()))
    policy = toy_learner.load(configure(), None)
    save_policy(tmp_path / "policy", policy, norm_stats={"one": {"state": padded(8), "actions": padded(3)}})
    setup = set_up(
        configure(
            data__repo_id=None,
            data__norm_stats="checkpoint",
            data__validation_fraction=0.0,
            data__robot=str(tmp_path / "robot.json"),
            validation_every=0,
            checkpoint=str(tmp_path / "policy"),
            from_scratch=False,
            steps=0,
            online__env_steps=40,
            online__prior_ratio=0.0,
        )
    )
    assert setup.config.model.action_dim == 8
    assert setup.action_dim == 3


@pytest.mark.usefixtures("toy")
def test_a_learner_is_made_where_a_restored_one_would_lie(configure):
    setup = set_up(configure(fsdp_devices=2))
    assert setup.mesh.shape == {"data": 4, "fsdp": 2}
    agent, shapes, places = create_agent(setup), agent_shapes(setup), agent_sharding(setup)
    for leaf, shape, place in zip(*map(jax.tree.leaves, (agent, shapes, places)), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
