import json
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.config.schema import HealthConfig, StoppingConfig
from pirl.errors import TrainingError
from pirl.run_files import RunFiles
from pirl.training.health import MAX_RECORDED, Diverged, EarlyStopping, RolloutMonitor, StopSignal, UpdateGuard, guarded

Agent = dict[str, Any]


def new_agent() -> Agent:
    return {
        "weights": jnp.linspace(-1, 1, 512, dtype=jnp.float32).reshape(16, 32),
        "average": jnp.full((16, 32), 0.25, jnp.bfloat16),
        "odd": jnp.array([math.nan, -0.0, math.inf]),
        "step": jnp.int32(41),
        "key": jax.random.key(3),
    }


def update(agent: Agent, batch: dict[str, jax.Array], rng: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
    """Changes every leaf, whatever the batch; the batch says what the metrics are."""
    gradient = agent["weights"] * batch["loss"]
    changed = {
        "weights": agent["weights"] - 0.1 * gradient,
        "average": agent["average"] + gradient.astype(jnp.bfloat16),
        "odd": agent["odd"][::-1],
        "step": agent["step"] + 1,
        "key": jax.random.split(agent["key"])[0],
    }
    return changed, {"loss": batch["loss"], "grad_norm/policy": batch["norm"], "critic/q_mean": jnp.float32(math.nan)}


def batch_of(loss: float, norm: float = 1.0) -> dict[str, jax.Array]:
    return {"loss": jnp.float32(loss), "norm": jnp.float32(norm)}


def bits(agent: Agent) -> dict[str, bytes]:
    plain = {**agent, "key": jax.random.key_data(agent["key"])}
    return {name: np.asarray(leaf).tobytes() for name, leaf in plain.items()}


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (-101.0, 1.0), (1.0, math.inf)],
)
def test_a_bad_update_leaves_every_bit_of_the_learner_as_it_was(loss: float, norm: float) -> None:
    step = jax.jit(guarded(update, loss_limit=100.0))
    kept, metrics = step(new_agent(), batch_of(loss, norm), jax.random.key(0))
    assert bits(kept) == bits(new_agent())
    assert metrics["skipped"] == 1.0
    np.testing.assert_equal(float(metrics["loss"]), loss)  # what was attempted stays visible


def test_within_a_scan_each_update_is_guarded_by_itself() -> None:
    losses = [0.5, math.nan, 0.25, math.inf, 0.125]
    step = guarded(update)
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(batch_of, losses))

    @jax.jit
    def scanned(agent: Agent, batches: Any) -> tuple[Agent, Any]:
        return jax.lax.scan(lambda agent, batch: step(agent, batch, jax.random.key(0)), agent, batches)

    found, metrics = scanned(new_agent(), batches)
    expected = new_agent()
    for loss in (0.5, 0.25, 0.125):
        expected, _ = jax.jit(update)(expected, batch_of(loss), jax.random.key(0))
    assert bits(found) == bits(expected)
    assert metrics["skipped"].tolist() == [0, 1, 0, 1, 0]


def test_the_guard_works_in_the_memory_of_a_donated_learner() -> None:
    plain = jax.jit(update, donate_argnums=0)
    step = jax.jit(guarded(update), donate_argnums=0)
    arguments = (new_agent(), batch_of(1.0), jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[0]))
    memory, before = (compiled.lower(*arguments).compile().memory_analysis() for compiled in (step, plain))
    assert memory.alias_size_in_bytes == before.alias_size_in_bytes >= size - 64
    assert memory.temp_size_in_bytes - before.temp_size_in_bytes < size / 4, "no second copy of the learner is held"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of donated buffers that it could not use
        agent, metrics = step(*arguments)
        agent, metrics = step(agent, batch_of(math.nan), jax.random.key(0))
    assert metrics["skipped"] == 1.0
    assert agent["step"] == 42


def outcome(loss: float, skipped: bool = False) -> dict[str, jax.Array]:
    return {"loss": jnp.float32(loss), "grad_norm/critic": jnp.float32(1.0), "skipped": jnp.float32(skipped)}


def health_of(run: Path, max_skipped: int = 3) -> UpdateGuard:
    return UpdateGuard(HealthConfig(max_skipped=max_skipped, loss_limit=1e6), RunFiles(run))


BATCH = {
    "observation": {"state": np.array([[1.0, math.nan], [2.0, -3.0]], np.float32)},
    "done": np.array([True, False]),
}


def test_a_bad_batch_is_kept_under_names_that_say_what_it_holds(tmp_path: Path) -> None:
    health = health_of(tmp_path)
    health.check(1, outcome(0.5), BATCH)
    health.check(2, outcome(math.nan, skipped=True), {**BATCH, "half": jnp.array([0.5, 1.5], jnp.bfloat16)})
    health.finish()
    stored = np.load(tmp_path / "bad_batches" / "00000002.npz")
    np.testing.assert_array_equal(stored["observation/state"], BATCH["observation"]["state"])
    np.testing.assert_array_equal(stored["half"], [0.5, 1.5])
    about = json.loads((tmp_path / "bad_batches" / "00000002.json").read_text())
    assert about["reason"] == "loss is nan"
    assert about["metrics"]["grad_norm/critic"] == 1.0
    assert about["leaves"]["observation/state"] == {
        "shape": [2, 2],
        "dtype": "float32",
        "not_finite": 1,
        "range": [-3.0, 2.0],
    }
    assert len(list((tmp_path / "bad_batches").iterdir())) == 2
    assert health.state() == {"skipped": 1, "in_a_row": 1, "beyond": 0}
    # Updates that were compiled into one are judged one by one.
    metrics = {"loss": jnp.array([1.0, jnp.inf, 1.0]), "skipped": jnp.array([0.0, 1.0, 0.0])}
    health.check(30, metrics, {"state": np.arange(6).reshape(3, 2)})
    assert health.state() == {"skipped": 2, "in_a_row": 0, "beyond": 0}
    np.testing.assert_array_equal(np.load(tmp_path / "bad_batches" / "00000029.npz")["state"], [2, 3])


def test_the_run_stops_after_so_many_in_a_row_and_says_where_everything_is(tmp_path: Path) -> None:
    checkpoints = RunFiles(tmp_path).checkpoints
    for name in ("900/train_state", "1000/train_state", "1050", ".1100.partial"):
        (checkpoints / name).mkdir(parents=True)
    health = health_of(tmp_path, max_skipped=3)
    for step, skipped in enumerate([1, 1, 0, 1, 1, 0], start=1001):
        health.check(step, outcome(2e6, skipped=bool(skipped)), BATCH)
    health.finish()
    assert health.skipped == 4
    health.check(1007, outcome(2e6, skipped=True), BATCH)
    health.check(1008, outcome(2e6, skipped=True), BATCH)
    health.check(1009, outcome(2e6, skipped=True), BATCH)
    with pytest.raises(TrainingError) as stopped:
        health.check(1010, outcome(0.5), BATCH)
    message = str(stopped.value)
    for part in ("step 1009", "3 updates in a row", "loss_limit = 1e+06", str(tmp_path / "bad_batches")):
        assert part in message
    assert str(checkpoints / "1000") in message
    assert stopped.value.exit_code == 1


def test_a_policy_that_did_not_move_is_no_reason(tmp_path: Path) -> None:
    resting = {
        "loss": jnp.float32(math.nan),
        "grad_norm/policy": jnp.float32(math.nan),
        "actor/moves": jnp.float32(0.0),
    }
    health = health_of(tmp_path)
    for step, moves in ((1, 0.0), (2, 1.0)):
        health.check(step, resting | {"actor/moves": jnp.float32(moves), "skipped": jnp.float32(1.0)}, BATCH)
    health.finish()
    reasons = [json.loads(file.read_text())["reason"] for file in sorted((tmp_path / "bad_batches").glob("*.json"))]
    assert reasons == ["loss is nan", "loss is nan, grad_norm/policy is nan"]


def test_the_counts_go_on_after_a_resume_and_only_the_first_batches_are_kept(tmp_path: Path) -> None:
    state = None
    for first in (0, 7):
        health = health_of(tmp_path, max_skipped=MAX_RECORDED + 4)
        if state is not None:
            health.load_state(json.loads(json.dumps(state)))
        for step in range(first, first + 7):
            health.check(step, outcome(math.nan, skipped=True), BATCH)
        if first:
            with pytest.raises(TrainingError, match="No state was saved"):
                health.finish()
        else:
            state = health.state()
    assert state["skipped"] == 7
    assert len(list((tmp_path / "bad_batches").glob("*.npz"))) == MAX_RECORDED


RETURNS = (-1.0, 3.0)  # so that a margin of a quarter allows -2 to 4


def watch_values(run: Path, values: Any, excess: float = 0.25, returns: Any = RETURNS) -> UpdateGuard:
    """What has become of updates with these means of Q, in a run that is resumed halfway."""
    health = UpdateGuard(HealthConfig(max_value_excess=excess), RunFiles(run), returns=returns)
    for step, value in enumerate(values):
        health.check(step, outcome(0.5) | {"critic/q_mean": jnp.float32(value)}, BATCH)
        if step == len(values) // 2:
            state = json.loads(json.dumps(health.state()))
            health = UpdateGuard(HealthConfig(max_value_excess=excess), RunFiles(run), returns=returns)
            health.load_state(state)
    health.finish()
    return health


@pytest.mark.parametrize("value", [4.1, -2.1])
def test_values_beyond_all_returns_for_fifty_updates_stop_the_run(tmp_path: Path, value: float) -> None:
    with pytest.raises(TrainingError) as stopped:
        watch_values(tmp_path, [1.0, *[value] * 50])
    assert f"the mean of Q is {value} at step 50, and returns in the data are -1 to 3" in str(stopped.value)
    assert "--health.max-value-excess 0" in str(stopped.value)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([*[9.0] * 49, 1.0] * 2, {}),  # back in time
        ([3.9, -1.9] * 60, {}),  # within the margin
        ([9.0] * 60, {"excess": 0.0}),  # not monitored
        ([9.0] * 60, {"returns": (0.0, 0.0)}),  # all failed: there is no scale
    ],
)
def test_values_that_are_possible_or_only_briefly_not_stop_nothing(
    tmp_path: Path, values: list[float], options: dict[str, Any]
) -> None:
    assert watch_values(tmp_path, values, **options).skipped == 0


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "stops_at"),
    [
        ("max", 0.0, [0.1, 0.2, 0.2, 0.3, 0.3, 0.1], 5),
        ("min", 0.0, [3.0, 2.0, 2.5, 1.0, 1.5, 1.0], 5),
        ("max", 0.0, [math.nan, 0.1, math.nan, math.nan], 3),
    ],
)
def test_a_run_ends_early_after_two_measurements_without_improvement(
    mode: Any, min_delta: float, values: list[float], stops_at: int | None
) -> None:
    config = StoppingConfig(metric="eval/success", mode=mode, patience=2, min_delta=min_delta)
    stopping = EarlyStopping(config)
    answers = []
    for value in values:
        stopping.update({"eval/success": value})
        answers.append(stopping.done)
        state, stopping = stopping.state(), EarlyStopping(config)  # resumed after every measurement
        stopping.load_state(json.loads(json.dumps(state)))
    assert (answers.index(True) if True in answers else None) == stops_at


def test_another_measurement_is_not_held_against_the_one_before() -> None:
    """What a run is stopped by may be another when it is resumed."""
    before = EarlyStopping(StoppingConfig(metric="val/loss", mode="min", patience=1))
    for value in (0.3, 0.4):
        before.update({"val/loss": value})
    assert before.done
    for other in ({"metric": "eval/success", "mode": "min"}, {"metric": "val/loss", "mode": "max"}):
        stopping = EarlyStopping(StoppingConfig(patience=1, **other))  # type: ignore[arg-type]
        stopping.load_state(before.state())
        assert not stopping.done


# --- the iterations of RIPT -------------------------------------------------------------------------------------------


def problems(monitor: RolloutMonitor, *rollouts: tuple[float | None, float | None]) -> list[str]:
    """What is wrong with each of these rollouts, by success and speed."""
    found = []
    for success, speed in rollouts:
        try:
            monitor.after_rollouts(1, success, speed)
            found.append("")
        except Diverged as problem:
            found.append(problem.reason)
    return found


def monitor_of(**changes: Any) -> RolloutMonitor:
    return RolloutMonitor(HealthConfig(**changes))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 0.99))
@settings(max_examples=60)
def test_a_collapse_is_what_falls_below_the_ratio_of_the_best_that_was_sound(rates: list[float], ratio: float) -> None:
    monitor, sound = monitor_of(min_success_ratio=ratio), []
    for rate in rates:
        collapsed = len(sound) >= 2 and rate < ratio * max(sound)
        (problem,) = problems(monitor, (rate, None))
        assert problem.startswith("success has collapsed") == collapsed
        if not collapsed:
            sound.append(rate)
        other = monitor_of(min_success_ratio=ratio)
        other.load_state(json.loads(json.dumps(monitor.state())))
        monitor = other  # resumed after every iteration


def test_drift_is_too_much_beyond_its_limit_and_must_be_finite() -> None:
    monitor = monitor_of(max_drift=0.5)
    monitor.after_updates(None)
    monitor.after_updates(0.5)
    with pytest.raises(Diverged, match="drifted by 0.6 from where it began, beyond health.max_drift = 0.5"):
        monitor.after_updates(0.6)
    for drift in (math.nan, math.inf):
        with pytest.raises(Diverged, match="drifted by"):
            monitor_of().after_updates(drift)


def test_rollouts_are_slow_when_three_in_a_row_are_and_going_back_would_not_help() -> None:
    said: list[str] = []
    monitor = RolloutMonitor(HealthConfig(min_speed_ratio=0.5), said.append)
    for step, speed in enumerate((100.0, 102.0, 98.0, 40.0, 40.0, 100.0, 40.0, 40.0)):
        monitor.after_rollouts(step, 1.0, speed)
    assert said == [], "never three in a row"
    for step in (8, 9):
        monitor.after_rollouts(step, 1.0, 40.0)
    assert len(said) == 1, "once in three iterations"
    assert "40 environment steps per second, where 100 are usual" in said[0]
    assert monitor.good_step == 9
    stops = monitor_of(min_speed_ratio=0.5, action="stop")
    assert "slow" in problems(stops, *((1.0, speed) for speed in (9.0, 9.0, 9.0, 1.0, 1.0, 1.0)))[-1]


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_a_signal_asks_the_run_to_end_and_ctrl_c_then_ends_it_at_once(number: signal.Signals, code: int) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # by who runs these tests under nohup
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    told: list[str] = []
    with StopSignal(told.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may repeat itself
        assert stop.exit_code == code
        assert told
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    signal.signal(signal.SIGHUP, ignored)


def test_under_nohup_a_run_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)
