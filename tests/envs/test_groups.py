"""Groups of attempts: mixed ones are kept, uniform ones dropped; and a curriculum of contexts near the target."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import POINT, LocalPool, Point, StraightPolicy
from pirl.envs import EnvConfig, ExpertConfig, Start
from pirl.envs.base import MAX_EVALUATION_SEED
from pirl.envs.groups import Context, Curriculum, Group, GroupedRollouts, roll_out_groups
from pirl.envs.pool import ChunkResult, EnvPool, EpisodeFailed, Images, ResetResult, open_pool
from pirl.envs.registry import CurriculumConfig
from pirl.envs.rollout import Rollout, make_starts, roll_out
from pirl.envs.workers import ProcessPool
from pirl.errors import CheckpointError, ConfigError, EnvError

Ending = Literal["success", "failure", "lost", "never begun"]


@dataclass(frozen=True)
class Fate:
    """What is to become of one attempt, and in which step."""

    ending: Ending
    steps: int


class FatedPool(EnvPool):
    """Episodes that end as it was said beforehand, by the seed of a context and the number of the attempt."""

    def __init__(self, size: int, groups: int, fates: Sequence[Sequence[Fate]], begins_alike: bool = True) -> None:
        self.size, self.groups, self.fates, self.begins_alike = size, groups, fates, begins_alike
        self.description = Point().describe()
        self.begun: list[tuple[int, int]] = []
        self.busy: list[int] = []
        self._slots: dict[int, tuple[Start, int]] = {}
        self._queued: dict[int, Any] = {}

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        self.begun.append((start.seed, start.attempt))
        self._slots[slot] = start, 0
        self._queued[slot] = None

    def execute(self, slot: int, actions: np.ndarray | int, *, images: Images = "all") -> None:
        self._queued[slot] = actions

    def wait(self, slots: Sequence[int]) -> dict[int, ResetResult | ChunkResult | EpisodeFailed]:
        self.busy.append(len(self._queued))
        return {slot: self._answer(slot, self._queued.pop(slot)) for slot in slots}

    def _answer(self, slot: int, actions: Any) -> ResetResult | ChunkResult | EpisodeFailed:
        start, done = self._slots[slot]
        fate = self.fates[start.seed][start.attempt]
        if actions is None:
            if fate.ending == "never begun":
                return EpisodeFailed("it would not begin")
            return ResetResult(self._see(start), "go", start.task)
        taken = np.array(actions[: fate.steps - done])
        self._slots[slot] = start, done + len(taken)
        ended = done + len(taken) == fate.steps
        if ended and fate.ending == "lost":
            return EpisodeFailed("it broke")
        seen = [self._see(start)] * len(taken)
        return ChunkResult(
            {name: np.stack([one[name] for one in seen]) for name in seen[0]},
            taken,
            np.zeros(len(taken), np.float32),
            terminated=ended,
            truncated=False,
            success=ended and fate.ending == "success",
        )

    def _see(self, start: Start) -> dict[str, np.ndarray]:
        place = start.seed if self.begins_alike else start.seed + start.attempt
        return {"image": np.zeros((8, 8, 3), np.uint8), "state": np.full(2, place, np.float32)}


class Still:
    """Stays where it is, and counts."""

    horizon = 3

    def __init__(self) -> None:
        self.inferred = 0

    def infer(self, observations: Any, prompts: Any, seeds: Any, steps: Any) -> np.ndarray:
        self.inferred += 1
        return np.zeros((len(seeds), 3, 2), np.float32)


def numbered() -> Iterator[Context]:
    """Contexts whose seeds count them."""
    return (Context("left", number) for number in itertools.count())


def roll(pool: Any, policy: Any = None, contexts: Iterator[Context] | None = None, **options: Any) -> GroupedRollouts:
    settings = {"attempts": 2, "groups": 2, "budget": 4, "execute_steps": 3} | options
    return roll_out_groups(pool, policy or Still(), contexts or numbered(), **settings)


FATES = st.builds(Fate, st.sampled_from(["success", "failure", "lost", "never begun"]), st.integers(1, 7))


@settings(max_examples=150)
@given(
    size=st.integers(1, 7),
    parts=st.integers(1, 2),
    attempts=st.integers(2, 4),
    wanted=st.integers(1, 4),
    budget=st.integers(1, 9),
    left=st.none() | st.integers(0, 9),
    data=st.data(),
)
def test_whatever_becomes_of_the_attempts(
    size: int, parts: int, attempts: int, wanted: int, budget: int, left: int | None, data: st.DataObject
) -> None:
    fates = data.draw(st.lists(st.lists(FATES, min_size=attempts, max_size=attempts), min_size=budget, max_size=budget))
    fates[0][0] = Fate("success", 1)  # where nothing ever begins, that is an error of its own
    finished: list[Rollout] = []
    pool, contexts = FatedPool(size, parts, fates), itertools.islice(numbered(), left)
    options = {"attempts": attempts, "groups": wanted, "budget": budget, "on_rollout": finished.append}
    result = roll(pool, contexts=contexts, **options)

    ends = [[fate.ending for fate in row] for row in fates]
    available = min(budget, budget if left is None else left)
    # As if one context had been tried after the other, whatever the size of the pool.
    mixed = [seed for seed in range(available) if {"success", "failure"} <= set(ends[seed])]
    assert [group.context.seed for group in result.kept] == mixed[:wanted]
    assert result.tried == (mixed[wanted - 1] + 1 if len(mixed) >= wanted else available)
    tried = sorted(group.context.seed for group in result.kept + result.dropped)
    assert tried == list(range(result.tried))
    assert [group.context.seed for group in result.dropped] == [seed for seed in tried if seed not in mixed]
    assert all("image" in rollout.observations for group in result.kept for rollout in group.attempts)
    assert all(set(rollout.observations) == {"state"} for group in result.dropped for rollout in group.attempts)
    for group in result.kept + result.dropped:
        expected = ends[group.context.seed]
        assert [rollout.start.attempt for rollout in group.attempts] == [
            number for number, end in enumerate(expected) if end in ("success", "failure")
        ]
        assert [rollout.success for rollout in group.attempts] == [
            end == "success" for end in expected if end in ("success", "failure")
        ]
        assert len(group.lost) == attempts - len(group.attempts)
        assert all(rollout.lost is None for rollout in group.attempts)
    # Every attempt of what was tried is begun once, and nothing else is.
    assert sorted(pool.begun) == [(seed, attempt) for seed in tried for attempt in range(attempts)]
    every = [end for seed in tried for end in ends[seed]]
    assert (result.successes, result.attempts, len(result.lost)) == (
        every.count("success"),
        every.count("success") + every.count("failure"),
        every.count("lost") + every.count("never begun"),
    )
    assert len(finished) == result.attempts
    assert all("image" in rollout.observations and rollout.lost is None for rollout in finished)
    # Steps within a chunk that ended in a loss are not known to have been taken.
    steps = {"success": lambda n: n, "failure": lambda n: n, "lost": lambda n: 3 * ((n - 1) // 3)}
    taken = [steps[f.ending](f.steps) for seed in tried for f in fates[seed] if f.ending != "never begun"]
    assert result.env_steps == sum(taken)


def test_slots_are_busy_while_there_is_something_to_do_and_nothing_is_done_in_vain() -> None:
    mixed = [Fate("success", 6), Fate("failure", 6), Fate("success", 6), Fate("failure", 6)]
    pool = FatedPool(4, 1, [mixed] * 9)
    result = roll(pool, attempts=4, groups=3, budget=9)
    assert result.tried == 3
    assert set(pool.busy) == {4}
    # Uniform groups make room for others at once: no turn passes in which a slot waits for a context.
    uniform = [Fate("failure", 6)] * 4
    pool = FatedPool(4, 1, [uniform, uniform, mixed])
    assert roll(pool, attempts=4, groups=1, budget=9).tried == 3
    assert set(pool.busy) == {4}


def test_where_nothing_ever_begins_it_says_so_instead_of_losing_everything() -> None:
    pool = FatedPool(2, 2, [[Fate("never begun", 1)] * 3] * 1000)
    with pytest.raises(EnvError, match="first 9 episodes were lost before anything came of them: it would not begin"):
        roll(pool, attempts=3, groups=2, budget=1000)


def test_attempts_that_begin_in_different_states_are_not_compared() -> None:
    pool = FatedPool(2, 1, [[Fate("success", 2), Fate("failure", 2)]], begins_alike=False)
    with pytest.raises(EnvError, match=r"'left' from seed 0 began in different states \('state' was \[0"):
        roll(pool, budget=1)


@pytest.mark.parametrize("wrong", [{"attempts": 1}, {"groups": 0}, {"budget": 0}, {"attempts": 10**6}])
def test_what_cannot_be_done_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} = {next(iter(wrong.values()))}"):
        roll(FatedPool(1, 1, []), **wrong)


def test_starts_may_wait_for_what_came_of_others() -> None:
    """None lets slots idle; they ask again when more has been yielded, and None with nothing under way is the end."""
    pool = FatedPool(3, 2, [[Fate("success", 2)]] * 4)
    seen: list[int] = []

    def starts() -> Iterator[Start | None]:
        for seed in range(4):
            yield Start("left", seed)
            # One after the other, however many slots are free.
            while seed not in seen:
                yield None
        while True:
            yield None

    for rollout in roll_out(pool, Still(), starts(), execute_steps=3):
        assert rollout.index == rollout.start.seed == len(seen)
        seen.append(rollout.start.seed)
    assert seen == [0, 1, 2, 3]
    assert set(pool.busy) == {1}


# --- with environments -------------------------------------------------------------------------------------------------

WILD = StraightPolicy(noise=2.5)


def points(*first: int) -> Iterator[Context]:
    return (Context("left", seed) for seed in itertools.chain(first, itertools.count(50)))


def assert_same(one: Sequence[Group], other: Sequence[Group]) -> None:
    assert [group.context for group in one] == [group.context for group in other]
    for ours, theirs in zip(one, other, strict=True):
        assert len(ours.attempts) == len(theirs.attempts)
        for a, b in zip(ours.attempts, theirs.attempts, strict=True):
            assert (a.start, a.success, a.lost) == (b.start, b.success, b.lost)
            np.testing.assert_array_equal(a.actions, b.actions)
            for name in a.observations:
                np.testing.assert_array_equal(a.observations[name], b.observations[name])


def test_attempts_begin_alike_and_go_their_own_ways() -> None:
    with LocalPool(3) as pool:
        result = roll(pool, WILD, points(), attempts=4, groups=3, budget=20)
        plain = list(roll_out(pool, WILD, [Start("left", result.kept[0].context.seed)], execute_steps=3))
    assert len(result.kept) == 3
    for group in result.kept:
        first, *others = group.attempts
        for other in others:
            np.testing.assert_array_equal(other.observations["image"][0], first.observations["image"][0])
            np.testing.assert_array_equal(other.observations["state"][0], first.observations["state"][0])
            assert np.abs(other.actions[0] - first.actions[0]).max() > 1e-3
    # The first attempt is what an evaluation from the same start would see.
    np.testing.assert_array_equal(result.kept[0].attempts[0].actions, plain[0].actions)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with open_pool(EnvConfig(POINT), 3) as pool:
        assert isinstance(pool, ProcessPool)
        yield pool


def test_an_environment_that_breaks_hangs_or_says_nan_costs_its_attempts_and_no_more(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_timeout", 3.0)  # only here: elsewhere a busy machine should lose no attempt
    mishaps = {9004: "no answer within 3 s", 9007: "'state' holds nan", 9008: "reward is nan", 9001: "exit code 3"}
    result = roll(pool, WILD, points(49, *mishaps), attempts=2, groups=3, budget=20)
    assert len(result.kept) == 3
    broken = {group.context.seed: group for group in result.dropped if group.context.seed in mishaps}
    assert set(broken) == set(mishaps)
    for seed, group in broken.items():
        assert not group.attempts
        assert all(mishaps[seed] in reason for reason in group.lost)
        assert len(group.lost) == 2
    assert len(result.lost) == 8
    for group in result.kept + result.dropped:
        for rollout in group.attempts:
            assert rollout.lost is None
            assert all(np.isfinite(values).all() for values in rollout.observations.values())
            assert np.isfinite(rollout.rewards).all()
    # Whoever replaces the broken changes nothing for the others.
    clean = roll(pool, WILD, points(49), attempts=2, groups=3, budget=16)
    assert_same(result.kept, clean.kept)


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


def test_settings_that_make_no_sense_are_refused() -> None:
    wrong = {"initial_states": 0, "success_rate_target": 1.0, "sharpness": float("nan"), "floor": 0.0, "memory": 1.0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} = {value}"):
            CurriculumConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [{}, {"left": [], "right": []}, {"left": 1, "right": [], "up": []}])
def test_a_state_of_other_tasks_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="damaged, or belongs to other tasks"):
        Curriculum(PLAIN, DESCRIPTION, 0).restore(state)
