"""What the demo does: its commands, in order, and the policies that come of them. Numbers are those of the presets."""

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pirl.agents.acrlpd import ACRLPDConfig
from pirl.config import EvaluationConfig, RLTrainConfig, debug_config, get_config, to_plain
from pirl.demo.steps import Stages, Step
from pirl.envs.collecting import LOG_FILE as COLLECTION_LOG
from pirl.envs.experts import ExpertConfig
from pirl.training.run import LOCK_FILE, saved_steps

EPISODES, QUICK_EPISODES = 200, 8
DEMONSTRATIONS, QUICK_DEMONSTRATIONS = 500, 12
# Demonstrations of mixed quality: good intentions and a trembling hand, so that good and bad moves stand side by side in
# every episode, in those that succeed as well.
EXPERT = ExpertConfig(aim_bias=0.005, noise=0.9)


@dataclass(frozen=True)
class Policy:
    """Something that is measured: `trained` are the runs it went through, one after the other."""

    key: str
    name: str
    description: str
    trained: tuple[str, ...]


POLICIES = (
    Policy("bc", "BC", "behaviour cloning of all demonstrations", ("bc",)),
    Policy("bc_more", "BC, more updates", "control: BC with as many updates more as ACRLPD makes", ("bc", "bc_more")),
    Policy(
        "bc_successes",
        "BC, successes only",
        "control: the same updates more, on the demonstrations that succeed",
        ("bc", "bc_successes"),
    ),
    Policy("acrlpd_offline", "ACRLPD offline", "RL from BC on the same demonstrations", ("bc", "acrlpd")),
    Policy("acrlpd", "ACRLPD", "the same, and then on episodes of its own", ("bc", "acrlpd")),
    Policy(
        "acrlpd_best_of_n",
        "ACRLPD, best of N",
        "the learner itself: its critics choose among N samples",
        ("bc", "acrlpd"),
    ),
)
# Runs with curves of their own, by their directory, and the policy that each gives its name and colour.
RUNS = ("bc", "bc_more", "bc_successes", "acrlpd")


@dataclass(frozen=True)
class DemoConfig:
    """What can be chosen: where, how much is measured and shown first, and whether all of it is only tried."""

    out: Path = Path("runs/demo")
    episodes: int = EPISODES
    demonstrations: int = DEMONSTRATIONS
    quick: bool = False

    @property
    def data(self) -> Path:
        """The demonstrations."""
        return self.out / "data"

    def run(self, name: str) -> Path:
        """A run directory."""
        return self.out / name

    def evaluation(self, policy: str) -> Path:
        """The result of every episode of a policy."""
        return self.out / "evaluations" / f"{policy}.json"

    @cached_property
    def bc(self) -> RLTrainConfig:
        """How the baseline is trained."""
        return self._preset("demo_bc")

    @cached_property
    def rl(self) -> RLTrainConfig:
        """How ACRLPD is trained."""
        return self._preset("demo")

    @property
    def online_updates(self) -> int:
        """At least as many follow the offline ones; whole episodes may bring a few more."""
        online = self.rl.online
        return int(online.env_steps * online.utd_ratio) // online.updates_per_scan * online.updates_per_scan

    @property
    def extra_updates(self) -> int:
        """What ACRLPD does after BC, and the controls as well."""
        return self.rl.steps + self.online_updates

    def settings(self) -> dict[str, Any]:
        """All that decides what is in the directory."""
        return {
            "episodes": self.episodes,
            "demonstrations": self.demonstrations,
            "quick": self.quick,
            "expert": asdict(EXPERT),
            "demo_bc": to_plain(self.bc),
            "demo": to_plain(self.rl),
        }

    def _preset(self, name: str) -> RLTrainConfig:
        config = get_config(name)
        return debug_config(config) if self.quick else config


def make_plan(config: DemoConfig) -> Stages:
    """Data and the baseline; then RL in one lane, the controls in the other; each is measured when it is there."""
    rl, data, bc = config.rl, ("--data.repo-id", str(config.data)), ("--checkpoint", str(config.run("bc")))
    # The controls learn as fast as ACRLPD's policy does.
    assert isinstance(rl.agent, ACRLPDConfig)
    pace: tuple[str, ...] = ("--agent.optimiser.peak-lr", str(rl.agent.policy_optimiser.peak_lr))
    pace += (
        "--agent.optimiser.decay-steps",
        str(max(config.extra_updates, rl.agent.policy_optimiser.warmup_steps + 1)),
    )
    more = (*bc, "--from-scratch", "false", "--steps", str(config.extra_updates), *pace, *data)
    learning: tuple[str, ...] = (*bc, *data)
    if config.episodes != rl.evaluation.episodes:
        learning += ("--evaluation.episodes", str(config.episodes))
    if config.quick:
        learning += ("--checkpoints.keep-period", str(rl.steps))
    last, offline = config.extra_updates, config.run("acrlpd") / "checkpoints" / "policy" / str(rl.steps)
    return (
        ((_collect(config), _train(config, "bc", "demo_bc", "train BC", data, config.bc.steps)),),
        (
            (
                _train(config, "acrlpd", "demo", "train ACRLPD, offline and online", learning, last),
                _evaluate(config, "acrlpd_offline", offline),
                _evaluate(config, "acrlpd", config.run("acrlpd")),
            ),
            (
                _evaluate(config, "bc", config.run("bc")),
                _train(config, "bc_more", "demo_bc", "control: train BC for longer", more, last),
                _evaluate(config, "bc_more", config.run("bc_more")),
                _train(
                    config,
                    "bc_successes",
                    "demo_bc",
                    "control: train BC on successes",
                    (*more, "--data.selection.success", "true"),
                    last,
                ),
                _evaluate(config, "bc_successes", config.run("bc_successes")),
            ),
        ),
    )


def shown(command: tuple[str, ...]) -> tuple[str, ...]:
    """A command as a person types it."""
    return ("pirl", *command[len(_pirl()) :])


def _collect(config: DemoConfig) -> Step:
    flaws = [part for name, value in asdict(EXPERT).items() for part in (_flag(f"expert.{name}"), f"{value:g}")]
    arguments = ["--policy", "expert", "--episodes", str(config.demonstrations), "--out", str(config.data)]
    log = config.data / COLLECTION_LOG
    return Step(
        "collect",
        f"collect {config.demonstrations:,} demonstrations",
        (*_pirl(), "collect", *env_options(config.bc), *arguments, "--storage", "image", *flaws),
        is_whole=lambda: log.exists() and json.loads(log.read_text(encoding="utf-8"))["complete"],
        begun=config.data,
    )


def _train(config: DemoConfig, name: str, preset: str, title: str, arguments: tuple[str, ...], steps: int) -> Step:
    run = config.run(name)
    where = ("--exp-name", name, "--runs-dir", str(config.out))
    quick = ("--debug",) if config.quick else ()
    return Step(
        f"train_{name}",
        title,
        (*_pirl(), "train", preset, *where, *arguments, *quick),
        is_whole=lambda: max(saved_steps(run / "checkpoints" / "state"), default=0) >= steps,
        begun=run / LOCK_FILE,
    )


def _evaluate(config: DemoConfig, policy: str, path: Path) -> Step:
    how: EvaluationConfig = config.rl.evaluation
    file = config.evaluation(policy)
    arguments = ["--episodes", str(config.episodes), "--seed", str(how.seed), "--execute-steps", str(how.execute_steps)]
    arguments += [] if how.envs is None else ["--envs", str(how.envs)]
    name = next(each.name for each in POLICIES if each.key == policy)
    return Step(
        f"eval_{policy}",
        f"measure {name}",
        (*_pirl(), "eval", str(path), *env_options(config.rl), *arguments, "--json", str(file)),
        is_whole=file.exists,
    )


def _pirl() -> tuple[str, ...]:
    """How this very pirl is called, wherever it is installed."""
    script = shutil.which("pirl", path=str(Path(sys.executable).parent))
    return (script,) if script else (sys.executable, "-m", "pirl.cli.main")


def env_options(config: RLTrainConfig) -> tuple[str, ...]:
    """The preset's environment as options of a command."""
    assert config.env is not None
    options = config.env.options.items()
    return ("--env", config.env.id, *(part for name, value in options for part in (_flag(f"env.{name}"), str(value))))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
