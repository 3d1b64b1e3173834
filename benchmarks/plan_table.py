"""The table of `pirl plan` in the documentation: what folding with π₀ needs, trained in four ways on several machines.

Every row is a command, run in a process of its own; its answer is kept at once in a JSON file, so that this can be
interrupted and goes on where it was. A row takes some minutes of two cores. Rows whose machine cannot be compiled for
here (TPUs without `pip install 'pirl[plan]'`) are left out, and said. The last line is a JSON object.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pirl.files import write_file
from pirl.plan.table import format_bytes
from pirl.text import format_seconds

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- made by benchmarks/plan_table.py -->", "<!-- end of the table -->"
VARIANTS = {
    "action expert, `distill` (the preset)": "aloha_fold",
    "action expert, `awr`": "aloha_fold --agent.actor-mode awr",
    "LoRA, `awr`": "aloha_fold --model pi0_lora --agent.policy-ema-decay none --agent.freeze none --agent.actor-mode awr",
    "everything, `awr`": "aloha_fold --agent.freeze none --agent.actor-mode awr",
}
TOPOLOGIES = {
    "rtx4090:1": 1,
    "h100:8": 8,
    "a100:8": 8,
    "v5p:2x2x2": 8,
    "v6e:2x4": 8,
    "v5e:2x4": 8,
    "a100-40:4": 4,
    "rtx4090:4": 4,
}


def main() -> None:
    """Make what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/plan.json", help="where answers are kept")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/scale.md", help="the page with the table")
    parser.add_argument("--rows", type=int, help="make so many rows at most this time (default: all)")
    parser.add_argument("--topology", action="append", help="only rows of this machine; may be given several times")
    options = parser.parse_args()
    answers = json.loads(options.results.read_text()) if options.results.is_file() else {}
    wanted = [name for name in TOPOLOGIES if not options.topology or name in options.topology]
    missing = [command for _, name, command in rows() if command not in answers and name in wanted]
    failed = {}
    for command in missing[: options.rows]:
        print(f"pirl {command}", flush=True)
        answer, complaint = run(command)
        if answer is None:
            failed[command] = complaint
            continue
        answers[command] = answer
        write_file(options.results, json.dumps(answers, indent=1) + "\n")
    fill(options.page, table(answers))
    left = [command for _, _, command in rows() if command not in answers]
    print(json.dumps({"name": "plan_table", "rows": len(answers), "left": len(left), "failed": failed}))


def rows() -> list[tuple[str, str, str]]:
    """What is learned, the machine, and the command, of every row."""
    return [
        (learned, topology, f"plan {what} --fsdp-devices {devices} --topology {topology}")
        for topology, devices in TOPOLOGIES.items()
        for learned, what in VARIANTS.items()
    ]


def run(command: str) -> tuple[Any, str]:
    """The answer to a command, or what it complained about."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "plan.json"
        words = [sys.executable, "-m", "pirl.cli.main", *shlex.split(command), "--json", str(file)]
        done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if file.is_file():
            return json.loads(file.read_text())[0], ""
    return None, done.stderr.strip().splitlines()[-1]


def table(answers: dict[str, Any]) -> str:
    """The rows there are, as Markdown."""
    lines = [
        "| machine | compiled for | learns | fits | learner | at the peak | of | TFLOP | sent | update | largest batch | "
        "command |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for learned, topology, command in rows():
        if command in answers:
            stand_in = "CPU stand-ins" if answers[command]["simulated"] else "the machine"
            cells = (topology, stand_in, learned, *_cells(answers[command]), f"`pirl {command}`")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(answer: dict[str, Any]) -> list[str]:
    sizes, sent, step = answer["bytes_per_device"], answer["bytes_sent_per_device"], answer["seconds"]["step"]
    kinds = ("parameters", "frozen", "average", "optimizer", "start policy", "critics")
    return [
        "yes" if answer["fits"] else "no",
        format_bytes(sum(sizes.get(kind, 0) for kind in kinds)),
        "more" if sizes["peak"] is None else format_bytes(sizes["peak"]),
        format_bytes(sizes["available"]),
        f"{answer['flops_per_step'] / 1e12:,.0f}",
        "" if sent is None else format_bytes(sum(sent.values())),
        format_seconds(step) if answer["fits"] and step is not None else "",
        f"{answer['largest_batch']:,}" if answer["largest_batch"] else "none",
    ]


def fill(page: Path, text: str) -> None:
    """Put the table between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    write_file(page, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
