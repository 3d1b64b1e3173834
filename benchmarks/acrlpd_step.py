"""One ACRLPD update against a BC update of the same model on the same batch, and against ACRLPD written naively.

All in one process, in turns; medians over several rounds of the CPU time, all threads together, are compared.
ACRLPD is that of the full-size presets (`distill`: N = 4 proposals of the start policy in 10 steps of the flow), with a
policy that learns to see, as the demo's does, and with frozen vision and language, as theirs is. As `awr` it has a naive
side, which computes the same numbers (it is checked), but encodes the observation for every use: target, critics, policy.

The model is a π₀ shrunk in proportion. Three cameras of 224² and 48 prompt tokens make π₀'s 816 prefix tokens, a horizon
of 50 its 51 suffix tokens. Widths are an eighth, depths a third, and attention is narrower still, so that a prefix token
costs 5.2 times the FLOPs of a suffix token, what it attends to included (π₀: 4.08 G / 0.75 G = 5.4). Encoding an
observation costs 104 times as much as a pass of the action expert, here and in π₀.

The time to compile is that of a process without and of one with the compilation cache.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pirl.agents.acrlpd import ACRLPDAgent, Encoded
from pirl.agents.bc import BCAgent
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import get_config
from pirl.data import ChunkBatch
from pirl.models import ExpertConfig, Observation, Pi0Config, VisionConfig, create_model

MODEL = Pi0Config(
    vision=VisionConfig(width=144, depth=9, mlp_dim=538, num_heads=4, patch_size=(14, 14)),
    language=ExpertConfig(width=256, depth=6, mlp_dim=2048, num_heads=2, num_kv_heads=1, head_dim=32),
    action_expert=ExpertConfig(width=128, depth=6, mlp_dim=512, num_heads=2, num_kv_heads=1, head_dim=32),
    vocab_size=1024,
    dtype="float32",
    tokenizer="tiny",
)
ACRLPD = get_config("droid").agent
assert isinstance(ACRLPD, ACRLPDConfig)
AGENT = dataclasses.replace(
    ACRLPD,
    horizon_length=20,
    critic=dataclasses.replace(ACRLPD.critic, hidden_dims=(64,) * 4),
    critic_warmup_steps=0,
    freeze=(),
    augment=False,
)
REAL_ACTIONS = 14


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NaiveAgent(ACRLPDAgent):
    """ACRLPD as one would write it loss by loss: whoever needs an observation encodes it."""

    def critic_loss(self, enc: Encoded, params: Any) -> Any:
        """Encodes both observations by itself, the present one for the critics and the next one for the target."""
        policy = jax.lax.stop_gradient(enc.policy)
        again = dataclasses.replace(
            enc,
            critic_prefix=policy.encode(another(enc.inputs.flow.observations)),
            next_prefix=policy.encode(another(enc.inputs.next_observations)),
        )
        return super().critic_loss(again, params)

    def actor_loss(self, enc: Encoded) -> Any:
        """Encodes with gradients by itself."""
        prefix = enc.policy.encode(another(enc.inputs.flow.observations))
        return super().actor_loss(dataclasses.replace(enc, prefix=prefix))


def another(observation: Observation) -> Observation:
    """The same values, of which the compiler does not know that they are the same."""
    return jax.lax.optimization_barrier(observation)


def main() -> None:
    """Time all sides and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2, help="samples (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is timed (default: 5)")
    parser.add_argument("--only-start", action="store_true", help="compile the ACRLPD update and print the seconds")
    options = parser.parse_args()
    if options.only_start:
        print(json.dumps(compile_update(make_agents()["acrlpd"], make_batch(options.batch))[1]))
        return
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        agents, batch = make_agents(), make_batch(options.batch)
        updates, compiling = {}, {}
        for name, agent in agents.items():
            updates[name], compiling[name] = compile_update(agent, batch)
            print(f"compiled {name} in {compiling[name]:.0f} s", file=sys.stderr)
        warm = start_again(Path(cache), options.batch)
    losses: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in agents}
    wall: dict[str, list[float]] = {name: [] for name in agents}
    key = jax.random.key(1)
    for number in range(1 + options.rounds):  # the first round warms up
        for name, update in updates.items():
            begun, begun_cpu = time.perf_counter(), time.process_time()
            _, losses[name] = jax.block_until_ready(update(agents[name], batch, key))
            if number:
                wall[name].append(time.perf_counter() - begun)
                seconds[name].append(time.process_time() - begun_cpu)
    for name in ("loss", "grad_norm/policy", "grad_norm/critic"):
        np.testing.assert_allclose(losses["awr"][name], losses["naive"][name], rtol=1e-3)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = [one / other for one, other in zip(seconds["acrlpd"], seconds["bc"], strict=True)]
    print(
        json.dumps(
            {
                "name": "acrlpd_step",
                "compared": "ACRLPD update over the BC update of the same model and batch, CPU time",
                "ratio": round(medians["acrlpd"] / medians["bc"], 2),
                "target": 1.8,
                "ratio_of_rounds": [round(min(ratios), 2), round(max(ratios), 2)],
                "frozen": round(medians["frozen"] / medians["bc"], 2),
                "awr": round(medians["awr"] / medians["bc"], 2),
                "naive_over_awr": round(medians["naive"] / medians["awr"], 2),
                "prefix_tokens": len(MODEL.cameras) * MODEL.tokens_per_image + MODEL.max_token_len,
                "parameters": agents["bc"].parameter_counts()["policy"],
                "cpu_milliseconds": {name: round(1000 * value) for name, value in medians.items()},
                "milliseconds": {name: round(1000 * statistics.median(times)) for name, times in wall.items()},
                "compile_seconds": {name: round(value, 1) for name, value in compiling.items()}
                | {"acrlpd, second start": round(warm, 1)},
            }
        )
    )


def make_agents() -> dict[str, Any]:
    """The learners, with the same policy."""
    policy, key = create_model(MODEL, jax.random.key(0)), jax.random.key(0)
    frozen = dataclasses.replace(AGENT, freeze=("vision", "language"))
    awr = dataclasses.replace(AGENT, actor_mode="awr")
    kinds: dict[str, tuple[Any, Any]] = {
        "bc": (BCAgent, BCConfig(augment=False, loss_over="real")),
        "acrlpd": (ACRLPDAgent, AGENT),
        "frozen": (ACRLPDAgent, frozen),
        "awr": (ACRLPDAgent, awr),
        "naive": (NaiveAgent, awr),
    }
    return {
        name: kind.create(config, policy, key, real_action_dim=REAL_ACTIONS) for name, (kind, config) in kinds.items()
    }


def compile_update(agent: Any, batch: ChunkBatch) -> tuple[Any, float]:
    """The compiled update, and the seconds it took to trace and compile."""
    begun = time.perf_counter()
    compiled = (
        jax.jit(lambda agent, batch, key: agent.update(batch, key)).lower(agent, batch, jax.random.key(1)).compile()
    )
    return compiled, time.perf_counter() - begun


def start_again(cache: Path, batch: int) -> float:
    """Seconds to compile the ACRLPD update in a new process that finds the cache."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    command = [sys.executable, sys.argv[0], "--only-start", "--batch", str(batch)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def make_batch(size: int) -> ChunkBatch:
    """Random chunks in the middle of successful episodes."""
    random, horizon = np.random.default_rng(0), AGENT.horizon_length
    return ChunkBatch(
        observations=make_observation(random, size),
        next_observations=make_observation(random, size),
        actions=jnp.asarray(random.normal(size=(size, MODEL.action_horizon, MODEL.action_dim)), jnp.float32),
        valid=jnp.ones((size, MODEL.action_horizon), bool),
        rewards=jnp.zeros((size, horizon)),
        terminals=jnp.zeros((size, horizon), bool),
        masks=jnp.ones((size, horizon), bool),
        next_terminal=jnp.zeros(size, bool),
        sequence_mask=jnp.ones(size, bool),
        success=jnp.ones(size, bool),
    )


def make_observation(random: np.random.Generator, size: int) -> Observation:
    """Noise in every pixel and number."""
    shape = (size, *MODEL.image_resolution, 3)
    return Observation.from_dict(
        {
            "image": {name: random.integers(0, 256, shape, np.uint8) for name in MODEL.cameras},
            "state": random.normal(size=(size, MODEL.action_dim)),
            "tokenized_prompt": random.integers(0, MODEL.vocab_size, (size, MODEL.max_token_len)),
            "tokenized_prompt_mask": np.ones((size, MODEL.max_token_len), bool),
        },
        MODEL,
    )


if __name__ == "__main__":
    main()
