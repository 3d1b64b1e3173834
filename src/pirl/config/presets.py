"""The presets: fields over the defaults or over another preset, and what each is for, needs and should reach.

The fields are read like those of a YAML file, so that listing the presets imports neither JAX nor the rest of pirl.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pirl.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Preset:
    """Fields over those of another preset, and the text about them."""

    about: str
    fields: Mapping[str, Any]
    base: str | None = None

    @property
    def summary(self) -> str:
        """The first sentence of the text."""
        return self.about.splitlines()[0]


_PRESETS: dict[str, Preset] = {}


def list_configs() -> list[str]:
    """The names of the presets."""
    return [name for name in _PRESETS if not name.startswith("_")]


def get_preset(name: str) -> Preset:
    """A preset by its name; an unknown one raises with the nearest."""
    if name in _PRESETS:
        return _PRESETS[name]
    raise ConfigError(f"no preset is named {name!r}. {did_you_mean(name, list_configs())}See pirl configs.")


def find_choice(name: str, group: str, choice: str) -> str:
    """The model preset, or the learner, of a preset or of the nearest one below it."""
    preset = get_preset(name)
    chosen = preset.fields.get(group, {}).get(choice)
    return find_choice(preset.base or "", group, choice) if chosen is None else chosen


def _add(name: str, about: str, fields: Mapping[str, Any], base: str | None = None) -> None:
    _PRESETS[name] = Preset(inspect.cleandoc(about), {"name": name, **fields}, base)


def _cosine(peak_lr: float, decay_steps: int) -> dict[str, float]:
    """The optimizer of small models."""
    schedule = {"peak_lr": peak_lr, "warmup_steps": 100, "decay_steps": decay_steps, "end_lr": 1e-4}
    return {**schedule, "weight_decay": 1e-4}


# --- the demos ---------------------------------------------------------------------------------------------------

_add(
    "demo_bc",
    """The demo's baseline: behavior cloning of a tiny π₀ with two cameras on noisy demonstrations in Tabletop.

    Command: pirl train demo_bc --exp-name demo/bc --data.repo-id runs/demo/data
    Needs: one CPU core, three minutes; a dataset from `pirl demo` or `pirl collect`.
    Should reach: about 5 % success: its actions are as noisy as the expert's, and it recovers less often.
    """,
    {
        "model": {"preset": "tiny"},
        "agent": {"learner": "bc", "loss_over": "real", "augment": False, "optimizer": _cosine(2e-3, 3_000)},
        "data": {"repo_id": "runs/demo/data", "robot": "tabletop"},
        "env": {"id": "tabletop"},
        "checkpoints": {"every": 3_000},
        "logging": {"every": 50},
        "from_scratch": True,
        "steps": 3_000,
        "batch_size": 32,
    },
)

_add(
    "demo",
    """The demo: ACRLPD from a clone of the successes in Tabletop, on all demonstrations, then also on its own episodes.

    Command: pirl train demo --exp-name demo/acrlpd --checkpoint runs/demo/bc_successes
    Needs: one CPU core, ten minutes; a run of demo_bc on successes to start from, as `pirl demo` makes it.
    Should reach: offline 91 % with the policy alone (one run, 800 demonstrations), where BC on successes had 10 %.
    """,
    {
        "agent": {
            "learner": "acrlpd",
            "horizon_length": 5,
            "discount": 0.98,
            "num_action_samples": 4,
            "num_acting_samples": 8,
            "denoising_steps": 4,
            "target": "expectile",
            "aggregate": "lower_bound",
            "actor_mode": "distill",
            "temperature": {"beta": 0.01, "max_weight": 20.0},
            "critic": {"num_critics": 4, "hidden_dims": [256, 256], "loss": "bce"},
            # Constant, because online the policy has to follow what the critics learn; its EMA is what counts.
            "policy_optimizer": {"peak_lr": 5e-4, "schedule": "constant", "warmup_steps": 100, "weight_decay": 1e-4},
            "policy_ema_decay": 0.995,
            "critic_optimizer": {
                "peak_lr": 1e-3,
                "schedule": "cosine",
                "warmup_steps": 50,
                "decay_steps": 9_500,
                "end_lr": 5e-5,
            },
            # What the policy learns from untrained critics it does not unlearn in time.
            "critic_warmup_steps": 5_000,
            "target_update_rate": 0.01,
            "augment": False,
        },
        # The start policy keeps the units that it was trained with.
        "data": {"norm_stats": "checkpoint", "selection": {"success_fraction": 0.5}},
        "online": {"env_steps": 6_000, "utd_ratio": 0.2, "updates_per_scan": 8, "episodes_per_round": 32},
        "evaluation": {"every": 9_500, "envs": 64},
        "checkpoints": {"every": 500, "keep_period": 9_500},
        "from_scratch": False,
        "steps": 9_500,
    },
    base="demo_bc",
)

_add(
    "demo_state_bc",
    """As demo_bc, but of a tiny π₀ that observes the true state instead of two cameras: the quick variant.

    Command: pirl train demo_state_bc --exp-name demo_state/bc --data.repo-id runs/demo_state/data
    Needs: one CPU core, one minute; a dataset from `pirl demo --observation state` or `pirl collect`.
    Should reach: about 10 % success: its actions are as noisy as the expert's, and it recovers less often.
    """,
    {
        "model": {"preset": "tiny_state"},
        "agent": {"optimizer": {"decay_steps": 1_500}},
        "data": {"repo_id": "runs/demo_state/data", "robot": "tabletop_state"},
        "env": {"observation": "state"},
        "checkpoints": {"every": 1_500},
        "steps": 1_500,
    },
    base="demo_bc",
)

_add(
    "demo_state",
    """As demo, but from a policy that observes the true state instead of two cameras: the quick variant.

    Command: pirl train demo_state --exp-name demo_state/acrlpd --checkpoint runs/demo_state/bc_successes
    Needs: one CPU core, six minutes; a run of demo_state_bc on successes to start from.
    Should reach: offline 92 % with the policy alone (one run, 800 demonstrations), where BC on successes had 12 %.
    """,
    {
        "model": {"preset": "tiny_state"},
        "data": {"repo_id": "runs/demo_state/data", "robot": "tabletop_state"},
        "env": {"observation": "state"},
    },
    base="demo",
)

_add(
    "demo_ript_start",
    """The start policy of the RIPT demo: weak, cloned from a few demonstrations of mixed quality in Tabletop.

    Command: pirl train demo_ript_start --exp-name demo_ript/start --data.repo-id runs/demo_ript/data
    Needs: one CPU core, one minute; a dataset from `pirl demo ript` or `pirl collect`.
    Should reach: 30 to 50 % success: enough to learn from, with much left to gain.
    """,
    {
        "model": {"max_token_len": 16},  # a prompt, for guidance to extend
        "data": {"repo_id": "runs/demo_ript/data"},
        "env": {"max_steps": 50},  # RIPT learns from success alone: short episodes tell more about each decision
    },
    base="demo_state_bc",
)

_add(
    "demo_ript",
    """The RIPT demo: the weak policy improves by rollouts in Tabletop; the only feedback is success, and how soon.

    Command: pirl train demo_ript --exp-name demo_ript/ript --checkpoint runs/demo_ript/start
    Needs: one CPU core, five minutes; a run of demo_ript_start to start from.
    Should reach: clearly more than demo_ript_start, without any further demonstration.
    """,
    {
        "agent": {
            "learner": "ript",
            "optimizer": {**_cosine(5e-4, 1_500), "warmup_steps": 20, "end_lr": 2e-5},
            "ema_decay": 0.995,
            "loss_over": "real",
            "augment": False,
            "num_epochs": 4,
        },
        "data": {"repo_id": None, "norm_stats": "checkpoint"},
        "rollout": {"iterations": 16, "groups": 48, "attempts": 8, "budget": 120, "discount": 0.97},
        "evaluation": {"every": 5, "envs": 64},
        "checkpoints": {"every": 5},
        "from_scratch": False,
        "steps": 0,
        "batch_size": 64,
    },
    base="demo_ript_start",
)

_add(
    "debug",
    """The smallest run of everything: offline, online, validation, evaluation, checkpoints; a policy without cameras.

    Command: pirl train debug --exp-name try --data.repo-id DATA
    Needs: two CPU cores, about a minute, most of it compilation; DATA from
    pirl collect --env tabletop --env.observation state --policy expert --episodes 20 --out DATA
    Should reach: its end; it is too short to learn.
    """,
    {
        "model": {"preset": "tiny_state", "action_horizon": 4},
        "agent": {
            "learner": "acrlpd",
            "horizon_length": 4,
            "num_action_samples": 2,
            "denoising_steps": 2,
            "critic": {"num_critics": 2, "hidden_dims": [16]},
        },
        "data": {"robot": "tabletop_state", "validation_fraction": 0.2, "prefetch": 0},
        "env": {"id": "tabletop", "observation": "state", "max_steps": 20},
        "online": {"env_steps": 40, "utd_ratio": 0.1, "episodes_per_round": 2, "capacity": 1_000},
        "evaluation": {"every": 5, "episodes": 4, "execute_steps": 4, "envs": 4},
        "checkpoints": {"every": 5, "best_metric": "eval/success"},
        "logging": {"every": 1, "tensorboard": False},
        "from_scratch": True,
        "steps": 10,
        "batch_size": 8,
        "validation_every": 5,
        "validation_batches": 1,
    },
)

# --- full-size policies ------------------------------------------------------------------------------------------
# All of them train π₀ in full. π₀.₅, LoRA and BC are options, see docs/training.md.

_add(
    "_acrlpd",
    """ACRLPD on π₀.

    Ten small critics, combined by their lower bound, learn for a while before the policy does; then the weights of the
    chunks in the data are so sharp that about one chunk in ten counts.
    """,
    {
        "model": {"preset": "pi0_base"},
        "agent": {
            "learner": "acrlpd",
            "horizon_length": 10,
            "num_action_samples": 4,
            "target": "expectile",
            "aggregate": "lower_bound",
            "actor_mode": "awr",
            "temperature": {"beta": 0.01, "max_weight": 20.0},
            "critic": {"num_critics": 10, "hidden_dims": [512] * 4, "loss": "bce"},
            "critic_warmup_steps": 5_000,
        },
        "checkpoints": {"every": 1_000, "max_to_keep": 1, "keep_period": 5_000},
        "batch_size": 32,
    },
)

_add(
    "_ript",
    """RIPT on π₀.

    The learning rate is that at the end of OpenPI's own training: an iteration should change the policy only a little.
    """,
    {
        "model": {"preset": "pi0_base"},
        "agent": {"learner": "ript", "optimizer": {"peak_lr": 1e-5, "schedule": "constant", "warmup_steps": 20}},
        "data": {"norm_stats": "checkpoint"},
        "rollout": {"iterations": 100, "videos_every": 10},
        "evaluation": {"every": 10, "videos": 4},
        "checkpoints": {"every": 5, "best_metric": "eval/success"},
        "steps": 0,
        "batch_size": 32,
    },
)

_add(
    "aloha_fold",
    """Folding with the real ALOHA, offline from labeled episodes.

    ACRLPD with a critic horizon of 20 steps, ten small critics and four sampled chunks.
    Command: pirl train aloha_fold --exp-name fold --data.repo-id me/fold_box --checkpoint checkpoints/pi0_base
    Data: 14 dimensions and three cameras, with success labels (pirl data label).
    Needs: 52 GB for parameters, optimizer and EMA of 3.2 B in float32, 13 GB more for gradients: two GPUs of 80 GB with
    --fsdp-devices 2, better eight. LoRA (--model pi0_lora --agent.policy-ema-decay none): one GPU of 40 GB.
    Should reach: more successes than BC on the same data. Evaluated on the robot; there is no simulator.
    """,
    {
        "agent": {"horizon_length": 20},
        "data": {"robot": "aloha", "selection": {"success_fraction": 0.5}},
        "steps": 30_000,
    },
    base="_acrlpd",
)

_add(
    "rl_fold_box",
    """Box folding with the real ALOHA, offline from some hundred labeled episodes.

    As aloha_fold, but with two critics of 20 M parameters, and 5 % of the episodes held out for validation.
    Command: pirl train rl_fold_box --exp-name box --data.repo-id me/fold_box --checkpoint checkpoints/pi0_base
    Data: as aloha_fold, with successes and failures; larger critics need more data.
    Needs: GPUs as aloha_fold.
    Should reach: as aloha_fold.
    """,
    {
        "agent": {"critic": {"num_critics": 2, "hidden_dims": [1024] * 4, "query_width": 512, "num_heads": 8}},
        "data": {"validation_fraction": 0.05},
        "validation_every": 1_000,
    },
    base="aloha_fold",
)

_add(
    "aloha_sim",
    """Handing over a cube in simulated ALOHA: offline from LeRobot's demonstrations, with evaluations.

    The demonstrations contain no failures. More can be gained in the simulator: add --online.env-steps 50000.
    Command: pirl train aloha_sim --exp-name cube --checkpoint checkpoints/pi0_base
    Data: LeRobot's dataset, which is downloaded.
    Needs: pip install 'pirl[aloha,hub]'; GPUs as aloha_fold.
    Should reach: at least what BC reaches offline, more after the online phase.
    """,
    {
        "agent": {"horizon_length": 20},
        "data": {
            "repo_id": "lerobot/aloha_sim_transfer_cube_human",
            "robot": "aloha_sim",
            "outcomes": {"unlabeled": "success"},
        },
        "env": {"id": "aloha"},
        "evaluation": {"every": 5_000, "episodes": 50, "execute_steps": 10, "videos": 4},
        "checkpoints": {"best_metric": "eval/success"},
        "steps": 20_000,
    },
    base="_acrlpd",
)

_add(
    "aloha_ript",
    """Handing over a cube in simulated ALOHA by RIPT: eight rollouts per initial state, success as the only feedback.

    Command: pirl train aloha_ript --exp-name cube --checkpoint checkpoints/pi0_aloha_sim
    Needs: pip install 'pirl[aloha]'; a policy that succeeds sometimes, with its statistics (for π₀, OpenPI's fine-tune
    for this simulator; for π₀.₅ none is released: clone one first with aloha_sim and --agent bc); GPUs as aloha_fold; one
    core per environment, here or on a Ray cluster (--rollout.backend ray).
    Should reach: more than the start policy.
    """,
    {
        "data": {"robot": "aloha_sim"},
        "env": {"id": "aloha"},
        "evaluation": {"episodes": 50, "execute_steps": 10},
    },
    base="_ript",
)

_add(
    "droid",
    """Your own task on the DROID arm, with joint velocities, offline from labeled episodes.

    Command: pirl train droid --exp-name mine --data.repo-id me/droid_task --checkpoint checkpoints/pi0_droid
    Data: a LeRobot dataset with DROID's columns and success labels (pirl data label).
    Needs: GPUs as aloha_fold. With --data.norm-stats checkpoint, the policy keeps the DROID statistics it was trained
    with.
    Should reach: more successes than BC on the same data. Evaluated on the robot.
    """,
    {"model": {"preset": "pi0_droid"}, "data": {"robot": "droid"}, "steps": 20_000},
    base="_acrlpd",
)

_add(
    "libero",
    """LIBERO's tasks: offline from OpenPI's conversion of its demonstrations, with evaluations.

    The demonstrations contain no failures. More can be gained in the simulator: add --online.env-steps 100000.
    Command: pirl train libero --exp-name goal --checkpoint checkpoints/pi0_base --env.suite libero_goal
    Data: OpenPI's conversion, which is downloaded.
    Needs: pip install 'pirl[libero,hub]'; GPUs as aloha_fold.
    Should reach: at least what BC reaches offline, more after the online phase.
    """,
    {
        "data": {
            "repo_id": "physical-intelligence/libero",
            "robot": "libero_delta",  # OpenPI's π₀.₅ for LIBERO takes absolute actions: libero
            "outcomes": {"unlabeled": "success"},
        },
        "env": {"id": "libero", "suite": "libero_goal"},
        "evaluation": {"every": 5_000, "videos": 4},
        "checkpoints": {"best_metric": "eval/success"},
        "steps": 30_000,
    },
    base="_acrlpd",
)

_add(
    "libero_ript",
    """LIBERO's tasks by RIPT: eight rollouts per initial state, success as the only feedback, no demonstrations.

    Command: pirl train libero_ript --exp-name goal --checkpoint checkpoints/pi0_libero --env.suite libero_goal
    Needs: pip install 'pirl[libero]'; a policy that succeeds sometimes (OpenPI's fine-tune for LIBERO), with its
    statistics; GPUs as aloha_fold; one core per environment, here or on a Ray cluster (--rollout.backend ray).
    Should reach: more than the start policy on the tasks it trains on.
    """,
    {
        "data": {"robot": "libero_delta"},
        "env": {"id": "libero", "suite": "libero_goal"},
        "rollout": {"curriculum": {"initial_states": 50}},  # those of the benchmark, for each task
    },
    base="_ript",
)
