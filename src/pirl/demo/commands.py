"""The commands that demos are made of, as steps: collect, train, measure."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pirl.agents.config import BCConfig, OptimizerConfig
from pirl.config import RLTrainConfig
from pirl.demo.plan import DEMONSTRATIONS, DemoConfig
from pirl.demo.steps import Step
from pirl.envs.collecting import LOG_FILE as COLLECTION_LOG
from pirl.processes import pirl_command
from pirl.run_files import RunFiles

Arguments = tuple[str, ...]
# As OpenPI acts, whatever a learner needs while it learns.
DENOISING_STEPS: Arguments = ("--denoising-steps", "10")


def collect_demonstrations(config: DemoConfig) -> Step:
    """The expert shows how, well or badly."""
    flaws = asdict(config.plan.expert).items()
    arguments: Arguments = ("--policy", "expert", "--episodes", str(config.demonstrations))
    arguments += tuple(part for name, value in flaws for part in (flag(f"expert.{name}"), f"{value:g}"))
    title = f"collect {config.demonstrations:,} demonstrations"
    return collect(config, "collect", title, DEMONSTRATIONS, arguments)


def collect(
    config: DemoConfig, name: str, title: str, dataset: str, arguments: Arguments, late: Callable[[], Arguments] = tuple
) -> Step:
    """Episodes of somebody become a dataset. `late` as in `Step`."""
    out = config.dataset(dataset)
    log = out / COLLECTION_LOG
    where = (*env_options(config.bc), *arguments, "--out", str(out), "--storage", "image")
    return Step(
        name,
        title,
        (*pirl_command(), "collect", *where),
        is_whole=lambda: log.exists() and json.loads(log.read_text(encoding="utf-8"))["complete"],
        begun=out,
        late=late,
    )


def train(
    config: DemoConfig,
    run: str,
    preset: str,
    title: str,
    arguments: Arguments,
    *,
    is_whole: Callable[[], bool],
    late: Callable[[], Arguments] = tuple,
) -> Step:
    """A run. `late` as in `Step`."""
    where = ("--exp-name", run, "--runs-dir", str(config.out))
    quick = ("--debug",) if config.quick else ()
    command = (*pirl_command(), "train", preset, *where, *arguments, *quick)
    return Step(f"train_{run}", title, command, is_whole, begun=RunFiles(config.run(run)).lock_file, late=late)


def evaluate(config: DemoConfig, policy: str, path: Path | None = None) -> Step:
    """Success of a policy, from the starts that all are measured on: the run of its name, or what is in `path`."""
    how, file = config.rl.evaluation, config.evaluation(policy)
    arguments = ["--episodes", str(config.episodes), "--seed", str(how.seed), "--execute-steps", str(how.execute_steps)]
    arguments += [] if how.envs is None else ["--envs", str(how.envs)]
    where = (str(path or config.run(policy)), *env_options(config.rl), *DENOISING_STEPS)
    return Step(
        f"eval_{policy}",
        f"measure {config.plan.names[policy]}",
        (*pirl_command(), "eval", *where, *arguments, "--json", str(file)),
        is_whole=file.exists,
    )


def same_pace(config: DemoConfig, optimizer: OptimizerConfig) -> Arguments:
    """What lets a control learn as fast as RL does: batches of the same size, and the optimizer of its policy."""
    assert isinstance(config.bc.agent, BCConfig)
    ours, theirs = asdict(optimizer), asdict(config.bc.agent.optimizer)
    changed = {f"agent.optimizer.{name}": value for name, value in ours.items() if value != theirs[name]}
    options = {"batch_size": config.rl.batch_size, **changed}
    return tuple(part for name, value in options.items() for part in (flag(name), str(value)))


def env_options(config: RLTrainConfig) -> Arguments:
    """The preset's environment as options of a command."""
    assert config.env is not None
    options = config.env.options.items()
    return ("--env", config.env.id, *(part for name, value in options for part in (flag(f"env.{name}"), str(value))))


def flag(name: str) -> str:
    """A field as an option of a command."""
    return f"--{name.replace('_', '-')}"


def shown(command: Arguments) -> Arguments:
    """A command as a person types it."""
    return ("pirl", *command[len(pirl_command()) :])
