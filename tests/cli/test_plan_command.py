"""`pirl plan` from outside: it says whether a run fits, remembers what it compiled, and answers slips."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from pirl.cli.main import _parse
from pirl.plan import topologies
from pirl.plan.measuring import check_layout

# A policy that sees the state alone: its language expert, where pictures and prompts would be read, has nothing to learn.
DEPTHS = ("--model.language.depth", 1, "--model.action-expert.depth", 1)
SMALL = ("plan", "demo_state_bc", *DEPTHS, "--agent.freeze", "language")


def test_a_run_is_planned_and_remembered(call):
    code, out, err = call(*SMALL, "--topology", "rtx4090:2", "--batch-size", 16, "--json", "plan.json")
    assert code == 0, err
    assert "rtx4090:2: fits: " in out
    assert "for 2 simulated CPU devices, which stand in" in out
    assert "compiling the update for a batch of 8 …" in err
    (first,) = json.loads(Path("plan.json").read_text())
    sizes = first["bytes_per_device"]
    assert sizes["parameters"] == sizes["average"] == 4 * first["parameters"]["policy_trainable"]
    assert sizes["peak"] == pytest.approx(sum(sizes[name] for name in sizes if name not in ("peak", "available")))
    assert first["fits"] is True
    assert first["largest_batch"] % 2 == 0
    assert first["flops_per_step"] > 16 * 6 * 10_000
    # Each of two devices sends its gradients once around.
    assert first["bytes_sent_per_device"]["all-reduce"] == pytest.approx(sizes["parameters"], rel=0.1)
    code, again, err = call(*SMALL, "--topology", "rtx4090:2", "--batch-size", 16, "--seed", 3, "--json", "again.json")
    assert "was compiled before" in err
    assert again == out.replace("plan.json", "again.json")
    assert json.loads(Path("again.json").read_text()) == [first]
    _, _, err = call(*SMALL, "--topology", "h100:2", "--batch-size", 16, "--json", "other.json")
    assert "was compiled before" in err, "the same two simulated devices stand in for any chip"
    (bigger,) = json.loads(Path("other.json").read_text())
    assert bigger["bytes_per_device"]["peak"] == sizes["peak"]
    assert bigger["largest_batch"] > first["largest_batch"]
    assert bigger["seconds"]["step"] < first["seconds"]["step"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo_bc",), "pass a --topology, such as --topology h100:8"),
        (("demo_bc", "--topology", "h10:8"), "Did you mean h100?"),
        (("demo_b", "--topology", "h100:8"), "no preset is named 'demo_b'. Did you mean demo_bc?"),
        (("demo_bc", "--topology", "h100:8", "--batch-sise", 8), "Did you mean --batch-size?"),
        (("demo_bc", "--topology", "h100:8", "--steps", "many"), "pirl plan: --steps should be a whole number"),
        (("demo_bc", "--topology", "h100:8", "--json", "file/plan.json"), "file: it is no directory"),
        (("demo_bc", "--topology", "h100:3"), "such as --batch-size 33"),
        (("demo_bc", "--topology", "h100:2", "--fsdp-devices", 3), "fsdp_devices = 3 should divide"),
    ],
)
def test_slips_are_answered_in_one_line(call, arguments, words):
    Path("file").touch()
    code, out, err = call("plan", *arguments)
    assert code == 2
    assert words in err.splitlines()[-1]
    assert not out


def test_tpus_are_refused_before_anything_is_compiled(call, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call(*SMALL, "--topology", "cpu:1", "--topology", "v5e:2x4")
    assert code == 2
    assert "pip install 'pirl[plan]'" in err
    assert "tracing" not in err


def test_commands_that_take_longer_could_run():
    """They stand in text blocks; but every preset, option, value and machine has to exist."""
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text()
    blocks = "".join(re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)).splitlines()
    lines = [line for line in blocks if line.startswith("pirl plan ")]
    assert len(lines) >= 4
    for line in lines:
        command = _parse(shlex.split(line)[1:])
        count = max(topologies.parse_topology(name).count for name in command.topology)
        check_layout(command.resolve(), count)


def test_help_shows_the_command_and_the_configuration(call):
    _, out, _ = call("plan", "demo_bc", "--help")
    assert out.startswith("usage: pirl plan [PRESET] --topology NAME[:SHAPE] [OPTIONS]\n")
    assert "--exp-name" not in out
    assert "--fsdp-devices" in out


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the compiler for TPUs (pirl[plan]) is not here")
def test_tpus_compile_without_a_tpu(call):
    where = ("--topology", "v5e:2x2", "--topology", "v5p:1x1x1", "--json", "plan.json")
    code, out, err = call(*SMALL, *where, "--batch-size", 16)
    assert code == 0, err
    assert "by the TPU's own compiler, for 4 devices" in out
    four, one = json.loads(Path("plan.json").read_text())
    assert (four["devices"], one["devices"]) == (4, 1)
    assert four["flops_per_step"] == one["flops_per_step"]
    assert not one["bytes_sent_per_device"]
    gradients = 2 * 3 / 4 * four["bytes_per_device"]["parameters"]
    sent = sum(four["bytes_sent_per_device"].values())
    assert gradients / 2 < sent < 1.5 * gradients
