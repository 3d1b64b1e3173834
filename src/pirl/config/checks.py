"""Whether the parts of a configuration fit together: every problem at once, each with what to do about it."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
from pirl.config.schema import RLTrainConfig
from pirl.data.lerobot.reader import Dataset, is_hub_id
from pirl.data.prepare import robot_problems
from pirl.data.robots import Robot, load_robot
from pirl.data.transforms import indicate
from pirl.data.validate import scan_episodes
from pirl.envs.base import MAX_EVALUATION_SEED
from pirl.envs.policy import find_policy
from pirl.envs.registry import find_env_class
from pirl.errors import ConfigError, DataError, UserError, did_you_mean
from pirl.files import expand_home, is_elsewhere
from pirl.imports import is_installed
from pirl.interop.checkpoint import find_params
from pirl.models.config import OPENPI_CAMERAS, get_model_config
from pirl.models.tokenizer import Tokenizer

_LONGEST_PROMPT = 10_000  # tokens that are counted


def check_config(
    config: RLTrainConfig, *, device_count: int | None = None, process_count: int = 1, resume: bool = False
) -> None:
    """Raise with everything that is wrong. Without a number of devices, the division among them is not checked.

    A run that is resumed has its own policy, so the checkpoint it started from may be gone.
    """
    problems = [*_paths(config)]
    if not problems:
        for check in (_updates, _learner, _model, _environment, _measurements, _trackers):
            problems += check(config)
        if not resume:
            problems += _start(config)
        problems += _devices(config, device_count, process_count)
    _raise(ConfigError, "this configuration cannot work", problems)


def check_layout(config: RLTrainConfig, device_count: int) -> None:
    """Raise if the batch or the parameters cannot be divided among so many devices."""
    _raise(ConfigError, "this configuration cannot work", [*_devices(config, device_count, process_count=1)])


def check_data(config: RLTrainConfig, dataset: Dataset, robot: Robot) -> None:
    """Raise if what a dataset declares does not fit the robot and the model; nothing is computed."""
    _raise(DataError, f"{dataset.name} does not fit this configuration", [*_fits(config, dataset, robot)])


def _raise(kind: type[UserError], what: str, problems: list[str]) -> None:
    if problems:
        listed = f" {problems[0]}" if len(problems) == 1 else "".join(f"\n- {problem}" for problem in problems)
        raise kind(f"{what}:{listed}")


# --- a dataset ---------------------------------------------------------------------------------------------------


def _fits(config: RLTrainConfig, dataset: Dataset, robot: Robot) -> Iterator[str]:
    other = "choose another robot (--data.robot), or describe this one in a JSON file."
    yield from (f"{problem}: {other}" for problem in robot_problems(dataset, robot))
    yield from _widths(config, dataset.name, _width(dataset, robot.state), _width(dataset, robot.actions))
    tokens = _longest_prompt(config, dataset, robot)
    if tokens > config.model.max_token_len:
        yield (
            f"the longest prompt takes {tokens} tokens, the model has room for model.max_token_len = "
            f"{config.model.max_token_len}: set --model.max-token-len {tokens}."
        )
    yield from _cameras(config, robot)


def find_missing_room(config: RLTrainConfig) -> dict[str, Any]:
    """The fields, by dotted name, in which a model from scratch has no room for its data, and what the data needs."""
    if not _is_sized_by_data(config):
        return {}
    model, robot = config.model, load_robot(config.data.robot)
    try:
        dataset = scan_episodes(str(config.data.repo_id), config.data.selection.episodes)
    except UserError:  # reported where the data is opened
        return {}
    needed = {
        "action_dim": max(_width(dataset, robot.state), _width(dataset, robot.actions)),
        "max_token_len": _longest_prompt(config, dataset, robot),
    }
    room: dict[str, Any] = {f"model.{name}": size for name, size in needed.items() if size > getattr(model, name)}
    if unseen := [name for name in robot.cameras if name in OPENPI_CAMERAS and name not in model.cameras]:
        room["model.cameras"] = [*model.cameras, *unseen]
    return room


def _is_sized_by_data(config: RLTrainConfig) -> bool:
    return config.data.repo_id is not None and config.checkpoint is None and config.from_scratch


def _width(dataset: Dataset, names: Sequence[str]) -> int:
    """The dimensions of columns together; of those that are not declared, as they are read."""
    features = dataset.info.features
    columns = dataset.try_columns([name for name in names if name not in features and name in dataset.column_names])[0]
    shapes = [features[name].shape for name in names if name in features]
    return sum(map(math.prod, [*shapes, *(values.shape[1:] for values in columns.values())]))


def _longest_prompt(config: RLTrainConfig, dataset: Dataset, robot: Robot) -> int:
    """The tokens of the longest prompt, with the state and the indicator that may be part of it; 0 without prompts."""
    model, agent = config.model, config.agent
    if not model.max_token_len:
        return 0
    counting = Tokenizer.for_model(dataclasses.replace(model, max_token_len=_LONGEST_PROMPT))
    # A state in the prompt takes at most three digits per number.
    state = np.ones(_width(dataset, robot.state)) if model.discrete_state_input else None
    indicates = (isinstance(agent, ACRLPDConfig) and agent.actor_mode == "condition") or (
        isinstance(agent, RIPTConfig) and agent.weighting == "guidance"
    )
    tasks = [dataset.rows.tasks[task] or robot.default_prompt or "" for task in set(dataset.rows.task_of_row.tolist())]
    prompts = [*tasks, *(indicate(task, is_good) for task in tasks for is_good in (False, True) if indicates)]
    return max((int(counting(text, state)[1].sum()) for text in prompts), default=0)


def _widths(config: RLTrainConfig, whose: str, state_dim: int | None, action_dim: int | None) -> Iterator[str]:
    width, what = max((action_dim or 0, "actions"), (state_dim or 0, "state"), key=lambda wide: wide[0])
    if width > config.model.action_dim:
        yield (
            f"{what} of {whose} have {width} dimensions, the model has room for model.action_dim = "
            f"{config.model.action_dim}: set --model.action-dim {width} (a checkpoint has to have as many), or choose "
            "another robot (--data.robot)."
        )


def _cameras(config: RLTrainConfig, robot: Robot) -> Iterator[str]:
    if unknown := sorted(set(robot.cameras) - set(config.model.cameras)):
        has = ", ".join(config.model.cameras) or "none"
        yield (
            f"robot {robot.name} shows the cameras {', '.join(unknown)}, which the model does not have (model.cameras = "
            f"{has}): choose another robot (--data.robot) or model (--model.preset)."
        )


# --- a configuration ---------------------------------------------------------------------------------------------


def _paths(config: RLTrainConfig) -> Iterator[str]:
    paths = {"runs_dir": config.runs_dir, "checkpoint": config.checkpoint, "data.repo_id": config.data.repo_id}
    for name, path in paths.items():
        try:
            expand_home(path or "")
        except UserError as error:
            yield f"{name} = {error}"
    if is_elsewhere(config.runs_dir):
        yield f"runs_dir = {config.runs_dir} is not on this machine: name a directory here, and copy the run from it."


def _updates(config: RLTrainConfig) -> Iterator[str]:
    """Whether anything is learned, and from what."""
    online, data, agent = config.online, config.data, config.agent
    if not config.steps and not config.collects_rollouts:
        more = "--rollout.iterations" if config.on_policy else "--steps or --online.env-steps"
        yield f"there are no updates to make, so nothing would be learned: set {more}."
    if data.repo_id is not None:
        if not expand_home(data.repo_id).is_dir() and not is_hub_id(data.repo_id):
            directory = expand_home(data.repo_id).absolute()
            yield f"data.repo_id: there is no dataset directory {directory}; one on the hub is called NAME/DATASET."
    elif config.steps and not config.on_policy:
        yield f"{config.steps} offline updates need data: name a LeRobot dataset with --data.repo-id, or --steps 0."
    elif isinstance(agent, RIPTConfig) and agent.bc_loss_weight > 0:
        yield (
            f"agent.bc_loss_weight = {agent.bc_loss_weight} mixes demonstrations in: name a dataset with "
            "--data.repo-id, or set --agent.bc-loss-weight 0."
        )
    elif online.env_steps and online.prior_ratio > 0 and not config.on_policy:
        yield (
            f"online.prior_ratio = {online.prior_ratio} needs prior data: name a dataset with --data.repo-id, or set "
            "--online.prior-ratio 0."
        )
    elif data.norm_stats == "dataset":
        yield "without a dataset, --data.norm-stats checkpoint has to say how states and actions are normalized."
    if isinstance(agent, BCConfig) and online.env_steps:
        yield (
            f"online.env_steps = {online.env_steps} is for ACRLPD: BC would clone its own failures as well. Set "
            "--online.env-steps 0, or --agent.learner acrlpd."
        )
    updates = config.steps + int(online.env_steps * online.utd_ratio)
    if isinstance(agent, ACRLPDConfig) and 0 < updates <= agent.critic_warmup_steps:
        yield (
            f"agent.critic_warmup_steps = {agent.critic_warmup_steps} leaves none of the {updates} updates for "
            "the policy: lower it, or train longer."
        )


def _learner(config: RLTrainConfig) -> Iterator[str]:
    """Whether the options of a learner are given to that learner."""
    agent, rollout, checkpoints = config.agent, config.rollout, config.checkpoints
    for field, mode in (("actor_mode", "condition"), ("weighting", "guidance")):
        if getattr(agent, field, None) == mode and not config.model.max_token_len:
            yield f"agent.{field} = {mode} needs a prompt, but model.max_token_len = 0."
    if not isinstance(agent, RIPTConfig):
        if rollout.iterations:
            yield f"rollout.iterations = {rollout.iterations} is for RIPT: set it to 0, or --agent.learner ript."
        return
    if config.steps:
        yield f"RIPT makes no offline updates, and there are {config.steps}: set --steps 0."
    if config.online.env_steps:
        yield "online.env_steps is for ACRLPD; RIPT's rollouts are bounded by rollout.iterations: set it to 0."
    if rollout.budget < rollout.groups:
        yield f"rollout.budget = {rollout.budget} initial states cannot give rollout.groups = {rollout.groups} groups."
    if config.health.action == "rollback" and config.health.max_rollbacks and checkpoints.max_to_keep < 2:
        yield (
            "health.action = rollback returns to a checkpoint before the newest one, and checkpoints.max_to_keep = "
            f"{checkpoints.max_to_keep} keeps none: --checkpoints.max-to-keep 2, or --health.action stop."
        )
    if rollout.ray_address is not None and rollout.backend != "ray":
        yield f"rollout.ray_address = {rollout.ray_address} is for --rollout.backend ray; it is {rollout.backend}."
    if agent.batch_by == "groups" and config.batch_size % rollout.attempts:
        yield (
            f"batch_size = {config.batch_size} should be a multiple of rollout.attempts = {rollout.attempts}, because "
            "agent.batch_by = groups."
        )


def _model(config: RLTrainConfig) -> Iterator[str]:
    """Whether learner and robot fit the model."""
    model, agent = config.model, config.agent
    if isinstance(agent, ACRLPDConfig) and agent.horizon_length > model.action_horizon:
        yield (
            f"agent.horizon_length = {agent.horizon_length} is more than the policy's chunk (model.action_horizon = "
            f"{model.action_horizon})."
        )
    try:
        robot = load_robot(config.data.robot)
    except UserError as error:
        yield f"data.robot: {error}"
        return
    if not _is_sized_by_data(config):
        yield from _widths(config, robot.name, robot.state_dim, robot.action_dim)
        yield from _cameras(config, robot)


def _start(config: RLTrainConfig) -> Iterator[str]:
    """The policy to start from."""
    norm_stats = config.data.norm_stats
    if norm_stats not in ("dataset", "checkpoint") and not expand_home(norm_stats).exists():
        yield f"data.norm_stats = {norm_stats} is neither dataset nor checkpoint nor the path of a norm_stats.json."
    if config.checkpoint is not None and config.from_scratch:
        yield "checkpoint and from_scratch exclude each other: --from-scratch false, or --checkpoint none."
    elif config.checkpoint is not None:
        try:
            find_params(find_policy(expand_home(config.checkpoint)))
        except UserError as error:
            yield f"checkpoint: {error}"
    elif not config.from_scratch:
        released = "pi05_base" if config.model.pi05 else "pi0_base"
        where = "for this small model the run of a preset that clones, such as demo_bc"
        if config.model.vocab_size == get_model_config(released).vocab_size:
            where = f"OpenPI's: gsutil -m cp -r gs://openpi-assets/checkpoints/{released} checkpoints/"
        yield f"there is no policy to start from: --checkpoint DIRECTORY ({where}), or --from-scratch."
    if config.checkpoint is None and norm_stats == "checkpoint":
        yield "data.norm_stats = checkpoint needs a --checkpoint to take them from; use --data.norm-stats dataset."


def _environment(config: RLTrainConfig) -> Iterator[str]:
    evaluation, on_policy = config.evaluation, config.on_policy
    rollouts = "rollouts" if on_policy else "the online phase"
    uses = [name for name, on in (("evaluation", evaluation.every), (rollouts, config.collects_rollouts)) if on]
    if not uses:
        return
    if config.env is None:
        yield f"there is no environment for {' and '.join(uses)}: name one with --env.id (pirl envs list)."
    else:
        try:
            find_env_class(config.env)
        except UserError as error:
            yield f"env: {error}"
    if evaluation.execute_steps > config.model.action_horizon:
        yield (
            f"evaluation.execute_steps = {evaluation.execute_steps} is more than the policy's chunk "
            f"(model.action_horizon = {config.model.action_horizon})."
        )
    name, seed = ("rollout.seed", config.rollout.seed) if on_policy else ("online.seed", config.online.seed)
    overlap = "the policy would train on the initial states that it is evaluated on"
    if len(uses) == 2 and seed == evaluation.seed:
        yield f"{name} and evaluation.seed are both {seed}: {overlap}. Set --{name} {seed + 1}."
    elif len(uses) == 2 and on_policy and evaluation.seed >= MAX_EVALUATION_SEED:
        yield f"{overlap}. Set --evaluation.seed to less than {MAX_EVALUATION_SEED}; it is {evaluation.seed}."


def _measurements(config: RLTrainConfig) -> Iterator[str]:
    """Whether the metrics that decide something are measured, and when they are needed."""
    checkpoints, best = config.checkpoints, config.checkpoints.best_metric or ""
    if (config.validation_every > 0) != (config.data.validation_fraction > 0):
        yield (
            f"validation_every = {config.validation_every} and data.validation_fraction = "
            f"{config.data.validation_fraction} go together: set both, or neither."
        )
    for field, metric in (("checkpoints.best_metric", best), ("stopping.metric", config.stopping.metric)):
        if metric:
            yield from (f"{field} = {metric}: {problem}" for problem in check_metric(config, metric))
    periods: dict[str, int | None] = {"checkpoints.keep_period": checkpoints.keep_period}
    if best.startswith("eval/"):
        periods["evaluation.every"] = config.evaluation.every
    if best.startswith("val/"):
        periods["validation_every"] = config.validation_every
    for name, period in periods.items():
        if period and period % checkpoints.every:
            yield f"{name} = {period} should be a multiple of checkpoints.every = {checkpoints.every}, to keep the best."


def _trackers(config: RLTrainConfig) -> Iterator[str]:
    """Trackers that were asked for. TensorBoard is on by default, and left out where it is not installed."""
    wanted = {"wandb": config.logging.wandb != "off", "trackio": config.logging.trackio}
    for package, is_on in wanted.items():
        if is_on and not is_installed(package):
            yield f"logging.{package}: the package is not installed: pip install 'pirl[{package}]'."


def _devices(config: RLTrainConfig, device_count: int | None, process_count: int) -> Iterator[str]:
    parts, batch = config.agent.accumulation_steps, config.batch_size
    if batch % parts:
        yield f"batch_size = {batch} should be a multiple of agent.accumulation_steps = {parts}."
        return
    if batch % process_count:
        yield f"batch_size = {batch} should be a multiple of the number of processes, {process_count}."
    if device_count is None:
        return
    if batch % (step := parts * device_count):
        yield (
            f"batch_size = {batch} should be a multiple of {step} ({device_count} devices × {parts} accumulation "
            f"steps), such as --batch-size {math.ceil(batch / step) * step}."
        )
    if device_count % config.fsdp_devices:
        yield f"fsdp_devices = {config.fsdp_devices} should divide the number of devices, {device_count}."


# --- metrics that decide which checkpoint is kept, and when to stop ------------------------------------------------

_POLICY = ("loss", "bc/loss")
_ACTOR_CRITIC = (
    *("critic/loss", "critic/q_mean", "critic/q_min", "critic/q_max", "critic/q_spread", "critic/td_error"),
    *("critic/target", "critic/pair_auc", "critic/outcome_auc", "critic/sample_spread", "actor/loss"),
    "data/valid_chunks",
)
_ADVANTAGES = ("actor/advantage_p10", "actor/advantage_p50", "actor/advantage_p90", "critic/state_spread")
_BY_MODE: dict[str, tuple[str, ...]] = {
    "awr": (*_ADVANTAGES, "actor/ess", "actor/clip_fraction", "actor/temperature"),
    "distill": (
        *(*_ADVANTAGES, "actor/ess", "actor/clip_fraction", "actor/temperature"),
        *("actor/chosen_value", "actor/data_chosen"),
    ),
    "condition": (*_ADVANTAGES, "actor/positive", "actor/threshold"),
    "bc": (),
}
GAPS = ("critic/pair_auc", "critic/outcome_auc", "critic/td_error", "bc/loss")
"""Metrics that are measured on training episodes as well as on held-out ones, to show overfitting."""
_EVALUATION = ("eval/success", "eval/success_low", "eval/success_high", "eval/return", "eval/length")
_ONLINE = ("online/success", "online/episodes", "online/env_steps")
_ROLLOUT = ("rollout/success", "rollout/success_kept", "rollout/success_after", "rollout/groups", "rollout/drift")


def check_metric(config: RLTrainConfig, name: str) -> Iterator[str]:
    """Why a metric cannot choose checkpoints or end a run; those of updates never can."""
    learned = [*_POLICY, "actor/action_mse"]
    if isinstance(config.agent, ACRLPDConfig):
        learned += [*_ACTOR_CRITIC, *_BY_MODE[config.agent.actor_mode]]
        learned += ["critic/pair_auc_shuffled"] if config.model.cameras else []
    validated = [f"val/{metric}" for metric in learned] + [f"gap/{metric}" for metric in GAPS if metric in learned]
    collected = _ROLLOUT if config.on_policy else _ONLINE
    known = [*_EVALUATION, *collected, *validated]
    if name not in known:
        yield f"no such thing is measured. {did_you_mean(name, known)}Known: {', '.join(dict.fromkeys(known))}."
    elif name in _EVALUATION and not config.evaluation.every:
        yield "nothing is evaluated; set --evaluation.every."
    elif name == "rollout/success_after" and not config.rollout.recheck:
        yield "success is not measured after the updates; set --rollout.recheck."
    elif name in _ONLINE and not config.online.env_steps:
        yield "there is no online phase; set --online.env-steps."
    elif name in validated and not config.validation_every:
        yield "no episodes are held out; set --validation-every and --data.validation-fraction."
