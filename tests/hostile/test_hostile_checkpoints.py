"""Checkpoints made to hurt: each is refused with one message that names what is wrong, and nothing is ever unpickled."""

# ruff: noqa: E501  one case per line, however long: a table is read from above to below

import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from arena import Case, Hurt, both, cut, delete, directory, link, nothing, parametrized, pipe, scramble, write
from test_hostile_datasets import Bait

PARAMS, STATS, ABOUT = "policy/params", "policy/assets/arm/norm_stats.json", "policy/pirl.json"
MANIFEST, METADATA = f"{PARAMS}/manifest.ocdbt", f"{PARAMS}/_METADATA"
INSPECT, CHECK, EVALUATE = "convert policy", "convert --check policy", "eval policy --env tabletop --episodes 1"
LEAF = "('params', 'action_in_proj', 'bias')"


def json_file(name: str, change: Any) -> Hurt:
    """Change the content of a JSON file, in place or by returning another."""

    def hurt(work: Path) -> None:
        content = json.loads((work / name).read_text())
        changed = change(content)
        (work / name).write_text(json.dumps(content if changed is None else changed))

    return hurt


def about(key: str, value: Any) -> Hurt:
    """Another value in what pirl.json says of the model."""
    return json_file(ABOUT, lambda content: content["model"].__setitem__(key, value))


def stats(key: str, value: Any) -> Hurt:
    """Another value in the statistics of the state."""
    return json_file(STATS, lambda content: content["norm_stats"]["state"].__setitem__(key, value))


def leaf(key: str, value: Any) -> Hurt:
    """Another value in what the store says about one of its arrays."""
    return json_file(METADATA, lambda content: content["tree_metadata"][LEAF]["value_metadata"].__setitem__(key, value))


def npz(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, params=array)
    return file.getvalue()


def safetensors(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


def only(name: str, content: bytes) -> Hurt:
    """A checkpoint that consists of one file alone."""
    return both(delete("policy"), write(f"policy/{name}", content))


STORES = [
    Case("params is missing", delete(PARAMS), INSPECT, ["policy", "neither params/ nor model.safetensors"]),
    Case("params is a file", write(PARAMS, "no"), INSPECT, ["policy", "neither params/ nor model.safetensors"]),
    Case("params is a pickle", write(PARAMS, pickle.dumps(Bait())), INSPECT, ["policy", "neither params/ nor model.safetensors"]),
    Case("params is a link to nowhere", link(PARAMS, "nowhere"), INSPECT, ["policy", "neither params/ nor model.safetensors"]),
    Case("params is empty", directory(PARAMS), INSPECT, ["policy/params", "_METADATA is missing"]),
    Case("the metadata is missing", delete(METADATA), INSPECT, ["policy/params", "_METADATA is missing"]),
    Case("the metadata is a pipe", pipe(METADATA), INSPECT, ["policy/params", "_METADATA is not a regular file"]),
    Case("the metadata is a list", write(METADATA, "[]"), INSPECT, ["policy/params", "metadata", "Copy"]),
    Case("the metadata is no JSON", write(METADATA, "tree_metadata: 3"), INSPECT, ["policy/params", "metadata", "Copy"]),
    Case("the metadata is a deep nest", write(METADATA, "[" * 100_000), INSPECT, ["policy/params", "metadata", "Copy"]),
    Case("the metadata is empty", write(METADATA, "{}"), INSPECT, ["policy/params"]),
    Case("the metadata is a pickle", write(METADATA, pickle.dumps(Bait())), INSPECT, ["policy/params", "metadata", "Copy"]),
    Case("the metadata knows no arrays", json_file(METADATA, lambda content: content | {"tree_metadata": {}}), INSPECT, ["policy/params"]),
    Case("an array is said to be a string", leaf("value_type", "string"), INSPECT, ["policy/params"]),
    Case("an array is said to be a Python object", leaf("value_type", "builtins.eval"), CHECK, ["policy"]),
    Case("an array is called by its climbing path", json_file(METADATA, lambda content: content["tree_metadata"].update({"('params', '../../../outside/x')": {"key_metadata": [{"key": "params", "key_type": 2}, {"key": "../../../outside/x", "key_type": 2}], "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}})), INSPECT, ["policy/params", "Copy"]),
    Case("the key of an array is an expression", json_file(METADATA, lambda content: content["tree_metadata"].update({"__import__('os').mkdir('executed')": content["tree_metadata"].pop(LEAF)})), CHECK, ["sound"], code=0, findings=True),
    Case("the manifest is missing", delete(MANIFEST), INSPECT, ["policy/params", "manifest.ocdbt is missing"]),
    Case("the manifest is cut", cut(MANIFEST), INSPECT, ["policy/params", "manifest.ocdbt", "Copy"]),
    Case("the manifest is scrambled", scramble(MANIFEST), INSPECT, ["policy/params", "manifest.ocdbt", "Copy"]),
    Case("the manifest is empty", write(MANIFEST, b""), INSPECT, ["policy/params", "manifest.ocdbt", "Copy"]),
    Case("the manifest is a pickle", write(MANIFEST, pickle.dumps(Bait())), INSPECT, ["policy/params", "manifest.ocdbt", "Copy"]),
    Case("the manifest is a directory", directory(MANIFEST), INSPECT, ["policy/params", "Copy"]),
    Case("the manifest is a pipe", pipe(MANIFEST), INSPECT, ["policy/params", "Copy"]),
    Case("the arrays are missing", delete(f"{PARAMS}/ocdbt.process_0"), CHECK, ["policy/params", "Copy"]),
    Case("the checkpoint is a file", both(delete("policy"), write("policy", "no")), INSPECT, ["policy", "it is a file"]),
    Case("the checkpoint is an array of objects", only("params.npz", npz(np.array([Bait()], dtype=object))), INSPECT, ["policy", "neither params/ nor model.safetensors"]),
    Case("the checkpoint is a pickle", only("params.pkl", pickle.dumps(Bait())), INSPECT, ["policy", "neither params/ nor model.safetensors"]),
    Case("the checkpoint is a safetensors file with a lying header", only("model.safetensors", safetensors(b"{}", 2**63)), INSPECT, ["model.safetensors", "damaged or incomplete"]),
    Case("the checkpoint is a safetensors file of nothing", only("model.safetensors", b""), INSPECT, ["model.safetensors", "damaged or incomplete"]),
    Case("the checkpoint is a safetensors file without tensors", only("model.safetensors", safetensors(b"{}")), INSPECT, ["model.safetensors", "no parameters of a π₀"]),
    Case("the checkpoint is a safetensors file of pickles", only("model.safetensors", pickle.dumps(Bait())), INSPECT, ["model.safetensors", "damaged or incomplete"]),
    Case("a tensor lies beyond the end of its file", only("model.safetensors", safetensors(b'{"state_proj.bias": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}')), INSPECT, ["model.safetensors", "damaged or incomplete"]),
    Case("a weight in PyTorch has no axes", only("model.safetensors", safetensors(b'{"paligemma_with_expert.paligemma.model.language_model.layers.0.self_attn.k_proj.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}') + bytes(4)), INSPECT, ["k_proj.weight of shape ()", "expected 2 dims"]),
    Case("the model of a PyTorch file is no object", both(only("model.safetensors", safetensors(b"{}")), write("policy/pirl.json", '{"model": 3}')), INSPECT, ["pirl.json"]),
    Case("the checkpoint is a bucket", nothing, "convert gs://openpi-assets/checkpoints/pi0_base", ["gs:/", "copy it first"]),
]  # fmt: skip

DESCRIPTIONS = [
    Case("pirl.json is no JSON", write(ABOUT, "model: pi0"), INSPECT, ["pirl.json", "Copy"]),
    Case("pirl.json is a list", write(ABOUT, "[]"), INSPECT, ["pirl.json", "object"]),
    Case("pirl.json is a deep nest", write(ABOUT, "[" * 100_000), INSPECT, ["pirl.json", "Copy"]),
    Case("pirl.json is in UTF-16", write(ABOUT, '{"model": null}'.encode("utf-16")), INSPECT, ["pirl.json", "Copy"]),
    Case("pirl.json describes the model by a list", json_file(ABOUT, lambda content: content | {"model": [1]}), CHECK, ["pirl.json|model"]),
    Case("pirl.json describes a model of half its fields", json_file(ABOUT, lambda content: content | {"model": {"pi05": True}}), CHECK, ["model"]),
    Case("pirl.json describes an unknown field", about("run", "rm"), CHECK, ["run"]),
    Case("the model is of another width", about("action_dim", 6), CHECK, ["of another shape", "action_in_proj"]),
    Case("the model has a negative width", about("action_dim", -6), CHECK, ["action_dim", "-6"]),
    Case("the model is as wide as the world", about("action_dim", 10**18), CHECK, ["action_dim|action_in_proj"]),
    Case("the model's depth is a billion", about("language", {"width": 16, "depth": 10**9, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}), CHECK, ["pirl.json", "language.depth"]),
    Case("the model's vision is a word", about("vision", "good"), CHECK, ["vision", "good"]),
    Case("the model's dtype is a trap", about("param_dtype", "object"), CHECK, ["object"]),
    Case("the model's dtype is unknown", about("dtype", "float33"), CHECK, ["float33"]),
    Case("the tokenizer is a path outside", about("tokenizer", "../../etc/passwd"), CHECK, ["tokenizer"]),
    Case("the pictures have no size", about("image_resolution", [0, 0]), CHECK, ["image_resolution"]),
    Case("the policy reads no prompt and is to be guided by it", about("max_token_len", 0), f"{EVALUATE} --guidance 2", ["guidance needs a prompt", "max_token_len = 0"]),
    Case("pirl.json guides a policy that reads no prompt", both(about("max_token_len", 0), json_file(ABOUT, lambda content: content | {"guidance": 2.0})), EVALUATE, ["guidance needs a prompt", "max_token_len = 0"]),
    Case("the robot in pirl.json is a list", json_file(ABOUT, lambda content: content | {"robot": [1]}), EVALUATE, ["robot", "mapping"]),
]  # fmt: skip

STATISTICS = [
    Case("statistics are no JSON", write(STATS, "mean: 3"), CHECK, ["norm_stats.json", "not JSON"]),
    Case("statistics are empty", write(STATS, b""), CHECK, ["norm_stats.json", "not JSON"]),
    Case("statistics are a list", write(STATS, "[]"), CHECK, ["norm_stats.json", "norm_stats"]),
    Case("statistics are a deep nest", write(STATS, "[" * 100_000), CHECK, ["norm_stats.json"]),
    Case("statistics are no text", write(STATS, b"\xff\xfe\xfd"), CHECK, ["norm_stats.json", "not JSON"]),
    Case("statistics are a pickle", write(STATS, pickle.dumps(Bait())), CHECK, ["norm_stats.json", "not JSON"]),
    Case("statistics are a directory", directory(STATS), CHECK, ["norm_stats.json"]),
    Case("statistics are a pipe", pipe(STATS), CHECK, ["norm_stats.json"]),
    Case("statistics are a link to nowhere", link(STATS, "nowhere"), CHECK, ["no norm_stats.json"], code=0, findings=True),
    Case("statistics are endless", link(STATS, "/dev/zero"), CHECK, ["norm_stats.json"]),
    Case("a mean is missing", json_file(STATS, lambda content: content["norm_stats"]["state"].pop("mean") and None), CHECK, ["norm_stats.json", "mean"]),
    Case("a mean is null", stats("mean", None), CHECK, ["norm_stats.json", "mean"]),
    Case("a mean is NaN", stats("mean", [float("nan")] * 3), CHECK, ["norm_stats.json", "state.mean", "finite"]),
    Case("a mean is 10^400", stats("mean", [10**400] * 3), CHECK, ["norm_stats.json", "state.mean"]),
    Case("a mean is text", stats("mean", ["1", "2", "3"]), CHECK, ["norm_stats.json", "state.mean", "numbers"]),
    Case("a mean is true and false", stats("mean", [True, False, True]), CHECK, ["norm_stats.json", "state.mean", "numbers"]),
    Case("a mean is a matrix", stats("mean", [[1, 2, 3]]), CHECK, ["norm_stats.json", "state.mean"]),
    Case("a mean is ragged", stats("mean", [1, [2, 3]]), CHECK, ["norm_stats.json", "state.mean"]),
    Case("a mean is one number", stats("mean", 1.0), CHECK, ["norm_stats.json", "state.mean"]),
    Case("a mean is longer than its deviation", stats("mean", [0.0] * 4), CHECK, ["norm_stats.json", "different lengths"]),
    Case("a deviation is negative", stats("std", [1.0, -1.0, 1.0]), CHECK, ["norm_stats.json", "state.std", "negative|zero or more"]),
    Case("quantiles are the wrong way round", stats("q01", [5.0, 5.0, 5.0]), CHECK, ["norm_stats.json", "q01", "q99"]),
    Case("the asset id climbs", nothing, f"{EVALUATE} --asset-id ../../outside", ["../../outside"]),
    Case("the asset id is absolute", nothing, f"{EVALUATE} --asset-id /etc", ["/etc"]),
]  # fmt: skip

TARGETS = [
    Case("the output is the checkpoint itself", nothing, "convert policy policy --overwrite", ["policy", "itself"]),
    Case("the output is inside the checkpoint", nothing, "convert policy policy/params/x", ["inside it"]),
    Case("the output is a file", write("there", "precious"), "convert policy there --overwrite", ["there", "not a checkpoint"]),
    Case("the output is a directory of others", write("there/a.txt", "precious"), "convert policy there --overwrite", ["there", "not a checkpoint"]),
    Case("the output is a link out", link("there", "OUTSIDE"), "convert policy there --overwrite", ["outside", "not a checkpoint"]),
    Case("the output is below a file", write("there", "precious"), "convert policy there/below", ["there"]),
    Case("the output is below nobody's home", nothing, "convert policy ~nobody_at_all/x", ["~nobody_at_all"]),
    Case("the output has a name too long", nothing, ["convert", "policy", "a" * 300], ["too long"]),
    Case("the output is a pattern", nothing, "convert policy there[*]", ["there[*]"]),
    Case("the statistics to be written climb", both(delete("policy/assets"), lambda work: (work / "policy/assets").symlink_to(work.parent / "outside")), "convert policy there --overwrite", [], code=0, findings=True, writes="there"),
]  # fmt: skip


@parametrized([*STORES, *DESCRIPTIONS, *STATISTICS, *TARGETS])
def test_a_hostile_checkpoint_is_refused_by_name(with_checkpoint, case):
    with_checkpoint.try_case(case)


def test_a_sound_checkpoint_passes_the_same_guards(with_checkpoint):
    """Else the cases above would prove nothing."""
    with_checkpoint.try_case(Case("inspect", nothing, INSPECT, ["pirl.json yes"], code=0, findings=True))
    with_checkpoint.try_case(Case("check", nothing, CHECK, ["sound"], code=0, findings=True))
