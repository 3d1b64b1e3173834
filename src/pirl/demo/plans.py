"""The demos as lists of `pirl` commands: collect, train with and without RL, evaluate on the same initial states."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pirl.agents.config import ACRLPDConfig, BCConfig, OptimizerConfig, RIPTConfig
from pirl.config import RLTrainConfig, debug_config, get_config, to_plain
from pirl.demo.steps import Stages, Step
from pirl.envs.collect import LOG_FILE
from pirl.envs.experts import ExpertConfig
from pirl.report.runs import count_env_steps, read_log
from pirl.run_files import RunFiles, saved_steps

DENOISING_STEPS = "--denoising-steps 10"  # as OpenPI acts, whatever a learner needs while it learns
# Actions are noisy, so that good and bad moves stand side by side in every episode, also in those that succeed.
ACRLPD_EXPERT = ExpertConfig(aim_bias=0.005, noise=0.9)
CLONE_UPDATES = 6_000  # of the clone of the successes, where RL starts: until it sees well enough for critics
# Most episodes aim wide, tremble and hesitate, some are given up: what is cloned from them succeeds now and then.
RIPT_EXPERT = ExpertConfig(aim_bias=0.025, noise=0.2, delay=5, give_up=0.1, flawed=0.7)
# RIPT has nothing to learn from a policy that never succeeds: in the quick demo this takes longest.
QUICK_START = {"steps": 400, "batch_size": 32, "checkpoints.every": 400, "logging.every": 50}


@dataclass(frozen=True)
class Policy:
    """A policy that is evaluated, and the runs that trained it; a run is called after the policy it ends with."""

    key: str
    name: str
    description: str
    trained: tuple[str, ...]
    is_halfway: bool = False
    """Whether its last run continued after it."""
    is_best_of_n: bool = False
    """Whether it acts with its critics, which an exported policy lacks: then its run's own evaluation counts."""
    own_data: str | None = None
    """The dataset of its own episodes that it was trained on."""


@dataclass(frozen=True)
class Demo:
    """A demo, with what can be chosen of it."""

    command: str
    title: str
    introduction: str
    """Over the comparison; {policies}, {episodes}, {demonstrations}, {success} and {env_steps} are filled in."""
    out: Path
    demonstrations: int
    quick_demonstrations: int
    expert: ExpertConfig
    bc_preset: str
    rl_preset: str
    policies: tuple[Policy, ...]
    baseline: str
    """The policy that all others are compared with."""
    subject: str
    """The policy that the demo is about."""
    rival: str
    """The strongest control."""
    next_command: str
    make_stages: Callable[["Demo"], Stages]
    episodes: int = 200
    quick: bool = False

    def configure(
        self,
        *,
        out: Path | None = None,
        episodes: int | None = None,
        demonstrations: int | None = None,
        quick: bool = False,
    ) -> "Demo":
        """The demo as it was asked for, with its defaults where nothing was said."""
        episodes = episodes or (8 if quick else self.episodes)
        demonstrations = demonstrations or (self.quick_demonstrations if quick else self.demonstrations)
        return replace(self, out=out or self.out, episodes=episodes, demonstrations=demonstrations, quick=quick)

    def stages(self) -> Stages:
        return self.make_stages(self)

    def steps(self) -> list[Step]:
        """All of them; what depends on the results of others is true only when these are there."""
        return [step for lanes in self.stages() for lane in lanes for step in lane]

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run for policy in self.policies for run in policy.trained))

    @property
    def names(self) -> Mapping[str, str]:
        return {policy.key: policy.name for policy in self.policies}

    @cached_property
    def bc(self) -> RLTrainConfig:
        return self._preset(self.bc_preset)

    @cached_property
    def rl(self) -> RLTrainConfig:
        return self._preset(self.rl_preset)

    def _preset(self, name: str) -> RLTrainConfig:
        return debug_config(get_config(name)) if self.quick else get_config(name)

    def settings(self) -> dict[str, Any]:
        """All that decides what is in the directory."""
        same = {name: getattr(self, name) for name in ("command", "episodes", "demonstrations", "quick")}
        presets = {self.bc_preset: to_plain(self.bc), self.rl_preset: to_plain(self.rl)}
        return {**same, "expert": asdict(self.expert), **presets}

    def path(self, name: str) -> str:
        """A path in the directory, quoted for a command."""
        return shlex.quote(str(self.out / name))

    def evaluation(self, policy: str) -> Path:
        """The result of every episode of a policy."""
        return self.out / "evaluations" / f"{policy}.json"

    def updates_made(self, run: str) -> int:
        return max(saved_steps(RunFiles(self.out / run).checkpoints), default=0)

    def env_steps(self, run: str) -> int:
        """Environment steps that a run took to learn from them."""
        return count_env_steps(read_log(RunFiles(self.out / run).metrics_file)) or 0

    def collect(self, name: str, title: str, dataset: str, options: str) -> Step:
        def is_whole() -> bool:
            log = self.out / dataset / LOG_FILE
            return log.exists() and bool(json.loads(log.read_text(encoding="utf-8"))["complete"])

        text = f"collect {env_options(self.bc)} {options} --out {self.path(dataset)} --storage image"
        return Step(name, title, text, is_whole, begun=self.out / dataset)

    def collect_demonstrations(self) -> Step:
        flaws = to_options({f"expert.{name}": f"{value:g}" for name, value in asdict(self.expert).items()})
        options = f"--policy expert --episodes {self.demonstrations} {flaws}"
        return self.collect("collect", f"collect {self.demonstrations:,} demonstrations", "data", options)

    def train(self, run: str, preset: str, title: str, options: str) -> Step:
        files = RunFiles(self.out / run)
        debug = "--debug" if self.quick else ""
        text = f"train {preset} --exp-name {run} --runs-dir {self.path('')} {options} {debug}"

        def is_whole() -> bool:
            return bool(saved_steps(files.checkpoints)) and not files.was_stopped

        return Step(f"train_{run}", title, text, is_whole, begun=files.lock_file)

    def evaluate(self, policy: str, path: str | None = None) -> Step:
        """Success of the policy in `path`, or of the run of its name, from the same initial states for all."""
        how, file = self.rl.evaluation, self.evaluation(policy)
        options = {"episodes": self.episodes, "seed": how.seed, "execute_steps": how.execute_steps, "envs": how.envs}
        text = f"eval {path or self.path(policy)} {env_options(self.rl)} {DENOISING_STEPS} {to_options(options)}"
        text = f"{text} --json {shlex.quote(str(file))}"
        return Step(f"eval_{policy}", f"measure {self.names[policy]}", text, file.exists)


def to_options(values: Mapping[str, Any]) -> str:
    """Fields as options of a command; those that are None are left out."""
    return " ".join(
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in values.items() if value is not None
    )


def env_options(config: RLTrainConfig) -> str:
    """The preset's environment as options of a command."""
    assert config.env is not None
    return to_options({"env": config.env.id} | {f"env.{name}": value for name, value in config.env.options.items()})


def _acrlpd_stages(demo: Demo) -> Stages:
    """Data and both clones; then RL beside the controls."""
    data, successes = f"--data.repo-id {demo.path('data')}", "--data.selection.success true"
    cloned, control = 2 if demo.quick else CLONE_UPDATES, policy_updates(demo)

    def clone(run: str, start: str, steps: int, title: str, options: str = "") -> Step:
        """Continues a clone at half of BC's pace, down to its last."""
        start = f"--checkpoint {demo.path(start)} --from-scratch false --data.norm-stats checkpoint"
        pace = f"--agent.optimizer.peak-lr 1e-3 --agent.optimizer.decay-steps {steps}" if not demo.quick else ""
        return demo.train(run, demo.bc_preset, title, f"{start} {data} --steps {steps} {pace} {options}")

    start = [
        demo.collect_demonstrations(),
        demo.train("bc", demo.bc_preset, "train BC", data),
        clone("bc_successes", "bc", cloned, "train BC on successes", successes),
    ]
    yield [start]

    learning = f"--checkpoint {demo.path('bc_successes')} {data}"
    if demo.episodes != demo.rl.evaluation.episodes:
        learning += f" --evaluation.episodes {demo.episodes}"
    if demo.quick:
        learning += f" --checkpoints.keep-period {demo.rl.steps}"
    offline = shlex.quote(str(RunFiles(demo.out / "acrlpd").checkpoints / str(demo.rl.steps)))
    learner = [
        demo.train("acrlpd", demo.rl_preset, "train ACRLPD, offline and online", learning),
        demo.evaluate("acrlpd_offline", offline),
        demo.evaluate("acrlpd"),
    ]
    controls = [
        demo.evaluate("bc"),
        demo.evaluate("bc_successes"),
        clone("bc_more", "bc", cloned + control, "control: train BC for longer"),
        demo.evaluate("bc_more"),
        clone("bc_successes_more", "bc_successes", control, "control: train BC on successes for longer", successes),
        demo.evaluate("bc_successes_more"),
    ]
    yield [learner, controls]


def policy_updates(demo: Demo) -> int:
    """Updates of ACRLPD that train the policy, which the controls make as well; whole episodes may bring a few more."""
    assert isinstance(demo.rl.agent, ACRLPDConfig)
    online = demo.rl.online
    scans = int(online.env_steps * online.utd_ratio) // online.updates_per_scan
    return max(1, demo.rl.agent.policy_updates(demo.rl.steps + scans * online.updates_per_scan))


def _ript_stages(demo: Demo) -> Stages:
    """Data and the start policy; then RIPT; then the controls, which need to know how much RIPT has done."""
    assert isinstance(demo.rl.agent, RIPTConfig)
    data, how = f"--data.repo-id {demo.path('data')}", demo.rl.evaluation
    quick = to_options(QUICK_START) if demo.quick else ""
    start_policy = demo.train("start", demo.bc_preset, "train the start policy by BC", f"{data} {quick}")
    yield [[demo.collect_demonstrations(), start_policy]]

    start = f"--checkpoint {demo.path('start')}"
    yield [[demo.train("ript", demo.rl_preset, "train RIPT in the simulator", start)]]

    # RIPT makes no updates where all rollouts of a state end alike, as they may in the quick demo.
    updates, env_steps = max(1, demo.updates_made("ript")), demo.env_steps("ript")
    pace = f"--steps {updates} {_same_pace(demo, demo.rl.agent.optimizer)}"

    def control(run: str, title: str, dataset: str, options: str = "") -> Step:
        """BC from the start policy: as many updates as RIPT made, of as many chunks, as fast."""
        begin = f"{start} --from-scratch false --data.norm-stats checkpoint --data.repo-id {demo.path(dataset)}"
        return demo.train(run, demo.bc_preset, title, f"{begin} {pace} {options}")

    own = to_options({"seed": demo.rl.rollout.seed, "execute_steps": how.execute_steps, "envs": how.envs})
    own = f"--policy {demo.path('start')} {DENOISING_STEPS} {own} --env-steps {env_steps}"
    # After so few updates there may be no success: the quick demo clones all of its own episodes.
    successes = "" if demo.quick else "--data.selection.success true"
    own_successes = [
        demo.collect("collect_own", "control: collect as many steps of the start policy", "own", own),
        control("filtered_bc", "control: train BC on its successes", "own", successes),
        demo.evaluate("filtered_bc"),
    ]
    others = [
        demo.evaluate("start"),
        demo.evaluate("ript"),
        control("bc_more", "control: train BC for longer", "data"),
        demo.evaluate("bc_more"),
    ]
    yield [own_successes, others]


def _same_pace(demo: Demo, optimizer: OptimizerConfig) -> str:
    """The batch size and the optimizer of RIPT, for BC."""
    assert isinstance(demo.bc.agent, BCConfig)
    default = asdict(demo.bc.agent.optimizer)
    changed = {f"agent.optimizer.{name}": value for name, value in asdict(optimizer).items() if value != default[name]}
    return to_options({"batch_size": demo.rl.batch_size, **changed})


_INTRODUCTION = (
    "{{policies}} policies that {}, evaluated on the same {{episodes}} held-out initial states. All were trained on "
    "{{demonstrations}} demonstrations, of which {{success}} succeed. RL starts from BC on successes. The controls with "
    "more updates make as many in all as ACRLPD (its last round of episodes may bring a few more) and show what these "
    "achieve without RL. Updates are those of the policy."
)
_BC = ("bc", "bc_successes")
ACRLPD = Demo(
    command="pirl demo",
    title="RL on a π₀ policy: the demo",
    introduction=_INTRODUCTION.format("see the table through two cameras"),
    out=Path("runs/demo"),
    demonstrations=500,
    quick_demonstrations=12,
    expert=ACRLPD_EXPERT,
    bc_preset="demo_bc",
    rl_preset="demo",
    policies=(
        Policy("bc", "BC", "behavior cloning of all demonstrations", ("bc",)),
        Policy(
            "bc_more", "BC, more updates", "control: as many policy updates in all as ACRLPD makes", ("bc", "bc_more")
        ),
        Policy("bc_successes", "BC, successes only", "BC, then cloning of successes only: where RL starts", _BC),
        Policy(
            "bc_successes_more",
            "BC, successes only, more updates",
            "control: the same for as many policy updates in all as ACRLPD makes",
            (*_BC, "bc_successes_more"),
        ),
        Policy("acrlpd_offline", "ACRLPD offline", "RL on the same demonstrations", (*_BC, "acrlpd"), is_halfway=True),
        Policy("acrlpd", "ACRLPD", "the same, then also on its own episodes", (*_BC, "acrlpd")),
        Policy(
            "acrlpd_best_of_n",
            "ACRLPD, best of N",
            "the learner itself: its critics choose the best of N samples",
            (*_BC, "acrlpd"),
            is_best_of_n=True,
        ),
    ),
    baseline="bc",
    subject="acrlpd",
    rival="bc_successes",
    next_command="pirl train aloha_fold --exp-name mine --data.repo-id YOUR_DATA --checkpoint CHECKPOINT",
    make_stages=_acrlpd_stages,
)
ACRLPD_STATE = replace(
    ACRLPD,
    command="pirl demo --observation state",
    introduction=_INTRODUCTION.format("observe the true state of the table"),
    out=Path("runs/demo_state"),
    bc_preset="demo_state_bc",
    rl_preset="demo_state",
)
RIPT = Demo(
    command="pirl demo ript",
    title="RIPT on a π₀ policy: the demo",
    introduction=(
        "{policies} policies, evaluated on the same {episodes} held-out initial states. The start policy was cloned from "
        "{demonstrations} demonstrations, of which {success} succeed. RIPT then took {env_steps} steps in the simulator, "
        "without any demonstration. The controls make the same number of updates on the demonstrations, and on the start "
        "policy's own successes from as many steps."
    ),
    out=Path("runs/demo_ript"),
    demonstrations=300,
    quick_demonstrations=60,
    expert=RIPT_EXPERT,
    bc_preset="demo_ript_start",
    rl_preset="demo_ript",
    policies=(
        Policy("start", "Start policy", "behavior cloning of all demonstrations", ("start",)),
        Policy(
            "bc_more", "BC, more updates", "control: BC trained for as many more updates as RIPT", ("start", "bc_more")
        ),
        Policy(
            "filtered_bc",
            "BC, own successes",
            "control: as many updates on the start policy's own successes, from as many steps as RIPT took",
            ("start", "filtered_bc"),
            own_data="own",
        ),
        Policy("ript", "RIPT", "RL from the start policy, on its own rollouts", ("start", "ript")),
    ),
    baseline="start",
    subject="ript",
    rival="filtered_bc",
    next_command="pirl train libero_ript --exp-name mine --checkpoint CHECKPOINT",
    make_stages=_ript_stages,
)
DEMOS = {"acrlpd": ACRLPD, "acrlpd_state": ACRLPD_STATE, "ript": RIPT}
