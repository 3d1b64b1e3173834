"""What critics know of chunks, images and outcomes, against counts by hand and critics whose knowledge is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import CRITIC, KEY, MODEL, REAL, STEPS, WIDTH, H, LinearPolicy, acrlpd, linear_policies, make_batch

from critic_reference import q_logits
from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.diagnostics import compute_auc, outcome_auc, pair_chunks
from pirl.models import Observation
from pirl.models.critic import CriticEnsemble, critic_values
from pirl.models.pi0 import Prefix

CAMERA = "base_0_rgb"
SEEING = dataclasses.replace(MODEL, cameras=(CAMERA,))
ALL = {"valid": np.ones((8, STEPS), bool), "success": np.ones(8, bool)}


class Blind(LinearPolicy):
    """It has a camera, and looks at the state alone."""

    def __init__(self, *matrices):
        super().__init__(*matrices)
        self.config = SEEING


class Seeing(Blind):
    """What it sees is the brightness of the image, in units of its actions."""

    def encode(self, observation: Observation, rng=None) -> Prefix:
        brightness = 10 * observation.images[CAMERA].mean(axis=(1, 2, 3))
        return dataclasses.replace(super().encode(observation), features=jnp.tile(brightness[:, None], (1, 16)))


def batch_of(numbers: list[float], **changes):
    """Samples whose state, image and first action all tell their number."""
    values = np.asarray(numbers, np.float32)
    state = np.tile(values[:, None], (1, WIDTH))
    actions = np.tile(values[:, None, None], (1, STEPS, WIDTH))
    image = np.broadcast_to(values[:, None, None, None] / 10, (len(values), *MODEL.image_resolution, 3))
    images = {CAMERA: np.ascontiguousarray(image)} if changes.pop("images", False) else {}
    seen = Observation(images, {name: np.ones(len(values), bool) for name in images}, state)
    fields = {name: value[: len(values)] for name, value in ALL.items()}
    fields |= {"observations": seen, "next_observations": seen, "actions": actions}
    return make_batch(len(values), **(fields | changes))


def judge_by(monkeypatch, number_of):
    """Critics that value a chunk by how near its first action is to the number they read from the prefix."""

    def q_values(self, params, prefix, chunks):
        nearness = -jnp.abs(chunks[:, :, 0, 0] - number_of(prefix)[:, None])
        return jnp.stack([nearness] * self.config.num_critics)

    monkeypatch.setattr(CriticEnsemble, "q_values", q_values)


def knowledge(agent: ACRLPDAgent, batch):
    found = agent.validate(batch, KEY)
    return {name: float(value) for name, value in found.items() if name.endswith(("_auc", "_auc_shuffled"))}


def test_an_auc_counts_wins_and_half_of_the_ties():
    better, worse = jnp.array([3.0, 1.0, 2.0, 7.0]), jnp.array([1.0, 1.0, 5.0, 0.0])
    assert compute_auc(better, worse, jnp.array([True, True, True, False])) == 0.5
    assert compute_auc(better, worse, jnp.array([True, True, False, True])) == pytest.approx(2.5 / 3)
    assert np.isnan(compute_auc(better, worse, jnp.zeros(4, bool)))


def test_outcomes_are_compared_in_all_pairs_of_a_success_and_a_failure():
    values, success = jnp.array([0.1, 0.4, 0.4, 0.8]), jnp.array([False, True, False, True])
    assert outcome_auc(values, success) == 3.5 / 4  # .4 against .1 and .4, .8 against both
    assert outcome_auc(-values, success) == 0.5 / 4
    assert np.isnan(outcome_auc(values, jnp.ones(4, bool)))
    assert np.isnan(outcome_auc(values, jnp.zeros(4, bool)))


def test_a_chunk_is_compared_with_those_of_other_samples_only():
    chunks, counted = pair_chunks(batch_of(range(20), valid=np.ones((20, STEPS), bool), success=np.arange(20) < 5), H)
    numbers = np.asarray(chunks)[:, :, 0, 0].astype(int)
    np.testing.assert_array_equal(numbers[:, 0], range(20))
    for number, others in enumerate(numbers[:, 1:]):
        assert len(set(others)) == 8
        assert not {number, (number + 1) % 20} & set(others), "neither its own nor that of the images shown instead"
    np.testing.assert_array_equal(counted, np.tile(np.arange(20)[:, None] < 5, (1, 8)))


def test_chunks_that_the_end_cuts_short_are_not_compared():
    valid = np.arange(STEPS) < np.array([4, H, H - 1, 4, 4])[:, None]
    _, counted = pair_chunks(batch_of(range(5), valid=valid, success=np.ones(5, bool)), H)
    others = (np.arange(5)[:, None] - np.arange(1, 4)) % 5
    np.testing.assert_array_equal(counted, (np.arange(5)[:, None] != 2) & (others != 2))


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(range(8), success=np.zeros(8, bool)),
        batch_of(range(8), valid=np.zeros((8, STEPS), bool)),
        batch_of([1.0]),
    ],
)
def test_without_a_pair_nothing_is_claimed(batch):
    with linear_policies():
        assert np.isnan(knowledge(acrlpd(), batch)["critic/pair_auc"])


def test_critics_that_know_the_chunk_score_one_and_constant_ones_a_half(monkeypatch):
    with linear_policies():
        agent, batch = acrlpd(), batch_of(range(8), success=np.arange(8) % 2 == 0)
        constant = dataclasses.replace(agent.critic, ema_params=jax.tree.map(jnp.zeros_like, agent.critic.ema_params))
        found = knowledge(dataclasses.replace(agent, critic=constant), batch)
        assert found == {"critic/pair_auc": 0.5, "critic/outcome_auc": 0.5}, "no camera, no images to shuffle"
        judge_by(monkeypatch, lambda prefix: prefix.state[:, 0])
        assert knowledge(agent, batch)["critic/pair_auc"] == 1.0
        judge_by(monkeypatch, lambda prefix: -100 * jnp.sign(prefix.state[:, 0] - 3.5))  # the farthest
        assert knowledge(agent, batch)["critic/pair_auc"] < 0.5


def test_the_critics_that_act_are_asked_as_they_act():
    with linear_policies():
        agent, batch = acrlpd(aggregate="lower_bound"), make_batch(seed=2, valid=ALL["valid"])
        prefix = agent.policy().encode(batch.observations)

        def expected(params):
            every = np.broadcast_to(batch.actions[None, :, :H, :REAL], (8, 8, H, REAL))  # all chunks at all states
            q = np.asarray(critic_values(CRITIC, q_logits(params, CRITIC, prefix, every)), np.float64)
            values = q.mean(axis=0) - agent.config.pessimism * q.std(axis=0)
            wins = [values[i, i] > values[i, (i - k) % 8] for i in np.flatnonzero(batch.success) for k in range(1, 7)]
            of_success, of_failure = (np.diag(values)[batch.success == outcome] for outcome in (True, False))
            outcomes = of_success[:, None] > of_failure
            return {"critic/pair_auc": np.mean(wins), "critic/outcome_auc": np.mean(outcomes)}

        found = knowledge(agent, batch)
        assert found == pytest.approx(expected(agent.critic.ema_params))
        for other in (agent.critic.params, agent.critic.target_params):
            assert expected(other) != pytest.approx(found)


def test_shuffled_images_are_nothing_to_the_blind_and_mislead_those_who_see(monkeypatch):
    numbers = [3.1, -4.0, 1.3, 0.2, 4.7, -2.6, -1.1, 2.4]  # no two equally far from a third
    batch = batch_of(numbers, images=True)
    for kind, number_of in ((Blind, lambda prefix: prefix.state[:, 0]), (Seeing, lambda prefix: prefix.features[:, 0])):
        with linear_policies(kind):
            agent = acrlpd(policy=kind)
            random = knowledge(agent, batch)
            if kind is Blind:
                assert random["critic/pair_auc"] == random["critic/pair_auc_shuffled"]
            judge_by(monkeypatch, number_of)
            found = knowledge(agent, batch)
            monkeypatch.undo()
        shown = np.roll(numbers, -1 if kind is Seeing else 0)
        misled = [
            np.sign(abs(numbers[(i - k) % 8] - shown[i]) - abs(numbers[i] - shown[i])) / 2 + 0.5
            for i in range(8)
            for k in range(1, 7)
        ]
        assert found["critic/pair_auc"] == 1.0
        assert found["critic/pair_auc_shuffled"] == pytest.approx(np.mean(misled))
        assert (np.mean(misled) == 1.0) == (kind is Blind)


@pytest.mark.parametrize("mode", ["awr", "distill"])
def test_validation_tells_the_spread_over_samples_and_over_states(mode):
    with linear_policies():
        metrics = acrlpd(actor_mode=mode).validate(make_batch(), KEY)
    assert min(metrics["critic/sample_spread"], metrics["critic/state_spread"]) > 0
