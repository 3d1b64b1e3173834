"""Presets, their consistency, and the full-size parameter trees."""

import dataclasses
import json

import pytest

from builders import MICRO
from golden import content, needs_golden
from pirl.errors import ConfigError
from pirl.models import ExpertConfig, LoraConfig, Pi0Config, expected_parameters, get_model_config, list_model_configs

SPECS = ["pi0_base", "pi05_base", "pi0_lora", "pi05_lora", "pi0_lora_paligemma_only", "pi0_lora_action_expert_only"]


@needs_golden
@pytest.mark.parametrize("name", SPECS)
def test_full_size_parameters_and_freeze_rule_equal_openpi(name):
    spec = content("spec", f"{name}.json")
    config = get_model_config(name)
    ours = expected_parameters(config)
    assert {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in ours.items()} == spec["params"]
    assert sum(leaf.size for leaf in ours.values()) == spec["total_params"]
    described = spec["config"]
    for field in ("dtype", "action_dim", "action_horizon", "max_token_len", "pi05", "discrete_state_input"):
        assert getattr(config, field) == described[field]
    assert sorted(path for path in ours if config.is_frozen(path)) == sorted(spec["freeze_filter_frozen_keys"])
    trainable = sum(leaf.size for path, leaf in ours.items() if not config.is_frozen(path))
    assert trainable == spec["freeze_filter_trainable_count"]


@needs_golden
@pytest.mark.parametrize("name", ["pi0_dummy_real_siglip", "pi05_dummy_real_siglip"])
def test_small_experts_on_the_real_vision_tower_equal_openpi(name):
    spec = content("spec", f"{name}.json")
    dummy = ExpertConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)
    base = get_model_config("pi05_base" if spec["config"]["pi05"] else "pi0_base")
    ours = expected_parameters(dataclasses.replace(base, language=dummy, action_expert=dummy))
    assert {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in ours.items()} == spec["params"]


def test_full_size_models_have_the_known_number_of_parameters():
    sizes = {
        name: sum(leaf.size for leaf in expected_parameters(get_model_config(name)).values()) for name in SPECS[:4]
    }
    assert sizes == {
        "pi0_base": 3_238_048_528,
        "pi05_base": 3_353_433_872,
        "pi0_lora": 3_288_036_112,
        "pi05_lora": 3_403_421_456,
    }


def test_a_description_of_every_preset_survives_json():
    for config in map(get_model_config, list_model_configs()):
        assert Pi0Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean pi05_base"):
        get_model_config("pi05base")


CONTRADICTIONS = [
    (lambda: dataclasses.replace(MICRO, action_expert=dataclasses.replace(MICRO.action_expert, depth=3)), "depth"),
    (lambda: dataclasses.replace(MICRO, discrete_state_input=True), "pi05"),
    (lambda: dataclasses.replace(MICRO, action_horizon=0), "action_horizon = 0 should be at least 1"),
    (lambda: dataclasses.replace(MICRO, dtype="float8"), "bfloat16.*float8"),
    (lambda: dataclasses.replace(MICRO, pi05=True, cameras=(), max_token_len=0), "sees nothing"),
    (lambda: dataclasses.replace(MICRO, image_resolution=(2, 8)), "below a patch"),
    (lambda: dataclasses.replace(MICRO, cameras=("a", "a")), "twice"),
    (lambda: LoraConfig(rank=0), "rank = 0 should be at least 1"),
    (lambda: dataclasses.replace(MICRO.action_expert, num_kv_heads=3), "multiple"),
    (lambda: dataclasses.replace(MICRO.vision, num_heads=3), "multiple"),
]


@pytest.mark.usefixtures("unchecked_signatures")
def test_contradictions_are_refused():
    for make, message in CONTRADICTIONS:
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_broken_description_is_refused_with_a_reason():
    good = MICRO.to_dict()
    for broken in (
        {"vision": 3},
        {**good, "language": {**good["language"], "hight": 3}},
        {key: value for key, value in good.items() if key != "language"},
        {**good, "pi05": "yes"},
    ):
        with pytest.raises(ConfigError, match="model description"):
            Pi0Config.from_dict(broken)
