"""Every preset says what it is for, and can work as it is, with --debug, and by its command."""

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pirl.agents.config import BCConfig, RIPTConfig
from pirl.cli.main import parse
from pirl.config import check_config, debug_config, get_config, get_preset, list_configs, load_config, override_config
from pirl.data import open_dataset, read_outcomes
from pirl.data.robots import load_robot
from pirl.errors import ConfigError, DataError
from pirl.models.config import LARGE_CRITICS
from sample_datasets import build, edit_table

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", list_configs())
def test_every_preset_can_work_as_it_is_and_for_debugging_and_says_how(name, tmp_path):
    (tmp_path / "params").mkdir()
    given = {"data.repo_id": str(tmp_path)}
    if isinstance(get_config(name).agent, RIPTConfig):
        given = {}
    if not get_config(name).from_scratch:
        given["checkpoint"] = str(tmp_path)
    config = override_config(get_config(name), given)
    assert config.name == name
    check_config(config, device_count=8)
    small = debug_config(config)
    check_config(small, device_count=8)
    assert small.batch_size == 8
    assert (small.model, small.env, small.data) == (config.model, config.env, config.data)
    if isinstance(config.agent, RIPTConfig):
        assert (config.steps, config.data.repo_id, config.data.norm_stats) == (0, None, "checkpoint")
        assert (small.rollout.iterations, small.rollout.groups * small.rollout.attempts) == (2, 8)
        assert (small.evaluation.every, small.checkpoints.every) == (1, 1)
    else:
        assert (small.steps, small.rollout.iterations) == (10, 0)

    about = get_preset(name)["about"]
    assert len(about.splitlines()[0]) <= 120
    for word in ("Command", "Needs", "Should reach"):
        assert re.search(rf"^{word}: \w", about, flags=re.MULTILINE), word
    (command,) = re.findall(r"^Command: pirl (.*)$", about, flags=re.MULTILINE)
    assert parse(shlex.split(command)).resolve().name == name


def test_folding_is_as_promised():
    config = get_config("aloha_fold")
    assert load_robot(config.data.robot).action_dim == 14
    assert config.agent.horizon_length == 20
    assert config.agent.critic.num_critics == 10
    assert config.agent.num_action_samples == 4
    assert get_config("rl_fold_box").agent.critic == dataclasses.replace(LARGE_CRITICS, loss="bce")


def test_the_options_of_the_page_make_lora_and_bc_of_a_preset(tmp_path):
    page = (ROOT / "docs/training.md").read_text()
    (bc,) = re.findall(r"\| BC on the same data.*`(--agent bc .*)` \|", page)
    assert "`--model pi0_lora` or `--model pi05_lora`, with `--agent.policy-ema-decay none --agent.freeze none`" in page
    lora = parse(
        ["train", "droid", *shlex.split("--model pi05_lora --agent.policy-ema-decay none --agent.freeze none")]
    ).resolve()
    assert lora.model.language.has_lora
    assert lora.model.action_expert.has_lora
    assert not lora.agent.freeze
    assert lora.agent.policy_ema_decay is None
    cloned = parse(["train", "droid", *shlex.split(bc)]).resolve()
    assert cloned.agent == BCConfig(), "whose defaults are OpenPI's"
    # Rewards that do not tell of success are as good as none to BC.
    built = build(tmp_path, cameras="none", rewards="dense")
    for episode in built.episodes:
        edit_table(episode.data_file, lambda table: table.drop_columns(["next.success"]))
    dataset = open_dataset(built.root)
    with pytest.raises(DataError, match="nothing about success"):
        read_outcomes(dataset, get_config("droid").data.outcomes)
    assert read_outcomes(dataset, cloned.data.outcomes).success.tolist() == [-1, -1, -1]


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean aloha_fold?"):
        get_config("aloha_fodl")


def test_help_and_the_list_of_presets_need_no_jax():
    """Importing it takes seconds."""
    program = """
import contextlib, io, sys
from pirl.cli.main import main
for arguments in (["--help"], ["train", "--help"], ["configs"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
print([name for name in ("jax", "flax", "pirl.config.schema") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the files in configs/ ---------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A directory with the files and the checkpoints and data that their commands name."""
    for path in ("checkpoints/pi0_libero", "runs/start", "runs/demo_ript/start"):
        (tmp_path / path / "params").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_works_by_the_command_in_it(file, beside):
    lines = re.findall(r"^#   pirl (.*)$", file.read_text(), flags=re.MULTILINE)
    *before, last = [shlex.split(line) for line in lines]
    for command in before:
        parsed = parse(command)
        if command[0] == "train":
            check_config(parsed.resolve(), device_count=8)
    assert f"configs/{file.name}" in last
    config = parse(last).resolve()
    check_config(config, device_count=8)
    assert isinstance(config.agent, RIPTConfig)
    # The command adds only these.
    plain = load_config(file)
    added = ("checkpoint", "data", "env", "seed", "rollout")
    assert dataclasses.replace(config, **{name: getattr(plain, name) for name in added}) == plain


def test_the_quick_test_is_quick_and_the_full_one_leaves_nothing_out():
    quick, full = load_config(ROOT / "configs/quick_test.yaml"), load_config(ROOT / "configs/full_test.yaml")
    assert quick.rollout.iterations * quick.rollout.budget * quick.rollout.attempts <= 200
    assert full.rollout.save_dataset
    assert full.rollout.videos_every
    assert full.agent.bc_loss_weight
    assert full.checkpoints.best_metric == full.stopping.metric == "eval/success"
    assert load_config(ROOT / "configs/distributed.yaml").rollout.backend == "ray"
