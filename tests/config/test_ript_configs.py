"""RIPT's configurations: what cannot work is refused with a remedy, and the files in configs/ do what they say."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from pirl.agents.config import RIPTConfig
from pirl.cli.main import _parse, main
from pirl.config import check_config, debug_config, get_config, list_configs, load_config, override_config
from pirl.config.parts import RolloutConfig
from pirl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
PRESETS = ["demo_ript", *(name for name in list_configs() if re.match(r"(libero|aloha)_ript", name))]


@pytest.fixture
def sound(tmp_path):
    """RIPT's demo with a policy to begin with."""
    (tmp_path / "params").mkdir()
    return override_config(get_config("demo_ript"), {"checkpoint": str(tmp_path)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 10}, "10 offline updates"),
        ({"online.env_steps": 10}, "online.env_steps is ACRLPD's"),
        ({"rollout.iterations": 0}, "nothing would be learned: set --rollout.iterations."),
        ({"rollout.iterations": -1}, "rollout.iterations = -1 should be 0 or more"),
        ({"rollout.attempts": 1}, "rollout.attempts = 1 should be 2 or more"),
        ({"rollout.groups": 0}, "rollout.groups = 0 should be 1 or more"),
        ({"rollout.max_barren": 0}, "rollout.max_barren = 0 should be 1 or more"),
        ({"rollout.capacity": 0}, "rollout.capacity = 0 should be 1 or more"),
        ({"rollout.videos_every": -1}, "rollout.videos_every = -1 should be 0 or more"),
        ({"rollout.budget": 47}, "rollout.budget = 47 initial states can never give rollout.groups = 48 groups"),
        ({"rollout.discount": 0.0}, "rollout.discount = 0.0 should be above 0, and 1 at most."),
        ({"rollout.discount": 1.1}, "rollout.discount = 1.1 should be above 0, and 1 at most."),
        ({"rollout.seed": 0}, "rollout.seed and evaluation.seed are both 0"),
        (
            {"evaluation.seed": 1001},
            "the policy would practise on what it is measured by. Set --evaluation.seed to less",
        ),
        ({"rollout.ray_address": "auto"}, "rollout.ray_address = auto is for --rollout.backend ray"),
        ({"env": None}, "evaluation and rollouts need an environment: name one with --env.id"),
        (
            {"env": None, "evaluation.every": 0},
            "rollouts need an environment: name one with --env.id",
        ),
        ({"agent.weighting": "guidance", "model.max_token_len": 0}, "this model reads none"),
        ({"agent.batch_by": "groups", "batch_size": 36}, "batch_size = 36 should be a multiple of rollout.attempts"),
        ({"agent.bc_loss_weight": 0.5}, "agent.bc_loss_weight = 0.5 mixes demonstrations in: name a dataset"),
        ({"data.norm_stats": "dataset"}, "--data.norm-stats checkpoint has to say"),
        ({"checkpoint": None}, "a policy to begin with is missing"),
        ({"health.max_drift": 0.0}, "health.max_drift = 0.0 should be above 0, or none."),
        ({"health.min_success_ratio": 1.0}, "health.min_success_ratio = 1.0 is a part of what was reached before"),
        ({"health.min_speed_ratio": 1.5}, "health.min_speed_ratio = 1.5 is a part of what was reached before"),
        ({"checkpoints.max_to_keep": 1}, "goes back to a checkpoint before the newest one"),
        ({"health.max_rollbacks": -1}, "health.max_rollbacks = -1 should be 0 or more"),
        ({"stopping.metric": "online/success"}, "Known: eval/success"),
        ({"stopping.metric": "rollout/succes"}, "Did you mean rollout/success?"),
        ({"stopping.metric": "rollout/success_after", "rollout.recheck": False}, "set --rollout.recheck."),
        ({"stopping.metric": "eval/success", "evaluation.every": 0}, "set --evaluation.every"),
        ({"checkpoints.best_metric": "eval/success", "checkpoints.every": 2}, "evaluation.every = 5 should be a mul"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(sound, changes, message):
    check_config(sound, device_count=1)
    with pytest.raises(ConfigError) as refused:
        check_config(override_config(sound, changes), device_count=1)
    assert message in str(refused.value)


def test_iterations_are_for_ript_alone(tmp_path):
    config = override_config(get_config("debug"), {"data.repo_id": str(tmp_path), "rollout.iterations": 3})
    with pytest.raises(ConfigError, match="rollout.iterations = 3 are RIPT's: choose --agent.learner ript"):
        check_config(config, device_count=8)


def test_what_is_wrong_with_the_learner_or_the_curriculum_is_said_when_it_is_given(sound):
    for changes, message in (
        ({"agent.cond_dropout": 1.5}, "cond_dropout = 1.5 should be in [0, 1]"),
        ({"agent.num_epochs": 0}, "num_epochs = 0 should be at least 1"),
        ({"rollout.curriculum.floor": 0.0}, "curriculum.floor = 0.0 should be more than 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            override_config(sound, changes)


@pytest.mark.parametrize("metric", ["rollout/success", "rollout/success_after", "rollout/drift", "eval/success"])
def test_what_iterations_measure_can_end_a_run(sound, metric):
    check_config(override_config(sound, {"stopping.metric": metric}), device_count=1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_ript_from_a_policy_without_demonstrations(name, tmp_path):
    (tmp_path / "params").mkdir()
    config = override_config(get_config(name), {"checkpoint": str(tmp_path)})
    check_config(config, device_count=8)
    assert isinstance(config.agent, RIPTConfig)
    assert (config.steps, config.data.repo_id, config.data.norm_stats) == (0, None, "checkpoint")
    assert config.name == name
    small = debug_config(config)
    check_config(small, device_count=8)
    assert small.rollout.iterations == 2
    assert small.rollout.groups * small.rollout.attempts == 8
    assert (small.evaluation.every, small.checkpoints.every) == (1, 1)


def test_there_are_presets_for_both_simulators_and_both_models_with_and_without_lora():
    wanted = {
        f"{robot}_ript{pi}{lora}" for robot in ("libero", "aloha") for pi in ("", "_pi05") for lora in ("", "_lora")
    }
    assert set(PRESETS) == {"demo_ript", *wanted}


def test_debugging_checks_groups_in_a_batch_too(sound):
    config = override_config(sound, {"agent.batch_by": "groups", "rollout.attempts": 16})
    check_config(config, device_count=1)
    check_config(debug_config(config), device_count=1)


# --- the files in configs/ --------------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A directory with the files, and what their commands need: policies to begin with, and data."""
    for place in ("checkpoints/pi0_libero", "runs/start", "runs/demo_ript/start"):
        (tmp_path / place / "params").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(file):
    return [shlex.split(line) for line in re.findall(r"^#   pirl (.*)$", file.read_text(), flags=re.MULTILINE)]


def test_there_are_such_files():
    assert {file.stem for file in FILES} >= {"quick_test", "full_test", "standard", "benchmark", "distributed"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_works_by_the_command_in_it(file, beside):
    (*before, last) = commands(file)
    for command in before:
        parsed = _parse(command)
        if command[0] == "train":
            check_config(parsed.resolve(), device_count=8)
    assert f"configs/{file.name}" in last
    config = _parse(last).resolve()
    check_config(config, device_count=8)
    assert isinstance(config.agent, RIPTConfig)
    # And it is what the file says, apart from what the command adds.
    plain = load_config(file)
    kept = ("checkpoint", "data", "env", "seed", "rollout")
    assert replace(config, **{name: getattr(plain, name) for name in kept}) == plain


def test_the_quick_test_is_quick_and_the_full_one_leaves_nothing_out():
    quick, full = load_config(ROOT / "configs/quick_test.yaml"), load_config(ROOT / "configs/full_test.yaml")
    assert quick.rollout.iterations * quick.rollout.budget * quick.rollout.attempts <= 200
    assert full.rollout.save_dataset
    assert full.rollout.videos_every
    assert full.agent.bc_loss_weight
    assert full.checkpoints.best_metric == full.stopping.metric == "eval/success"
    assert load_config(ROOT / "configs/distributed.yaml").rollout.backend == "ray"


def test_help_shows_every_field_of_rollouts(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "demo_ript", "--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    for name in RolloutConfig.__dataclass_fields__:
        assert f"--rollout.{name.replace('_', '-')}" in shown, name
