"""A learner is loaded from its run wherever somebody wants to look at it."""

import jax
import numpy as np
import pytest
from training_runs import read_state

from pirl.errors import CheckpointError
from pirl.training.inspect import load_agent
from pirl.training.train import train

PLAIN = {"online__env_steps": 0, "evaluation__every": 0, "checkpoints__best_metric": None}
PLAIN |= {"validation_every": 0, "data__validation_fraction": 0.0}


@pytest.mark.usefixtures("toy", "unchecked_signatures")  # a learner of shapes is what the state is restored into
def test_a_learner_is_loaded_where_there_are_other_devices_than_it_was_trained_on(configure, tmp_path):
    train(configure(**PLAIN, steps=2), exp_name="run")
    run = tmp_path / "run"
    config = (run / "config.yaml").read_text()
    assert "fsdp_devices" not in config or "fsdp_devices: 1" in config
    kept = "\n".join(line for line in config.splitlines() if not line.startswith("fsdp_devices"))
    (run / "config.yaml").write_text(f"{kept}\nfsdp_devices: 3\n")
    assert jax.device_count() % 3
    agent, _ = load_agent(run)
    np.testing.assert_array_equal(agent.weight, read_state(run, 2)["['weight']"])
    with pytest.raises(CheckpointError, match="has no state of step 7; it has 2"):
        load_agent(run, 7)
