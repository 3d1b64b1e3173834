"""Outcomes: every convention of recording success, reward and ends gives the same answer; silence is not guessed at."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.data import (
    BrokenDatasetError,
    Label,
    OutcomeConfig,
    Selection,
    check_dataset,
    open_dataset,
    read_outcomes,
    summarize,
    write_labels,
)
from pirl.errors import DataError
from sample_datasets import build, edit_table, set_episode

REWARDS = ("sparse", "step_penalty", "raw")


def recorded(root, columns=None, *, lengths=None, labels=(), version="v2.1", types=None):
    """An opened dataset without cameras whose episodes have these columns (by name, then episode) and labels."""
    columns = columns or {}
    if lengths is None:
        lengths = [len(values) for values in next(iter(columns.values()))]
    built = build(root, version=version, lengths=lengths, cameras="none", rewards="none", data_split=[1] * len(lengths))
    for number, episode in enumerate(built.episodes):
        edit_table(
            episode.data_file,
            lambda table, number=number: _with_columns(table, {k: v[number] for k, v in columns.items()}, types or {}),
        )
    write_labels(built.root, {label.episode: label for label in labels})
    return open_dataset(built.root)


def _with_columns(table, columns, types):
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values, types.get(name)))
    return table


def per_episode(dataset, values, ends=None):
    stops = dataset.starts[1:] if ends is None else ends
    return [values[start:stop].tolist() for start, stop in zip(dataset.starts[:-1], stops, strict=True)]


def ended(outcomes):
    """Whether each episode truly ended (rather than ran out of time)."""
    return outcomes.terminals[outcomes.ends - 1].tolist()


def complaint(dataset, config=None):
    with pytest.raises(BrokenDatasetError) as caught:
        read_outcomes(dataset, config or OutcomeConfig())
    return str(caught.value)


# --- the conventions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["next", "hilserl", "success", "is_success", "dense", "recap"])
def test_every_convention_tells_success_rewards_and_ends(tmp_path, convention):
    version = "v3.0" if convention in ("next", "recap") else "v2.1"
    built = build(tmp_path, version=version, cameras="none", rewards=convention)
    dataset = open_dataset(built.root)
    for reward in REWARDS:
        outcomes = read_outcomes(dataset, OutcomeConfig(reward=reward))
        assert outcomes.success.tolist() == [int(episode.succeeded) for episode in built.episodes] == [1, 0, 1]
        assert outcomes.ends.tolist() == dataset.starts[1:].tolist()
        for episode, rewards in zip(built.episodes, per_episode(dataset, outcomes.rewards), strict=True):
            last = [0] * (len(episode) - 1) + [int(episode.succeeded)]
            raw = last if episode.reward is None else episode.reward.tolist()
            assert rewards == {"sparse": last, "step_penalty": [r - 1 for r in last], "raw": raw}[reward]
        # Every `done` is True at the end, which says nothing: failures time out only where failing early would pay.
        assert ended(outcomes) == [True, reward != "step_penalty", True]
        assert outcomes.terminals.sum() == sum(ended(outcomes))
        assert outcomes.rewards.dtype == np.float32
        assert outcomes.notes == []


def test_plain_demonstrations_are_successes_only_if_asked(tmp_path):
    dataset = open_dataset(build(tmp_path, cameras="none", rewards="none").root)
    for reward in REWARDS:
        assert "3 episodes say nothing about success" in complaint(dataset, OutcomeConfig(reward=reward))
        outcomes = read_outcomes(dataset, OutcomeConfig(reward=reward, unlabeled="success"))
        assert outcomes.success.tolist() == [1, 1, 1]
        assert ended(outcomes) == [True] * 3
        step = -1 if reward == "step_penalty" else 0
        assert per_episode(dataset, outcomes.rewards) == [[step] * (n - 1) + [step + 1] for n in (7, 5, 9)]


def test_success_may_stand_in_the_episode_metadata(tmp_path):
    for number, (version, key, yes, no) in enumerate(
        [
            ("v2.1", "success", True, False),
            ("v2.1", "is_episode_successful", 1, 0),
            ("v3.0", "next.success", 1.0, 0.0),
            ("v3.0", "episode_success", "True", "FAILED "),
        ]
    ):
        built = build(tmp_path / str(number), version=version, cameras="none", rewards="none")
        for episode, succeeded in enumerate([False, True, False]):
            set_episode(built, key, yes if succeeded else no, episode)
        outcomes = read_outcomes(open_dataset(built.root), OutcomeConfig())
        assert outcomes.success.tolist() == [0, 1, 0]
        assert outcomes.rewards.nonzero()[0].tolist() == [7 + 5 - 1]


def test_a_success_column_goes_before_metadata_and_metadata_before_rewards(tmp_path):
    for number, (column, expected) in enumerate([("is_success", [1, 0]), ("next.reward", [0, 1])]):
        built = build(tmp_path / str(number), cameras="none", rewards="none", lengths=(2, 2))
        for episode, values in enumerate([[1, 1], [0, 0]]):
            new = {column: values}
            edit_table(built.episodes[episode].data_file, lambda table, new=new: _with_columns(table, new, {}))
            set_episode(built, "success", not values[0], episode)
        assert read_outcomes(open_dataset(built.root), OutcomeConfig()).success.tolist() == expected


def test_an_episode_of_droid_says_on_every_frame_whether_it_succeeded(tmp_path):
    """LeRobot's port of DROID, whose `reward` is 1 at the end of every demonstration, failed ones included."""
    columns = {
        "is_episode_successful": [[True] * 3, [False] * 2],
        "reward": [[0.0, 0.0, 1.0], [0.0, 1.0]],
        "is_terminal": [[False, False, True], [False, True]],
        "task_category": [["Move object into container"] * 3, ["Do anything"] * 2],
    }
    outcomes = read_outcomes(recorded(tmp_path, columns), OutcomeConfig(unlabeled="success"))
    assert outcomes.success.tolist() == [1, 0]
    assert outcomes.rewards.tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("column", "values", "way_out"),
    [
        ("reward", [[0.0, 1.0], [0.0, 0.0]], {"reward_column": "reward"}),
        ("complementary_info.Solved", [[0, 1], [0, 0]], {"success_column": "complementary_info.Solved"}),
    ],
)
def test_a_column_that_sounds_like_an_outcome_is_named_and_nothing_guessed(tmp_path, column, values, way_out):
    dataset = recorded(tmp_path, {column: values})
    for unlabeled in ("error", "success"):
        message = complaint(dataset, OutcomeConfig(unlabeled=unlabeled))
        for text in (f"2 episodes say nothing about success (0, 1), though {column} may tell", "pirl data label"):
            assert text in message
        for option in way_out:
            assert f"set {option}" in message or f"or {option}" in message
        assert read_outcomes(dataset, OutcomeConfig(unlabeled=unlabeled, **way_out)).success.tolist() == [1, 0]


# Rewards of each episode of a dataset -> whether each succeeded, and after how many frames it ends.
FAMILIES = {
    "0/1 at the end": ([[0, 0, 1], [0, 0, 0, 0]], [(1, 3), (0, 4)]),
    "0/1 amid the episode": ([[0, 0, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0]], [(1, 3), (1, 2), (1, 1)]),
    "1 on every frame speaks of the episode": ([[1, 1, 1, 1], [0, 0], [1]], [(1, 4), (0, 2), (1, 1)]),
    "-1/0": ([[-1, -1, 0], [-1, -1]], [(1, 3), (0, 2)]),
    "-1/0, never a success": ([[-1, -1, -1], [-1]], [(0, 3), (0, 1)]),
    "-1 until success, then 0": ([[-1, 0, 0, 0], [-1, -1, 0, 0]], [(1, 2), (1, 3)]),
    "-1 for a failure, 1 for a success": ([[0, 0, 1], [0, -1], [0, 0, 0], [0, 1, 0]], [(1, 3), (0, 2), (0, 3), (1, 2)]),
    "-1 per step, 1 at success": ([[-1, -1, 1], [-1, -1]], [(1, 3), (0, 2)]),
    "RECAP": ([[-1, -1, -20], [-1, -1, -1, 0]], [(0, 3), (1, 4)]),
    "RECAP, never a success": ([[-1, -1, -10], [-1, -10], [-1, -1, -1, -10]], [(0, 3), (0, 2), (0, 4)]),
    "another cost per step": ([[-0.1, -0.1, 0], [-0.1, -0.2, -5]], [(1, 3), (0, 3)]),
}


def test_success_is_found_in_rewards(tmp_path):
    for family, (rewards, expected) in FAMILIES.items():
        dataset = recorded(tmp_path / family.replace("/", " "), {"next.reward": rewards})
        outcomes = read_outcomes(dataset, OutcomeConfig())
        lengths = (outcomes.ends - dataset.starts[:-1]).tolist()
        assert list(zip(outcomes.success.tolist(), lengths, strict=True)) == expected, family
        raw = read_outcomes(dataset, OutcomeConfig(reward="raw"))
        kept = [np.float32(episode[:end]).tolist() for episode, (_, end) in zip(rewards, expected, strict=True)]
        assert per_episode(dataset, raw.rewards, raw.ends) == kept, family
        left_out = [number for number, (_, end) in enumerate(expected) if end < len(rewards[number])]
        assert [(note.episode, note.severity) for note in outcomes.notes] == [(n, "note") for n in left_out], family


def test_rewards_mean_the_same_in_every_type(tmp_path):
    for number, (kind, wrap) in enumerate(
        [(pa.bool_(), bool), (pa.int8(), int), (pa.list_(pa.float32(), 1), lambda value: [value])]
    ):
        rewards = [[wrap(value) for value in episode] for episode in ([0, 0, 1, 0], [0, 0])]
        dataset = recorded(tmp_path / str(number), {"next.reward": rewards}, types={"next.reward": kind})
        for reward in ("sparse", "raw"):
            outcomes = read_outcomes(dataset, OutcomeConfig(reward))
            assert outcomes.rewards.tolist() == [0, 0, 1, 0, 0, 0]
            assert outcomes.ends.tolist() == [3, 6]


DENSE = [
    [[0.1, 0.5, 0.9], [0.0, 0.2, 1.0]],
    [[0, 1, 2, 3, 4], [0, 0, 1, 1, 2]],
    [[-0.3, -0.2, -0.1], [-0.5, -0.4, -0.4]],
    # A penalty now and then is no cost of every step: a last frame without one is no success.
    [[0, 0, -0.02, 0], [0, -0.02, 0, 0]],
    [[-0.02, 0, 0, 0], [-0.02, -0.02, 0, 0]],
    # -1 for a failure, 0 for all else: the first frame is no success.
    [[0, 0, 0, -1], [0, 0, 0, 0]],
    [[-1, -1, 0], [-1, 0, -1]],
    [[-1, -1, -1, -10], [0, 0, -1, 0]],
]


def test_dense_rewards_do_not_tell_success_but_can_be_used_raw(tmp_path):
    for number, rewards in enumerate(DENSE):
        dataset = recorded(tmp_path / str(number), {"next.reward": rewards})
        for reward in ("sparse", "step_penalty"):
            message = complaint(dataset, OutcomeConfig(reward=reward))
            assert all(text in message for text in ("say nothing about success (0, 1)", "raw", "pirl data label"))
        outcomes = read_outcomes(dataset, OutcomeConfig(reward="raw"))
        assert per_episode(dataset, outcomes.rewards) == [np.float32(episode).tolist() for episode in rewards]
        assert outcomes.success.tolist() == [-1, -1]
        assert ended(outcomes) == [True, True]
        assert ended(read_outcomes(dataset, OutcomeConfig(reward="raw", failures="timeout"))) == [False, False]


@pytest.mark.parametrize(("costs", "unlabeled"), [([-1, -1, 0], "error"), ([-1, -1, -20], "success")])
def test_an_episode_of_zeros_among_costs_says_nothing(tmp_path, costs, unlabeled):
    columns = {"next.reward": [costs, [0, 0, 0], [-1, -1, -20]]}
    config = OutcomeConfig(unlabeled=unlabeled)
    assert "1 episode says nothing about success (1)" in complaint(recorded(tmp_path / "silent", columns), config)
    labeled = recorded(tmp_path / "labeled", columns, labels=[Label(1, success=True)])
    assert read_outcomes(labeled, config).success.tolist() == [int(costs[-1] == 0), 1, 0]


def test_rewards_of_zero_throughout_say_nothing_about_success(tmp_path):
    """Recorders fill the column with zeros when they do not know: that is not a dataset of failures."""
    dataset = recorded(tmp_path, {"next.reward": [[0.0, 0.0], [0.0] * 3]})
    for reward, step in (("sparse", 0), ("step_penalty", -1)):
        message = complaint(dataset, OutcomeConfig(reward))
        for text in ("2 episodes say nothing", "0 throughout", "pirl data label", "set unlabeled to success"):
            assert text in message
        outcomes = read_outcomes(dataset, OutcomeConfig(reward, unlabeled="success"))
        assert outcomes.success.tolist() == [1, 1]
        assert per_episode(dataset, outcomes.rewards) == [[step, step + 1], [step, step, step + 1]]
        (note,) = outcomes.notes
        assert (note.severity, note.column) == ("note", "next.reward")
        assert "taken for successes: 2" in str(note)
    assert read_outcomes(dataset, OutcomeConfig("raw")).success.tolist() == [-1, -1]


def test_success_in_the_middle_of_an_episode_cuts_it_there(tmp_path):
    flags = [[False, True, False, True, False], [False] * 3, [True] * 4]
    rewards = [[0.5, 0.25, 4, 5, 6], [1.5, 2.5, 3.5], [0.5] * 4]
    # The episode is over there: that the recorder went on, and only then said done, is no contradiction.
    done = [[False] * 4 + [True], [False, False, True], [False] * 3 + [True]]
    dataset = recorded(tmp_path, {"is_success": flags, "next.reward": rewards, "next.done": done})
    for reward, expected in [("sparse", [0, 1]), ("step_penalty", [-1, 0]), ("raw", [0.5, 0.25])]:
        outcomes = read_outcomes(dataset, OutcomeConfig(reward=reward))
        assert outcomes.success.tolist() == [1, 0, 1]
        assert (outcomes.ends - dataset.starts[:-1]).tolist() == [2, 3, 4]
        assert outcomes.rewards[:5].tolist() == [*expected, 0, 0, 0]
        assert outcomes.terminals[:5].tolist() == [False, True, False, False, False]
        assert "3 frames after its success" in str(outcomes.notes[0])


def test_columns_are_chosen_by_name(tmp_path):
    columns = {
        "next.reward": [[9.0, 8.0], [7.0, 6.0]],
        "my.reward": [[0.0, 1.0], [2.0, 0.0]],
        "next.success": [[True, True], [True, True]],
        "solved": [[0, 0], [0, 1]],
    }
    dataset = recorded(tmp_path, columns)
    outcomes = read_outcomes(dataset, OutcomeConfig("raw", reward_column="my.reward", success_column="solved"))
    assert outcomes.rewards.tolist() == [0, 1, 2, 0]
    assert outcomes.success.tolist() == [0, 1]


@settings(deadline=None, max_examples=12)
@given(
    rewards=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=4),
    costs=st.booleans(),
    failures=st.sampled_from(["auto", "terminal", "timeout"]),
)
def test_what_holds_for_all_outcomes(tmp_path_factory, rewards, costs, failures):
    """0/1 and -1/0 are two ways to say the same; returns follow from success and length alone."""
    if costs:  # until success, and at least the first step
        rewards = [[0, *sorted(episode)] for episode in rewards]
    elif not any(map(any, rewards)):  # zeros throughout say nothing
        rewards[0][-1] = 1
    shown = [[r - costs for r in episode] for episode in rewards]
    dataset = recorded(tmp_path_factory.mktemp("d"), {"next.reward": shown})
    for reward in ("sparse", "step_penalty"):
        outcomes = read_outcomes(dataset, OutcomeConfig(reward, failures=failures))
        used = np.concatenate([np.arange(s, e) for s, e in zip(dataset.starts[:-1], outcomes.ends, strict=True)])
        assert set(np.flatnonzero(outcomes.terminals)) <= set(outcomes.ends - 1)
        assert not np.delete(outcomes.rewards, used).any()
        assert outcomes.success.astype(bool).tolist() == [any(episode) for episode in rewards]
        for first, end, succeeded, over in zip(
            dataset.starts[:-1], outcomes.ends, outcomes.success, ended(outcomes), strict=True
        ):
            cost = 0 if reward == "sparse" else end - first
            assert outcomes.rewards[first:end].sum() == succeeded - cost
            timeout = failures == "timeout" or (failures == "auto" and reward == "step_penalty")
            assert over == (bool(succeeded) or not timeout)


# --- ends and time-outs ---------------------------------------------------------------------------------------------

FAILED = {"next.success": [[False] * 3]}


def last(value):
    return [[False, False, value]]


ENDS = [
    # Where the data is silent, `failures` decides.
    ({}, "terminal", True),
    ({}, "timeout", False),
    # done is "terminated or truncated": True says nothing, False that the recording stopped.
    ({"next.done": last(True)}, "terminal", True),
    ({"next.done": last(True)}, "timeout", False),
    ({"next.done": last(False)}, "terminal", False),
    ({"done": last(False)}, "terminal", False),
    ({"next.truncated": last(True)}, "terminal", False),
    ({"truncated": last(True)}, "terminal", False),
    ({"next.truncated": last(False)}, "timeout", True),
    ({"next.terminated": last(True)}, "timeout", True),
    ({"terminated": last(True)}, "timeout", True),
    ({"next.terminated": last(False)}, "terminal", False),
    ({"next.terminated": last(True), "next.truncated": last(True)}, "timeout", True),
    ({"next.terminated": last(False), "next.truncated": last(False)}, "terminal", False),
    ({"next.done": last(True), "next.truncated": last(True)}, "terminal", False),
    ({"next.done": last(True), "next.truncated": last(False)}, "timeout", True),
    # Neither terminated nor truncated, and not done: somebody stopped the recording.
    ({"next.done": last(False), "next.truncated": last(False)}, "terminal", False),
]


def test_a_failure_ends_or_runs_out_of_time_as_the_data_says(tmp_path):
    for number, (columns, failures, over) in enumerate(ENDS):
        dataset = recorded(tmp_path / str(number), FAILED | columns)
        assert ended(read_outcomes(dataset, OutcomeConfig(failures=failures))) == [over], (columns, failures)


def test_a_success_is_always_an_end(tmp_path):
    columns = {"next.success": last(True), "next.truncated": last(True), "next.done": last(False)}
    dataset = recorded(tmp_path, columns, labels=[Label(0, truncated=True)])
    for reward in REWARDS:
        assert ended(read_outcomes(dataset, OutcomeConfig(reward, failures="timeout"))) == [True]


# --- labels ---------------------------------------------------------------------------------------------------------


def test_labels_override_columns_metadata_and_rewards(tmp_path):
    for number, columns in enumerate(
        [
            {"next.success": [[False, True], [False, False], [False, True]]},
            {"is_success": [[True, True], [False, False], [True, True]]},
            {"next.reward": [[0, 1], [0, 0], [0, 1]]},
        ]
    ):
        labels = [Label(0, success=False), Label(1, success=True)]
        outcomes = read_outcomes(recorded(tmp_path / str(number), columns, labels=labels), OutcomeConfig())
        assert outcomes.success.tolist() == [0, 1, 1]
        assert outcomes.rewards.tolist() == [0, 0, 0, 1, 0, 1]
    built = build(tmp_path / "meta", cameras="none", rewards="none")
    for episode in range(3):
        set_episode(built, "success", True, episode)
    write_labels(built.root, {2: Label(2, success=False)})
    assert read_outcomes(open_dataset(built.root), OutcomeConfig()).success.tolist() == [1, 1, 0]


def test_a_labelled_reward_is_the_raw_reward_of_the_last_step(tmp_path):
    labels = [Label(0, reward=2.5), Label(1, success=True, reward=-4.0)]
    alone = recorded(tmp_path / "alone", lengths=(3, 2), labels=labels)
    outcomes = read_outcomes(alone, OutcomeConfig("raw"))
    assert outcomes.rewards.tolist() == [0, 0, 2.5, 0, -4]
    assert outcomes.success.tolist() == [-1, 1]
    beside = recorded(tmp_path / "beside", {"next.reward": [[5.0, 6, 7], [8.0, 9]]}, labels=labels[:1])
    assert read_outcomes(beside, OutcomeConfig("raw")).rewards.tolist() == [0, 0, 2.5, 8, 9]
    # A number is no statement about success.
    for unlabeled in ("error", "success"):
        message = complaint(alone, OutcomeConfig("sparse", unlabeled=unlabeled))
        assert "1 episode says nothing about success (0)" in message
        assert "set reward to raw" in message


def test_labels_of_other_data_are_refused(tmp_path):
    built = build(tmp_path, cameras="none")
    write_labels(built.root, {1: Label(1, success=True, length=4)})
    assert "episode 1, meta/pirl_labels.jsonl: was labeled when it had 4 frames" in complaint(open_dataset(built.root))


def test_a_label_of_an_episode_that_was_removed_is_a_note(tmp_path):
    built = build(tmp_path, cameras="none")
    write_labels(built.root, {8: Label(8, success=True)})
    assert read_outcomes(open_dataset(built.root), OutcomeConfig()).success.tolist() == [1, 0, 1]
    _, found = check_dataset(built.root)
    assert [(entry.severity, entry.episode, entry.file) for entry in found] == [("note", 8, "meta/pirl_labels.jsonl")]


def test_where_everything_is_labelled_a_column_that_cannot_be_read_is_not_missed(tmp_path):
    for number, (column, values) in enumerate(
        [
            ("success", [["yes", "no"], ["no", "no"]]),
            ("next.reward", [[0.0, 1.0], [0.0, float("inf")]]),
            ("next.success", [[None, True], [None, False]]),
        ]
    ):
        dataset = recorded(tmp_path / str(number), {column: values}, labels=[Label(0, success=True)])
        message = complaint(dataset)
        assert column in message
        assert "label all episodes (pirl data label)" in message or "empty cells" in message
        write_labels(dataset.root, {number: Label(number, success=number == 0) for number in range(2)})
        outcomes = read_outcomes(dataset, OutcomeConfig())
        assert outcomes.success.tolist() == [1, 0]
        assert {(note.severity, note.column) for note in outcomes.notes} == {("note", column)}
        assert column in complaint(dataset, OutcomeConfig("raw")), "rewards are asked for"


def test_a_label_that_says_how_an_episode_ended_is_believed_before_early_marks(tmp_path):
    columns = {"next.done": [[False, True, False], [False, True, False]], "next.success": [[False] * 3, [False] * 3]}
    dataset = recorded(tmp_path, columns)
    message = complaint(dataset)
    assert "episodes 0-1, column next.done: frame 1 is marked as the end, but the episode goes on: label it" in message
    write_labels(dataset.root, {0: Label(0, success=True), 1: Label(1, success=False)})
    assert ended(read_outcomes(dataset, OutcomeConfig())) == [True, False], "as a CSV file with a column success says"
    labels = [Label(0, success=True, truncated=False), Label(1, success=False, truncated=True)]
    write_labels(dataset.root, {label.episode: label for label in labels})
    outcomes = read_outcomes(dataset, OutcomeConfig())
    assert outcomes.success.tolist() == [1, 0]
    assert ended(outcomes) == [True, False]


def test_marks_that_last_until_the_end_are_a_note(tmp_path):
    """Some recorders go on for a moment after the end, and some mark every frame."""
    columns = {
        "next.done": [[False, True, True], [True] * 3, [False, False, True]],
        "next.success": [[False] * 3, [False] * 3, [False, False, True]],
    }
    outcomes = read_outcomes(recorded(tmp_path, columns), OutcomeConfig())
    assert (outcomes.success.tolist(), ended(outcomes)) == ([0, 0, 1], [True, True, True])
    assert outcomes.ends.tolist() == [3, 6, 9]
    assert [(note.severity, note.episode, note.column) for note in outcomes.notes] == [
        ("note", 0, "next.done"),
        ("note", 1, "next.done"),
    ]


def test_columns_of_a_table_beside_the_data_are_read_where_asked(tmp_path):
    built = build(tmp_path, cameras="none", rewards="none", version="v3.0")
    lengths = [len(episode) for episode in built.episodes]
    frames = [frame for length in lengths for frame in range(length)]
    numbers = np.repeat(np.arange(3), lengths)
    rewards = [
        -1.0 if frame < lengths[n] - 1 else (0.0, -20.0, 0.0)[n] for n, frame in zip(numbers, frames, strict=True)
    ]
    table = pa.table({"reward": rewards, "episode_index": numbers, "frame_index": frames})
    order = np.random.default_rng(0).permutation(len(frames))
    pq.write_table(table.take(order), built.root / "meta" / "returns_z0.parquet")
    asked = OutcomeConfig("raw", reward_column="meta/returns_z0.parquet:reward")
    outcomes = read_outcomes(open_dataset(built.root), asked)
    assert outcomes.rewards.tolist() == rewards
    assert outcomes.success.tolist() == [1, 0, 1]
    part = read_outcomes(open_dataset(built.root, episodes=[1, 2]), asked)
    assert part.rewards.tolist() == rewards[lengths[0] :]
    selection = Selection(where="meta/returns_z0.parquet:frame_index")
    assert selection.weights(open_dataset(built.root), outcomes).tolist() == [float(frame > 0) for frame in frames]
    pq.write_table(table.slice(0, 15), built.root / "meta" / "returns_z0.parquet")
    message = complaint(open_dataset(built.root), asked)
    assert "episode 2, meta/returns_z0.parquet, column reward: has no values of this episode" in message
    for file, text in (("meta/returns_z1.parquet", "is missing"), ("meta/../../x.parquet", "leaves the dataset")):
        wrong = OutcomeConfig("raw", reward_column=f"{file}:reward")
        assert text in complaint(open_dataset(built.root), wrong)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_column_that_is_not_there_is_named_beside_those_that_are(tmp_path):
    dataset = open_dataset(build(tmp_path, cameras="none").root)
    for option in ("reward_column", "success_column"):
        message = complaint(dataset, OutcomeConfig(**{option: "rewrad"}))
        assert "rewrad" in message
        assert "next.reward" in message


def test_columns_that_do_not_mean_what_their_name_says_are_named(tmp_path):
    for number, (name, values, texts) in enumerate(
        [
            ("next.success", [["yes", "no"], ["no", "no"]], []),
            ("next.success", [[0.0, 1.0], [0.0, 0.5]], ["episode 1", "frame 1", "0.5"]),
            ("next.truncated", [[0.0, float("nan")], [0.0, 1.0]], ["episode 0", "frame 1", "nan"]),
            ("next.reward", [[[0.0, 1.0]] * 2] * 2, []),
        ]
    ):
        message = complaint(recorded(tmp_path / str(number), {name: values}))
        for text in [name, *texts]:
            assert text in message


def test_a_broken_sidecar_is_named_by_everyone_who_reads_it(tmp_path):
    built = build(tmp_path, cameras="none")
    (built.root / "meta/pirl_labels.jsonl").write_text('{"episode": 0, "success": true}\n{"episode": 1,\n')
    dataset = open_dataset(built.root)
    for read in (read_outcomes, summarize):
        with pytest.raises(DataError, match=r"pirl_labels\.jsonl, line 2"):
            read(dataset, OutcomeConfig())
    _, found = check_dataset(built.root)
    assert any("pirl_labels.jsonl, line 2" in str(problem) for problem in found)


# --- in numbers -----------------------------------------------------------------------------------------------------


def test_the_summary_counts_what_is_there(tmp_path):
    version = "v3.0"
    built = build(tmp_path, version=version, lengths=(7, 5, 9, 5), size=(32, 40))
    write_labels(built.root, {1: Label(1, truncated=True)})
    summary = summarize(open_dataset(built.root), OutcomeConfig("step_penalty", failures="terminal"))
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["episodes"], summary["frames"], summary["fps"], summary["version"]) == (4, 26, 10, version)
    assert [entry["episodes"] for entry in summary["tasks"]] == [2, 2]
    outcomes = summary["outcomes"]
    assert summary["outcome_problem"] is None
    assert (outcomes["known"], outcomes["success"], outcomes["rate"], outcomes["timeouts"]) == (4, 2, 0.5, 1)
    assert (outcomes["returns"]["min"], outcomes["returns"]["max"]) == (-8, -5)
    assert outcomes["returns"]["mean"] == pytest.approx((-6 - 5 - 8 - 5) / 4)
    assert (summary["lengths"]["min"], summary["lengths"]["max"], sum(summary["lengths"]["counts"])) == (5, 9, 4)
    for camera, name in zip(summary["cameras"], built.cameras, strict=True):
        assert camera == {"name": name, "height": 32, "width": 40, "storage": "video (mpeg4)"}
    described = {column["name"]: column for column in summary["columns"]}
    assert described["observation.state"]["shape"] == [4]
    assert described["next.done"]["dtype"] == "bool"
