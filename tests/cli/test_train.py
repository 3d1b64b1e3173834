"""`pirl train`: from words to a checked configuration, and what is said when they do not make one."""

import sys
from types import SimpleNamespace

import jax
import pytest
import yaml

from pirl.config import debug_config, format_config, get_config, load_config, override_config


@pytest.fixture
def trained(monkeypatch):
    """What the trainer is called with; it does nothing, successfully."""
    calls = []

    def record(config, **rest):
        calls.append((config, rest))
        return 0

    monkeypatch.setitem(sys.modules, "pirl.training.train", SimpleNamespace(train=record))
    monkeypatch.setitem(sys.modules, "pirl.training.dry_run", SimpleNamespace(dry_run=record))
    return calls


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    return "data"


def test_options_go_over_the_file_and_the_file_over_the_preset(call, trained, data, tmp_path):
    (tmp_path / "mine.yaml").write_text("steps: 50\nbatch_size: 16\nlogging: {every: 7}\n")
    code, _, err = call(
        "train debug --exp-name a/b --config-file mine.yaml --data.repo-id data --batch-size=24 "
        "--agent.num-action-samples 8 --agent.critic.hidden-dims 4,4 --env.precision 0.03"
    )
    assert (code, err) == (0, "")
    ((config, rest),) = trained
    assert rest == {"exp_name": "a/b", "resume": False, "overwrite": False}
    changes = {
        "steps": 50,
        "batch_size": 24,
        "logging.every": 7,
        "data.repo_id": "data",
        "agent.num_action_samples": 8,
        "agent.critic.hidden_dims": [4, 4],
        "env.precision": 0.03,
    }
    assert config == override_config(get_config("debug"), changes)


def test_what_a_run_wrote_down_runs_again(call, trained, data, tmp_path):
    config = override_config(get_config("debug"), {"data.repo_id": data, "seed": 5, "env.max_steps": 33})
    (tmp_path / "config.yaml").write_text(format_config(config))
    for words in ((), ("debug",)):
        assert call("train", *words, "--config-file", "config.yaml", "--exp-name", "again")[0] == 0
        assert trained.pop()[0] == config == load_config(tmp_path / "config.yaml")
    (tmp_path / "named.yaml").write_text("preset: debug\ndata: {repo_id: data}\n")
    assert call("train", "--config-file", "named.yaml", "--exp-name", "x", "--seed", 5, "--env.max-steps", 33)[0] == 0
    assert trained.pop()[0] == config


def test_switches_words_and_groups_stand_anywhere(call, trained, data):
    code, _, err = call(
        "train --from-scratch demo_bc --env none --exp-name x --model tiny_state --agent bc --overwrite "
        "--data.robot tabletop_state --logging.tensorboard false --agent.augment --data.repo-id data"
    )
    assert (code, err) == (0, "")
    ((config, rest),) = trained
    assert rest["overwrite"]
    assert (config.name, config.from_scratch, config.env) == ("demo_bc", True, None)
    assert (config.model.cameras, config.agent.augment, config.logging.tensorboard) == ((), True, False)


def test_debugging_is_small_and_options_still_have_the_last_word(call, trained, data):
    assert call("train", "demo_bc", "--debug", "--exp-name", "x", "--data.repo-id", data, "--steps", 12)[0] == 0
    given = {"data.repo_id": data}
    expected = override_config(debug_config(override_config(get_config("demo_bc"), given)), {"steps": 12})
    assert trained[0][0] == expected
    assert expected.batch_size < get_config("demo_bc").batch_size


def test_a_dry_run_needs_no_name(call, trained, data):
    assert call("train", "debug", "--dry-run", "--data.repo-id", data)[0] == 0
    ((config, rest),) = trained
    assert config == override_config(get_config("debug"), {"data.repo_id": data})
    assert rest == {}


def test_a_run_that_is_not_there_cannot_be_resumed(call, tmp_path):
    (tmp_path / "elsewhere" / "mine" / "checkpoints" / "5").mkdir(parents=True)
    code, _, err = call("train", "--exp-name", "mien", "--resume", "--runs-dir", "elsewhere")
    assert code == 2
    assert "there is no run to resume in elsewhere/mien: config.yaml does not exist. Did you mean mine? Check" in err


def test_help_shows_every_field_with_its_value_in_the_preset(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    code, out, _ = call("train", "libero", "--help")
    assert code == 0
    shown = {line.split()[0]: line for line in out.splitlines() if line.startswith("  --")}

    def flags(node, prefix="--"):
        for name, value in node.items():
            flag = f"{prefix}{name.replace('_', '-')}"
            yield from flags(value, f"{flag}.") if isinstance(value, dict) and value else [flag]

    plain = yaml.safe_load(format_config(get_config("libero")))
    plain["model"]["language"] |= {"attention_lora": {"rank": None}, "mlp_lora": {"rank": None}}
    plain["model"]["action_expert"] = plain["model"]["language"]
    assert set(flags(plain)) <= set(shown)
    assert {"--exp-name", "--config-file", "--dry-run", "--debug", "--resume", "--overwrite", "--model.preset"} <= set(
        shown
    )
    assert "Offline updates" in shown["--steps"]
    assert shown["--steps"].endswith(f"(default: {get_config('libero').steps})")
    assert "libero_goal" in shown["--env.suite"]
    _, out, _ = call("train", "libero", "--steps", 77, "--agent.learner", "bc", "-h")
    assert "(default: 77)" in out
    assert "--agent.ema-decay" in out
    assert "--agent.horizon-length" not in out


def test_help_without_a_preset_says_how_to_get_more(call):
    code, out, _ = call("train", "--help")
    assert code == 0
    assert "pirl train PRESET --help" in out
    assert "--dry-run" in out


def test_a_run_resumes_from_its_configuration_wherever_it_was_begun(call, trained, data, tmp_path):
    begun = override_config(get_config("debug"), {"data.repo_id": data, "runs_dir": str(tmp_path / "before")})
    for runs in ("before", "runs", "elsewhere"):  # begun there, copied here
        (tmp_path / runs / "x").mkdir(parents=True)
        (tmp_path / runs / "x" / "config.yaml").write_text(format_config(begun))
    for options, runs in (((), "runs"), (("--runs-dir", "elsewhere"), "elsewhere")):
        assert call("train", "--exp-name", "x", "--resume", *options) == (0, "", "")
        config, rest = trained.pop()
        assert (config, rest["resume"]) == (override_config(begun, {"runs_dir": runs}), True)


def test_a_device_without_room_is_answered_with_what_needs_less(call, data, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.5GiB.\nAllocator"
        )

    monkeypatch.setitem(sys.modules, "pirl.training.train", SimpleNamespace(train=fail))
    code, _, err = call("train", "debug", "--exp-name", "x", "--data.repo-id", data)
    assert code == 1
    assert "error: a device has not enough memory: RESOURCE_EXHAUSTED: Out of memory while trying" in err
    assert "--fsdp-devices" in err
    assert "Allocator" not in err
