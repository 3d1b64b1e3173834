"""Datasets made to hurt: each is refused with one message that names what is wrong, and nothing else happens."""

# ruff: noqa: E501  one case per line, however long: a table is read from above to below

import functools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arena import Case, Hurt, delete, directory, link, move_out, nothing, parametrized, pipe, write

INFO = "v2.1/meta/info.json"
EPISODES = "v2.1/meta/episodes.jsonl"
DATA = "v2.1/data/chunk-000/episode_000001.parquet"
V3_DATA = "v3.0/data/chunk-000/file-000.parquet"
V3_LIST = "v3.0/meta/episodes/chunk-000/file-000.parquet"
CAMERA = "observation.images.cam_high"
VIDEO = f"v2.1/videos/chunk-000/{CAMERA}/episode_000001.mp4"
CHECK, INSPECT = "data check v2.1", "data info v2.1"


class Bait:
    """Whoever unpickles it leaves a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def info(key: str, value: Any, version: str = "v2.1") -> Hurt:
    """Another value in info.json; keys of keys are separated by a blank."""

    def hurt(work: Path) -> None:
        file = work / version / "meta/info.json"
        content = json.loads(file.read_text())
        *groups, last = key.split(" ")
        functools.reduce(dict.__getitem__, groups, content)[last] = value
        file.write_text(json.dumps(content))

    return hurt


def episode(key: str, value: Any) -> Hurt:
    """Another value in the list of episodes, for episode 1."""

    def hurt(work: Path) -> None:
        rows = [json.loads(line) for line in (work / EPISODES).read_text().splitlines()]
        rows[1][key] = value
        (work / EPISODES).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return hurt


def column(file: str, name: str, values: Any) -> Hurt:
    """Other values in a column of a parquet file: what an array of the same length is made from."""

    def hurt(work: Path) -> None:
        table = pq.read_table(work / file)
        array = values(len(table)) if callable(values) else pa.array([values] * len(table))
        index = table.schema.get_field_index(name)
        table = table.append_column(name, array) if index < 0 else table.set_column(index, name, array)
        pq.write_table(table, work / file)

    return hurt


def raw_info(what: str, content: str | bytes, *says: str) -> Case:
    return Case(f"info.json is {what}", write(INFO, content), INSPECT, ["meta/info.json", *says])


def template(what: str, key: str, value: str, *says: str) -> Case:
    return Case(f"{key} {what}", info(key, value), INSPECT, ["meta/info.json", key, *says])


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"

INFO_FILES = [
    raw_info("empty", b"", "cannot be read"),
    raw_info("a list", "[1, 2]", "should hold an object"),
    raw_info("a number", "3", "should hold an object"),
    raw_info("cut off", '{"codebase_version": "v2.1", "fps"', "cannot be read"),
    raw_info("a hundred thousand brackets", "[" * 100_000, "nested|recursion"),
    raw_info("a hundred thousand objects", '{"a":' * 100_000, "nested|recursion"),
    raw_info("in UTF-16", '{"fps": 10}'.encode("utf-16"), "cannot be read"),
    raw_info("in Latin-1", '{"robot_type": "bras motorisé"}'.encode("latin-1"), "cannot be read"),
    raw_info("begun by a byte order mark", b"\xef\xbb\xbf{}", "cannot be read"),
    raw_info("full of NUL bytes", b"\0" * 1000, "cannot be read"),
    raw_info("a number of five thousand digits", '{"fps": ' + "9" * 5000 + "}", "digits"),
    raw_info("a pickle", pickle.dumps(Bait()), "cannot be read"),
    Case("info.json is missing", delete(INFO), INSPECT, ["meta/info.json", "missing"]),
    Case("info.json is a directory", directory(INFO), INSPECT, ["meta/info.json"]),
    Case("info.json is a pipe", pipe(INFO), INSPECT, ["meta/info.json"]),
    Case("info.json is a link that dangles", link(INFO, "nowhere"), INSPECT, ["meta/info.json"]),
    Case("info.json is a link to itself", link(INFO, "info.json"), INSPECT, ["info.json"]),
    Case("info.json is a link out of the dataset", move_out(INFO), INSPECT, ["meta/info.json", "link that leaves"]),
    Case("meta is a link to a directory outside", move_out("v2.1/meta"), INSPECT, ["meta/info.json", "link that leaves"]),
    Case("meta is a file", write("v2.1/meta", "no"), INSPECT, ["meta/info.json"]),
]  # fmt: skip

INFO_VALUES = [
    Case("fps is NaN", info("fps", float("nan")), INSPECT, ["fps should be", "nan"]),
    Case("fps is infinite", info("fps", float("inf")), INSPECT, ["fps should be", "inf"]),
    Case("fps is negative", info("fps", -10), INSPECT, ["fps should be", "-10"]),
    Case("fps is a list", info("fps", [10]), INSPECT, ["fps should be", "[10]"]),
    Case("the version is of the future", info("codebase_version", "v99"), INSPECT, ["codebase_version", "v99"]),
    Case("the version is an object", info("codebase_version", {"a": 1}), INSPECT, ["codebase_version"]),
    Case("total_episodes is negative", info("total_episodes", -1), INSPECT, ["total_episodes should be a count", "-1"]),
    Case("total_frames is enormous", info("total_frames", 10**300), INSPECT, ["total_frames should be a count"]),
    Case("chunks_size is zero", info("chunks_size", 0), INSPECT, ["chunks_size should be a count"]),
    Case("features is a list", info("features", []), INSPECT, ["features should be an object"]),
    Case("a feature is null", info("features action", None), INSPECT, ["action", "dtype and shape"]),
    Case("a feature is called ../../x", info("features ../../x", {"dtype": "video", "shape": [1, 1, 3]}), INSPECT, ["without /"]),
    Case("a feature is called by half a character", info("features \ud800", {"dtype": "video", "shape": [16, 32, 3]}), CHECK, ["\\ud800"], findings=True),
    Case("a shape is enormous", info("features action shape", [10**15]), INSPECT, ["action", "shape"]),
    Case("a shape has a thousand axes", info("features action shape", [1] * 1000), INSPECT, ["action", "shape"]),
    Case("a shape is negative", info("features action shape", [-3]), INSPECT, ["action", "shape"]),
    Case("a shape lies about the width", info("features action shape", [4]), "data stats v2.1 --robot arm.json --horizon 2", ["action", "4 values"]),
]  # fmt: skip

TEMPLATES = [
    template("is absolute", "data_path", "/etc/passwd", "leaves the dataset"),
    template("climbs", "data_path", "../../outside/{episode_index}.parquet", "leaves the dataset"),
    template("goes home", "data_path", "~/{episode_index}.parquet", "leaves the dataset"),
    template("looks into an object", "data_path", "data/{episode_index.__class__.__mro__}.parquet", "__class__"),
    template("looks into an item", "data_path", "data/{video_key[0]}.parquet", "video_key[0]"),
    template("is a gigabyte wide", "data_path", "data/{episode_index:01000000000d}.parquet", "number format"),
    template("nests its fields", "data_path", "data/{episode_index:{chunk_index}}.parquet", "number format|not a path"),
    template("converts", "data_path", "data/{episode_index!r}.parquet", "number format"),
    template("does not end", "data_path", "data/{episode_index", "not a path template"),
    template("has a NUL byte", "data_path", "data/\0{episode_index}.parquet", "leaves the dataset"),
    template("is a novel", "data_path", "data/" + "a" * 5000, "path template"),
    template("is an object", "data_path", {"a": 1}, "path template"),  # type: ignore[arg-type]
    template("is absolute too", "video_path", "/etc/{video_key}", "leaves the dataset"),
    template("climbs too", "video_path", "videos/../../../outside/{video_key}.mp4", "leaves the dataset"),
    template("looks into an object too", "video_path", "{video_key.__init__.__globals__}", "__globals__"),
    template("is the same for all cameras", "video_path", "videos/{episode_index}.mp4", "the same file"),
]  # fmt: skip

LISTS = [
    Case("data_path is of half a character", info("data_path", "data/\ud800{episode_index}"), CHECK, ["episodes 0-2", "is missing"], findings=True),
    Case("the list of episodes is a pipe", pipe(EPISODES), INSPECT, ["episodes.jsonl", "not a regular file"]),
    Case("the list of episodes leads out", move_out(EPISODES), INSPECT, ["episodes.jsonl", "link that leaves"]),
    Case("the list of episodes is no text", write(EPISODES, b"\xff\xfe\0\1"), INSPECT, ["episodes.jsonl", "cannot be read"]),
    Case("a line of the list is a deep nest", write(EPISODES, "[" * 50_000 + "\n"), INSPECT, ["episodes.jsonl", "line 1"]),
    Case("an episode is numbered by a fraction", episode("episode_index", 1.5), CHECK, ["episodes.jsonl", "1.5"], findings=True),
    Case("an episode is numbered by 10^30", episode("episode_index", 10**30), CHECK, ["episodes.jsonl", "episode_index"], findings=True),
    Case("tasks are a pipe", pipe("v2.1/meta/tasks.jsonl"), CHECK, ["tasks.jsonl", "not a regular file"], findings=True),
    Case("tasks are a pickle", write("v2.1/meta/tasks.jsonl", pickle.dumps(Bait())), CHECK, ["tasks.jsonl"], findings=True),
    Case("the table of episodes is a pipe", pipe(V3_LIST), "data check v3.0", ["meta/episodes", "not a regular file"], findings=True),
    Case("the table of episodes is text", write(V3_LIST, "PAR1 no PAR1"), "data check v3.0", ["meta/episodes", "cannot be read"], findings=True),
    Case("tasks of v3 are numbers", column("v3.0/meta/tasks.parquet", "task_index", "zero"), "data check v3.0", ["tasks.parquet", "zero"], findings=True),
]  # fmt: skip

ROWS = [
    Case("a data file is a pipe", pipe(DATA), CHECK, ["episode_000001.parquet", "not a regular file"], findings=True),
    Case("a data file is a device", link(DATA, "/dev/zero"), CHECK, ["episode_000001.parquet"], findings=True),
    Case("all data leads out", move_out("v2.1/data"), CHECK, ["0 problems"], code=0, findings=True),
    Case("a data file is a pickle", write(DATA, pickle.dumps(Bait())), CHECK, ["episode_000001.parquet"], findings=True),
    Case("episode numbers are words", column(V3_DATA, "episode_index", "first"), "data check v3.0", ["file-000.parquet", "episode_index"], findings=True),
    Case("episode numbers are missing values", column(V3_DATA, "episode_index", lambda n: pa.nulls(n, pa.int64())), "data check v3.0", ["file-000.parquet", "empty"], findings=True),
    Case("episode numbers are NaN", column(V3_DATA, "episode_index", float("nan")), "data check v3.0", ["file-000.parquet", "nan"], findings=True),
    Case("episode numbers are lists of lists", column(V3_DATA, "episode_index", [[0, 1]]), "data check v3.0", ["file-000.parquet"], findings=True),
    Case("frame numbers are negative", column(DATA, "frame_index", -5), CHECK, ["episode 1", "frame_index"], findings=True),
    Case("actions are structures", column(DATA, "action", {"x": 1.0}), CHECK, ["action", "should hold numbers"], findings=True),
    Case("rewards are words", column(DATA, "next.reward", "good"), CHECK, ["next.reward"], findings=True),
    Case("success is two", column(DATA, "next.success", 2), CHECK, ["next.success", "should be 0 or 1"], findings=True),
    Case("pictures are PostScript, which would be run", column("pictures/data/chunk-000/episode_000001.parquet", CAMERA, {"bytes": b"%!PS-Adobe-3.0 EPSF\n%%BoundingBox: 0 0 9 9\n"}), "data check pictures", [CAMERA, "cannot identify"], findings=True),
    Case("pictures are paths to files outside", column("pictures/data/chunk-000/episode_000001.parquet", CAMERA, {"path": "/etc/passwd"}), "data check pictures", [CAMERA, "there is none"], findings=True),
]  # fmt: skip

VIDEOS = [
    Case("a video is a playlist of other files", write(VIDEO, PLAYLIST), CHECK, ["episode 1", "no whole mp4"], findings=True),
    Case("a video is a list for concatenation", write(VIDEO, "ffconcat version 1.0\nfile /etc/hostname\n"), CHECK, ["episode 1", "no whole mp4"], findings=True),
    Case("a video is a pipe", pipe(VIDEO), CHECK, ["episode 1", "not a regular file"], findings=True),
    Case("a broken video is looked into", write(VIDEO, "no video"), "data info v2.1 --unlabeled success", [], code=0, findings=True),
    Case("the first video is broken, and looked into", write(VIDEO.replace("000001", "000000"), "no"), CHECK, ["episode 0", "no whole mp4"], findings=True),
]  # fmt: skip


@parametrized([*INFO_FILES, *INFO_VALUES, *TEMPLATES, *LISTS, *ROWS, *VIDEOS])
def test_a_hostile_dataset_is_refused_by_name(with_datasets, case):
    arm = {"name": "arm", "cameras": {}, "state": ["observation.state"], "actions": ["action"]}
    (with_datasets.work / "arm.json").write_text(json.dumps(arm))
    with_datasets.try_case(case)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@parametrized(
    [
        Case("info.json may not be read", lambda work: (work / INFO).chmod(0), INSPECT, ["info.json"]),
        Case("a data file may not be read", lambda work: (work / DATA).chmod(0), INSPECT, ["episode_000001.parquet"]),
        Case("meta may not be entered", lambda work: (work / "v2.1/meta").chmod(0), INSPECT, ["info.json"]),
    ]
)
def test_what_may_not_be_read_is_named(with_datasets, case):
    with_datasets.try_case(case)


def test_a_sound_dataset_passes_the_same_guards(with_datasets):
    """Else the cases above would prove nothing."""
    for name in ("v2.1", "v3.0", "pictures"):
        with_datasets.try_case(Case(name, nothing, f"data info {name}", [name], code=0, findings=True))
