"""What a demo is, as data: the policies that are measured, how they come about, and what its report shows of them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pirl.config import RLTrainConfig, debug_config, get_config, to_plain
from pirl.demo.steps import Stages
from pirl.envs.experts import ExpertConfig
from pirl.report.plots import PANELS, Panel

EPISODES, QUICK_EPISODES = 200, 8
DEMONSTRATIONS = "data"


@dataclass(frozen=True)
class Policy:
    """Something that is measured: `trained` are the runs it went through, one after the other."""

    key: str
    name: str
    description: str
    trained: tuple[str, ...]
    is_halfway: bool = False
    """Whether its last run went on after it: how long it took to that point nobody has measured."""
    is_best_of_n: bool = False
    """Whether it acts with its critics, which an exported policy lacks: it is as its run itself measured it last."""
    own_data: str | None = None
    """The dataset of its own episodes that it was trained on, if it was."""


@dataclass(frozen=True)
class Curves:
    """A section of curves: those of some runs, or of all, in these panels."""

    title: str
    runs: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = PANELS
    against: str | None = None
    """The metric that is the axis below (none: updates)."""
    unit: str = "updates"
    """What that axis counts."""
    introduction: str | None = None
    """How to read it (none: as the report says of all curves)."""


@dataclass(frozen=True)
class Plan:
    """One demo. Policies and runs go by their keys; a run has the name of the policy it ends with, and its directory."""

    command: str
    """How a person asks for it."""
    title: str
    introduction: str
    """Over the comparison; {policies}, {episodes}, {demonstrations}, {success} and {env_steps} are filled in."""
    out: Path
    """Its directory, if not told."""
    demonstrations: int
    quick_demonstrations: int
    """How many, if not told."""
    expert: ExpertConfig
    """Who demonstrates."""
    bc_preset: str
    rl_preset: str
    policies: tuple[Policy, ...]
    """In the order in which they are shown."""
    baseline: str
    """The policy that all others are compared with."""
    subject: str
    """The policy that the demo is about."""
    rival: str
    """The control that is the hardest to beat."""
    curves: tuple[Curves, ...]
    film: Literal["critics", "before_and_after"]
    """What the strips show: values along episodes of the baseline, or the same start by the baseline and the subject."""
    next_command: str
    """What to try on something real."""
    stages: Callable[["DemoConfig"], Stages]
    """Its steps."""

    @property
    def runs(self) -> tuple[str, ...]:
        """All runs, by their directory."""
        return tuple(dict.fromkeys(run for policy in self.policies for run in policy.trained))

    @property
    def datasets(self) -> tuple[str, ...]:
        """All datasets, by their directory: the demonstrations first."""
        return (DEMONSTRATIONS, *(policy.own_data for policy in self.policies if policy.own_data))

    @property
    def names(self) -> Mapping[str, str]:
        """What policies are called, by key."""
        return {policy.key: policy.name for policy in self.policies}


@dataclass(frozen=True)
class DemoConfig:
    """What can be chosen of a plan: where, how much is measured and shown first, and whether all of it is only tried."""

    plan: Plan
    out: Path
    episodes: int
    demonstrations: int
    quick: bool = False

    @property
    def data(self) -> Path:
        """The demonstrations."""
        return self.dataset(DEMONSTRATIONS)

    def dataset(self, name: str) -> Path:
        """A directory of episodes."""
        return self.out / name

    def run(self, name: str) -> Path:
        """A run directory."""
        return self.out / name

    def evaluation(self, policy: str) -> Path:
        """The result of every episode of a policy."""
        return self.out / "evaluations" / f"{policy}.json"

    @cached_property
    def bc(self) -> RLTrainConfig:
        """How the baseline is trained."""
        return self._preset(self.plan.bc_preset)

    @cached_property
    def rl(self) -> RLTrainConfig:
        """How the policy that the demo is about is trained."""
        return self._preset(self.plan.rl_preset)

    def settings(self) -> dict[str, Any]:
        """All that decides what is in the directory."""
        return {
            "command": self.plan.command,
            "episodes": self.episodes,
            "demonstrations": self.demonstrations,
            "quick": self.quick,
            "expert": asdict(self.plan.expert),
            self.plan.bc_preset: to_plain(self.bc),
            self.plan.rl_preset: to_plain(self.rl),
        }

    def _preset(self, name: str) -> RLTrainConfig:
        config = get_config(name)
        return debug_config(config) if self.quick else config


def configure(
    plan: Plan,
    *,
    out: Path | None = None,
    episodes: int | None = None,
    demonstrations: int | None = None,
    quick: bool = False,
) -> DemoConfig:
    """A demo as it was asked for, and as the plan has it where nothing was said."""
    return DemoConfig(
        plan,
        out or plan.out,
        episodes or (QUICK_EPISODES if quick else EPISODES),
        demonstrations or (plan.quick_demonstrations if quick else plan.demonstrations),
        quick,
    )
