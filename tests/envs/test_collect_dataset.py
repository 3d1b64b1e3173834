"""A collected dataset says what happened, in the order of the starts, and goes on after a kill as if nothing had been."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fakes import CAMERA, MAX_STEPS, CorridorEnv, CorridorPool, Walker
from pirl.data import OutcomeConfig, check_dataset, open_dataset, read_outcomes
from pirl.envs.collect import LOG_FILE, CollectionLog, DatasetFormat, collect_dataset
from pirl.envs.rollout import make_starts
from pirl.errors import ConfigError, DataError
from python_path import python_path
from written import every_version, files_of, kill_this_process, read_episodes, stopped_at

DESCRIPTION = CorridorEnv().describe()
STARTS = make_starts(DESCRIPTION, 8, 0, None)
SEEDS = [start.seed for start in STARTS]
SETTINGS = {"policy": "walker", "env": {"id": "corridor", "options": {"length": 3}}, "seed": 0}
STANDS, FALLS = SEEDS[1:3], SEEDS[4:5]


def run(root, *, size=3, actor=None, loses=(), starts=STARTS, settings=SETTINGS, **options):
    actor = actor or Walker(STANDS, FALLS)
    return collect_dataset(
        CorridorPool(size, loses), actor, starts, root, execute_steps=2, settings=settings, **options
    )


def assert_same_dataset(root, whole):
    files, expected = files_of(root), files_of(whole)
    # What a kill left of the very first file; it is no part of the dataset.
    files = {name: content for name, content in files.items() if ".partial-" not in name}
    assert files == expected


@every_version
@pytest.mark.parametrize("storage", ["video", "image"])
def test_the_dataset_is_accepted_and_tells_how_each_episode_ended(tmp_path, version, storage):
    run(tmp_path, dataset_format=DatasetFormat(version, storage))
    dataset, problems = check_dataset(tmp_path, OutcomeConfig(), decode=True)
    assert not problems
    outcomes = read_outcomes(open_dataset(tmp_path), OutcomeConfig())
    assert outcomes.success.tolist() == [seed not in STANDS + FALLS for seed in SEEDS]
    ends = dataset.starts[1:] - 1
    # A time-out is no end; success and a true failure are.
    assert outcomes.terminals[ends].tolist() == [seed not in STANDS for seed in SEEDS]
    np.testing.assert_array_equal(outcomes.rewards[ends], outcomes.success)
    assert outcomes.rewards.sum() == outcomes.success.sum() == outcomes.terminals.sum() - 1
    np.testing.assert_array_equal(
        read_outcomes(open_dataset(tmp_path), OutcomeConfig("raw")).rewards, outcomes.rewards, "the reward is sparse"
    )


def test_frames_rows_and_tasks_are_those_of_the_episode(tmp_path):
    run(tmp_path, dataset_format=DatasetFormat(storage="image"))
    for start, read in zip(STARTS, read_episodes(tmp_path), strict=True):
        speed = 0.0 if start.seed in STANDS else -1.0 if start.seed in FALLS else 1.0
        goal = 3 + start.seed % 4
        length = {0.0: MAX_STEPS, -1.0: 2, 1.0: goal}[speed]
        steps = np.arange(length)
        np.testing.assert_array_equal(read["observation.state"][:, 0], steps * speed)
        np.testing.assert_array_equal(read["observation.state"][:, 1], goal)
        np.testing.assert_array_equal(np.ravel(read["action"]), np.full(length, speed))
        np.testing.assert_array_equal(read[CAMERA][:, 0, 0, 0], 20 * steps)
        assert read["next.done"].tolist() == [False] * (length - 1) + [True]
        assert set(read["task"]) == {f"{start.task} to the door"}


def test_episodes_lie_in_the_order_of_their_starts_whatever_order_they_finish_in(tmp_path):
    log = run(tmp_path / "many", size=8)
    run(tmp_path / "one", size=1)
    assert [episode.seed for episode in log.episodes] == SEEDS
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


def test_a_lost_episode_is_in_the_log_and_not_in_the_dataset(tmp_path):
    log = run(tmp_path, loses=[SEEDS[0], SEEDS[3], SEEDS[7]])
    assert log.written == open_dataset(tmp_path).episode_ids.size == 5
    logged = CollectionLog.read(tmp_path)
    assert logged == log
    assert [episode.index for episode in logged.episodes if episode.lost] == [0, 3, 7]
    assert logged.episodes[3].lost == "the floor gave way"


def test_steps_end_with_the_episode_in_which_they_are_reached_however_many_run_at_a_time(tmp_path):
    lengths = [episode.length for episode in run(tmp_path / "all").episodes]
    for wanted, episodes in ((sum(lengths[:3]), 3), (sum(lengths[:3]) + 1, 4), (1, 1), (10_000, 8)):
        for size in (1, 3, 8):
            root = tmp_path / f"{wanted}_{size}"
            log = run(root, size=size, env_steps=wanted)
            assert len(log.episodes) == open_dataset(root).episode_ids.size == episodes
            assert log.frames == sum(lengths[:episodes])
            assert log.complete
            # Nothing is added when it was killed before it could say that it was complete.
            run(root, size=size, env_steps=wanted, resume=True)
            assert_same_dataset(root, tmp_path / f"{wanted}_1")
    # What is lost is no step of the dataset; and more steps add to what is there.
    log = run(tmp_path / "lost", loses=SEEDS[:1], env_steps=sum(lengths[1:3]))
    assert [episode.lost is None for episode in log.episodes] == [False, True, True]
    run(tmp_path / "1_3", env_steps=sum(lengths[:3]), resume=True)
    assert_same_dataset(tmp_path / "1_3", tmp_path / f"{sum(lengths[:3])}_3")


@every_version
def test_a_run_that_ends_early_goes_on_to_the_same_files(tmp_path, version):
    form = DatasetFormat(version, "video")
    loses = SEEDS[2:4]
    run(tmp_path / "whole", dataset_format=form, loses=loses)
    for length in range(1, 8):
        part = tmp_path / f"part{length}"
        run(part, starts=STARTS[:length], dataset_format=form, loses=loses)
        run(part, size=2, dataset_format=form, loses=loses, resume=True)
        assert_same_dataset(part, tmp_path / "whole")
    assert not check_dataset(part, OutcomeConfig(), decode=True)[1]


def collect_and_die(root: str, version: str) -> None:
    """Collect again and again: the k-th time killed when the k-th file or line is about to appear, the last time not."""
    for step in range(100):
        if (child := os.fork()) == 0:
            form = DatasetFormat(version, "image")
            with stopped_at(step, kill_this_process):
                run(Path(f"{root}-{step:02d}"), starts=STARTS[3:6], dataset_format=form, loses=SEEDS[4:5])
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return


@pytest.mark.parametrize("version", ["v3.0", pytest.param("v2.1", marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_goes_on_to_the_same_files(tmp_path, version):
    program = (
        f"import test_collect_dataset; test_collect_dataset.collect_and_die({str(tmp_path / 'run')!r}, {version!r})"
    )
    paths = python_path(Path(__file__).parents[1], Path(__file__).parents[1] / "data")
    environment = os.environ | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True, env=environment)
    *killed, whole = sorted(tmp_path.iterdir())
    assert len(killed) > 10, "two episodes, a log entry for each of three, and the beginning and the end"
    for root in killed:
        log = run(
            root,
            size=2,
            starts=STARTS[3:6],
            dataset_format=DatasetFormat(version, "image"),
            loses=SEEDS[4:5],
            resume=True,
        )
        assert (log.written, len(log.episodes), log.complete) == (2, 3, True)
        assert_same_dataset(root, whole)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"policy": "runner"}, 'policy is "walker" there, and "runner" here'),
        ({"env": {"id": "corridor", "options": {"length": 4}}}, "env.options.length is 3 there, and 4 here"),
        ({"env": {"id": "corridor", "options": {}}}, "env.options.length is 3 there, and null here"),
        ({"seed": 1, "policy": "x"}, r"policy.*; seed is 0 there, and 1 here"),
    ],
)
def test_other_settings_are_refused_by_name_and_nothing_is_touched(tmp_path, changed, complaint):
    run(tmp_path, starts=STARTS[:3])
    before = files_of(tmp_path)
    with pytest.raises(DataError, match=complaint):
        run(tmp_path, settings=SETTINGS | changed, resume=True)
    assert files_of(tmp_path) == before


def test_a_directory_in_use_is_left_alone_unless_resumed(tmp_path):
    run(tmp_path, starts=STARTS[:3])
    before = files_of(tmp_path)
    with pytest.raises(DataError, match="is not empty: choose another directory, or --resume"):
        run(tmp_path)
    assert files_of(tmp_path) == before


def remove_log(root):
    (root / LOG_FILE).unlink()


def damage_log(root):
    (root / LOG_FILE).write_text('{"settings": {}')


def forget_an_episode(root):
    content = json.loads((root / LOG_FILE).read_text())
    content["episodes"].pop()
    (root / LOG_FILE).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [(remove_log, "did not make it"), (damage_log, "damaged"), (forget_an_episode, "knows of 2 only")],
)
def test_a_dataset_that_something_else_wrote_is_not_continued(tmp_path, damage, complaint):
    run(tmp_path, starts=STARTS[:3])
    damage(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(DataError, match=complaint):
        run(tmp_path, resume=True)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("field", ["state", "actions"])
def test_a_robot_with_several_columns_cannot_be_collected_for(tmp_path, field):
    robot = dataclasses.replace(DESCRIPTION.robot, **{field: ("joints", "gripper")})
    pool = CorridorPool(1, description=dataclasses.replace(DESCRIPTION, robot=robot))
    with pytest.raises(ConfigError, match=rf"several columns for its {field} \(joints, gripper\)"):
        collect_dataset(pool, Walker(), STARTS, tmp_path, execute_steps=2, settings={})
    assert not list(tmp_path.iterdir())
