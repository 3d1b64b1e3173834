"""Parameters as flat dictionaries: '/'-joined paths, as OpenPI's checkpoints and freeze rules name them."""

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from pirl.models.config import Pi0Config
from pirl.models.pi0 import abstract_model

_Model = TypeVar("_Model", bound=nnx.Module)


def get_parameters(model: nnx.Module) -> dict[str, Any]:
    """Every parameter of a model by path; of an abstract model, its shapes and dtypes."""
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def set_parameters(model: _Model, parameters: Mapping[str, Any]) -> _Model:
    """A model of the same kind holding exactly these parameters; its own (or their shapes) are left as they were."""
    graphdef, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    paths = ["/".join(map(str, path)) for path, _ in flat]
    if set(paths) != set(parameters):
        raise ValueError(f"parameters do not fit the model: {sorted(set(paths) ^ set(parameters))}")
    leaves = [(path, leaf.replace(parameters[name])) for name, (path, leaf) in zip(paths, flat, strict=True)]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def expected_parameters(config: Pi0Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of every parameter a configuration calls for."""
    return dict(_expected_parameters(config))


@functools.lru_cache(maxsize=32)
def _expected_parameters(config: Pi0Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Remembered: to trace a full-size model takes a second, and all presets are asked about one checkpoint."""
    return get_parameters(abstract_model(config))


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree
