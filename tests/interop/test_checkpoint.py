"""Checkpoints: OpenPI's are read, ours are whole, and everything that does not fit is named."""

import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from builders import MICRO, MICRO_LORA, MICRO_PI05, random_model, random_parameters
from golden import ROOT, TINY_MODELS, arrays, assert_close, content, model_config, needs_golden, observation
from pirl.agents.bc import BCAgent
from pirl.agents.config import BCConfig
from pirl.errors import CheckpointError, ConfigError
from pirl.interop.checkpoint import compare, load_policy, open_checkpoint, save_checkpoint, save_policy
from pirl.interop.norm_stats import NormStats
from pirl.interop.orbax import quiet_orbax
from pirl.models.config import LoraConfig, get_model_config
from pirl.models.pi0 import get_parameters, nest

STATS = {
    "robot/arm": {
        "state": NormStats(np.array([0.1, 0.2]), np.array([1.0, 1e-5]), np.array([-1.0, 0.0]), np.array([1.0, 2.5])),
        "actions": NormStats(np.zeros(2), np.ones(2)),
    }
}


def assert_equal_parameters(first, second):
    assert set(first) == set(second)
    for path, value in first.items():
        assert value.dtype == second[path].dtype
        np.testing.assert_array_equal(value, second[path], err_msg=path)


# --- OpenPI's own ------------------------------------------------------------------------------------------------


@needs_golden
@pytest.mark.parametrize("name", TINY_MODELS)
def test_released_checkpoints_are_read_bit_by_bit(name):
    policy = load_policy(ROOT / "models" / name / "released_style", model_config(name))
    assert_equal_parameters(get_parameters(policy), arrays("models", name, "params.npz"))


@needs_golden
@pytest.mark.parametrize("name", TINY_MODELS)
def test_trained_checkpoints_act_as_in_openpi(name):
    directory = ROOT / "models" / name / "checkpoint" / "2"
    opened = open_checkpoint(directory)
    assert opened.style == "trained"
    leaves = content("models", name, "checkpoint_tree.json")["params"]["leaves"]
    assert {f"params/{path}/value": [list(x.shape), str(x.dtype)] for path, x in opened.leaves.items()} == leaves
    assert set(opened.norm_stats()) == {"trossen"}
    expected = arrays("models", name, "expected_checkpoint2.npz")
    obs, inputs = observation(name)

    @jax.jit
    def compute(model):
        prefix = model.encode(obs)
        loss = model.flow_loss(prefix, inputs["actions"], noise=inputs["noise"], time=inputs["time"])
        return loss, model.sample(prefix, noise=inputs["sample_noise"][:, None])[:, 0]

    loss, actions = compute(load_policy(directory, model_config(name)))
    assert_close(loss, expected["loss_given"])
    assert_close(actions, expected["sample_actions_10"])
    # As a robot loads it: everything rounded to bfloat16.
    _, actions = compute(load_policy(directory / "params", model_config(name), param_dtype="bfloat16"))
    distance = np.sqrt(np.mean(np.square(actions - expected["sample_actions_10_params_bf16"])))
    rounding = np.sqrt(np.mean(np.square(expected["sample_actions_10"] - expected["sample_actions_10_params_bf16"])))
    assert distance <= rounding


@needs_golden
def test_a_base_checkpoint_starts_a_lora_policy_when_asked_to():
    directory = ROOT / "models" / "pi0_tiny" / "released_style"
    config = model_config("pi0_tiny_lora")
    with pytest.raises(CheckpointError, match="no LoRA weights.*fresh"):
        load_policy(directory, config)
    params = get_parameters(load_policy(directory, config, fresh_lora=jax.random.key(0)))
    base = arrays("models", "pi0_tiny", "params.npz")
    for path, value in params.items():
        if "lora" in path:
            assert 0.005 < float(jnp.std(value)) < 0.015
        else:
            np.testing.assert_array_equal(value, base[path])


@needs_golden
def test_optimizer_state_is_not_taken_for_a_policy():
    with pytest.raises(CheckpointError, match="not the parameters of a policy alone"):
        open_checkpoint(ROOT / "models" / "pi0_tiny" / "checkpoint" / "2" / "train_state")


# --- ours --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "config"),
    [("released", MICRO), ("released", MICRO_PI05), ("trained", MICRO_LORA)],
    ids=["pi0", "pi05", "trained-lora"],
)
def test_a_saved_policy_comes_back_equal(tmp_path, style, config):
    policy = random_model(config)
    save_policy(tmp_path / "a" / "5", policy, norm_stats=STATS, metadata={"step": 5}, style=style)
    opened = open_checkpoint(tmp_path / "a" / "5")
    assert (opened.style, opened.config, opened.description["step"]) == (style, config, 5)
    assert opened.norm_stats() == STATS
    assert_equal_parameters(get_parameters(policy), get_parameters(load_policy(tmp_path / "a" / "5")))


def test_a_learner_of_a_loaded_policy_compiles_its_update_once(tmp_path):
    save_policy(tmp_path / "policy", random_model(MICRO))
    agent = BCAgent.create(BCConfig(), load_policy(tmp_path / "policy"), jax.random.key(0))
    update = jax.jit(lambda agent: jax.tree.map(lambda leaf: leaf + 1, agent))
    update(update(agent))
    assert update._cache_size() == 1


def test_mixed_dtypes_are_kept_and_casts_are_exact(tmp_path):
    params = random_parameters(MICRO)
    mixed = {path: value.astype(jnp.bfloat16) if "llm" in path else value for path, value in params.items()}
    save_checkpoint(tmp_path / "mixed", mixed, MICRO)
    assert_equal_parameters(mixed, get_parameters(load_policy(tmp_path / "mixed")))
    cast = get_parameters(load_policy(tmp_path / "mixed", param_dtype="bfloat16"))
    assert_equal_parameters({path: value.astype(jnp.bfloat16) for path, value in mixed.items()}, cast)


def test_the_layout_is_the_one_openpi_reads(tmp_path):
    """As its loader does: Orbax's metadata gives the tree, the tree is restored, `params` is taken from it."""
    save_policy(tmp_path / "7", random_model(MICRO), norm_stats=STATS)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(tmp_path / "7" / "params").item_metadata.tree
        restored = checkpointer.restore(tmp_path / "7" / "params")
    assert set(tree) == {"params"}
    expected = jax.tree.map(np.asarray, nest(random_parameters(MICRO)))
    jax.tree.map(np.testing.assert_array_equal, restored["params"], expected)
    stats = json.loads((tmp_path / "7/assets/robot/arm/norm_stats.json").read_text())["norm_stats"]
    assert stats["state"] == {"mean": [0.1, 0.2], "std": [1.0, 1e-5], "q01": [-1.0, 0.0], "q99": [1.0, 2.5]}
    assert stats["actions"]["q01"] is None


def test_only_a_checkpoint_is_overwritten_and_only_when_told(tmp_path):
    save_policy(tmp_path / "x", random_model(MICRO))
    (tmp_path / "link").symlink_to(tmp_path / "x")
    (tmp_path / "photos").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        save_policy(tmp_path / "x", random_model(MICRO, seed=1))
    with pytest.raises(CheckpointError, match="not overwritten"):
        save_policy(tmp_path / "photos", random_model(MICRO), overwrite=True)
    save_policy(tmp_path / "link", random_model(MICRO, seed=1), overwrite=True)
    assert_equal_parameters(get_parameters(load_policy(tmp_path / "x")), random_parameters(MICRO, seed=1))
    assert sorted(os.listdir(tmp_path)) == ["link", "photos", "x"]


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (
            "run[1]/x",
            {},
            "choose a path without",
        ),  # Orbax takes it for a pattern, and leaves a checkpoint without index
        ("gs://bucket/policy", {}, "gs:/+bucket/policy is not on this machine: write the"),
        ("x", {"metadata": {"model": "pi0"}}, "metadata keys"),
        ("x", {"metadata": {"score": object()}}, "metadata cannot"),
        ("x", {"norm_stats": {"../out": STATS["robot/arm"]}}, "asset id"),
        ("x", {"norm_stats": {"/abs": STATS["robot/arm"]}}, "asset id"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, monkeypatch, path, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        save_policy(path, random_model(MICRO), **options)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_replacement_took_away_comes_back(tmp_path, monkeypatch):
    """Killed between the two renames."""
    save_policy(tmp_path / "x", random_model(MICRO))
    (tmp_path / "x").rename(tmp_path / ".x.replaced")
    (tmp_path / ".x.partial").mkdir()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pirl.interop.checkpoint.write_norm_stats", fail)
    with pytest.raises(CheckpointError, match="exists already"):
        # Even a save that is refused puts the old one back.
        save_policy(tmp_path / "x", random_model(MICRO, seed=1))
    with pytest.raises(OSError, match="disk full"):
        save_policy(tmp_path / "x", random_model(MICRO, seed=1), norm_stats=STATS, overwrite=True)
    assert os.listdir(tmp_path) == ["x"]
    assert_equal_parameters(get_parameters(load_policy(tmp_path / "x")), random_parameters(MICRO))


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    make = type(tmp_path).mkdir

    def interrupted_right_after(path, *args, **kwargs):
        make(path, *args, **kwargs)
        if ".partial" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "mkdir", interrupted_right_after)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "x", {"w": jnp.zeros(2)}, None)
    assert os.listdir(tmp_path) == []


# A fork for each target, which spares the import. The first saves, and counts the directories and files that are made,
# opened or renamed on the way. The others kill themselves just before the first of them, one in the middle, and the last.
KILLED = """
import os, signal, sys
import jax.numpy as jnp
from pirl.interop.checkpoint import save_checkpoint

def save(target, moment):
    params = {f"layer{i}/w": jnp.full((256, 256), float(i)) for i in range(40)}
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in ("os.mkdir", "open", "os.rename") and ".partial" in str(arguments[0]):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save_checkpoint(target, params, None)
    return seen

def fork(target, moment=None):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, str(save(target, moment)).encode())
        os._exit(0)
    os.close(writing)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return os.read(reading, 9)

whole, *others = sys.argv[1:]
count = int(fork(whole))
for target, moment in zip(others, (1, count // 2, count)):
    fork(target, moment)
"""


def test_a_killed_save_never_looks_like_a_checkpoint(tmp_path):
    """Kill -9 at moments spread over the save: the target is absent or complete, and the next save clears the rest."""
    targets = [tmp_path / str(index) / "policy" for index in range(4)]
    for target in targets:
        target.parent.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", KILLED, *map(str, targets)]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split() == [b"0", b"-9", b"-9", b"-9"]
    values = open_checkpoint(targets[0]).read()
    assert all(bool(jnp.all(values[f"layer{i}/w"] == i)) for i in range(40))
    for target in targets[1:]:
        with pytest.raises(CheckpointError, match="does not exist"):
            open_checkpoint(target)
        save_checkpoint(target, {"w": jnp.zeros(3)}, None, overwrite=True)
        assert os.listdir(target.parent) == ["policy"]


# --- what does not fit -------------------------------------------------------------------------------------------


def test_every_misfit_is_named(tmp_path):
    params = random_parameters(MICRO)
    params["extra/leaf"] = jnp.zeros(3)
    del params["state_proj/bias"]
    params["action_in_proj/kernel"] = jnp.zeros((9, 12))
    save_checkpoint(tmp_path / "x", params, MICRO)
    with pytest.raises(CheckpointError) as error:
        load_policy(tmp_path / "x")
    message = str(error.value)
    assert "missing from the checkpoint (1):\n    state_proj/bias" in message
    assert "not in the model (1):\n    extra/leaf" in message
    assert "action_in_proj/kernel: (9, 12) in the checkpoint, (5, 12) in the model" in message


@pytest.mark.parametrize(
    ("saved", "wanted", "hint"),
    [
        (MICRO, MICRO_PI05, "is a π₀; the model is a π₀.₅"),
        (MICRO_PI05, MICRO, "is a π₀.₅; the model is a π₀"),
        (MICRO_LORA, MICRO, "merge"),
        (MICRO, get_model_config("tiny"), "pirl convert"),
    ],
)
def test_a_checkpoint_of_another_model_is_recognized(tmp_path, saved, wanted, hint):
    save_policy(tmp_path / "x", random_model(saved))
    with pytest.raises(CheckpointError, match=hint):
        load_policy(tmp_path / "x", wanted)


def with_lora(alpha, rank_stabilized=False):
    lora = LoraConfig(rank=4, alpha=alpha, rank_stabilized=rank_stabilized)
    return dataclasses.replace(
        MICRO, language=MICRO.language.with_lora(lora), action_expert=MICRO.action_expert.with_lora(lora)
    )


@pytest.mark.parametrize(
    ("saved", "wanted", "named"),
    [
        (with_lora(8.0), with_lora(80.0), "language.attention_lora.alpha is 8.0 there, and 80.0 here"),
        (with_lora(8.0), with_lora(8.0, True), "action_expert.attention_lora.rank_stabilized is False there"),
        (MICRO_PI05, dataclasses.replace(MICRO_PI05, discrete_state_input=False), "discrete_state_input is True there"),
        (MICRO, dataclasses.replace(MICRO, image_resolution=(12, 8)), r"image_resolution is \(8, 12\) there"),
    ],
)
def test_parameters_that_would_compute_something_else_are_refused_though_they_fit(tmp_path, saved, wanted, named):
    save_policy(tmp_path / "x", random_model(saved))
    with pytest.raises(CheckpointError, match=named):
        load_policy(tmp_path / "x", wanted)
    # A checkpoint that does not describe itself, as OpenPI's, is what it is taken for.
    (tmp_path / "x" / "pirl.json").unlink()
    assert load_policy(tmp_path / "x", wanted).config == wanted


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (MICRO, dataclasses.replace(MICRO, action_horizon=9, max_token_len=11, dtype="bfloat16", remat="dots")),
        (with_lora(8.0), with_lora(4.0, True)),  # the same factor at rank 4
        (dataclasses.replace(MICRO, max_token_len=0), dataclasses.replace(MICRO, max_token_len=0, tokenizer="tiny")),
    ],
)
def test_a_configuration_that_computes_the_same_is_accepted(tmp_path, saved, wanted):
    save_policy(tmp_path / "x", random_model(saved))
    assert load_policy(tmp_path / "x", wanted).config == wanted


def test_a_policy_that_goes_on_learning_may_get_its_state_in_another_way(tmp_path):
    save_policy(tmp_path / "x", random_model(MICRO_PI05))
    blind = dataclasses.replace(MICRO_PI05, discrete_state_input=False)
    assert load_policy(tmp_path / "x", blind, to_learn=True).config == blind
    with pytest.raises(CheckpointError, match="tokenizer is paligemma there"):
        load_policy(tmp_path / "x", dataclasses.replace(blind, tokenizer="tiny"), to_learn=True)


def test_a_checkpoint_that_does_not_describe_itself_needs_a_configuration(tmp_path):
    save_policy(tmp_path / "x", random_model(get_model_config("tiny")))
    (tmp_path / "x" / "pirl.json").unlink()
    with pytest.raises(ConfigError, match="presets tiny have the same parameters"):
        load_policy(tmp_path / "x")
    assert load_policy(tmp_path / "x", "tiny").config == get_model_config("tiny")


def test_a_damaged_file_is_an_error_or_does_not_matter(tmp_path):
    """Every file of a checkpoint, cut short or gone: a clear complaint, or exactly the same parameters."""
    good = tmp_path / "good"
    random = np.random.default_rng(0)
    expected = {f"layer/{name}": jnp.asarray(random.normal(size=(40, 30)), jnp.float32) for name in "abc"}
    save_checkpoint(good, expected, None)
    files = [file.relative_to(good) for file in good.rglob("*") if file.is_file()]
    assert len(files) > 5
    complaints = 0
    for file in files:
        for damage in ("remove", "empty", "halve"):
            bad = tmp_path / "bad"
            shutil.copytree(good, bad)
            if damage == "remove":
                (bad / file).unlink()
            else:
                whole = (bad / file).read_bytes()
                (bad / file).write_bytes(whole[: len(whole) // 2] if damage == "halve" else b"")
            try:
                loaded = open_checkpoint(bad).read()
            except CheckpointError as error:
                assert str(bad) in str(error)
                complaints += 1
            else:
                assert_equal_parameters(loaded, expected)
            shutil.rmtree(bad)
    assert complaints >= 6


def test_zeros_that_an_older_writer_left_out_are_zeros(tmp_path):
    """Checkpoints whose metadata does not promise that all-zero chunks are stored."""
    params = {"a/zero": jnp.zeros((4, 3)), "a/one": jnp.ones((4, 3))}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "old" / "params", args=ocp.args.PyTreeSave({"params": nest(params)}))
    assert_equal_parameters(open_checkpoint(tmp_path / "old").read(), params)
    (tmp_path / "old" / "params" / "params.a.zero" / "0.0").unlink()
    with pytest.raises(CheckpointError, match="a/zero"):
        open_checkpoint(tmp_path / "old").read()
    metadata = tmp_path / "old" / "params" / "_METADATA"
    promised = json.loads(metadata.read_text())
    del promised["store_array_data_equal_to_fill_value"]
    metadata.write_text(json.dumps(promised))
    assert_equal_parameters(open_checkpoint(tmp_path / "old").read(), params)


def test_wrong_paths_are_explained(tmp_path):
    (tmp_path / "run" / "1000").mkdir(parents=True)
    (tmp_path / "run" / "500").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    base = "gs://openpi-assets/checkpoints/pi0_base"
    for path, message in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "run", "steps 500, 1000: name one, e.g. .*run/1000"),
        (tmp_path / "empty", "neither params/ nor model.safetensors"),
        (tmp_path / "file", "it is a file"),
        (f"{base}/params/", re.escape(f"{base} is not on this machine: copy it first (gsutil -m cp -r {base} check")),
        (Path(base), re.escape(f"gsutil -m cp -r {base} checkpoints/")),
        ("hf://lerobot/pi0", r"hf://lerobot/pi0 is not on this machine: copy it first \(with its assets/\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)


# --- comparing ---------------------------------------------------------------------------------------------------


def test_differences_are_found_one_by_one(tmp_path):
    params = random_parameters(MICRO)
    save_checkpoint(tmp_path / "a", params, MICRO, norm_stats=STATS)
    changed = dict(params)
    changed["state_proj/bias"] = params["state_proj/bias"].at[3].add(0.5)
    changed["action_in_proj/kernel"] = params["action_in_proj/kernel"].astype(jnp.bfloat16)
    changed["new/leaf"] = jnp.zeros(2)
    changed["action_out_proj/bias"] = jnp.zeros(7)
    save_checkpoint(tmp_path / "b", changed, MICRO)
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert compare(a, a) == []
    always = {
        "new/leaf: only in the second",
        "action_out_proj/bias: shape (5,) and (7,)",
        "assets/robot/arm/norm_stats.json: other statistics, or only in one",
    }
    found = set(compare(a, b))
    assert found > always
    assert "state_proj/bias: 1 of 12 values, by up to 0.5" in found
    assert "action_in_proj/kernel: dtype float32 and bfloat16" in found
    assert set(compare(a, b, rtol=0.01, atol=0.6)) == always


def test_only_orbax_is_kept_out_of_asyncios_log(caplog):
    with quiet_orbax():
        pass
    logger = logging.getLogger("asyncio")
    for place, is_told in (("/lib/orbax/checkpoint/path.py", False), ("/home/me/mine.py", True)):
        caplog.clear()
        try:
            exec(compile("raise OSError('no space')", place, "exec"))
        except OSError:
            logger.exception("Future exception was never retrieved")
        assert bool(caplog.records) == is_told
