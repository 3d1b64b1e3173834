"""A learner that compiles in no time, for tests of the trainer; as a program it is `pirl` with this learner."""

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import toy_ript

from pirl.agents.config import BCConfig, RIPTConfig
from pirl.models import Pi0, get_parameters, set_parameters
from pirl.models.config import Pi0Config
from pirl.training import logging, setup

BIAS = "action_out_proj/bias"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ToyAgent:
    """A vector that follows rewards, states and chance; every update leaves a trace of what it was made on."""

    step: Any
    weight: Any
    parameters: Any
    model: Pi0Config = field(metadata={"static": True})
    config: ClassVar = BCConfig()

    def update(self, batch: Any, rng: Any) -> tuple["ToyAgent", dict[str, Any]]:
        def loss(weight: Any) -> Any:
            error = batch.observations.state @ weight - jnp.mean(batch.rewards, axis=1)
            return jnp.mean(jnp.square(error)) + 0.01 * jnp.mean(batch.actions)

        value, gradient = jax.value_and_grad(loss)(self.weight)
        weight = self.weight - 0.01 * gradient + 0.001 * jax.random.uniform(rng, self.weight.shape)
        metrics = {"loss": value, "grad_norm/policy": jnp.linalg.norm(gradient), "bc/loss": jnp.sum(weight)}
        return dataclasses.replace(self, step=self.step + 1, weight=weight), metrics

    def validate(self, batch: Any, rng: Any) -> dict[str, Any]:
        return {"loss": self.update(batch, rng)[1]["loss"]}

    def act(self, observation: Any, rng: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.uniform(key, (self.model.action_horizon, self.model.action_dim)))(rng)
        return noise - 0.5 + jnp.sum(self.weight)

    def policy(self) -> Pi0:
        return set_parameters(toy_ript.shapes(self.model), {**self.parameters, BIAS: self.weight})

    def parameter_counts(self) -> dict[str, int]:
        return {"policy": self.weight.size, "policy_trainable": self.weight.size}


def create(config: Any, action_dim: int, policy: Pi0, rng: Any) -> Any:
    model = config.model
    if isinstance(config.agent, RIPTConfig):
        return toy_ript.create(config, action_dim, policy)
    return ToyAgent(jnp.zeros((), jnp.int32), jnp.zeros(model.action_dim), get_parameters(policy), model)


def load(config: Any, sharding: Any) -> Pi0:
    shapes = get_parameters(toy_ript.shapes(config.model))
    return set_parameters(
        toy_ript.shapes(config.model),
        {path: jax.device_put(np.zeros(leaf.shape, leaf.dtype)) for path, leaf in shapes.items()},
    )


# What to put in the place of which functions of pirl.training.setup.
REPLACED = {"create_learner": create, "_load": load}


def send_signal(number: int, lines: int) -> None:
    """To this process, when its log has so many lines: who watches it from outside may come too late."""
    write = logging.JsonLines.write

    def watched(self: logging.JsonLines, step: int, values: Any) -> None:
        write(self, step, values)
        if self._path.name == "metrics.jsonl" and self._path.read_bytes().count(b"\n") == lines:
            os.kill(os.getpid(), number)

    logging.JsonLines.write = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    from pirl.cli.main import main

    if asked := os.environ.get("TOY_SIGNAL"):
        send_signal(*map(int, asked.split()))
    for name, function in REPLACED.items():
        setattr(setup, name, function)
    main()
