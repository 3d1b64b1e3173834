"""The named presets: each says what it is for, the command, what it needs and what to expect of it."""

import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config.presets.aloha import aloha_fold, aloha_ript, aloha_sim, rl_fold_box
from pirl.config.presets.demo import (
    debug,
    demo,
    demo_bc,
    demo_ript,
    demo_ript_start,
    demo_state,
    demo_state_bc,
)
from pirl.config.presets.droid import droid
from pirl.config.presets.libero import libero, libero_ript
from pirl.config.train import RLTrainConfig
from pirl.errors import ConfigError, did_you_mean
from pirl.models.config import GEMMA_2B_LORA, GEMMA_300M_LORA

# What OpenPI has released of π₀ and not of π₀.₅: the run that takes its place has to be made first.
_ONLY_PI0 = {"checkpoints/pi0_aloha_sim": "runs/cube_bc"}


@dataclass(frozen=True)
class Preset:
    """A configuration, and what there is to say about it: a sentence, then a page."""

    config: RLTrainConfig
    summary: str
    about: str


def list_configs() -> list[str]:
    """The names of the presets."""
    return list(_presets())


def get_config(name: str) -> RLTrainConfig:
    """The configuration of a preset; an unknown name is answered with the nearest."""
    return get_preset(name).config


def get_preset(name: str) -> Preset:
    """A preset with its description."""
    presets = _presets()
    if name in presets:
        return presets[name]
    raise ConfigError(f"no preset is named {name!r}. {did_you_mean(name, presets)}See pirl configs.")


@cache
def _presets() -> dict[str, Preset]:
    demos = (demo, demo_bc, demo_state, demo_state_bc, demo_ript, demo_ript_start, debug)
    presets = {make.__name__: _describe(make(), make) for make in demos}
    for make in (aloha_fold, rl_fold_box, aloha_sim, droid, libero):
        for pi05, lora, cloned in itertools.product((False, True), repeat=3):
            config = make(pi05)
            config = with_lora(config) if lora else config
            config = with_bc(config) if cloned else config
            preset = _describe(config, make)
            presets[config.name] = _as_baseline(preset) if cloned else preset
    for make in (libero_ript, aloha_ript):
        for pi05, lora in itertools.product((False, True), repeat=2):
            config = with_lora(make(pi05)) if lora else make(pi05)
            presets[config.name] = _describe(config, make)
    return presets


def _describe(config: RLTrainConfig, make: Callable[..., RLTrainConfig]) -> Preset:
    about = inspect.cleandoc(make.__doc__ or "").replace(f"train {make.__name__} ", f"train {config.name} ")
    if config.model.pi05:
        for released, cloned in _ONLY_PI0.items():
            about = about.replace(released, cloned)
        about = about.replace("checkpoints/pi0_", "checkpoints/pi05_")
    return Preset(config, about.splitlines()[0], about)


def _as_baseline(preset: Preset) -> Preset:
    """Of what is said of RL, a baseline keeps the command and what the machine needs: all else is about outcomes."""
    learner = preset.config.name.removesuffix("_bc")
    summary = f"Behaviour cloning, as OpenPI trains: the baseline of {learner}."
    _, *parts = re.split("^(Command|Data|Needs|Should reach): ", preset.about, flags=re.MULTILINE)
    said = {name: text.rstrip() for name, text in zip(parts[::2], parts[1::2], strict=True)}
    about = f"""
        {summary}

        It has no critics, makes only offline updates, and learns from all episodes equally, whatever their outcome.
        Command: {said["Command"]}
        Data: as {learner}; no success labels needed.
        Needs: {said["Needs"]}
        Should reach: the same as OpenPI's own training.
    """
    return Preset(preset.config, summary, "\n".join(line.strip() for line in about.strip().splitlines()))


def with_lora(config: RLTrainConfig) -> RLTrainConfig:
    """OpenPI's LoRA variant: the experts' weights stay as they are but for low-rank updates, and there is no EMA."""
    model = replace(config.model, language=GEMMA_2B_LORA, action_expert=GEMMA_300M_LORA)
    agent = config.agent
    agent = replace(agent, policy_ema_decay=None) if isinstance(agent, ACRLPDConfig) else replace(agent, ema_decay=None)
    return replace(config, name=f"{config.name}_lora", model=model, agent=agent)


def with_bc(config: RLTrainConfig) -> RLTrainConfig:
    """Behaviour cloning of the same data as OpenPI trains, episodes of unknown outcome included: the baseline."""
    lora = config.model.language.has_lora
    # Rewards that do not tell of success are taken as they are: nobody looks at them.
    outcomes = replace(config.data.outcomes, reward="raw", unlabelled="success")
    return replace(
        config,
        name=f"{config.name}_bc",
        agent=BCConfig(ema_decay=None if lora else 0.99),
        data=replace(config.data, outcomes=outcomes),
    )
