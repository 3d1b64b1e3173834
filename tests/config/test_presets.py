"""Every preset says what it is for, and its numbers are those that its users were promised."""

import dataclasses
import re
import shlex

import pytest

from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.cli.main import _parse
from pirl.config import check_config, debug_config, get_config, get_preset, list_configs, override_config
from pirl.data import open_dataset, read_outcomes
from pirl.data.robots import load_robot
from pirl.errors import ConfigError, DataError
from pirl.models.critic import LARGE_CRITICS
from sample_datasets import build, edit_table

FULL_SIZE = ("aloha_fold", "rl_fold_box", "aloha_sim", "droid", "libero")


def test_every_robot_has_its_variants_of_model_training_and_learner():
    names = {
        f"{name}{pi05}{lora}{bc}"
        for name in FULL_SIZE
        for pi05 in ("", "_pi05")
        for lora in ("", "_lora")
        for bc in ("", "_bc")
    }
    practising = {
        f"{name}_ript{pi05}{lora}" for name in ("libero", "aloha") for pi05 in ("", "_pi05") for lora in ("", "_lora")
    }
    demos = {"demo", "demo_bc", "demo_state", "demo_state_bc", "demo_ript", "demo_ript_start", "debug"}
    assert set(list_configs()) == names | practising | demos
    for name in practising:
        config = get_config(name)
        assert config.model.language.has_lora == (config.agent.ema_decay is None) == ("_lora" in name)
        assert config.model.pi05 == ("_pi05" in name)
        assert config.goes_by_iterations
        assert config.practises
    for name in names:
        config = get_config(name)
        assert config.name == name
        assert config.model.pi05 == ("_pi05" in name)
        assert config.model.language.has_lora == config.model.action_expert.has_lora == ("_lora" in name)
        assert type(config.agent) is (BCConfig if name.endswith("_bc") else ACRLPDConfig)
        average = config.agent.ema_decay if isinstance(config.agent, BCConfig) else config.agent.policy_ema_decay
        assert (average is None) == ("_lora" in name), "OpenPI averages nothing where it trains LoRA"
        assert not config.from_scratch
        assert config.checkpoint is None


def test_folding_is_as_promised():
    config = get_config("aloha_fold")
    assert load_robot(config.data.robot).action_dim == 14
    assert config.agent.horizon_length == 20
    assert config.agent.critic.num_critics == 10
    assert config.agent.num_action_samples == 4
    assert get_config("rl_fold_box").agent.critic == dataclasses.replace(LARGE_CRITICS, loss="bce")
    assert get_config("aloha_fold_bc").agent == BCConfig(), "whose defaults are OpenPI's"


@pytest.mark.parametrize("name", list_configs())
def test_every_preset_can_work_as_it_is_and_for_debugging(name, tmp_path):
    (tmp_path / "params").mkdir()
    given = {"data.repo_id": str(tmp_path)}
    if not get_config(name).from_scratch:
        given["checkpoint"] = str(tmp_path)
    config = override_config(get_config(name), given)
    check_config(config, device_count=8)
    small = debug_config(config)
    check_config(small, device_count=8)
    assert small.batch_size == 8
    assert small.steps == (0 if config.goes_by_iterations else 10)
    assert small.rollout.iterations == (2 if config.goes_by_iterations else 0)
    assert (small.model, small.env, small.data) == (config.model, config.env, config.data)


@pytest.mark.parametrize("name", list_configs())
def test_every_preset_says_what_for_by_which_command_on_what_and_how_well(name):
    preset = get_preset(name)
    assert preset.summary == preset.about.splitlines()[0]
    assert len(preset.summary) <= 120
    for word in ("Command", "Needs", "Should reach"):
        assert re.search(rf"^{word}: \w", preset.about, flags=re.MULTILINE), word
    (command,) = re.findall(r"^Command: pirl (.*)$", preset.about, flags=re.MULTILINE)
    assert _parse(shlex.split(command)).resolve().name == name


@pytest.mark.parametrize(
    "name", [name for name in list_configs() if name.endswith("_bc") and not name.startswith("demo")]
)
def test_a_baseline_is_said_to_need_the_machine_of_its_rl_preset_and_nothing_of_rl(name):
    about, learner = get_preset(name).about, get_preset(name.removesuffix("_bc")).about
    assert not re.search(r"(?<!no )critics|ACRLPD|pirl data label|failures|online", about)
    assert "Data: as" in about
    (needs,) = re.findall(r"^Needs: (.*?)^Should reach", about, flags=re.MULTILINE | re.DOTALL)
    assert f"Needs: {needs}" in learner


def test_a_baseline_needs_no_outcomes(tmp_path):
    """Rewards that do not tell of success are as good as none to what does not look at them."""
    built = build(tmp_path, cameras="none", rewards="dense")
    for episode in built.episodes:
        edit_table(episode.data_file, lambda table: table.drop_columns(["next.success"]))
    dataset = open_dataset(built.root)
    with pytest.raises(DataError, match="nothing about success"):
        read_outcomes(dataset, get_config("droid").data.outcomes)
    assert read_outcomes(dataset, get_config("droid_bc").data.outcomes).success.tolist() == [-1, -1, -1]


def test_a_policy_to_begin_with_that_openpi_has_not_released_is_made_first():
    for name in ("aloha_ript_pi05", "aloha_ript_pi05_lora"):
        about = get_preset(name).about
        assert "--checkpoint runs/cube_bc" in about
        assert "aloha_sim_pi05_bc --exp-name cube_bc" in about
    assert "--checkpoint checkpoints/pi0_aloha_sim" in get_preset("aloha_ript").about
    assert not any("pi05_aloha_sim" in get_preset(name).about for name in list_configs())


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean aloha_fold_pi05_lora?"):
        get_config("aloha_fold_pi5_lora")
