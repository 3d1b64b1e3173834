"""OpenPI's PyTorch checkpoints: what the real transformers and safetensors wrote is read and written the same."""

import dataclasses
import json
import os
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from builders import MICRO, MICRO_LORA, MICRO_PI05, random_model
from pirl.errors import CheckpointError
from pirl.interop.checkpoint import compare, load_policy, open_checkpoint, save_checkpoint, save_policy
from pirl.interop.pytorch import RULES
from pirl.models import Observation
from pirl.models.config import Pi0Config, get_model_config
from pirl.models.pi0 import expected_parameters, get_parameters

FIXTURES = Path(__file__).parent.parent / "fixtures"
UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"
EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
CASES = {
    "pytorch_pi0": dataclasses.replace(MICRO, image_resolution=(8, 8)),
    "pytorch_pi05": dataclasses.replace(MICRO_PI05, image_resolution=(8, 8)),
}


def copy_of(case: str, directory: Path) -> Path:
    """A checkpoint that PyTorch wrote, with a description: its heads are not those of OpenPI's own models."""
    shutil.copytree(FIXTURES / case, directory)
    (directory / "pirl.json").write_text(json.dumps({"model": CASES[case].to_dict()}))
    return directory


@pytest.fixture(params=CASES)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Pi0Config]:
    return copy_of(request.param, tmp_path / "checkpoint"), CASES[request.param]


@pytest.fixture
def pi0(tmp_path: Path) -> Path:
    return copy_of("pytorch_pi0", tmp_path / "checkpoint")


def test_a_policy_computes_what_it_computed_in_pytorch(recorded: tuple[Path, Pi0Config]) -> None:
    directory, config = recorded
    told = dict(np.load(directory / "computed.npz"))
    policy = load_policy(directory)
    observation = Observation.from_dict(
        {
            "image": {name: told["images"][:, index] for index, name in enumerate(config.cameras)},
            "image_mask": {name: told["image_masks"][:, index] for index, name in enumerate(config.cameras)},
            "state": told["state"],
            "tokenized_prompt": told["prompt"].astype(np.int32),
            "tokenized_prompt_mask": told["prompt_mask"],
        },
        config,
    )

    @jax.jit
    def compute(x_t: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        prefix = policy.encode(observation)
        return prefix.mask, prefix.features, policy.velocity(prefix, x_t[:, None], time)[:, 0]

    mask, ours, flow = compute(told["x_t"], told["time"])
    valid = np.asarray(mask)[..., None]
    features = np.where(valid, told["out"], 0).sum(axis=1) / valid.sum(axis=1)
    np.testing.assert_allclose(ours, features, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(flow, told["flow"], rtol=1e-5, atol=2e-5)


def test_what_is_written_is_what_pytorch_wrote(recorded: tuple[Path, Pi0Config], tmp_path: Path) -> None:
    directory, _ = recorded
    save_policy(tmp_path / "again", load_policy(directory), style="pytorch")
    theirs, ours = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "again"))
    assert ours.pop(UNUSED).shape == theirs.pop(UNUSED).shape  # never computed with, so never kept
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name, strict=True)


def test_a_policy_comes_back_from_pytorch_bit_for_bit(tmp_path: Path) -> None:
    params = {path: leaf.astype(jnp.bfloat16) for path, leaf in get_parameters(random_model(MICRO)).items()}
    params["action_in_proj/bias"] = params["action_in_proj/bias"].astype(jnp.float32)  # not all need be alike
    save_checkpoint(tmp_path / "orbax", params, MICRO)
    save_checkpoint(tmp_path / "pytorch", params, MICRO, style="pytorch")
    orbax, pytorch = open_checkpoint(tmp_path / "orbax"), open_checkpoint(tmp_path / "pytorch" / "model.safetensors")
    assert (orbax.style, pytorch.style) == ("released", "pytorch")
    assert compare(orbax, pytorch) == []
    assert {path: leaf.dtype for path, leaf in pytorch.leaves.items()} == {path: x.dtype for path, x in params.items()}


def test_released_models_become_paligemma_and_gemma() -> None:
    """The shapes of PaliGemma 3B and Gemma 300M in PyTorch; and back, with the head sizes of OpenPI's models."""
    expert = "paligemma_with_expert.gemma_expert.model"
    shapes = {}
    for path, leaf in expected_parameters(get_model_config("pi05_base")).items():
        rule, part = RULES[path], np.broadcast_to(np.int8(0), leaf.shape)
        part = part[0] if rule.is_layered else part
        part = part[0] if len(rule.names) > 1 else part
        tensor = rule.to_tensor(part)
        shapes[rule.names[0].format(layer=17)] = tensor.shape
        assert rule.from_tensor(tensor, {"d": 256, "v": 72}).shape == part.shape
    assert shapes[f"{LANGUAGE}.layers.17.self_attn.q_proj.weight"] == (2048, 2048)
    assert shapes[f"{LANGUAGE}.layers.17.self_attn.k_proj.weight"] == (256, 2048)
    assert shapes[f"{expert}.layers.17.self_attn.o_proj.weight"] == (1024, 2048)


def test_the_size_of_heads_is_openpis_where_nothing_is_described(tmp_path: Path) -> None:
    config = dataclasses.replace(
        MICRO,
        vision=dataclasses.replace(MICRO.vision, width=32, num_heads=16),
        language=dataclasses.replace(MICRO.language, num_kv_heads=1),
        action_expert=dataclasses.replace(MICRO.action_expert, num_kv_heads=1),
    )
    policy = random_model(config)
    save_policy(tmp_path / "policy", policy, style="pytorch")
    (tmp_path / "policy" / "pirl.json").unlink()
    loaded = open_checkpoint(tmp_path / "policy").read()
    for path, leaf in get_parameters(policy).items():
        np.testing.assert_array_equal(loaded[path], leaf, err_msg=path)


def test_lerobots_prefix_and_the_embeddings_other_name_are_read(pi0: Path) -> None:
    before = open_checkpoint(pi0).read()
    tensors = load_file(pi0 / "model.safetensors")
    tensors[f"{LANGUAGE}.embed_tokens.weight"] = tensors.pop(EMBEDDING)
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, pi0 / "model.safetensors")
    after = open_checkpoint(pi0).read()
    for path, leaf in before.items():
        np.testing.assert_array_equal(after[path], leaf, err_msg=path)


def test_a_mesh_reads_what_one_device_reads(pi0: Path) -> None:
    checkpoint = open_checkpoint(pi0)
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))

    def halves(path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axis = next((axis for axis, size in enumerate(leaf.shape) if size % 2 == 0), None)
        return NamedSharding(mesh, PartitionSpec(*([None] * (axis or 0)), None if axis is None else "fsdp"))

    whole, cut = checkpoint.read(), checkpoint.read(sharding=halves)
    assert any(leaf.addressable_shards[0].data.shape != leaf.shape for leaf in cut.values())
    for path, leaf in whole.items():
        np.testing.assert_array_equal(cut[path], leaf, err_msg=path)


def test_a_part_of_a_policy_can_be_written_but_no_lora(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "part", {"action_out_proj/bias": jnp.arange(3.0)}, None, style="pytorch")
    (read,) = open_checkpoint(tmp_path / "part").read().items()
    assert (read[0], read[1].tolist()) == ("action_out_proj/bias", [0.0, 1.0, 2.0])
    with pytest.raises(CheckpointError, match="no LoRA: merge it first"):
        save_policy(tmp_path / "policy", random_model(MICRO_LORA), style="pytorch")
    assert os.listdir(tmp_path) == ["part"]


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gemma_expert.model.layers.1.self_attn.v_proj.weight", None, "layers.1.self_attn.v_proj.weight is missing"),
        (
            "gemma_expert.model.layers.1.input_layernorm.weight",
            np.zeros(6, np.float32),
            r"layers.1.input_layernorm.weight is \(6,\) of float32, unlike .*layers.0",
        ),
        (
            "paligemma.model.language_model.layers.0.self_attn.q_proj.weight",
            np.zeros(384, np.float32),
            r"layers.0.self_attn.q_proj.weight of shape \(384,\) is no PaliGemma/llm/layers/attn/q_einsum/w",
        ),
        ("gemma_expert.value_head", np.zeros(2, np.float32), r"not in the model \(1\):\n    paligemma.*value_head"),
        ("gemma_expert.count", np.zeros(2, np.int64), "gemma_expert.count has the dtype I64, none of F64"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(pi0: Path, name: str, changed: np.ndarray | None, message: str) -> None:
    tensors = load_file(pi0 / "model.safetensors")
    if changed is None:
        del tensors[f"paligemma_with_expert.{name}"]
    else:
        tensors[f"paligemma_with_expert.{name}"] = changed
    save_file(tensors, pi0 / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_policy(pi0)


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        _header(b"{" * 50_000),
        _header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        _header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}'),
        _header(b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}') + bytes(4),
        "pipe",
    ],
    ids=["empty", "huge-header", "cut-header", "nested", "cut-tensor", "negative", "shape", "pipe"],
)
def test_a_damaged_file_is_named(content: bytes | str, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / "model.safetensors").write_bytes(content)
    else:
        os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model.safetensors is damaged or incomplete: .* Copy the checkpoint again"
    ):
        open_checkpoint(tmp_path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no parameters of a π₀: it begins with a"):
        open_checkpoint(tmp_path)
