"""Damage to info.json, listed and random."""

import copy
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sample_datasets import broken_metadata  # noqa: F401  it lists its damage
from sample_datasets.broken_files import become_directory, void
from sample_datasets.broken_rows import BOTH, NAN, damage
from sample_datasets.build import CAMERAS, V2_PATHS, Built, Variant, edit_info

# Damage to info.json.


def info_damage(name: str, path: Sequence[str], value: Any, *expected: str, **options: Any) -> None:
    """List one wrong entry of info.json, in a v2.1 dataset if nothing else is said: a complaint names the key."""
    what = "absent" if value is ... else f"{value!r:.60}"
    variant = functools.partial(edit_info, path=path, value=value)
    options = {"versions": ["v2.1"]} | options
    damage(name, f"{' → '.join(path)} is {what}.", lambda built: variant(built), *expected, **options)


TRICKS = {
    "unknown_field": "{foo}",
    "unknown_wide_field": "{foo:03d}",
    "attribute": "{episode_index.__class__}",
    "item": "{video_key[0]}",
    "enormous_width": "{episode_index:>999999999}",
    "nested_field": "{episode_index:{chunk_index}}",
    "position": "{}",
    "number": "{0}",
    "open_brace": "{episode_index",
    "lone_brace": "episode}",
    "wrong_type": "{episode_index:s}",
    "conversion": "{episode_index!r:>99}",
    "null_byte": "\0",
    "endless_name": "a" * 5000,
}
value: Any
for kind, cameras in (("data", "none"), ("video", "video")):
    path = [f"{kind}_path"]
    for name, trick in TRICKS.items():
        info_damage(f"{kind}_path_{name}", path, f"{kind}s/{trick}.file", f"{kind}_path|.file", cameras=cameras)
    for name, value in {"a_number": 3, "a_list": ["data"], "an_object": {"a": 1}}.items():
        info_damage(f"{kind}_path_{name}", path, value, f"{kind}_path", cameras=cameras, versions=BOTH)
# A template that leaves out the episode or the camera finds the same file for all of them.
ONE_FILE = "data/chunk-000/episode_000000.parquet"
ONE_CAMERA = f"videos/chunk-000/{CAMERAS[0]}/episode_{{episode_index:06d}}.mp4"
info_damage("data_path_of_one_file", ["data_path"], ONE_FILE, "data_path|episode_000000|episode 1")
info_damage("video_path_of_one_camera", ["video_path"], ONE_CAMERA, "video_path|cam_left_wrist", cameras="video")

FPS = {"zero": 0, "negative": -10, "string": "ten", "nan": NAN, "infinite": np.inf, "true": True, "huge": 10**400}
for name, value in (FPS | {"null": None, "absent": ...}).items():
    info_damage(f"fps_{name}", ["fps"], value, "fps", versions=BOTH)
for name, value in {
    "old": "v1.6",
    "future": "v9.0",
    "words": "newest",
    "number": 3,
    "null": None,
    "absent": ...,
}.items():
    info_damage(f"version_{name}", ["codebase_version"], value, value if isinstance(value, str) else "version")
for name, value in {"zero": 0, "negative": -1, "string": "many", "fraction": 1.5}.items():
    info_damage(f"chunks_size_{name}", ["chunks_size"], value, "chunks_size")
# These are for information, but a wrong one says that something is amiss.
for name, value in {"huge": 10**18, "negative": -1, "string": "three", "too_many": 4, "too_few": 2}.items():
    info_damage(f"total_episodes_{name}", ["total_episodes"], value, "total_episodes", versions=BOTH)
for name, value in {"huge": 10**18, "negative": -1, "string": "many", "other": 99}.items():
    info_damage(f"total_frames_{name}", ["total_frames"], value, "total_frames", versions=BOTH)
for name, value in {"list": [], "string": "all", "empty": {}, "null": None, "absent": ...}.items():
    info_damage(f"features_{name}", ["features"], value, "feature|action", versions=BOTH)
ACTION = ["features", "action"]
for name, value in {"null": None, "list": [1], "string": "float32", "empty": {}}.items():
    info_damage(f"feature_{name}", ACTION, value, "action")
for name, value in {"unknown": "flout32", "number": 32, "null": None, "absent": ..., "object": "object"}.items():
    info_damage(f"dtype_{name}", [*ACTION, "dtype"], value, "action")
SHAPES = {"null": None, "string": "3", "negative": [-3], "empty": [], "words": ["three"], "absent": ..., "other": [5]}
for name, value in (SHAPES | {"huge": [10**12], "zero": [0]}).items():
    info_damage(f"shape_{name}", [*ACTION, "shape"], value, "action")
for name, value in {"flat": [32], "null": None, "string": "32x48", "four": [1, 32, 48, 3]}.items():
    info_damage(f"camera_shape_{name}", ["features", CAMERAS[0], "shape"], value, "cam_high", cameras="video")

INFO_TEXTS = {
    "empty": b"",
    "not_json": b"codebase_version: v2.1\n",
    "cut_off": b'{"codebase_version": "v2.1", "fps":',
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "binary": bytes(range(128, 256)),
    "nested_too_deeply": b"[" * 100_000,
    "number_too_long": b'{"codebase_version": "v2.1", "fps": ' + b"9" * 5000 + b"}",
}


def info_file_damage(name: str, description: str, change: Callable[[Path], object]) -> None:
    """List an info.json that is none: a complaint names it."""
    variant: Variant = lambda built: void(change(built.root / "meta/info.json"))  # noqa: E731
    damage(f"info_{name}", description, variant, "info.json", versions=["v2.1"])


for name, text in INFO_TEXTS.items():
    info_file_damage(name, f"info.json is {text[:40]!r}.", functools.partial(Path.write_bytes, data=text))
info_file_damage("missing", "info.json is absent.", Path.unlink)
info_file_damage("directory", "info.json is a directory.", become_directory)


def no_dataset(name: str, description: str, change: Callable[[Path], object]) -> None:
    """List a path where there is no dataset: a complaint names it."""

    def variant(built: Built) -> None:
        shutil.rmtree(built.root)
        change(built.root)

    damage(name, description, variant, "dataset", versions=["v2.1"])


no_dataset("empty_directory", "The directory is empty.", Path.mkdir)
no_dataset("file_for_dataset", "The path is that of a file.", lambda path: path.write_text("nothing to see"))
no_dataset("nothing_there", "The path does not exist.", lambda path: None)


# Random damage.

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**18, 10**400, 1e308]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["v2.1", "v3.0", "video", "image", "float32", "../..", "/etc", *V2_PATHS.values(), *TRICKS.values()]
    ),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def _entry(draw: st.DrawFn, node: Any) -> tuple[Any, Any]:
    """Some entry at some depth, the keys at the top being as likely as each other: its container and its key there."""
    key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
    inner = node[key]
    return _entry(draw, inner) if isinstance(inner, dict | list) and inner and draw(st.booleans()) else (node, key)


@st.composite
def fuzz_info(draw: st.DrawFn, info: Mapping[str, Any]) -> dict[str, Any]:
    """An info.json some entries of which, at any depth, are removed, replaced, renamed or of another type."""
    mutated = copy.deepcopy(dict(info))
    for _ in range(draw(st.integers(1, 3))):
        container, key = _entry(draw, mutated)
        value = container.pop(key)
        mutation = draw(st.sampled_from(["drop", "replace", "rename", "retype"]))
        if mutation == "replace":
            value = draw(JUNK)
        elif mutation == "retype":
            value = draw(st.sampled_from([str(value), [value], {"value": value}, bool(value)]))
        if mutation != "drop" and isinstance(container, dict):
            container[draw(st.text(max_size=8)) if mutation == "rename" else key] = value
        elif mutation != "drop":
            container.insert(key, value)
    return mutated
