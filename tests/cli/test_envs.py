"""`pirl envs`: lists environments, shows their options, renders episodes."""

import av
import numpy as np
from PIL import Image

from pirl.envs.registry import KNOWN, EnvConfig
from pirl.envs.tabletop.world import TableConfig


def test_every_environment_is_listed_with_its_id_and_whether_it_is_installed(call):
    code, out, _ = call("envs", "list")
    assert code == 0
    for entry in KNOWN:
        (line,) = (line for line in out.splitlines() if line.startswith(f"{entry.alias} "))
        assert entry.id in line
        assert "yes" in line or f"no: make setup-{entry.extra} (or pip install 'pirl[{entry.extra}]')" in line
    assert "--env.adapter" in out


def test_what_an_older_installation_cannot_know_is_not_called_installed(call, monkeypatch):
    monkeypatch.setattr("pirl.doctor.metadata.requires", lambda package: ["numpy"])
    _, out, _ = call("envs", "list")
    assert out.count("unknown: install pirl again") == sum(entry.extra is not None for entry in KNOWN)


def test_options_cameras_widths_limits_and_tasks_are_shown(call):
    code, out, _ = call("envs", "show", "tabletop", "--env.image-size", 30, "--env.objects=1", "--env.zones", 1)
    assert code == 0
    (entry,) = (entry for entry in KNOWN if entry.alias == "tabletop")
    for option in entry.options:
        assert f"--env.{option.name.replace('_', '-')}" in out
        assert option.help in out
    assert "observation.images.overhead  30×30" in out
    assert "observation.state [3]" in out
    assert "action [3]" in out
    assert TableConfig(objects=1, zones=1).tasks[0] in out
    assert "task 1" not in out
    assert "--env.render-mode" not in out, "there is nothing to choose"
    assert call("envs", "show", "tabletop", "--env", "tabletop")[1].startswith("tabletop (pirl/Tabletop-v0)")


def test_an_environment_that_is_not_installed_still_shows_its_options(call):
    missing = [entry for entry in KNOWN if entry.extra == "aloha"]
    code, out, _ = call("envs", "show", "aloha")
    assert code == 0
    assert all(f"--env.{option.name.replace('_', '-')}" in out for option in missing[0].options)


def test_playing_prints_how_it_went_and_writes_videos(call):
    arguments = ("envs", "play", "--episodes", 2, "--size", 64, "--seed", 5)
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert out.count("success after") == 2
    assert "expert: success 100.0 % [34.2, 100.0], 2 of 2" in out
    for extra, name in (
        (["--render", "gif"], "tabletop.gif"),
        (["--out", "a.png"], "a.png"),
        (["--out", "b.mp4"], "b.mp4"),
    ):
        code, again, _ = call(*arguments, *extra)
        assert again == out + f"video: {name}\n"
    steps = [int(line.split(" after ")[1].split()[0]) for line in out.splitlines() if " after " in line]
    with av.open("b.mp4") as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == max(steps) + 2, "the beginning, every step, and how it ended"
    assert frames[0].shape == (68, 136, 3)
    with Image.open("tabletop.gif") as gif:
        assert gif.size == (136, 68)
        # Frames that equal the one before them are merged.
        assert max(steps) / 2 < gif.n_frames <= max(steps) + 2
    assert np.asarray(Image.open("a.png")).shape == (2 * 68, 8 * 68, 3)


def test_a_policy_can_be_watched(call, policy):
    code, out, _ = call(f"envs play --checkpoint {policy} --episodes 1 --denoising-steps 1 --env.max-steps 9")
    assert code == 0
    assert "timeout after 9 steps" in out or "failure after" in out


def test_a_run_plays_where_it_was_trained(call, make_run):
    run = make_run("a", EnvConfig("tabletop", options={"image_size": 28, "max_steps": 6}), 3)
    code, out, _ = call("envs", "play", "--checkpoint", run, "--episodes", 1, "--denoising-steps", 1)
    assert code == 0
    said, played, *_ = out.splitlines()
    assert said == "as in runs/a: --env tabletop --env.image-size 28 --env.max-steps 6 --execute-steps 3"
    assert "after 6 steps" in played
