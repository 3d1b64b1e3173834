"""What cannot work is refused before anything is loaded, with what to do about it."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.bc import BCAgent
from pirl.config import check_config, check_data, debug_config, get_config, override_config
from pirl.config.checks import GAPS, check_metric
from pirl.data import ChunkBatch, get_robot, open_dataset
from pirl.data.robots import Robot
from pirl.errors import ConfigError, DataError
from pirl.models import Observation, create_model
from sample_datasets import build


@pytest.fixture
def sound(tmp_path):
    """A configuration in which everything is used and nothing is wrong."""
    (tmp_path / "params").mkdir(exist_ok=True)
    return override_config(get_config("debug"), {"data.repo_id": str(tmp_path)})


# What is changed in a configuration in which nothing is wrong, and what the message says.
REFUSED = [
    (
        {"agent.horizon_length": 5},
        "agent.horizon_length = 5 is more than the policy's chunk (model.action_horizon = 4)",
    ),
    ({"evaluation.execute_steps": 5}, "evaluation.execute_steps = 5 is more than the policy's chunk"),
    ({"batch_size": 12}, "batch_size = 12 should be a multiple of 8 (8 devices × 1 accumulation steps), such as"),
    ({"agent.accumulation_steps": 3}, "batch_size = 8 should be a multiple of agent.accumulation_steps = 3"),
    ({"agent.accumulation_steps": 2}, "16 (8 devices × 2 accumulation steps), such as --batch-size 16."),
    ({"fsdp_devices": 3}, "fsdp_devices = 3 should divide the number of devices, 8."),
    ({"env": None}, "no environment for evaluation and the online phase: name one with --env.id"),
    ({"env": None, "evaluation.every": 0, "checkpoints.best_metric": None}, "no environment for the online phase"),
    ({"data.repo_id": None}, "10 offline updates need data: name a LeRobot dataset with --data.repo-id"),
    ({"data.repo_id": None, "steps": 0}, "--online.prior-ratio 0"),
    ({"data.repo_id": None, "steps": 0, "online.prior_ratio": 0}, "--data.norm-stats checkpoint"),
    ({"steps": 0, "online.env_steps": 0}, "nothing would be learned"),
    ({"agent.learner": "bc"}, "online.env_steps = 40 is for ACRLPD: BC would clone its own failures"),
    ({"data.repo_id": "./nowhere"}, "/nowhere; one on the hub is called NAME/DATASET"),
    ({"from_scratch": False}, "for this small model the run of a preset that clones, such as demo_bc"),
    ({"from_scratch": False, "model.preset": "pi0_base"}, "gs://openpi-assets/checkpoints/pi0_base"),
    ({"from_scratch": False, "model.preset": "pi05_base"}, "gs://openpi-assets/checkpoints/pi05_base"),
    ({"checkpoint": "nowhere"}, "checkpoint and from_scratch exclude each other"),
    ({"checkpoint": "nowhere", "from_scratch": False}, "nowhere: the directory does not exist"),
    ({"checkpoint": "gs://openpi-assets/checkpoints/pi0_base/params", "from_scratch": False}, "not on this machine"),
    ({"runs_dir": "gs://bucket/runs"}, "bucket/runs is not on this machine: name a directory here"),
    ({"data.norm_stats": "checkpoint"}, "needs a --checkpoint to take them from"),
    ({"data.norm_stats": "nowhere"}, "neither dataset nor checkpoint nor the path of a norm_stats.json"),
    ({"data.robot": "alloha"}, "Did you mean aloha?"),
    ({"data.robot": "aloha", "from_scratch": False}, "actions of aloha have 14 dimensions, the model has room for"),
    (
        {"data.robot": "tabletop", "from_scratch": False},
        "shows the cameras base_0_rgb, left_wrist_0_rgb, which the model does not have",
    ),
    ({"checkpoints.keep_period": 7}, "checkpoints.keep_period = 7 should be a multiple of checkpoints.every = 5"),
    ({"checkpoints.every": 4}, "evaluation.every = 5 should be a multiple of checkpoints.every = 4"),
    ({"evaluation.every": 0}, "checkpoints.best_metric = eval/success: nothing is evaluated; set --evaluation.every"),
    ({"stopping.metric": "val/lss"}, "stopping.metric = val/lss: no such thing is measured. Did you mean val/loss?"),
    (
        {"stopping.metric": "val/loss", "validation_every": 0, "data.validation_fraction": 0},
        "no episodes are held out",
    ),
    ({"stopping.metric": "online/success", "online.env_steps": 0}, "there is no online phase"),
    ({"agent.learner": "bc", "stopping.metric": "val/critic/loss"}, "no such thing is measured"),
    ({"validation_every": 0}, "go together"),
    ({"data.validation_fraction": 0}, "go together"),
    ({"online.seed": 0}, "Set --online.seed 1"),
    ({"agent.critic_warmup_steps": 14}, "leaves none of the 14 updates for the policy"),
    ({"agent.actor_mode": "condition"}, "agent.actor_mode = condition needs a prompt, but model.max_token_len = 0"),
    ({"rollout.iterations": 3}, "rollout.iterations = 3 is for RIPT: set it to 0, or --agent.learner ript"),
    ({"batch_size": 12, "fsdp_devices": 3}, "\n- "),
]
REFUSED_OF_RIPT = [
    ({"steps": 10}, "no offline updates, and there are 10"),
    ({"online.env_steps": 10}, "online.env_steps is for ACRLPD"),
    ({"rollout.iterations": 0}, "nothing would be learned: set --rollout.iterations."),
    ({"rollout.budget": 47}, "rollout.budget = 47 initial states cannot give rollout.groups = 48 groups"),
    ({"rollout.seed": 0}, "rollout.seed and evaluation.seed are both 0"),
    ({"evaluation.seed": 1001}, "that it is evaluated on. Set --evaluation.seed to less"),
    ({"rollout.ray_address": "auto"}, "rollout.ray_address = auto is for --rollout.backend ray"),
    ({"env": None}, "no environment for evaluation and rollouts: name one with --env.id"),
    ({"env": None, "evaluation.every": 0}, "no environment for rollouts: name one with --env.id"),
    ({"agent.weighting": "guidance", "model.max_token_len": 0}, "guidance needs a prompt, but model.max_token_len = 0"),
    ({"agent.batch_by": "groups", "batch_size": 36}, "batch_size = 36 should be a multiple of rollout.attempts"),
    ({"agent.bc_loss_weight": 0.5}, "agent.bc_loss_weight = 0.5 mixes demonstrations in: name a dataset"),
    ({"data.norm_stats": "dataset"}, "--data.norm-stats checkpoint has to say"),
    ({"checkpoint": None}, "there is no policy to start from"),
    ({"checkpoints.max_to_keep": 1}, "returns to a checkpoint before the newest one"),
    ({"stopping.metric": "online/success"}, "Known: eval/success"),
    ({"stopping.metric": "rollout/succes"}, "Did you mean rollout/success?"),
    ({"stopping.metric": "rollout/success_after", "rollout.recheck": False}, "set --rollout.recheck."),
    ({"checkpoints.best_metric": "eval/success", "checkpoints.every": 2}, "evaluation.every = 5 should be a mul"),
]


@pytest.fixture
def sound_ript(tmp_path):
    """RIPT's demo with a policy to start from."""
    (tmp_path / "params").mkdir()
    return override_config(get_config("demo_ript"), {"checkpoint": str(tmp_path)})


def test_what_cannot_work_is_refused_with_a_remedy(sound, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    check_config(sound, device_count=8)
    for changes, message in REFUSED:
        with pytest.raises(ConfigError) as refused:
            check_config(override_config(sound, changes), device_count=8)
        assert message in str(refused.value)


def test_ript_that_cannot_work_is_refused_with_a_remedy(sound_ript):
    check_config(sound_ript, device_count=1)
    for changes, message in REFUSED_OF_RIPT:
        with pytest.raises(ConfigError) as refused:
            check_config(override_config(sound_ript, changes), device_count=1)
        assert message in str(refused.value)
    for metric in ("rollout/success", "rollout/success_after", "rollout/drift", "eval/success"):
        check_config(override_config(sound_ript, {"stopping.metric": metric}), device_count=1)
    groups = override_config(sound_ript, {"agent.batch_by": "groups", "rollout.attempts": 16})
    check_config(debug_config(groups), device_count=1)


@pytest.mark.parametrize(("changes", "package"), [({"wandb": "offline"}, "wandb"), ({"trackio": True}, "trackio")])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    sound, changes, package, monkeypatch, tmp_path
):
    check_config(sound)  # and what that imports
    (tmp_path / package).mkdir()  # a directory of that name, such as W&B leaves behind, is not the package
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, package, raising=False)
    asked = override_config(sound, {f"logging.{name}": value for name, value in changes.items()})
    with pytest.raises(ConfigError, match=rf"{package}: the package is not installed: pip install 'pirl\[{package}\]'"):
        check_config(asked)


def test_a_checkpoint_may_be_a_run_and_then_its_newest_policy_is_meant(sound, tmp_path):
    begun = override_config(sound, {"checkpoint": str(tmp_path / "run"), "from_scratch": False})
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "metadata.json"):
        (tmp_path / "run" / name).touch()
    with pytest.raises(ConfigError, match="has not written a policy yet"):
        check_config(begun)
    (tmp_path / "run/checkpoints/20/params").mkdir(parents=True)
    check_config(begun)


def test_a_checkpoint_may_be_named_by_its_params_as_openpi_does(sound, tmp_path):
    params = tmp_path / "pi0_base/params"
    params.mkdir(parents=True)
    for place in (params.parent, params):
        if place == params:
            (params / "_METADATA").touch()
        check_config(override_config(sound, {"checkpoint": str(place), "from_scratch": False}))
    torch, nothing = tmp_path / "torch", tmp_path / "nothing"
    for directory in (torch, nothing):
        directory.mkdir()
    (torch / "model.safetensors").touch()
    check_config(override_config(sound, {"checkpoint": str(torch), "from_scratch": False}))
    with pytest.raises(ConfigError, match="neither params/ nor model.safetensors"):
        check_config(override_config(sound, {"checkpoint": str(nothing), "from_scratch": False}))


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 4), st.sampled_from([1, 2, 4]))
@settings(max_examples=100)
def test_a_batch_is_accepted_exactly_if_every_device_gets_as_much_in_every_part(batch, devices, parts, processes):
    config = override_config(
        get_config("demo_bc"), {"batch_size": batch, "agent.accumulation_steps": parts, "data.repo_id": "me/data"}
    )
    even = all(len(part) % devices == 0 for part in np.array_split(range(batch), parts)) and batch % parts == 0
    try:
        check_config(config, device_count=devices, process_count=processes)
        accepted = True
    except ConfigError:
        accepted = False
    assert accepted == (even and batch % processes == 0)


@pytest.fixture
def dataset(tmp_path):
    build(tmp_path / "data", state_dim=8, action_dim=3, cameras="none")
    return open_dataset(tmp_path / "data")


def test_a_dataset_that_fits_is_accepted(sound, dataset):
    check_data(sound, dataset, get_robot("tabletop_state"))


@pytest.mark.parametrize(
    ("robot", "changes", "message"),
    [
        ({"action_dim": 4}, {}, "column action: has 3 dimensions, robot mine has 4"),
        (
            {"state": ("observation.stat",)},
            {},
            "stat: is not in the data, and robot mine needs it; the columns are",
        ),
        (
            {"cameras": {"base_0_rgb": "observation.images.top"}},
            {},
            "observation.images.top: is no camera of the dataset, and robot mine needs it; it has none",
        ),
        ({}, {"model.action_dim": 4}, "have 8 dimensions, the model has room for model.action_dim = 4"),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused_by_what_it_declares(sound, dataset, robot, changes, message):
    fields = {"cameras": {}, "state": ("observation.state",), "actions": ("action",), **robot}
    with pytest.raises(DataError) as refused:
        check_data(override_config(sound, changes), dataset, Robot(name="mine", **fields))
    assert message in str(refused.value)
    assert str(dataset.root) in str(refused.value)


@pytest.mark.parametrize(
    ("preset", "mode"),
    [("demo_bc", None), ("debug", "awr"), ("debug", "distill"), ("debug", "condition"), ("debug", "bc")],
)
def test_the_metrics_that_may_decide_are_those_that_learners_compute(preset, mode):
    config = override_config(get_config(preset), {"model.preset": "tiny_state", "model.max_token_len": 4})
    config = override_config(config, {"data.validation_fraction": 0.5, "validation_every": 1})
    config = override_config(config, {"agent.actor_mode": mode} if mode else {})
    config = override_config(config, {"agent.freeze": ["vision", "language"]} if mode == "distill" else {})
    kind = {"debug": ACRLPDAgent, "demo_bc": BCAgent}[preset]

    state = {"image": {}, "image_mask": {}, "state": np.zeros((2, config.model.action_dim), np.float32)}
    prompt = {"tokenized_prompt": np.zeros((2, 4), np.int32), "tokenized_prompt_mask": np.ones((2, 4), bool)}
    observation, no = Observation.from_dict(state | prompt, config.model), functools.partial(jnp.zeros, dtype=bool)
    indicated = (jnp.zeros((2, 2, 4), jnp.int32), no((2, 2, 4))) if mode == "condition" else None

    def metrics(rng):
        agent = kind.create(config.agent, create_model(config.model, rng), rng, real_action_dim=3)
        horizon = config.agent.horizon_length if preset == "debug" else config.model.action_horizon
        batch = ChunkBatch(
            observations=observation,
            actions=jnp.zeros((2, config.model.action_horizon, config.model.action_dim)),
            valid=no((2, config.model.action_horizon)),
            rewards=jnp.zeros((2, horizon)),
            terminals=no((2, horizon)),
            masks=no((2, horizon)),
            next_observations=observation,
            next_terminal=no(2),
            sequence_mask=no(2),
            success=no(2),
            indicated=indicated,
        )
        return agent.update(batch, rng)[1], agent.validate(batch, rng)

    updated, validated = jax.eval_shape(metrics, jax.random.key(0))
    for name in validated:
        assert not list(check_metric(config, f"val/{name}")), name
        assert bool(list(check_metric(config, f"gap/{name}"))) == (name not in GAPS), name
    for name in updated:
        assert list(check_metric(config, name)), f"{name} decides nothing: it is only logged"
    assert list(check_metric(config, "val/lr/policy"))


def test_shuffled_images_are_measured_where_there_are_images():
    held_out = {"data.validation_fraction": 0.5, "validation_every": 1}
    for preset, is_measured in (("demo", True), ("demo_state", False), ("demo_bc", False)):
        config = override_config(get_config(preset), held_out)
        assert (not list(check_metric(config, "val/critic/pair_auc_shuffled"))) == is_measured
