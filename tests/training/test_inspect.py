"""`pirl inspect` says what a state holds, what is odd about it, and by how much two of them differ."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from training_runs import read_state

from builders import random_model
from pirl.agents.acrlpd import ACRLPDAgent
from pirl.cli.main import main
from pirl.config import CheckpointConfig, get_config, override_config
from pirl.config.io import format_config
from pirl.errors import CheckpointError
from pirl.models import get_parameters
from pirl.training import sharding
from pirl.training.checkpoints import Checkpoints
from pirl.training.inspect import (
    Difference,
    compare_states,
    describe,
    left_whole,
    load_agent,
    open_state,
    planned_layout,
    unexpected,
)
from pirl.training.run import RunDirectory
from pirl.training.sharding import named_leaves
from pirl.training.train import train

SHARED = "actor/params/PaliGemma/llm/layers/mlp/linear"
MOVED, BY = "actor/ema_params/action_out_proj/bias", 0.25
CONFIG = override_config(get_config("debug"), {"agent.critic_optimizer.moments_dtype": "bfloat16"})


@pytest.fixture(scope="module")
def learner():
    return jax.jit(lambda policy: ACRLPDAgent.create(CONFIG.agent, policy, jax.random.key(1), real_action_dim=3))(
        random_model(CONFIG.model)
    )


def change(learner, **values):
    leaves = named_leaves(learner)
    changed = [values.get(name, leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(learner), changed)


@pytest.fixture(scope="module")
def run(learner, tmp_path_factory):
    """Two states: of a learner laid out over 4 × 2 devices, and the same with a few numbers moved, on one."""
    path = tmp_path_factory.mktemp("runs") / "fold"
    text = format_config(CONFIG)
    mesh = sharding.make_mesh(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "MIN_SHARD_BYTES", 1 << 14)
        places = jax.tree.map(
            lambda leaf: NamedSharding(mesh, sharding.parameter_spec(leaf.shape, leaf.dtype, 2)), learner
        )
    moved = named_leaves(learner)[MOVED] + BY
    states = {10: jax.device_put(learner, places), 20: change(learner, **{MOVED: moved})}
    with (
        RunDirectory.open(path, {}, resume=False, overwrite=False, config_text=text) as directory,
        Checkpoints(directory, CheckpointConfig(max_to_keep=2)) as checkpoints,
    ):
        for step, state in states.items():
            checkpoints.save(step, state, {}, state.policy(), {}, {}, {})
    return path


def inspect(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["inspect", *map(str, arguments)])
    return end.value.code


def test_a_state_is_what_was_saved(run, learner):
    state = open_state(run)
    assert state.title == "the state of step 20 in fold"
    expected = {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(learner).items()}
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in state.leaves.items()} == expected
    parts = {part.name: part for part in describe(state, state.layout, depth=2)}
    trainable = parts["actor/params"]
    counts = learner.parameter_counts()
    assert (trainable.parameters, trainable.bytes) == (counts["policy"], 4 * counts["policy"])
    assert trainable.bytes_per_device == trainable.bytes
    assert parts["actor/opt_state"].bytes == 2 * trainable.bytes + 2 * 4  # and two counters
    assert parts["step"].shape == ()
    critics = describe(state, state.layout, depth=3, subtree="critic/opt_state/1/0")
    sizes = {part.name: part.bytes for part in critics if part.name.startswith("mu")}
    assert sum(sizes.values()) == 2 * counts["critic"]


def test_the_layout_is_that_of_saving_or_of_as_many_devices_as_one_likes(run, monkeypatch):
    saved = open_state(run, 10)
    assert (saved.layout.devices, saved.layout.fsdp_devices) == (8, 2)
    assert saved.layout.pieces[SHARED] == (1, 2, 1)
    assert saved.layout.pieces["step"] == ()
    assert set(open_state(run, 20).layout.pieces[SHARED]) == {1}
    monkeypatch.setattr(sharding, "MIN_SHARD_BYTES", 1 << 14)
    assert planned_layout(saved.leaves, 4, 2).pieces == saved.layout.pieces
    planned = planned_layout(saved.leaves, 8, 8)
    for path, leaf in saved.leaves.items():
        spec = sharding.state_spec(path, leaf.shape, leaf.dtype, 8)
        assert planned.pieces[path] == tuple(8 if axis else 1 for axis in (*spec, *[None] * (leaf.ndim - len(spec))))
    assert planned.bytes_per_device(SHARED, saved.leaves[SHARED]) * 8 == 4 * saved.leaves[SHARED].size
    assert left_whole(saved.leaves, planned) == []
    monkeypatch.setattr(sharding, "MIN_SHARD_BYTES", 1 << 10)
    # Large enough now, and yet whole where they were saved; critics are meant to be.
    assert set(left_whole(saved.leaves, saved.layout)) == {
        path
        for path, leaf in saved.leaves.items()
        if saved.layout.pieces[path].count(2) == 0
        and leaf.size * leaf.dtype.itemsize >= 1 << 10
        and any(length % 2 == 0 for length in leaf.shape)
        and "critic" not in path
    }
    assert left_whole(saved.leaves, saved.layout)


def test_an_array_of_another_dtype_than_the_configuration_says_is_named(run):
    state = open_state(run)
    assert unexpected(state) == []
    plain = override_config(CONFIG, {"agent.critic_optimizer.moments_dtype": "float32"})
    found = unexpected(dataclasses.replace(state, config=plain))
    assert "critic/opt_state/1/0/nu/q/view/kernel: bfloat16, by the configuration float32" in found
    assert len(found) == sum(
        path.startswith(("critic/opt_state/1/0/mu", "critic/opt_state/1/0/nu")) for path in state.leaves
    )
    frozen = override_config(CONFIG, {"agent.freeze": ["action_out_proj/bias"], "agent.policy_ema_decay": None})
    found = unexpected(dataclasses.replace(state, config=frozen))
    assert "actor/frozen_params/action_out_proj/bias: missing" in found
    assert "actor/ema_params/action_out_proj/bias: not of the configuration" in found


def test_two_states_differ_by_what_was_moved(run, learner):
    first, second = open_state(run, 10), open_state(run, 20)
    parts = {part.name: part for part in compare_states(first, second, depth=2).parts}
    before = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(learner).items()}
    average = parts.pop("actor/ema_params")
    assert average.differing == 1
    assert average.largest == pytest.approx(BY, rel=1e-6)
    after = {**before, MOVED: np.asarray(jnp.float32(before[MOVED]) + BY, np.float64)}
    inside = [name for name in before if name.startswith("actor/ema_params/")]
    norm = np.sqrt(sum(np.square(after[name]).sum() for name in inside))
    assert average.relative == pytest.approx(np.linalg.norm(after[MOVED] - before[MOVED]) / norm, rel=1e-9)
    count = sum(before[name].size for name in inside)
    assert average.root_mean_squares[1] == pytest.approx(norm / np.sqrt(count), rel=1e-9)
    assert {(part.differing, part.largest, part.relative) for part in parts.values()} == {(0, 0.0, 0.0)}


def test_parts_of_one_state_are_compared_by_the_names_they_share(run):
    state = open_state(run, 20)
    same = compare_states(state, state, depth=1, of="actor/params", against="actor/ema_params")
    assert [part.name for part in same.parts if part.differing] == ["action_out_proj"]
    optimizers = compare_states(state, state, depth=3, of="actor/opt_state", against="critic/opt_state")
    assert {"1/0/mu/q/view/kernel", "1/0/nu/q/view/kernel"} <= set(optimizers.only_second)
    assert all(name.startswith(("1/0/mu", "1/0/nu")) for name in optimizers.only_first)
    parts = {part.name: part for part in optimizers.parts}
    assert (parts["1/0/count"].leaves, parts["1/0/count"].differing) == (1, 0)
    assert parts["1/0/mu"].leaves == 0


def test_a_policy_and_a_checkpoint_that_was_copied_are_inspected_and_compared_like_a_state(run, learner, tmp_path):
    policy = open_state(run / "checkpoints" / "10" / "params")
    assert set(policy.leaves) == set(get_parameters(learner.policy()))
    copy = shutil.copytree(run / "checkpoints" / "10", tmp_path / "copy")
    state = open_state(copy)
    assert set(state.leaves) == set(named_leaves(learner))
    assert "not compared with the configuration" in state.notes[0]
    shutil.rmtree(copy / "train_state")
    assert open_state(copy).leaves == policy.leaves
    found = compare_states(open_state(run, 10), policy, depth=9, of="actor/ema_params", against="")
    assert not found.only_first
    assert not found.only_second
    assert all(part.largest == 0 for part in found.parts)


def test_numbers_that_are_not_finite_make_an_infinite_difference_only_on_one_side():
    def difference(first, second):
        part = Difference("x")
        part.add(np.array(first, np.float32), np.array(second, np.float32))
        return part

    assert difference([np.nan, 1.0], [np.nan, 3.0]).largest == 2
    assert difference([np.nan, 1.0], [2.0, 1.0]).largest == np.inf
    assert difference([np.nan, 1.0], [2.0, 1.0]).to_json()["max_difference"] is None


def test_the_command_prints_and_writes_it(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SHARD_BYTES", 1 << 14)
    file = tmp_path / "out" / "state.json"
    file.parent.mkdir()
    assert inspect(run, "--devices", 8, "--fsdp", 4, "--depth", 1, "--json", file) == 0
    printed = capsys.readouterr().out
    assert "8 devices, 4 of which share one copy (2 copies)" in printed
    content = json.loads(file.read_text())
    assert [part["name"] for part in content["subtrees"]][:3] == ["step", "actor", "critic"]
    assert content["leaves"][SHARED]["pieces"] == [1, 4, 1]
    assert content["bytes"] == sum(part["bytes"] for part in content["subtrees"])
    assert inspect(run, "--step", 10, "--other-step", 20, "--json", file) == 0
    assert "actor/ema_params" in capsys.readouterr().out
    assert [part["differing"] for part in json.loads(file.read_text())["subtrees"] if part["differing"]] == [1]
    assert inspect(run, run, "--of", "critic/params", "--against", "critic/target_params") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--step", 15), "has no state of step 15; it has 10, 20"),
        (("--devices", 8, "--fsdp", 3), "--fsdp 3 does not divide --devices 8"),
        (("--of", "actor/parms"), "Did you mean actor/params?"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_line(run, arguments, said, capsys):
    assert inspect(run, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_directories_without_a_state_are_refused_in_a_line(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert inspect(tmp_path / "empty") == 2
    assert inspect(tmp_path / "nowhere") == 2
    state = tmp_path / "run" / "checkpoints" / "5"
    (state / "train_state").mkdir(parents=True)
    (state / "state.json").write_text('{"leaves": {"step": [[], "int32"]}}')
    assert inspect(state) == 2
    assert "is damaged" in capsys.readouterr().err
    assert inspect(run / "checkpoints" / "10", "--step", 10) == 2


@pytest.mark.usefixtures("toy", "unchecked_signatures")  # a learner of shapes is what the state is restored into
def test_a_learner_is_loaded_where_there_are_other_devices_than_it_was_trained_on(configure, tmp_path):
    plain = {"online__env_steps": 0, "evaluation__every": 0, "checkpoints__best_metric": None, "validation_every": 0}
    train(configure(**plain, data__validation_fraction=0.0, steps=2), exp_name="run")
    config = tmp_path / "run" / "config.yaml"
    kept = [line for line in config.read_text().splitlines() if not line.startswith("fsdp_devices")]
    config.write_text("\n".join([*kept, "fsdp_devices: 3\n"]))
    assert jax.device_count() % 3
    agent, _ = load_agent(tmp_path / "run")
    np.testing.assert_array_equal(
        agent.weight, read_state(tmp_path / "run", 2)["['params']['params']['action_out_proj']['bias']"]
    )
    with pytest.raises(CheckpointError, match="has no state of step 7; it has 2"):
        load_agent(tmp_path / "run", 7)
