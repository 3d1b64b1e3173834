"""What to change where memory is too small: each change with what it would leave of the learner on a device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pirl.agents.acrlpd import ACRLPDConfig
from pirl.config import RLTrainConfig, list_configs
from pirl.config.presets import with_lora

if TYPE_CHECKING:
    import jax

# The change that only shards, by which `needed_devices` recognises it.
SHARDING = "shard one copy of the learner over all devices"
# Freezing these leaves only the action expert to train.
_BACKBONE = ("vision", "language")


@dataclass(frozen=True)
class Change:
    """Another way to run the same."""

    what: str
    how: str
    """On the command line."""
    state: dict[str, int]
    """Bytes of its learner on each device, by what they are for; none if it is not the learner that becomes smaller."""


def list_changes(config: RLTrainConfig, devices: "list[jax.Device]") -> list[Change]:
    """Everything that makes the learner smaller, from what changes nothing about learning to what changes most."""
    from pirl.plan.compiling import abstract_agent, abstract_setup
    from pirl.plan.memory import state_device_bytes

    def sized(changed: RLTrainConfig) -> dict[str, int]:
        return state_device_bytes(abstract_agent(abstract_setup(changed, devices)))

    spread = replace(config, fsdp_devices=len(devices))
    sharing = "" if spread == config else f" --fsdp-devices {len(devices)}"
    changes = [
        Change(what, f"{how}{sharing}".strip(), sized(changed)) for what, how, changed in _variants(config, spread)
    ]
    if config.model.remat != "full":
        changes.append(
            Change("recompute activations in the backward pass instead of keeping them", "--model.remat full", {})
        )
    return changes


def _variants(config: RLTrainConfig, spread: RLTrainConfig) -> Iterator[tuple[str, str, RLTrainConfig]]:
    """What is done, how, and the configuration; all of them over the parameters spread over all devices."""
    agent, name = config.agent, "policy_optimiser" if isinstance(config.agent, ACRLPDConfig) else "optimiser"
    if spread != config:
        yield SHARDING, "", spread
    small = replace(getattr(agent, name), moments_dtype="bfloat16")
    if small != getattr(agent, name):
        yield (
            "keep the optimiser's moments in bfloat16",
            f"--agent.{name.replace('_', '-')}.moments-dtype bfloat16",
            replace(spread, agent=replace(agent, **{name: small})),
        )
    if not set(_BACKBONE) <= set(agent.freeze) and not config.model.language.has_lora:
        frozen = tuple(dict.fromkeys((*agent.freeze, *_BACKBONE)))
        yield (
            "train only the action expert",
            f"--agent.freeze {','.join(frozen)}",
            replace(spread, agent=replace(agent, freeze=frozen)),
        )
    if f"{config.name}_lora" in list_configs() and not config.model.language.has_lora:
        yield "train only low-rank updates (LoRA)", f"preset {config.name}_lora", with_lora(spread)
