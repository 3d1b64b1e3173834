"""What an update of ACRLPD moves, when, and what it cannot be disturbed by."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from learners import CRITIC, KEY, SPEECHLESS, H, LinearPolicy, acrlpd, linear_policies, make_batch, steady, update

from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.config import OptimizerConfig, TemperatureConfig
from pirl.data.chunks import ChunkBatch, ChunkShape, gather_chunks
from pirl.data.policy_io import PolicyIO
from trajectories import ROBOT, build

ADAPTIVE = TemperatureConfig(beta=0.3, max_weight=1.2, adaptive=True, target_ess=0.9)
METRICS = {
    *("loss", "critic/loss", "critic/q_mean", "critic/q_min", "critic/q_max", "critic/q_spread", "critic/td_error"),
    *("critic/target", "actor/loss", "actor/advantage_p10", "actor/advantage_p50", "actor/advantage_p90"),
    *("actor/ess", "actor/clip_fraction", "actor/temperature", "bc/loss", "grad_norm/policy"),
    *("grad_norm/critic", "param_norm/policy", "param_norm/critic", "lr/policy", "lr/critic", "data/valid_chunks"),
    *("actor/moves", "actor/chosen_value", "actor/data_chosen"),
    *("critic/sample_spread", "critic/state_spread", "actor/positive", "actor/threshold"),
}
OTHER_MODES = {
    *("actor/chosen_value", "actor/data_chosen", "critic/sample_spread"),
    *("actor/positive", "actor/threshold"),
}


@pytest.fixture(autouse=True, scope="module")
def _linear():
    with linear_policies():
        yield


def agent(**changes: Any) -> ACRLPDAgent:
    """All tests share one configuration where they can, and so one compilation."""
    fields = dict(bc_loss_weight=0.5, temperature=ADAPTIVE, policy_ema_decay=0.75, critic_ema_decay=0.5)
    return acrlpd(**(fields | {"target_update_rate": 0.25} | changes))


def same(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y, equal_nan=True) for x, y in leaves)


def test_an_update_moves_everything_as_it_should():
    begun, batch = agent(), make_batch()
    new, metrics = update(begun, batch, KEY)
    assert set(metrics) == METRICS
    assert {name for name, metric in metrics.items() if not np.isfinite(metric)} == OTHER_MODES
    assert new.step == 1
    averages = (
        (begun.critic.target_params, new.critic.target_params, new.critic.params, 0.75),
        (begun.critic.ema_params, new.critic.ema_params, new.critic.params, 0.5),
        (begun.actor.ema_params, new.actor.ema_params, new.actor.params, 0.75),
    )
    for before, after, latest, decay in averages:
        expected = jax.tree.map(lambda old, new, decay=decay: decay * old + (1 - decay) * new, before, latest)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), after, expected)
    critics = zip(*(jax.tree.leaves(learner.critic.params) for learner in (begun, new)), strict=True)
    assert not any(same(before, after) for before, after in critics)
    assert not any(same(begun.actor.params[name], new.actor.params[name]) for name in new.actor.params)
    # Fewer samples count than are wanted: weights become more even.
    assert metrics["actor/ess"] < 0.9
    assert new.log_beta > begun.log_beta
    np.testing.assert_allclose(metrics["loss"], begun.compute_loss(batch, KEY)[0], rtol=1e-5)
    norm = np.sqrt(sum(np.square(np.asarray(leaf)).sum() for leaf in jax.tree.leaves(new.critic.params)))
    np.testing.assert_allclose(metrics["param_norm/critic"], norm, rtol=1e-5)
    readout = 2 * 4 + (3 * 8 + 8) + (48 * 8 + 8) + (4 * 4 + 4)
    first, others = (2 * 4 + 3 + 4) * 8 + 8, 8 * 8 + 8 + 4 * 8 + 8 + 1
    assert begun.parameter_counts()["critic"] == 3 * (readout + first + others)


def test_a_batch_in_four_parts_gives_the_same_update():
    """Usable chunks, real steps and successes are spread unevenly; the one success has a single step."""
    # Adam would blow tiny gradients, and the rounding errors in them, up to the size of any other.
    settings = {"critic": dataclasses.replace(CRITIC, dropout=0.5), "critic_optimizer": steady(1e-2, eps=1e-2)}
    alone = dataclasses.replace(make_batch(), success=np.arange(8) == 4)
    assert alone.valid[4].sum() == 1
    assert len(set(alone.sequence_mask.reshape(4, 2).sum(axis=1).tolist())) > 1
    whole, metrics = update(agent(**settings), alone, KEY)
    cut, cut_metrics = update(agent(**settings, accumulation_steps=4), alone, KEY)
    for name in METRICS:
        np.testing.assert_allclose(cut_metrics[name], metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert metrics["bc/loss"] > 0.01
    for ours, theirs in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


def test_the_losses_on_the_data_are_computed_once(monkeypatch):
    """The actor's and the cloning loss weigh the same losses differently."""
    computed = []
    flow_errors = LinearPolicy.flow_errors

    def count(self, *arguments, **options):
        computed.append(None)
        return flow_errors(self, *arguments, **options)

    monkeypatch.setattr(LinearPolicy, "flow_errors", count)
    jax.eval_shape(lambda batch: agent().compute_loss(batch, KEY), make_batch())
    assert len(computed) == 1


def test_the_policy_rests_while_the_critics_warm_up_and_between_its_turns():
    rising = OptimizerConfig(peak_lr=0.04, schedule="constant", warmup_steps=3)
    turns = {"critic_warmup_steps": 2, "actor_every": 2, "actor_mode": "bc"}
    learner = agent(**turns, policy_optimizer=rising, critic_optimizer=rising)
    batch, moved, rates = make_batch(), [], []
    for step in range(6):
        new, metrics = update(learner, batch, jax.random.key(step))
        assert not same(new.critic.params, learner.critic.params)
        assert set(metrics) == METRICS
        resting = same(new.actor, learner.actor)
        moves = {"grad_norm/policy", "param_norm/policy", "lr/policy"}
        spreads = {"critic/sample_spread", "critic/state_spread"}
        actor = {name for name in METRICS if name.startswith(("actor/", "bc/"))} - {"actor/moves"} | moves
        actor |= spreads
        absent = {name for name in METRICS if np.isnan(metrics[name])}
        assert absent == (actor if resting else actor - moves - {"actor/loss", "bc/loss"})
        assert metrics["actor/moves"] == (not resting)
        moved.append(not resting)
        rates.append((metrics["lr/critic"], metrics["lr/policy"]))
        learner = new
    assert moved == [False, False, False, True, False, True]
    assert [learner.config.policy_updates(count) for count in range(7)] == [0, *np.cumsum(moved)]
    # Each optimizer counts its own updates.
    np.testing.assert_allclose(np.array(rates)[:, 0], [0.01, 0.02, 0.03, 0.04, 0.04, 0.04], rtol=1e-6)
    np.testing.assert_allclose(np.array(rates)[[3, 5], 1], [0.01, 0.02], rtol=1e-6)


@pytest.mark.parametrize("garbage", [50.0, np.nan])
def test_nothing_beyond_a_chunk_s_own_episode_is_learned_from(garbage):
    """Through the real data path: a success cut short, another episode between, a time-out, a failure."""
    io = PolicyIO(ROBOT, SPEECHLESS, None, None)
    clean = build([7, 4, 6, 3], ends=[5, 4, 5, 3], terminal=[True, False, False, True], seed=3)
    rows = np.arange(20)
    other = ((rows >= 5) & (rows < 11)) | (rows == 16)  # past the cuts, and the whole of the second episode
    dirty = dataclasses.replace(
        clean,
        states=np.where(other[:, None], np.float32(garbage), clean.states),
        actions=np.where(other[:, None], np.float32(garbage), clean.actions),
        rewards=np.where(other, np.float32(garbage), clean.rewards),
    )
    anchors = np.array([1, 3, 4, 11, 12, 15, 17, 19])
    clean_batch, dirty_batch = (gather_chunks(data, anchors, ChunkShape(H, 4), io) for data in (clean, dirty))
    assert clean_batch.next_terminal.any()
    assert not clean_batch.sequence_mask.all()
    a, b = (update(agent(), batch, KEY) for batch in (clean_batch, dirty_batch))
    assert same(a, b)
    # It would be noticed: with the other episode among the anchors it is (and NaN is refused at the door).
    anchors[0] = 7
    if not np.isnan(garbage):
        c, d = (update(agent(), gather_chunks(data, anchors, ChunkShape(H, 4), io), KEY) for data in (clean, dirty))
        assert not same(c, d)


def disturbed(batch: ChunkBatch, rows: np.ndarray, value: float) -> ChunkBatch:
    """Another observation after some of the chunks."""
    state = np.where(rows[:, None], np.float32(value), batch.next_observations.state)
    return dataclasses.replace(batch, next_observations=dataclasses.replace(batch.next_observations, state=state))


def test_no_value_comes_back_through_a_terminal():
    batch = make_batch()
    new = update(agent(), batch, KEY)
    for value in (50.0, np.nan):
        assert same(new, update(agent(), disturbed(batch, batch.next_terminal, value), KEY))
    assert not same(new, update(agent(), disturbed(batch, ~batch.next_terminal & batch.sequence_mask, 50.0), KEY))


def test_chunks_without_a_target_teach_the_critics_nothing():
    batch = make_batch()
    unusable = ~batch.sequence_mask
    other = dataclasses.replace(
        disturbed(batch, unusable, 50.0), rewards=np.where(unusable[:, None], np.float32(50), batch.rewards)
    )
    a, b = (update(agent(), x, KEY)[0] for x in (batch, other))
    assert same(a, b)
    # Nor do their own actions and states, though the actor learns from those.
    states = np.where(unusable[:, None], np.float32(2), batch.observations.state)
    other = dataclasses.replace(
        batch,
        actions=np.where(unusable[:, None, None], np.float32(2), batch.actions),
        observations=dataclasses.replace(batch.observations, state=states),
    )
    c, _ = update(agent(), other, KEY)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), c.critic.params, a.critic.params)
    assert not same(c.actor, a.actor)


def test_a_batch_with_no_usable_chunk_and_no_success_leaves_the_critics_as_they_are():
    nothing = np.zeros(8, bool)
    new, metrics = update(agent(), dataclasses.replace(make_batch(), sequence_mask=nothing, success=nothing), KEY)
    means = {"loss", "q_mean", "q_spread", "td_error", "target"}  # over nothing: no zero is to enter means of batches
    absent = {"bc/loss", *(f"critic/{name}" for name in means), *OTHER_MODES}
    assert {name for name in METRICS if np.isnan(metrics[name])} == absent
    assert metrics["data/valid_chunks"] == 0
    np.testing.assert_allclose(metrics["loss"], metrics["actor/loss"], rtol=1e-6)
    assert same(new.critic.params, agent().critic.params)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(new))


@pytest.mark.parametrize("scale", [1e6, -1e6])
def test_extreme_advantages_stay_finite(scale):
    begun = agent()
    critic = begun.critic.params | {"q/out/kernel": scale * begun.critic.params["q/out/kernel"]}
    new, metrics = update(
        dataclasses.replace(begun, critic=dataclasses.replace(begun.critic, params=critic, target_params=critic)),
        make_batch(),
        KEY,
    )
    assert max(abs(metrics["actor/advantage_p10"]), abs(metrics["actor/advantage_p90"])) > 1e5
    assert {name for name, metric in metrics.items() if not np.isfinite(metric)} == OTHER_MODES
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(new))


def test_the_step_encodes_each_observation_once():
    def encodings(compute: Any) -> int:
        LinearPolicy.encoded = 0
        jax.eval_shape(compute, agent(), make_batch(), KEY)
        return LinearPolicy.encoded

    assert encodings(lambda learner, batch, rng: jax.tree.leaves(learner.update(batch, rng))) == 2
    # Losses called by themselves each encode both.
    assert encodings(lambda learner, batch, rng: learner.compute_actor_loss(batch, rng)) == 2
    assert encodings(lambda learner, batch, rng: one_by_one(learner, batch, rng)) == 6


def one_by_one(learner: ACRLPDAgent, batch: ChunkBatch, rng: Any) -> Any:
    losses = (learner.compute_critic_loss, learner.compute_actor_loss, learner.compute_bc_loss)
    return sum(compute(batch, rng)[0] for compute in losses)
