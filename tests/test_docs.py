"""The documentation tells the truth: its commands run, its Python runs, its links lead somewhere."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from pirl.cli.main import main, parse
from pirl.data import get_robot, list_robots
from pirl.envs.registry import KNOWN, find_env_class
from pirl.interop import NormStats, save_policy
from pirl.models import create_model, get_model_config, list_model_configs

ROOT = Path(__file__).parents[1]
FIRST_PAGES = ["README.md", "README.zh-CN.md"]
PAGES = [
    *FIRST_PAGES,
    *("CHANGELOG.md", "CONTRIBUTING.md"),
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]

EXAMPLE = [*(ROOT / "examples" / "custom_env").glob("*.py")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def commands(page: str, language: str = "bash") -> list[list[str]]:
    lines = "".join(blocks(page, language)).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory with the checkpoints and the dataset that the documentation speaks of."""
    directory = tmp_path_factory.mktemp("docs")
    stats = {"state": NormStats(np.zeros(8), np.ones(8))}
    for name in ("tiny", "tiny_lora"):
        policy = create_model(get_model_config(name), jax.random.key(0))
        save_policy(directory / "checkpoints" / name, policy, norm_stats={"robot": stats})
    robot = get_robot("tabletop")
    widths = {"state": robot.state_dim, "actions": robot.action_dim}
    stats = {key: NormStats(np.zeros(width), np.ones(width)) for key, width in widths.items()}
    policy = create_model(get_model_config("tiny"), jax.random.key(0))
    save_policy(directory / "checkpoints" / "tabletop", policy, norm_stats={"tabletop": stats})
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("PIRL_CACHE", str(directory / "cache"))
    monkeypatch.chdir(directory)
    for file in EXAMPLE:
        shutil.copy(file, directory)
    exec(compile(blocks("docs/data.md", "python")[0], "docs/data.md", "exec"), {})
    yield directory
    monkeypatch.undo()


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
@pytest.mark.usefixtures("fresh_modules", "one_device")
def test_every_command_runs(page, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    for words in commands(page):
        if words[0] == "make":
            # Running them would run this suite again; that the targets exist is what can be asked here.
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        else:
            assert words[0] == "pirl", words
            with pytest.raises(SystemExit) as end:
                main(words[1:])
            assert not end.value.code, words


def test_commands_that_need_a_simulator_could_run():
    """They stand in text blocks, which nobody runs here; but their options have to exist."""
    examples = [words for words in commands("docs/environments.md", "text") if words[0] == "pirl"]
    known = [parse(words[1:]) for words in examples if "--env.adapter" not in words]
    assert len(known) >= 5
    for command in known:
        find_env_class(command.env_config())


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_every_python_example_runs(page, workplace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page not in FIRST_PAGES:  # they make their own
        (tmp_path / "checkpoints").symlink_to(workplace / "checkpoints")
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {})


def test_every_link_leads_to_a_file():
    for page in (*PAGES, "benchmarks/README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            assert target.startswith("http") or ((ROOT / page).parent / target).exists(), (page, target)


def test_every_preset_and_benchmark_is_documented():
    models, data = (ROOT / "docs/models.md").read_text(), (ROOT / "docs/data.md").read_text()
    assert all(f"`{name}`" in models for name in list_model_configs())
    assert all(f"`{name}`" in data for name in list_robots())
    environments = (ROOT / "docs/environments.md").read_text()
    for entry in KNOWN:
        assert f"| `{entry.alias}` | `{entry.id}` |" in environments
        for option in entry.options:
            flag = f"`--env.{option.name.replace('_', '-')}`"
            assert flag in environments, f"{entry.alias}: {flag}"
    record = (ROOT / "benchmarks/README.md").read_text()
    assert all(script.name in record for script in (ROOT / "benchmarks").glob("*.py"))


def test_commands_that_are_only_shown_could_run():
    """They stand in text blocks; but every option has to exist, and of training every preset and value."""
    pages = ("docs/quickstart.md", "docs/ript.md", "docs/training.md", "docs/sweep.md")
    for page in (*pages, *(page for page in PAGES if page.startswith("docs/guides/"))):
        for words in (words for words in commands(page, "text") if words[0] == "pirl"):
            command = parse(words[1:])
            if words[1] in ("train", "sweep") and "--resume" not in words:
                command.resolve()


def test_the_commands_of_the_cluster_examples_could_run():
    directory = ROOT / "examples" / "cluster"
    (job,) = (part for part in yaml.safe_load_all((directory / "job.yaml").read_text()) if part["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    script = (directory / "train.sbatch").read_text().replace("\\\n", "")
    (line,) = re.findall(r"^srun \S+ pirl (.*) \"\$\{resume\[@\]\}\"$", script, flags=re.MULTILINE)
    one, other = (parse(arguments).resolve() for arguments in (words, shlex.split(line)))
    assert (one.hosts.processes, one.hosts.process_id) == (2, 1)
    assert one.agent == other.agent
    subprocess.run(["bash", "-n", directory / "train.sbatch"], check=True)


def test_both_first_pages_show_the_same_commands_and_numbers():
    english, chinese = ((ROOT / page).read_text() for page in FIRST_PAGES)

    def facts(text):
        rows = [row.split("|") for row in text.splitlines() if row.startswith("|")]
        numbers = [cell.strip() for row in rows for cell in row if re.fullmatch(r"[\d\s.%–*]+", cell.strip())]
        return numbers, re.findall(r"`(pirl [^`]+)`", text), re.findall(r"\]\((docs/[^)]+)\)", text)

    for one, other in zip(facts(english), facts(chinese), strict=True):
        assert sorted(one) == sorted(other)


def test_every_page_has_its_place_in_the_navigation():
    named = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} <= named
