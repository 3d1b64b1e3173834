"""Labels and robots made to hurt: tables, sidecars and descriptions that lie, hang or explode."""

# ruff: noqa: E501  one case per line, however long: a table is read from above to below

import json
from typing import Any

import pyarrow as pa
from arena import Case, Hurt, both, directory, link, move_out, nothing, parametrized, pipe, write
from test_hostile_datasets import column

SIDECAR = "v2.1/meta/pirl_labels.jsonl"
ARM = {"name": "arm", "cameras": {}, "state": ["observation.state"], "actions": ["action"]}


def table(what: str, content: str | bytes, *says: str) -> Case:
    """A CSV file of labels; its name is part of every message."""
    return Case(f"a table {what}", write("l.csv", content), "data label v2.1 --csv l.csv", ["l.csv", *says])


def sidecar(what: str, content: str | bytes, *says: str) -> Case:
    """Labels as pirl keeps them, changed by somebody."""
    says = ("pirl_labels.jsonl", *says)
    return Case(f"labels {what}", write(SIDECAR, content), "data label v2.1 --success 0", says)


def flags(what: str, arguments: list[str], *says: str) -> Case:
    return Case(f"a list of episodes {what}", nothing, ["data", "label", "v2.1", *arguments], says)


def robot(what: str, *says: str, **fields: Any) -> Case:
    """A robot with other fields than a sound one."""
    text = json.dumps(ARM | fields)
    return Case(f"a robot {what}", write("r.json", text), "data stats v2.1 --robot r.json --horizon 2", says)


def robot_file(what: str, hurt: Hurt, *says: str) -> Case:
    return Case(f"a robot {what}", hurt, "data stats v2.1 --robot r.json --horizon 2", ["r.json", *says])


LABELS = [
    table("that is empty", b"", "none"),
    table("of one column", "episode\n0\n", "columns should be episode"),
    table("of unknown columns", "episode,score\n0,1\n", "score"),
    table("with a column twice", "episode,success,success\n0,1,0\n", "each once"),
    table("that is binary", bytes(range(256)), "cannot be read as CSV"),
    table("with a NUL", b"episode,success\n0,\0\n", "line 2|cannot be read"),
    table("in UTF-16", "episode,success\n0,1\n".encode("utf-16"), "cannot be read"),
    table("with a cell of a megabyte", "episode,success\n0," + "a" * 2**20 + "\n", "field larger|cannot be read"),
    table("with more cells than columns", "episode,success\n0,1,2\n", "line 2", "more cells"),
    table("with an episode twice", "episode,success\n0,1\n0,0\n", "line 3", "twice"),
    table("with an episode that is no number", "episode,success\n-1,1\n", "line 2", "-1"),
    table("with an episode of a hundred digits", "episode,success\n" + "9" * 100 + ",1\n", "line 2", "episode number"),
    table("with success of maybe", "episode,success\n0,maybe\n", "line 2", "maybe"),
    table("with a reward of NaN", "episode,reward\n0,nan\n", "line 2", "reward should be a finite number"),
    table("with a reward of 1e999", "episode,reward\n0,1e999\n", "line 2", "reward should be a finite number"),
    table("with a formula", "episode,reward\n0,=1+1\n", "line 2", "reward"),
    Case("a table of an episode that is not there", write("l.csv", "episode,success\n77,1\n"), "data label v2.1 --csv l.csv", ["no episode 77", "Nothing was written"]),
    Case("a table that is not there", nothing, "data label v2.1 --csv l.csv", ["l.csv", "No such file"]),
    Case("a table that is a directory", directory("l.csv"), "data label v2.1 --csv l.csv", ["l.csv", "regular file"]),
    Case("a table that is a pipe", pipe("l.csv"), "data label v2.1 --csv l.csv", ["l.csv", "regular file"]),
    Case("a table that is endless", link("l.csv", "/dev/zero"), "data label v2.1 --csv l.csv", ["l.csv", "regular file"]),
    Case("a table beside lists", write("l.csv", "episode,success\n0,1\n"), "data label v2.1 --csv l.csv --success 1", ["--csv", "--success"]),
    sidecar("that are no JSON", "episode 0 succeeded\n", "line 1"),
    sidecar("that are a list", "[0, true]\n", "line 1", "object"),
    sidecar("that are a deep nest", "[" * 100_000, "line 1"),
    sidecar("of an unknown key", '{"episode": 0, "__class__": 1}\n', "line 1", "__class__"),
    sidecar("of episode true", '{"episode": true, "success": true}\n', "line 1", "episode number"),
    sidecar("of success 1", '{"episode": 0, "success": 1}\n', "line 1", "true or false"),
    sidecar("of a reward that is infinite", '{"episode": 0, "reward": Infinity}\n', "line 1", "finite"),
    sidecar("of a reward of 400 digits", '{"episode": 0, "reward": ' + "9" * 400 + "}\n", "line 1", "finite"),
    sidecar("of nothing", '{"episode": 0}\n', "line 1", "says nothing"),
    sidecar("in UTF-16", '{"episode": 0}'.encode("utf-16"), "cannot be read"),
    Case("labels that are a pipe", pipe(SIDECAR), "data label v2.1 --success 0", ["pirl_labels.jsonl", "regular file"]),
    Case("labels that are a directory", directory(SIDECAR), "data label v2.1 --success 0", ["pirl_labels.jsonl", "regular file"]),
    Case("labels that lead out", both(write(SIDECAR, ""), move_out(SIDECAR)), "data label v2.1 --success 0", ["pirl_labels.jsonl", "link that leaves"]),
    Case("labels that lead to nowhere outside", link(SIDECAR, "OUTSIDE/new.jsonl"), "data label v2.1 --success 0", ["pirl_labels.jsonl", "link that leaves"]),
    flags("of words", ["--success", "first"], "'first'", "episode number"),
    flags("of nothing", ["--success", ""], "--success names no episodes"),
    flags("of commas", ["--success", ",,,"], "--success names no episodes"),
    flags("below zero", ["--success=-1"], "'-1'"),
    flags("the wrong way round", ["--success", "2-0"], "'2-0'"),
    flags("beyond the last", ["--success", "0-99999"], "99999", "the last one is 2"),
    flags("of fifty digits", ["--success", "9" * 50], "episode number"),
    flags("that contradict each other", ["--success", "0", "--failure", "0"], "episode 0", "both"),
    flags("of the rest and the rest", ["--success", "rest", "--failure", "rest"], "rest"),
    Case(
        "a list of episodes as long as a number in the data",
        both(*(column(f"v3.0/data/chunk-000/file-00{i}.parquet", "episode_index", lambda n: pa.array([2**39] * n)) for i in (0, 1))),
        "data label v3.0 --success 0-549755813888",
        ["v3.0"],
    ),
]  # fmt: skip

ROBOTS = [
    robot_file("that is not there", nothing, "No such file"),
    robot_file("that is a directory", directory("r.json"), "regular file"),
    robot_file("that is a pipe", pipe("r.json"), "regular file"),
    robot_file("that is endless", link("r.json", "/dev/zero"), "regular file"),
    robot_file("that is empty", write("r.json", b""), "cannot be read"),
    robot_file("that is a deep nest", write("r.json", "[" * 100_000), "cannot be read"),
    robot_file("in UTF-16", write("r.json", json.dumps(ARM).encode("utf-16")), "cannot be read"),
    robot_file("begun by a byte order mark", write("r.json", b"\xef\xbb\xbf" + json.dumps(ARM).encode()), "BOM"),
    Case("a robot that is a list", write("r.json", "[]"), "data stats v2.1 --robot r.json --horizon 2", ["mapping"]),
    robot("of an unknown field", "unknown field 'colour'", colour="red"),
    robot("of Python's own field", "unknown field '__class__'", __class__="os.system"),
    robot("called by a number", "name should be text", name=3),
    robot("without columns", "state names no dataset column", state=[]),
    robot("with a column that is not there", "column gone: is not in the data", state=["gone"]),
    robot("with a column of pictures", "observation.images.cam_high", state=["observation.images.cam_high"]),
    robot("with columns of text for a list", "state should be a list", state="observation.state"),
    robot("with cameras that are a list", "cameras should be a mapping", cameras=["top"]),
    robot("of another width", "4 dimensions", "has 9", state_dim=9),
    robot("of negative width", "state_dim = -1", state_dim=-1),
    robot("of true width", "state_dim should be a whole number", state_dim=True),
    robot("whose delta covers a billion dimensions", "delta", "dimensions", delta=[10**9]),
    robot("whose delta covers 10^400 dimensions", "delta", delta=[10**400]),
    robot("whose delta is fractions", "delta should be a list of whole numbers", delta=[0.5]),
    robot("whose delta is wider than its state", "delta", "dimensions", delta=[7]),
    robot("that adapts by magic", "adapt should be none or aloha", adapt="magic"),
    Case("a robot of an unknown preset", nothing, "data stats v2.1 --robot alhoa --horizon 2", ["alhoa", "Did you mean aloha?"]),
    Case("a robot in nobody's home", nothing, "data stats v2.1 --robot ~nobody_at_all/r.json --horizon 2", ["~nobody_at_all"]),
    Case("a robot with a NUL in its name", nothing, ["data", "stats", "v2.1", "--robot", "a\0.json", "--horizon", "2"], ["should be text"]),
]  # fmt: skip


@parametrized([*LABELS, *ROBOTS])
def test_hostile_labels_and_robots_are_refused_by_name(with_datasets, case):
    with_datasets.try_case(case)
