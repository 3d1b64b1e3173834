"""How evenly the train state lies over 8 devices: the bytes of the fullest one against an eighth of all.

Full-size π₀ with EMA, both optimizers and critics (the preset aloha_fold and others) from shapes alone; a middle-size one
really allocated on 8 simulated devices. On the way, for the latter: what an update saves in temporary memory and in bytes
sent because activations are told to stay spread over the batch.
"""

import os

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import dataclasses
import json
import math
from typing import Any

import jax

from pirl.agents.config import BCConfig
from pirl.config import RLTrainConfig, get_config, override_config
from pirl.models import ExpertConfig, Pi0Config, VisionConfig, gemma
from pirl.plan.measure import abstract_setup, read_traffic, trace_update
from pirl.training.setup import agent_shapes, create_agent

DEVICES = 8
TARGET = 1.15
_EXPERT = ExpertConfig(width=512, depth=12, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=64)
MIDDLE = Pi0Config(
    vision=VisionConfig(width=512, depth=12, mlp_dim=2048, num_heads=8, patch_size=(14, 14)),
    language=_EXPERT,
    action_expert=dataclasses.replace(_EXPERT, width=256, mlp_dim=2048),
    vocab_size=8192,
    action_dim=16,
    action_horizon=20,
    max_token_len=16,
    cameras=("base_0_rgb", "left_wrist_0_rgb"),
    image_resolution=(112, 112),
    dtype="float32",
    tokenizer="tiny",
)


def main() -> None:
    """Measure, and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="full size from shapes; nothing is allocated or compiled")
    quick = parser.parse_args().quick
    fold = get_config("aloha_fold")
    configs = {"aloha_fold": fold, "rl_fold_box": get_config("rl_fold_box")}
    configs["aloha_fold_bc"] = override_config(fold, {"agent.learner": "bc"})
    configs["aloha_fold_lora"] = override_config(fold, {"model.preset": "pi0_lora", "agent.policy_ema_decay": None})
    ratios = {name: planned(name, config) for name, config in configs.items()}
    measured: dict[str, Any] = {} if quick else {"allocated": allocated()} | activations()
    result = {
        "name": "fsdp_bytes",
        "ratio": ratios["aloha_fold"],
        "target": TARGET,
        **{name: ratio for name, ratio in ratios.items() if name != "aloha_fold"},
        **measured,
        "compared": "bytes of the train state on the fullest of 8 devices (fsdp 8) with an eighth of all; aloha_fold",
    }
    print(json.dumps(result))


def planned(name: str, config: RLTrainConfig) -> float:
    """The ratio for a configuration whose state exists as shapes only."""
    config = dataclasses.replace(config, fsdp_devices=DEVICES)
    leaves = jax.tree.leaves(agent_shapes(abstract_setup(config, jax.devices())))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    ratio = held * DEVICES / total
    print(f"{name}: {total / 2**30:.2f} GiB, {held / 2**30:.2f} GiB on each device, {ratio:.4f} of an even share")
    return round(ratio, 4)


def middle_size() -> RLTrainConfig:
    """A policy small enough to be made here, and large enough for the rule to shard most of it."""
    base = override_config(get_config("aloha_fold"), {"agent.learner": "bc"})
    assert isinstance(base.agent, BCConfig)
    agent = dataclasses.replace(base.agent, augment=False)
    return dataclasses.replace(base, model=MIDDLE, agent=agent, from_scratch=True, fsdp_devices=DEVICES)


def allocated() -> float:
    """The ratio for a state that was really made, by what each device holds of it."""
    leaves = jax.tree.leaves(create_agent(abstract_setup(middle_size(), jax.devices())))
    held: dict[Any, int] = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    ratio = max(held.values()) * DEVICES / total
    print(f"middle size, allocated: {total / 2**20:.0f} MiB, {ratio:.4f} of an even share on the fullest device")
    return round(ratio, 4)


def activations() -> dict[str, float]:
    """MiB of an update on each device: temporary, and sent to others; with activations left alone and kept spread."""
    found = {}
    for name, shard_batch in (("alone", lambda x: x), ("spread", gemma.shard_batch)):
        gemma.shard_batch = shard_batch
        compiled = trace_update(abstract_setup(middle_size(), jax.devices())).lower().compile()
        memory: Any = compiled.memory_analysis()
        found[f"temporary_{name}"] = round(memory.temp_size_in_bytes / 2**20, 1)
        traffic = read_traffic(compiled.as_text() or "", DEVICES)
        found[f"sent_{name}"] = round((sum(traffic.values()) - traffic.get("products", 0.0)) / 2**20, 1)
        print(
            f"an update, activations {name}: {found[f'temporary_{name}']} MiB temporary, {found[f'sent_{name}']} sent"
        )
    return found


if __name__ == "__main__":
    main()
