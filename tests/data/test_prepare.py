"""From a dataset on disk to batches: the robot's own columns, its statistics, its images, its tasks, its outcomes."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest

from pirl.data import (
    ChunkIndexSampler,
    ChunkSampler,
    ChunkShape,
    Dataset,
    DatasetSource,
    Loader,
    OutcomeConfig,
    PolicyIO,
    Robot,
    Selection,
    compute_norm_stats,
    dataset_norm_stats,
    get_robot,
    load_trajectories,
    open_dataset,
    read_outcomes,
)
from pirl.errors import ConfigError, DataError
from pirl.models import Tokenizer, get_model_config
from sample_datasets import build, edit_column, edit_data, edit_info, read_bars, set_episode

TINY = get_model_config("tiny")
HIGH, WRIST = "observation.images.cam_high", "observation.images.cam_left_wrist"
ARM = Robot(
    "arm",
    cameras={"base_0_rgb": HIGH, "left_wrist_0_rgb": WRIST},
    state=("observation.state",),
    actions=("action",),
)
BLIND = dataclasses.replace(ARM, cameras={})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_decoding(monkeypatch):
    def fail(*_):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(Dataset, "decode", fail)


def stacked(built, name):
    return np.concatenate([getattr(episode, name) for episode in built.episodes])


def starts_of(built):
    return np.cumsum([0, *(len(episode) for episode in built.episodes)])


# --- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "delta"), [("v2.1", ()), ("v3.0", (2, -1))])
@pytest.mark.usefixtures("no_decoding")
def test_statistics_are_those_of_the_columns_and_need_no_pictures(tmp_path, version, delta):
    built = build(tmp_path / "dataset", version=version)
    robot = dataclasses.replace(ARM, delta=delta)
    mask = np.array([True, True, False]) if delta else None
    expected = compute_norm_stats(
        stacked(built, "state").astype(float), stacked(built, "action").astype(float), starts_of(built), 4, mask
    )
    assert dataset_norm_stats(open_dataset(built.root), robot, 4) == expected


def test_statistics_of_aloha_are_of_what_the_policy_sees(tmp_path):
    """Every chunk of every frame, prepared for a policy without statistics: their mean and spread."""
    built = build(tmp_path / "dataset", cameras="none", state_dim=14, action_dim=14)
    robot = dataclasses.replace(get_robot("aloha"), cameras={})
    stats = dataset_norm_stats(open_dataset(built.root), robot, 5)
    model = dataclasses.replace(get_model_config("tiny_state"), action_dim=14)
    io = PolicyIO(robot, model, None, None)
    chunks, states = [], []
    for episode in built.episodes:
        for t in range(len(episode)):
            steps = np.minimum(t + np.arange(5), len(episode) - 1)
            chunks.append(io.actions(episode.action[steps][None], episode.state[t][None])[0])
            states.append(io.observation({}, episode.state[t][None]).state[0])
    for key, values in (("actions", np.concatenate(chunks)), ("state", np.array(states))):
        np.testing.assert_allclose(stats[key].mean, values.mean(axis=0, dtype=float), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(stats[key].std, values.std(axis=0, dtype=float), rtol=1e-5, atol=1e-6)
        assert np.all((values >= stats[key].q01 - 1e-5).mean(axis=0) >= 0.98)


def test_columns_are_put_together_in_the_robots_order(tmp_path):
    built = build(tmp_path / "dataset", cameras="none")

    def split(table):
        both = np.array(table["observation.state"].to_pylist(), np.float32)
        table = table.drop_columns(["observation.state"]).append_column("gripper", pa.array(both[:, 3]))
        return table.append_column("joints", pa.array(both[:, :3].tolist(), pa.list_(pa.float32(), 3)))

    whole = open_dataset(build(tmp_path / "whole", cameras="none").root)
    edit_data(built, split)
    edit_info(built, ["features", "observation.state"], ...)
    dataset = open_dataset(built.root)
    joined = dataclasses.replace(BLIND, state=("joints", "gripper"), state_dim=4)
    assert dataset_norm_stats(dataset, joined, 3) == dataset_norm_stats(whole, BLIND, 3)
    turned = dataclasses.replace(BLIND, state=("gripper", "joints"))
    states = load_trajectories(dataset, turned, get_model_config("tiny_state")).states
    np.testing.assert_array_equal(states, stacked(built, "state")[:, [3, 0, 1, 2]])


def test_statistics_are_computed_once_for_the_same_content(tmp_path, cache):
    built = build(tmp_path / "dataset", cameras="none")
    first = dataset_norm_stats(open_dataset(built.root), BLIND, 4)
    (file,) = (path for path in cache.rglob("*") if path.is_file())
    kept = json.loads(file.read_text())
    kept["norm_stats"]["state"]["mean"][0] = 42.0
    file.write_text(json.dumps(kept))
    # The same data elsewhere, in another version: found in the cache, so what was planted there comes back.
    same = build(tmp_path / "elsewhere", version="v3.0", cameras="none")
    assert dataset_norm_stats(open_dataset(same.root), BLIND, 4)["state"].mean[0] == 42
    # Anything else has its own.
    others = [(BLIND, 5), (dataclasses.replace(BLIND, delta=(3,)), 4), (dataclasses.replace(BLIND, delta=(2, -1)), 4)]
    for robot, horizon in others:
        assert dataset_norm_stats(open_dataset(built.root), robot, horizon)["state"].mean[0] == first["state"].mean[0]
    edit_column(built, "action", lambda rows: [[0.5, 0.5, 0.5], *rows[1:]])
    assert dataset_norm_stats(open_dataset(built.root), BLIND, 4)["state"].mean[0] == first["state"].mean[0]


def test_a_robot_that_does_not_fit_the_data_is_told_what_it_has(tmp_path):
    built = build(tmp_path / "dataset", cameras="none")
    edit_data(built, lambda table: table.append_column("note", pa.array(["fine"] * table.num_rows)))
    dataset = open_dataset(built.root)
    for changes, texts in (
        ({"state": ("joint_position", "observation.state")}, ["joint_position", "observation.state", "'arm'"]),
        ({"state_dim": 8}, ["observation.state", "4", "8"]),
        ({"action_dim": 7}, ["action", "3", "7"]),
        ({"state": ("note",)}, ["note", "number"]),
    ):
        robot = dataclasses.replace(BLIND, **changes)
        for use in (
            lambda robot=robot: dataset_norm_stats(dataset, robot, 4),
            lambda robot=robot: load_trajectories(dataset, robot, get_model_config("tiny_state")),
        ):
            with pytest.raises(DataError) as caught:
                use()
            for text in [*texts, dataset.name]:
                assert text in str(caught.value)


def test_numbers_that_are_none_are_named(tmp_path):
    built = build(tmp_path / "dataset", cameras="none")
    edit_column(built, "action", lambda rows: [*rows[:2], [0.0, float("inf"), 0.0], *rows[3:]])
    with pytest.raises(DataError, match=r"actions: row 9 \(episode 1, frame 2\), dimension 1 is inf"):
        dataset_norm_stats(open_dataset(built.root), BLIND, 4)
    with pytest.raises(DataError, match="not finite: see pirl data check"):
        load_trajectories(open_dataset(built.root), BLIND, get_model_config("tiny_state"))


# --- trajectories ---------------------------------------------------------------------------------------------------


def test_a_robot_has_words_for_data_without_a_task(tmp_path):
    dataset = open_dataset(build(tmp_path / "dataset", cameras="none", tasks=("pick it up", "")).root)
    prompted = dataclasses.replace(BLIND, default_prompt="do the usual")
    found = load_trajectories(dataset, prompted, TINY)
    said = [found.prompts[prompt] for prompt in found.prompt_of_row[dataset.starts[:-1]]]
    assert said == ["pick it up", "do the usual", "pick it up"]
    # A model that reads nothing needs no words.
    assert len(load_trajectories(dataset, BLIND, get_model_config("tiny_state")).prompts) == 2


# --- selection ------------------------------------------------------------------------------------------------------


@pytest.fixture
def four(tmp_path):
    """Episodes of 7, 5, 9 and 3 frames: task A, B, A, B; success, failure, success, failure."""
    dataset = open_dataset(build(tmp_path / "four", cameras="none", lengths=(7, 5, 9, 3), tasks=("A", "B")).root)
    return dataset, read_outcomes(dataset, OutcomeConfig())


def test_filters_and_weights(four):
    for selection, expected in (
        ({}, [1, 1, 1, 1]),
        ({"tasks": ("A",)}, [1, 0, 1, 0]),
        ({"success": True}, [1, 0, 1, 0]),
        ({"success": False}, [0, 1, 0, 1]),
        ({"episodes": (0, 3)}, [1, 0, 0, 1]),
        ({"episodes": (0, 3), "success": False}, [0, 0, 0, 1]),
        ({"success_weight": 3.0, "failure_weight": 0.5}, [3, 0.5, 3, 0.5]),
        ({"task_weights": {"B": 4.0}, "failure_weight": 0.5, "episodes": (1, 2)}, [0, 2, 1, 0]),
    ):
        weights = Selection(**selection).weights(*four)
        np.testing.assert_array_equal(weights, np.repeat(expected, [7, 5, 9, 3]))


def test_a_fraction_of_successes_is_met_however_many_there_are(four):
    succeeded = np.repeat([True, False, True, False], [7, 5, 9, 3])  # of 24 rows, 16
    for selection, expected in (
        ({"success_fraction": 0.5}, [0.5, 1, 0.5, 1]),
        ({"success_fraction": 2 / 3}, [1, 1, 1, 1]),
        # Other weights still count, among the successes and among the failures.
        ({"success_fraction": 0.5, "success_weight": 7.0, "failure_weight": 1.0}, [0.5, 1, 0.5, 1]),
        ({"success_fraction": 0.5, "episodes": (0, 1)}, [5 / 7, 1, 0, 0]),
        ({"success_fraction": 0.5, "success": True}, [1, 0, 1, 0]),
    ):
        weights = Selection(**selection).weights(*four)
        np.testing.assert_allclose(weights, np.repeat(expected, [7, 5, 9, 3]), rtol=1e-12)
        if 0 < weights[succeeded].sum() < weights.sum():
            assert weights[succeeded].sum() / weights.sum() == pytest.approx(selection["success_fraction"])
    for fraction in (0.0, 1.0):
        with pytest.raises(ConfigError, match="success_fraction should be between 0 and 1"):
            Selection(success_fraction=fraction)


def test_tasks_are_those_of_the_frames(tmp_path):
    built = build(tmp_path / "dataset", cameras="none", tasks=("A", "B"), switch_task=True)
    dataset = open_dataset(built.root)
    weights = Selection(tasks=("A",)).weights(dataset, read_outcomes(dataset, OutcomeConfig()))
    assert weights.astype(bool).tolist() == [task == "A" for episode in built.episodes for task in episode.tasks]


def test_selections_that_cannot_be_met_are_named(four):
    for selection, texts in (
        ({"tasks": ("A", "C")}, ["'C'", "'A'", "'B'"]),
        ({"task_weights": {"C": 2.0}}, ["'C'", "'A'", "'B'"]),
        ({"episodes": (0, 4)}, ["episode 4"]),
        ({"tasks": ("A",), "success": False}, ["leave nothing", "tasks=('A',)"]),
    ):
        with pytest.raises(ConfigError) as caught:
            Selection(**selection).weights(*four)
        for text in [*texts, four[0].name]:
            assert text in str(caught.value)


# --- all the way ----------------------------------------------------------------------------------------------------


def batches(dataset, robot, horizon=3, chunk=5, count=8, steps=3, **options):
    stats = dataset_norm_stats(dataset, robot, chunk)
    tokenizer = Tokenizer.for_model(TINY)
    found = load_trajectories(dataset, robot, TINY, progress=False, **options)
    source = DatasetSource(found, ChunkIndexSampler(found, seed=0), PolicyIO(robot, TINY, stats, tokenizer))
    with Loader(ChunkSampler([source], batch_size=count, shape=ChunkShape(horizon, chunk))) as loader:
        return stats, [next(loader) for _ in range(steps)]


def test_a_v21_video_dataset_all_the_way_to_the_batch(tmp_path):
    """Pictures in the model's own size still show their bars, which say what everything else should be."""
    built = build(tmp_path / "dataset", version="v2.1", size=(56, 56), switch_task=True)
    stats, taken = batches(open_dataset(built.root), ARM)
    tokenizer, seen = Tokenizer.for_model(TINY), set()
    for batch in taken:
        for place in range(8):
            now, later = batch.observations, batch.next_observations
            camera, number, t = read_bars(np.asarray(now.images["base_0_rgb"][place]))
            assert camera == 0
            seen.add((number, t))
            episode = built.episodes[number]
            end = len(episode) - 1
            after = min(t + 3, end)
            assert read_bars(np.asarray(now.images["left_wrist_0_rgb"][place])) == (1, number, t)
            assert read_bars(np.asarray(later.images["base_0_rgb"][place])) == (0, number, after)
            for observation, frame in ((now, t), (later, after)):
                state = (episode.state[frame] - stats["state"].mean) / (stats["state"].std + 1e-6)
                np.testing.assert_allclose(observation.state[place], [*state, 0, 0, 0, 0], rtol=1e-5, atol=1e-6)
                tokens, mask = tokenizer(episode.tasks[frame])
                assert observation.tokenized_prompt[place].tolist() == tokens.tolist()
                assert observation.tokenized_prompt_mask[place].tolist() == mask.tolist()
            steps = np.minimum(t + np.arange(5), end)
            actions = (episode.action[steps] - stats["actions"].mean) / (stats["actions"].std + 1e-6)
            np.testing.assert_allclose(batch.actions[place, :, :3], actions, rtol=1e-5, atol=1e-6)
            assert not np.any(batch.actions[place, :, 3:])
            assert batch.valid[place].tolist() == (t + np.arange(5) <= end).tolist()
            reached = t + np.arange(3) == end
            assert batch.rewards[place].tolist() == (reached & episode.succeeded).tolist()
            assert batch.terminals[place].tolist() == reached.tolist()
            assert bool(batch.success[place]) == episode.succeeded
    assert len(seen) == 21  # every frame once before any comes again


def test_what_comes_after_a_success_is_never_sampled(tmp_path):
    built = build(tmp_path / "dataset", cameras="none")
    edit_column(built, "next.success", lambda values: [False, True, False, False, False])
    set_episode(built, "success", True)
    dataset = open_dataset(built.root)
    found = load_trajectories(dataset, BLIND, TINY)
    assert (found.ends - found.starts).tolist() == [7, 2, 9]
    stream = ChunkIndexSampler(
        found, seed=0, weights=Selection().weights(dataset, read_outcomes(dataset, OutcomeConfig()))
    )
    assert set(stream.take(0, 3 * stream.size).tolist()) == {*range(9), *range(12, 21)}
