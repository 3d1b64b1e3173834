"""Configurations made to hurt: YAML with tags, bombs and lies, and options that are none."""

# ruff: noqa: E501  one case per line, however long: a table is read from above to below

import pickle

import pytest
from arena import Case, directory, link, nothing, parametrized, pipe, write
from test_hostile_datasets import Bait

TRAIN = "train demo_bc --exp-name try --config-file c.yaml --dry-run"
LAUGHS = "a: &a [lol, lol]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


def yaml(what: str, text: str | bytes, *says: str) -> Case:
    """A configuration file that is refused; its name is part of every message."""
    return Case(what, write("c.yaml", text), TRAIN, ["c.yaml", *says])


def option(what: str, options: list[str], *says: str, preset: str = "demo_bc") -> Case:
    return Case(what, nothing, ["train", preset, "--exp-name", "try", "--dry-run", *options], says)


SYNTAX = [
    yaml("a tag that would run a program", "name: !!python/object/apply:os.mkdir [executed]\n", ":1:", "python/object"),
    yaml("a tag that would make an object", "name: !!python/object:pirl.errors.UserError {}\n", ":1:", "python/object"),
    yaml("a tag that would import a module", "name: !!python/module:antigravity\n", ":1:", "python/module"),
    yaml("a tag that is a name", "name: !!python/name:os.system\n", ":1:", "python/name"),
    yaml("a billion laughs", LAUGHS, "references", "*a"),
    yaml("an alias to itself", "agent: &a\n  more: *a\n", ":2:", "references"),
    yaml("a merge of itself", "agent: &a\n  <<: *a\n", ":2:", "references"),
    yaml("the same key twice", "steps: 1\nsteps: 2\n", ":2:", "duplicate key 'steps'"),
    yaml("a tab for indentation", "agent:\n\tdiscount: 1\n", ":2:"),
    yaml("a deep nest of lists", "steps: " + "[" * 20_000, "nested too deeply"),
    yaml("a deep nest of groups", "{a: " * 5_000, "nested too deeply"),
    yaml("two documents", "steps: 1\n---\nsteps: 2\n", ":1:|:2:"),
    yaml("no end of a quotation", 'name: "never\n', ":1:|:2:"),
    yaml("a NUL byte", b"name: a\0b\n", "YAML"),
    yaml("a file in UTF-16", "steps: 1\n".encode("utf-16"), "UTF-8"),
    yaml("a file in Latin-1", "name: é\n".encode("latin-1"), "UTF-8"),
    yaml("a pickle", pickle.dumps(Bait()), "YAML|UTF-8"),
    yaml("a list", "- steps\n", "should hold fields"),
    yaml("a word", "steps\n", "should hold fields"),
    yaml("keys that are numbers", "1: 2\n", ":1:", "not the name of a field"),
    yaml("keys that are lists", "[1, 2]: 3\n", ":1:", "not the name of a field"),
    yaml("binary data", "name: !!binary aGVsbG8=\n", "name should be text"),
    yaml("a set", "agent: !!set {a, b}\n", "agent"),
]  # fmt: skip

VALUES = [
    yaml("an unknown field", "stesp: 1\n", "no field 'stesp'", "Did you mean steps?"),
    yaml("an unknown field of a group", "agent:\n  optimiser: {}\n", "no field 'optimiser'", "optimizer"),
    yaml("a field of Python's own", "__class__: x\n", "no field '__class__'"),
    yaml("an unknown preset", "preset: demo_ac\n", "demo_ac"),
    yaml("a preset that is a list", "preset: [demo]\n", "preset should be the name"),
    yaml("a preset that is a path", "preset: ../../etc/passwd\n", "preset"),
    yaml("a preset beside another", "preset: demo\n", "demo", "leave one of them out"),
    yaml("an unknown learner", "agent: {learner: magic}\n", "magic", "Known"),
    yaml("a learner that is a list", "agent: {learner: [bc]}\n", "agent.learner"),
    yaml("an unknown model", "model: {preset: pi9}\n", "pi9", "Known"),
    yaml("a model that is a list", "model: [tiny]\n", "model should be a group"),
    yaml("steps of text", "steps: many\n", "steps should be a whole number", "many"),
    yaml("steps of a fraction", "steps: 1.5\n", "steps should be a whole number", "1.5"),
    yaml("steps of NaN", "steps: .nan\n", "steps should be a whole number", "nan"),
    yaml("steps without end", "steps: .inf\n", "steps should be a whole number", "inf"),
    yaml("steps that are true", "steps: true\n", "steps should be a whole number", "True"),
    yaml("steps of nothing", "steps:\n", "steps should be a whole number", "None"),
    yaml("steps of five thousand digits", "steps: " + "9" * 5000 + "\n", "c.yaml"),
    yaml("steps of five thousand hexadecimal digits", "steps: 0x" + "f" * 5000 + "\n", "should be"),
    yaml("a rate of five thousand hexadecimal digits", "agent: {optimizer: {peak_lr: 0x" + "f" * 5000 + "}}\n", "should be"),
    yaml("a rate in base 60 of five thousand places", "agent: {optimizer: {peak_lr: 1" + ":59" * 5000 + "}}\n", "should be"),
    yaml("a rate of NaN", "agent: {optimizer: {peak_lr: .nan}}\n", "peak_lr", "nan"),
    yaml("a rate without end", "agent: {optimizer: {peak_lr: .inf}}\n", "peak_lr = inf", "finite"),
    yaml("a rate at the end without end", "agent: {optimizer: {end_lr: .inf}}\n", "end_lr = inf", "finite"),
    yaml("a weight decay of NaN", "agent: {optimizer: {weight_decay: .nan}}\n", "weight_decay", "nan"),
    yaml("a name that is a number", "name: 7\n", "name should be text", "Put it in quotes"),
    yaml("a place that is a list", "runs_dir: [a]\n", "runs_dir should be a path"),
    yaml("an environment without a name", "env: {size: 3}\n", "env"),
    yaml("an environment that is a number", "env: {id: 3}\n", "env"),
    yaml("an environment of an unknown name", "env: {id: tabeltop}\nevaluation: {every: 10}\n", "tabeltop"),
    yaml("an adapter that is a program", "env: {id: x, adapter: 'os:system'}\n", "env"),
    yaml("an adapter that climbs", "env: {id: x, adapter: '../../outside:Env'}\n", "env"),
    yaml("a model that is a word", "model: tiny\n", "model should be a group"),
    yaml("a model that is a number", "model: 3\n", "model should be a group"),
    yaml("a vision that is a word", "model: {vision: good}\n", "model.vision should be a group", "good"),
    yaml("a language that is a list", "model: {language: [1, 2]}\n", "model.language should be a group"),
    yaml("cameras that are a number", "model: {cameras: 3}\n", "model.cameras should be", "3"),
    yaml("a dtype that is a number", "model: {dtype: 32}\n", "model.dtype should be", "32"),
    yaml("cameras of numbers", "model: {cameras: [1, 2]}\n", "model.cameras should be"),
    yaml("a picture of no size", "model: {image_resolution: [0, 0]}\n", "image_resolution"),
]  # fmt: skip

IMPOSSIBLE = [
    Case("negative steps", write("c.yaml", "steps: -1\n"), TRAIN, ["steps = -1", "at least 0"]),
    Case("a batch of nothing", write("c.yaml", "batch_size: 0\n"), TRAIN, ["batch_size = 0", "at least 1"]),
    Case("a seed below zero", write("c.yaml", "seed: -1\n"), TRAIN, ["seed = -1", "at least 0"]),
    Case("a seed of a hundred digits", write("c.yaml", "seed: " + "9" * 100 + "\n"), TRAIN, ["c.yaml", "too large"]),
    Case("steps of a hundred digits", write("c.yaml", "steps: " + "9" * 100 + "\n"), TRAIN, ["c.yaml", "too large"]),
    Case("an asset id that climbs", write("c.yaml", "data: {asset_id: ../../x}\n"), TRAIN, ["asset_id", "../../x"]),
    Case("an asset id with a NUL", write("c.yaml", 'data: {asset_id: "a\\0b"}\n'), TRAIN, ["asset_id"]),
    Case("a dataset with a NUL in its name", write("c.yaml", 'data: {repo_id: "a\\0b"}\n'), TRAIN, ["repo_id should be text", "x00"]),
    Case("a dataset with a line break in its name", write("c.yaml", 'data: {repo_id: "a\\nb"}\n'), TRAIN, ["repo_id", "no dataset directory"]),
    Case("a dataset called by a picture", write("c.yaml", "data: {repo_id: 🤖}\n"), TRAIN, ["repo_id", "🤖"]),
    Case("a dataset with a name too long", write("c.yaml", f"data: {{repo_id: {'a' * 5000}}}\n"), TRAIN, ["repo_id|too long"]),
    Case("a dataset in nobody's home", write("c.yaml", "data: {repo_id: ~nobody_at_all/x}\n"), TRAIN, ["~nobody_at_all"]),
    Case("a checkpoint with a NUL in its name", write("c.yaml", 'data: {repo_id: .}\nfrom_scratch: false\ncheckpoint: "a\\0b"\n'), TRAIN, ["checkpoint"]),
    Case("a checkpoint in nobody's home", write("c.yaml", "data: {repo_id: .}\nfrom_scratch: false\ncheckpoint: ~nobody_at_all/x\n"), TRAIN, ["~nobody_at_all"]),
    Case("runs in nobody's home", write("c.yaml", "data: {repo_id: .}\nruns_dir: ~nobody_at_all/x\n"), TRAIN, ["~nobody_at_all"]),
    Case("runs in a place with a NUL", write("c.yaml", 'data: {repo_id: .}\nruns_dir: "a\\0b"\n'), TRAIN, ["runs_dir"]),
    Case("a robot of an unknown name", write("c.yaml", "data: {robot: alhoa, repo_id: .}\n"), TRAIN, ["alhoa", "Did you mean aloha"]),
    Case("a robot in a file that is not there", write("c.yaml", "data: {robot: no.json, repo_id: .}\n"), TRAIN, ["no.json"]),
]  # fmt: skip

FILES = [
    Case("the configuration is not there", nothing, TRAIN, ["c.yaml", "No such file"]),
    Case("the configuration is a directory", directory("c.yaml"), TRAIN, ["c.yaml", "regular file"]),
    Case("the configuration is a pipe", pipe("c.yaml"), TRAIN, ["c.yaml", "regular file"]),
    Case("the configuration is endless", link("c.yaml", "/dev/zero"), TRAIN, ["c.yaml", "regular file"]),
    Case("the configuration is a link to nowhere", link("c.yaml", "nowhere"), TRAIN, ["c.yaml", "No such file"]),
    Case("the configuration is a link to itself", link("c.yaml", "c.yaml"), TRAIN, ["c.yaml"]),
    Case("the configuration has a name too long", nothing, ["train", "--exp-name", "a", "--config-file", "a" * 5000], ["too long"]),
    Case("the configuration is in nobody's home", nothing, "train --exp-name a --config-file ~nobody_at_all/c.yaml", ["~nobody_at_all", "home of nobody"]),
]  # fmt: skip

OPTIONS = [
    option("an option that does not exist", ["--bacth-size", "3"], "--bacth-size", "Did you mean --batch-size?"),
    option("an option without a value", ["--batch-size"], "--batch-size needs a value"),
    option("an option with another for its value", ["--batch-size", "--steps", "3"], "--batch-size needs a value"),
    option("an option of text for a number", ["--batch-size", "many"], "--batch-size should be a whole number", "many"),
    option("an option of nothing", ["--batch-size", ""], "--batch-size should be a whole number"),
    option("an option beyond all numbers", ["--steps", "1e999"], "--steps should be a whole number"),
    option("an option of five thousand digits", ["--steps", "9" * 5000], "--steps"),
    option("an option that is a list", ["--steps", "[1, 2]"], "--steps should be a whole number"),
    option("an option that is YAML with a tag", ["--model.cameras", "[!!python/name:os.system x]"], "cameras"),
    option("a group for a value", ["--agent.optimizer", "fast"], "--agent.optimizer"),
    option("a value and its fields", ["--agent.learner", "bc", "--agent.learner.x", "1"], "agent.learner"),
    option("guidance of a model that reads no prompt", ["--agent.weighting", "guidance", "--model.max-token-len", "0"], "agent.weighting = guidance needs a prompt", preset="demo_ript"),
    option("a preset that does not exist", [], "demo_bcc", preset="demo_bcc"),
    Case("a run that is called ..", nothing, "train demo_bc --exp-name ../up", ["'../up'", "not a directory name"]),
    Case("a run with an absolute name", nothing, "train demo_bc --exp-name /etc/x", ["/etc/x", "not a directory name"]),
    Case("a run with an empty name", nothing, ["train", "demo_bc", "--exp-name", ""], ["not a directory name"]),
    Case("a run with a NUL in its name", nothing, ["train", "demo_bc", "--exp-name", "a\0b"], ["not a directory name"]),
    Case("a run that is a pattern", nothing, "train demo_bc --exp-name a*b", ["a*b"]),
    Case("a preset to show that is a path", nothing, "configs show ../../etc/passwd", ["../../etc/passwd"]),
    Case("a preset to show that is empty", nothing, ["configs", "show", ""], ["''"]),
]  # fmt: skip


@parametrized([*SYNTAX, *VALUES, *IMPOSSIBLE, *FILES, *OPTIONS])
def test_a_hostile_configuration_is_refused_by_name(arena, case):
    arena.try_case(case)


SWEEP = ["sweep", "demo_bc", "--exp-name", "s", "--data.repo-id", ".", "--evaluation.every", "500"]
RATES = [*SWEEP, "--param", "agent.optimizer.peak-lr=1e-4,1e-3"]
SWEEPS = [
    Case("a parameter without values", nothing, [*SWEEP, "--param", "batch-size="], ["batch-size", "two values"]),
    Case("a parameter without a name", nothing, [*SWEEP, "--param", "=1,2"], ["=1,2", "FIELD=VALUE"]),
    Case("a parameter that is empty", nothing, [*SWEEP, "--param", ""], ["FIELD=VALUE"]),
    Case("a parameter of Python's own", nothing, [*SWEEP, "--param", "agent.__class__=1,2"], ["agent.--class--", "no such field"]),
    Case("a range without end", nothing, [*SWEEP, "--param", "seed=0..1e999"], ["seed=0..1e999", "range"]),
    Case("a range the wrong way round", nothing, [*SWEEP, "--param", "seed=9..1"], ["seed=9..1", "larger"]),
    Case("a range of words", nothing, [*SWEEP, "--param", "name=1..2"], ["name"]),
    Case("a logarithm of zero", nothing, [*SWEEP, "--param", "agent.optimizer.peak-lr=log:0..1"], ["above 0"]),
    Case("rungs of words", nothing, [*RATES, "--rungs", "a,b"], ["a,b"]),
    Case("rungs of nothing", nothing, [*RATES, "--rungs", ""], ["rungs"]),
    Case("rungs below zero", nothing, [*RATES, "--rungs", "-5,5"], ["-5"]),
    Case("rungs of five thousand digits", nothing, [*RATES, "--rungs", "9" * 5000], ["rungs"]),
    Case("no trials", nothing, [*RATES, "--trials", "0"], ["--trials should be at least 1"]),
    Case("no jobs", nothing, [*RATES, "--jobs", "-1"], ["--jobs should be at least 1"]),
    Case("a metric of nothing", nothing, [*RATES, "--metric", ""], ["--metric"]),
    Case("a sweep where others' files are", write("runs/s/a.txt", "precious"), RATES, ["runs/s", "not empty"]),
    Case("a sweep where a file is", write("runs/s", "precious"), RATES, ["runs/s", "is a file"]),
    Case("a sweep to resume that is damaged", write("runs/s/sweep.json", "{"), [*RATES, "--resume"], ["sweep.json", "damaged"], writes="runs"),
    Case("a sweep to resume that is a list", write("runs/s/sweep.json", "[]"), [*RATES, "--resume"], ["sweep.json", "damaged"], writes="runs"),
    Case("a sweep to resume that is a deep nest", write("runs/s/sweep.json", "[" * 100_000), [*RATES, "--resume"], ["sweep.json", "damaged"], writes="runs"),
    Case("a sweep to resume that is no text", write("runs/s/sweep.json", b"\xff\xfe"), [*RATES, "--resume"], ["sweep.json", "damaged"], writes="runs"),
    Case("a sweep to resume that is a pipe", lambda work: ((work / "runs/s").mkdir(parents=True), pipe("runs/s/sweep.json")(work)), [*RATES, "--resume"], ["sweep.json", "damaged"], writes="runs"),
]  # fmt: skip


@parametrized(SWEEPS)
def test_a_hostile_sweep_is_refused_by_name(arena, case):
    pytest.importorskip("optuna")
    arena.try_case(case)
