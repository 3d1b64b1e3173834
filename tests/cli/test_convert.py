"""`pirl convert` as a user meets it: what it prints, what it writes, how it ends."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from builders import MICRO, MICRO_LORA, random_model, random_parameters
from pirl.interop.checkpoint import load_policy, open_checkpoint, save_checkpoint, save_policy
from pirl.interop.norm_stats import NormStats
from pirl.models import LoraConfig, create_model, get_model_config

STATS = {"arm": {"state": NormStats(np.zeros(5), np.ones(5)), "actions": NormStats(np.zeros(5), np.ones(5))}}


@pytest.fixture
def checkpoint(tmp_path):
    return save_policy(tmp_path / "policy", random_model(MICRO), norm_stats=STATS, metadata={"step": 3})


def test_inspection_shows_tree_counts_and_statistics(call, checkpoint):
    code, out, _ = call("convert", checkpoint)
    assert code == 0
    assert "PaliGemma/llm/layers/attn/q_einsum/w" in out
    assert "2×4×16×6" in out
    total = sum(value.size for value in random_parameters(MICRO).values())
    assert f"{total:,} in {len(random_parameters(MICRO))} arrays" in out
    assert "arm: state [5], actions [5]" in out
    code, out, _ = call("convert", checkpoint, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["parameters"] == sum(summary["groups"].values()) == sum(summary["dtypes"].values()) == total
    assert set(summary["tree"]) == set(random_parameters(MICRO))


def test_of_a_run_the_newest_policy_is_meant_and_of_several_runs_one_has_to_be_named(call, tmp_path):
    run = tmp_path / "runs" / "mine"
    policies = run / "checkpoints"
    for step, seed in ((9, 0), (10, 1)):
        save_policy(policies / str(step), random_model(MICRO, seed), norm_stats=STATS)
    assert json.loads(call("convert", run, "--json")[1])["directory"] == str(policies / "10")
    assert call("convert", "--check", run, policies / "10")[0] == 0
    assert call("convert", "--check", policies / "9", run)[0] == 1
    for arguments in ([run.parent], ["--check", run, run.parent]):
        code, _, err = call("convert", *arguments)
        assert (code, err) == (2, f"error: {run.parent} holds runs; name one of them: {run}.\n")


def test_conversion_casts_and_keeps_the_rest(call, checkpoint, tmp_path):
    (checkpoint / "train_state").mkdir()
    code, out, _ = call("convert", checkpoint, tmp_path / "out", "--dtype", "bfloat16", "--style", "trained")
    assert (code, "wrote" in out) == (0, True)
    assert "left out, because not part of a policy: train_state" in out
    assert not (tmp_path / "out" / "train_state").exists()
    converted = open_checkpoint(tmp_path / "out")
    assert (converted.style, converted.config, converted.description["step"]) == ("trained", MICRO, 3)
    assert converted.norm_stats() == STATS
    for path, value in converted.read().items():
        np.testing.assert_array_equal(value, random_parameters(MICRO)[path].astype(jnp.bfloat16))


def test_conversion_to_pytorch_and_back_changes_nothing(call, checkpoint, tmp_path):
    pytorch, back = tmp_path / "pytorch", tmp_path / "back"
    assert call("convert", checkpoint, pytorch, "--style", "pytorch")[0] == 0
    assert sorted(path.name for path in pytorch.iterdir()) == ["assets", "model.safetensors", "pirl.json"]
    (pytorch / "optimizer.pt").touch()  # as OpenPI's training leaves it there
    assert json.loads(call("convert", pytorch, "--json")[1])["style"] == "pytorch"
    code, out, _ = call("convert", pytorch, back)
    assert (code, "left out, because not part of a policy: optimizer.pt" in out) == (0, True)
    for other in (pytorch, back):
        assert call("convert", "--check", checkpoint, other)[:2] == (0, f"{checkpoint} and {other}: equal\n")
    assert open_checkpoint(pytorch).description["step"] == 3
    assert call("convert", checkpoint, pytorch, "--style", "pytorch")[0] == 2
    assert call("convert", checkpoint, pytorch, "--style", "trained", "--overwrite")[0] == 0
    assert open_checkpoint(pytorch).style == "trained"


def test_merging_into_float32_keeps_what_bfloat16_would_round_away(call, tmp_path):
    """OpenPI saves frozen weights in bfloat16 and LoRA in float32."""
    params = random_parameters(MICRO_LORA)
    mixed = {path: value * 0.01 if "lora" in path else value.astype(jnp.bfloat16) for path, value in params.items()}
    save_checkpoint(tmp_path / "lora", mixed, MICRO_LORA)
    code, out, _ = call("convert", tmp_path / "lora", tmp_path / "rounded", "--merge-lora")
    assert (code, "--dtype float32 keeps them" in out) == (0, True)
    assert call("convert", tmp_path / "lora", tmp_path / "exact", "--merge-lora", "--dtype", "float32")[0] == 0
    assert load_policy(tmp_path / "exact").config == MICRO_LORA.without_lora()
    path = "PaliGemma/llm/layers/attn/q_einsum"
    delta = MICRO_LORA.language.attention_lora.scale * mixed[f"{path}/lora_a"] @ mixed[f"{path}/lora_b"]
    expected = mixed[f"{path}/w"].astype(jnp.float32) + delta
    np.testing.assert_allclose(open_checkpoint(tmp_path / "exact").read()[f"{path}/w"], expected, rtol=1e-6)


def test_a_checkpoint_that_does_not_describe_itself_is_not_described_by_a_guess(call, tmp_path):
    """A preset fits by its parameters; horizon and prompt format may still be others."""
    save_policy(tmp_path / "lora", create_model(get_model_config("tiny_lora"), jax.random.key(0)))
    (tmp_path / "lora" / "pirl.json").unlink()
    assert call("convert", tmp_path / "lora", tmp_path / "merged", "--merge-lora", "--model", "tiny_lora")[0] == 0
    assert open_checkpoint(tmp_path / "merged").config is None


def test_a_model_of_any_size_can_be_named_by_a_file(call, checkpoint, tmp_path):
    """Also for PyTorch, whose files do not tell how weights split into heads."""
    assert call("convert", checkpoint, tmp_path / "pytorch", "--style", "pytorch")[0] == 0
    model = tmp_path / "model.json"
    (tmp_path / "pytorch" / "pirl.json").rename(model)
    assert call("convert", "--check", tmp_path / "pytorch", "--model", model)[0] == 0
    assert call("convert", tmp_path / "pytorch", tmp_path / "back", "--model", model)[0] == 0
    assert call("convert", "--check", checkpoint, tmp_path / "back", "--rtol", "1e-9")[0] == 0
    model.write_text("[1]")
    assert call("convert", "--check", tmp_path / "pytorch", "--model", model)[0] == 2


def test_a_policy_without_cameras_is_said_to_be_pirls_alone(call, tmp_path):
    save_policy(tmp_path / "blind", create_model(get_model_config("tiny_state"), jax.random.key(0)))
    code, out, _ = call("convert", "--check", tmp_path / "blind")
    assert (code, "OpenPI cannot load it" in out) == (0, True)
    code, _, err = call("convert", tmp_path / "blind", tmp_path / "pytorch", "--style", "pytorch")
    assert (code, "has no cameras" in err) == (2, True)


def test_lora_is_not_merged_by_another_factor_than_it_was_trained_with(call, tmp_path):
    tiny = get_model_config("tiny_lora")
    other = dataclasses.replace(tiny, language=tiny.language.with_lora(LoraConfig(rank=8, alpha=80.0)))
    save_policy(tmp_path / "lora", create_model(other, jax.random.key(0)))
    code, _, err = call("convert", tmp_path / "lora", tmp_path / "merged", "--merge-lora", "--model", "tiny_lora")
    assert code == 2
    assert "language.attention_lora.alpha is 80.0 there, and 8.0 here" in err
    assert "leave the model out" in err


def test_odd_names_and_closed_pipes(checkpoint, tmp_path):
    odd = checkpoint.rename(tmp_path / "b[run]")
    command = f"{sys.executable} -m pirl.cli.main convert '{odd}'"
    closed, ascii_only = (
        subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        for line in (f"set -o pipefail; {command} | head -1", f"PYTHONIOENCODING=ascii {command}")
    )
    assert (closed.returncode, closed.stderr) == (0, "")
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert str(odd) in ascii_only.stdout
    assert "2?4?16?6" in ascii_only.stdout


def test_checks_end_with_zero_or_one(call, checkpoint, tmp_path):
    assert call("convert", "--check", checkpoint)[0] == 0
    code, out, _ = call("convert", "--check", checkpoint, checkpoint)
    assert (code, "equal" in out) == (0, True)
    save_policy(tmp_path / "other", random_model(MICRO, seed=1), norm_stats=STATS)
    code, out, _ = call("convert", checkpoint, "--check", tmp_path / "other")
    assert code == 1
    assert "state_proj/bias: 12 of 12 values" in out
    broken = random_parameters(MICRO)
    broken["state_proj/bias"] = broken["state_proj/bias"].at[2].set(jnp.nan)
    save_checkpoint(tmp_path / "nan", broken, MICRO)
    code, out, _ = call("convert", "--check", tmp_path / "nan")
    assert code == 1
    assert "state_proj/bias: 1 of 12 values are not finite" in out


STOPS_IN_THE_MIDDLE = """
import signal, time
import pirl.interop.checkpoint as checkpoint
from pirl.cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run in the background has it ignored

def wait(*args):
    print("in the middle", flush=True)
    time.sleep(600)

checkpoint.atomic_replace = wait
main()
"""


def test_control_c_ends_quietly_and_leaves_no_output(tmp_path):
    """Interrupted in the middle of a conversion: no traceback, no half-written checkpoint."""
    save_checkpoint(tmp_path / "big", {"w": jnp.ones((8, 8))}, None)
    command = [sys.executable, "-c", STOPS_IN_THE_MIDDLE, "convert", str(tmp_path / "big"), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    assert any(".partial" in name for name in os.listdir(tmp_path))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["big"]
