"""`pirl demo`: RL from demonstrations of mixed quality, first on these alone, then on episodes of its own."""

from dataclasses import replace
from pathlib import Path

from pirl.agents.acrlpd import ACRLPDConfig
from pirl.demo.commands import Arguments, collect_demonstrations, evaluate, same_pace, train
from pirl.demo.plan import Curves, DemoConfig, Plan, Policy
from pirl.demo.progress import updates_made
from pirl.demo.steps import Stages
from pirl.envs.experts import ExpertConfig
from pirl.run_files import RunFiles

# Demonstrations of mixed quality: good intentions and a trembling hand, so that good and bad moves stand side by side in
# every episode, in those that succeed as well.
EXPERT = ExpertConfig(aim_bias=0.005, noise=0.9)


def make_stages(config: DemoConfig) -> Stages:
    """Data and the baseline; then RL in one lane, the controls in the other; each is measured when it is there."""
    rl, data, bc = config.rl, ("--data.repo-id", str(config.data)), ("--checkpoint", str(config.run("bc")))
    assert isinstance(rl.agent, ACRLPDConfig)
    last, control = updates(config), policy_updates(config)
    pace = same_pace(config, rl.agent.policy_optimiser)
    more = (*bc, "--from-scratch", "false", "--steps", str(control), *pace, *data)
    learning: Arguments = (*bc, *data)
    if config.episodes != rl.evaluation.episodes:
        learning += ("--evaluation.episodes", str(config.episodes))
    if config.quick:
        learning += ("--checkpoints.keep-period", str(rl.steps))
    return (
        (
            (
                collect_demonstrations(config),
                train(
                    config,
                    "bc",
                    config.plan.bc_preset,
                    "train BC",
                    data,
                    is_whole=lambda: updates_made(config.run("bc")) >= config.bc.steps,
                ),
            ),
        ),
        (
            (
                train(
                    config,
                    "acrlpd",
                    config.plan.rl_preset,
                    "train ACRLPD, offline and online",
                    learning,
                    is_whole=lambda: updates_made(config.run("acrlpd")) >= last,
                ),
                evaluate(config, "acrlpd_offline", RunFiles(config.run("acrlpd")).policies / str(rl.steps)),
                evaluate(config, "acrlpd"),
            ),
            (
                evaluate(config, "bc"),
                train(
                    config,
                    "bc_more",
                    config.plan.bc_preset,
                    "control: train BC for longer",
                    more,
                    is_whole=lambda: updates_made(config.run("bc_more")) >= control,
                ),
                evaluate(config, "bc_more"),
                train(
                    config,
                    "bc_successes",
                    config.plan.bc_preset,
                    "control: train BC on successes",
                    (*more, "--data.selection.success", "true"),
                    is_whole=lambda: updates_made(config.run("bc_successes")) >= control,
                ),
                evaluate(config, "bc_successes"),
            ),
        ),
    )


def updates(config: DemoConfig) -> int:
    """What ACRLPD makes after BC, of the critics at least; whole episodes may bring a few more."""
    online = config.rl.online
    scans = int(online.env_steps * online.utd_ratio) // online.updates_per_scan
    return config.rl.steps + scans * online.updates_per_scan


def policy_updates(config: DemoConfig) -> int:
    """Those of them that train the policy, which the controls make as well; a run makes one at least."""
    assert isinstance(config.rl.agent, ACRLPDConfig)
    return max(1, config.rl.agent.policy_updates(updates(config)))


def introduce(observation: str) -> str:
    """What stands over the comparison, of policies that see what is said."""
    return (
        f"{{policies}} policies that {observation}, evaluated on the same {{episodes}} held-out initial states. All were "
        "trained on {demonstrations} demonstrations, of which {success} succeed. The controls make as many more policy "
        "updates as ACRLPD (its last round of episodes may bring a few more) and show what these achieve without RL, on "
        "all demonstrations or on the successful ones. Updates are those of the policy."
    )


ACRLPD = Plan(
    command="pirl demo",
    title="RL on a π₀ policy: the demo",
    introduction=introduce("see the table through two cameras"),
    out=Path("runs/demo"),
    demonstrations=500,
    quick_demonstrations=12,
    expert=EXPERT,
    bc_preset="demo_bc",
    rl_preset="demo",
    policies=(
        Policy("bc", "BC", "behaviour cloning of all demonstrations", ("bc",)),
        Policy(
            "bc_more", "BC, more updates", "control: as many more policy updates as ACRLPD makes", ("bc", "bc_more")
        ),
        Policy(
            "bc_successes",
            "BC, successes only",
            "control: as many more policy updates, on successful demonstrations only",
            ("bc", "bc_successes"),
        ),
        Policy(
            "acrlpd_offline",
            "ACRLPD offline",
            "RL from BC on the same demonstrations",
            ("bc", "acrlpd"),
            is_halfway=True,
        ),
        Policy("acrlpd", "ACRLPD", "the same, then also on its own episodes", ("bc", "acrlpd")),
        Policy(
            "acrlpd_best_of_n",
            "ACRLPD, best of N",
            "the learner itself: its critics choose the best of N samples",
            ("bc", "acrlpd"),
            is_best_of_n=True,
        ),
    ),
    baseline="bc",
    subject="acrlpd",
    rival="bc_successes",
    curves=(Curves("Training"),),
    film="critics",
    next_command="pirl train aloha_fold --exp-name mine --data.repo-id YOUR_DATA --checkpoint CHECKPOINT",
    stages=make_stages,
)

ACRLPD_STATE = replace(
    ACRLPD,
    command="pirl demo --observation state",
    introduction=introduce("observe the true state of the table"),
    out=Path("runs/demo_state"),
    bc_preset="demo_state_bc",
    rl_preset="demo_state",
)
