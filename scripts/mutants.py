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
        "data/test_transforms.py::test_normalization_equals_openpi",
    ),
    Mutant(
        "interop/checkpoint.py",
        'suffix = "/value" if style == "trained" else ""',
        'suffix = "/value" if style == "released" else ""',
        "interop/test_checkpoint.py::test_the_layout_is_the_one_openpi_reads",
    ),
    Mutant(
        "data/chunks.py",
        "rows = np.minimum(steps, ends[:, None] - 1)",
        "rows = np.minimum(steps, len(data.actions) - 1)",
        "data/test_chunks.py::test_no_chunk_ever_mixes_episodes",
    ),
    Mutant(
        "agents/acrlpd.py",
        "config.discount**config.horizon_length * values)",
        "config.discount * values)",
        "agents/test_acrlpd_values.py::test_critics_find_the_values_of_chunks_in_a_corridor",
    ),
    Mutant(
        "agents/acrlpd.py",
        "jnp.maximum(target, returns)",
        "jnp.where(returns > -jnp.inf, returns, target)",
        "agents/test_acrlpd.py::test_the_target_is_at_least_the_return_where_that_is_known",
    ),
    Mutant(
        "agents/common.py",
        "return jnp.mean(values, axis=0) - pessimism * jnp.std(values, axis=0)",
        "return jnp.mean(values, axis=0) + pessimism * jnp.std(values, axis=0)",
        "agents/test_acrlpd.py::test_the_online_critics_choose_and_the_target_critics_value",
    ),
    Mutant(
        "agents/acrlpd.py",
        "values = self._values(self.critic.target_params, enc.next_prefix",
        "values = self._values(self.critic.params, enc.next_prefix",
        "agents/test_acrlpd.py::test_the_online_critics_choose_and_the_target_critics_value",
    ),
    Mutant(
        "agents/acrlpd.py",
        "positive = advantages > self.threshold",
        "positive = advantages < self.threshold",
        "agents/test_acrlpd_condition.py::test_chunks_are_learned_under_the_sign_of_their_advantage",
    ),
    Mutant(
        "agents/acrlpd.py",
        "baseline = self._aggregate(self.ensemble.v_values(params, prefix), enc.pair)",
        "baseline = self._aggregate(self.ensemble.v_values(self.critic.target_params, prefix), enc.pair)",
        "agents/test_acrlpd.py::test_awr_weighs_chunks_by_clipped_exponential_advantages",
    ),
    Mutant(
        "agents/ript.py",
        "return (count * above - np.sum(above)) / (count - 1)",
        "return above - np.sum(above) / (count - 1)",
        "agents/test_ript.py::test_the_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards",
    ),
    Mutant(
        "agents/ript.py",
        "loss = jnp.sum(self._average(weights[:, None, None] * errors, inputs.chunks)) / count",
        "loss = jnp.sum(self._average(weights[:, None, None] * errors, inputs.chunks) / count)",
        "agents/test_ript.py::test_with_all_advantages_one_the_update_is_that_of_cloning_bit_for_bit",
    ),
    Mutant(
        "data/sampler.py",
        'self.step = int(state["step"])',
        'self.step = int(state["step"]) + 1',
        "training/test_resume.py::test_sigterm_and_ctrl_c_save_and_the_run_goes_on_to_the_same_bits",
    ),
    Mutant(
        "agents/common.py",
        "grads, metrics = jax.tree.map(lambda x: x / parts, total)",
        "grads, metrics = total",
        "agents/test_acrlpd_updates.py::test_a_batch_in_four_parts_gives_the_same_update",
    ),
    Mutant(
        "envs/evaluation.py",
        "center = rate + z**2 / (2 * n)",
        "center = rate",
        "envs/test_evaluation.py::test_wilson_gives_the_published_intervals",
    ),
    Mutant(
        "data/chunks.py",
        "sequence_mask=next_terminal | (starts + horizon < ends)",
        "sequence_mask=next_terminal | (starts + horizon <= ends)",
        "data/test_chunks.py::test_the_table_holds_for_every_start",
    ),
    Mutant(
        "data/outcomes.py",
        'return True if at_last.get("done") is False else at_last.get("truncated")',
        'return at_last.get("truncated")',
        "data/test_outcomes.py::test_a_failure_ends_or_runs_out_of_time_as_the_data_says",
    ),
    Mutant(
        "envs/rollout.py",
        "terminal=self.terminated,\n",
        "terminal=self.terminated or self.truncated,\n",
        "envs/test_rollout.py::test_a_rollout_becomes_an_episode_for_the_replay_buffer",
    ),
    Mutant(
        "data/replay.py",
        "if (file := self._episodes.pop(0).file) is not None:",
        "if (file := self._episodes.pop().file) is not None:",
        "data/test_replay.py::test_the_oldest_make_room",
    ),
    Mutant(
        "agents/acrlpd.py",
        "chosen = jnp.take_along_axis(candidates, best[",
        "chosen = jnp.take_along_axis(candidates, (best - 1)[",
        "agents/test_acrlpd.py::test_distill_learns_what_the_critics_prefer_of_the_data_and_the_start_policy_s_samples",
    ),
    Mutant(
        "agents/acrlpd.py",
        "jnp.where(is_above, config.expectile, 1 - config.expectile)",
        "jnp.where(is_above, 1 - config.expectile, config.expectile)",
        "agents/test_acrlpd.py::test_values_are_pulled_more_by_better_chunks_than_by_worse_ones",
    ),
    Mutant(
        "models/critic.py",
        "below = jax.scipy.stats.norm.cdf(edges, target[..., None], 0.75 * width)",
        "below = jax.scipy.stats.norm.cdf(edges, target[..., None], 1.75 * width)",
        "models/test_critic.py::test_hl_gauss_smooths_the_target_over_the_bins",
    ),
    Mutant(
        "models/critic.py",
        "(target - low) / (high - low))",
        "target)",
        "models/test_critic.py::test_bce_is_the_cross_entropy_of_the_place_in_the_range",
    ),
    Mutant(
        "agents/common.py",
        "else update_ema(self.ema_params, params, self.ema_decay)",
        "else update_ema(self.ema_params, self.params, self.ema_decay)",
        "agents/test_bc.py::test_an_update_moves_parameters_and_average_and_leaves_the_frozen",
    ),
    Mutant(
        "training/setup.py",
        "key = jax.random.fold_in(key, rollbacks)",
        "pass",
        "training/test_setup.py::test_every_update_of_every_run_and_after_every_rollback_has_a_key_of_its_own",
    ),
    Mutant(
        "models/lora.py",
        "b = b.sum(axis=0, keepdims=True)",
        "pass",
        "models/test_lora.py::test_a_merged_policy_samples_the_same",
    ),
    Mutant(
        "envs/evaluation.py",
        "results = {(result.task, result.seed): result for",
        'results = {("", result.seed): result for',
        "envs/test_evaluation.py::test_the_same_seed_of_another_task_is_another_start",
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
