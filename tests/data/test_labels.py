"""Labels: what people say comes back as they said it, touches nothing else, and what cannot be understood is named."""

import dataclasses
import hashlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pirl.data import Label, merge_labels, open_dataset, parse_episodes, read_csv, read_labels, write_labels
from pirl.errors import DataError
from sample_datasets import build

SIDECAR = "meta/pirl_labels.jsonl"
FIELDS = ("success", "reward", "truncated")
some_labels = st.builds(
    Label,
    st.integers(0, 5000),
    success=st.none() | st.booleans(),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    truncated=st.none() | st.booleans(),
    length=st.none() | st.integers(1, 10_000),
).filter(lambda label: any(getattr(label, field) is not None for field in FIELDS))
label_tables = st.lists(some_labels, max_size=8).map(lambda labels: {label.episode: label for label in labels})
reusing_tmp_path = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def hashes(root):
    return {
        path.relative_to(root).as_posix(): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


# --- the sidecar ----------------------------------------------------------------------------------------------------


@reusing_tmp_path
@given(labels=label_tables)
def test_labels_come_back_as_they_were_written(tmp_path, labels):
    path = write_labels(tmp_path, labels)
    assert path == tmp_path / SIDECAR
    assert read_labels(tmp_path) == labels
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["episode"] for line in lines] == sorted(labels)
    for line in lines:
        said = {key: value for key, value in dataclasses.asdict(labels[line["episode"]]).items() if value is not None}
        assert line == said


def test_labelling_touches_nothing_but_the_sidecar(tmp_path):
    built = build(tmp_path, version="v3.0", cameras="none")
    before = hashes(built.root)
    for labels in ({0: Label(0, success=True, length=7)}, {1: Label(1, truncated=True), 2: Label(2, reward=0.5)}):
        write_labels(built.root, labels)
        assert read_labels(built.root) == labels
        after = hashes(built.root)
        assert after.keys() == before.keys() | {SIDECAR}
        assert {name: after[name] for name in before} == before
    assert open_dataset(built.root).problems == []


BROKEN_LINES = [
    ('{"episode": 1, "success": true', "line 3"),
    ("[1, true]", "object"),
    ("[" * 100_000, "line 3"),
    ('{"success": true}', "episode"),
    ('{"episode": -1, "success": true}', "-1"),
    ('{"episode": true, "success": true}', "True"),
    ('{"episode": 1, "length": 9}', "says nothing"),
    ('{"episode": 1, "success": "yes"}', "'yes'"),
    ('{"episode": 1, "success": 1}', "success"),
    ('{"episode": 1, "reward": NaN}', "nan"),
    ('{"episode": 1, "reward": 1' + "0" * 400 + "}", "reward"),
    ('{"episode": 1, "success": true, "length": 0}', "length"),
    ('{"episode": 1, "sucess": true}', "sucess"),
]


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "meta").mkdir()
    for line, expected in BROKEN_LINES:
        (tmp_path / SIDECAR).write_text(f'{{"episode": 0, "success": true}}\n\n{line}\n')
        with pytest.raises(DataError) as caught:
            read_labels(tmp_path)
        for text in (expected, "line 3", str(tmp_path / SIDECAR)):
            assert text in str(caught.value)
    (tmp_path / SIDECAR).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="pirl_labels"):
        read_labels(tmp_path)


def test_labels_never_leave_the_dataset(tmp_path):
    """A downloaded dataset may hold a link to anything of ours."""
    precious = tmp_path / "precious.jsonl"
    precious.write_text('{"episode": 0, "success": true}\n')
    (tmp_path / "dataset/meta").mkdir(parents=True)
    (tmp_path / "dataset" / SIDECAR).symlink_to(precious)
    with pytest.raises(DataError, match="leaves the dataset"):
        read_labels(tmp_path / "dataset")
    with pytest.raises(DataError, match="leaves the dataset"):
        write_labels(tmp_path / "dataset", {1: Label(1, success=False)})
    assert precious.read_text() == '{"episode": 0, "success": true}\n'


# --- tables ---------------------------------------------------------------------------------------------------------


def csv(tmp_path, content):
    file = tmp_path / "labels.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


DIALECTS = [
    "episode,success\n0,yes\n3,no\n",
    "episode,success\n0,TRUE\n3,False",
    "episode,success\n0,success\n3,failure\n",
    "episode,success\n0,1.0\n3,0.0\n",
    "success,episode_index\n1,0\n0,3\n",
    "\ufeffepisode,success\r\n0,1\r\n3,0\r\n",
    " Episode , Success \n 0 , 1 \n 3 , no \n",
    '"episode","success"\n"0","1"\n"3","0"\n',
    "\n\nepisode,success\n\n0,1\n\n3,0\n,\n\n",
    "episode,success,reward\n0,1,\n3,0\n",
]


def test_tables_are_read_as_people_and_their_programs_write_them(tmp_path):
    for content in DIALECTS:
        assert read_csv(csv(tmp_path, content)) == {0: Label(0, success=True), 3: Label(3, success=False)}, content


def test_a_table_may_say_some_things_of_some_episodes(tmp_path):
    content = "episode,reward,truncated,success\n5,-2.5,,\n1,,yes,no\n2,1e3,0,1\n"
    assert read_csv(csv(tmp_path, content)) == {
        5: Label(5, reward=-2.5),
        1: Label(1, success=False, truncated=True),
        2: Label(2, success=True, reward=1000.0, truncated=False),
    }


BROKEN_TABLES = [
    ("", ["episode", "none"]),
    ("episode\n0\n", ["any of success, reward, truncated"]),
    ("episode;success\n0;1\n", ["episode;success"]),
    ("episode,outcome\n0,1\n", ["outcome"]),
    ("episode,episode_index,success\n0,1,0\n", ["episode", "each once"]),
    ("episode,success\n\n\n0,1\n\n2,maybe\n", ["line 6", "success", "maybe"]),
    ('episode,"success"\n0,"\n1"\n2,maybe\n', ["line 4", "maybe"]),
    ("episode,success\n0,1\n0,0\n", ["line 3", "episode 0", "twice"]),
    ("episode,success\nfirst,1\n", ["line 2", "episode", "first"]),
    ("episode,success\n-1,1\n", ["line 2", "-1"]),
    ("episode,success\n4,\n", ["line 2", "episode 4", "says nothing"]),
    ("episode,success\n4,1,0\n", ["line 2", "more cells"]),
    ("episode,reward\n4,lots\n", ["line 2", "reward", "lots"]),
    ("episode,reward\n4,nan\n", ["line 2", "reward", "nan"]),
    ("episode,truncated\n4,2\n", ["line 2", "truncated", "2"]),
    ("episode,success\n0,1\n".encode("utf-16"), ["CSV"]),
]


def test_what_is_wrong_in_a_table_is_named_by_line(tmp_path):
    for content, texts in BROKEN_TABLES:
        with pytest.raises(DataError) as caught:
            read_csv(csv(tmp_path, content))
        for text in [*texts, "labels.csv"]:
            assert text in str(caught.value)
    with pytest.raises(DataError, match="absent.csv"):
        read_csv(tmp_path / "absent.csv")


# --- lists of episodes ----------------------------------------------------------------------------------------------


def test_lists_and_ranges_of_episodes():
    for text, episodes in (
        ("0,3,7-9", [0, 3, 7, 8, 9]),
        ("5-5", [5]),
        (" 2 , 4 ,", [2, 4]),
        ("12,0-1", [12, 0, 1]),
        ("", []),
    ):
        assert parse_episodes(text, largest=12) == episodes
    for text in ("a", "-3", "3-", "7-5", "1-2-3", "1.5", "0x1", "²", "9" * 5000, "0-99999999999999"):
        with pytest.raises(DataError, match="is not a list of episode numbers and ranges"):
            parse_episodes(f"1,{text},2", largest=12)
    with pytest.raises(DataError, match="there is no episode 13; the last one is 12"):
        parse_episodes("3,0-13", largest=12)


# --- merging --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(old=label_tables, new=label_tables)
def test_what_a_new_label_does_not_say_stays(old, new):
    old, new = ({e: dataclasses.replace(x, length=None) for e, x in labels.items()} for labels in (old, new))
    merged = merge_labels(old, new.values())
    assert merged.keys() == old.keys() | new.keys()
    for episode, label in merged.items():
        for field in FIELDS:
            said = [getattr(labels[episode], field) for labels in (new, old) if episode in labels]
            assert getattr(label, field) == next((value for value in said if value is not None), None)
    assert merge_labels(merged, new.values()) == merged


def test_a_label_of_an_episode_recorded_anew_does_not_stay():
    """Else the new label's length would vouch for what was said of another recording."""
    old = {0: Label(0, success=True, length=7), 1: Label(1, success=True, length=7), 2: Label(2, success=True)}
    merged = merge_labels(old, [Label(e, truncated=True, length=length) for e, length in ((0, 5), (1, 7), (2, 5))])
    assert merged == {
        0: Label(0, truncated=True, length=5),
        1: Label(1, success=True, truncated=True, length=7),
        2: Label(2, success=True, truncated=True, length=5),
    }
