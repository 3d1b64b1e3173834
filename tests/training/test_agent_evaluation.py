"""The losses on held-out episodes, how far those on training episodes are from them, and policies in rollouts."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from pirl.agents.config import RIPTConfig
from pirl.agents.ript import RIPTAgent
from pirl.training import evaluation
from pirl.training.evaluation import measure_losses
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


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("weighting", "weight", "updates", "expected"),
    [("guidance", 1.0, 0, False), ("guidance", 1.0, 1, True), ("positive", 1.0, 9, False)],
)
def test_rollouts_are_guided_once_the_policy_has_learned_what_by(monkeypatch, weighting, weight, updates, expected):
    planned = []
    monkeypatch.setattr(evaluation, "ChunkPolicy", lambda act, policy_io, **options: planned.append(options["guided"]))
    config = RIPTConfig(weighting=weighting, rollout_guidance=weight)
    agent = RIPTAgent(step=np.int32(updates), actor=None, config=config, real_action_dim=1)
    evaluation.rollout_policy(agent, None, SimpleNamespace(size=2, groups=1))
    assert planned == [expected]
