"""Configurations survive YAML and dotted overrides. What is refused stands in tests/cli/test_hostile.py."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import (
    DataConfig,
    RLTrainConfig,
    format_config,
    get_config,
    list_configs,
    load_config,
    override_config,
    parse_config,
)
from pirl.config.io import list_fields
from pirl.data.prepare import Selection
from pirl.data.robots import get_robot, load_robot
from pirl.envs.registry import EnvConfig
from pirl.errors import ConfigError
from pirl.models.config import get_model_config

FIELDS = {name: hint for name, hint in list_fields() if not name.startswith(("env.", "model.preset", "agent.learner"))}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as YAML holds them, or None where the type is a group that may be absent."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple:
        size = (0, 3) if parts[-1] is ... else (len(parts),) * 2
        return st.lists(values(parts[0]), min_size=size[0], max_size=size[1])
    if origin is not None and len(parts) == 2 and parts[0] is str:
        return st.dictionaries(st.text(), values(parts[1]), max_size=3)
    if parts:
        return st.one_of(values(part) for part in parts)
    return {
        int: st.integers(1, 10**7),
        float: st.floats(0, 1e6) | st.integers(0, 3),
        bool: st.booleans(),
        str: st.text(),
        Path: st.text("abc/.0", min_size=1),
        type(None): st.none(),
    }[hint]


@st.composite
def overrides(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=6, unique=True))
    return {name: draw(values(FIELDS[name])) for name in names}


def apply(preset: str, changes: dict[str, Any]) -> RLTrainConfig:
    """What does not fit together, and what belongs to another learner or needs LoRA, is not for these tests."""
    try:
        return override_config(get_config(preset), changes)
    except ConfigError:
        assume(False)
        raise


def test_every_preset_reads_back_from_yaml():
    for name in list_configs():
        config = get_config(name)
        text = format_config(config)
        assert parse_config(text) == config
        assert parse_config(text, "debug") == config, "a complete file leaves nothing of the preset it is laid over"
        assert yaml.safe_load(text)["name"] == name, "and other programs can read it"


@given(st.sampled_from(list_configs()), overrides())
@settings(max_examples=40)
def test_any_configuration_reads_back_from_yaml(preset, changes):
    config = apply(preset, changes)
    again = parse_config(format_config(config))
    assert again == config


# But for NUL, which no name can hold; it is refused.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(overrides())
@settings(max_examples=50)
def test_texts_of_a_command_line_mean_what_yaml_means(changes):
    plain = {name: value for name, value in changes.items() if isinstance(value, int | float) and value is not None}
    config = apply("debug", plain)
    texts = {name: str(value) for name, value in plain.items()}
    assert override_config(get_config("debug"), texts, texts=True) == config


@given(TEXT, TEXT, st.lists(TEXT, max_size=3))
@settings(max_examples=30)
def test_any_text_survives_a_file(tmp_path_factory, project, repo_id, tasks):
    config = get_config("demo")
    selection = Selection(tasks=tuple(tasks), task_weights=dict.fromkeys(tasks, 2.0))
    config = replace(
        config,
        logging=replace(config.logging, project=project),
        data=DataConfig(repo_id=repo_id, robot="tabletop", selection=selection),
    )
    file = tmp_path_factory.mktemp("texts") / "config.yaml"
    file.write_text(format_config(config))
    assert load_config(file) == config


YAML_MEANS = [
    ("logging: {wandb: off}", "logging.wandb", "off"),
    ("agent: {critic_optimizer: {peak_lr: 1e-4}}", "agent.critic_optimizer.peak_lr", 1e-4),
    ("steps: 1e6", "steps", 1_000_000),
    ("steps: 1_000", "steps", 1_000),
    ("data: {repo_id: 2026-01-01}", "data.repo_id", "2026-01-01"),
    ("checkpoints: {keep_period: null}", "checkpoints.keep_period", None),
    ("data: {repo_id: '123'}", "data.repo_id", "123"),
    ("data: {asset_id: none}", "data.asset_id", "none"),
    ("agent: {critic: {hidden_dims: [8, 8]}}", "agent.critic.hidden_dims", (8, 8)),
    ("env: {precision: 0.03}", "env.options", {"observation": "state", "precision": 0.03}),
    ("env: {objects: '1'}", "env.options", {"observation": "state", "objects": 1}),
    ("env: null", "env", None),
    ("model: {action_horizon: 12}", "model.action_horizon", 12),
    ("health: {loss_limit: .inf}", "health.loss_limit", float("inf")),
    ("runs_dir: elsewhere", "runs_dir", Path("elsewhere")),
]
TEXT_MEANS = [
    ("8,8", "agent.critic.hidden_dims", (8, 8)),
    ("[8, 8]", "agent.critic.hidden_dims", (8, 8)),
    ("16", "agent.critic.hidden_dims", (16,)),
    ("none", "data.repo_id", None),
    ("1e6", "steps", 1_000_000),
    ("yes", "agent.augment", True),
    ("['a, b', c]", "data.selection.tasks", ("a, b", "c")),
    ("{a task: 2}", "data.selection.task_weights", {"a task": 2.0}),
    ("none", "env", None),
    ("none", "env.id", None),
    ("none", "data.frame_compression", "none"),
]


def field_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_yaml_and_options_mean_what_people_mean():
    for text, field, value in YAML_MEANS:
        found = field_of(parse_config(f"preset: demo_state\n{text}"), field)
        assert (found, type(found)) == (value, type(value)), text
    for text, field, value in TEXT_MEANS:
        config = override_config(get_config("demo"), {field: text}, texts=True)
        assert field_of(config, field.replace("env.id", "env")) == value, text


def test_a_model_is_a_preset_with_changes_or_a_whole_description():
    tiny = get_model_config("tiny")
    config = parse_config("preset: demo\nmodel: {preset: tiny_lora, action_horizon: 7}")
    assert config.model == replace(get_model_config("tiny_lora"), action_horizon=7)
    config = parse_config("preset: demo\nmodel: {language: {attention_lora: {rank: 3}}}")
    assert config.model.language.attention_lora.rank == 3
    assert config.model.action_expert == tiny.action_expert
    assert parse_config("preset: debug\nmodel: {preset: tiny}").model == tiny


def test_another_learner_begins_with_its_own_defaults():
    config = parse_config("preset: demo\nagent: {learner: bc, ema_decay: 0.5}")
    assert config.agent == BCConfig(ema_decay=0.5)
    config = parse_config("preset: demo_bc\nagent: {learner: acrlpd, critic_optimizer: {b1: 0.5}}")
    assert config.agent == ACRLPDConfig(critic_optimizer=replace(ACRLPDConfig().critic_optimizer, b1=0.5))


def test_another_environment_begins_without_the_options_of_the_first():
    config = parse_config("preset: debug\nenv: {id: libero, suite: libero_10}")
    assert config.env == EnvConfig("libero", options={"suite": "libero_10"})
    config = parse_config("preset: debug\nenv: {max_steps: 30}")
    assert config.env.options == {"observation": "state", "max_steps": 30}


def test_a_file_without_preset_needs_only_what_has_no_default():
    config = parse_config("name: mine\nmodel: {preset: tiny}\nagent: {learner: bc}")
    assert config == RLTrainConfig("mine", get_model_config("tiny"), BCConfig())


@given(st.text(alphabet=st.characters(codec="utf-8")) | st.text("[]{}:,&*!|>-'\"# \nabc1.", max_size=60))
@settings(max_examples=200)
def test_no_text_breaks_the_reader(text):
    try:
        parse_config(text, "demo")
    except ConfigError as error:
        assert str(error)


ADAPTER = """
from pirl.data.robots import get_robot
from pirl.envs import EnvAdapter

class Pole(EnvAdapter):
    robot = get_robot("libero")

class Other(Pole):
    pass
"""


def test_an_adapter_brings_its_robot_unless_another_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "robot_of_pole.py").write_text(ADAPTER)
    own = {"env.id": "CartPole-v1", "env.adapter": "robot_of_pole.py:Pole"}
    config = override_config(get_config("demo_bc"), own)
    assert config.data.robot == "robot_of_pole.py:Pole"
    assert load_robot(config.data.robot) is get_robot("libero")
    assert parse_config(format_config(config)) == config
    assert parse_config("preset: demo_bc\nenv: {id: CartPole-v1, adapter: robot_of_pole.py:Pole}") == config
    # Who says another has it, and keeps it; with the environment, its robot goes.
    assert override_config(get_config("demo_bc"), {**own, "data.robot": "tabletop"}).data.robot == "tabletop"
    assert override_config(config, {"steps": 3}).data.robot == config.data.robot
    assert override_config(config, {"env.adapter": "robot_of_pole.py:Other"}).data.robot == "robot_of_pole.py:Other"
    described = override_config(get_config("demo_bc"), {"data.robot": "mine.json"})
    assert override_config(described, own).data.robot == "mine.json"
    del sys.modules["robot_of_pole"]
