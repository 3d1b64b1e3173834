"""Whether a configuration can work, before anything heavy: every problem at once, each with what to do about it."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
from pirl.config.metrics import check_metric
from pirl.config.train import RLTrainConfig
from pirl.data.lerobot.reader import Dataset, is_hub_id
from pirl.data.robots import Robot, load_robot
from pirl.data.transforms import indicate
from pirl.envs.planner import find_policy
from pirl.envs.registry import find_env_class
from pirl.envs.seeds import MEASURED
from pirl.errors import ConfigError, DataError, UserError
from pirl.files import expand_home, is_elsewhere
from pirl.imports import is_installed
from pirl.interop.checkpoint import find_params
from pirl.models.config import get_model_config
from pirl.models.tokenizer import Tokenizer

_LONGEST_PROMPT = 10_000  # tokens that are counted
# The least value of each field.
_AT_LEAST = {
    0: (
        *(
            "steps",
            "seed",
            "validation_every",
            "online.env_steps",
            "online.seed",
            "evaluation.every",
            "evaluation.seed",
        ),
        *("evaluation.videos", "stopping.min_delta", "data.prefetch", "rollout.iterations", "rollout.seed"),
        *("rollout.videos_every", "health.max_rollbacks", "health.min_success_ratio", "health.min_speed_ratio"),
        "health.max_value_excess",
        *("data.selection.success_weight", "data.selection.failure_weight"),
    ),
    1: (
        *("batch_size", "fsdp_devices", "validation_batches", "online.updates_per_scan", "online.episodes_per_round"),
        *("online.capacity", "evaluation.episodes", "evaluation.execute_steps", "evaluation.envs", "checkpoints.every"),
        *("checkpoints.max_to_keep", "checkpoints.keep_period", "logging.every", "stopping.patience"),
        *("health.max_skipped", "data.episodes_per_memory_pool", "rollout.groups", "rollout.budget"),
        *("rollout.max_barren", "rollout.capacity"),
    ),
    2: ("rollout.attempts",),
}


def check_config(
    config: RLTrainConfig, *, device_count: int | None = None, process_count: int = 1, resume: bool = False
) -> None:
    """Raise with everything that is wrong. Devices are counted by who knows them; without, that is left out.

    A run that is resumed brings its own policy, so the one it began with may be gone.
    """
    problems = [*_numbers(config), *_places(config)]
    if not problems:  # what follows computes with them
        for look in (_phases, _rollouts, _model, _environment, _measurements, _trackers):
            problems += look(config)
        if not resume:
            problems += _start(config)
        problems += _devices(config, device_count, process_count)
    if problems:
        raise ConfigError(f"this configuration cannot work:{_listed(problems)}")


def check_layout(config: RLTrainConfig, device_count: int) -> None:
    """Raise if the batch or the parameters cannot be divided among so many devices."""
    if problems := [*_numbers(config)] or [*_devices(config, device_count, process_count=1)]:
        raise ConfigError(f"this configuration cannot work:{_listed(problems)}")


def check_data(config: RLTrainConfig, dataset: Dataset, robot: Robot) -> None:
    """Raise if an opened dataset does not fit the robot and the model, by what it declares; nothing is computed."""
    if problems := [*_fits(config, dataset, robot)]:
        raise DataError(f"{dataset.name} does not fit this configuration:{_listed(problems)}")


def _fits(config: RLTrainConfig, dataset: Dataset, robot: Robot) -> Iterator[str]:
    other = "choose another robot (--data.robot), or describe this one in a JSON file."
    widths: dict[str, int] = {}
    for what, names, wanted in (
        ("state", robot.state, robot.state_dim),
        ("actions", robot.actions, robot.action_dim),
    ):
        if missing := [name for name in names if name not in dataset.column_names]:
            has = ", ".join(dataset.column_names)
            yield f"robot {robot.name} has its {what} in {', '.join(missing)}; the columns are {has}: {other}"
            continue
        width = sum(math.prod(dataset.info.features[name].shape) for name in names if name in dataset.info.features)
        if wanted is not None and width != wanted:
            yield f"{' + '.join(names)} has {width} dimensions, robot {robot.name} has {wanted}: {other}"
        else:
            widths[what] = width
        if what == "state" and config.model.max_token_len:
            yield from _prompts(config, dataset, robot, width)
    yield from _widths(config, dataset.name, widths.get("state"), widths.get("actions"))
    if missing := sorted(set(robot.cameras.values()) - set(dataset.cameras)):
        has = ", ".join(dataset.cameras) or "none"
        yield f"robot {robot.name} sees through {', '.join(missing)}; the cameras are {has}: {other}"


def _prompts(config: RLTrainConfig, dataset: Dataset, robot: Robot, state_dim: int) -> Iterator[str]:
    """Whether the model has room for the longest prompt, with all that learners add to it."""
    model, agent = config.model, config.agent
    counting = Tokenizer.for_model(dataclasses.replace(model, max_token_len=_LONGEST_PROMPT))
    # Where the prompt spells the state, three digits for each number are the most it takes.
    state = np.ones(state_dim) if model.discrete_state_input else None
    indicates = (isinstance(agent, ACRLPDConfig) and agent.actor_mode == "condition") or (
        isinstance(agent, RIPTConfig) and agent.weighting == "guidance"
    )
    needed = 0
    for task in {dataset.rows.tasks[task] for task in np.unique(dataset.rows.task_of_row).tolist()}:
        prompt = task or robot.default_prompt or ""
        prompts = [prompt, indicate(prompt, False), indicate(prompt, True)] if indicates else [prompt]
        needed = max(needed, *(int(counting(text, state)[1].sum()) for text in prompts))
    if needed > model.max_token_len:
        yield (
            f"the longest prompt takes {needed} tokens, the model has room for model.max_token_len = "
            f"{model.max_token_len}: set --model.max-token-len {needed}."
        )


def _listed(problems: list[str]) -> str:
    return f" {problems[0]}" if len(problems) == 1 else "".join(f"\n- {problem}" for problem in problems)


def _numbers(config: RLTrainConfig) -> Iterator[str]:
    for least, names in _AT_LEAST.items():
        for name in names:
            value = _get(config, name)
            if value is not None and not least <= value < math.inf:
                yield f"{name} = {value} should be {least} or more."
    for name in ("online.utd_ratio", "evaluation.timeout"):
        if not 0 < _get(config, name) < math.inf:
            yield f"{name} = {_get(config, name)} should be above 0."
    if not config.health.loss_limit > 0:
        yield f"health.loss_limit = {config.health.loss_limit} should be above 0."
    if config.health.max_drift is not None and not config.health.max_drift > 0:
        yield f"health.max_drift = {config.health.max_drift} should be above 0, or none."
    for name in ("health.min_success_ratio", "health.min_speed_ratio"):
        if _get(config, name) >= 1:
            yield f"{name} = {_get(config, name)} is a part of what was reached before: below 1."
    if not 0 < config.rollout.discount <= 1:
        yield f"rollout.discount = {config.rollout.discount} should be above 0, and 1 at most."
    if not 0 <= config.online.prior_ratio <= 1:
        yield f"online.prior_ratio = {config.online.prior_ratio} is a part of the batch: from 0 to 1."
    asset = Path(config.data.asset_id or "some")
    if asset.is_absolute() or ".." in asset.parts:
        yield f"data.asset_id = {config.data.asset_id} should name a directory inside the assets of a checkpoint."
    if not 0 <= config.data.validation_fraction < 1:
        yield f"data.validation_fraction = {config.data.validation_fraction} is a part of all episodes, below 1."


def _places(config: RLTrainConfig) -> Iterator[str]:
    for name in ("runs_dir", "checkpoint", "data.repo_id"):
        try:
            expand_home(_get(config, name) or "")
        except UserError as error:
            yield f"{name} = {error}"
    if is_elsewhere(config.runs_dir):
        yield f"runs_dir = {config.runs_dir} is not on this machine: name a directory here, and copy the run from it."


def _phases(config: RLTrainConfig) -> Iterator[str]:
    """What is learned from, and whether anything is learned."""
    online, data = config.online, config.data
    if not config.steps and not config.practises:
        more = "--rollout.iterations" if config.goes_by_iterations else "--steps or --online.env-steps"
        yield f"there are no updates to make, so nothing would be learned: set {more}."
    if data.repo_id is None:
        yield from _without_data(config)
    elif not expand_home(data.repo_id).is_dir() and not is_hub_id(data.repo_id):
        place = expand_home(data.repo_id).absolute()
        yield f"data.repo_id: there is no dataset directory {place}; one on the hub is called NAME/DATASET."
    if isinstance(config.agent, BCConfig) and online.env_steps:
        yield (
            f"online.env_steps = {online.env_steps} is for ACRLPD: BC would clone what it does itself, failures as well. "
            "Set --online.env-steps 0, or --agent.learner acrlpd."
        )
    updates = config.steps + int(online.env_steps * online.utd_ratio)
    if isinstance(config.agent, ACRLPDConfig) and 0 < updates <= config.agent.critic_warmup_steps:
        yield (
            f"agent.critic_warmup_steps = {config.agent.critic_warmup_steps} leaves none of the {updates} updates for "
            "the policy: lower it, or train longer."
        )


def _without_data(config: RLTrainConfig) -> Iterator[str]:
    """What would need a dataset that is not there."""
    online, agent = config.online, config.agent
    if config.steps and not config.goes_by_iterations:
        yield (
            f"{config.steps} offline updates need data: name a LeRobot dataset with --data.repo-id DIRECTORY, or "
            "leave them out with --steps 0."
        )
    elif isinstance(agent, RIPTConfig) and agent.bc_loss_weight > 0:
        yield (
            f"agent.bc_loss_weight = {agent.bc_loss_weight} mixes demonstrations in: name a dataset with --data.repo-id, "
            "or learn without with --agent.bc-loss-weight 0."
        )
    elif online.env_steps and online.prior_ratio > 0 and not config.goes_by_iterations:
        yield (
            f"{online.prior_ratio:.0%} of online batches are to be prior data: name a dataset with --data.repo-id, "
            "or learn without with --online.prior-ratio 0."
        )
    elif config.data.norm_stats == "dataset":
        yield "without a dataset, --data.norm-stats checkpoint has to say how states and actions are normalised."


def _rollouts(config: RLTrainConfig) -> Iterator[str]:
    """Whether RIPT, and only RIPT, is told to go by iterations."""
    agent, rollout = config.agent, config.rollout
    if not isinstance(agent, RIPTConfig):
        if isinstance(agent, ACRLPDConfig) and agent.actor_mode == "condition" and not config.model.max_token_len:
            yield "agent.actor_mode = condition needs a prompt, but model.max_token_len = 0."
        if rollout.iterations:
            yield (
                f"rollout.iterations = {rollout.iterations} are RIPT's: choose --agent.learner ript, or "
                "--rollout.iterations 0."
            )
        return
    if config.steps:
        yield f"RIPT learns from its own attempts alone, so the {config.steps} offline updates have no place: --steps 0."
    if config.online.env_steps:
        yield "online.env_steps is ACRLPD's; RIPT's are bounded by rollout.iterations: set --online.env-steps 0."
    if rollout.budget < rollout.groups:
        yield (
            f"rollout.budget = {rollout.budget} initial states can never give rollout.groups = {rollout.groups} groups: "
            "allow at least as many, better several times."
        )
    if agent.weighting == "guidance" and not config.model.max_token_len:
        yield "agent.weighting = guidance speaks in the prompt, and this model reads none (model.max_token_len = 0)."
    if config.health.action == "rollback" and config.health.max_rollbacks and config.checkpoints.max_to_keep < 2:
        yield (
            "health.action = rollback goes back to a checkpoint before the newest one, and checkpoints.max_to_keep = "
            f"{config.checkpoints.max_to_keep} keeps none: --checkpoints.max-to-keep 2, or --health.action stop."
        )
    if rollout.ray_address is not None and rollout.backend != "ray":
        yield f"rollout.ray_address = {rollout.ray_address} is for --rollout.backend ray; it is {rollout.backend}."
    if agent.batch_by == "groups" and config.batch_size % rollout.attempts:
        yield (
            f"agent.batch_by = groups has all {rollout.attempts} attempts equally often in a batch: batch_size = "
            f"{config.batch_size} should be a multiple of rollout.attempts."
        )


def _model(config: RLTrainConfig) -> Iterator[str]:
    """Whether learner and robot fit the model."""
    model, horizon = config.model, config.model.action_horizon
    if isinstance(config.agent, ACRLPDConfig) and config.agent.horizon_length > horizon:
        yield (
            f"agent.horizon_length = {config.agent.horizon_length} is more than the policy plans (model.action_horizon = "
            f"{horizon}): set --agent.horizon-length {horizon} or less."
        )
    try:
        robot = load_robot(config.data.robot)
    except UserError as error:
        yield f"data.robot: {error}"
        return
    yield from _widths(config, robot.name, robot.state_dim, robot.action_dim)
    if unknown := sorted(set(robot.cameras) - set(model.cameras)):
        yield (
            f"robot {robot.name} shows the cameras {', '.join(unknown)}, which the model does not have (model.cameras = "
            f"{', '.join(model.cameras) or 'none'}): choose another robot (--data.robot) or model (--model.preset)."
        )


def _widths(
    config: RLTrainConfig, whose: str, state_dim: int | None = None, action_dim: int | None = None
) -> Iterator[str]:
    width, what = max((action_dim or 0, "actions"), (state_dim or 0, "state"), key=lambda wide: wide[0])
    if width > config.model.action_dim:
        yield (
            f"{what} of {whose} have {width} dimensions, the model has room for model.action_dim = "
            f"{config.model.action_dim}: set --model.action-dim {width} (a checkpoint has to have as many), or choose "
            "another robot (--data.robot)."
        )


def _start(config: RLTrainConfig) -> Iterator[str]:
    """What the policy begins with."""
    norm_stats = config.data.norm_stats
    if norm_stats not in ("dataset", "checkpoint") and not expand_home(norm_stats).exists():
        yield f"data.norm_stats = {norm_stats} is neither dataset nor checkpoint nor the path of a norm_stats.json."
    if config.checkpoint is None:
        if not config.from_scratch:
            released = "pi05_base" if config.model.pi05 else "pi0_base"
            where = (
                f"OpenPI's: gsutil -m cp -r gs://openpi-assets/checkpoints/{released} checkpoints/, then --checkpoint "
                f"checkpoints/{released}"
                if config.model.vocab_size == get_model_config(released).vocab_size
                else "for this small model the run of a preset that clones, such as demo_bc"
            )
            yield (
                f"a policy to begin with is missing. Give one with --checkpoint DIRECTORY ({where}), or begin with "
                "random parameters with --from-scratch."
            )
        if norm_stats == "checkpoint":
            yield "data.norm_stats = checkpoint needs a --checkpoint to take them from; use --data.norm-stats dataset."
        return
    if config.from_scratch:
        yield "checkpoint and from_scratch exclude each other: --from-scratch false, or --checkpoint none."
        return
    try:
        find_params(find_policy(expand_home(config.checkpoint)))
    except UserError as error:
        yield f"checkpoint: {error}"


def _environment(config: RLTrainConfig) -> Iterator[str]:
    evaluation = config.evaluation
    practice = "rollouts" if config.goes_by_iterations else "the online phase"
    uses = [name for name, on in (("evaluation", evaluation.every), (practice, config.practises)) if on]
    if not uses:
        return
    if config.env is None:
        need = "needs" if uses == ["evaluation"] or uses == ["the online phase"] else "need"
        yield f"{' and '.join(uses)} {need} an environment: name one with --env.id (pirl envs list)."
    else:
        try:
            find_env_class(config.env)
        except UserError as error:
            yield f"env: {error}"
    if evaluation.execute_steps > config.model.action_horizon:
        yield (
            f"evaluation.execute_steps = {evaluation.execute_steps} is more than the policy plans (model.action_horizon "
            f"= {config.model.action_horizon})."
        )
    name = "rollout.seed" if config.goes_by_iterations else "online.seed"
    seed = _get(config, name)
    if len(uses) == 2 and seed == evaluation.seed:
        yield (
            f"{name} and evaluation.seed are both {seed}: the policy would practise on what it is measured by. Set "
            f"--{name} {seed + 1}."
        )
    elif len(uses) == 2 and config.goes_by_iterations and evaluation.seed >= MEASURED:
        yield (
            f"evaluation.seed = {evaluation.seed} lies among the seeds of RIPT's initial states: the policy would "
            f"practise on what it is measured by. Set --evaluation.seed to less than {MEASURED}."
        )


def _measurements(config: RLTrainConfig) -> Iterator[str]:
    """Whether what decides something is measured at all, and when it is needed."""
    checkpoints, stopping = config.checkpoints, config.stopping
    if (config.validation_every > 0) != (config.data.validation_fraction > 0):
        fraction = config.data.validation_fraction
        yield (
            f"validation_every = {config.validation_every} and data.validation_fraction = {fraction} go together: "
            "episodes that are held out, and when they are looked at. Set both, or neither."
        )
    for field, metric in (("checkpoints.best_metric", checkpoints.best_metric), ("stopping.metric", stopping.metric)):
        if metric is not None:
            yield from (f"{field} = {metric}: {problem}" for problem in check_metric(config, metric))
    kept: dict[str, Any] = {"checkpoints.keep_period": checkpoints.keep_period}
    for prefix, name in (("eval/", "evaluation.every"), ("val/", "validation_every")):
        if (checkpoints.best_metric or "").startswith(prefix):
            kept[name] = _get(config, name)
    for name, period in kept.items():
        if period and period % checkpoints.every:
            yield (
                f"{name} = {period} should be a multiple of checkpoints.every = {checkpoints.every}: only what is saved "
                f"can be kept{'' if name == 'checkpoints.keep_period' else ', as checkpoints.best_metric asks'}."
            )


def _trackers(config: RLTrainConfig) -> Iterator[str]:
    """Trackers that are asked for. TensorBoard, which is on by default, is merely left out where it is not installed."""
    logging = config.logging
    for asked, package, name in (
        (logging.wandb != "off", "wandb", "Weights & Biases"),
        (logging.trackio, "trackio", "Trackio"),
    ):
        if asked and not is_installed(package):
            yield (
                f"logging.{package}: {name} is not installed: pip install 'pirl[{package}]', or leave "
                f"--logging.{package} out."
            )


def _devices(config: RLTrainConfig, device_count: int | None, process_count: int) -> Iterator[str]:
    parts, batch = config.agent.accumulation_steps, config.batch_size
    if batch % parts:
        yield f"batch_size = {batch} should be a multiple of agent.accumulation_steps = {parts}."
        return
    if batch % process_count:
        yield f"batch_size = {batch} should be a multiple of the number of processes, {process_count}."
    if device_count is None:
        return
    if (batch // parts) % device_count:
        step = parts * device_count
        whole = f"{device_count} devices" + (f" × {parts} accumulation steps" if parts > 1 else "")
        yield (
            f"batch_size = {batch} should be a multiple of {step} ({whole}), such as "
            f"--batch-size {math.ceil(batch / step) * step}."
        )
    if device_count % config.fsdp_devices:
        yield f"fsdp_devices = {config.fsdp_devices} should divide the number of devices, {device_count}."


def _get(config: RLTrainConfig, name: str) -> Any:
    """A field by its dotted name."""
    return functools.reduce(getattr, name.split("."), config)
