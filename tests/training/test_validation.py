"""The losses on held-out episodes, and how far those on training episodes are from them."""

import math

import numpy as np
import pytest

from pirl.training.measure import measure_losses
from pirl.training.setup import create_agent, set_up

pytestmark = pytest.mark.usefixtures("toy")


@pytest.fixture
def setup(configure):
    return set_up(configure(data__validation_fraction=0.3, validation_batches=3))


def states_of(setup, weights):
    """The states of the episodes that have a weight, as the model sees them."""
    rows = np.flatnonzero(weights)
    return {tuple(state) for state in setup.policy_io.observation({}, setup.trajectories.states[rows], None).state}


def test_the_gap_is_between_as_many_batches_of_training_and_of_held_out_episodes(setup):
    told = iter([0.5, math.nan, 0.7, 0.9, 0.8, 1.0])  # three batches of each
    seen = []

    def validate(agent, batch, rng):
        seen.append({tuple(state) for state in np.asarray(batch.observations.state)})
        return {"critic/pair_auc": next(told), "critic/loss": 0.25}

    found = measure_losses(setup, validate, create_agent(setup))
    assert found == pytest.approx({"val/critic/pair_auc": 0.6, "val/critic/loss": 0.25, "gap/critic/pair_auc": 0.3})
    held_out, learned = states_of(setup, setup.held_out), states_of(setup, setup.weights)
    assert all(states <= held_out for states in seen[:3])
    assert all(states <= learned for states in seen[3:])
    assert len(seen) == 6


def test_where_no_gap_is_asked_for_training_episodes_are_left_alone(setup):
    calls = []

    def validate(*given):
        calls.append(given)
        return {"loss": 2.0}

    assert measure_losses(setup, validate, create_agent(setup)) == {"val/loss": 2.0}
    assert len(calls) == 3
