"""A run comes back bit for bit from its newest whole checkpoint, whatever happened while it was written."""

import gc
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from builders import MICRO, MICRO_LORA, random_model
from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.bc import BCAgent
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import CheckpointConfig
from pirl.errors import CheckpointError
from pirl.interop import NormStats, load_policy, open_checkpoint
from pirl.models import get_parameters
from pirl.run_files import saved_steps
from pirl.training.checkpoints import Checkpoints
from pirl.training.run import RunDirectory
from pirl.training.sharding import make_mesh, named_leaves
from python_path import python_path

STATS = {"arm": {"state": NormStats(np.zeros(2), np.ones(2)), "actions": NormStats(np.ones(2), np.ones(2))}}
HOST = {"sampler": {"epoch": 2, "position": 12345678901234567890}, "metrics_bytes": 17, "loss": 0.1 + 0.2}
POLICY = random_model(MICRO)


def small(value):
    return {"value": jnp.full((300, 100), value, jnp.float32), "step": jnp.asarray(value, jnp.int32)}


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.fixture
def run(tmp_path):
    with RunDirectory.open(tmp_path / "run", {}, resume=False, overwrite=False, config_text="") as run:
        yield run


def save(checkpoints, step, state=None, metrics=None, policy=POLICY):
    checkpoints.save(step, small(step) if state is None else state, HOST, policy, STATS, {}, metrics or {})


def save_steps(run, steps, metrics=None, **config):
    with Checkpoints(run, CheckpointConfig(**config)) as checkpoints:
        for step in steps:
            save(checkpoints, step, metrics=None if metrics is None else {"eval/success": metrics[step]})


# --- coming back -------------------------------------------------------------------------------------------------


DISTILL = ACRLPDConfig(horizon_length=4, actor_mode="distill", target="expectile", freeze=("vision",))
CLONE = BCConfig(ema_decay=None, freeze=("language",))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(("model", "kind", "config"), [(MICRO_LORA, ACRLPDAgent, DISTILL), (MICRO, BCAgent, CLONE)])
def test_a_state_comes_back_bit_for_bit_and_its_policy_is_written_once_for_openpi(run, model, kind, config):
    """Trained, frozen and averaged parameters, in whatever dtype: what the state has of the policy is in `params/`."""
    agent = kind.create(config, random_model(model), jax.random.key(0), real_action_dim=2)
    with Checkpoints(run, CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(7, agent, HOST, agent.policy(), STATS, {"seed": 0}, {"loss": 0.5, "nan": np.nan})
    with Checkpoints(run, CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() == 7
        restored, host, step = checkpoints.restore(jax.eval_shape(lambda: agent))
        again, _, _ = checkpoints.restore(restored, step=7)
    assert (host, step) == (HOST, 7)
    assert_same(restored, agent)
    assert_same(again, agent)
    opened = open_checkpoint(run.checkpoints / "7")
    assert (opened.norm_stats(), opened.config, opened.description["seed"]) == (STATS, model, 0)
    assert (opened.description["step"], opened.description["metrics"]) == (7, {"loss": 0.5})
    with ocp.PyTreeCheckpointer() as reader:  # as OpenPI does
        exported = named_leaves(reader.restore(run.checkpoints / "7" / "params")["params"])
        own = named_leaves(reader.restore(run.checkpoints / "7" / "train_state"))
    policy, state = get_parameters(agent.policy()), named_leaves(agent)
    bits = [{path: (leaf.dtype, np.asarray(leaf).tobytes()) for path, leaf in it.items()} for it in (exported, policy)]
    assert bits[0] == bits[1]
    exported_from = {name for name, leaf in state.items() if any(leaf is value for value in policy.values())}
    assert len(exported_from) == len(policy)
    assert own.keys() == state.keys() - exported_from


def test_a_state_is_restored_where_it_is_wanted(run):
    """Saved from one layout over devices, it goes straight into the one of the run that asks, also another."""
    mesh = make_mesh(4)
    rows, columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp", None), (None, "data")))
    everywhere = NamedSharding(mesh, PartitionSpec())
    values = jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32)
    state = {"a": jax.device_put(values, rows), "b": jax.device_put(values.astype(jnp.bfloat16), everywhere)}
    with Checkpoints(run, CheckpointConfig()) as checkpoints:
        save(checkpoints, 1, state)
        same, _, _ = checkpoints.restore(state)
        wanted = {"a": jax.device_put(values, columns), "b": jax.device_put(state["b"], rows)}
        other, _, _ = checkpoints.restore(wanted)
    assert_same(same, state)
    assert_same(other, wanted)


def test_what_is_donated_after_a_save_is_saved_as_it_was(run):
    update = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"layers": [jnp.zeros((500, 500)) for _ in range(12)]}
    update(jax.tree.map(jnp.copy, state)), update(jax.tree.map(jnp.copy, POLICY))  # compile beforehand
    policy = jax.tree.map(jnp.copy, POLICY)
    with Checkpoints(run, CheckpointConfig(max_to_keep=5)) as checkpoints:
        for step in range(3):
            save(checkpoints, step, state, policy=policy)
            for _ in range(10):
                state, policy = update(state), update(policy)
        for step in range(3):
            restored, _, _ = checkpoints.restore(jax.tree.map(jnp.zeros_like, state), step)
            assert all(np.all(np.asarray(leaf) == 10 * step) for leaf in jax.tree.leaves(restored))
            expected = jax.tree.map(jnp.copy, POLICY)
            for _ in range(10 * step):
                expected = update(expected)
            saved = get_parameters(load_policy(run.checkpoints / str(step)))
            for path, value in get_parameters(expected).items():
                np.testing.assert_array_equal(saved[path], value)


def test_a_state_of_another_learner_is_refused_leaf_by_leaf(run):
    save_steps(run, [1, 2])
    like = {"value": jnp.zeros((300, 100), jnp.bfloat16), "temperature": jnp.zeros(())}
    with Checkpoints(run, CheckpointConfig()) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(like)
    text = str(caught.value)
    assert "checkpoints/2 is not of this learner; 3 of its arrays differ" in text
    assert "temperature: absent in the checkpoint, float32[] in the run" in text
    assert "step: int32[] in the checkpoint, absent in the run" in text
    assert "value: float32[300, 100] in the checkpoint, bfloat16[300, 100] in the run" in text


def test_an_absent_step_and_what_is_no_json_are_refused_at_once(run):
    with Checkpoints(run, CheckpointConfig()) as checkpoints:
        with pytest.raises(CheckpointError, match=r"checkpoints has no state\.$"):
            checkpoints.restore(small(0))
        with pytest.raises(CheckpointError, match="cannot be written as JSON: .*ndarray"):
            checkpoints.save(1, small(1), {"sampler": np.zeros(2)}, POLICY, STATS, {}, {})
        host = {"position": [1]}
        checkpoints.save(1, small(1), host, POLICY, STATS, {}, {})
        host["position"].append(2)  # the run goes on meanwhile
        assert checkpoints.restore(small(0))[1] == {"position": [1]}
        with pytest.raises(CheckpointError, match=r"has no state of step 5; it has 1\."):
            checkpoints.restore(small(0), step=5)


# --- damage ------------------------------------------------------------------------------------------------------


def data_file(directory, part="train_state"):
    """The file that holds the arrays."""
    files = [file for file in (directory / part).rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def cut(directory):
    file = data_file(directory)
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file):
    """Of the same size, so that only reading can tell."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_a_number(directory):
    """Still a record, but of another state."""
    file = directory / "state.json"
    text = file.read_text()
    assert '"metrics_bytes": 17' in text
    file.write_text(text.replace('"metrics_bytes": 17', '"metrics_bytes": 18'))


DAMAGES = {
    "cut": cut,
    "a number of the record": change_a_number,
    "a changed bit": lambda directory: flip_a_bit(data_file(directory)),
    "a changed bit of the policy": lambda directory: flip_a_bit(data_file(directory, "params")),
    "a changed bit of the statistics": lambda directory: flip_a_bit(data_file(directory, "assets")),
    "no record": lambda directory: (directory / "state.json").unlink(),
    "empty directory": lambda directory: (shutil.rmtree(directory), (directory / "train_state").mkdir(parents=True)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_taken(run, damage, caplog):
    save_steps(run, [1, 2])
    DAMAGES[damage](run.checkpoints / "2")
    with Checkpoints(run, CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() == 2
        with caplog.at_level(logging.WARNING):
            state, _, step = checkpoints.restore(small(0))
        assert step == 1
        assert_same(state, small(1))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "checkpoints/2 is damaged: " in caplog.text
        with pytest.raises(CheckpointError, match="checkpoints/2 is damaged"):
            checkpoints.restore(small(0), step=2)
        # The run comes to the same step again.
        save(checkpoints, 2, small(22))
        state, _, step = checkpoints.restore(small(0))
        assert step == 2
        assert_same(state, small(22))


def test_without_a_whole_checkpoint_each_is_named(run):
    save_steps(run, [1, 2])
    cut(run.checkpoints / "1")
    (run.checkpoints / "2" / "state.json").unlink()
    with Checkpoints(run, CheckpointConfig()) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(small(0))
    assert "checkpoints/2 is damaged: state.json cannot be read" in str(caught.value)
    assert "checkpoints/1 is damaged: train_state/" in str(caught.value)
    assert f"from the policy of this one (--checkpoint {run.path}), or this one again (--overwrite)" in str(
        caught.value
    )


def test_a_damaged_newest_does_not_push_out_what_is_saved_after_going_back(run):
    save_steps(run, [10, 20])
    cut(run.checkpoints / "20")
    with Checkpoints(run, CheckpointConfig(max_to_keep=1)) as checkpoints:
        assert checkpoints.restore(small(0))[2] == 10
        save(checkpoints, 15)
        assert checkpoints.restore(small(0))[2] == 15
    assert saved_steps(run.checkpoints) == [15]


# --- what is kept ------------------------------------------------------------------------------------------------


def test_the_newest_and_the_periodic_ones_are_kept(run):
    save_steps(run, range(1, 8), max_to_keep=2, keep_period=2)
    assert saved_steps(run.checkpoints) == [2, 4, 6, 7]
    assert saved_steps(run.checkpoints, resumable=True) == [6, 7], "of the others the policy is kept"
    assert {entry.name for entry in (run.checkpoints / "4").iterdir()} >= {"params", "assets", "pirl.json"}
    assert not (run.checkpoints / "4" / "state.json").exists()
    assert not list(run.checkpoints.rglob(".*"))
    for step in (2, 4, 6, 7):
        load_policy(run.checkpoints / str(step))


def test_what_is_kept_for_good_is_counted_as_checkpoints_are(run):
    """An iteration of RIPT makes as many updates as it finds something to learn from."""
    with Checkpoints(run, CheckpointConfig(max_to_keep=1, keep_period=3)) as checkpoints:
        for progress, step in ((0, 0), (1, 40), (2, 90), (4, 110), (5, 150), (6, 200), (8, 210), (8, 290)):
            checkpoints.save(step, small(step), HOST, POLICY, STATS, {}, {}, progress)
    assert saved_steps(run.checkpoints) == [110, 200, 290], "the first of each period"


def test_states_within_an_iteration_take_no_place_of_those_that_a_run_can_go_back_to(run):
    """A run that is stopped within an iteration saves there, again and again if it is preempted often."""
    with Checkpoints(run, CheckpointConfig(max_to_keep=2)) as checkpoints:
        for step, within in ((10, False), (20, False), (25, True), (27, True)):
            checkpoints.save(step, small(step), {**HOST, "within_iteration": within}, POLICY, STATS, {}, {})
        checkpoints.wait()
        assert checkpoints.saved() == [10, 20, 27]
        assert checkpoints.saved_between_iterations() == [10, 20]
        checkpoints.save(30, small(30), {**HOST, "within_iteration": False}, POLICY, STATS, {}, {})
        checkpoints.wait()
        assert checkpoints.saved() == [20, 30]


def test_a_state_is_safe_from_a_power_failure_before_an_older_one_is_deleted(run, monkeypatch):
    there, sync = [], os.fsync

    def look(number):
        there.append((os.readlink(f"/proc/self/fd/{number}"), saved_steps(run.checkpoints)))
        sync(number)

    save_steps(run, [1], max_to_keep=1)
    monkeypatch.setattr(os, "fsync", look)
    save_steps(run, [2], max_to_keep=1)
    assert saved_steps(run.checkpoints) == [2]
    synced = {(Path(name).name, *steps) for name, steps in there}
    assert synced >= {(name, 1) for name in ("state.json", "pirl.json", "norm_stats.json", "train_state")}
    assert ("checkpoints", 1, 2) in synced


def test_all_hosts_go_by_what_the_first_one_sees(run, monkeypatch):
    """On a file system on a network others may see what was saved, or deleted, a little later."""

    def of_the_first_host(make, *what):
        found = make()
        return [step for step in found if step != 3] if isinstance(found, list) else found

    with Checkpoints(run, CheckpointConfig(max_to_keep=9)) as checkpoints:
        for step in (1, 2, 3):
            save(checkpoints, step)
        checkpoints.wait()
        monkeypatch.setattr("pirl.training.checkpoints.broadcast", of_the_first_host)
        assert checkpoints.latest() == 2
        restored, _, step = checkpoints.restore(small(0))
        assert (step, int(restored["step"])) == (2, 2)
        with pytest.raises(CheckpointError, match="no state of step 3; it has 1, 2"):
            checkpoints.restore(small(0), step=3)
        assert checkpoints.saved_between_iterations() == [1, 2]


@pytest.mark.parametrize(
    ("mode", "values", "best"), [("max", [0.1, 0.9, 0.9, 0.2, 0.3], 2), ("min", [0.1, 0.0, 0.9, 0.0, 0.3], 2)]
)
def test_the_policy_of_the_best_step_is_kept(run, mode, values, best):
    metrics = dict(enumerate(values, start=1))
    save_steps(run, [1, 2, 3], metrics, max_to_keep=1, best_metric="eval/success", best_mode=mode)
    save_steps(run, [4, 5], metrics, max_to_keep=1, best_metric="eval/success", best_mode=mode)
    assert saved_steps(run.checkpoints, resumable=True) == [5]
    assert saved_steps(run.checkpoints) == sorted({best, 5})
    assert json.loads(run.best_file.read_text()) == {"step": best, "metric": "eval/success", "value": metrics[best]}


def test_a_checkpoint_without_the_metric_or_with_nan_is_never_best_and_a_kill_hides_none(run):
    with Checkpoints(run, CheckpointConfig(max_to_keep=1, best_metric="eval/success")) as checkpoints:
        save(checkpoints, 1, metrics={"eval/success": float("nan")})
        save(checkpoints, 2, metrics={"loss": 3.0})
        checkpoints.wait()
        assert not run.best_file.exists()
        save(checkpoints, 3, metrics={"eval/success": 0.0})
        save(checkpoints, 4, metrics={"eval/success": 0.7})
    assert saved_steps(run.checkpoints) == [4]
    run.best_file.write_text('{"step": 3, "metric": "eval/success", "value": 0.0}')  # killed before it got to it
    save_steps(run, [], best_metric="eval/success")
    assert json.loads(run.best_file.read_text())["step"] == 4


# --- failing -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorStore's, to closed event loops
@pytest.mark.parametrize("limit", [80_000, 4_000], ids=["for the state", "for the policy"])
def test_a_full_disk_is_reported_at_the_next_turn_and_costs_no_older_checkpoint(run, caplog, limit):
    state = {"value": jnp.asarray(np.random.default_rng(0).normal(size=(300, 100)), jnp.float32)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(run, CheckpointConfig()) as checkpoints:
        save(checkpoints, 1, state)
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            save(checkpoints, 2, state)
            with pytest.raises(CheckpointError) as caught:
                save(checkpoints, 3, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        text = str(caught.value)
        assert f"the checkpoint of step 2 could not be written in {run.checkpoints}: File too large. " in text
        assert "The newest that is whole is that of step 1." in text
        assert checkpoints.latest() == 1
        assert not list(run.checkpoints.rglob(".*"))
        restored, _, _ = checkpoints.restore(state)
        assert_same(restored, state)
        save(checkpoints, 3, state)  # and goes on where there is space again
    assert saved_steps(run.checkpoints, resumable=True) == [1, 3]
    gc.collect()
    assert caplog.text == ""


def test_a_place_that_cannot_be_written_is_named(run):
    run.checkpoints.write_text("a file")
    with pytest.raises(CheckpointError, match=r"step 1 could not be written in .*There is no other one"):
        save_steps(run, [1])


def test_a_failed_save_does_not_hide_what_ended_the_run(run, caplog, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pirl.training.checkpoints.atomic_replace", refuse)

    def train():
        with Checkpoints(run, CheckpointConfig()) as checkpoints:
            save(checkpoints, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "step 1 could not be written" in caplog.text


def test_where_there_is_no_state_nothing_begins_anew_in_the_place_of_policies(run):
    """The states were deleted, or an older pirl wrote policies and states apart."""
    for left in ("5", "policy"):
        (run.checkpoints / left / "params").mkdir(parents=True)
        with pytest.raises(
            CheckpointError, match=f"no state to resume from, only {left}: .*--checkpoint .*--overwrite"
        ):
            Checkpoints(run, CheckpointConfig())
        shutil.rmtree(run.checkpoints / left)


# --- kill -9 -----------------------------------------------------------------------------------------------------

# Forks that resume, check what they find and go on saving until they are killed: at a random time, or just before each
# of the renames that one save makes, until one save is through. The last fork only checks. Forking spares the import.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from builders import MICRO
from pirl.config import CheckpointConfig
from pirl.interop import open_checkpoint
from pirl.models import abstract_model
from pirl.training.checkpoints import Checkpoints
from pirl.run_files import saved_steps
from pirl.training.run import RunDirectory

path = Path(sys.argv[1])

def state(step):
    return {"value": np.random.default_rng(step).normal(size=(300, 100)).astype(np.float32), "step": np.int32(step)}

MODEL = abstract_model(MICRO)

def policy(step):
    return jax.tree.map(lambda leaf: jnp.asarray(np.full(leaf.shape, step, leaf.dtype)), MODEL)

def go_on(saves, die_at):
    run = RunDirectory.open(path, {}, resume=path.exists(), overwrite=False, config_text="")
    config = CheckpointConfig(max_to_keep=1, keep_period=5, best_metric="success")
    with Checkpoints(run, config) as checkpoints:
        assert not list(run.checkpoints.rglob(".*")), "remains"
        step = checkpoints.latest() or 0
        if step:
            restored, host, reached = checkpoints.restore(jax.tree.map(jnp.asarray, state(0)))
            assert reached == step == host["step"], "not the newest"
            for name, value in state(step).items():
                assert np.asarray(restored[name]).tobytes() == value.tobytes(), name
            for saved in saved_steps(run.checkpoints):
                parameters = open_checkpoint(run.checkpoints / str(saved)).read()
                assert all((np.asarray(value) == saved).all() for value in parameters.values()), "another policy"
        count = 0
        def hook(event, arguments):
            nonlocal count
            if event == "os.rename" and str(path) in str(arguments[0]):
                count += 1
                if count == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        print("saving", flush=True)
        for step in range(step + 1, step + 1 + saves):
            arrays = jax.tree.map(jnp.asarray, state(step))
            success = {"success": float(step % 3 - 1 / step)}  # every third is the best so far
            checkpoints.save(step, arrays, {"step": step}, policy(step), {}, {}, success)
        checkpoints.wait()

def fork(*arguments, kill_after=None):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 1)
        try:
            go_on(*arguments)
        except BaseException as error:
            print("wrong", type(error), error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writing)
    if kill_after is not None:
        os.read(reading, 1)
        while not list(path.glob("checkpoints/.*.partial*")):
            time.sleep(0.001)
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, len(list(path.rglob(".*"))), flush=True)
    os.close(reading)
    return status

if sys.argv[2] == "time":
    chance = random.Random(int(sys.argv[3]))
    for _ in range(int(sys.argv[4])):
        fork(100, None, kill_after=chance.uniform(0.0, 0.8))
else:
    fork(3, None)
    die_at = 1
    while fork(1, die_at) == -signal.SIGKILL:
        die_at += 1
fork(0, None)
"""


def killed_runs(tmp_path, *arguments):
    """(exit code, hidden remains) of every fork."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "run"), *map(str, arguments)]
    environment = {
        "PYTHONPATH": python_path(Path(__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "wrong" not in done.stderr, done.stderr
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_process_killed_at_any_time_leaves_whole_checkpoints(tmp_path):
    *killed, last = killed_runs(tmp_path, "time", 0, 6)
    assert {code for code, _ in killed} == {-9}
    assert sum(remains > 0 for _, remains in killed) >= 2, "hardly a kill came in the middle of a save"
    assert last == (0, 0)


def test_a_process_killed_before_any_rename_leaves_whole_checkpoints(tmp_path):
    (first, _), *killed, through, last = killed_runs(tmp_path, "rename")
    assert {code for code, _ in killed} == {-9}
    assert len(killed) >= 4, "of Orbax, the checkpoint, best.json, and one that made room"
    assert first == 0
    assert through == last == (0, 0)
