"""A run directory is begun, resumed and overwritten only as told, by one process at a time."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pirl.errors import ConfigError, DataError
from pirl.run_files import TRAIN_STATE
from pirl.training.run import RunDirectory

CONFIG = {
    "name": "debug",
    "steps": 100,
    "seed": 0,
    "agent": {"discount": 0.99, "optimizer": {"peak_lr": 1e-4, "betas": (0.9, 0.95)}},
    "data": {"repo_id": "me/fold_box", "prefetch": 2},
    "env": None,
    "runs_dir": Path("runs"),
}
NAMES = ["lock", "config.yaml", "metadata.json"]
FLAGS = ({}, {"overwrite": True}, {"resume": True})
OPEN = """
import sys
from pathlib import Path
from pirl.training.run import RunDirectory
run = RunDirectory.open(Path(sys.argv[1]), {}, resume=False, overwrite=False, config_text="")
print("open", flush=True)
sys.stdin.read()
"""


def open_run(directory, config=CONFIG, resume=False, overwrite=False, config_text="steps: 100\n"):
    return RunDirectory.open(directory, config, resume=resume, overwrite=overwrite, config_text=config_text)


def listing(directory):
    return {str(file.relative_to(directory)) for file in directory.rglob("*")}


@pytest.fixture
def finished(tmp_path):
    """A run that has come to step 30."""
    directory = tmp_path / "runs" / "first"
    with open_run(directory) as run:
        for step in (10, 20, 30):
            (run.checkpoints / str(step) / TRAIN_STATE).mkdir(parents=True)
        run.metrics_file.write_text('{"step": 10}\n')
    return directory


# --- beginning --------------------------------------------------------------------------------------------------------


def test_a_new_run_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/pirl", "train", "debug", "--exp-name", "a b"])
    with open_run(tmp_path / "runs" / "first") as run:
        run.note(parameters={"policy": 12}, devices=8)
        assert run.metadata["devices"] == 8
    assert (tmp_path / "runs/first/config.yaml").read_text() == "steps: 100\n"
    metadata = json.loads((tmp_path / "runs/first/metadata.json").read_text())
    assert metadata["command"] == "pirl train debug --exp-name 'a b'"
    assert metadata["parameters"] == {"policy": 12}
    assert {"python", "pirl", "jax", "flax", "optax", "orbax-checkpoint"} <= set(metadata["versions"])
    assert metadata["config"]["agent"] == {"discount": 0.99, "optimizer": {"peak_lr": 1e-4, "betas": [0.9, 0.95]}}
    assert metadata["resumed"] == []


def test_a_run_that_is_there_is_neither_touched_nor_continued_unless_told(finished, tmp_path):
    before = listing(finished)
    with pytest.raises(ConfigError, match=r"up to step 30: --resume continues it, --overwrite deletes it"):
        open_run(finished)
    with pytest.raises(ConfigError, match="give only one of them"):
        open_run(finished, resume=True, overwrite=True)
    assert listing(finished) == before
    with pytest.raises(ConfigError, match="nothing to resume"):
        open_run(tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


def test_where_nothing_can_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        open_run(tmp_path / "file")
    with pytest.raises(DataError, match=r"the run cannot be written in .*file/x: Not a directory.*--runs-dir"):
        open_run(tmp_path / "file" / "x")


@pytest.mark.parametrize("files", [["thesis.tex"], ["config.yaml"], ["metadata.json", "a/b"], ["lock", "thesis.tex"]])
def test_what_is_no_run_is_never_touched(tmp_path, files):
    for name in files:
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text("42")
    before = listing(tmp_path)
    for flags in FLAGS:
        with pytest.raises(ConfigError, match="not a run of pirl.*nothing in it is touched"):
            open_run(tmp_path / "home", **flags)
    assert listing(tmp_path) == before


# --- overwriting ------------------------------------------------------------------------------------------------------


def test_overwriting_leaves_nothing_of_the_old_run_once_the_new_one_begins(finished, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").write_text("42")
    (finished / "videos").symlink_to(tmp_path / "elsewhere")
    before = listing(finished)
    with open_run(finished, {"steps": 5}, overwrite=True, config_text="steps: 5\n") as run:
        run.abandon()  # its dataset has no labels, say
    assert listing(finished) == before
    assert (finished / "config.yaml").read_text() == "steps: 100\n"
    open_run(finished, resume=True).close()
    with open_run(finished, {"steps": 5}, overwrite=True, config_text="steps: 5\n") as run:
        run.begin()
    assert listing(finished) == set(NAMES)
    assert (finished / "config.yaml").read_text() == "steps: 5\n"
    assert (tmp_path / "elsewhere" / "thesis.tex").read_text() == "42", "it follows no link out of the run"


@pytest.mark.parametrize("flags", [{}, {"resume": True}])
def test_an_overwriting_that_was_killed_is_finished(finished, monkeypatch, flags):
    """Half a run must not be taken for one, with whatever flag it is opened next."""

    def die(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with open_run(finished, overwrite=True) as run, pytest.raises(KeyboardInterrupt):
            run.begin()
    assert (finished / "checkpoints" / "30").exists()
    open_run(finished, **flags).close()
    assert listing(finished) == set(NAMES)


def test_a_run_that_was_killed_as_it_was_given_up_leaves_its_name_free(tmp_path, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    with open_run(tmp_path / "x") as run, monkeypatch.context() as killed:
        run.tensorboard.mkdir()
        killed.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            run.abandon()
    assert listing(tmp_path / "x") > {"lock", "tensorboard"}
    open_run(tmp_path / "x").close()
    assert listing(tmp_path / "x") == set(NAMES)


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_resuming_is_noted_and_keeps_what_is_there(finished):
    with open_run(finished, resume=True) as run:
        run.begin()
        run.note(parameters={"policy": 3})
    before = listing(finished)
    with open_run(finished, resume=True) as run:
        run.begin()
        assert run.metadata["parameters"] == {"policy": 3}
    assert listing(finished) == before
    metadata = json.loads((finished / "metadata.json").read_text())
    assert [entry["step"] for entry in metadata["resumed"]] == [30, 30]


@pytest.mark.parametrize("killed_after", NAMES)
def test_a_run_killed_before_its_first_checkpoint_can_be_taken_up(tmp_path, killed_after):
    for number, flags in enumerate(FLAGS):
        directory = tmp_path / str(number)
        open_run(directory).close()
        for name in NAMES[NAMES.index(killed_after) + 1 :]:
            (directory / name).unlink()
        if killed_after == "metadata.json" and not flags:
            with pytest.raises(ConfigError, match="step 0: --resume"):
                open_run(directory)
        else:
            open_run(directory, **flags).close()
            assert listing(directory) == set(NAMES)


def changed(path, value):
    config = json.loads(json.dumps(CONFIG, default=str))
    *parents, name = path.split(".")
    node = config
    for parent in parents:
        node = node.setdefault(parent, {})
    node[name] = value
    return config


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("agent.optimizer.betas", [0.9, 0.999], r"agent.optimizer.betas: \[0.9, 0.95\] in the run, \[0.9, 0.999\] now"),
        ("env", {"name": "sort"}, "env: null in the run, absent now\n.*env.name: absent in the run, \"sort\" now"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused_field_by_field(finished, field, value, text):
    before = (finished / "metadata.json").read_bytes()
    with pytest.raises(ConfigError, match=text) as caught:
        open_run(finished, changed(field, value), resume=True)
    assert str(caught.value).count("in the run") == (2 if field == "env" else 1)
    assert (finished / "metadata.json").read_bytes() == before
    open_run(finished, resume=True).close()  # the lock was given back


@pytest.mark.parametrize(
    ("field", "value"), [("steps", 1000), ("checkpoints.keep_period", 5), ("data.repo_id", "elsewhere/fold_box")]
)
def test_what_changes_no_update_may_change(finished, field, value):
    before = (finished / "metadata.json").read_bytes()
    with open_run(finished, changed(field, value), resume=True, config_text="new\n") as run:
        assert (finished / "metadata.json").read_bytes() == before, "until it is known that it can go on"
        run.begin()
    assert (finished / "config.yaml").read_text() == "new\n"
    open_run(finished, changed(field, value), resume=True).close()


def test_unreadable_metadata_are_named(finished):
    for text, reason in (
        ("{", "cannot be read .*--overwrite"),
        ("{}", "its config or resumed is not what it should be"),
    ):
        (finished / "metadata.json").write_text(text)
        with pytest.raises(ConfigError, match=reason):
            open_run(finished, resume=True)
    open_run(finished, overwrite=True).close()


# --- one process at a time --------------------------------------------------------------------------------------------


def test_a_run_in_use_is_kept_from_others_until_its_process_ends_in_whatever_way(tmp_path):
    command = [sys.executable, "-c", OPEN, str(tmp_path / "x")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        before = listing(tmp_path)
        for flags in FLAGS:
            with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on .*--exp-name"):
                open_run(tmp_path / "x", {}, **flags)
        assert listing(tmp_path) == before
        process.send_signal(signal.SIGKILL)
        process.wait()
    open_run(tmp_path / "x", {}, resume=True).close()
