"""What a run is made of: which episodes are learned from and measured by, whose statistics, where arrays lie."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from builders import MICRO, random_model
from pirl.config import override_config
from pirl.data import Trajectories, load_robot
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.files import write_record
from pirl.interop import NormStats, save_policy
from pirl.run_files import TRAIN_STATE, RunFiles
from pirl.training import setup as making
from pirl.training.setup import agent_shapes, agent_sharding, create_agent, return_range, set_up, update_keys


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
    shorter = dataclasses.replace(episodes([[0, 1, 50], [0, 3]]), ends=np.array([2, 5]))  # cut before the third row
    assert return_range(shorter, np.ones(5, bool), 0.5) == (0.5, 3.0)


def test_data_that_does_not_fit_is_refused_before_it_is_prepared(configure, tmp_path):
    robot = dataclasses.replace(load_robot("tabletop_state"), name="other", state=("observation.joints",))
    (tmp_path / "robot.json").write_text(json.dumps(robot.to_dict()))
    with pytest.raises(DataError, match="observation.joints: is not in the data, and robot other needs it"):
        set_up(configure(data__robot=str(tmp_path / "robot.json")))


def test_a_policy_of_another_model_is_refused_before_data_are_prepared(configure, tmp_path, monkeypatch):
    save_policy(tmp_path / "policy", random_model(MICRO))
    prepared = []
    monkeypatch.setattr(making, "load_trajectories", lambda *_, **__: prepared.append("frames"))
    with pytest.raises(CheckpointError, match="is not of this model"):
        set_up(configure(checkpoint=str(tmp_path / "policy"), from_scratch=False))
    assert prepared == []


def statistics(mean=0.0, width=None):
    """Of the state and the actions; of a `width` they are padded to, if any."""
    sizes = {"state": 8, "actions": 3}
    pad = {name: (0, (width or size) - size) for name, size in sizes.items()}
    return {
        name: NormStats(np.pad(np.full(size, mean), pad[name]), np.pad(np.ones(size), pad[name]))
        for name, size in sizes.items()
    }


def make_resumable(directory):
    (directory / TRAIN_STATE).mkdir()
    write_record(directory / "state.json", {})


@pytest.fixture
def checkpoint(configure, tmp_path, toy):
    """Write a checkpoint with these statistics; returns what a configuration has to say to begin with it."""
    import toy_learner

    policy = toy_learner.load(configure(), None)

    def save(place=None, about=None, **norm_stats):
        save_policy(place or tmp_path / "policy", policy, norm_stats=norm_stats, metadata=about, overwrite=True)
        return {"checkpoint": str(place or tmp_path / "policy"), "from_scratch": False}

    return save


def test_statistics_of_the_checkpoint_are_taken_by_name(configure, checkpoint, tmp_path):
    changes = checkpoint(one=statistics(1.0), two=statistics(2.0)) | {"data__norm_stats": "checkpoint"}
    assert set_up(configure(**changes, data__asset_id="two")).norm_stats["two"]["state"].mean[0] == 2.0
    with pytest.raises(ConfigError, match="no statistics 'tow'. Did you mean two"):
        set_up(configure(**changes, data__asset_id="tow"))
    with pytest.raises(ConfigError, match="'tabletop_state'. It has one, two: choose with --data.asset-id"):
        set_up(configure(**changes))
    for name, others in (("physical-intelligence/libero", {}), ("tabletop_state", {"one": statistics(1.0)})):
        checkpoint(**{name: statistics(3.0), **others})
        found = set_up(configure(**changes)).norm_stats
        assert list(found) == [name], "the policy is exported as its statistics were found"
        assert found[name]["state"].mean[0] == 3.0
    # A run that goes on has its own, whatever has become of the checkpoint that it began with.
    run = RunFiles(tmp_path / "run")
    assert set_up(configure(**changes), resumed=run).norm_stats.keys() == {"tabletop_state"}
    for step, mean in ((5, 6.0), (10, 7.0)):
        checkpoint(run.checkpoints / str(step), own=statistics(mean))
        make_resumable(run.checkpoints / str(step))
    gone = dataclasses.replace(configure(**changes), checkpoint=str(tmp_path / "gone"))
    assert set_up(gone, resumed=run).norm_stats["own"]["state"].mean[0] == 7.0
    newest = run.checkpoints / "10/assets/own/norm_stats.json"
    newest.write_text(newest.read_text().replace("7.0", "8.0"))
    assert set_up(gone, resumed=run).norm_stats["own"]["state"].mean[0] == 6.0, "of the one that it will go on from"


def test_new_statistics_take_the_place_of_those_that_the_policy_had(configure, checkpoint, tmp_path):
    """Whoever serves the policy looks for them under the name that OpenPI gave them."""

    def name_of(changes, **more):
        (name,) = set_up(configure(**changes, **more)).norm_stats
        return name

    changes = checkpoint(**{"me/fold_box": statistics()})
    assert name_of(changes) == "me/fold_box"
    assert name_of(changes, data__asset_id="mine") == "mine"
    assert name_of(checkpoint(trossen=statistics(), franka=statistics())) == "tabletop_state"
    assert name_of(checkpoint()) == "tabletop_state"
    # A run that goes on keeps the name, whatever has become of the checkpoint that it began with.
    run = RunFiles(tmp_path / "run")
    gone = dataclasses.replace(configure(**changes), checkpoint=str(tmp_path / "gone"))
    assert list(set_up(gone, resumed=run).norm_stats) == ["tabletop_state"]
    checkpoint(run.checkpoints / "5", **{"me/fold_box": statistics()})
    make_resumable(run.checkpoints / "5")
    assert list(set_up(gone, resumed=run).norm_stats) == ["me/fold_box"]


def test_statistics_of_relative_actions_are_not_applied_to_absolute_ones(configure, checkpoint):
    def set_up_after(**trained_with):
        robot = dataclasses.replace(load_robot("tabletop_state"), name="trained", **trained_with)
        changes = checkpoint(about={"robot": robot.to_dict()}, one=statistics())
        return set_up(configure(**changes, data__norm_stats="checkpoint"))

    with pytest.raises(ConfigError, match=r"'trained', with delta = \(2, -1\); 'tabletop_state' has delta = \(\)"):
        set_up_after(delta=(2, -1))
    # Nothing is relative, in other words.
    assert set_up_after(delta=(-3,)).norm_stats["one"]["state"] == statistics()["state"]


def test_padding_of_the_statistics_is_not_taken_for_actions_of_the_robot(configure, checkpoint, tmp_path):
    robot = dataclasses.replace(load_robot("tabletop_state"), name="open", state_dim=None, action_dim=None)
    (tmp_path / "robot.json").write_text(json.dumps(robot.to_dict()))
    online = {"steps": 0, "online__env_steps": 40, "online__prior_ratio": 0.0, "validation_every": 0}
    online |= {"data__repo_id": None, "data__norm_stats": "checkpoint", "data__validation_fraction": 0.0}
    changes = checkpoint(one=statistics(1.0, 8))
    setup = set_up(configure(**changes, **online, data__robot=str(tmp_path / "robot.json")))
    assert setup.config.model.action_dim == 8
    assert setup.action_dim == 3


@pytest.mark.usefixtures("toy")
def test_only_critics_look_beyond_the_chunk(configure):
    """What is not looked at is not read, decoded or sent to a device."""
    for learner, looks in (("acrlpd", True), ("bc", False)):
        setup = set_up(override_config(configure(), {"agent": {"learner": learner}}))
        with setup.open_loader(None) as loader:
            assert (next(loader).next_observations is not None) == looks


@pytest.mark.usefixtures("toy")
def test_a_learner_is_made_where_a_restored_one_would_lie(configure):
    setup = set_up(configure(fsdp_devices=2))
    assert setup.mesh.shape == {"data": 4, "fsdp": 2}
    agent, shapes, places = create_agent(setup), agent_shapes(setup), agent_sharding(setup)
    for leaf, shape, place in zip(*map(jax.tree.leaves, (agent, shapes, places)), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


def test_every_update_of_every_run_and_after_every_rollback_has_a_key_of_its_own():
    def numbers(*which):
        return np.atleast_2d(jax.random.key_data(update_keys(*which))).tolist()

    found = [numbers(*which, 1)[0] for which in itertools.product((0, 1), (0, 1, 2), range(5))]
    assert len(set(map(tuple, found))) == len(found)
    for rollbacks in (0, 2):  # also where several are compiled into one
        assert numbers(3, rollbacks, 5, 4) == [numbers(3, rollbacks, step, 1)[0] for step in range(5, 9)]
