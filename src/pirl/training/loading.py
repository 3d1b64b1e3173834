"""A learner from the directory of its run, to look at; the run itself is left as it is."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from pirl.agents.common import Agent
from pirl.config import load_config
from pirl.data import PolicyIO
from pirl.errors import CheckpointError
from pirl.files import expand_home
from pirl.interop.orbax import quiet_orbax
from pirl.run_files import RunFiles, saved_steps
from pirl.training.checkpoints import read_state
from pirl.training.records import DamageError, choose_steps
from pirl.training.setup import agent_shapes, set_up


def load_agent(run: Path, step: int | None = None) -> tuple[Agent, PolicyIO]:
    """The learner as it was saved, at its newest step if not told, and how it sees the robot's data."""
    files = RunFiles(expand_home(run).resolve())
    chosen, *_ = choose_steps(files.states, saved_steps(files.states), step)
    directory = files.states / str(chosen)
    config = load_config(files.config_file, None)
    # It may have been made where there are more devices, or others.
    config = replace(config, fsdp_devices=math.gcd(config.fsdp_devices, jax.device_count()))
    setup = set_up(config, resumed=files, progress=False)
    try:
        with quiet_orbax(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            agent, _ = read_state(directory, agent_shapes(setup), checkpointer)
    except DamageError as damage:
        raise CheckpointError(f"{directory} is damaged: {damage}.") from damage
    return agent, setup.policy_io
