"""A learner from the directory of its run, to look at; the run itself is left as it is."""

from pathlib import Path

import orbax.checkpoint as ocp

from pirl.agents.base import Agent
from pirl.config import load_config
from pirl.data import PolicyIO
from pirl.errors import CheckpointError
from pirl.files import expand_home
from pirl.interop.reading import quiet_orbax
from pirl.run_files import RunFiles, saved_steps
from pirl.training.checkpoints import read_state
from pirl.training.records import DamageError
from pirl.training.setup import agent_shapes, set_up


def load_agent(run: Path, step: int | None = None) -> tuple[Agent, PolicyIO]:
    """The learner as it was saved, at its newest step if not told, and how it sees the robot's data."""
    files = RunFiles(expand_home(run).resolve())
    states = files.states
    saved = saved_steps(states)
    if not saved or (step is not None and step not in saved):
        there = f"there are those of steps {', '.join(map(str, saved))}" if saved else "there is none"
        raise CheckpointError(f"{states} has no state{'' if step is None else f' of step {step}'}: {there}.")
    setup = set_up(load_config(files.config_file, None), progress=False)
    directory = states / str(saved[-1] if step is None else step)
    try:
        with quiet_orbax(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            agent, _ = read_state(directory, agent_shapes(setup), checkpointer)
    except DamageError as damage:
        raise CheckpointError(f"{directory} is damaged: {damage}.") from damage
    return agent, setup.policy_io
