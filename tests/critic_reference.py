"""The critics written again in numpy: one network, one observation and one chunk at a time, in float64."""

from typing import Any

import numpy as np

from pirl.models.config import CriticConfig
from pirl.models.pi0 import Prefix


def normalize(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / np.sqrt(x.var() + 1e-6)


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def linear(params: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ params[f"{name}/kernel"] + params.get(f"{name}/bias", 0.0)


def look(params: dict[str, np.ndarray], config: CriticConfig, prefix: Prefix, row: int) -> np.ndarray:
    """What a critic sees of one observation: what its queries read, head by head, and the state."""
    state = np.asarray(prefix.state[row], np.float64)
    if "readout/queries" not in params:
        return state
    tokens = np.flatnonzero(np.asarray(prefix.mask[row]))
    keys, values = (np.asarray(x, np.float64)[:, row] for x in (prefix.cache.keys, prefix.cache.values))
    cached = [normalize(np.concatenate([keys[:, t], values[:, t]], axis=-1).ravel()) for t in tokens]
    projected = np.stack([linear(params, "readout/key_value", token) for token in cached])
    keys, values = np.split(projected, 2, axis=1)
    queries = params["readout/queries"] + linear(params, "readout/state", state).reshape(config.num_queries, -1)
    parts = np.split(np.arange(config.query_width), config.num_heads)
    read = np.zeros_like(queries)
    for number, head in np.ndindex(config.num_queries, config.num_heads):
        at = parts[head]
        read[number, at] = softmax(keys[:, at] @ queries[number, at] / np.sqrt(len(at))) @ values[:, at]
    out = [normalize(x + linear(params, "readout/out", gelu(x))) for x in read]
    return np.concatenate([*out, state])


def mlp(params: dict[str, np.ndarray], config: CriticConfig, name: str, view: np.ndarray, chunk: Any) -> np.ndarray:
    x = linear(params, f"{name}/view", view)
    if chunk is not None:
        x = x + chunk @ params[f"{name}/actions/kernel"]
    for number in range(len(config.hidden_dims)):
        x = normalize(x) * params[f"{name}/norms/{number}/scale"] + params[f"{name}/norms/{number}/bias"]
        last = number == len(config.hidden_dims) - 1
        x = linear(params, f"{name}/out" if last else f"{name}/hidden/{number}", gelu(x))
    return x


def q_logits(params: Any, config: CriticConfig, prefix: Prefix, chunks: Any) -> np.ndarray:
    """[critics, b, n, outputs] for chunks [b, n, horizon, action_dim], all of which the critics see."""
    chunks = np.asarray(chunks, np.float64)
    shape = (config.num_critics, *chunks.shape[:2])
    out = np.zeros((*shape, config.outputs))
    for k, row, sample in np.ndindex(shape):
        one = one_of(params, k)
        out[k, row, sample] = mlp(one, config, "q", look(one, config, prefix, row), chunks[row, sample].ravel())
    return out


def v_logits(params: Any, config: CriticConfig, prefix: Prefix) -> np.ndarray:
    """[critics, b, outputs]"""
    out = np.zeros((config.num_critics, len(prefix.state), config.outputs))
    for k, row in np.ndindex(out.shape[:2]):
        one = one_of(params, k)
        out[k, row] = mlp(one, config, "v", look(one, config, prefix, row), None)
    return out


def one_of(params: Any, k: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf[k], np.float64) for name, leaf in params.items()}
