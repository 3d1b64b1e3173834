"""Metrics come out as they went in, also after a resume; memory is what is there."""

import importlib.machinery
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import types
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from pirl.config.schema import LoggingConfig
from pirl.errors import ConfigError
from pirl.processes import HostMemory
from pirl.training import logging as run_log
from pirl.training.logging import JsonLines, MemoryMonitor, MetricsLog, live_bytes
from pirl.training.sharding import make_mesh

FILES_ONLY = LoggingConfig(every=10, tensorboard=False)


def scalars(**values: float) -> dict[str, jax.Array]:
    return {name.replace("__", "/"): jnp.float32(value) for name, value in values.items()}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_mean_is_of_the_updates_that_computed_the_value(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path, FILES_ONLY)) as log:
        log.add(scalars(loss=1.0, actor__loss=math.nan, never=math.nan))
        log.add(scalars(loss=3.0, actor__loss=5.0, never=math.nan))
        log.add(scalars(loss=8.0, actor__loss=math.nan, never=math.nan))
        returned = log.flush(3)
        log.write(4, {"online/env_steps": 20_000_001})
        log.write_timing(4, {"steps_per_second": 12.5, "eval/return": math.nan})
        assert (tmp_path / "timing.jsonl").read_text() == '{"step": 4, "steps_per_second": 12.5}\n'
    assert returned == {"loss": 4.0, "actor/loss": 5.0}
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, **returned}, {"step": 4, "online/env_steps": 20_000_001}]


def test_a_skipped_update_is_counted_and_its_values_are_left_out(tmp_path: Path) -> None:
    together = {"loss": jnp.array([1.0, 7.0, 1e9, jnp.nan]), "skipped": jnp.array([0.0, 0.0, 1.0, 1.0])}
    with closing(MetricsLog(tmp_path, FILES_ONLY)) as log:
        log.add(scalars(loss=2.0, skipped=0.0))
        log.add(scalars(loss=1e30, skipped=1.0))
        assert log.flush(2) == {"loss": 2.0, "skipped": 1}
        log.add(scalars(loss=math.inf, skipped=1.0))
        assert log.flush(3) == {"skipped": 2}, "the count is of the whole run; nothing else was computed"
        log.add(together)  # updates that were compiled into one count one by one
        log.add(scalars(loss=1.0, skipped=0.0))
        assert log.flush(5) == {"loss": 3.0, "skipped": 4}


@settings(max_examples=50)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_numbers_survive_the_file_with_no_more_digits_than_float32_needs(value: float) -> None:
    with tempfile.TemporaryDirectory() as directory, closing(MetricsLog(Path(directory), FILES_ONLY)) as log:
        log.add({"loss": jnp.float32(value)})
        log.flush(1)
        text = (Path(directory) / "metrics.jsonl").read_text()
    written = text.removeprefix('{"step": 1, "loss": ').removesuffix("}\n")
    assert np.float32(float(written)) == np.float32(value)
    assert len(written.lstrip("-").split("e")[0].replace(".", "").lstrip("0").rstrip("0")) <= 9


def train(run: Path, until: int, position: dict[str, Any] | None = None, since: int = 0, save: int = 0) -> Any:
    """A run that logs every 10 steps and measures every 25. Returns the position at the step to save, as JSON."""
    random = np.random.default_rng(0).standard_cauchy((until, 3)).astype(np.float32)
    saved = None
    with closing(MetricsLog(run, FILES_ONLY, position)) as log:
        for step in range(since + 1, until + 1):
            loss, q, when = random[step - 1]
            log.add(scalars(loss=loss, q=q if when > 0 else math.nan, skipped=float(abs(loss) > 20)))
            if step % 10 == 0:
                log.flush(step)
            if step % 25 == 0:
                log.write(step, {"val/loss": float(q)})
            if step == save:
                saved = json.dumps(log.position())
    return None if saved is None else json.loads(saved)


@pytest.mark.parametrize("save", [37, 50])
def test_a_run_that_was_killed_and_resumed_leaves_the_same_bytes(tmp_path: Path, save: int) -> None:
    train(tmp_path / "whole", 120)
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert whole.count(b"\n") == 12 + 4
    for killed_at in (save, save + 1, save + 20):
        run = tmp_path / f"killed{killed_at}"
        position = train(run, save, save=save)
        # The file as it is killed_at steps later, in the middle of a line.
        after = b"".join(line for line in whole.splitlines(True) if json.loads(line)["step"] <= killed_at)
        (run / "metrics.jsonl").write_bytes(after + b'{"step": 1')
        train(run, 120, position, since=save)
        assert (run / "metrics.jsonl").read_bytes() == whole


def test_adding_does_not_wait_for_the_device(tmp_path: Path) -> None:
    @jax.jit
    def slow(x: float) -> dict[str, jax.Array]:
        return {
            "loss": jax.lax.fori_loop(0, 10, lambda _, matrix: jnp.tanh(matrix @ matrix), jnp.full((999, 999), x)).max()
        }

    with closing(MetricsLog(tmp_path, FILES_ONLY)) as log:
        log.add(slow(1.0))
        log.flush(1)  # everything is compiled now
        metrics = slow(1.0)
        log.add(metrics)
        assert not metrics["loss"].is_ready()
        assert log.flush(2) == {"loss": 1.0}


class FakeService(types.ModuleType):
    """W&B's or Trackio's module, as far as it is used: keeps what it is told."""

    class Error(Exception):
        pass

    url = "https://example.org/run"

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, refuses: bool = False):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="made for a test")
        self.runs: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.axes: dict[str, str | None] = {}
        self.finished, self.step, self.refuses = 0, 0, refuses
        monkeypatch.setitem(sys.modules, name, self)

    def Settings(self, **options: Any) -> dict[str, Any]:
        return options

    def init(self, **options: Any) -> "FakeService":
        if self.refuses:
            raise self.Error("no API key")
        self.runs.append(options)
        self.id = options.get("id")
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        step = self.step + 1 if step is None else step
        if step >= self.step:  # what is behind is not taken
            self.step = step
            self.logged.append((int(values.pop("step", step)), values))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("config", [{"wandb": "offline"}, {"trackio": True}])
def test_trackers_get_what_the_files_get_and_resume_the_same_run(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = FakeService("trackio" if "trackio" in config else "wandb", monkeypatch)
    trackers = LoggingConfig(tensorboard=False, project="folding", **config)
    run = tmp_path / "fold1"
    with closing(MetricsLog(run, trackers, hyperparameters={"seed": 3})) as log:
        log.add(scalars(loss=0.5, q=math.nan))
        log.flush(10)
        log.write_timing(10, {"steps_per_second": 4.0})
        assert len(log.trackers) == 1
        position = log.position()
    assert service.logged == [(10, {"loss": 0.5}), (10, {"time/steps_per_second": 4.0})]
    assert service.finished == 1
    with closing(MetricsLog(run, trackers, position, hyperparameters={"seed": 3})) as log:
        log.write(20, {"eval/success": 0.75})
    assert service.logged[2:] == [(20, {"eval/success": 0.75})]
    first, second = service.runs
    assert (first["project"], first["name"], second["name"]) == ("folding", "fold1", "fold1")
    assert first["config"] == {"seed": 3}
    if "trackio" in config:
        assert (first["resume"], second["resume"]) == ("never", "allow")
        return
    assert first["id"] == second["id"]
    assert first["mode"] == config["wandb"]
    MetricsLog(tmp_path / "fold2", trackers).close()
    assert service.runs[2]["id"] != first["id"]


def test_wandb_shows_what_a_run_measured_after_it_went_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service, config = FakeService("wandb", monkeypatch), LoggingConfig(tensorboard=False, wandb="online")
    with closing(MetricsLog(tmp_path / "fold1", config)) as log:
        log.write(10, {"loss": 1.0})
        position = log.position()
        log.write(20, {"loss": 9.0})
    with closing(MetricsLog(tmp_path / "fold1", config, position)) as log:
        log.write(15, {"loss": 2.0})
        log.write_timing(15, {"steps_per_second": 4.0})
        log.write(20, {"loss": 3.0})
    curve = [(step, values["loss"]) for step, values in service.logged if "loss" in values]
    assert curve == [(10, 1.0), (20, 9.0), (15, 2.0), (20, 3.0)]
    assert service.axes == {"step": None, "*": "step"}
    FakeService("wandb", monkeypatch, refuses=True)
    with pytest.raises(ConfigError, match="no API key.*wandb login.*offline"):
        MetricsLog(tmp_path, config)


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = LoggingConfig(tensorboard=True)
    with closing(MetricsLog(tmp_path, config)) as log:
        for step in (10, 20):
            log.write(step, {"loss": step / 8})
        position = log.position()
        for step in (30, 40):  # lost by the resume
            log.write(step, {"loss": -1.0, "gone": 1.0})
    (written,) = (tmp_path / "tensorboard").iterdir()
    written.rename(written.with_name("events.out.tfevents.0000000001.earlier"))  # names say the order, in seconds
    with closing(MetricsLog(tmp_path, config, position)) as log:
        log.write(30, {"loss": 30 / 8})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("loss")]
    assert curve == [(10, 1.25), (20, 2.5), (30, 3.75)]
    assert events.Scalars("gone") == []


def test_wandb_offline_needs_neither_network_nor_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    run = tmp_path / "fold1"
    position = None
    for step in (10, 20):
        with closing(MetricsLog(run, LoggingConfig(tensorboard=False, wandb="offline"), position)) as log:
            log.write(step, {"loss": 0.5})
            position = log.position()
    first, second = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert first.name == second.name == f"run-{(run / 'wandb' / 'run_id').read_text()}.wandb"


def test_trackio_keeps_the_run_on_this_machine_and_prints_nothing(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    program = """
import sys
from contextlib import closing
from pathlib import Path
from pirl.config.schema import LoggingConfig
from pirl.training.logging import MetricsLog
run, config, position = Path(sys.argv[1]), LoggingConfig(tensorboard=False, trackio=True, project="folding"), None
for step in (10, 20):
    with closing(MetricsLog(run, config, position)) as log:
        log.write(step, {"loss": step / 8})
        position = log.position()
import trackio
(stored,) = trackio.Api().runs("folding")
print([(row["step"], row["loss"]) for row in trackio.sqlite_storage.SQLiteStorage.get_logs("folding", stored.name)])
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", program, str(tmp_path / "fold1")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    assert said == "[(10, 1.25), (20, 2.5)]\n"


def test_a_full_disk_is_named_with_what_could_not_be_written_and_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = """
import resource, sys
from pathlib import Path
from pirl.errors import DataError
from pirl.training.logging import JsonLines
lines = JsonLines(Path(sys.argv[1]) / "metrics.jsonl")
lines.write(1, {"loss": 2.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
try:
    lines.write(2, {"loss": 3.0})
    lines.write(3, {"loss": 4.0})
except DataError as error:
    print(error)
lines.close()
"""
    ignored = f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{script}"
    done = subprocess.run([sys.executable, "-c", ignored, tmp_path], capture_output=True, text=True, check=True)
    assert f"metrics.jsonl cannot be written in {tmp_path}: File too large. See to the cause" in done.stdout
    assert done.stderr == ""
    # A file that lost lines is continued with a warning.
    again = JsonLines(tmp_path / "metrics.jsonl", keep=1000)
    again.write(2, {})
    again.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}, {"step": 2}]
    assert str(tmp_path / "metrics.jsonl") in caplog.text


# --- memory ----------------------------------------------------------------------------------------------------------

GIB = 2**30


def test_arrays_are_counted_on_the_devices_they_lie_on():
    mesh = make_mesh(4)
    before = live_bytes()
    array = np.zeros((1024, 256), np.float32)
    kept = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec("fsdp"))),
        jax.device_put(array, NamedSharding(mesh, PartitionSpec())),
        jax.device_put(array, jax.devices()[3]),
    ]
    now = live_bytes()
    added = {device.id: now[device.id] - before.get(device.id, 0) for device in jax.devices()}
    expected = {device.id: array.nbytes // 4 + array.nbytes for device in jax.devices()}
    expected[jax.devices()[3].id] += array.nbytes
    assert added == expected
    for each in kept:
        each.delete()
    assert live_bytes() == before


def test_a_peak_outlives_what_caused_it():
    monitor = MemoryMonitor()
    begun = monitor.take("begin")
    array = jax.device_put(np.zeros(8 << 20, np.uint8), jax.devices()[0])
    held = monitor.take("data")
    array.delete()
    after = monitor.take("update")
    assert held["memory/data/device_0"] - begun["memory/begin/device_0"] == pytest.approx(2**-7)
    assert after["memory/update/device_0"] == begun["memory/begin/device_0"]
    assert after["memory/update/device_peak"] >= held["memory/data/device_0"]
    assert set(after) == {
        f"memory/update/{name}"
        for name in (
            *("host", "host_peak", "host_available", "device", "device_peak"),
            *(f"device_{number}" for number in range(jax.local_device_count())),
        )
    }


def test_a_device_that_keeps_an_account_is_believed(monkeypatch):
    class Accelerator:
        def __init__(self, number, used, peak):
            self.id, self._stats = number, {"bytes_in_use": used, "peak_bytes_in_use": peak}

        def memory_stats(self):
            return self._stats

    devices = [Accelerator(0, GIB, 3 * GIB), Accelerator(1, 2 * GIB, 2 * GIB)]
    monkeypatch.setattr(run_log.jax, "local_devices", lambda: devices)
    values = MemoryMonitor().take("update")
    assert values["memory/update/device"] == values["memory/update/device_1"] == 2
    assert values["memory/update/device_0"] == 1
    assert values["memory/update/device_peak"] == 3


def test_a_nearly_full_host_is_said_once(monkeypatch, caplog):
    monitor = MemoryMonitor()
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(run_log, "read_host", lambda: HostMemory(GIB, GIB, GIB, 16 * GIB))
        monitor.take("data")
        assert not caplog.records
        monkeypatch.setattr(run_log, "read_host", lambda: HostMemory(GIB, GIB, GIB // 2, 16 * GIB))
        monitor.take("update")
        monitor.take("update")
    (record,) = caplog.records
    assert "(update): 0.50 of 16.0 GiB are left" in record.getMessage()
