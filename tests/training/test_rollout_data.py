"""What RIPT's batches are made of: which chunks of which attempts, how often, and what each says of its worth."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.agents.config import RIPTConfig
from pirl.config import get_config
from pirl.data import ChunkShape, PolicyIO
from pirl.data.chunks import Trajectories
from pirl.data.robots import get_robot
from pirl.data.transforms import indicate
from pirl.models import Tokenizer
from pirl.training.rollout_data import Rows, arrange_batches, group_advantages, make_batch

ROBOT = get_robot("tabletop_state")
MODEL = dataclasses.replace(get_config("demo_ript").model, action_horizon=4, max_token_len=24)
SHAPE = ChunkShape(4, 4)
WEIGHTINGS = ("positive", "signed", "exp", "guidance")


@st.composite
def iterations(draw):
    """Groups of attempts with both outcomes, some of them lost: their lengths and outcomes."""
    attempts = draw(st.integers(2, 5))
    outcomes = st.lists(st.booleans(), min_size=2, max_size=attempts).filter(lambda group: len(set(group)) == 2)
    groups = draw(st.lists(outcomes, min_size=1, max_size=4))
    lengths = [draw(st.integers(1, 12)) for group in groups for _ in group]
    return attempts, groups, np.array(lengths)


def plan(config, made, *, size=8, execute_steps=3, seed=(0, 1, 2)):
    attempts, groups, lengths = made
    advantages = group_advantages(config, [[float(outcome) for outcome in group] for group in groups])
    sizes = [len(group) for group in groups]
    found = arrange_batches(
        config,
        lengths,
        advantages,
        sizes,
        batch_size=size,
        attempts=attempts,
        execute_steps=execute_steps,
        seed=seed,
    )
    return found, advantages


def rows_of(lengths, step):
    """The rows of every attempt at which a chunk begins."""
    starts = np.cumsum(lengths) - lengths
    return [list(range(start, start + length, step)) for start, length in zip(starts, lengths, strict=True)]


@given(
    iterations(),
    st.sampled_from(WEIGHTINGS),
    st.sampled_from(["all", "decisions"]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
)
@settings(max_examples=60)
def test_by_chunks_every_chunk_that_teaches_comes_once_in_every_epoch_and_no_other(
    made, weighting, chunks, size, execute_steps, epochs
):
    config = RIPTConfig(weighting=weighting, chunks=chunks, num_epochs=epochs)
    found, advantages = plan(config, made, size=size, execute_steps=execute_steps)
    step = execute_steps if chunks == "decisions" else 1
    wanted = sorted(
        row
        for rows, advantage in zip(rows_of(made[2], step), advantages, strict=True)
        for row in rows
        if advantage > 0 or weighting != "positive"
    )
    assert found.rows.shape == found.included.shape == (len(found.rows), size)
    assert len(found.rows) % epochs == 0
    per_epoch = len(found.rows) // epochs
    for epoch in range(epochs):
        part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert sorted(found.rows[part][found.included[part]].tolist()) == wanted
        assert np.count_nonzero(~found.included[part]) < size, "only the last batch of an epoch is filled up"
    assert found.rows.min() >= 0
    assert found.rows.max() < made[2].sum(), "what fills a batch can be cut too"


@given(iterations(), st.sampled_from(["all", "decisions"]), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60)
def test_by_groups_every_batch_has_all_attempts_of_its_groups_equally_often_but_for_the_lost(
    made, chunks, rounds_per_batch, execute_steps
):
    attempts, groups, lengths = made
    config = RIPTConfig(batch_by="groups", chunks=chunks, num_epochs=2)
    found, _ = plan(config, made, size=rounds_per_batch * attempts, execute_steps=execute_steps)
    group_of = np.repeat(range(len(groups)), [len(group) for group in groups])
    episode_of = np.repeat(range(len(lengths)), lengths)
    possible = {row for rows in rows_of(lengths, execute_steps if chunks == "decisions" else 1) for row in rows}
    seen = Counter()
    for rows, included in zip(found.rows, found.included, strict=True):
        used = rows[included]
        seen.update(used.tolist())
        episodes = Counter(episode_of[used].tolist())
        for group in {int(group_of[episode]) for episode in episodes}:
            counts = {episodes[member] for member in np.flatnonzero(group_of == group).tolist()}
            assert len(counts) == 1
            assert 0 not in counts
    assert set(seen) == possible, "every chunk comes"
    assert min(seen.values()) >= 2, "in every epoch"


def test_another_iteration_or_branch_has_another_order():
    made = (4, [[True, False, True, False]] * 3, np.full(12, 10))
    tables = [plan(RIPTConfig(), made, seed=seed)[0].rows.tolist() for seed in ((0, 1, 0), (0, 2, 0), (0, 1, 1))]
    assert tables[0] != tables[1]
    assert tables[0] != tables[2]


@given(iterations(), st.booleans())
@settings(max_examples=60)
def test_advantages_compare_attempts_within_their_own_group(made, normalise):
    _, groups, _ = made
    config = RIPTConfig(normalize_advantages=normalise)
    found = group_advantages(config, [[float(outcome) for outcome in group] for group in groups])
    assert found.dtype == np.float32
    expected = []
    for group in groups:
        for outcome in group:
            others = (sum(group) - outcome) / (len(group) - 1)
            expected.append(outcome - others)
    scale = np.sqrt(np.mean(np.square(expected))) if normalise else 1.0
    np.testing.assert_allclose(found, np.array(expected) / scale, rtol=1e-5, atol=1e-6)


# --- the batch --------------------------------------------------------------------------------------------------------


def attempts_of(lengths, prompts):
    """Episodes whose states and actions say which row they are from."""
    lengths = np.array(lengths)
    total, ends = lengths.sum(), np.cumsum(lengths)
    names = list(dict.fromkeys(prompts))
    return Trajectories(
        states=np.tile(np.arange(total, dtype=np.float32)[:, None], (1, 8)),
        actions=np.tile(np.arange(total, dtype=np.float32)[:, None], (1, 3)),
        rewards=np.zeros(total, np.float32),
        terminals=np.zeros(total, bool),
        starts=ends - lengths,
        ends=ends,
        success=np.zeros(len(lengths), np.int8),
        prompts=names,
        prompt_of_row=np.repeat([names.index(prompt) for prompt in prompts], lengths),
    )


@pytest.fixture(scope="module")
def policy_io():
    return PolicyIO(ROBOT, MODEL, None, Tokenizer.for_model(MODEL))


@pytest.mark.parametrize("weighting", ["signed", "guidance"])
def test_every_row_of_a_batch_has_the_advantage_and_the_prompt_of_its_own_episode(policy_io, weighting):
    prompts = ["put the red block down.", "open the drawer", "open the drawer"]
    data = attempts_of([3, 5, 4], prompts)
    advantages = np.array([1.5, -0.5, 0.25], np.float32)
    rows, included = np.array([11, 0, 3, 7, 8, 2]), np.array([True, True, True, False, True, True])
    batch = make_batch(RIPTConfig(weighting=weighting), Rows(data, rows), advantages, included, SHAPE, policy_io)
    episodes = [2, 0, 1, 1, 2, 0]
    assert batch.advantages.tolist() == advantages[episodes].tolist()
    assert batch.included.tolist() == included.tolist()
    assert batch.chunks.observations.state[:, 0].tolist() == rows.tolist()
    assert batch.demonstrations is None
    if weighting != "guidance":
        assert batch.prompts is None
        return
    tokenizer, (tokens, masks) = Tokenizer.for_model(MODEL), batch.prompts
    signs = [True, True, False, False, True, True]
    for row, (episode, good) in enumerate(zip(episodes, signs, strict=True)):
        wanted, real = tokenizer(f"{prompts[episode].removesuffix('.')}. Advantage: {'posi' if good else 'nega'}tive")
        assert tokens[row][masks[row]].tolist() == wanted[real].tolist()


def test_demonstrations_are_asked_for_as_good_ones(policy_io):
    data, shown = attempts_of([3, 5], ["open it", "close it"]), attempts_of([6], ["lift it"])
    rows = np.array([0, 4])
    batch = make_batch(
        RIPTConfig(weighting="guidance", bc_loss_weight=0.5),
        Rows(data, rows),
        np.array([-1.0, 1.0], np.float32),
        np.ones(2, bool),
        SHAPE,
        policy_io,
        Rows(shown, np.array([5, 1])),
    )
    assert batch.demonstrations.observations.state[:, 0].tolist() == [5, 1]
    positive = policy_io.prompt_tokens([indicate("lift it", True)] * 2, shown.states[:2])
    np.testing.assert_array_equal(batch.demonstration_prompts[0], positive[0])
    np.testing.assert_array_equal(batch.demonstration_prompts[1], positive[1])
