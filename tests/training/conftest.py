"""What the tests of the trainer share: data, a learner for tests, configurations."""

from pathlib import Path

import pytest
from training_runs import RIPT_TOY, once, pirl_command

from python_path import python_path


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory, worker_id) -> Path:
    """One for the whole session, however many workers it has."""
    base = tmp_path_factory.getbasetemp()
    directory = (base if worker_id == "master" else base.parent) / "training"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def data(shared_directory) -> Path:
    """Twenty demonstrations, five of them successful."""
    env = ("--env", "tabletop", "--env.observation", "state", "--env.max-steps", 20)
    arguments = ("collect", *env, "--policy", "expert", "--episodes", 20, "--out")
    return once(shared_directory / "data", lambda out: pirl_command(*arguments, out))


@pytest.fixture
def toy(monkeypatch):
    """Let a learner that takes milliseconds stand in for the real ones."""
    import toy_learner

    for name, function in toy_learner.REPLACED.items():
        monkeypatch.setattr(f"pirl.training.setup.{name}", function)


@pytest.fixture
def configure(data, tmp_path, monkeypatch):
    """The debug preset on the data, with changes; runs go to tmp_path, and the cache to the session's."""
    from pirl.config import check_config, get_config, override_config

    monkeypatch.setenv("PIRL_CACHE", str(data.parent / "cache"))

    def make(**changes):
        places = {"data.repo_id": str(data), "runs_dir": str(tmp_path), "agent.critic_warmup_steps": 0}
        # Stacked batches would not pass the check of signatures; runs in processes of their own have them.
        places["online.updates_per_scan"] = 1
        given = {name.replace("__", "."): value for name, value in changes.items()}
        config = override_config(get_config("debug"), {**places, **given})
        check_config(config, device_count=8)
        return config

    return make


@pytest.fixture(scope="session")
def start_policy(shared_directory) -> Path:
    """A checkpoint to begin with, whose statistics change nothing."""
    import jax.numpy as jnp
    import numpy as np
    from fair_env import ROBOT

    from pirl.config import get_config
    from pirl.interop import NormStats, save_checkpoint
    from pirl.models import abstract_model, get_parameters

    def make(out: Path) -> None:
        model = get_config("demo_ript").model
        parameters = {
            path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in get_parameters(abstract_model(model)).items()
        }
        plain = {
            name: NormStats(np.zeros(size), np.ones(size), -np.ones(size), np.ones(size))
            for name, size in (("state", 8), ("actions", 3))
        }
        save_checkpoint(out, parameters, model, norm_stats={ROBOT.name: plain})

    return once(shared_directory / "start_policy", make)


@pytest.fixture
def ript_config(start_policy, tmp_path, monkeypatch, toy, one_device):
    """RIPT's demo with a toy in an environment of chance: four small iterations, with changes."""
    from pirl.config import check_config, get_config, override_config

    monkeypatch.setenv("PIRL_CACHE", str(start_policy.parent / "cache"))
    monkeypatch.setenv("PYTHONPATH", python_path(Path(__file__).parent))

    def make(**changes):
        places = {"checkpoint": str(start_policy), "runs_dir": str(tmp_path)}
        given = {name.replace("__", "."): value for name, value in changes.items()}
        config = override_config(get_config("demo_ript"), {**RIPT_TOY, **places, **given})
        check_config(config, device_count=1)
        return config

    return make
