"""Fuzz everything that reads text: whatever a file holds, a reader returns or says in its own words what is wrong.

    python scripts/fuzz.py --seconds 600 [READER …]

Needs atheris (`make fuzz` installs it), which mutates where that leads to code that was not reached before. Inputs that
make a reader fail in another way are kept in the directory of --findings, named after the reader and the error.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import json
import random
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBERS = (0, -1, 1, 0.5, 2**31, 2**63, 10**30, 10**400, float("nan"), float("inf"), -0.0, 1e308)
TEXTS = ("", "..", "/etc", "\0", "\ud800", "{episode_index.__class__}", "{}", "none", "v3.0", "video", "a" * 300, "💥")
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": {}}, [None], [1, [2]], {"": ""})


def mutate(data: bytes, size: int, seed: int) -> bytes:
    """Change one node of a JSON text, or of one of its lines; what is no JSON is changed byte by byte."""
    atheris, rng = importlib.import_module("atheris"), random.Random(seed)
    lines = data.split(b"\n")
    index = rng.randrange(len(lines)) if rng.random() < 0.5 else None
    try:
        if rng.random() < 0.3:
            raise ValueError("by bytes, for a change")
        tree = json.loads(data if index is None else lines[index])
        text = json.dumps(_mutated(tree, rng)).encode()
    except (ValueError, RecursionError):
        return bytes(atheris.Mutate(data, size))
    if index is not None:
        lines[index] = text
        text = b"\n".join(lines)
    return text[:size]


def _mutated(node: Any, rng: random.Random) -> Any:
    """The tree with one node replaced, dropped, doubled or renamed, at any depth."""
    if isinstance(node, dict | list) and node and rng.random() < 0.75:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        action = rng.random()
        if action < 0.1:
            node.pop(key)
        elif action < 0.2 and isinstance(node, dict):
            node[rng.choice(TEXTS)] = node.pop(key)
        elif action < 0.2 and isinstance(node, list):
            node.insert(key, node[key])
        else:
            node[key] = _mutated(node[key], rng)
        return node
    other = copy.deepcopy(rng.choice(OTHERS))
    return rng.choice([rng.choice(NUMBERS), rng.choice(TEXTS), other, [node], {"a": node}, str(node)])


# --- readers: what they are given, and what they begin with -----------------------------------------------------------


def read_info(place: Path, data: bytes) -> None:
    """The info.json of a dataset."""
    from pirl.data.lerobot.format import fill, glob_pattern, read_info, resolve_inside

    _write(place / "meta" / "info.json", data)
    info = read_info(place)
    for template in (info.data_path, info.video_path):
        with contextlib.suppress(ValueError):
            resolve_inside(place, fill(template, 1, 2, "camera"))
        glob_pattern(template)
    for feature in info.features.values():
        assert feature.image_size is None or len(feature.image_size) == 2


def read_listing(place: Path, data: bytes) -> None:
    """Lists of episodes and of tasks, line by line."""
    from pirl.data.lerobot.format import Info, read_listing

    for name in ("episodes", "tasks"):
        _write(place / "meta" / f"{name}.jsonl", data)
    read_listing(place, Info("v2.1", 10.0, {}, "d", "v", 1000, None, None, None))


def read_norm_stats(place: Path, data: bytes) -> None:
    """The norm_stats.json of a checkpoint."""
    from pirl.interop.norm_stats import read_norm_stats, write_norm_stats

    _write(place / "norm_stats.json", data)
    stats = read_norm_stats(place / "norm_stats.json")
    with contextlib.suppress(UnicodeEncodeError):
        write_norm_stats(place / "again.json", stats)
        assert read_norm_stats(place / "again.json") == stats


def read_labels(place: Path, data: bytes) -> None:
    """The labels of a dataset."""
    from pirl.data.labels import read_labels, write_labels

    _write(place / "meta" / "pirl_labels.jsonl", data)
    labels = read_labels(place)
    write_labels(place, labels)
    assert read_labels(place) == labels


def read_csv(place: Path, data: bytes) -> None:
    """A table of labels."""
    from pirl.data.labels import parse_episodes, read_csv

    _write(place / "labels.csv", data)
    read_csv(place / "labels.csv")
    parse_episodes(data.decode(errors="replace"), 1000)


def load_config(place: Path, data: bytes) -> None:
    """A configuration in YAML."""
    from pirl.config import check_config, format_config, load_config, parse_config

    _write(place / "config.yaml", data)
    config = load_config(place / "config.yaml", "demo_bc")
    assert parse_config(format_config(config)) == config
    check_config(config, device_count=1)


def load_robot(place: Path, data: bytes) -> None:
    """A robot's description."""
    from pirl.data.robots import Robot, load_robot

    _write(place / "robot.json", data)
    robot = load_robot(str(place / "robot.json"))
    assert Robot.from_dict(robot.to_dict()) == robot
    robot.transforms()


def read_metrics(place: Path, data: bytes) -> None:
    """The metrics.jsonl of a run."""
    from pirl.report.runs import read_run

    _write(place / "metrics.jsonl", data)
    read_run(place)


def read_record(place: Path, data: bytes) -> None:
    """What is written beside the arrays of a full state."""
    from pirl.files import DamageError, check_files, read_record
    from pirl.training.checkpoints import check_leaves

    _write(place / "state.json", data)
    with contextlib.suppress(DamageError):
        record = read_record(place / "state.json")
        check_files(place, record)
        check_leaves(place, record, {})


def read_model(place: Path, data: bytes) -> None:
    """What pirl.json says of a model."""
    from pirl.models.config import Pi0Config

    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(data)
        Pi0Config.from_dict(content)


READERS: dict[str, Callable[[Path, bytes], None]] = {
    reader.__name__: reader
    for reader in (
        *(read_info, read_listing, read_norm_stats, read_labels, read_csv, load_config, load_robot),
        *(read_metrics, read_record, read_model),
    )
}


def seeds(reader: str) -> Iterator[str]:
    """Sound input. What takes long to import is imported for those alone who need it."""
    if reader == "read_csv":
        yield from ("episode,success,reward,truncated\n0,yes,1.5,no\n1,0,,\n", "0,3,7-12")
    elif reader == "load_robot":
        from pirl.data.robots import get_robot

        yield from (json.dumps(get_robot(name).to_dict()) for name in ("aloha", "aloha_sim"))
    elif reader == "read_model":
        from pirl.models.config import get_model_config

        yield from (json.dumps(get_model_config(name).to_dict()) for name in ("tiny", "tiny_lora"))
    elif reader == "load_config":
        from pirl.config import get_config
        from pirl.config.io import to_plain

        yield from (json.dumps(to_plain(get_config(name))) for name in ("demo_bc", "demo", "demo_ript"))
        yield "preset: demo_bc\nsteps: 3\nagent:\n  learner: bc\n  optimizer: {peak_lr: 3e-4}\nenv: {id: tabletop}\n"
    else:
        text = json.dumps(_SOUND[reader])
        yield from (text, f"{text}\n{text}\n", text.replace("v2.1", "v3.0"))


_STATS = {"mean": [0.0, 1.0], "std": [1.0, 2.0], "q01": [-1.0, 0.0], "q99": [1.0, 2.0]}
_CAMERA = {
    "dtype": "video",
    "shape": [16, 32, 3],
    "names": ["height", "width", "channel"],
    "info": {"video.codec": "h"},
}
_SOUND: dict[str, dict[str, Any]] = {
    "read_info": {
        **{"codebase_version": "v2.1", "total_episodes": 3, "total_frames": 12, "chunks_size": 1000, "fps": 10},
        **{
            "data_path": "data/{chunk_index:03d}/{file_index:03d}.parquet",
            "video_path": "{video_key}/{file_index:d}.mp4",
        },
        "robot_type": "arm",
        "features": {"top": _CAMERA, "action": {"dtype": "float32", "shape": [3], "names": {"motors": ["a", "b"]}}},
    },
    "read_listing": {"episode_index": 0, "tasks": ["pick"], "length": 4, "task_index": 0, "task": "pick"},
    "read_norm_stats": {"norm_stats": {"state": _STATS, "actions": _STATS}},
    "read_labels": {"episode": 0, "success": True, "reward": 0.5, "truncated": False, "length": 7},
    "read_metrics": {"step": 1, "loss": 0.5, "note": None},
    "read_record": {"leaves": {"a": [[2, 3], "float32", "b"]}, "files": {"a/b": [1, 0]}, "step": 3, "checksum": 0},
}


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)


# --- running ----------------------------------------------------------------------------------------------------------


def attempt(reader: Callable[[Path, bytes], None], place: Path, findings: Path, data: bytes) -> None:
    """Let a reader read; keep what makes it fail otherwise than in words, once for each place in the code."""
    from pirl.errors import UserError

    try:
        reader(place, data)
    except UserError:
        pass
    except Exception as error:  # whatever it is, it is a finding
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "pirl" in Path(frame.filename).parts]
        where = f"{Path(frames[-1].filename).stem}-{frames[-1].lineno}" if frames else "here"
        name = f"{reader.__name__}-{type(error).__name__}-{where}"
        file = findings / name
        if not file.exists() or len(data) < file.stat().st_size:
            file.write_bytes(data)


def fuzz(name: str, seconds: int, findings: Path) -> None:
    """Fuzz one reader in this process, which ends with it."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["pirl", "yaml"]), tempfile.TemporaryDirectory() as directory:
        place, corpus = Path(directory, "place"), Path(directory, "corpus")
        place.mkdir()
        corpus.mkdir()
        for index, seed in enumerate(seeds(name)):
            (corpus / str(index)).write_text(seed)
            attempt(READERS[name], place, findings, seed.encode())  # imports what it needs, instrumented
        limits = [
            "-max_len=20000",
            "-timeout=30",
            "-rss_limit_mb=6000",
            "-print_final_stats=1",
            "-report_slow_units=60",
        ]
        limits.append(f"-max_total_time={seconds}")
        arguments = [sys.argv[0], *limits, f"-artifact_prefix={findings}/{name}-", str(corpus)]
        atheris.Setup(arguments, functools.partial(attempt, READERS[name], place, findings), custom_mutator=mutate)
        atheris.Fuzz()


def main() -> int:
    """Fuzz the readers one after the other, each for its share of the time; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", default=[], metavar="READER", help=f"some of {', '.join(READERS)}")
    parser.add_argument("--seconds", type=int, default=600, help="in all")
    parser.add_argument("--findings", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := sorted(set(options.readers) - set(READERS)):
        parser.error(f"no such reader: {', '.join(unknown)}")
    options.findings.mkdir(parents=True, exist_ok=True)
    readers = options.readers or list(READERS)
    if options.here:
        fuzz(readers[0], options.seconds, options.findings.resolve())
    share = max(1, options.seconds // len(readers))
    for reader in readers:
        command = [sys.executable, __file__, reader, "--here", f"--seconds={share}", f"--findings={options.findings}"]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        runs = re.search(r"number_of_executed_units:\s*(\d+)", ended.stderr)
        covered = re.findall(r"cov: (\d+)", ended.stderr)
        found = sorted(file.name for file in options.findings.glob(f"{reader}-*"))
        tried = f"{int(runs[1]):,} inputs" if runs else f"ended with {ended.returncode}: {ended.stderr[-500:]}"
        print(f"{reader}: {tried}, {covered[-1] if covered else 0} edges, {len(found)} findings", *found, sep="\n  ")
        sys.stdout.flush()
    return 1 if any(options.findings.iterdir()) else 0


if __name__ == "__main__":
    sys.exit(main())
