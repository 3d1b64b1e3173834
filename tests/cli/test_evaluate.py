"""`pirl eval`: what is printed, what is written, and with which exit code."""

import json
from pathlib import Path

import av
import pytest

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


def test_one_task_can_be_asked_for(call):
    task = "put the red block in the blue zone"
    out = evaluate(call, "expert", "--episodes", 3, "--task", task, "--json", "a.json")
    assert f"{task}         3" in out
    assert {episode["prompt"] for episode in json.loads(Path("a.json").read_text())["episodes"]} == {task}


def test_a_policy_is_compared_with_the_expert_start_by_start(call, policy):
    out = evaluate(call, policy, "expert", "--episodes", 8, "--json", "a.json", "--video", "a.mp4", "--num-steps", 2)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no checkpoint directory; the scripted expert is called 'expert'"),
        (["expert", "nowhere"], "nowhere is no checkpoint directory"),
        (["expert", "--env", "tabeltop"], "Did you mean tabletop?"),
        (["expert", "--env.id=tabeltop"], "Did you mean tabletop?"),
        (["expert", "--env.objcts", "3"], "tabletop has no option 'objcts'. Did you mean objects?"),
        (["expert", "--env.objects", "many"], "objects should be a whole number; it is 'many'"),
        (["expert", "--env.objects"], "--env.objects needs a value"),
        (["expert", "--env.objects", "--episodes", "3"], "--env.objects needs a value"),
        (["expert", "--env.id", "CartPole-v1", "--env.adapter", "nothing:Here"], "needs the module nothing"),
        (["expert", "--episods", "3"], "pirl eval has no option --episods. Did you mean --episodes?"),
        (["expert", "--expert.aim-bais", "3"], "Did you mean --expert.aim-bias?"),
        (["expert", "--env-options", "3"], "pirl eval has no option --env-options"),
        (["expert", "--expert.give-up", "3"], "error: expert.give_up = 3.0 should be between 0 and 1"),
        (["expert", "--episodes", "0"], "--episodes should be at least 1; it is 0"),
        (["expert", "--guidance", "2"], "--guidance belongs to a checkpoint; the scripted expert needs none"),
        (["expert", "--guidance", "nan"], "--guidance should be a number of at least 0; it is nan"),
        (["expert", "--envs", "0"], "--envs should be at least 1"),
        (["expert", "--execute-steps", "0"], "--execute-steps should be at least 1"),
        (["expert", "--seed", "-1"], "--seed should be zero or more"),
        (["expert", "--timeout", "0"], "--timeout"),
        (["expert", "--timeout", "nan"], "--timeout should be a number of seconds above 0; it is nan"),
        (["expert", "--json", "{empty}"], "is a directory; name a file"),
        (["expert", "--video", "{file}/film.gif"], "it is no directory. Choose another place"),
        (["expert", "--env.observation", "state", "--video", "film.gif"], "has no camera"),
        (["expert", "--task", "dance"], "no task 'dance'"),
        (["expert", "--model", "tiny"], "--model belongs to a checkpoint"),
        (["expert", "--video", "film.avi"], "should end in .gif, .mp4 or .png"),
        (["{policy}", "--expert.noise", "1"], "--expert.* belongs to the scripted expert"),
        (["{policy}", "--execute-steps", "500"], "--execute-steps 500 is more than the policy plans"),
        (["{policy}", "--asset-id", "other"], "no statistics 'other'"),
        (["{empty}"], "params"),
    ],
)
def test_bad_input_is_explained_with_exit_code_2(call, policy, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    places = {"policy": policy, "empty": tmp_path / "empty", "file": tmp_path / "file"}
    code, out, err = call("eval", *(argument.format_map(places) for argument in arguments))
    assert (code, out) == (2, ""), "refused before anything is measured"
    assert message in " ".join(err.replace("│", " ").split())


def test_the_help_says_where_options_of_environments_are_found(call):
    code, out, _ = call("eval", "--help")
    assert code == 0
    text = " ".join(out.replace("│", " ").split())
    assert "`pirl envs show NAME`" in text
    assert "--env.OPTION VALUE" in text
    assert "env-options" not in text
