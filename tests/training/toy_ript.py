"""A learner with the outside of RIPT's that compiles in no time: what it does shows how many updates it has made."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pirl.agents.ript import RIPTAgent, RolloutBatch
from pirl.models import GuidedObservation, Pi0, abstract_model, get_parameters, set_parameters
from pirl.models.config import Pi0Config

BIAS = "action_out_proj/bias"
# Made once: it takes longer than all the rest.
shapes = functools.cache(abstract_model)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ToyRIPT(RIPTAgent):
    """A vector that follows states, advantages and chance; every update leaves a trace of what it was made on."""

    weight: Any = None
    model: Pi0Config = dataclasses.field(default=None, metadata={"static": True})  # type: ignore[assignment]

    def update(self, batch: RolloutBatch, rng: Any) -> tuple["ToyRIPT", dict[str, Any]]:
        chunks, worth = batch.chunks, batch.included * batch.advantages

        def loss(weight: Any) -> Any:
            error = chunks.observations.state @ weight - worth
            flow = jnp.mean(jnp.square(error) * batch.included) + 0.01 * jnp.mean(chunks.actions)
            if batch.demonstrations is None:
                return flow
            return flow + jnp.mean(batch.demonstrations.actions)

        value, gradient = jax.value_and_grad(loss)(self.weight)
        weight = self.weight - 0.01 * gradient + 0.001 * jax.random.uniform(rng, self.weight.shape)
        metrics = {
            "loss": value,
            "grad_norm/policy": jnp.linalg.norm(gradient),
            "data/valid_chunks": jnp.mean(batch.included),
        }
        return dataclasses.replace(self, step=self.step + 1, weight=weight), metrics

    def validate(self, batch: Any, rng: Any) -> dict[str, Any]:
        return {"loss": jnp.mean(batch.observations.state @ self.weight)}

    def act(self, observation: Any, rng: Any) -> Any:
        """Chance, how many updates there were, and the weight, in the robot's three dimensions."""
        if isinstance(observation, GuidedObservation):
            observation = observation.plain
        shape = (self.model.action_horizon, self.model.action_dim)
        noise = jax.vmap(lambda key: jax.random.uniform(key, shape))(rng)
        noise = noise + 0.1 * jnp.sum(self.weight)
        return noise.at[..., 1].set(self.step.astype(jnp.float32))

    def act_in_rollout(self, observation: Any, rng: Any) -> Any:
        return self.act(observation, rng)

    def velocities(self, batch: Any, rng: Any) -> Any:
        return batch.actions * 0 + self.weight

    def drift(self, before: Any, batch: Any, rng: Any) -> Any:
        return jnp.mean(jnp.square(self.velocities(batch, rng) - before))

    def policy(self) -> Pi0:
        return set_parameters(shapes(self.model), {**self.actor, BIAS: self.weight})  # type: ignore[dict-item]

    def parameter_counts(self) -> dict[str, int]:
        return {"policy": self.weight.size, "policy_trainable": self.weight.size}


def create(config: Any, action_dim: int, policy: Pi0) -> ToyRIPT:
    parameters: Any = get_parameters(policy)
    return ToyRIPT(
        jnp.zeros((), jnp.int32), parameters, config.agent, action_dim, jnp.zeros(config.model.action_dim), config.model
    )
