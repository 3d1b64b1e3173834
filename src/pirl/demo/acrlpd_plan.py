"""`pirl demo`: RL from demonstrations of mixed quality, first on these alone, then on episodes of its own."""

from dataclasses import replace
from pathlib import Path

from pirl.agents.config import ACRLPDConfig
from pirl.demo.commands import Arguments, collect_demonstrations, evaluate, train
from pirl.demo.plan import Curves, DemoConfig, Plan, Policy
from pirl.demo.progress import updates_made
from pirl.demo.steps import Stages, Step
from pirl.envs.experts import ExpertConfig
from pirl.run_files import RunFiles

# Demonstrations of mixed quality: good intentions and a trembling hand, so that good and bad moves stand side by side in
# every episode, in those that succeed as well.
EXPERT = ExpertConfig(aim_bias=0.005, noise=0.9)
# Updates of the clone of the successes, from which RL starts: so many until it sees well enough for critics.
CLONE_UPDATES = 6_000


def make_stages(config: DemoConfig) -> Stages:
    """Data and both clones; then RL in one lane, the controls in the other; each is measured when it is there."""
    rl, data = config.rl, ("--data.repo-id", str(config.data))
    assert isinstance(rl.agent, ACRLPDConfig)
    last, cloned, control = updates(config), clone_updates(config), policy_updates(config)
    successes = ("--data.selection.success", "true")

    def clone(run: str, start: str, steps: int, title: str, arguments: Arguments = ()) -> Step:
        where = (
            "--checkpoint",
            str(config.run(start)),
            "--from-scratch",
            "false",
            "--data.norm-stats",
            "checkpoint",
            *data,
        )
        # Half of BC's pace, down to its last: they go on from there.
        pace = ("--agent.optimizer.peak-lr", "1e-3", "--agent.optimizer.decay-steps", str(steps))
        how = ("--steps", str(steps), *(() if config.quick else pace), *arguments)
        return train(
            config,
            run,
            config.plan.bc_preset,
            title,
            (*where, *how),
            is_whole=lambda: updates_made(config.run(run)) >= steps,
        )

    learning: Arguments = ("--checkpoint", str(config.run("bc_successes")), *data)
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
                clone("bc_successes", "bc", cloned, "train BC on successes", successes),
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
                evaluate(config, "bc_successes"),
                clone("bc_more", "bc", cloned + control, "control: train BC for longer"),
                evaluate(config, "bc_more"),
                clone(
                    "bc_successes_more", "bc_successes", control, "control: train BC on successes for longer", successes
                ),
                evaluate(config, "bc_successes_more"),
            ),
        ),
    )


def clone_updates(config: DemoConfig) -> int:
    """Those that BC on successes makes after BC."""
    return 2 if config.quick else CLONE_UPDATES


def updates(config: DemoConfig) -> int:
    """What ACRLPD makes after the clones, of the critics at least; whole episodes may bring a few more."""
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
        "trained on {demonstrations} demonstrations, of which {success} succeed. RL starts from BC on successes. The "
        "controls with more updates make as many in all as ACRLPD (its last round of episodes may bring a "
        "few more) and show what these achieve without RL. Updates are those of the policy."
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
            "bc_more", "BC, more updates", "control: as many policy updates in all as ACRLPD makes", ("bc", "bc_more")
        ),
        Policy(
            "bc_successes",
            "BC, successes only",
            "BC, then cloning of successes only: where RL starts",
            ("bc", "bc_successes"),
        ),
        Policy(
            "bc_successes_more",
            "BC, successes only, more updates",
            "control: the same for as many policy updates in all as ACRLPD makes",
            ("bc", "bc_successes", "bc_successes_more"),
        ),
        Policy(
            "acrlpd_offline",
            "ACRLPD offline",
            "RL on the same demonstrations",
            ("bc", "bc_successes", "acrlpd"),
            is_halfway=True,
        ),
        Policy("acrlpd", "ACRLPD", "the same, then also on its own episodes", ("bc", "bc_successes", "acrlpd")),
        Policy(
            "acrlpd_best_of_n",
            "ACRLPD, best of N",
            "the learner itself: its critics choose the best of N samples",
            ("bc", "bc_successes", "acrlpd"),
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
