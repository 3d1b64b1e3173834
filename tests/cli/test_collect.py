"""`pirl collect`: a dataset that training accepts, and that a killed run continues."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pirl.data import load_robot, open_dataset
from pirl.envs.registry import EnvConfig
from written import files_of

FAST = ("--env.image-size", 28, "--env.max-steps", 40, "--envs", 4, "--expert.aim-bias", 0.02)


def test_a_dataset_is_written_summed_up_and_accepted(call):
    code, out, err = call("collect", "--policy", "expert", "--episodes", 6, "--out", "data", *FAST)
    assert (code, err) == (0, "")
    log = json.loads(Path("data/meta/pirl_collect.json").read_text())
    successes = sum(episode["success"] for episode in log["episodes"])
    frames = sum(episode["length"] for episode in log["episodes"])
    assert 0 < successes < 6
    assert f"success {100 * successes / 6:.1f} % [" in out
    assert f"], {successes} of 6" in out
    assert str(frames) in out
    commands = [line.split("pirl ")[1].split() for line in out.splitlines() if "pirl " in line]
    assert commands == [["data", "check", "data"], ["data", "info", "data"]]
    code, out, _ = call(*commands[0])
    assert code == 0
    assert f"6 episodes, {frames} frames: 0 problems, 0 notes" in out
    assert f"{successes} of 6 episodes" in call(*commands[1])[1]
    dataset = open_dataset("data")
    robot = load_robot("tabletop")
    assert {*robot.state, *robot.actions} <= set(dataset.column_names)
    assert set(robot.cameras.values()) == set(dataset.info.cameras)


def test_what_is_there_already_is_not_collected_again_but_added_to(call):
    arguments = ("collect --policy expert --out data --storage image", *FAST)
    call(*arguments, "--episodes", 3)
    before = files_of(open_dataset("data").root)
    code, out, _ = call(*arguments, "--episodes", 3, "--resume")
    assert code == 0
    assert "all 3 episodes are in data already" in out
    assert files_of(open_dataset("data").root) == before
    code, out, _ = call(*arguments, "--episodes", 5, "--resume")
    assert "3 of 5 episodes exist; continuing" in out
    assert len(open_dataset("data").episode_ids) == 5
    call("collect --policy expert --out whole --storage image", *FAST, "--episodes", 5)
    data = {name: content for name, content in files_of(open_dataset("whole").root).items() if "data" in name}
    assert {name: files_of(open_dataset("data").root)[name] for name in data} == data


def test_steps_can_be_asked_for_instead_of_episodes(call):
    arguments = ("collect --policy expert --out data --storage image", *FAST)
    assert call(*arguments, "--env-steps", 70)[0] == 0
    lengths = [episode["length"] for episode in json.loads(Path("data/meta/pirl_collect.json").read_text())["episodes"]]
    assert sum(lengths[:-1]) < 70 <= sum(lengths) == open_dataset("data").starts[-1]
    assert "all 70 environment steps are in data already" in call(*arguments, "--env-steps", 70, "--resume")[1]
    assert f"{len(lengths)} episodes exist; continuing" in call(*arguments, "--env-steps", 200, "--resume")[1]
    # Whichever is reached first.
    call(*arguments, "--env-steps", 10_000, "--episodes", 14, "--resume")
    assert len(open_dataset("data").episode_ids) == 14


def test_a_policy_collects_and_resumes(call, policy):
    arguments = (f"collect --policy {policy} --storage image --denoising-steps 2 --version v2.1", *FAST[:6])
    assert call(*arguments, "--episodes", 5, "--out", "whole")[0] == 0
    assert call(*arguments, "--episodes", 2, "--out", "part")[0] == 0
    assert call(*arguments, "--episodes", 5, "--out", "part", "--resume")[0] == 0
    whole, part = (files_of(open_dataset(name).root) for name in ("whole", "part"))
    assert {name for name in whole if whole[name] != part[name]} == set()


def test_a_killed_run_goes_on_to_the_same_data(call, tmp_path):
    arguments = ["collect", "--policy", "expert", "--episodes", 12, "--storage", "image", *FAST]
    arguments = list(map(str, arguments))
    assert call(*arguments, "--out", "whole")[0] == 0
    program = "import sys; from pirl.cli.main import main; main(sys.argv[1:])"
    child = subprocess.Popen([sys.executable, "-c", program, *arguments, "--out", "killed"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    written = (tmp_path / "killed").glob
    while not list(written("data/*/file-003.parquet")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert call("data", "check", "killed")[0] == 0, "what was written is a dataset"
    assert call(*arguments, "--out", "killed", "--resume")[0] == 0
    whole, killed = (files_of(tmp_path / name) for name in ("whole", "killed"))
    assert len([name for name in whole if name.startswith("data/")]) == 12
    for name in whole:
        assert killed[name] == whole[name], name


def test_control_c_is_told_with_exit_code_130_and_keeps_what_is_written(call, monkeypatch):
    from pirl.data import DatasetWriter

    write = DatasetWriter.write_episode

    def interrupted(self, *arguments, **options):
        if self.num_episodes == 2:
            raise KeyboardInterrupt
        return write(self, *arguments, **options)

    monkeypatch.setattr(DatasetWriter, "write_episode", interrupted)
    code, _, err = call("collect", "--policy", "expert", "--episodes", 4, "--out", "data", *FAST)
    assert (code, err.strip()) == (130, "interrupted")
    assert len(open_dataset("data").episode_ids) == 2


def test_other_settings_are_named(call):
    arguments = ("collect", "--policy", "expert", "--episodes", 2, "--out", "data", *FAST[:6])
    call(*arguments)
    code, _, err = call(*arguments, "--resume", "--env.objects", 3, "--expert.noise", 0.1)
    assert code == 2
    assert "expert.noise is 0.0 there, and 0.1 here; env.options.objects is null there, and 3 here" in err


def test_a_run_collects_where_it_was_trained(call, make_run):
    run = make_run("a", EnvConfig("tabletop", options={"image_size": 28, "max_steps": 6}), 3)
    code, out, err = call(f"collect --policy {run} --episodes 2 --out data --denoising-steps 1 --storage image")
    assert (code, err) == (0, "")
    assert out.startswith("as in runs/a: --env tabletop --env.image-size 28 --env.max-steps 6 --execute-steps 3\n")
    settings = json.loads(Path("data/meta/pirl_collect.json").read_text())["settings"]
    assert settings["env"]["options"] == {"image_size": 28, "max_steps": 6}
    assert settings["execute_steps"] == 3
