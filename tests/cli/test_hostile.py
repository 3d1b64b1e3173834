"""Input that cannot work: every command refuses it with exit code 2 and one clear message, and changes nothing."""

import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from pirl.cli.main import main
from sample_datasets import build

SECONDS = 60  # a hang, on a machine that is busy with other things
NOBODY = "~nobody_at_all/x"
DRY = "train demo_bc --dry-run"
SWEEP = "sweep demo_bc --exp-name s --data.repo-id data --evaluation.every 500"
RATES = f"{SWEEP} --param agent.optimizer.peak-lr=1e-4,1e-3"
EXPERT = "eval expert --episodes 1"
COLLECT = "collect --policy expert --episodes 3"
STATS = "data stats data --robot arm.json --horizon"
LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))

# What is typed, and a part of the message.
COMMANDS = [
    ("dta info data", "pirl has no command dta. Did you mean data?"),
    ("data inf data", "pirl data has no command inf. Did you mean info?"),
    ("eval expert b c d", "pirl eval does not expect 'c d'. See pirl eval --help."),
    ("data info", "pirl data info needs DATASET."),
    ("", "pirl needs a command. See pirl --help."),
    # --- configurations
    ("train", "the run needs a name: --exp-name NAME"),
    ("train --exp-name x", "no configuration: name a preset (see pirl configs), or pass a --config-file"),
    ("train dmeo", "no preset is named 'dmeo'. Did you mean demo?"),
    ("train demo --exp-nmae x", "pirl train has no option --exp-nmae. Did you mean --exp-name?"),
    ("train demo --num-action-samples 4", "Did you mean --agent.num-action-samples?"),
    (f"{DRY} --env.objets 4", "tabletop has no option 'objets'. Did you mean objects?"),
    (f"{DRY} --env.objects four", "objects should be a whole number; it is 'four'"),
    (f"{DRY} --env.id tabeltop", "Did you mean tabletop?"),
    (f"{DRY} --steps many", "--steps should be a whole number; it is 'many'."),
    (f"{DRY} --steps {'9' * 5000}", "That is too large."),
    (f"{DRY} --steps", "pirl train: --steps needs a value."),
    (f"{DRY} --steps -1", "steps = -1 should be at least 0"),
    (f"{DRY} --agent.optimizer fast", "--agent.optimizer"),
    (f"{DRY} --agent.optimizer.peak-lr inf", "peak_lr = inf"),
    (f"{DRY} --agent.learner bc --agent.learner.x 1", "agent.learner"),
    (f"{DRY} --agent.horizon-length 3", "has no field 'horizon_length'. Another learner has it."),
    ("train debug --exp-name x --agent json:JSONDecoder", "is not a dataclass of settings with a method create"),
    ("train debug --exp-name x --agent.bta 1", "--agent has no field 'bta'. Did you mean agent.temperature.beta?"),
    (f"{DRY} --model.cameras '[!!python/name:os.system x]'", "cameras"),
    ("train demo --exp-name x --agent.discount 3", "--agent: discount = 3.0 should be in [0, 1]"),
    ("train demo --exp-name x --agent.actor-mode pg", "should be awr or distill or condition or bc"),
    ("train demo --exp-name x --data.selection.tasks '[a'", "--data.selection.tasks should be a list of texts"),
    ("train demo --exp-name ../x", "--exp-name '../x' is not a directory name inside runs_dir"),
    ("train demo --exp-name 'fold[1]'", "checkpoints cannot be written under a name with [ ]"),
    ("train demo --exp-name x --resume --overwrite", "choose one"),
    ("train --exp-name x --resume", "there is no run to resume in runs/x: config.yaml does not exist."),
    ("train aloha_fold --exp-name x --data.repo-id data", "--checkpoint DIRECTORY (OpenPI's: gsutil"),
    (f"{DRY} --data.repo-id ./nowhere", "there is no dataset directory"),
    (f"{DRY} --data.repo-id {NOBODY}", "there is no user 'nobody_at_all'"),
    (f"{DRY} --data.repo-id data --data.robot no.json", "no.json"),
    (f"{DRY} --data.repo-id data --data.asset-id ../../x", "asset_id = ../../x should name a directory inside"),
    (f"{DRY} --data.repo-id data --from-scratch false --checkpoint policy/pirl.json", "checkpoint:"),
    (f"{DRY} --config-file none.yaml", "none.yaml cannot be read as a configuration: No such file"),
    (f"{DRY} --config-file empty", "empty is not a regular file"),
    (f"{DRY} --config-file pipe", "pipe is not a regular file"),
    (f"{DRY} --config-file circle", "circle"),
    (f"{DRY} --config-file {'a' * 5000}", "too long"),
    (f"{DRY} --config-file {NOBODY}", "is in the home of nobody"),
    ("configs show dmeo", "Did you mean demo?"),
    ("configs show", "pirl configs show takes the name of a preset."),
    ("configs list demo", "pirl configs list takes no preset name."),
    ("configs demo", "Did you mean show demo?"),
    ("demo --episodes 0", "--episodes should be at least 1"),
    ("demo ript --observation state", "has no --observation"),
    ("demo ritp", "ritp"),
    ("doctor --runs-dir " + NOBODY, "there is no user 'nobody_at_all'"),
    ("plan demo_bc", "no hardware: pass a --topology"),
    ("plan demo_bc --topology h999:8", "h999"),
    (f"{SWEEP}", "pass at least one, such as --param"),
    (f"{SWEEP} --param batch-size=", "batch-size"),
    (f"{SWEEP} --param agent.__class__=1,2", "agent.--class--"),
    (f"{SWEEP} --param seed=0..1e999", "seed=0..1e999"),
    (f"{SWEEP} --param agent.optimizer.peak-lr=log:0..1", "above 0"),
    (f"{RATES} --rungs a,b", "a,b"),
    (f"{RATES} --rungs 5 --iterations 9", "leave them out"),
    (f"{RATES} --reduction 1", "should be at least 2"),
    (f"{RATES} --resume", "nothing to resume"),
    (f"{SWEEP} --param agent.optimizer.peak-lr=1,fast", "--agent.optimizer.peak-lr should be a number"),
    (f"{RATES} --trials 0", "--trials should be at least 1"),
    (f"{RATES} --metric eval/succes", "Did you mean eval/success?"),
    # --- environments and policies
    ("eval nowhere", "nowhere is not a checkpoint directory; for the scripted expert, use 'expert'"),
    ("eval empty", "params"),
    ("eval file", "file is not a checkpoint directory"),
    (f"eval {NOBODY}", "there is no user 'nobody_at_all'"),
    ("eval policy --expert.noise 1", "--expert.* is for the scripted expert"),
    ("eval policy --execute-steps 500", "--execute-steps 500 is more than the policy's chunk length"),
    ("eval policy --asset-id other", "no statistics 'other'"),
    (f"{EXPERT} --env tabeltop", "Did you mean tabletop?"),
    (f"{EXPERT} --env ''", "env"),
    (f"{EXPERT} --env nobody/Nothing-v0", "nobody/Nothing-v0"),
    (f"{EXPERT} --env.observation", "--env.observation needs a value"),
    (f"{EXPERT} --env.id CartPole-v1 --env.adapter nothing:Here", "needs the module nothing"),
    (f"{EXPERT} --expert.aim-bais 3", "Did you mean --expert.aim-bias?"),
    (f"{EXPERT} --expert.give-up 3", "error: --expert: give_up = 3.0 should be in [0, 1]"),
    (f"{EXPERT} --expert.noise nan", "noise"),
    (f"{EXPERT} --env-options 3", "pirl eval has no option --env-options"),
    (f"{EXPERT} --guidance 2", "--guidance is for checkpoints; the scripted expert does not use it"),
    (f"{EXPERT} --guidance nan", "--guidance should be a number; it is 'nan'"),
    (f"{EXPERT} --seed=-1", "--seed should be zero or more"),
    (f"{EXPERT} --timeout nan", "--timeout should be a number; it is 'nan'"),
    (f"{EXPERT} --task dance", "no task 'dance'"),
    (f"{EXPERT} --json empty", "is a directory; name a file"),
    (f"{EXPERT} --video file/film.gif", "it is no directory. Choose another place"),
    (f"{EXPERT} --video film.avi", "should end in .gif, .mp4 or .png"),
    (f"{EXPERT} --env.observation state --video film.gif", "has no camera"),
    ("eval expert --episodes 0", "--episodes should be at least 1; it is 0"),
    ("collect --policy expert --out there", "needs --episodes or --env-steps"),
    ("collect --policy expert --out there --env-steps=-1", "--env-steps should be at least 1"),
    (f"{COLLECT} --out used", "is not empty: choose another directory, or --resume to continue"),
    (f"{COLLECT} --out used --resume", "no dataset to continue"),
    (f"{COLLECT} --out file", "is a file"),
    (f"{COLLECT} --out {'a' * 300}", "too long"),
    (
        f"{COLLECT} --out there --codec libsvtav1 --env.image-size 28",
        "even and at least 64",
    ),
    ("envs lst", "Did you mean list?"),
    ("envs show tabletop --env aloha", "two different environments: leave one of them out"),
    ("envs show CartPole-v1", "EnvAdapter"),
    ("envs play tabletop", "does not expect 'tabletop'. See pirl envs play --help."),
    ("envs play --render gif --out a.mp4", "--render gif does not fit --out a.mp4"),
    ("envs play --size 0", "--size should be at least 1"),
    # --- checkpoints and runs
    ("convert nowhere", "does not exist"),
    ("convert file", "it is a file"),
    ("convert policy --chek", "Did you mean --check?"),
    ("convert policy out --model pi0base", "Did you mean pi0_base"),
    ("convert policy out --merge-lora", "no LoRA weights"),
    ("convert policy policy --overwrite", "the checkpoint itself"),
    ("convert policy used --overwrite", "is not a checkpoint, so it is not overwritten"),
    ("convert gs://bucket/pi0", "copy it first"),
    ("convert policy policy --check --atol -1", "cannot be negative"),
    ("convert policy --dtype bfloat16", "--dtype applies to writing a checkpoint"),
    ("convert policy out --json", "--json applies to the inspection"),
    ("convert x --dtype float8", "float8"),
    ("inspect policy --depth 0", "--depth 0 shows nothing: use 1 or more"),
    ("inspect policy --against actor", "--against needs --of"),
    ("report", "pirl report needs RUN…"),
    ("report empty", "empty"),
    # --- datasets
    ("data check data --rewrd raw", "Did you mean --reward?"),
    ("data info nowhere", "nowhere"),
    ("data info some/name", "some/name"),
    ("data info file", "file"),
    ("data info pipe", "pipe"),
    ("data info circle", "circle"),
    ("data info 'a\nb'", "a b"),
    ("data info data --reward dense", "dense"),
    ("data label data --success ''", "--success names no episodes"),
    ("data label data --success 0-9999999", "no episode 9999999; the last one is 2"),
    ("data label data --success rest --failure rest", "only one"),
    ("data label data --success 0 --failure 0-1", "episode 0 cannot be both"),
    ("data label data --csv absent.csv", "absent.csv"),
    ("data label data --csv a.csv --success 1", "either"),
    ("data drop data", "say which episodes"),
    ("data drop data --episodes 0-2", "no episode of data would be left"),
    (f"{STATS} 999999999999", "--horizon should be at least 1, and 10,000 at most"),
    ("data stats data --robot alhoa --horizon 5", "Did you mean aloha?"),
    ("data stats data --robot broken.json --horizon 5", "broken.json"),
    (f"{STATS} 5 --output file/norm.json", "it is no directory"),
]

# A configuration file, and what is said of it beside its name.
FILES = [
    ("steps: 1\nsteps: 2\n", "c.yaml:2:1: duplicate key 'steps'."),
    ("agent:\n\tdiscount: 1\n", "c.yaml:2:1:"),
    ("name: !!python/object/apply:os.mkdir [executed]\n", "c.yaml:1:7: could not determine a constructor"),
    (LAUGHS, "references (*a) are not supported"),
    ("agent: &a\n  more: *a\n", "c.yaml:2:9: references"),
    ("steps: " + "[" * 20_000, "nested too deeply"),
    ("steps: 1\n---\nsteps: 2\n", "expected a single document"),
    ('name: "never\n', "c.yaml:2:1:"),
    (b"name: a\0b\n", "is not valid YAML"),
    ("steps: 1\n".encode("utf-16"), "it is not text in UTF-8"),
    (pickle.dumps({}), "c.yaml"),
    ("- steps\n", "should hold fields and their values"),
    ("1: 2\n", "c.yaml:1:1: 1 is not the name of a field"),
    ("", "lacks name, model, agent: name a preset to begin with"),
    ("preset: dmeo", "Did you mean demo?"),
    ("preset: [demo]", "preset should be the name of one"),
    ("name: a\nmodel: {preset: tiny}\nagent: {}", "agent lacks learner: one of bc, acrlpd"),
    ("preset: demo\nstep: 5", "no field 'step'. Did you mean steps?"),
    ("preset: demo\nagent: {num_action_sample: 5}", "agent has no field 'num_action_sample'. Did you mean num_act"),
    ("preset: demo\nnum_action_samples: 5", "Did you mean agent.num_action_samples?"),
    ("preset: demo\nmodel: tiny", "model should be a group of fields; it is 'tiny'."),
    ("preset: demo\nmodel: {cameras: [1, 2]}", "model.cameras should be"),
    ("preset: demo\nmodel: {image_resolution: [1, 2, 3]}", "model.image_resolution should be a list of 2"),
    ("preset: demo\nmodel: {action_dim: 0}", "action_dim = 0 should be"),
    ("preset: demo\nagent: {learner: acrlpdd}", "Did you mean acrlpd?"),
    ("preset: demo\nagent: {learner: [bc]}", "there is no learner ['bc']"),
    ("preset: demo\nagent: {discount: .nan}", "agent.discount should be a number; it is nan."),
    (f"preset: demo\nagent: {{discount: 1{'0' * 400}}}", "agent.discount should be a number"),
    ("preset: demo\nenv: {objets: 1}", "has no option 'objets'. Did you mean objects?"),
    ("preset: demo\nenv: {id: 3}", "env.id should be text; it is 3."),
    ("preset: aloha_fold\nenv: {max_steps: 3}", "env lacks id"),
    ("preset: demo\nenv: {id: x, adapter: 'os:system'}", "env"),
    ("preset: demo\nsteps: 1.5", "steps should be a whole number; it is 1.5."),
    (f"preset: demo\nsteps: {'9' * 5000}", "c.yaml"),
    ("preset: demo\nfrom_scratch: 1", "from_scratch should be true or false; it is 1."),
    ("preset: demo\ndata: {repo_id: 7}", "data.repo_id should be text or none; it is 7. Put it in quotes."),
    ('preset: demo\ndata: {repo_id: "a\\0b"}', "data.repo_id should be text"),
    ("preset: demo\nlogging: {wandb: true}", "logging.wandb should be off or offline or online; it is True."),
    ("preset: demo\nonline: {prior_ratio: 1.5}", "online: prior_ratio = 1.5 should be in [0, 1]"),
    ("preset: demo\nonline: {utd_ratio: 0}", "online: utd_ratio = 0.0 should be above 0"),
    ("preset: demo\nhealth: {min_success_ratio: 1}", "health: min_success_ratio = 1.0 should be in [0, 1)"),
    ("preset: demo\nrollout: {curriculum: {floor: 0}}", "curriculum: floor = 0.0 should be in (0, 1]"),
]


@pytest.fixture(scope="module")
def around(tmp_path_factory, policy):
    """A directory with a dataset, a checkpoint, a robot, and things that are in the way."""
    directory = tmp_path_factory.mktemp("around")
    build(directory / "data", rewards="none", cameras="none")
    shutil.copytree(policy, directory / "policy")
    (directory / "empty").mkdir()
    (directory / "used").mkdir()
    (directory / "used" / "thesis.tex").write_text("precious")
    (directory / "file").write_text("precious")
    (directory / "circle").symlink_to("circle")
    (directory / "broken.json").write_text('{"name": ')
    robot = {"name": "arm", "cameras": {}, "state": ["observation.state"], "actions": ["action"]}
    (directory / "arm.json").write_text(json.dumps(robot))
    os.mkfifo(directory / "pipe")
    return directory


@pytest.fixture
def refuse(around, capsys, monkeypatch, tmp_path, unchecked_signatures):
    """Call pirl with input that it has to refuse."""
    monkeypatch.chdir(around)
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module, name in ((os, "system"), (pickle, "load"), (pickle, "loads"), (subprocess.Popen, "__init__")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a pickle was read, or a program started"))
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"no end after {SECONDS} s"))

    def call(command, says):
        signal.alarm(SECONDS)
        with pytest.raises(SystemExit) as end:
            main(shlex.split(command))
        out, err = capsys.readouterr()
        shown = f"pirl {command[:200]}: exit code {end.value.code}\n{out[-1000:]}\n{err[-3000:]}"
        assert end.value.code == 2, shown
        assert err.startswith("error: "), shown
        assert "Traceback" not in err, shown
        assert len(err) < 6000, "the message is too long to be read"
        assert says in " ".join(err.split()), shown

    yield call
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def contents(directory):
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(Path(directory).rglob("*"))
    }


@pytest.mark.parametrize("name", sorted({command.partition(" ")[0] for command, _ in COMMANDS}))
def test_what_cannot_work_is_refused(refuse, around, name):
    if name == "sweep":
        pytest.importorskip("optuna")
    before = contents(around)
    for command, says in COMMANDS:
        if command.partition(" ")[0] == name:
            refuse(command, says)
            assert contents(around) == before, command


def test_a_file_that_is_no_configuration_is_refused(refuse, around):
    for content, says in FILES:
        (around / "c.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
        before = contents(around)
        refuse("train --exp-name x --config-file c.yaml", says)
        assert contents(around) == before
    (around / "c.yaml").write_text("preset: demo")
    refuse("train debug --exp-name x --config-file c.yaml", "begins with the preset demo, the command with debug")
    (around / "c.yaml").unlink()


def test_a_sweep_that_is_damaged_is_not_resumed(refuse, around):
    pytest.importorskip("optuna")
    for content in (b"{", b"[]", b"[" * 100_000, b"\xff\xfe"):
        (around / "runs" / "s").mkdir(parents=True)
        (around / "runs" / "s" / "sweep.json").write_bytes(content)
        refuse(f"{RATES} --resume", "damaged")
        shutil.rmtree(around / "runs")
    (around / "runs" / "s").mkdir(parents=True)
    (around / "runs" / "s" / "a.txt").write_text("precious")
    refuse(RATES, "not empty")
    shutil.rmtree(around / "runs")


def test_a_cache_in_a_home_that_is_not_known_is_refused(refuse, monkeypatch):
    monkeypatch.setenv("PIRL_CACHE", NOBODY)
    refuse("data cache", "there is no user 'nobody_at_all'")
    for variable in ("PIRL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.path.expanduser", str)  # as in a container, under a number that no user has
    refuse("data cache", "Set HOME")
