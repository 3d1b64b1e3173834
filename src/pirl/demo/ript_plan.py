"""`pirl demo ript`: a weak policy practises in the simulator, told nothing but which attempts succeed, and how soon."""

from dataclasses import replace
from pathlib import Path

from pirl.agents.config import RIPTConfig
from pirl.demo.commands import (
    DENOISING_STEPS,
    Arguments,
    collect,
    collect_demonstrations,
    evaluate,
    flag,
    same_pace,
    train,
)
from pirl.demo.plan import Curves, DemoConfig, Plan, Policy
from pirl.demo.progress import iterations_made, steps_practised, updates_made
from pirl.demo.steps import Stages, Step
from pirl.envs.experts import ExpertConfig
from pirl.report.plots import PANELS, ROLLOUTS

DEMONSTRATIONS, QUICK_DEMONSTRATIONS = 300, 60
# RIPT has nothing to learn from a policy that never succeeds: in the quick demo this is what takes longest.
QUICK_START = {"steps": 400, "batch_size": 32, "checkpoints.every": 400, "logging.every": 50}
# Most episodes aim wide, tremble and hesitate, some are given up: what is cloned from them succeeds now and then.
EXPERT = ExpertConfig(aim_bias=0.025, noise=0.2, delay=5, give_up=0.1, flawed=0.7)


def make_stages(config: DemoConfig) -> Stages:
    """Data and the start policy; then RIPT; then the controls, which need to know how much RIPT has done."""
    own: Arguments = ("--policy", str(config.run("start")), "--seed", str(config.rl.rollout.seed))
    own += ("--execute-steps", str(config.rl.evaluation.execute_steps), *DENOISING_STEPS)
    own += () if config.rl.evaluation.envs is None else ("--envs", str(config.rl.evaluation.envs))
    # Where the start policy has hardly learned anything, there may be no success: the quick demo clones what there is.
    successes = () if config.quick else ("--data.selection.success", "true")
    bc: Arguments = ("--data.repo-id", str(config.data))
    if config.quick:
        bc += tuple(part for name, value in QUICK_START.items() for part in (flag(name), str(value)))
    start_updates = QUICK_START["steps"] if config.quick else config.bc.steps
    return (
        (
            (
                collect_demonstrations(config),
                train(
                    config,
                    "start",
                    "demo_ript_start",
                    "train the start policy by BC",
                    bc,
                    is_whole=lambda: updates_made(config.run("start")) >= start_updates,
                ),
            ),
        ),
        (
            (
                train(
                    config,
                    "ript",
                    "demo_ript",
                    "train RIPT in the simulator",
                    ("--checkpoint", str(config.run("start"))),
                    is_whole=lambda: iterations_made(config.run("ript")) >= config.rl.rollout.iterations,
                ),
            ),
        ),
        (
            (
                collect(
                    config,
                    "collect_own",
                    "control: collect as many steps of the start policy",
                    "own",
                    own,
                    late=lambda: ("--env-steps", str(steps_practised(config.run("ript")))),
                ),
                _control(config, "filtered_bc", "control: train BC on its successes", "own", successes),
                evaluate(config, "filtered_bc"),
            ),
            (
                evaluate(config, "start"),
                evaluate(config, "ript"),
                _control(config, "bc_more", "control: train BC for longer", "data", ()),
                evaluate(config, "bc_more"),
            ),
        ),
    )


def _control(config: DemoConfig, run: str, title: str, dataset: str, arguments: Arguments) -> Step:
    """BC from the start policy: as many updates as RIPT made, of as many chunks, as fast, in the same normalisation."""
    assert isinstance(config.rl.agent, RIPTConfig)
    pace = same_pace(config, config.rl.agent.optimizer)
    start = ("--checkpoint", str(config.run("start")), "--from-scratch", "false", "--data.norm-stats", "checkpoint")
    data = ("--data.repo-id", str(config.dataset(dataset)))
    return train(
        config,
        run,
        "demo_ript_start",
        title,
        (*start, *data, *pace, *arguments),
        is_whole=lambda: updates_made(config.run(run)) >= _control_updates(config),
        late=lambda: ("--steps", str(_control_updates(config))),
    )


def _control_updates(config: DemoConfig) -> int:
    # RIPT makes none where all attempts go alike, as they may in the quick demo; a run makes one at least.
    return max(1, updates_made(config.run("ript")))


_PRACTICE = (
    replace(ROLLOUTS[0], title="Success in rollouts"),
    replace(PANELS[0], title="Success on held-out initial states"),
    *ROLLOUTS[1:],
)

RIPT = Plan(
    command="pirl demo ript",
    title="RIPT on a π₀ policy: the demo",
    introduction=(
        "{policies} policies, evaluated on the same {episodes} held-out initial states. The start policy was cloned from "
        "{demonstrations} demonstrations, of which {success} succeed. RIPT then took {env_steps} steps in the simulator, "
        "without any demonstration. The controls make the same number of updates on the demonstrations, and on the start "
        "policy's own successes from as many steps."
    ),
    out=Path("runs/demo_ript"),
    demonstrations=DEMONSTRATIONS,
    quick_demonstrations=QUICK_DEMONSTRATIONS,
    expert=EXPERT,
    bc_preset="demo_ript_start",
    rl_preset="demo_ript",
    policies=(
        Policy("start", "Start policy", "behaviour cloning of all demonstrations", ("start",)),
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
    curves=(
        Curves(
            "Practice",
            ("ript",),
            _PRACTICE,
            against="rollout/env_steps",
            unit="environment steps",
            introduction="RIPT by iteration, over environment steps.",
        ),
        Curves("Training", panels=tuple(panel for panel in PANELS if panel.metric != "eval/success")),
    ),
    film="before_and_after",
    next_command="pirl train libero_ript --exp-name mine --checkpoint CHECKPOINT",
    stages=make_stages,
)
