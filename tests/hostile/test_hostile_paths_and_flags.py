"""Paths that lead nowhere, and flags that are none: every command says so in its own words."""

# ruff: noqa: E501  one case per line, however long: a table is read from above to below

import json

import pytest
from arena import Case, delete, directory, link, nothing, parametrized, pipe, write
from test_hostile_labels_and_robots import ARM

LONG = "a" * 300
HOME = "~nobody_at_all/x"
STATS = "data stats v2.1 --robot arm.json --horizon"

PLACES = {
    "that is not there": (nothing, "gone", ["gone"]),
    "that is a file": (write("place", "no"), "place", ["place"]),
    "that is a file, with a slash": (write("place", "no"), "place/", ["place"]),
    "that is an empty directory": (directory("place"), "place", ["place"]),
    "that is a pipe": (pipe("place"), "place", ["place"]),
    "that is a link to nowhere": (link("place", "nowhere"), "place", ["place"]),
    "that is a link to itself": (link("place", "place"), "place", ["place"]),
    "with a name too long": (nothing, LONG, ["aaaa"]),
    "with a path too long": (nothing, "/".join(["a"] * 2200), ["a/a"]),
    "that is empty": (nothing, "", []),
    "with a line break": (nothing, "a\nb", ["a b|a\\nb"]),
    "with a picture in its name": (nothing, "🤖", ["🤖"]),
    "with broken text in its name": (nothing, "a\udcffb", ["a"]),
    "in nobody's home": (nothing, HOME, [HOME]),
    "below a file": (write("place", "no"), "place/below/it", ["place"]),
    "that is on the hub, without the hub": (nothing, "nobody/nothing", ["nobody/nothing"]),
}
COMMANDS = {
    "a dataset": ["data", "info"],
    "a dataset to label": ["data", "label", "--success", "0"],
    "a checkpoint": ["convert"],
    "a policy": ["eval", "--env", "tabletop", "--episodes", "1"],
}
PATHS = [
    Case(f"{name} {what}", hurt, [*command, place], says)
    for name, command in COMMANDS.items()
    for what, (hurt, place, says) in PLACES.items()
]  # fmt: skip
# What is checked reports its problems as findings, also if it is not there.
PATHS += [
    Case(f"a dataset to check {what}", hurt, ["data", "check", place], says, findings=True)
    for what, (hurt, place, says) in PLACES.items()
    if "hub" not in what and "too long" not in what
]  # fmt: skip

# Homes are looked up in the list of users, and there is none.
HOMES = [
    Case(f"nobody's home in {' '.join(command)}", nothing, [*command, f"{HOME}{ending}"], [HOME, "there is no user 'nobody_at_all'"])
    for command, ending in (
        (["eval", "--episodes", "1"], ""),
        (["eval", "expert", "--episodes", "1"], ""),
        (["eval", "expert", "--env", "CartPole-v1", "--env.adapter"], ".py:Adapter"),
        (["collect", "--episodes", "1", "--out", "there", "--policy"], ""),
        (["envs", "play", "--checkpoint"], ""),
        (["inspect"], ""),
        (["report"], ""),
        (["eval", "expert", "--episodes", "1", "--json"], ".json"),
        (["collect", "--policy", "expert", "--episodes", "1", "--out"], ""),
        (["doctor", "--runs-dir"], ""),
        (["train", "--resume", "--exp-name", "a", "--runs-dir"], ""),
    )
]  # fmt: skip

OUTPUTS = [
    Case("collect into a file", write("there", "precious"), "collect --policy expert --episodes 1 --out there", ["there", "is a file"]),
    Case("collect among others' files", write("there/a.txt", "precious"), "collect --policy expert --episodes 1 --out there", ["there", "not empty"]),
    Case("collect below a file", write("there", "precious"), "collect --policy expert --episodes 1 --out there/below", ["there"]),
    Case("collect into a name too long", nothing, ["collect", "--policy", "expert", "--episodes", "1", "--out", LONG], ["too long"]),
    Case("collect to go on with what is no log", write("there/meta/pirl_collect.json", "[]"), "collect --policy expert --episodes 1 --out there --resume", ["there"], writes="there"),
    Case("evaluate into a directory", directory("there"), "eval expert --episodes 1 --json there", ["there", "is a directory"]),
    Case("evaluate below a file", write("there", "precious"), "eval expert --episodes 1 --json there/below.json", ["there", "no directory"]),
    Case("film into no format", nothing, "eval expert --episodes 1 --video film.exe", ["film.exe"]),
    Case("film into a directory", directory("there.mp4"), "eval expert --episodes 1 --video there.mp4", ["there.mp4", "is a directory"]),
]  # fmt: skip

FLAGS = [
    Case("no such command", nothing, "dta info v2.1", ["no command dta", "Did you mean data?"]),
    Case("no such command of a group", nothing, "data inf v2.1", ["no command inf", "Did you mean info?"]),
    Case("no such option", nothing, "data info v2.1 --jsno", ["--jsno", "Did you mean --json?"]),
    Case("an option of Python's own", nothing, "data info v2.1 --__class__ x", ["--__class__|--class"]),
    Case("a number that is text", nothing, f"{STATS} many", ["horizon", "many"]),
    Case("a number that is a fraction", nothing, f"{STATS} 1.5", ["horizon", "1.5"]),
    Case("a number that is nothing", nothing, [*STATS.split(), ""], ["horizon"]),
    Case("a number below one", nothing, f"{STATS}=-3", ["--horizon should be at least 1", "-3"]),
    Case("a number of thirty digits", nothing, f"{STATS} {'9' * 30}", ["horizon"]),
    Case("a number of five thousand digits", nothing, f"{STATS} {'9' * 5000}", ["horizon"]),
    Case("a horizon beyond every memory", nothing, f"{STATS} 999999999999", ["horizon"]),
    Case("a choice that is none", nothing, "data info v2.1 --reward dense", ["reward", "dense"]),
    Case("a column that is not there", nothing, "data check v2.1 --reward-column gone", ["gone", "is not in the data"], findings=True),
    Case("a column that is empty", nothing, ["data", "check", "v2.1", "--success-column", ""], ["column ''", "is not in the data"], findings=True),
    Case("an argument that is missing", nothing, "data info", ["DATASET"]),
    Case("an argument too many", nothing, "data info v2.1 v3.0", ["v3.0"]),
    Case("a tolerance below zero", nothing, "convert --check v2.1 v3.0 --rtol=-1", ["--rtol", "negative"]),
    Case("a tolerance of NaN", nothing, "convert --check v2.1 v3.0 --rtol nan", ["--rtol"]),
    Case("a tolerance without end", nothing, "convert --check v2.1 v3.0 --atol inf", ["--atol"]),
    Case("options that do not belong together", nothing, "convert v2.1 --merge-lora", ["--merge-lora", "output"]),
    Case("an unknown model", nothing, "convert --check v2.1 --model pi9", ["v2.1"]),
    Case("no episodes", nothing, "eval expert --episodes 0", ["--episodes should be at least 1", "0"]),
    Case("episodes below zero", nothing, "eval expert --episodes=-5", ["--episodes should be at least 1", "-5"]),
    Case("a seed below zero", nothing, "eval expert --seed=-1", ["--seed", "-1"]),
    Case("a time limit of NaN", nothing, "eval expert --timeout nan", ["--timeout", "nan"]),
    Case("a time limit without end", nothing, "eval expert --timeout inf", ["--timeout", "inf"]),
    Case("guidance for nobody", nothing, "eval expert --guidance 1", ["--guidance", "checkpoint"]),
    Case("an unknown environment", nothing, "eval expert --env tabeltop --episodes 1", ["tabeltop", "tabletop"]),
    Case("an environment that is empty", nothing, ["eval", "expert", "--env", "", "--episodes", "1"], ["environment|env"]),
    Case("an environment of the future", nothing, "eval expert --env nobody/Nothing-v0 --episodes 1", ["nobody/Nothing-v0"]),
    Case("an option of the environment that is none", nothing, "eval expert --env.colour red --episodes 1", ["colour"]),
    Case("an option of the environment without a value", nothing, "eval expert --env.observation", ["--env.observation needs a value"]),
    Case("an adapter that is a program", nothing, "eval expert --env CartPole-v1 --env.adapter os:system --episodes 1", ["os:system|system"]),
    Case("a task that is none", nothing, "eval expert --task dance --episodes 1", ["dance"]),
    Case("an expert's noise of NaN", nothing, "eval expert --expert.noise nan --episodes 1", ["noise", "nan"]),
    Case("nobody who acts", nothing, ["collect", "--policy", "", "--episodes", "1", "--out", "there"], ["checkpoint"]),
    Case("no amount", nothing, "collect --policy expert --out there", ["--episodes", "--env-steps"]),
    Case("an amount below one", nothing, "collect --policy expert --env-steps=-1 --out there", ["--env-steps should be at least 1", "-1"]),
    Case("labels of a dataset that is not there", delete("v2.1"), "data label v2.1 --success 0", ["v2.1"]),
]  # fmt: skip


@parametrized([*PATHS, *HOMES])
def test_a_hostile_path_is_refused_by_name(arena, case):
    arena.try_case(case)


@pytest.mark.parametrize("variable", ["PIRL_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_in_nobodys_home_is_refused_by_name(arena, monkeypatch, variable):
    monkeypatch.delenv("PIRL_CACHE")
    monkeypatch.setenv(variable, HOME)
    arena.try_case(Case("its caches", nothing, "data cache", [HOME, "there is no user 'nobody_at_all'"]))


def test_without_a_home_the_cache_asks_for_one(arena, monkeypatch):
    """As in a container, under a number that no user has."""
    for variable in ("PIRL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.path.expanduser", str)
    arena.try_case(Case("its caches", nothing, "data cache", ["~/.cache", "Set HOME"]))


@parametrized([*OUTPUTS, *FLAGS])
def test_a_hostile_flag_is_refused_by_name(with_datasets, case):
    (with_datasets.work / "arm.json").write_text(json.dumps(ARM))
    with_datasets.try_case(case)
