"""OpenPI's PyTorch checkpoints: a `model.safetensors` in which the same parameters have other names and layouts.

PyTorch has one tensor per layer, keeps weights as [out, in] and merges the head axis with the head size. Each rule
names one parameter, the tensors it becomes, and the einops pattern between the two. Its axes: i and o (in and out), h
(heads), d and v (head size of the transformer and of the vision tower), w (width), t (tokens), y, x and c (of the image).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from einops import EinopsError, rearrange
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pirl.errors import CheckpointError, in_one_line
from pirl.interop.orbax import place
from pirl.models.config import Pi0Config

FILE_NAME = "model.safetensors"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Of OpenPI's models, for a checkpoint that does not describe its own.
_KV_HEADS, _VISION_HEADS = 1, 16


@dataclass(frozen=True)
class Rule:
    """A parameter, the pattern from one layer of it to one tensor, and the names of the tensors of a layer."""

    path: str
    pattern: str
    names: tuple[str, ...]

    @property
    def is_layered(self) -> bool:
        """Whether the first axis of the parameter is that of the layers."""
        return "{layer}" in self.names[0]

    def to_tensor(self, part: np.ndarray) -> np.ndarray:
        """The tensor of one layer and name."""
        return rearrange(part, self.pattern)

    def from_tensor(self, tensor: np.ndarray, head_sizes: Mapping[str, int]) -> np.ndarray:
        """The inverse; `head_sizes` maps `d` and `v`."""
        here, there = self.pattern.split(" -> ")
        return rearrange(tensor, f"{there} -> {here}", **{k: v for k, v in head_sizes.items() if f"(h {k})" in there})


def _linear(path: str, name: str) -> Iterator[Rule]:
    yield Rule(f"{path}/kernel", "i o -> o i", (f"{name}.weight",))
    yield Rule(f"{path}/bias", "o -> o", (f"{name}.bias",))


def _layer_norm(path: str, name: str) -> Iterator[Rule]:
    yield Rule(f"{path}/scale", "w -> w", (f"{name}.weight",))
    yield Rule(f"{path}/bias", "w -> w", (f"{name}.bias",))


def _vision_rules(path: str, name: str) -> Iterator[Rule]:
    embeddings = f"{name}.embeddings"
    yield Rule(f"{path}/embedding/kernel", "y x c o -> o c y x", (f"{embeddings}.patch_embedding.weight",))
    yield Rule(f"{path}/embedding/bias", "o -> o", (f"{embeddings}.patch_embedding.bias",))
    yield Rule(f"{path}/pos_embedding", "1 t w -> t w", (f"{embeddings}.position_embedding.weight",))
    block, layer = f"{path}/Transformer/encoderblock", f"{name}.encoder.layers.{{layer}}"
    for number in (0, 1):
        yield from _layer_norm(f"{block}/LayerNorm_{number}", f"{layer}.layer_norm{number + 1}")
        yield from _linear(f"{block}/MlpBlock_0/Dense_{number}", f"{layer}.mlp.fc{number + 1}")
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        yield Rule(f"{attention}/{ours}/kernel", "i h v -> (h v) i", (f"{layer}.self_attn.{theirs}.weight",))
        yield Rule(f"{attention}/{ours}/bias", "h v -> (h v)", (f"{layer}.self_attn.{theirs}.bias",))
    yield Rule(f"{attention}/out/kernel", "h v o -> o (h v)", (f"{layer}.self_attn.out_proj.weight",))
    yield Rule(f"{attention}/out/bias", "o -> o", (f"{layer}.self_attn.out_proj.bias",))
    yield from _layer_norm(f"{path}/Transformer/encoder_norm", f"{name}.post_layernorm")


def _expert_rules(path: str, name: str, suffix: str) -> Iterator[Rule]:
    layers, layer = f"{path}/layers", f"{name}.layers.{{layer}}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    keys_values = (f"{attention}.k_proj.weight", f"{attention}.v_proj.weight")
    yield Rule(f"{layers}/attn/q_einsum{suffix}/w", "h i d -> (h d) i", (f"{attention}.q_proj.weight",))
    yield Rule(f"{layers}/attn/kv_einsum{suffix}/w", "h i d -> (h d) i", keys_values)
    yield Rule(f"{layers}/attn/attn_vec_einsum{suffix}/w", "h d o -> o (h d)", (f"{attention}.o_proj.weight",))
    gating = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    yield Rule(f"{layers}/mlp{suffix}/gating_einsum", "i o -> o i", gating)
    yield Rule(f"{layers}/mlp{suffix}/linear", "i o -> o i", (f"{mlp}.down_proj.weight",))
    for ours, theirs in (
        ("layers/pre_attention_norm", f"{layer}.input_layernorm"),
        ("layers/pre_ffw_norm", f"{layer}.post_attention_layernorm"),
        ("final_norm", f"{name}.norm"),
    ):
        yield Rule(f"{path}/{ours}{suffix}/scale", "w -> w", (f"{theirs}.weight",))
        yield from _linear(f"{path}/{ours}{suffix}/Dense_0", f"{theirs}.dense")  # the action expert of π₀.₅


_PALIGEMMA, _EXPERT = "paligemma_with_expert.paligemma", "paligemma_with_expert.gemma_expert"
# The output layer of the language model is tied to its embedding: PyTorch writes one of the two, by default the former.
_EMBEDDING = f"{_PALIGEMMA}.lm_head.weight"
_TIED_EMBEDDING = f"{_PALIGEMMA}.model.language_model.embed_tokens.weight"
# The output layer of the action expert: never computed with, but OpenPI requires it.
_UNUSED = f"{_EXPERT}.lm_head.weight"

_LINEAR = "action_in_proj action_out_proj state_proj action_time_mlp_in action_time_mlp_out time_mlp_in time_mlp_out"
RULES: dict[str, Rule] = {
    rule.path: rule
    for rule in (
        *_vision_rules("PaliGemma/img", f"{_PALIGEMMA}.model.vision_tower.vision_model"),
        *_linear("PaliGemma/img/head", f"{_PALIGEMMA}.model.multi_modal_projector.linear"),
        Rule("PaliGemma/llm/embedder/input_embedding", "t w -> t w", (_EMBEDDING,)),
        *_expert_rules("PaliGemma/llm", f"{_PALIGEMMA}.model.language_model", ""),
        *_expert_rules("PaliGemma/llm", f"{_EXPERT}.model", "_1"),
        *(rule for name in _LINEAR.split() for rule in _linear(name, name)),
    )
}
_KEY = "PaliGemma/llm/layers/attn/kv_einsum/w"
_VISION_KEY = "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/key/kernel"


class PyTorchArrays:
    """The parameters in a `model.safetensors`; a tensor that is none of them keeps its own name."""

    def __init__(self, path: Path, described: Pi0Config | None) -> None:
        self._path = path
        self._file, tensors = _open_file(path)
        # LeRobot's port of the model has it in an attribute of that name.
        prefix = "model." if all(name.startswith("model.") for name in tensors) else ""
        self._names = {name.removeprefix(prefix): name for name in tensors}
        if _EMBEDDING not in self._names and _TIED_EMBEDDING in self._names:
            self._names[_EMBEDDING] = self._names[_TIED_EMBEDDING]
        self._tensors = {name: tensors[stored] for name, stored in self._names.items()}
        self._head_sizes = self._find_head_sizes(described)
        self._layers = {path: layers for path, rule in RULES.items() if (layers := self._find_layers(rule))}
        if not self._layers:
            raise CheckpointError(
                f"{path} holds no parameters of a π₀: it begins with {next(iter(tensors), 'nothing')}."
            )
        known = {_UNUSED, _TIED_EMBEDDING, *(name for path in self._layers for name in sum(self._layers[path], ()))}
        self.leaves = {path: self._leaf(RULES[path], layers) for path, layers in self._layers.items()}
        self.leaves |= {name: self._tensors[name] for name in sorted(self._tensors.keys() - known)}

    def _find_head_sizes(self, described: Pi0Config | None) -> dict[str, int]:
        """How merged axes split, which the file does not tell: by the number of heads of the keys."""
        kv_heads = described.language.num_kv_heads if described else _KV_HEADS
        vision_heads = described.vision.num_heads if described else _VISION_HEADS
        head_sizes = {"d": 1, "v": 1}
        for axis, path, heads in (("d", _KEY, kv_heads), ("v", _VISION_KEY, vision_heads)):
            tensor = self._tensors.get(RULES[path].names[0].format(layer=0))
            if tensor is not None and tensor.shape:
                head_sizes[axis] = max(1, tensor.shape[0] // heads)
        return head_sizes

    def _find_layers(self, rule: Rule) -> list[tuple[str, ...]]:
        """The names of the tensors of each layer; of one, where a parameter has no layers."""
        layers: list[tuple[str, ...]] = []
        while any(name.format(layer=len(layers)) in self._tensors for name in rule.names):
            layers.append(tuple(name.format(layer=len(layers)) for name in rule.names))
            if not rule.is_layered:
                break
        return layers

    def _leaf(self, rule: Rule, layers: list[tuple[str, ...]]) -> jax.ShapeDtypeStruct:
        first: tuple[str, jax.ShapeDtypeStruct] | None = None
        for name in sum(layers, ()):
            if (tensor := self._tensors.get(name)) is None:
                raise CheckpointError(f"{self._path} is incomplete: {name} is missing. Copy the checkpoint again.")
            try:
                shape = rule.from_tensor(np.broadcast_to(np.int8(0), tensor.shape), self._head_sizes).shape
            except EinopsError as error:
                raise CheckpointError(
                    f"{self._path}: {name} of shape {tensor.shape} is no {rule.path}: "
                    f"{str(error).strip().splitlines()[-1].strip()}"
                ) from error
            leaf = jax.ShapeDtypeStruct(shape, tensor.dtype)
            first = first or (name, leaf)
            if leaf != first[1]:
                raise CheckpointError(
                    f"{self._path}: {name} is {leaf.shape} of {leaf.dtype}, unlike {first[0]}, which is "
                    f"{first[1].shape} of {first[1].dtype}. Copy the checkpoint again."
                )
        assert first is not None
        leading = (len(layers),) * rule.is_layered + (len(rule.names),) * (len(rule.names) > 1)
        return jax.ShapeDtypeStruct((*leading, *first[1].shape), first[1].dtype)

    def read(self, path: str, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None) -> jax.Array:
        """One parameter onto its devices; only the layers that a device holds are put together at a time."""
        if path not in RULES:
            return jax.device_put(self._file.get_tensor(self._names[path]).astype(leaf.dtype), sharding)
        rule, layers = RULES[path], self._layers[path]

        def part(index: tuple[slice, ...]) -> np.ndarray:
            if not rule.is_layered:
                return self._layer(rule, layers[0])[index].astype(leaf.dtype)
            chosen = [self._layer(rule, names)[index[1:]] for names in layers[index[0]]]
            return np.stack(chosen, dtype=leaf.dtype, casting="unsafe")

        return place(leaf, sharding, part)

    def _layer(self, rule: Rule, names: tuple[str, ...]) -> np.ndarray:
        parts = [rule.from_tensor(self._file.get_tensor(self._names[name]), self._head_sizes) for name in names]
        return np.stack(parts) if len(parts) > 1 else parts[0]


def _open_file(path: Path) -> tuple[safe_open, dict[str, jax.ShapeDtypeStruct]]:
    """The file and what is in it. The library checks the header against the file before anything is read."""
    try:
        if not path.is_file():  # opening a pipe would block
            raise OSError("it is not a regular file")
        file = safe_open(path, "np")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it cannot be iterated over
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete: {in_one_line(error)}. Copy the checkpoint again."
        ) from error
    tensors = {}
    for name, tensor in slices.items():
        if (dtype := tensor.get_dtype()) not in _DTYPES:
            raise CheckpointError(f"{path}: {name:.100} has the dtype {dtype}, none of {', '.join(_DTYPES)}.")
        tensors[name] = jax.ShapeDtypeStruct(tuple(tensor.get_shape()), _DTYPES[dtype])
    return file, tensors


def check_writable(params: Mapping[str, jax.Array]) -> None:
    """Raise if OpenPI's PyTorch models have no place for some parameter."""
    unknown = [path for path in params if path not in RULES]
    if any("lora" in path for path in unknown):
        raise CheckpointError("OpenPI's PyTorch models have no LoRA: merge it first (pirl convert --merge-lora).")
    if unknown:
        raise CheckpointError(f"OpenPI's PyTorch models have no place for {', '.join(unknown[:3])}.")


def write_pytorch(directory: Path, params: Mapping[str, jax.Array]) -> None:
    """Write parameters as a `model.safetensors`."""
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in params.items():
        rule, array = RULES[path], np.asarray(leaf)
        for layer, values in enumerate(array if rule.is_layered else array[None]):
            for name, part in zip(rule.names, values if len(rule.names) > 1 else values[None], strict=True):
                tensors[name.format(layer=layer)] = np.ascontiguousarray(rule.to_tensor(part))
    if _EMBEDDING in tensors and "action_in_proj.weight" in tensors:
        narrowest = min((tensor.dtype for tensor in tensors.values()), key=lambda dtype: dtype.itemsize)
        tensors[_UNUSED] = np.zeros((len(tensors[_EMBEDDING]), len(tensors["action_in_proj.weight"])), narrowest)
    save_file(tensors, directory / FILE_NAME, {"format": "pt"})  # the metadata that PyTorch's libraries look for
