"""Best-of-N from one observation: the prefix encoded once and shared, against the observation tiled N times.

Both sides sample the same chunks from the same noise, in one process, in turns; the median of several rounds is
compared. The model is a π₀ shrunk in proportion (a prefix token costs 6.5 times a suffix token, the vision tower a fifth
of the language model) with the horizon of π₀'s LIBERO and DROID policies: 464 prefix and 11 suffix tokens (those have
816 and 11, `pi0_base` with its horizon of 50 has 816 and 51).
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from pirl.models import ExpertConfig, Observation, Pi0, Pi0Config, VisionConfig, create_model

CONFIG = Pi0Config(
    vision=VisionConfig(width=288, depth=6, mlp_dim=1076, num_heads=8, patch_size=(14, 14)),
    language=ExpertConfig(width=512, depth=4, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=64),
    action_expert=ExpertConfig(width=256, depth=4, mlp_dim=1024, num_heads=8, num_kv_heads=1, head_dim=64),
    vocab_size=1024,
    action_horizon=10,
    action_dim=32,
    max_token_len=32,
    image_resolution=(168, 168),
    dtype="float32",
    tokenizer="tiny",
)


def main() -> None:
    """Time both sides and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=16, help="N (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is timed (default: 5)")
    options = parser.parse_args()
    n = options.samples
    policy = create_model(CONFIG, jax.random.key(0))
    one, many = observation(1), observation(n)
    noise = jax.random.normal(jax.random.key(1), (1, n, CONFIG.action_horizon, CONFIG.action_dim))

    @jax.jit
    def shared(policy: Pi0, observation: Observation, noise: jax.Array) -> jax.Array:
        return policy.sample(policy.encode(observation), noise=noise)[0]

    @jax.jit
    def tiled(policy: Pi0, observation: Observation, noise: jax.Array) -> jax.Array:
        return policy.sample(policy.encode(observation), noise=noise[0][:, None])[:, 0]

    np.testing.assert_allclose(shared(policy, one, noise), tiled(policy, many, noise), rtol=1e-4, atol=1e-4)
    sides: dict[str, Callable[[], jax.Array]] = {
        "shared": lambda: shared(policy, one, noise),
        "tiled": lambda: tiled(policy, many, noise),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        json.dumps(
            {
                "name": "best_of_n",
                "compared": f"best-of-{n}: observation tiled {n} times over one shared prefix, wall time",
                "ratio": round(medians["tiled"] / medians["shared"], 2),
                "target": 6,
                "prefix_tokens": len(CONFIG.cameras) * CONFIG.tokens_per_image + CONFIG.max_token_len,
                "milliseconds": {name: round(1000 * value, 1) for name, value in medians.items()},
            }
        )
    )


def observation(batch: int) -> Observation:
    """The same random observation, `batch` times."""
    random = np.random.default_rng(0)
    images = {name: random.integers(0, 256, (1, *CONFIG.image_resolution, 3), np.uint8) for name in CONFIG.cameras}
    one = {
        "image": images,
        "state": random.normal(size=(1, CONFIG.action_dim)),
        "tokenized_prompt": random.integers(0, CONFIG.vocab_size, (1, CONFIG.max_token_len)),
        "tokenized_prompt_mask": np.ones((1, CONFIG.max_token_len), bool),
    }
    single = Observation.from_dict(one, CONFIG)
    return dataclasses.replace(jax.tree.map(lambda x: np.repeat(x, batch, axis=0), single))


if __name__ == "__main__":
    main()
