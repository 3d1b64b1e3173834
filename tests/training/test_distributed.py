"""Several processes train as one: the same batches, losses and checkpoints; and none outlives another."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fair_env import FAIR, ROBOT
from jax.sharding import NamedSharding, PartitionSpec
from training_runs import RIPT_TOY, once, read_state, values_of

from pirl.config import get_config
from pirl.config.schema import HostsConfig
from pirl.errors import ConfigError
from pirl.interop import NormStats, open_checkpoint, save_policy
from pirl.models import create_model
from pirl.run_files import saved_steps
from pirl.training.distributed import find_hosts
from pirl.training.sharding import OwnRows, copy_to_hosts, make_mesh
from python_path import python_path

HERE = Path(__file__).parent
QUICK = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
# `pirl` where small arrays are spread over devices too, with real learners or with the toy.
SPREAD = "from pirl.cli.main import main; from pirl.training import setup, sharding; sharding.MIN_SHARD_BYTES = 1024; "
PIRL = ("-c", f"{SPREAD} main()")
TOY = ("-c", f"{SPREAD} import toy_learner; vars(setup).update(toy_learner.REPLACED); main()")
# Behaviour cloning of a policy without eyes, where nothing but updates, logs and checkpoints happens.
OFFLINE = {
    "agent": "bc",
    "agent.ema-decay": 0.9,
    "batch-size": 8,
    "data.validation-fraction": 0,
    "validation-every": 0,
    "evaluation.every": 0,
    "online.env-steps": 0,
    "checkpoints.best-metric": "none",
    "logging.every": 1,
    "logging.tensorboard": "false",
}


# --- who they are -----------------------------------------------------------------------------------------------------


def found(environment, **flags):
    return find_hosts(HostsConfig(**flags), environment)


SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "gpu[003-006,9],other",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}


@pytest.mark.parametrize(
    ("environment", "coordinator", "processes", "process_id", "local_id"),
    [
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}, "gpu003:61809", 4, 2, 1),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "7"},
            *("h:7", 2, 1, None),
        ),
        (
            {"MASTER_ADDR": "h", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
            | {"LOCAL_WORLD_SIZE": "2"},
            *("h:29501", 4, 3, 1),
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:9", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            *("h:9", 2, 1, None),
        ),
    ],
)
def test_a_cluster_says_who_the_hosts_are(environment, coordinator, processes, process_id, local_id):
    hosts = found(environment)
    assert (hosts.coordinator, hosts.processes, hosts.process_id) == (coordinator, processes, process_id)
    assert hosts.local_id == local_id
    assert found(environment, coordinator="mine:1").coordinator == "mine:1"
    assert found(environment, processes=1) is None


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}],
    ids=["nothing", "a batch script outside srun"],
)
def test_where_nobody_speaks_of_others_a_process_is_alone(environment):
    assert found(environment) is None


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({}, {"processes": 2}, "--hosts.processes alone do not say who the other hosts are"),
        ({}, {"coordinator": "h:1", "processes": 2, "process_id": 2}, "process id 2 .* none of 2 processes"),
        (SLURM, {"processes": 2}, "process id 2 .*SLURM and --hosts.processes.* none of 2"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, {}, "does not say where the first of them is"),
    ],
)
def test_what_does_not_fit_together_is_refused(environment, flags, words):
    with pytest.raises(ConfigError, match=words):
        found(environment, **flags)


# --- runs in processes of their own -----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def options(settings) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def start(
    run: Path, data: Path, settings, *, processes=1, devices=8, flags=(), preset="debug", program=PIRL, of_last=None
) -> list[subprocess.Popen[str]]:
    """`pirl train`, in so many processes of so many devices each."""
    port = free_port()
    caches = {"PIRL_CACHE": str(data.parent / "cache"), "JAX_COMPILATION_CACHE_DIR": str(data.parent / "compiled")}
    environment = {
        **os.environ,
        **caches,
        "XLA_FLAGS": f"{QUICK} --xla_force_host_platform_device_count={devices}",
        # Enough threads for every device to wait for the others at the same time.
        "NPROC": "16",
        "PYTHONPATH": python_path(HERE, HERE.parent),
    }
    place = ("--exp-name", run.name, "--runs-dir", run.parent)
    started = []
    for index in range(processes):
        hosts = {"hosts.coordinator": f"127.0.0.1:{port}", "hosts.processes": processes, "hosts.process-id": index}
        hosts |= {"hosts.lost-timeout": 10, "hosts.connect-timeout": 60}
        command = [sys.executable, *program, "train", preset, *place, *flags]
        command += (
            options(settings) + options(hosts if processes > 1 else {}) + options(of_last if index and of_last else {})
        )
        started.append(subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True))
    return started


def finish(processes: list[subprocess.Popen[str]], timeout=600) -> list[tuple[int, str]]:
    try:
        return [
            (process.returncode, said) for process in processes for said in [process.communicate(timeout=timeout)[1]]
        ]
    finally:
        for process in processes:
            process.kill()


def train(run: Path, data: Path, settings, **how) -> list[str]:
    """To the end, and well; what was said."""
    ended = finish(start(run, data, settings, **how))
    assert [code for code, _ in ended] == [0] * len(ended), ended
    return [said for _, said in ended]


def cloning(data: Path, steps: int, **changes) -> dict:
    return {**OFFLINE, "data.repo-id": data, "steps": steps, "checkpoints.every": 3, **changes}


def assert_same_losses(run: Path, reference: Path, name="loss", *, at_least: int) -> None:
    ours, theirs = values_of(run, name), values_of(reference, name)
    assert len(ours) >= at_least
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=2e-5, atol=1e-7)


@pytest.fixture(scope="module")
def alone(data, shared_directory):
    """Six updates by one process with eight devices. Real learners, which take long to compile, do the same below."""
    return once(shared_directory / "alone", lambda out: train(out, data, cloning(data, 6), program=TOY))


@pytest.fixture(scope="module")
def together(data, shared_directory):
    """The same by two processes with four devices each, the parameters spread over all of them."""

    def make(out: Path) -> None:
        said = train(out, data, cloning(data, 6, **{"fsdp-devices": 8}), processes=2, devices=4, program=TOY)
        (out / "said.json").write_text(json.dumps(said))

    return once(shared_directory / "together", make)


def test_two_processes_learn_what_one_learns_and_one_of_them_speaks(alone, together):
    assert_same_losses(together, alone, at_least=6)
    first, second = json.loads((together / "said.json").read_text())
    assert "done after 6 updates" in first
    assert second == ""
    arrays = together / "checkpoints" / "6" / "params"
    written = [sum(file.stat().st_size for file in arrays.glob(f"ocdbt.process_{index}/d/*")) for index in range(2)]
    assert min(written) > 0.3 * sum(written)
    left, right = read_state(together, 6), read_state(alone, 6)
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_allclose(array, right[name], rtol=1e-3, atol=1e-5, err_msg=name)
    # The policy is an OpenPI checkpoint like that of one process.
    policies = [run / "checkpoints" / "6" for run in (together, alone)]
    ours, theirs = map(open_checkpoint, policies)
    assert (ours.config, ours.norm_stats().keys()) == (theirs.config, theirs.norm_stats().keys())
    listing = [sorted(str(file.relative_to(policy)) for file in policy.rglob("_METADATA")) for policy in policies]
    assert listing[0] == listing[1]


def test_a_first_host_that_does_not_answer_is_named_in_time(data, tmp_path):
    began = time.monotonic()
    (process,) = start(
        *(tmp_path / "run", data, cloning(data, 6)),
        flags=options(
            {"hosts.coordinator": f"127.0.0.1:{free_port()}", "hosts.processes": 2, "hosts.process-id": 1}
            | {"hosts.connect-timeout": 1}
        ),
    )
    ((code, said),) = finish([process])
    assert code == 2
    assert "the first host does not answer at 127.0.0.1:" in said
    assert time.monotonic() - began < HostsConfig().connect_timeout, "it waits as long as it is told to"


# --- shares of batches ------------------------------------------------------------------------------------------------


def test_the_shares_of_a_rollout_batch_are_the_batch(ript_config, tmp_path, monkeypatch):
    from pirl.training.checkpoints import Checkpoints
    from pirl.training.rollout_stream import RolloutStream
    from pirl.training.train import train

    whole, shared, save = RolloutStream.draw, [], Checkpoints.save

    def save_at_once(self, *given):
        save(self, *given)
        self.wait()  # nothing is to go on in the background of several processes that are not there

    monkeypatch.setattr(Checkpoints, "save", save_at_once)

    def draw(self):
        batch = whole(self)
        number, position = self._counts["made"] - 1, self._counts["updates"] - 1
        shares = []
        with monkeypatch.context() as several:
            several.setattr("jax.process_count", lambda: 4)
            for index in range(4):
                several.setattr("jax.process_index", lambda index=index: index)
                shares.append(self._batch(number, position, self._setup.share))
        assert len(shares[0].included) == 2
        for leaf, *parts in zip(jax.tree.leaves(batch), *map(jax.tree.leaves, shares), strict=True):
            np.testing.assert_array_equal(np.concatenate(parts), leaf)
        shared.append(number)
        return batch

    monkeypatch.setattr(RolloutStream, "draw", draw)
    assert train(ript_config(rollout__iterations=1), exp_name="run") == 0
    assert len(shared) > 1


@pytest.mark.parametrize("stacked", [False, True])
def test_a_host_can_look_at_its_rows_of_a_batch_in_their_order(stacked):
    values = np.arange(3 * 16 * 2).reshape(3, 16, 2) if stacked else np.arange(16 * 2).reshape(16, 2)
    spec = PartitionSpec(None, ("data", "fsdp")) if stacked else PartitionSpec(("data", "fsdp"))
    rows = OwnRows(jax.device_put(values, NamedSharding(make_mesh(4), spec)))
    np.testing.assert_array_equal(rows[(2,) if stacked else ()], values[2] if stacked else values)


@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec(None, "fsdp")])
def test_a_copy_for_one_host_is_the_same_wherever_the_arrays_were(spec, monkeypatch):
    monkeypatch.setattr("pirl.training.sharding.MIN_SHARD_BYTES", 64)
    values = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
    tree = {"matrix": jax.device_put(values, NamedSharding(make_mesh(4), spec)), "step": jnp.asarray(3)}
    copy = copy_to_hosts(tree)
    np.testing.assert_array_equal(copy["matrix"], values)
    assert int(copy["step"]) == 3
    assert {shard.data.shape for shard in copy["matrix"].addressable_shards} == {(3, 16)}


# --- slow -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_that_the_processes_cannot_share_is_refused_by_each_before_anything_is_written(data, tmp_path):
    settings = cloning(data, 6, **{"batch-size": 5})
    ended = finish(start(tmp_path / "run", data, settings, processes=2, devices=1))
    for index, (code, said) in enumerate(ended):
        assert code == 2
        assert f"host {index}: error: " in said
        assert "batch_size = 5 should be a multiple of the number of processes, 2" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["bc", "acrlpd"])
def test_fifty_offline_updates_are_those_of_one_process(data, tmp_path, learner):
    settings = cloning(data, 50, agent=learner, **{"checkpoints.every": 50, "fsdp-devices": 4})
    if learner == "acrlpd":
        del settings["agent.ema-decay"]
        settings["agent.critic-warmup-steps"] = 0
    train(tmp_path / "alone", data, settings)
    train(tmp_path / "together", data, settings, processes=2, devices=4)
    assert_same_losses(tmp_path / "together", tmp_path / "alone", at_least=50)


@pytest.mark.slow
def test_rollouts_and_the_updates_from_them_are_those_of_one_process(data, tmp_path):
    model = get_config("demo_ript").model
    widths = {"state": ROBOT.state_dim, "actions": ROBOT.action_dim}
    plain = {name: NormStats(np.zeros(n), np.ones(n), -np.ones(n), np.ones(n)) for name, n in widths.items()}
    save_policy(tmp_path / "policy", create_model(model, jax.random.key(0)), norm_stats={ROBOT.name: plain})
    settings = {name.replace("_", "-"): value for name, value in RIPT_TOY.items()}
    settings |= {"checkpoint": tmp_path / "policy", "env.id": FAIR, "fsdp-devices": 4, "rollout.iterations": 3}
    settings["agent.num-epochs"] = 13
    train(tmp_path / "alone", data, settings, preset="demo_ript")
    train(tmp_path / "together", data, settings, preset="demo_ript", processes=2, devices=4)
    assert_same_losses(tmp_path / "together", tmp_path / "alone", at_least=50)
    for name in ("rollout/success", "rollout/env_steps", "rollout/success_after"):
        assert values_of(tmp_path / "together", name) == values_of(tmp_path / "alone", name)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_with_any_number_of_devices(data, tmp_path):
    begun, reference = tmp_path / "begun", tmp_path / "reference"
    train(reference, data, cloning(data, 12), program=TOY)
    train(begun, data, cloning(data, 7, **{"fsdp-devices": 8}), processes=2, devices=4, program=TOY)
    for processes, devices, fsdp in ((1, 8, 4), (1, 1, 1), (2, 2, 4)):
        run = tmp_path / f"{processes}x{devices}"
        shutil.copytree(begun, run)
        how = {"processes": processes, "devices": devices, "flags": ("--resume",), "program": TOY}
        train(run, data, cloning(data, 12, **{"fsdp-devices": fsdp}), **how)
        assert_same_losses(run, reference, at_least=12)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_host_is_lost_the_other_ends_and_says_so_and_the_run_goes_on(data, tmp_path, victim):
    run, settings = tmp_path / "run", cloning(data, 40_000, **{"checkpoints.every": 20})
    processes = start(run, data, settings, processes=2, devices=4, program=TOY)
    while processes[0].poll() is None and not any((run / "checkpoints").glob("[1-9]*")):
        time.sleep(0.05)
    processes[victim].kill()
    began = time.monotonic()
    ended = finish(processes)
    code, said = ended[1 - victim]
    assert code == 1
    assert time.monotonic() - began < HostsConfig().lost_timeout, "heartbeats are missed after the 10 s it is told"
    assert f"host {victim}" in said.splitlines()[-1]
    assert "Start all processes again with --resume" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert "Check failure" not in said
    reached = max(saved_steps(run / "checkpoints"))
    settings["steps"] = reached + 5
    train(run, data, settings, processes=2, devices=4, program=TOY, flags=("--resume",))
    assert max(values_of(run, "loss")) == reached + 5


@pytest.mark.slow
def test_when_a_host_fails_the_other_ends_with_its_reason(data, tmp_path):
    how = {"processes": 2, "devices": 1, "program": TOY, "of_last": {"data.repo-id": tmp_path / "nowhere"}}
    (first, heard), (second, said) = finish(start(tmp_path / "run", data, cloning(data, 6), **how))
    assert (first, second) == (1, 2)
    assert f"there is no dataset directory {tmp_path / 'nowhere'}" in said
    assert "host 0: host 1 has ended: this configuration cannot work" in heard
    assert "Start all processes again with --resume" in heard
    assert "Traceback" not in said + heard


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_host_stops_all_at_the_same_step(data, tmp_path, asked):
    run = tmp_path / "run"
    settings = cloning(data, 40_000, **{"checkpoints.every": 1000})
    processes = start(run, data, settings, processes=2, devices=4, program=TOY)
    while processes[0].poll() is None and not ((run / "metrics.jsonl").exists() and values_of(run, "loss")):
        time.sleep(0.05)
    processes[asked].send_signal(signal.SIGINT)
    ended = finish(processes)
    assert [code for code, _ in ended] == [130, 130]
    assert "continue with --resume" in ended[0][1]
    assert (run / "checkpoints" / str(max(values_of(run, "loss")))).is_dir()
