"""OpenPI's PyTorch checkpoints: a `model.safetensors` in which the same parameters have other names and layouts.

PyTorch has a tensor for each layer, keeps weights as [out, in] and merges heads with their size. Every rule below says
for one parameter what its axes are here, what they are there, and under which names. `a b -> (b a)` means that the axes
are swapped and merged into one.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from pirl.errors import CheckpointError
from pirl.interop.tensor_file import Tensor, TensorFile, open_tensor_file, write_tensor_file
from pirl.models.config import Pi0Config

FILE_NAME = "model.safetensors"
# OpenPI's networks, where a checkpoint does not describe its own.
_KV_HEADS, _VISION_HEADS = 1, 16


@dataclass(frozen=True)
class Rule:
    """One parameter: its path; its axes, and what they become; the tensors it becomes, in each layer if there are any."""

    path: str
    axes: str
    names: tuple[str, ...]

    @property
    def is_layered(self) -> bool:
        """Whether the parameter holds all layers, in its first axis."""
        return "{layer}" in self.names[0]

    @property
    def here(self) -> list[str]:
        """The axes of one tensor as they are in the parameter."""
        return self.axes.split("->")[0].split()

    @property
    def there(self) -> list[list[str]]:
        """For each axis of the tensor, those that were merged into it."""
        return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", self.axes.split("->")[1])]

    def to_tensor(self, part: np.ndarray) -> np.ndarray:
        """The tensor of one layer and name."""
        order = [self.here.index(axis) for group in self.there for axis in group]
        sizes = dict(zip(self.here, part.shape, strict=True))
        return part.transpose(order).reshape([math.prod(sizes[axis] for axis in group) for group in self.there])

    def from_tensor(self, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """The way back. `sizes` tells those axes that a merged one does not."""
        split = self.split_shape(tensor.shape, sizes)
        merged = [axis for group in self.there for axis in group]
        array = tensor.reshape([split[axis] for axis in merged])
        return array.transpose([merged.index(axis) for axis in self.here])

    def split_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> dict[str, int]:
        """The size of every axis; raises ValueError where a tensor of this shape cannot be split so."""
        if len(shape) != len(self.there):
            raise ValueError(f"it has {len(shape)} axes, not {len(self.there)}")
        split: dict[str, int] = {}
        for group, size in zip(self.there, shape, strict=True):
            known = {axis: sizes[axis] for axis in group if len(group) > 1 and axis in sizes}
            rest, *unknown = [axis for axis in group if axis not in known]
            if unknown:
                raise ValueError("how its heads are split is not known")
            if size % math.prod(known.values()):
                raise ValueError(f"its axis of {size} is not a multiple of {math.prod(known.values())}")
            split |= known | {rest: size // math.prod(known.values())}
        return split


def _linear(path: str, name: str) -> Iterator[Rule]:
    yield Rule(f"{path}/kernel", "in out -> out in", (f"{name}.weight",))
    yield Rule(f"{path}/bias", "out -> out", (f"{name}.bias",))


def _norm(path: str, name: str) -> Iterator[Rule]:
    yield Rule(f"{path}/scale", "width -> width", (f"{name}.weight",))
    yield Rule(f"{path}/bias", "width -> width", (f"{name}.bias",))


def _vision_rules(path: str, name: str) -> Iterator[Rule]:
    yield Rule(
        f"{path}/embedding/kernel",
        "height width channel out -> out channel height width",
        (f"{name}.embeddings.patch_embedding.weight",),
    )
    yield Rule(f"{path}/embedding/bias", "out -> out", (f"{name}.embeddings.patch_embedding.bias",))
    position = f"{name}.embeddings.position_embedding.weight"
    yield Rule(f"{path}/pos_embedding", "one token width -> (one token) width", (position,))
    block, layer = f"{path}/Transformer/encoderblock", f"{name}.encoder.layers.{{layer}}"
    for number in (0, 1):
        yield from _norm(f"{block}/LayerNorm_{number}", f"{layer}.layer_norm{number + 1}")
        yield from _linear(f"{block}/MlpBlock_0/Dense_{number}", f"{layer}.mlp.fc{number + 1}")
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        weight, bias = (f"{layer}.self_attn.{theirs}.{kind}" for kind in ("weight", "bias"))
        yield Rule(f"{attention}/{ours}/kernel", "in head vision_size -> (head vision_size) in", (weight,))
        yield Rule(f"{attention}/{ours}/bias", "head vision_size -> (head vision_size)", (bias,))
    out = f"{layer}.self_attn.out_proj"
    yield Rule(f"{attention}/out/kernel", "head vision_size out -> out (head vision_size)", (f"{out}.weight",))
    yield Rule(f"{attention}/out/bias", "out -> out", (f"{out}.bias",))
    yield from _norm(f"{path}/Transformer/encoder_norm", f"{name}.post_layernorm")


def _expert_rules(path: str, name: str, suffix: str) -> Iterator[Rule]:
    layer, attention = f"{name}.layers.{{layer}}", f"{name}.layers.{{layer}}.self_attn"
    yield Rule(
        f"{path}/layers/attn/q_einsum{suffix}/w", "head in size -> (head size) in", (f"{attention}.q_proj.weight",)
    )
    yield Rule(
        f"{path}/layers/attn/kv_einsum{suffix}/w",
        "head in size -> (head size) in",
        (f"{attention}.k_proj.weight", f"{attention}.v_proj.weight"),
    )
    yield Rule(
        f"{path}/layers/attn/attn_vec_einsum{suffix}/w",
        "head size out -> out (head size)",
        (f"{attention}.o_proj.weight",),
    )
    yield Rule(
        f"{path}/layers/mlp{suffix}/gating_einsum",
        "in out -> out in",
        (f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"),
    )
    yield Rule(f"{path}/layers/mlp{suffix}/linear", "in out -> out in", (f"{layer}.mlp.down_proj.weight",))
    for ours, theirs in (
        ("layers/pre_attention_norm", f"{layer}.input_layernorm"),
        ("layers/pre_ffw_norm", f"{layer}.post_attention_layernorm"),
        ("final_norm", f"{name}.norm"),
    ):
        yield Rule(f"{path}/{ours}{suffix}/scale", "width -> width", (f"{theirs}.weight",))
        yield from _linear(f"{path}/{ours}{suffix}/Dense_0", f"{theirs}.dense")  # the action expert of π₀.₅


_PALIGEMMA, _EXPERT = "paligemma_with_expert.paligemma", "paligemma_with_expert.gemma_expert"
# The language model's output layer is its embedding, so PyTorch writes one of the two: by default the former.
_EMBEDDING, _SAME_AS_EMBEDDING = (
    f"{_PALIGEMMA}.lm_head.weight",
    f"{_PALIGEMMA}.model.language_model.embed_tokens.weight",
)
# The output layer of an expert that never speaks. OpenPI asks for it all the same.
_UNUSED = f"{_EXPERT}.lm_head.weight"

_PROJECTIONS = ("action_in_proj", "action_out_proj", "state_proj", "action_time_mlp_in", "action_time_mlp_out")
RULES: dict[str, Rule] = {
    rule.path: rule
    for rule in (
        *_vision_rules("PaliGemma/img", f"{_PALIGEMMA}.model.vision_tower.vision_model"),
        *_linear("PaliGemma/img/head", f"{_PALIGEMMA}.model.multi_modal_projector.linear"),
        Rule("PaliGemma/llm/embedder/input_embedding", "token width -> token width", (_EMBEDDING,)),
        *_expert_rules("PaliGemma/llm", f"{_PALIGEMMA}.model.language_model", ""),
        *_expert_rules("PaliGemma/llm", f"{_EXPERT}.model", "_1"),
        *(rule for name in (*_PROJECTIONS, "time_mlp_in", "time_mlp_out") for rule in _linear(name, name)),
    )
}

# By whose keys it is known how large a head is.
_KEYS = "PaliGemma/llm/layers/attn/kv_einsum/w"
_VISION_KEYS = "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/key/kernel"


# --- reading ---------------------------------------------------------------------------------------------------------


class PyTorchStore:
    """The tensors of a file as the parameters they are; one that is none keeps its own name."""

    def __init__(self, file: TensorFile, names: Mapping[str, str], sizes: Mapping[str, int]) -> None:
        """`names` says what each tensor is called in the file, `sizes` the axes that are merged there."""
        self._file, self._names, self._sizes = file, names, sizes
        self.leaves = self._describe()

    def _describe(self) -> dict[str, jax.ShapeDtypeStruct]:
        leaves: dict[str, jax.ShapeDtypeStruct] = {}
        told: set[str] = {_UNUSED, _SAME_AS_EMBEDDING}
        for path, rule in RULES.items():
            if found := self._tensors(rule):
                leaves[path] = self._leaf(rule, found)
                told |= {name for names in found for name in names}
        for name in sorted(self._names.keys() - told):
            tensor = self._tensor(name)
            leaves[name] = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        return leaves

    def read(self, path: str, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        """One parameter onto its devices; of the layers, no more than a device holds is put together at a time."""
        if path not in RULES:
            return jax.device_put(self._file.read(self._names[path]).astype(leaf.dtype), sharding)
        rule = RULES[path]
        layers = self._tensors(rule)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            if not rule.is_layered:
                return self._array(rule, layers[0])[index].astype(leaf.dtype)
            first, *others = index
            chosen = [self._array(rule, names)[tuple(others)] for names in layers[first]]
            return np.stack(chosen, dtype=leaf.dtype, casting="unsafe")

        return jax.make_array_from_callback(leaf.shape, sharding, part)

    def _tensor(self, name: str) -> Tensor:
        return self._file.tensors[self._names[name]]

    def _tensors(self, rule: Rule) -> list[tuple[str, ...]]:
        """The names of a parameter's tensors, layer by layer, as far as there are any."""
        if not rule.is_layered:
            return [rule.names] if rule.names[0] in self._names else []
        layers: list[tuple[str, ...]] = []
        while any(name.format(layer=len(layers)) in self._names for name in rule.names):
            layers.append(tuple(name.format(layer=len(layers)) for name in rule.names))
        return layers

    def _leaf(self, rule: Rule, layers: list[tuple[str, ...]]) -> jax.ShapeDtypeStruct:
        shapes = {}
        for name in (name for names in layers for name in names):
            if name not in self._names:
                raise CheckpointError(f"{self._file.path} is incomplete: {name} is missing. Copy the checkpoint again.")
            tensor = self._tensor(name)
            try:
                split = rule.split_shape(tensor.shape, self._sizes)
            except ValueError as error:
                raise CheckpointError(
                    f"{self._file.path}: {name} of shape {tensor.shape} is no {rule.path}: {error}."
                ) from error
            shapes[name] = (tuple(split[axis] for axis in rule.here), tensor.dtype)
        first_name, (shape, dtype) = next(iter(shapes.items()))
        for name, (other_shape, other_dtype) in shapes.items():
            if (other_shape, other_dtype) != (shape, dtype):
                raise CheckpointError(
                    f"{self._file.path}: {name} is {other_shape} of {other_dtype}, unlike {first_name}, which is "
                    f"{shape} of {dtype}. Copy the checkpoint again."
                )
        ahead = ((len(layers),) if rule.is_layered else ()) + ((len(rule.names),) if len(rule.names) > 1 else ())
        return jax.ShapeDtypeStruct((*ahead, *shape), dtype)

    def _array(self, rule: Rule, names: tuple[str, ...]) -> np.ndarray:
        """A parameter, or one layer of it."""
        parts = [rule.from_tensor(self._file.read(self._names[name]), self._sizes) for name in names]
        return np.stack(parts) if len(parts) > 1 else parts[0]


def open_pytorch(path: Path, described: Pi0Config | None) -> PyTorchStore:
    """Open a `model.safetensors`. How heads are split the file does not tell: it is as described, or as OpenPI has it."""
    file = open_tensor_file(path)
    # LeRobot's port of the model has it in a variable of that name.
    prefix = "model." if all(name.startswith("model.") for name in file.tensors) else ""
    names = {name.removeprefix(prefix): name for name in file.tensors}
    if _EMBEDDING not in names and _SAME_AS_EMBEDDING in names:
        names[_EMBEDDING] = names[_SAME_AS_EMBEDDING]
    if not any(rule.names[0].format(layer=0) in names for rule in RULES.values()):
        raise CheckpointError(f"{path} holds no parameters of a π₀: it begins with {next(iter(names), 'nothing')}.")
    kv_heads, vision_heads = _KV_HEADS, _VISION_HEADS
    if described is not None:
        kv_heads, vision_heads = described.language.num_kv_heads, described.vision.num_heads
    sizes = {"one": 1}
    for axis, rule, heads in (("size", _KEYS, kv_heads), ("vision_size", _VISION_KEYS, vision_heads)):
        tensor = file.tensors.get(names.get(RULES[rule].names[0].format(layer=0), ""))
        if tensor is not None and tensor.shape:  # one without axes is told of with the other wrong shapes
            sizes[axis] = max(1, tensor.shape[0] // heads)
    return PyTorchStore(file, names, sizes)


# --- writing ---------------------------------------------------------------------------------------------------------


def check_writable(params: Mapping[str, jax.Array]) -> None:
    """Raise if OpenPI's PyTorch models have no place for some parameter."""
    unknown = [path for path in params if path not in RULES]
    if any("lora" in path for path in unknown):
        raise CheckpointError("OpenPI's PyTorch models have no LoRA: merge it first (pirl convert --merge-lora).")
    if unknown:
        raise CheckpointError(f"OpenPI's PyTorch models have no place for {', '.join(unknown[:3])}.")


def write_pytorch(directory: Path, params: Mapping[str, jax.Array]) -> None:
    """Write parameters as a `model.safetensors`, one at a time."""
    # Wide ones first: every tensor then begins at a multiple of its item's size.
    ordered = sorted(params.items(), key=lambda item: -item[1].dtype.itemsize)
    tensors = {
        name: (shape, np.dtype(leaf.dtype))
        for path, leaf in ordered
        for name, shape in _tensor_shapes(RULES[path], leaf.shape)
    }
    unused = _unused(params)

    def contents() -> Iterator[tuple[str, np.ndarray]]:
        for path, leaf in ordered:
            yield from _to_tensors(RULES[path], np.asarray(leaf))
        if unused is not None:
            yield _UNUSED, np.zeros(*unused)

    write_tensor_file(directory / FILE_NAME, tensors | ({} if unused is None else {_UNUSED: unused}), contents)


def _unused(params: Mapping[str, jax.Array]) -> tuple[tuple[int, int], np.dtype] | None:
    """The shape and dtype of the output layer that nobody uses: as many tokens as the language model knows."""
    embedding, into = (params.get(path) for path in ("PaliGemma/llm/embedder/input_embedding", "action_in_proj/kernel"))
    if embedding is None or into is None:
        return None
    narrowest = min((np.dtype(leaf.dtype) for leaf in params.values()), key=lambda dtype: dtype.itemsize)
    return (embedding.shape[0], into.shape[1]), narrowest


def _to_tensors(rule: Rule, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for layer, values in enumerate(leaf if rule.is_layered else leaf[None]):
        parts = values if len(rule.names) > 1 else values[None]
        for name, part in zip(rule.names, parts, strict=True):
            yield name.format(layer=layer), rule.to_tensor(part)


def _tensor_shapes(rule: Rule, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What `_to_tensors` gives, without the values: an array that has the shape and takes no memory goes through it."""
    for name, tensor in _to_tensors(rule, np.broadcast_to(np.zeros((), np.int8), shape)):
        yield name, tensor.shape
