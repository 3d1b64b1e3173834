"""Independent float64 reference of the pi0 / pi0.5 forward pass, flow-matching loss and Euler sampler.

It favours obviousness over speed: one joint pass over prefix and suffix under one full mask, and no key/value cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # a numpy or a jax array, depending on `xp`
Params = Mapping[str, Array]  # flat, with '/'-joined names
# image {camera: [batch, height, width, 3] in [-1, 1]}, image_mask {camera: [batch]}, state, tokenized_prompt and
# tokenized_prompt_mask [batch, length] or None; the order of the cameras is that of the dict
Observation = Mapping[str, Any]

RMS_EPS = LAYER_NORM_EPS = 1e-6
ROPE_MAX_WAVELENGTH = 10_000.0
MASKED_LOGIT = -2.3819763e38  # finite: a query without any valid key attends uniformly instead of giving NaN
MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
EXPERT_SUFFIXES = ("", "_1")  # expert 0 reads the prefix (images, prompt), expert 1 the suffix (state, actions)


@dataclass(frozen=True)
class ReferenceConfig:
    """What cannot be read from the shapes of the parameters. The LoRA tuples hold one entry per expert."""

    pi05: bool
    action_horizon: int
    lora_alpha: tuple[float | None, float | None] = (None, None)  # attention only: the MLP ignores it
    lora_rslora: tuple[bool, bool] = (False, False)


def forward(
    params: Params,
    config: ReferenceConfig,
    observation: Observation,
    actions: Array,
    noise: Array,
    time: Array,
    xp: ModuleType = np,
) -> dict[str, Array]:
    """Velocity, flow-matching loss [batch, horizon] and intermediates at the given noise and time (1 = noise)."""
    actions, noise = _to_float(actions, xp), _to_float(noise, xp)
    t = _to_float(time, xp)[:, None, None]
    x_t = t * noise + (1 - t) * actions
    u_t = noise - actions
    out = _joint_pass(_prepare_params(params, config, xp), config, observation, x_t, time, xp)
    return out | {"x_t": x_t, "u_t": u_t, "loss": xp.mean((out["v_t"] - u_t) ** 2, axis=-1)}


def sample(
    params: Params, config: ReferenceConfig, observation: Observation, noise: Array, num_steps: int, xp: ModuleType = np
) -> Array:
    """Integrate from noise (t = 1) to actions (t = 0) in Euler steps: [batch, action_horizon, action_dim]."""
    prepared = _prepare_params(params, config, xp)
    x_t = _to_float(noise, xp)
    # Time is accumulated in float32, since its rounding errors are visible in the high frequencies of its embedding.
    t, dt = np.float32(1.0), np.float32(-1.0 / num_steps)
    while t >= -dt / 2:
        time = np.full(x_t.shape[0], t, dtype=np.float32)
        x_t = x_t + float(dt) * _joint_pass(prepared, config, observation, x_t, time, xp)["v_t"]
        t = t + dt
    return x_t


def _joint_pass(
    p: Params, config: ReferenceConfig, observation: Observation, x_t: Array, time: Array, xp: ModuleType
) -> dict[str, Array]:
    prefix_tokens, prefix_mask, siglip = _embed_prefix(p, observation, x_t.shape[0], xp)
    suffix_tokens, suffix_ar, cond = _embed_suffix(p, config, observation, x_t, time, xp)
    valid = xp.concatenate([prefix_mask, xp.ones(suffix_tokens.shape[:2], dtype=bool)], axis=1)
    block = np.cumsum([False] * prefix_tokens.shape[1] + suffix_ar)
    attn_mask = (block[None, :] <= block[:, None]) & valid[:, None, :] & valid[:, :, None]
    positions = xp.cumsum(valid, axis=1) - 1  # padding consumes no position

    hidden, conds = [prefix_tokens, suffix_tokens], [None, cond]
    keys, values = [], []
    for layer in range(p["PaliGemma/llm/layers/mlp/linear"].shape[0]):
        layer_params = {name: value[layer] for name, value in _subtree(p, "PaliGemma/llm/layers/").items()}
        hidden, k, v = _gemma_block(layer_params, hidden, conds, attn_mask, positions, xp)
        keys.append(k)
        values.append(v)
    prefix_out, _ = _rms_norm(_subtree(p, "PaliGemma/llm/final_norm/"), hidden[0], None, xp)
    suffix_out, _ = _rms_norm(_subtree(p, "PaliGemma/llm/final_norm_1/"), hidden[1], cond, xp)

    out = {
        "prefix_tokens": prefix_tokens,
        "prefix_mask": prefix_mask,
        "suffix_tokens": suffix_tokens,
        "attn_mask": attn_mask,
        "positions": positions,
        "kv_k": xp.stack(keys),
        "kv_v": xp.stack(values),
        "prefix_out": prefix_out,
        "suffix_out": suffix_out,
        "v_t": _linear(p, "action_out_proj", suffix_out[:, -config.action_horizon :]),
    }
    out |= {f"siglip/{camera}": tokens for camera, tokens in siglip.items()}
    return out if cond is None else out | {"adarms_cond": cond}


def _embed_prefix(
    p: Params, observation: Observation, batch: int, xp: ModuleType
) -> tuple[Array, Array, dict[str, Array]]:
    """Tokens and validity of every camera, then of the prompt; also the image tokens per camera."""
    table = p["PaliGemma/llm/embedder/input_embedding"]
    width = table.shape[1]
    # The empty first element makes an empty prefix (no camera, no prompt) an ordinary case.
    tokens, masks = [xp.zeros((batch, 0, width), dtype=table.dtype)], [xp.zeros((batch, 0), dtype=bool)]
    siglip = {}
    for camera, image in observation["image"].items():
        siglip[camera] = _siglip(_subtree(p, "PaliGemma/img/"), _to_float(image, xp), xp)
        tokens.append(siglip[camera])
        camera_mask = xp.asarray(observation["image_mask"][camera], dtype=bool)
        masks.append(xp.broadcast_to(camera_mask[:, None], siglip[camera].shape[:2]))
    if observation.get("tokenized_prompt") is not None:
        tokens.append(table[xp.asarray(observation["tokenized_prompt"])] * width**0.5)  # image tokens are not rescaled
        masks.append(xp.asarray(observation["tokenized_prompt_mask"], dtype=bool))
    return xp.concatenate(tokens, axis=1), xp.concatenate(masks, axis=1), siglip


def _embed_suffix(
    p: Params, config: ReferenceConfig, observation: Observation, x_t: Array, time: Array, xp: ModuleType
) -> tuple[Array, list[bool], Array | None]:
    """Suffix tokens, their ar_mask and, for pi0.5, the adaRMS conditioning vector."""
    action_tokens = _linear(p, "action_in_proj", x_t)
    action_ar = [True] + [False] * (config.action_horizon - 1)
    time_emb = _embed_time(time, action_tokens.shape[-1], xp)
    if config.pi05:
        cond = _swish(_linear(p, "time_mlp_out", _swish(_linear(p, "time_mlp_in", time_emb), xp)), xp)
        return action_tokens, action_ar, cond
    time_tokens = xp.broadcast_to(time_emb[:, None, :], action_tokens.shape)
    mixed = _linear(p, "action_time_mlp_in", xp.concatenate([action_tokens, time_tokens], axis=-1))
    action_tokens = _linear(p, "action_time_mlp_out", _swish(mixed, xp))
    state_token = _linear(p, "state_proj", _to_float(observation["state"], xp))[:, None, :]
    return xp.concatenate([state_token, action_tokens], axis=1), [True, *action_ar], None


def _embed_time(time: Array, dim: int, xp: ModuleType) -> Array:
    # Angles reach 1571 rad, where float32 resolves 1e-4 rad only; they are rounded the way the float32 system rounds
    # them, as an exact angle would be further away from that system than all other operations together.
    fraction = np.arange(dim // 2, dtype=np.float32) / np.float32(max(dim // 2 - 1, 1))
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
    frequency = 1.0 / period * 2 * np.pi
    assert frequency.dtype == np.float32
    angle = _to_float(xp.asarray(time, dtype=np.float32)[:, None] * frequency, xp)
    return xp.concatenate([xp.sin(angle), xp.cos(angle)], axis=-1)


def _gemma_block(
    p: Params, hidden: list[Array], conds: list[Array | None], attn_mask: Array, positions: Array, xp: ModuleType
) -> tuple[list[Array], Array, Array]:
    """One layer of both experts; also returns the joint keys (after RoPE) and values."""
    projected, gates = [], []
    for x, cond, suffix in zip(hidden, conds, EXPERT_SUFFIXES, strict=True):
        normed, gate = _rms_norm(_subtree(p, f"pre_attention_norm{suffix}/"), x, cond, xp)
        projected.append(_project_qkv(p, normed, suffix, xp))
        gates.append(gate)
    q, k, v = (xp.concatenate(parts, axis=1) for parts in zip(*projected, strict=True))
    q, k = _rope(q, positions, xp), _rope(k, positions, xp)
    attended = _attend(q * q.shape[-1] ** -0.5, k, v, attn_mask, xp)

    split, outputs = hidden[0].shape[1], []
    per_expert = (attended[:, :split], attended[:, split:])
    for x, attn, gate, cond, suffix in zip(hidden, per_expert, gates, conds, EXPERT_SUFFIXES, strict=True):
        x = x + gate * xp.einsum("btnh,nhd->btd", attn, p[f"attn/attn_vec_einsum{suffix}/w"])
        normed, gate = _rms_norm(_subtree(p, f"pre_ffw_norm{suffix}/"), x, cond, xp)
        gating = p[f"mlp{suffix}/gating_einsum"]
        activated = _gelu(normed @ gating[0], xp) * (normed @ gating[1])
        outputs.append(x + gate * (activated @ p[f"mlp{suffix}/linear"]))
    return outputs, k, v


def _project_qkv(p: Params, x: Array, suffix: str, xp: ModuleType) -> tuple[Array, ...]:
    fused = f"attn/qkv_einsum{suffix}/w"  # exists iff there are as many key/value heads as query heads
    if fused in p:
        return tuple(xp.einsum("btd,sndh->sbtnh", x, p[fused]))
    q = xp.einsum("btd,ndh->btnh", x, p[f"attn/q_einsum{suffix}/w"])
    return q, *xp.einsum("btd,skdh->sbtkh", x, p[f"attn/kv_einsum{suffix}/w"])


def _attend(q: Array, k: Array, v: Array, mask: Array | None, xp: ModuleType) -> Array:
    """Attention of [batch, time, heads, head_dim]; query head n reads key/value head n // (heads / kv_heads)."""
    group = q.shape[2] // k.shape[2]
    k, v = xp.repeat(k, group, axis=2), xp.repeat(v, group, axis=2)
    logits = xp.einsum("btnh,bsnh->bnts", q, k)
    if mask is not None:
        logits = xp.where(mask[:, None], logits, MASKED_LOGIT)
    weights = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    return xp.einsum("bnts,bsnh->btnh", weights, v)


def _rope(x: Array, positions: Array, xp: ModuleType) -> Array:
    half = x.shape[-1] // 2
    wavelength = ROPE_MAX_WAVELENGTH ** (np.arange(half) / half)
    angle = _to_float(positions, xp)[:, :, None, None] / _to_float(wavelength, xp)
    sin, cos = xp.sin(angle), xp.cos(angle)
    first, second = x[..., :half], x[..., half:]  # pairs are (i, i + half), not interleaved
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rms_norm(p: Params, x: Array, cond: Array | None, xp: ModuleType) -> tuple[Array, Array | float]:
    """Normalised input and the gate of the residual branch (1 without conditioning)."""
    normed = x / xp.sqrt(xp.mean(x**2, axis=-1, keepdims=True) + RMS_EPS)
    if cond is None:
        return normed * (1 + p["scale"]), 1.0
    scale, shift, gate = xp.split(_linear(p, "Dense_0", cond)[:, None, :], 3, axis=-1)
    return normed * (1 + scale) + shift, gate


def _siglip(p: Params, image: Array, xp: ModuleType) -> Array:
    """Image [batch, height, width, 3] to row-major patch tokens of the width of expert 0."""
    kernel = p["embedding/kernel"]
    ph, pw = kernel.shape[:2]
    batch, rows, cols = image.shape[0], image.shape[1] // ph, image.shape[2] // pw
    patches = image[:, : rows * ph, : cols * pw].reshape(batch, rows, ph, cols, pw, image.shape[3])
    x = xp.einsum("byixjc,ijcd->byxd", patches, kernel).reshape(batch, rows * cols, -1)
    x = x + p["embedding/bias"] + p["pos_embedding"]
    blocks = _subtree(p, "Transformer/encoderblock/")
    for layer in range(blocks["LayerNorm_0/scale"].shape[0]):
        block = {name: value[layer] for name, value in blocks.items()}
        attn = _subtree(block, "MultiHeadDotProductAttention_0/")
        normed = _layer_norm(block, "LayerNorm_0", x, xp)
        q, k, v = (
            xp.einsum("btd,dnh->btnh", normed, attn[f"{name}/kernel"]) + attn[f"{name}/bias"]
            for name in ("query", "key", "value")
        )
        attended = _attend(q * q.shape[-1] ** -0.5, k, v, None, xp)
        x = x + xp.einsum("btnh,nhd->btd", attended, attn["out/kernel"]) + attn["out/bias"]
        normed = _layer_norm(block, "LayerNorm_1", x, xp)
        x = x + _linear(block, "MlpBlock_0/Dense_1", _gelu(_linear(block, "MlpBlock_0/Dense_0", normed), xp))
    return _linear(p, "head", _layer_norm(p, "Transformer/encoder_norm", x, xp))


def _prepare_params(params: Params, config: ReferenceConfig, xp: ModuleType) -> dict[str, Array]:
    """Float parameters with the LoRA factors merged into their base weights."""
    p = {name: _to_float(value, xp) for name, value in params.items()}
    merged = {name: value for name, value in p.items() if "lora_" not in name}
    for name in p:
        if not name.endswith("lora_a"):
            continue
        a, b, scale = p[name], p[name.removesuffix("a") + "b"], 1.0
        if "/attn/" in name:
            base = name.removesuffix("lora_a") + "w"
            expert = int(name.endswith("_1/lora_a"))
            alpha, rank = config.lora_alpha[expert], a.shape[-1]
            assert alpha is not None, f"lora_alpha is needed for {name}"
            scale = alpha / (rank**0.5 if config.lora_rslora[expert] else rank)
            if "/attn_vec_einsum" in name:  # the output projection sums B over the heads, independently of A
                b = xp.sum(b, axis=-3, keepdims=True)
        else:
            base = name.removesuffix("_lora_a")  # the MLP adds x A B without alpha / rank
        merged[base] = p[base] + scale * (a @ b)
    return merged


def _subtree(p: Params, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}


def _linear(p: Params, name: str, x: Array) -> Array:
    return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]


def _layer_norm(p: Params, name: str, x: Array, xp: ModuleType) -> Array:
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    variance = xp.mean(centred**2, axis=-1, keepdims=True)
    return centred / xp.sqrt(variance + LAYER_NORM_EPS) * p[f"{name}/scale"] + p[f"{name}/bias"]


def _swish(x: Array, xp: ModuleType) -> Array:
    return 0.5 * x * (1 + xp.tanh(0.5 * x))  # the logistic function as a tanh, which cannot overflow


def _gelu(x: Array, xp: ModuleType) -> Array:
    return 0.5 * x * (1 + xp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _to_float(x: Array, xp: ModuleType) -> Array:
    """The widest float of the array module: float64, or float32 under jax unless 64-bit mode is on."""
    return xp.asarray(x, dtype=xp.result_type(float))
