"""Do the most important tests notice? Break the code in one place at a time, in a copy, and see that they fail.

`make mutants`; each first has to pass on the code as it is. Ends with a table, and exit code 1 if a mutant survives.
Tests that compare with recordings which are not on this machine are skipped, and so are their mutants.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = "is skipped here"


@dataclass(frozen=True)
class Mutant:
    """One change of one line, and the test that stands against it."""

    file: str
    right: str
    wrong: str
    test: str


MUTANTS = (
    Mutant(
        "models/pi0.py",
        "x_t = t * noise + (1 - t) * actions\n        return",
        "x_t = (1 - t) * noise + t * actions\n        return",
        "models/test_pi0.py::test_outputs_equal_the_recorded_ones",
    ),
    Mutant(
        "models/tokenizer.py",
        'State: {spelled};\\nAction: "',
        'State: {spelled}; Action: "',
        "models/test_tokenizer.py::test_every_recorded_case_equals_openpi",
    ),
    Mutant(
        "data/transforms.py",
        "return stats.q01, stats.q99 - stats.q01 + EPSILON",
        "return stats.q01, stats.q99 - stats.q01 + 100 * EPSILON",
        "data/test_transforms.py::test_normalisation_equals_openpi",
    ),
    Mutant(
        "interop/writing.py",
        'suffix = "/value" if style == "trained" else ""',
        'suffix = "/value" if style == "released" else ""',
        "interop/test_checkpoints.py::test_the_layout_is_the_one_openpi_reads",
    ),
    Mutant(
        "data/chunks.py",
        "rows = np.minimum(steps, ends[:, None] - 1)",
        "rows = np.minimum(steps, len(trajectories.actions) - 1)",
        "data/test_chunks.py::test_no_chunk_ever_mixes_episodes",
    ),
    Mutant(
        "agents/acrlpd.py",
        "later = config.discount**config.horizon_length * values[:, 0]",
        "later = config.discount * values[:, 0]",
        "agents/test_acrlpd_values.py::test_critics_find_the_values_of_chunks_in_a_corridor",
    ),
    Mutant(
        "agents/acrlpd.py",
        "values = self._aggregate(self._values(self.critics.target, seen.next_prefix",
        "values = self._aggregate(self._values(self.critics.latest, seen.next_prefix",
        "agents/test_acrlpd.py::test_the_online_critics_choose_and_the_target_critics_value",
    ),
    Mutant(
        "agents/ript.py",
        "return (count * above - np.sum(above)) / (count - 1)",
        "return above - np.sum(above) / (count - 1)",
        "agents/test_ript.py::test_the_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards",
    ),
    Mutant(
        "agents/ript.py",
        "loss = jnp.sum(self._average(weights[:, None, None] * errors, drawn.chunks)) / count",
        "loss = jnp.sum(self._average(weights[:, None, None] * errors, drawn.chunks) / count)",
        "agents/test_ript.py::test_with_all_advantages_one_the_update_is_that_of_cloning_bit_for_bit",
    ),
    Mutant(
        "data/sampler.py",
        'self.step = int(state["step"])',
        'self.step = int(state["step"]) + 1',
        "training/test_resume.py::test_sigterm_and_ctrl_c_save_and_the_run_goes_on_to_the_same_bits",
    ),
    Mutant(
        "agents/learning.py",
        "gradients, metrics = jax.tree.map(lambda x: x / parts, total)",
        "gradients, metrics = total",
        "agents/test_acrlpd_updates.py::test_a_batch_in_four_parts_gives_the_same_update",
    ),
    Mutant(
        "envs/intervals.py",
        "centre = rate + z**2 / (2 * n)",
        "centre = rate",
        "envs/test_intervals.py",
    ),
)


def main() -> None:
    """Try all of them, or those whose test or file has a word in its name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose file or test contains one of these")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(word in m.file + m.test for word in words)]
    with tempfile.TemporaryDirectory(prefix="pirl-mutants-") as place:
        copy = Path(place) / "pirl"
        ignored = shutil.ignore_patterns(".*", "runs", "site", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        if (shared := ROOT.parent / "shared").is_dir():  # recordings that some tests compare with
            (Path(place) / "shared").symlink_to(shared)
        rows = [(mutant, verdict(copy, mutant)) for mutant in chosen]
    print("| broken | the test that stands against it | |", "|---|---|---|", sep="\n")
    for mutant, found in rows:
        before, after = (" ".join(text.split()) for text in (mutant.right, mutant.wrong))
        print(f"| `{mutant.file}`: `{before}` → `{after}` | `{mutant.test}` | {found} |")
    sys.exit(any(found not in ("fails", SKIPPED) for _, found in rows))


def verdict(copy: Path, mutant: Mutant) -> str:
    """What the test says of the broken code."""
    file = copy / "src" / "pirl" / mutant.file
    right = file.read_text()
    if right.count(mutant.right) != 1:
        return "is not there to be broken"
    before = outcome(copy, mutant.test)
    if before != "PASSES":
        return "fails already" if before == "fails" else before
    file.write_text(right.replace(mutant.right, mutant.wrong))
    try:
        return outcome(copy, mutant.test)
    finally:
        file.write_text(right)


def outcome(copy: Path, test: str) -> str:
    """What a test says of the sources of the copy; an error that is not a failed test is not an answer."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"tests/{test}"]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"{test}: {last}", file=sys.stderr, flush=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    if done.returncode:
        return "fails"
    return "PASSES" if " passed" in last else SKIPPED


if __name__ == "__main__":
    main()
