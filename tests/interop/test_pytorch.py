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

from builders import MICRO, MICRO_LORA, MICRO_PI05, random_model
from pirl.errors import CheckpointError
from pirl.interop import compare, load_policy, open_checkpoint, save_checkpoint, save_policy
from pirl.interop.pytorch import RULES, PyTorchStore, open_pytorch
from pirl.interop.tensor_file import Tensor, TensorFile, open_tensor_file
from pirl.models import Observation, Pi0Config, expected_parameters, get_model_config
from pirl.models.parameters import get_parameters

FIXTURES = Path(__file__).parent.parent / "fixtures"
UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"
EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"
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


def rewrite(file: Path, change) -> None:
    """Write a file again, its tensors by name changed, in the format's own words rather than pirl's."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    tensors = change({name: (about, data[slice(*about["data_offsets"])]) for name, about in header.items()})
    header, data = {}, b""
    for name, (about, values) in tensors.items():
        header[name] = {**about, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


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
    theirs, ours = (open_tensor_file(path / "model.safetensors") for path in (directory, tmp_path / "again"))
    assert set(ours.tensors) == set(theirs.tensors)
    for name in theirs.tensors:
        if name == UNUSED:  # never computed with, so never kept
            assert ours.read(name).shape == theirs.read(name).shape
        else:
            np.testing.assert_array_equal(ours.read(name), theirs.read(name), err_msg=name, strict=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_policy_comes_back_from_pytorch_bit_for_bit(dtype: jnp.dtype, tmp_path: Path) -> None:
    params = {path: leaf.astype(dtype) for path, leaf in get_parameters(random_model(MICRO)).items()}
    params["action_in_proj/bias"] = params["action_in_proj/bias"].astype(jnp.float32)  # not all need be alike
    save_checkpoint(tmp_path / "orbax", params, MICRO)
    save_checkpoint(tmp_path / "pytorch", params, MICRO, style="pytorch")
    orbax, pytorch = open_checkpoint(tmp_path / "orbax"), open_checkpoint(tmp_path / "pytorch")
    assert (orbax.style, pytorch.style) == ("released", "pytorch")
    assert compare(orbax, pytorch) == []
    assert {path: leaf.dtype for path, leaf in pytorch.leaves.items()} == {path: x.dtype for path, x in params.items()}


def test_tensors_begin_at_multiples_of_their_items_size(tmp_path: Path) -> None:
    params = {path: leaf.astype(jnp.bfloat16) for path, leaf in get_parameters(random_model(MICRO)).items()}
    params["PaliGemma/llm/final_norm/scale"] = params["PaliGemma/llm/final_norm/scale"].astype(jnp.float32)
    save_checkpoint(tmp_path / "mixed", params, MICRO, style="pytorch")
    file = open_tensor_file(tmp_path / "mixed" / "model.safetensors")
    assert {tensor.dtype.itemsize for tensor in file.tensors.values()} == {2, 4}
    assert all(tensor.offset % tensor.dtype.itemsize == 0 for tensor in file.tensors.values())


@pytest.mark.parametrize("name", ["pi0_base", "pi05_base"])
def test_released_models_need_no_description(name: str) -> None:
    """How OpenPI's own models split their heads is known, whatever the file leaves open."""
    config = get_model_config(name)
    params = {path: np.broadcast_to(np.int8(0), leaf.shape) for path, leaf in expected_parameters(config).items()}
    shapes = {}
    for path, leaf in params.items():
        for layer in range(leaf.shape[0]) if RULES[path].is_layered else [0]:
            for index, tensor in enumerate(RULES[path].names):
                part = leaf[layer] if RULES[path].is_layered else leaf
                part = part[index] if len(RULES[path].names) > 1 else part
                shapes[tensor.format(layer=layer)] = RULES[path].to_tensor(part).shape
    tensors = {tensor: Tensor(shape, np.dtype(np.float32), 0) for tensor, shape in shapes.items()}
    # As PaliGemma 3B and Gemma 300M are known in PyTorch.
    language = "paligemma_with_expert.paligemma.model.language_model.layers.17.self_attn"
    assert shapes[f"{language}.q_proj.weight"] == (2048, 2048)
    assert shapes[f"{language}.k_proj.weight"] == (256, 2048)
    assert shapes["paligemma_with_expert.gemma_expert.model.layers.0.self_attn.o_proj.weight"] == (1024, 2048)
    store = PyTorchStore(
        TensorFile(Path("none"), tensors), {name: name for name in tensors}, {"one": 1, "size": 256, "vision_size": 72}
    )
    assert {path: leaf.shape for path, leaf in store.leaves.items()} == {path: x.shape for path, x in params.items()}


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
    other = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    rewrite(
        pi0 / "model.safetensors",
        lambda tensors: {f"model.{other if name == EMBEDDING else name}": value for name, value in tensors.items()},
    )
    after = open_checkpoint(pi0).read()
    for path, leaf in before.items():
        np.testing.assert_array_equal(after[path], leaf, err_msg=path)


def test_the_file_itself_may_be_named(pi0: Path) -> None:
    assert open_checkpoint(pi0 / "model.safetensors").config == CASES["pytorch_pi0"]


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


def test_a_part_of_a_policy_can_be_written(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "part", {"action_out_proj/bias": jnp.arange(3.0)}, None, style="pytorch")
    (read,) = open_checkpoint(tmp_path / "part").read().items()
    assert (read[0], read[1].tolist()) == ("action_out_proj/bias", [0.0, 1.0, 2.0])


def test_layers_that_differ_are_named(pi0: Path) -> None:
    name = "paligemma_with_expert.gemma_expert.model.layers.1.input_layernorm.weight"

    def shorten(tensors: dict) -> dict:
        about, values = tensors[name]
        return tensors | {name: ({**about, "shape": [6]}, values[:24])}

    rewrite(pi0 / "model.safetensors", shorten)
    with pytest.raises(
        CheckpointError, match=r"layers.1.input_layernorm.weight is \(6,\) of float32, unlike .*layers.0"
    ):
        open_checkpoint(pi0)


def test_lora_has_no_place_in_pytorch(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no LoRA: merge it first"):
        save_policy(tmp_path / "policy", random_model(MICRO_LORA), style="pytorch")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_or_extra_is_named(pi0: Path) -> None:
    file, gone = (
        pi0 / "model.safetensors",
        "paligemma_with_expert.gemma_expert.model.layers.1.self_attn.v_proj.weight",
    )
    content = file.read_bytes()
    rewrite(file, lambda tensors: {name: value for name, value in tensors.items() if name != gone})
    with pytest.raises(CheckpointError, match=f"{gone} is missing"):
        load_policy(pi0)
    file.write_bytes(content)
    rewrite(file, lambda tensors: {name: value for name, value in tensors.items() if not name.startswith("action_out")})
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint \(2\):\n    action_out_proj/bias"):
        load_policy(pi0)
    file.write_bytes(content)
    rewrite(file, lambda tensors: tensors | {"value_head.weight": tensors["action_out_proj.weight"]})
    with pytest.raises(CheckpointError, match=r"not in the model \(1\):\n    value_head.weight"):
        load_policy(pi0)


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header should take 0 bytes|not JSON|Expecting value"),
        (b"\x00" * 7, "damaged"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header should take"),
        (struct.pack("<Q", 100) + b"{}", "header should take"),
        (_header(b"[]"), "not an object"),
        (_header(b"{" * 50_000), "damaged"),
        (_header(b"\xff\xfe{}"), "damaged"),
        (_header(b'{"a": 3}'), "not an object"),
        (_header(b'{"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}') + b"\x00" * 8, "dtype 'I64'"),
        (_header(b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 8]}}'), "damaged"),
        (_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'), "does not fit"),
        (_header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}') + b"\x00" * 4, "does not fit"),
        (_header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}'), "lists of sizes"),
        (_header(b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}') + b"\x00" * 4, "lists of sizes"),
        (_header(b'{"a": {"dtype": "F32", "shape": [1]}}'), "lists of sizes"),
        (
            _header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + b"\x00" * 4,
            "no parameters of a π₀",
        ),
    ],
)
def test_a_damaged_file_is_told_in_a_sentence(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as error:
        open_checkpoint(tmp_path)
    assert "model.safetensors" in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_pytorch(tmp_path / "model.safetensors", None)


def test_a_tensor_of_a_wrong_shape_is_named(pi0: Path) -> None:
    name = "paligemma_with_expert.paligemma.model.language_model.layers.0.self_attn.q_proj.weight"

    def turn(tensors: dict) -> dict:
        about, values = tensors[name]
        return tensors | {name: ({**about, "shape": [len(values) // 4]}, values)}

    rewrite(pi0 / "model.safetensors", turn)
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.q_proj.weight of shape \(384,\)"):
        load_policy(pi0)
