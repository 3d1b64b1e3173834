"""The curriculum: most is drawn where the policy is about to learn, nothing is given up, and a resumed run goes on."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import LocalPool
from pirl.envs.base import MAX_EVALUATION_SEED
from pirl.envs.groups import Context, Curriculum, CurriculumConfig
from pirl.envs.rollout import make_starts
from pirl.errors import CheckpointError, ConfigError

DESCRIPTION = dataclasses.replace(LocalPool(1).description, tasks=("left", "right", "up"))
PLAIN = CurriculumConfig(initial_states=4, memory=0.0)


def draw(curriculum: Curriculum, iteration: int, count: int) -> list[Context]:
    return list(itertools.islice(curriculum.contexts(iteration), count))


def first_draws(curriculum: Curriculum, iterations: int = 3000) -> Counter[Context]:
    return Counter(next(curriculum.contexts(iteration)) for iteration in range(iterations))


def with_rates(config: CurriculumConfig, rates: list[float]) -> tuple[Curriculum, list[Context]]:
    """A curriculum whose contexts, in the order of their seeds, have these running success rates."""
    curriculum = Curriculum(config, DESCRIPTION, 0)
    contexts = sorted(set(draw(curriculum, 0, 3 * (config.initial_states or 0))), key=lambda context: context.seed)
    for context, rate in zip(contexts, rates, strict=True):
        curriculum.record(context, rate)
    return curriculum, contexts


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
def test_contexts_near_the_target_are_drawn_most_and_the_others_rarely_but_do_get_drawn(target: float) -> None:
    rates = [number / 11 for number in range(12)]
    curriculum, contexts = with_rates(dataclasses.replace(PLAIN, success_rate_target=target), rates)
    counts = first_draws(curriculum)
    drawn = np.array([counts[context] for context in contexts])
    # Within three deviations of what is promised: 1 at the target, falling like a bell, never below the floor.
    share = 0.05 + 0.95 * np.exp(-16 * (np.array(rates) - target) ** 2)
    expected = 3000 * share / share.sum()
    assert np.all(np.abs(drawn - expected) < 3.5 * np.sqrt(expected))
    assert abs(rates[int(drawn.argmax())] - target) <= 1 / 11
    assert 0 < drawn.min() < drawn.max() / 5


def test_contexts_never_tried_count_as_being_at_the_target() -> None:
    curriculum, contexts = with_rates(PLAIN, [0.5] * 12)
    untouched = Curriculum(PLAIN, DESCRIPTION, 0)
    assert draw(curriculum, 3, 30) == draw(untouched, 3, 30)
    curriculum.record(contexts[0], 1.0)
    assert first_draws(curriculum)[contexts[0]] < first_draws(untouched)[contexts[0]] / 5


def test_the_running_rate_forgets() -> None:
    """By hand: 0.5, then 0.5·0.5 + 0.5·1, then 0.5·0.75 + 0.5·0, then nothing finished."""
    curriculum = Curriculum(CurriculumConfig(initial_states=1), DESCRIPTION, 0)
    context = next(curriculum.contexts(0))
    for rate, expected in ((1.0, 0.75), (0.0, 0.375), (None, 0.1875)):
        curriculum.record(context, rate)
        assert curriculum.summary()["success_rate"] == pytest.approx(expected)
    assert curriculum.summary()["tried"] == pytest.approx(1 / 3)


CONFIGS = st.builds(
    CurriculumConfig,
    initial_states=st.none() | st.integers(1, 6),
    success_rate_target=st.floats(0.05, 0.95),
    sharpness=st.floats(0, 1e6),
    floor=st.floats(1e-6, 1),
    memory=st.floats(0, 0.99),
)


@settings(max_examples=60)
@given(CONFIGS, st.integers(0, 10_000), st.integers(0, 1000), st.lists(st.floats(0, 1) | st.none(), max_size=40))
def test_draws_are_valid_do_not_repeat_and_survive_a_restart(
    config: CurriculumConfig, seed: int, iteration: int, rates: list[float | None]
) -> None:
    curriculum = Curriculum(config, DESCRIPTION, seed)
    for context, rate in zip(curriculum.contexts(iteration), rates, strict=False):
        curriculum.record(context, rate)
    restored = Curriculum(config, DESCRIPTION, seed)
    restored.restore(json.loads(json.dumps(curriculum.state())))
    count = 3 * (config.initial_states or 8)
    drawn = draw(curriculum, iteration + 1, 2 * count)
    assert drawn == draw(restored, iteration + 1, 2 * count) == draw(curriculum, iteration + 1, 2 * count)
    assert restored.summary() == curriculum.summary()
    assert {context.task for context in drawn} <= set(DESCRIPTION.tasks)
    assert all(0 <= context.seed < 2**31 for context in drawn)
    for part in (drawn[:count], drawn[count:]):
        assert len(set(part)) == count
    if config.initial_states is None:
        assert len(set(drawn)) == 2 * count
    else:
        assert set(drawn[:count]) == set(drawn[count:])
    assert all(0 <= value <= 1 for value in curriculum.summary().values())


def test_what_is_recorded_on_the_way_counts_from_the_next_iteration() -> None:
    curriculum = Curriculum(PLAIN, DESCRIPTION, 1)
    undisturbed = draw(curriculum, 5, 24)
    drawn = []
    for context in itertools.islice(curriculum.contexts(5), 24):
        drawn.append(context)
        curriculum.record(context, 0.0 if len(drawn) % 2 else 0.4)
    assert drawn == undisturbed
    assert draw(curriculum, 6, 24) != undisturbed


def test_iterations_and_seeds_draw_differently() -> None:
    curriculum, other = (Curriculum(CurriculumConfig(), DESCRIPTION, seed) for seed in (0, 1))
    assert not set(draw(curriculum, 0, 50)) & set(draw(curriculum, 1, 50))
    assert not set(draw(curriculum, 0, 50)) & set(draw(other, 0, 50))


def test_with_new_states_every_time_it_is_the_tasks_that_have_rates() -> None:
    curriculum = Curriculum(CurriculumConfig(memory=0.0), DESCRIPTION, 0)
    for context in draw(curriculum, 0, 60):
        curriculum.record(context, {"left": 0.5, "right": 0.0, "up": 1.0}[context.task])
    tasks = Counter(context.task for context in draw(curriculum, 1, 3000))
    assert tasks["left"] > 5 * max(tasks["right"], tasks["up"])
    assert min(tasks["right"], tasks["up"]) > 60
    assert curriculum.summary() == {"tried": 1.0, "success_rate": 0.5, "hopeless": 1 / 3, "solved": 1 / 3}


@pytest.mark.parametrize("initial_states", [None, 50])
def test_nothing_is_practised_that_evaluations_measure(initial_states: int | None) -> None:
    measured = {
        start.seed for seed in (*range(20), MAX_EVALUATION_SEED - 1) for start in make_starts(DESCRIPTION, 500, seed)
    }
    curriculum = Curriculum(CurriculumConfig(initial_states), DESCRIPTION, 3)
    assert not measured & {context.seed for context in draw(curriculum, 0, 150)}


def test_an_environment_that_takes_one_of_fifty_states_by_the_seed_goes_through_all_of_them() -> None:
    drawn = draw(Curriculum(CurriculumConfig(50), DESCRIPTION, 7), 0, 150)
    for task in DESCRIPTION.tasks:
        assert {context.seed % 50 for context in drawn if context.task == task} == set(range(50))


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_states": 0},
        {"success_rate_target": 1.0},
        {"success_rate_target": 0.0},
        {"sharpness": -1.0},
        {"sharpness": float("nan")},
        {"floor": 0.0},
        {"floor": 1.5},
        {"memory": 1.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"curriculum.{name} = {value}"):
        CurriculumConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [{}, {"left": {}, "right": {}}, {"left": 1, "right": {}, "up": {}}])
def test_a_state_of_other_tasks_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="damaged, or belongs to other tasks"):
        Curriculum(PLAIN, DESCRIPTION, 0).restore(state)


def test_a_damaged_rate_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not between 0 and 1"):
        Curriculum(PLAIN, DESCRIPTION, 0).restore({"left": {"0": 1.5}, "right": {}, "up": {}})
    with pytest.raises(ValueError, match="is no context"):
        Curriculum(PLAIN, DESCRIPTION, 0).record(Context("left", 4), 0.5)
