"""`pirl data`: what is printed, what is written, and with which exit code."""

import hashlib
import json
import re

import numpy as np
import pytest

from pirl.data import FrameCacheConfig, list_frame_caches, open_dataset, open_frames
from pirl.data.frame_store import locked
from sample_datasets import build


@pytest.fixture
def dataset(tmp_path):
    return build(tmp_path / "data", rewards="none")


def contents(root):
    return {
        path.relative_to(root): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_sound_dataset_passes_and_all_problems_are_listed(call, tmp_path):
    built = build(tmp_path / "data")
    code, out, _ = call("data", "check", built.root)
    assert (code, "3 episodes, 21 frames: 0 problems, 0 notes" in out) == (0, True)
    built.episodes[0].video_files[built.cameras[0]].unlink()
    built.episodes[2].video_files[built.cameras[1]].write_bytes(b"no video")
    code, out, _ = call("data", "check", built.root)
    assert code == 2
    assert "problem: episode 0" in out
    assert "problem: episode 2" in out
    code, out, err = call("data", "check", built.root, "--json")
    assert "problem: " in err, "what people read stands beside"
    assert code == 2
    assert {problem["episode"] for problem in json.loads(out)["problems"]} == {0, 2}


def test_demonstrations_need_labels_or_to_be_called_successes(call, dataset):
    code, out, _ = call("data", "check", dataset.root)
    assert code == 2
    assert "pirl data label" in out
    assert call("data", "check", dataset.root, "--unlabeled", "success")[0] == 0
    assert call("data", "label", dataset.root, "--success", "0-1", "--failure", "2")[0] == 0
    assert call("data", "check", dataset.root)[0] == 0


def test_info_tells_what_is_in_it(call, dataset):
    code, out, _ = call("data", "info", dataset.root)
    assert code == 0
    assert "unknown: 3 episodes say nothing about success (0, 1, 2): label them (pirl data label)" in " ".join(
        out.split()
    )
    assert "3 of 3 episodes (100%)" in call("data", "info", dataset.root, "--unlabeled", "success")[1]
    call("data", "label", dataset.root, "--success", "0", "--failure", "rest")
    _, out, _ = call("data", "info", dataset.root)
    assert "1 of 3 episodes (33%)" in out
    summary = json.loads(call("data", "info", dataset.root, "--json")[1])
    assert summary["episodes"] == 3
    assert summary["frames"] == 21
    assert summary["outcomes"]["success"] == 1
    assert sum(summary["lengths"]["counts"]) == 3
    assert [(camera["height"], camera["width"]) for camera in summary["cameras"]] == [(32, 48)] * 2


def test_labels_come_from_a_table(call, dataset, tmp_path):
    before = contents(dataset.root)
    table = tmp_path / "labels.csv"
    table.write_text("episode,success,truncated\n0,yes,\n1,no,yes\n2,1,\n")
    code, out, _ = call("data", "label", dataset.root, "--csv", table)
    assert code == 0
    assert "3 episodes of 3 labeled" in out
    after = contents(dataset.root)
    assert {path: after[path] for path in before} == before
    assert [path.as_posix() for path in set(after) - set(before)] == ["meta/pirl_labels.jsonl"]


def test_labels_come_from_questions_and_are_kept_when_one_stops(call, dataset):
    code, out, _ = call("data", "label", dataset.root, answers="y\nwhat\nt\nq\n")
    assert code == 0
    assert "please answer" in out
    lines = (dataset.root / "meta" / "pirl_labels.jsonl").read_text().splitlines()
    assert [(json.loads(line)["episode"], json.loads(line)["success"]) for line in lines] == [(0, True), (1, False)]
    _, out, _ = call("data", "label", dataset.root, answers="n\n")
    assert "episode 2" in out
    assert "episode 0" not in out
    assert "all 3 episodes are labeled" in call("data", "label", dataset.root, answers="")[1]


def said(dataset):
    """Success and time-out of each labeled episode."""
    lines = map(json.loads, (dataset.root / "meta" / "pirl_labels.jsonl").read_text().splitlines())
    return {line["episode"]: (line.get("success"), line.get("truncated")) for line in lines}


def test_a_wrong_time_out_is_taken_back(call, dataset):
    call("data", "label", dataset.root, answers="t\nt\nq\n")
    assert said(dataset) == {0: (False, True), 1: (False, True)}
    call("data", "label", dataset.root, "--ask-again", answers="n\ny\nq\n")
    assert said(dataset) == {0: (False, False), 1: (True, False)}
    call("data", "label", dataset.root, "--failure", "rest", "--truncated", "0-2")
    assert said(dataset) == dict.fromkeys(range(3), (False, True))
    call("data", "label", dataset.root, "--failure", "0,2", "--success", "1", "--truncated", "2")
    assert said(dataset) == {0: (False, False), 1: (True, False), 2: (False, True)}
    call("data", "label", dataset.root, "--truncated", "0")
    assert said(dataset)[0] == (False, True)


def test_info_reads_the_columns_it_is_told_to(call, tmp_path):
    built = build(tmp_path / "data", rewards="hilserl", cameras="none")
    assert "2 of 3 episodes" in call("data", "info", built.root)[1]
    _, out, _ = call("data", "info", built.root, "--reward-column", "complementary_info.discrete_penalty")
    assert "unknown: 3 episodes say nothing about success (0, 1, 2), nor do the rewards" in out
    assert "3 of 3 episodes" in call("data", "info", built.root, "--success-column", "next.done")[1]


@pytest.mark.parametrize(("answers", "code"), [("q\n", 0), ("\n\n\n", 0), ("", 2), ("\n", 2), (None, 2)])
def test_without_an_answer_nothing_is_written_and_that_is_said(call, dataset, monkeypatch, answers, code):
    before = contents(dataset.root)
    if answers is None:
        monkeypatch.setattr("sys.stdin", None)
    ended, out, err = call("data", "label", dataset.root, answers=answers)
    assert ended == code
    assert "nothing was written" in out + err
    assert ("--csv" in err) == ("--success" in err) == (code == 2)
    assert contents(dataset.root) == before


def test_a_dataset_may_follow_two_dashes(call, tmp_path, monkeypatch):
    build(tmp_path / "--data")
    monkeypatch.chdir(tmp_path)
    assert call("data", "check", "--reward", "raw", "--", "--data")[0] == 0


def test_statistics_are_printed_and_written(call, dataset, tmp_path):
    robot = tmp_path / "arm.json"
    described = {"name": "arm", "cameras": {}, "state": ["observation.state"], "actions": ["action"], "delta": [2, -1]}
    robot.write_text(json.dumps(described))
    where = ("--robot", robot, "--output", tmp_path / "norm.json")
    code, out, _ = call("data", "stats", dataset.root, "--horizon", 3, *where)
    assert code == 0
    assert "norm.json" in out
    stats = json.loads((tmp_path / "norm.json").read_text())["norm_stats"]
    states = np.concatenate([episode.state for episode in dataset.episodes])
    np.testing.assert_allclose(stats["state"]["mean"], states.mean(axis=0), rtol=1e-6)
    assert len(stats["actions"]["q99"]) == 3


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_computed(call, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("pirl.data.dataset_norm_stats", None)
    (tmp_path / "file").touch()
    where = ("--output", tmp_path / "file" / "norm.json")
    code, _, err = call("data", "stats", dataset.root, "--robot", "libero", "--horizon", 3, *where)
    assert (code, "it is no directory" in err) == (2, True)


def test_caches_are_listed_and_cleared_but_not_one_that_is_being_built(call, tmp_path):
    built = build(tmp_path / "data")
    assert "0 caches" in call("data", "cache")[1]
    open_frames(open_dataset(built.root), list(built.cameras), FrameCacheConfig(16, 16), progress=False)
    _, out, _ = call("data", "cache")
    assert re.search(r"^2 caches, [\d.]+ KiB$", out, re.MULTILINE)
    assert "16×16" in out
    first, second = list_frame_caches()
    with locked(first.directory):
        code, out, err = call("data", "cache", "--clear")
    assert (code, first.camera in out, second.camera in out) == (2, True, True)
    assert out.splitlines()[-1].startswith("deleted: 1 cache, ")
    assert err.startswith(f"not deleted: {first.directory} is being built by another process")
    assert [entry.directory for entry in list_frame_caches()] == [first.directory]
    assert "deleted" in call("data", "cache", "--clear")[1]
    assert "0 caches" in call("data", "cache")[1]
