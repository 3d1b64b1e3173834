"""A run that was killed, stopped or interrupted ends in the same bits as one that was left alone."""

import json
import os
import random
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_learner
from training_runs import QUICK, assert_same_run, finish, kill_when, lines_in, once, pirl_command, start, values_of

from pirl.data import PolicyIO
from pirl.envs.policy import load_trained_policy
from pirl.envs.pool import open_pool
from pirl.run_files import saved_steps
from pirl.training.evaluation import evaluated_policy
from pirl.training.inspect import load_agent

TOY_OPTIONS = ("--steps", 24, "--online.env-steps", 60, "--online.utd-ratio", 0.25, "--online.capacity", 40)
TOY_OPTIONS += ("--checkpoints.every", 8, "--validation-every", 8, "--evaluation.every", 16, "--logging.every", 3)
# One update at a time, so that both phases share a program.
DEBUG_OPTIONS = ("--agent.critic-warmup-steps", 0, "--online.updates-per-scan", 1)
PIRL, TOY = ("-m", "pirl.cli.main"), (toy_learner.__file__,)


def begin(run, data, *options, program=TOY, **environment):
    return start(run, data.parent, "debug", program, "--data.repo-id", data, *options, **QUICK | environment)


@pytest.fixture(scope="module")
def toy_reference(data, shared_directory):
    """A run that nobody disturbed, and its last step."""

    def make(out: Path) -> None:
        code, said = finish(begin(out, data, *TOY_OPTIONS))
        assert code == 0, said

    run = once(shared_directory / "toy_reference", make)
    return run, max(values_of(run, "loss"))


@pytest.mark.slow
def test_killed_at_random_moments_it_comes_to_the_same_bits(data, toy_reference, tmp_path):
    reference, last = toy_reference
    run, chance, total = tmp_path / "run", random.Random(0), lines_in(reference)
    moments = [lambda: any(run.glob("checkpoints/.*.partial*"))]
    moments += [lambda limit=limit: lines_in(run) >= limit for limit in (chance.randrange(total // 2), total - 4)]
    for number, moment in enumerate(moments):
        process = begin(run, data, *TOY_OPTIONS, *(("--resume",) if number else ()))
        kill_when(process, moment, 0.05 * chance.random())
    assert finish(begin(run, data, *TOY_OPTIONS, "--resume"))[0] == 0
    assert_same_run(run, reference, last)
    assert len(json.loads((run / "metadata.json").read_text())["resumed"]) == 3


def test_sigterm_and_ctrl_c_save_and_the_run_goes_on_to_the_same_bits(data, toy_reference, tmp_path):
    reference, last = toy_reference
    run, resumed = tmp_path / "run", ()
    # Amid the offline updates, and amid the online ones.
    for number, lines, code in ((signal.SIGTERM, 8, 0), (signal.SIGINT, 18, 130)):
        ended, said = finish(begin(run, data, *TOY_OPTIONS, *resumed, TOY_SIGNAL=f"{number:d} {lines}"))
        assert ended == code
        assert "continue with --resume" in said
        resumed = ("--resume",)
        stopped = max(saved_steps(run / "checkpoints"))
        assert 0 < stopped < 24 if number == signal.SIGTERM else 24 < stopped < last
    ended, said = finish(begin(run, data, *TOY_OPTIONS, *resumed))
    assert ended == 0
    assert "resuming from step" in said
    assert_same_run(run, reference, last)


# --- the real learner -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def debug_run(data, shared_directory):
    """The debug preset, undisturbed and from a cold start; with what it said, and next to it what it compiled."""

    def make(out: Path) -> None:
        settings = {"JAX_COMPILATION_CACHE_DIR": f"{out}_compiled"}
        code, said = finish(begin(out, data, *DEBUG_OPTIONS, program=PIRL, **settings))
        assert code == 0, said
        (out / "said.txt").write_text(said)

    run = once(shared_directory / "debug_run", make)
    return run, max(values_of(run, "loss"))


def test_the_debug_preset_killed_and_resumed_comes_to_the_same_bits_and_compiles_nothing_twice(
    data, debug_run, tmp_path
):
    reference, last = debug_run
    # No other test compiles into this directory. A copy would not do: its path is part of what programs are found by.
    run, cache = tmp_path / "run", f"{reference}_compiled"
    compiled, settings = set(os.listdir(cache)), {"JAX_COMPILATION_CACHE_DIR": cache}
    assert any(name.startswith("jit_update-") for name in compiled)
    process = begin(run, data, *DEBUG_OPTIONS, program=PIRL, **settings)
    kill_when(process, lambda: lines_in(run) >= 9)
    process = begin(run, data, *DEBUG_OPTIONS, "--resume", program=PIRL, **settings)
    assert finish(process)[0] == 0
    assert_same_run(run, reference, last)
    new = {name for name in set(os.listdir(cache)) - compiled if name.endswith("-cache")}
    assert not any(name.startswith(("jit_update", "jit_validate", "jit__act")) for name in new), "all were in the cache"


@pytest.mark.usefixtures("unchecked_signatures")  # a learner of shapes is what the state is restored into
def test_the_exported_policy_is_whole_and_acts_by_itself_as_in_the_run(
    data, debug_run, one_device, configure, monkeypatch
):
    run, last = debug_run
    policy = run / "checkpoints" / str(last)
    assert "statistics" not in pirl_command("convert", policy, "--check").stderr
    config = configure(evaluation__best_of_n=False)
    agent, policy_io = load_agent(run)
    assert isinstance(policy_io, PolicyIO)
    with open_pool(config.env, 2) as pool:
        steps = config.agent.denoising_steps
        assert steps != 10, "another number than what is planned with where nobody says one"
        by_itself = load_trained_policy(run, pool.description, batch_size=2, num_steps=steps)
        inside = evaluated_policy(agent, policy_io, pool, config)
        random_state = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
        question = ({"observation.state": random_state}, ["put the red block on the green zone"] * 2, [3, 4], [0, 8])
        np.testing.assert_array_equal(inside.infer(*question), by_itself.infer(*question))
    assert jax.tree.leaves(agent)[0].devices() == {jax.devices()[0]}


@pytest.mark.slow
def test_eight_devices_learn_the_same_as_one(data, debug_run, tmp_path):
    reference, _ = debug_run
    flags = f"{QUICK['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    options = (*DEBUG_OPTIONS, "--fsdp-devices", 2)
    process = begin(tmp_path / "run", data, *options, program=PIRL, XLA_FLAGS=flags)
    assert finish(process)[0] == 0
    for name in ("loss", "critic/loss", "grad_norm/policy"):
        one, eight = values_of(reference, name), values_of(tmp_path / "run", name)
        steps = [step for step in one if step <= 10]
        np.testing.assert_allclose([eight[s] for s in steps], [one[s] for s in steps], rtol=2e-3, err_msg=name)
