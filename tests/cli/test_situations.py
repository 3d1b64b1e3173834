"""What happens with data that is not quite sound: every row of the table in docs/data.md, by the commands of a user."""

import csv
import itertools
import json
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pirl.data import OutcomeConfig, open_dataset, read_outcomes
from sample_datasets import build, edit_column, edit_data, edit_info, info_of, read_bars, set_episode
from sample_datasets.build import write_video

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
ANNEX = b"/annex/objects/SHA256E-s12345--00.parquet\n"
SITUATIONS = {}


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: " ".join(caplog.text.split())


def situation(*texts):
    """List a test as that of these rows of the table."""

    def register(test):
        SITUATIONS.update(dict.fromkeys(texts, test.__name__))
        return test

    return register


def episodes(setup):
    return len(setup.trajectories.starts)


def refused_and_skipped(run, warned, built, *texts):
    """Refused with a reason, by both commands; skipped on demand; and never missed where it is not selected."""
    code, said, _ = run.train(built)
    checked, found = run.data("check", built, "--robot", run.robot(built))
    assert (code, checked) == (2, 2), said
    for text in texts:
        assert text in said
        assert text in found
    advice = re.search(r"To train on the other \d+ episodes: (--\S+ \S+), or (--\S+ \S+)", found)
    assert advice is not None, found
    assert advice[0] in said
    for options in advice.groups():
        code, said, setup = run.train(built, *options.split())
        assert code == 0, said
        assert episodes(setup) == len(built.episodes) - 1
    assert "1 of 4 episodes are skipped" in warned()
    code, said = run.data("info", built)
    assert (code, "unknown" in said) == (0, False)
    robot, norm_stats = run.robot(built), built.root.parent / "norm_stats.json"
    assert run.data("stats", built, "--robot", robot, "--horizon", 10, "--output", norm_stats)[0] == 0
    assert run.data("label", built, "--failure", "0")[0] == 0
    copy = built.root.parent / "copy"
    assert run.data("drop", built, "--bad", "--robot", robot, "--out", copy)[0] == 0
    assert run.call("data", "check", copy, "--robot", robot)[0] == 0
    copied, kept = open_dataset(copy), [built.episodes[0], *built.episodes[2:]]
    assert read_outcomes(copied, OutcomeConfig()).success.tolist() == [0, 1, 0]
    np.testing.assert_array_equal(copied.columns(["action"])["action"], np.concatenate([e.action for e in kept]))
    for camera, (number, episode) in itertools.product(built.cameras, enumerate(kept)):
        seen = [read_bars(frame) for frame in copied.decode(camera, number)]
        assert seen == [read_bars(frame) for frame in episode.frames[camera]]
    assert run.data("label", built, "--success", "0", "--failure", "rest")[0] == 0
    assert run.data("drop", built, "--bad", "--robot", robot)[0] == 0
    assert run.data("check", built, "--robot", robot)[0] == 0
    assert run.train(built)[0] == 0


FOUR = {"lengths": (9, 7, 8, 6)}
# One file for each episode, also in v3.0.
ALONE = {"data_split": (1, 1, 1), "video_splits": ((1, 1, 1), (1, 1, 1))}


def shorten(built):
    """Files are named as they are on disk."""
    (built.root / "videos").rename(built.root / "video")
    episode, camera = built.episodes[1], built.cameras[1]
    file = Path(str(episode.video_files[camera]).replace("/videos/", "/video/"))
    write_video(file, episode.frames[camera][:-2], built.fps, built.codec)


def cut(file, start, content=b""):
    file.write_bytes(file.read_bytes()[:start] + content)


def undecodable(built):
    file = built.episodes[1].video_files[built.cameras[0]]
    start = file.read_bytes().index(b"mdat") + 4
    cut(file, start, b"\xff" * (file.stat().st_size - start))


def without_action(built):
    file = built.episodes[1].data_file
    pq.write_table(pq.read_table(file).drop_columns(["action"]), file)


# What happens to episode 1, and what is said of it.
BAD_EPISODES = {
    "a video is missing": (
        *("v2.1", lambda built: built.episodes[1].video_files[built.cameras[0]].unlink()),
        "the video file is missing",
    ),
    "a video has fewer frames than the data": (
        *("v3.0", shorten, ", video/observation.images.cam_left_wrist/chunk-000/file-001.mp4, column "),
        "observation.images.cam_left_wrist: needs 7 frames from frame 0 on; the video has 5 frames",
    ),
    "a video cannot be decoded": ("v2.1", undecodable, "observation.images.cam_high"),
    "a number of the state or action is NaN or infinite": (
        *("v3.0", lambda built: edit_column(built, "action", lambda rows: [*rows[:2], [0, np.nan, 0], *rows[3:]])),
        "column action: frame 2 is not finite",
    ),
    "a data file is damaged": (
        *("v2.1", lambda built: cut(built.episodes[1].data_file, -200)),
        ".parquet",
    ),
    "a data file lacks a column that others have": (
        *("v3.0", without_action),
        "is not in this file, though it is in others",
    ),
}
SITUATIONS |= dict.fromkeys(BAD_EPISODES)


@pytest.mark.parametrize("situation", BAD_EPISODES)
def test_a_bad_episode_is_refused_or_skipped(run, warned, tmp_path, situation):
    version, damage, *texts = BAD_EPISODES[situation]
    built = build(tmp_path / "data", version=version, codec="h264", **FOUR, **ALONE)
    damage(built)
    refused_and_skipped(run, warned, built, "episode 1", "".join(texts))


@situation("a video has more frames than the data", "time does not increase, or is that of the wall clock")
def test_more_frames_and_odd_times(run, tmp_path):
    built = build(tmp_path / "data", **FOUR)
    episode, camera = built.episodes[2], built.cameras[1]
    frames = episode.frames[camera]
    write_video(episode.video_files[camera], frames[[*range(len(frames)), 0, 0]], built.fps, built.codec)
    edit_column(built, "timestamp", lambda times: [0.3, 0.05, float("nan"), *times[3:]])
    code, said = run.data("check", built, "--robot", run.robot(built))
    assert code == 0
    assert "the video has more frames than the data; the first ones are used" in said
    assert "column timestamp: frame 1 is not later than the frame before" in said
    assert episodes(run.train(built)[2]) == 4


def test_more_than_half_of_the_episodes_are_not_skipped(run, tmp_path):
    built = build(tmp_path / "data", **FOUR)
    for episode in built.episodes[1:]:
        episode.video_files[built.cameras[0]].unlink()
    code, said, _ = run.train(built, "--data.bad-episodes", "skip")
    assert code == 2
    assert "episodes 1-3, videos/" in said, "one line for all"
    assert "More than half of the episodes would be skipped" in said
    advice = re.search(r"To train on the other 1 episode: (--\S+) (\S+)", said)
    assert episodes(run.train(built, *advice.groups())[2]) == 1


@situation("a file is a pointer of Git LFS or git-annex")
@pytest.mark.parametrize("what", ["video", "data", "info", "episodes", "link"])
def test_pointers(run, tmp_path, what):
    pointer, command = (ANNEX, "git annex get .") if what in ("data", "link") else (LFS, "git lfs pull")
    built = build(tmp_path / "data", **FOUR)
    camera = built.cameras[0]
    files = {
        "video": [episode.video_files[camera] for episode in built.episodes],
        "data": [episode.data_file for episode in built.episodes],
        "info": [built.root / "meta" / "info.json"],
        "episodes": [built.root / "meta" / "episodes.jsonl"],
        "link": [episode.video_files[camera] for episode in built.episodes],
    }[what]
    for file in files:
        file.unlink()
        if what == "link":
            file.symlink_to("../../../.git/annex/objects/aa/SHA256E-s12345--00.mp4")
        else:
            file.write_bytes(pointer)
    for code, said in (run.data("check", built), run.train(built)[:2]):
        assert code == 2
        assert command in said
        assert said.count("in the dataset's directory") == 1, "once for all files"


@situation("`next.done` is true on several frames up to the last", "`next.done` is true amid an episode")
def test_done_before_the_last_frame(run, warned, tmp_path):
    built = build(tmp_path / "data", cameras="none", **FOUR)
    for episode, length in enumerate(FOUR["lengths"]):
        edit_column(built, "next.done", lambda _, n=length: [i >= n - 3 for i in range(n)], episode=episode)
    code, said = run.data("check", built)
    assert code == 0
    assert said.count("marks several frames up to the last as the end") == 1
    data = run.train(built)[2].trajectories
    assert data.ends.tolist() == np.cumsum([9, 7, 8, 6]).tolist()
    assert data.terminals[data.ends - 1].all()
    edit_column(built, "next.done", lambda marks: [index == 2 for index in range(len(marks))])
    code, said = run.data("check", built)
    assert code == 2
    assert "frame 2 is marked as the end, but the episode goes on: label it (pirl data label)" in said
    table = tmp_path / "outcomes.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("episode", "success"), (1, "false")])
    assert run.data("label", built, "--csv", table)[0] == 0
    assert run.data("check", built)[0] == 0
    assert episodes(run.train(built)[2]) == 4
    (built.root / "meta" / "pirl_labels.jsonl").unlink()
    refused_and_skipped(run, warned, built, "episode 1", "frame 2 is marked as the end")


@situation("a camera that the robot does not use is absent or damaged")
def test_unused_camera(run, tmp_path):
    built = build(tmp_path / "data", **FOUR)
    high, wrist = built.cameras
    edit_info(built, ["features", "observation.images.ghost"], info_of(built)["features"][high])
    built.episodes[1].video_files[wrist].unlink()
    robot = {"cameras": {"base_0_rgb": high}}
    code, said = run.data("check", built, "--robot", run.robot(built, **robot))
    assert code == 0
    assert "1 of 4 episodes of this camera cannot be read; robot arm does not use it" in said
    assert "episodes of this camera cannot be read; robot arm does not use it" in said
    assert episodes(run.train(built, **robot)[2]) == 4
    code, said = run.data("check", built)
    assert code == 2, "without a robot, all cameras of which there is anything count"
    assert "episodes of this camera cannot be read; leave it out of the robot's cameras" in said


@situation("a dimension never changes")
def test_constant_dimension(run, warned, tmp_path):
    built = build(tmp_path / "data", cameras="none", **FOUR)
    for episode in range(4):
        edit_column(built, "observation.state", lambda rows: [[*row[:3], 0.5] for row in rows], episode=episode)
    code, said = run.data("check", built)
    assert code == 0
    assert "note: column observation.state: observation.state dimension 3 (joint_3) never changes" in said
    setup = run.train(built)[2]
    assert "state dimension 3 never changes" in warned()
    stats = setup.norm_stats["arm"]["state"]
    assert stats.std[3] == np.median(stats.std[:3])
    assert np.abs(setup.policy_io.observation({}, np.full((1, 4), 0.6), ["go"]).state[0, 3]) < 1
    file = tmp_path / "stats" / "norm_stats.json"
    assert run.data("stats", built, "--robot", run.robot(built), "--horizon", 10, "--output", file)[0] == 0
    content = json.loads(file.read_text())
    content["norm_stats"]["state"]["std"][3] = 7.0
    file.write_text(json.dumps(content))
    for place in (file, file.parent):
        given = run.train(built, "--data.norm-stats", place)[2]
        assert given.norm_stats["arm"]["state"].std[3] == 7.0
    code, said, _ = run.train(built, "--data.norm-stats", tmp_path / "nowhere")
    assert code == 2
    assert "neither dataset nor checkpoint nor the path of a norm_stats.json" in said


@situation("frames follow the success, are not selected, or held out")
def test_statistics_are_of_what_is_trained_on(run, tmp_path):
    built = build(tmp_path / "data", cameras="none", **FOUR)
    edit_column(built, "next.success", lambda marks: [index >= 3 for index in range(len(marks))], episode=0)
    shifted = [
        [row[0] + (100 if index > 3 else 0), *row[1:]] for index, row in enumerate(built.episodes[0].state.tolist())
    ]
    edit_column(built, "observation.state", lambda _: shifted, episode=0)
    edit_column(built, "observation.state", lambda rows: [[1000.0] * 4 for _ in rows], episode=1)
    setup = run.train(built, "--data.selection.success", "true")[2]
    used = np.concatenate([built.episodes[0].state[:4], built.episodes[2].state])
    np.testing.assert_allclose(setup.norm_stats["arm"]["state"].mean, used.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(setup.norm_stats["arm"]["state"].std, used.std(axis=0), rtol=1e-6)
    held_out = run.train(built, "--data.validation-fraction", 0.5, "--validation-every", 10)[2]
    data = held_out.trajectories
    spans = zip(data.starts.tolist(), data.ends.tolist(), strict=True)
    rows = [data.states[start:end] for start, end in spans if held_out.weights[start]]
    np.testing.assert_allclose(held_out.norm_stats["arm"]["state"].mean, np.concatenate(rows).mean(0), rtol=1e-5)


@situation("`videos/` or `data/` lies on another disk, behind a link")
def test_links_are_followed_and_never_written_through(run, tmp_path):
    from pirl.data import DatasetWriter
    from pirl.errors import DataError

    built = build(tmp_path / "data", version="v3.0", **FOUR)
    disk = tmp_path / "disk"
    disk.mkdir()
    for name in ("videos", "data"):
        shutil.move(built.root / name, disk / name)
        (built.root / name).symlink_to(disk / name)
    before = {path: path.stat().st_mtime_ns for path in disk.rglob("*")}
    assert run.data("check", built, "--robot", run.robot(built))[0] == 0
    assert episodes(run.train(built)[2]) == 4
    assert {path: path.stat().st_mtime_ns for path in disk.rglob("*")} == before
    features = {"action": {"dtype": "float32", "shape": (1,)}}
    with pytest.raises(DataError, match="is a link out of the dataset: files there are read, never written"):
        DatasetWriter(built.root, fps=10, features=features, resume=True)
    shutil.move(built.root / "meta", disk / "meta")
    (built.root / "meta").symlink_to(disk / "meta")
    code, said = run.data("check", built)
    assert code == 2
    assert "only links in data/ and videos/ are followed" in said


@situation("the last actions are absolute, and the state has no such dimensions")
def test_mask_longer_than_the_state(run, tmp_path):
    built = build(tmp_path / "data", cameras="none", state_dim=2, action_dim=3, **FOUR)
    setup = run.train(built, delta=[2, -1])[2]
    io = setup.policy_io
    state, actions = built.episodes[0].state[:1], built.episodes[0].action[None, :3]
    np.testing.assert_allclose(io.robot_actions(io.actions(actions, state), state), actions, atol=1e-5)


@situation("rewards are neither 0 and 1 nor costs, such as 0 and 100 or of several stages")
def test_rewards_with_a_threshold(run, tmp_path):
    built = build(tmp_path / "data", rewards="recap", cameras="none", **FOUR)
    for episode, truth in enumerate(built.episodes):
        rewards = [0.0, 25.0, *[50.0] * (len(truth) - 3), 100.0 if episode % 2 == 0 else 50.0]
        edit_column(built, "next.reward", lambda _, rewards=rewards: rewards, episode=episode)
    code, said = run.data("check", built)
    assert code == 2
    assert "which go from 0 to 100" in said
    assert "set success_threshold to the reward from which on it is a success (perhaps 100)" in said
    assert run.data("check", built, "--success-threshold", 100)[0] == 0
    setup = run.train(built, "--data.outcomes.success-threshold", 100)[2]
    assert setup.trajectories.success.tolist() == [1, 0, 1, 0]
    raw = run.train(built, "--data.outcomes.reward", "raw")[2]
    assert raw.trajectories.rewards.max() == 100


@situation("outcomes are in a column of another name")
def test_columns_of_other_names(run, tmp_path):
    built = build(tmp_path / "data", rewards="success", cameras="none", **FOUR)
    names = {"next.success": "outcome"}
    edit_data(built, lambda table: table.rename_columns([names.get(name, name) for name in table.column_names]))
    code, said = run.data("check", built)
    assert code == 2
    assert "though outcome may tell: set success_column to the column that is 1 at success" in said
    for options in (("--data.outcomes.success-column", "outcome"), ("--data.outcomes.reward-column", "outcome")):
        assert run.train(built, *options)[2].trajectories.success.tolist() == [1, 0, 1, 0]
    threshold = ("--data.outcomes.reward-column", "outcome", "--data.outcomes.success-threshold", 0.5)
    assert run.train(built, *threshold)[2].trajectories.success.tolist() == [1, 0, 1, 0]


@situation("nothing tells how episodes ended", "an episode was removed, and its label is still there")
def test_demonstrations(run, tmp_path):
    built = build(tmp_path / "data", rewards="none", cameras="none", **FOUR)
    code, said = run.data("check", built)
    assert code == 2
    assert "label them (pirl data label) or, for plain demonstrations, set unlabeled to success" in said
    assert run.train(built)[0] == 2
    assert run.train(built, "--data.outcomes.unlabeled", "success")[2].trajectories.success.all()
    assert run.data("label", built, "--success", "0-1", "--failure", "rest")[0] == 0
    assert run.train(built)[2].trajectories.success.tolist() == [1, 1, 0, 0]
    with (built.root / "meta" / "pirl_labels.jsonl").open("a") as file:
        file.write(json.dumps({"episode": 9, "success": True}))
    code, said = run.data("check", built)
    assert code == 0
    assert "note: episode 9, meta/pirl_labels.jsonl: is labeled but not in the data" in said


@situation("a small file unpacks to far more than is declared")
@pytest.mark.parametrize("column", ["episode_index", "action"])
def test_a_file_that_unpacks_to_gigabytes(run, tmp_path, column):
    built = build(tmp_path / "data", cameras="none", **FOUR)
    rows = 3_000_000 if column == "episode_index" else 7
    width = 3 if column == "episode_index" else 1_000_000
    table = pq.read_table(built.episodes[1].data_file).slice(0, 1).take([0] * min(rows, 7))
    columns = {name: table[name] for name in table.column_names if name != "action"}
    if column == "episode_index":
        columns = {name: pa.array(np.ones(rows, np.int64)) for name in ("episode_index", "frame_index")}
    else:
        columns |= {"frame_index": pa.array(np.arange(7))}
    columns["action"] = pa.array([[0.0] * width] * min(rows, 7), pa.list_(pa.float32())).take([0] * rows)
    pq.write_table(pa.table(columns), built.episodes[1].data_file)
    code, said = run.data("check", built)
    assert code == 2
    assert "far more than are declared" in said
    assert episodes(run.train(built, "--data.bad-episodes", "skip")[2]) == 3


@situation("a column marks what a human chose")
def test_corrections(run, tmp_path):
    built = build(tmp_path / "data", rewards="success", cameras="none", lengths=(9, 20))
    edit_column(built, "intervention", lambda marks: [index >= 5 for index in range(len(marks))], episode=1)
    edit_column(built, "intervention", lambda marks: [False for _ in marks], episode=0)
    assert "15 frames in 1 episodes by a human (intervention)" in run.data("info", built)[1]
    setup = run.train(built)[2]
    assert setup.weights.all()
    assert setup.trajectories.human.sum() == 15
    setup = run.train(built, "--data.selection.human", "true")[2]
    assert np.flatnonzero(setup.weights).tolist() == list(range(9 + 5, 9 + 20))


@situation("states, actions or prompts are longer than the model takes")
@pytest.mark.parametrize("shape", [(14, 14, 30), (3, 12, 4)])
def test_sizes_of_the_model(run, tmp_path, shape):
    state_dim, action_dim, words = shape
    tasks = (" ".join(["pick"] * words),)
    built = build(tmp_path / "data", state_dim=state_dim, action_dim=action_dim, tasks=tasks, **FOUR)
    code, said, _ = run.train(built, "--model.action-dim", 8, "--model.max-token-len", 16)
    assert code == 2
    assert "frame cache" not in said, "before anything is decoded"
    options = re.findall(r"set (--model\.[a-z-]+) (\d+)", said)
    assert ("--model.action-dim", str(max(state_dim, action_dim))) in options
    assert (len(options) == 2) == (words > 15)
    for given in ((), [word for option in options for word in option]):
        code, said, setup = run.train(built, *given)
        assert code == 0, said
        assert ("sized for the data: model.action_dim" in said) == (not given)
        assert setup.trajectories.actions.shape[1] == action_dim
        assert [setup.config.model.action_dim, setup.config.model.max_token_len][: len(options)] == [
            int(size) for _, size in options
        ]


def test_one_bad_episode_in_a_shared_file_leaves_the_others(run, tmp_path):
    """A video of several episodes that has lost its last frames, and a start time that is that of no frame."""
    built = build(tmp_path / "data", version="v3.0", video_splits=((), ()), data_split=(), **FOUR)
    camera = built.cameras[0]
    frames = np.concatenate([episode.frames[camera] for episode in built.episodes])
    write_video(built.episodes[0].video_files[camera], frames[:-2], built.fps, built.codec)
    set_episode(built, f"videos/{camera}/from_timestamp", 0.937, 1)
    code, said, setup = run.train(built, "--data.bad-episodes", "skip")
    assert code == 0, said
    assert episodes(setup) == 2
    code, said = run.data("check", built)
    assert "episode 3" in said
    assert "needs 6 frames from frame 24 on" in said
    assert "episode 1" in said
    assert "is that of no frame" in said


def test_the_table_in_the_documentation_has_a_test_for_every_row():
    section = DOCS.read_text().split("### Data that is not quite sound\n")[1].split("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert {row.split("|")[1].strip() for row in rows} == set(SITUATIONS)
