"""`pirl configs`: every preset in one table, and each of them as YAML that trains."""

import subprocess
import sys

import pytest

from pirl.config import get_config, list_configs, load_config


def test_every_preset_is_listed_with_learner_model_and_purpose(call):
    code, out, _ = call("configs")
    assert code == 0
    assert call("configs", "list")[1] == out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert set(list_configs()) <= set(lines)
    assert "acrlpd" in lines["aloha_fold_pi05_lora"]
    assert "π₀.₅, LoRA" in lines["aloha_fold_pi05_lora"]
    assert " bc " in lines["demo_bc"]
    assert "tiny π₀" in lines["demo"]


def test_a_preset_is_shown_as_a_file_that_trains(call, tmp_path):
    code, out, _ = call("configs", "show", "droid_pi05")
    assert code == 0
    (tmp_path / "droid.yaml").write_text(out)
    assert load_config(tmp_path / "droid.yaml") == get_config("droid_pi05")
    assert "# Command: pirl train droid_pi05 " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "dmeo"), "Did you mean demo?"),
        (("show",), "pirl configs show takes a name of a preset."),
        (("list", "demo"), "pirl configs list takes no name of a preset."),
        (("shw", "demo"), "Did you mean show?"),
        (("demo",), "Did you mean show demo?"),
    ],
)
def test_bad_input_is_explained_with_exit_code_2(call, arguments, message):
    code, _, err = call("configs", *arguments)
    assert code == 2
    assert message in err


def test_the_command_line_starts_without_jax():
    """Seconds for `pirl --help` would be felt; what trains imports it later."""
    program = (
        "import sys, pirl.cli.main; print([name for name in ('jax', 'flax', 'pirl.config') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
