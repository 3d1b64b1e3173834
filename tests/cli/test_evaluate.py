"""`pirl eval`: what is printed, what is written, and with which exit code."""

import json
from pathlib import Path

import av

from pirl.envs.registry import EnvConfig

FAST = ("--env.image-size", 28, "--env.max-steps", 40, "--envs", 4)


def evaluate(call, *arguments):
    code, out, err = call("eval", *arguments, *FAST)
    assert (code, err) == (0, ""), err
    return out


def test_the_expert_is_measured_with_an_interval_for_each_task_and_in_all(call):
    out = evaluate(call, "expert", "--episodes", 10, "--seed", 3, "--json", "a.json")
    assert "expert: success 100.0 % [72.2, 100.0], 10 of 10" in out
    content = json.loads(Path("a.json").read_text())
    assert len(content["tasks"]) == 4
    for task, summary in content["tasks"].items():
        (row,) = (line for line in out.splitlines() if line.startswith(task))
        assert f"{summary['episodes']}  100.0 %" in row
        assert f"{summary['mean_length']:.1f}" in row
    assert content["settings"]["env"] == {
        "id": "tabletop",
        "adapter": None,
        "options": {"image_size": 28, "max_steps": 40},
    }
    assert [content["settings"][name] for name in ("policy", "seed", "episodes")] == ["expert", 3, 10]
    # The four tasks in turn, each with seeds of its own.
    seeds = [3_000_000 + index % 4 * 10_000 + index // 4 for index in range(10)]
    assert [episode["seed"] for episode in content["episodes"]] == seeds


def test_the_same_seed_prints_and_writes_the_same(call):
    def once(seed):
        out = evaluate(call, "expert", "--episodes", 6, "--seed", seed, "--expert.aim-bias", 0.02, "--json", "a.json")
        content = json.loads(Path("a.json").read_text())
        del content["seconds"]
        return out, content

    assert once(0) == once(0)
    assert once(0)[1]["episodes"] != once(1)[1]["episodes"]


def test_one_task_is_measured_and_written_to_a_file_in_the_home_directory(call, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    task = "put the red block in the blue zone"
    assert f"{task}         3" in evaluate(call, "expert", "--episodes", 3, "--task", task, "--json=~/a.json")
    content = json.loads((tmp_path / "home" / "a.json").read_text())
    assert {episode["prompt"] for episode in content["episodes"]} == {task}
    assert not (tmp_path / "~").exists()


def test_a_policy_is_compared_with_the_expert_start_by_start(call, policy):
    out = evaluate(
        call, policy, "expert", "--episodes", 8, "--json", "a.json", "--video", "a.mp4", "--denoising-steps", 2
    )
    content = json.loads(Path("a.json").read_text())
    pairs = content["comparison"]["pairs"]
    assert content["first"]["settings"]["policy"] == str(policy)
    assert content["second"]["settings"]["policy"] == "expert"
    assert pairs == {"both": 0, "only_first": 0, "only_second": 8, "neither": 0}
    assert f"expert is better than {policy}: +100.0 points" in out
    assert "p = 0.0078 (exact McNemar test)" in out
    assert "both succeed 0, only the first 0, only the second 8, neither 0" in out
    with av.open("a.mp4") as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == max(episode["length"] for episode in content["first"]["episodes"]) + 1
    left, right = (frames[-1][20:100, x].mean(axis=0).argmax() for x in (0, 116))
    assert (left, right) == (0, 1), "red for the policy, green for the expert beside it"


SMALL = EnvConfig("tabletop", options={"image_size": 28, "max_steps": 6, "objects": 3})
QUICK = ("--episodes", 2, "--envs", 2, "--denoising-steps", 1, "--json", "a.json")


def settings_of(call, *arguments):
    """What was said before the measurement, and what it was made with."""
    code, out, err = call("eval", *arguments, *QUICK)
    assert (code, err) == (0, ""), err
    content = json.loads(Path("a.json").read_text())
    content = content.get("first", content)["settings"]
    return out.splitlines()[0], content["env"], content.get("execute_steps")


def test_a_run_is_measured_where_it_was_trained_and_the_output_says_so(call, make_run):
    said, env, steps = settings_of(call, make_run("a", SMALL, 3))
    assert said == (
        "as in runs/a: --env tabletop --env.image-size 28 --env.max-steps 6 --env.objects 3 --execute-steps 3"
    )
    assert env == {"id": "tabletop", "adapter": None, "options": {"image_size": 28, "max_steps": 6, "objects": 3}}
    assert steps == 3
    # What was said, given by hand, is the same measurement.
    policy = "runs/a/checkpoints/10"
    assert settings_of(call, policy, *said.split(": ")[1].split())[1:] == (env, steps)


def test_the_command_line_has_the_last_word_over_the_run(call, make_run):
    run = make_run("a", SMALL, 3)
    said, env, steps = settings_of(call, run, "--env.max-steps", 4, "--execute-steps", 2)
    assert said == "as in runs/a: --env tabletop --env.image-size 28 --env.objects 3"
    assert (env["options"], steps) == ({"image_size": 28, "max_steps": 4, "objects": 3}, 2)
    said, env, steps = settings_of(call, run, "--env", "tabletop", "--env.max-steps", 4)
    assert said == "as in runs/a: --execute-steps 3"
    assert (env["options"], steps) == ({"max_steps": 4}, 3), "another environment begins with its own defaults"
    said, env, _ = settings_of(call, "expert", run)
    assert said.startswith("as in runs/a: --env tabletop --env.image-size 28"), "the expert acts where the run does"
    said, env, steps = settings_of(call, make_run("none", None, 3), "--env.max-steps", 4)
    assert (said, env["id"], steps) == ("as in runs/none: --execute-steps 3", "tabletop", 3)


def test_runs_that_differ_are_compared_only_where_somebody_says(call, make_run):
    wide = EnvConfig("tabletop", options={"image_size": 28, "max_steps": 7})
    runs = make_run("a", SMALL, 3), make_run("b", wide, 3), make_run("c", SMALL, 2)
    code, out, err = call("eval", *runs[:2], *QUICK)
    assert (code, out) == (2, "")
    assert "runs/a and runs/b were not trained with the same environment" in err
    assert "--env.max-steps 6 --env.objects 3 in one, --env tabletop --env.image-size 28 --env.max-steps 7 in" in err
    code, out, err = call("eval", "runs", *QUICK)
    assert (code, out, err) == (2, "", "error: runs holds runs; name one of them: runs/a, runs/b, runs/c.\n")
    code, out, err = call("eval", runs[0], runs[2], *QUICK)
    assert (code, "number of steps: --execute-steps 3 in one, --execute-steps 2" in err) == (2, True)
    said, _, steps = settings_of(call, runs[0], runs[2], "--execute-steps", 2)
    assert (said.startswith("as in runs/a and runs/c: --env tabletop"), steps) == (True, 2)


def test_each_run_plans_in_as_many_denoising_steps_as_it_was_trained_with(call, make_run):
    runs = make_run("a", SMALL, 3, denoising_steps=2), make_run("b", SMALL, 3, denoising_steps=4)

    def said_and_made_with(*arguments):
        code, out, err = call("eval", *arguments, "--episodes", 2, "--envs", 2, "--json", "a.json")
        assert (code, err) == (0, "")
        content = json.loads(Path("a.json").read_text())
        both = [content[which] for which in ("first", "second")] if "first" in content else [content]
        lines = [line for line in out.splitlines() if line.startswith("as in")]
        return lines, [one["settings"]["denoising_steps"] for one in both]

    lines, steps = said_and_made_with(runs[0])
    assert (len(lines), lines[0].endswith(" --execute-steps 3 --denoising-steps 2"), steps) == (1, True, [2])
    lines, steps = said_and_made_with(*runs)
    assert lines[0].endswith("--env.objects 3 --execute-steps 3")
    assert lines[1:] == [
        "as in runs/a, for its own policy: --denoising-steps 2",
        "as in runs/b, for its own policy: --denoising-steps 4",
    ]
    assert steps == [2, 4]
    lines, steps = said_and_made_with(*runs, "--denoising-steps", 3)
    assert (any("denoising" in line for line in lines), steps) == (False, [3, 3])
    small = ("--env.image-size", 28, "--env.max-steps", 6, "--env.objects", 3)
    assert said_and_made_with("runs/a/checkpoints/10", *small) == ([], [10]), "no run, so as OpenPI acts"


def test_a_damaged_configuration_is_needed_only_for_what_nobody_says(call, make_run):
    run = make_run("a", SMALL, 3)
    Path(run, "config.yaml").write_text("stesp: 3")
    code, _, err = call("eval", run, *QUICK)
    assert code == 2
    assert "runs/a/config.yaml has no field 'stesp'" in err
    assert "without it, pass --env, --execute-steps and --denoising-steps" in err
    _, env, steps = settings_of(call, run, "--env", "tabletop", "--env.max-steps", 4, "--execute-steps", 2)
    assert (env["options"], steps) == ({"max_steps": 4}, 2)
