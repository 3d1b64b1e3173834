"""`pirl plan` from outside: it says whether a run fits, remembers what it compiled, and answers bad input."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from pirl.cli.main import parse
from pirl.config import check_layout
from pirl.plan.topologies import parse_topology

# A policy that sees the state alone: its language expert, which reads images and prompts, has nothing to learn.
DEPTHS = ("--model.language.depth", 1, "--model.action-expert.depth", 1)
SMALL = ("plan", "demo_state_bc", *DEPTHS, "--agent.freeze", "language", "--batch-size", 16)


def test_a_run_is_planned_and_remembered(call):
    code, out, err = call(*SMALL, "--topology", "rtx4090:2", "--json", "plan.json")
    assert code == 0, err
    assert "rtx4090:2: fits: " in out
    assert "simulated" in out
    assert "a batch of 8 …" in err, "a second batch, half as large"
    (first,) = json.loads(Path("plan.json").read_text())
    sizes = first["bytes_per_device"]
    assert sizes["parameters"] == sizes["average"] == 4 * first["parameters"]["policy_trainable"]
    assert sizes["peak"] == pytest.approx(sum(sizes[name] for name in sizes if name not in ("peak", "available")))
    assert first["fits"] is True
    assert first["largest_batch"] % 2 == 0
    assert first["flops_per_step"] > 16 * 6 * 10_000
    # Each of two devices sends its gradients once around.
    assert first["bytes_sent_per_device"]["all-reduce"] == pytest.approx(sizes["parameters"], rel=0.1)
    code, again, err = call(*SMALL, "--topology", "rtx4090:2", "--seed", 3, "--json", "again.json")
    assert "compiled before" in err
    assert again == out.replace("plan.json", "again.json")
    assert json.loads(Path("again.json").read_text()) == [first]
    _, _, err = call(*SMALL, "--topology", "h100:2", "--json", "other.json")
    assert "compiled before" in err, "the same two simulated devices stand in for any chip"
    (bigger,) = json.loads(Path("other.json").read_text())
    assert bigger["bytes_per_device"]["peak"] == sizes["peak"]
    assert bigger["largest_batch"] > first["largest_batch"]
    assert bigger["seconds"]["step"] < first["seconds"]["step"]


def test_what_cannot_be_planned_is_refused_before_anything_is_compiled(call, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    remedies = {"": "--topology h100:8", "cpu:1 v5e:2x4": "pirl[plan]", "h100:3": "--batch-size 18"}
    for names, remedy in remedies.items():
        code, out, err = call(*SMALL, *(word for name in names.split() for word in ("--topology", name)))
        assert code == 2
        assert remedy in err.splitlines()[-1]
        assert "tracing" not in err
        assert not out


def test_the_commands_of_the_page_could_run():
    """They take long, so they are only parsed; but every preset, option, value and machine has to exist."""
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text()
    blocks = "".join(re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)).splitlines()
    lines = [line for line in blocks if line.startswith("pirl plan ")]
    assert len(lines) >= 4
    for line in lines:
        command = parse(shlex.split(line)[1:])
        check_layout(command.resolve(), max(parse_topology(name).count for name in command.topology))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the compiler for TPUs (pirl[plan]) is not here")
def test_tpus_compile_without_a_tpu(call):
    code, out, err = call(*SMALL, "--topology", "v5e:2x2", "--topology", "v5p:1x1x1", "--json", "plan.json")
    assert code == 0, err
    assert "by the TPU's own compiler, for 4 devices" in out
    four, one = json.loads(Path("plan.json").read_text())
    assert (four["devices"], one["devices"]) == (4, 1)
    assert four["flops_per_step"] == one["flops_per_step"]
    assert not one["bytes_sent_per_device"]
    gradients = 2 * 3 / 4 * four["bytes_per_device"]["parameters"]
    sent = sum(four["bytes_sent_per_device"].values())
    assert gradients / 2 < sent < 1.5 * gradients
