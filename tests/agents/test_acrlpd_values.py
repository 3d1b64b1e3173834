"""Problems whose answers are known: a corridor, a ring solved by a table, and a bandit."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from learners import MODEL, REAL, SPEECHLESS, STEPS, WIDTH, H, LinearPolicy, linear_policies, linear_policy, steady

from builders import random_parameters
from pirl.agents import common
from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.config import ACRLPDConfig, TemperatureConfig
from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, gather_chunks
from pirl.data.policy_io import PolicyIO
from pirl.models import Observation, Pi0, set_parameters
from pirl.models.config import CriticConfig
from trajectories import ROBOT

DISCOUNT = 0.9
PLACES = 5
# What the policy proposes, left or right in the first dimension. (Right, left) is in the data only: beside the end of
# the corridor it cannot be, and what cannot be has no value to learn.
MOVES = np.array([(-1, -1), (-1, 1), (1, 1)])
CHUNKS = np.zeros((len(MOVES), STEPS, WIDTH), np.float32)
CHUNKS[:, :H, 0] = MOVES
STATES = np.random.default_rng(4).normal(size=(PLACES, 3)).astype(np.float32)


class Proposer(LinearPolicy):
    """A policy that always proposes the same chunks, so that the best of N is the best of all."""

    proposals = CHUNKS

    def sample(self, prefix: Any, **options: Any) -> Any:
        return jnp.broadcast_to(self.proposals, (prefix.mask.shape[0], *self.proposals.shape))


class LeftProposer(Proposer):
    """It never proposes the chunks that reach the end."""

    proposals = CHUNKS[:1]


class PromptedProposer(Pi0):
    """π₀'s own transformer, of which critics read the keys and values, and the same proposals."""

    sample = Proposer.sample
    proposals = CHUNKS


@jax.jit
def learn(agent: ACRLPDAgent, batch: ChunkBatch, rngs: Any) -> ACRLPDAgent:
    return jax.lax.scan(lambda agent, rng: (agent.update(batch, rng)[0], None), agent, rngs)[0]


def wander(step: Any, rows: int = 160, seed: int = 0) -> Trajectories:
    """Episodes of at most six random moves; `step` gives the next place, the reward, and whether that was the end."""
    random = np.random.default_rng(seed)
    places, moves, rewards, terminals, ends = [], [], [], [], []
    while len(places) < rows:
        place, last = int(random.integers(PLACES)), min(len(places) + 6, rows)
        while True:
            move = int(random.choice([-1, 1]))
            places.append(place)
            place, reward, done = step(place, move)
            moves.append(move)
            rewards.append(reward)
            terminals.append(done)
            if done or len(places) == last:
                break
        ends.append(len(places))
    actions = np.stack([np.array(moves), np.zeros(rows)], axis=1).astype(np.float32)
    return Trajectories(
        states=STATES[places],
        actions=actions,
        rewards=np.array(rewards, np.float32),
        terminals=np.array(terminals),
        starts=np.array([0, *ends[:-1]]),
        ends=np.array(ends),
        success=np.zeros(len(ends), np.int8),
        prompts=[""],
        prompt_of_row=np.zeros(rows, np.int64),
    )


def places_of(data: Trajectories) -> list[int]:
    place_of = {state.tobytes(): place for place, state in enumerate(STATES)}
    return [place_of[state.tobytes()] for state in data.states]


def returns_of(data: Trajectories) -> np.ndarray:
    """Discounted rewards until the end of each row's episode; −∞ where that was a time-out."""
    returns = np.full(len(data.rewards), -np.inf, np.float32)
    for start, end in zip(data.starts, data.ends, strict=True):
        if data.terminals[end - 1]:
            for t in range(start, end):
                returns[t] = sum(DISCOUNT ** (k - t) * data.rewards[k] for k in range(t, end))
    return returns


def fitted_values(data: Trajectories, proposals: int = len(MOVES), bound: np.ndarray | None = None) -> np.ndarray:
    """Q-iteration on a table over (place, chunk), as in the paper, from the same rows. [places, chunks]"""
    places, samples = places_of(data), []
    bound = np.full(len(data.rewards), -np.inf) if bound is None else bound
    for start, end in zip(data.starts, data.ends, strict=True):
        for t in range(start, end):
            length = min(H, end - t)
            ended = bool(data.terminals[t + length - 1])
            if not ended and t + H >= end:
                continue
            reward = sum(DISCOUNT**k * data.rewards[t + k] for k in range(length))
            moves = [int(data.actions[min(t + k, end - 1), 0]) for k in range(H)]
            if moves not in MOVES.tolist():
                continue
            samples.append((places[t], MOVES.tolist().index(moves), reward, None if ended else places[t + H], bound[t]))
    table = np.zeros((PLACES, len(MOVES)))
    for _ in range(200):
        targets: dict[tuple[int, int], list[float]] = {}
        for place, chunk, reward, later, least in samples:
            value = reward + (0 if later is None else DISCOUNT**H * table[later, :proposals].max())
            targets.setdefault((place, chunk), []).append(max(value, least))
        for key, values in targets.items():
            table[key] = np.mean(values)
    assert len(targets) == table.size
    return table


CONFIG = ACRLPDConfig(
    horizon_length=H,
    discount=DISCOUNT,
    num_action_samples=len(CHUNKS),
    actor_mode="bc",
    critic=CriticConfig(num_critics=2, hidden_dims=(32, 32)),
    critic_optimizer=steady(3e-3, b2=0.999, clip_norm=10.0),
    target_update_rate=0.05,
    critic_ema_decay=0.9,
    augment=False,
)


def batch_of(data: Trajectories) -> ChunkBatch:
    """A sample from every row, which also tells the returns."""
    rows, io = np.arange(len(data.rewards)), PolicyIO(ROBOT, SPEECHLESS, None, None)
    return gather_chunks(data, rows, ChunkShape(H, STEPS, discount=DISCOUNT), io)


def learned_values(data: Trajectories, policy: type[Proposer] = Proposer, mc_lower_bound: bool = False) -> np.ndarray:
    """The critics' values of every chunk in every place, after learning from the same rows. [places, chunks]"""
    samples = len(policy.proposals)  # also tells compiled functions of different policies apart
    config = dataclasses.replace(CONFIG, num_action_samples=samples, mc_lower_bound=mc_lower_bound)
    with linear_policies(policy):
        agent = ACRLPDAgent.create(config, linear_policy(kind=policy), jax.random.key(0), real_action_dim=REAL)
        agent = learn(agent, batch_of(data), jax.random.split(jax.random.key(1), 1500))
        seen = Observation({}, {}, np.repeat(STATES[:PLACES], len(CHUNKS), axis=0))
        return np.asarray(agent.value(seen, np.tile(CHUNKS, (PLACES, 1, 1)))).mean(axis=0).reshape(PLACES, -1)


def corridor(place: int, move: int) -> tuple[int, float, bool]:
    """Places 0 … 5 in a row; the last one ends it with reward 1."""
    place = max(0, place + move)
    return place, float(place == PLACES), place == PLACES


def corridor_values() -> np.ndarray:
    """In closed form: 0.9 for every step but the last on the way that the chunk leaves open. [places, chunks]"""
    expected = np.zeros((PLACES, len(MOVES)))
    for place, (number, chunk) in itertools.product(range(PLACES), enumerate(MOVES)):
        now, steps = place, 0
        for move in chunk:
            if now < PLACES:
                now, steps = max(0, now + move), steps + 1
        expected[place, number] = DISCOUNT ** (steps + PLACES - now - 1)
    return expected


def test_critics_find_the_values_of_chunks_in_a_corridor():
    data, expected = wander(corridor), corridor_values()
    np.testing.assert_allclose(fitted_values(data), expected, atol=1e-6)
    np.testing.assert_allclose(learned_values(data), expected, atol=0.03)


def test_returns_of_worse_behavior_do_not_change_the_values_of_the_best():
    """Random walks reach the end late: their returns lie below the optimum, where the targets already are."""
    data = wander(corridor)
    assert np.isfinite(returns_of(data)).any()
    np.testing.assert_allclose(learned_values(data, mc_lower_bound=True), corridor_values(), atol=0.03)


def test_returns_raise_values_that_the_policy_alone_would_not_reach_and_no_further():
    """Of a policy that only goes left, critics expect nothing; the data shows what can be reached."""
    data = wander(corridor)
    bound = returns_of(data)
    without, raised = fitted_values(data, proposals=1), fitted_values(data, proposals=1, bound=bound)
    assert np.all(raised <= corridor_values() + 1e-6)
    assert np.max(raised - without) > 0.3
    np.testing.assert_allclose(learned_values(data, LeftProposer, mc_lower_bound=True), raised, atol=0.05)


def test_critics_read_where_they_are_from_the_transformer_s_keys_and_values():
    """The corridor again, with the place in the prompt only: the state is zero everywhere."""
    data = wander(corridor)
    places, batch = np.array(places_of(data)), batch_of(data)
    place_of = {state.tobytes(): place for place, state in enumerate(STATES)}
    later = np.array([place_of[state.tobytes()] for state in np.asarray(batch.next_observations.state)])

    def prompted(at: np.ndarray) -> Observation:
        tokens = np.stack([at + 1, np.full_like(at, 20)], axis=1).astype(np.int32)
        return Observation({}, {}, np.zeros((len(at), WIDTH), np.float32), tokens, np.ones_like(tokens, bool))

    batch = dataclasses.replace(batch, observations=prompted(places), next_observations=prompted(later))
    policy = set_parameters(nnx.eval_shape(lambda: PromptedProposer(MODEL, nnx.Rngs(0))), random_parameters(MODEL))

    @jax.jit
    def learn_critics(agent: ACRLPDAgent, batch: ChunkBatch) -> Any:
        """The policy stands still, so that its prefix is encoded once."""
        enc = agent.encode(batch, jax.random.key(1))

        def step(critic: Any, _: None) -> Any:
            learner = dataclasses.replace(agent, critic=critic)
            grads = jax.grad(lambda params: learner.critic_loss(enc, params)[0])(critic.params)
            return critic.apply_gradients(grads)[0], None

        return jax.lax.scan(step, agent.critic, length=1500)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "_abstract_policy", lambda config: nnx.eval_shape(lambda: policy))
        agent = ACRLPDAgent.create(CONFIG, policy, jax.random.key(0), real_action_dim=REAL)
        agent = dataclasses.replace(agent, critic=learn_critics(agent, batch))
        seen = prompted(np.repeat(np.arange(PLACES), len(CHUNKS)))
        values = np.asarray(agent.value(seen, np.tile(CHUNKS, (PLACES, 1, 1)))).mean(axis=0).reshape(PLACES, -1)
    np.testing.assert_allclose(values, corridor_values(), atol=0.05)


def test_critics_choose_as_a_table_does():
    """A ring with uneven tolls and no end: only time-outs, which are no zeros."""
    tolls = np.random.default_rng(11).normal(size=(PLACES, 2)) / 4

    def ring(place: int, move: int) -> tuple[int, float, bool]:
        return (place + move) % PLACES, float(tolls[place, (move + 1) // 2]), False

    data = wander(ring, seed=1)
    table, ours = fitted_values(data), learned_values(data)
    best, second = np.sort(table, axis=1)[:, ::-1][:, :2].T
    assert np.all(best - second > 0.05)
    assert len(set(table.argmax(axis=1).tolist())) > 1
    np.testing.assert_array_equal(ours.argmax(axis=1), table.argmax(axis=1))
    np.testing.assert_allclose(ours, table, atol=0.1)


@pytest.mark.parametrize("mode", ["awr", "distill"])
def test_the_policy_moves_to_the_better_arm(mode):
    """One step, two arms alike in the data; the right one is worth 1, the left one nothing."""
    count = 32
    arms = np.resize([1.0, -1.0], count).astype(np.float32)
    actions = np.zeros((count, STEPS, WIDTH), np.float32)
    actions[..., 0] = arms[:, None]
    here, true, false = (
        Observation({}, {}, np.ones((count, WIDTH), np.float32)),
        np.ones(count, bool),
        np.zeros(count, bool),
    )
    rewards = np.stack([arms > 0, false], axis=1).astype(np.float32)
    ended = np.tile([True, False], (count, 1))
    batch = ChunkBatch(
        here, actions, np.ones((count, STEPS), bool), rewards, ended, ~ended & False, here, true, true, false
    )
    config = ACRLPDConfig(
        horizon_length=H,
        num_action_samples=4,
        denoising_steps=4,
        actor_mode=mode,
        critic=CriticConfig(num_critics=2, hidden_dims=(16,)),
        temperature=TemperatureConfig(beta=0.2),
        policy_optimizer=steady(1e-2),
        critic_optimizer=steady(1e-2),
        policy_ema_decay=None,
        critic_ema_decay=0.0,
        augment=False,
    )
    start = linear_policy()
    start.plan.set_value(jnp.zeros_like(start.plan.get_value()))

    def right(agent: ACRLPDAgent) -> float:
        policy = agent.policy()
        chunks = policy.sample(policy.encode(here), jax.random.key(3), n=8, num_steps=4)
        return float(np.mean(np.asarray(chunks)[..., 0] > 0))

    with linear_policies():
        agent = ACRLPDAgent.create(config, start, jax.random.key(0), real_action_dim=REAL)
        learned = learn(agent, batch, jax.random.split(jax.random.key(1), 500))
        values = np.asarray(learned.value(here, actions))
        assert 0.4 < right(agent) < 0.6
        assert right(learned) > 0.95
    np.testing.assert_allclose(values[:, arms > 0], 1, atol=0.05)
    np.testing.assert_allclose(values[:, arms < 0], 0, atol=0.05)
