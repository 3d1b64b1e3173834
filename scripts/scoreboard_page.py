"""Draw docs/results/offline_rl.json: a figure of all cells, and the table on the page beside it."""

import json
from html import escape
from pathlib import Path
from typing import Any

from pirl.files import write_file

DOCS = Path(__file__).parents[1] / "docs"
DATASETS = {
    "noisy": "noise on every action",
    "mixed": "good or bad as a whole",
    "off": "all aim 4 cm off",
    "slow": "all succeed, late",
}
POLICIES = {
    "bc": "BC",
    "bc_more": "BC, more updates",
    "bc_successes": "BC on successes",
    "bc_successes_more": "BC on successes, more updates",
    "bc_only_successes": "BC on successes from scratch",
    "acrlpd": "ACRLPD, exported",
    "acrlpd_best_of_n": "ACRLPD, best of 8",
    "awr": "awr, exported",
    "condition": "condition, exported",
    "frozen": "encoder frozen, exported",
    "frozen_best_of_n": "encoder frozen, best of 8",
    "random_weights": "control: random weights",
    "blind_critic": "control: blind critics",
    "perfect_critic": "control: critics told the positions",
    "perfect_choice": "control: choice by simulation",
}
WIDTH, PANEL, ROW, TOP, NAMES = 760, 230, 15, 22, 200
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;fill:#63686f}"
    ".title{font-weight:600;fill:#1c1e21}.value{fill:#1c1e21;font-size:11px}"
    "rect.paper{fill:#fdfdfc}rect.track{fill:#eeeeea}rect.clone{fill:#a4a8ac}rect.acrlpd{fill:#0072b2}"
    "rect.other{fill:#8fc1de}line{stroke:#1c1e21;stroke-width:1.2}"
)

Row = dict[str, Any]


def main() -> None:
    """Write both from the rows over all seeds."""
    rows = json.loads((DOCS / "results" / "offline_rl.json").read_text(encoding="utf-8"))["rows"]
    write_file(DOCS / "images" / "offline_rl.svg", draw(rows))
    page = DOCS / "results" / "offline_rl.md"
    begin, end = "<!-- table: scripts/scoreboard_page.py -->\n", "<!-- end of table -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    write_file(page, before + begin + table(rows) + end + rest.split(end)[1])


def table(rows: list[Row]) -> str:
    """Every row, in Markdown."""
    lines = [
        "| demonstrations | observation | policy | success | seeds | steps | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = POLICIES[row["policy"]]
        cells = (
            DATASETS[row["dataset"]],
            row["observation"],
            f"**{name}**" if row["policy"] == "acrlpd" else name,
            f"{100 * row['success']:.1f} % [{100 * row['low']:.1f}, {100 * row['high']:.1f}]",
            ", ".join(f"{100 * share:.1f}" for share in row["by_seed"]),
            "" if row["steps"] is None else f"{row['steps']:.1f}",
            str(row["cpu_seconds"]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row]) -> str:
    """Bars with intervals: datasets below each other, by state on the left and from pixels on the right."""
    parts, y = [], 0
    for dataset, title in DATASETS.items():
        shown = [policy for policy in POLICIES if any(_is(row, dataset, None, policy) for row in rows)]
        for column, observation in enumerate(("state", "pixels")):
            left = NAMES + column * (PANEL + 50)
            parts.append(f'<text class="title" x="{left}" y="{y + 15}">{escape(title)}, {observation}</text>')
            for index, policy in enumerate(shown):
                top = y + TOP + index * ROW
                if not column:
                    parts.append(
                        f'<text x="{NAMES - 8}" y="{top + 11}" text-anchor="end">{escape(POLICIES[policy])}</text>'
                    )
                for row in rows:
                    if _is(row, dataset, observation, policy):
                        parts.append(_bar(row, left, top))
        y += TOP + len(shown) * ROW + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img"><title>Success of every policy'
    )
    head += f'</title><style>{STYLE}</style><rect class="paper" width="{WIDTH}" height="{y}"/>'
    return head + "".join(parts) + "</svg>\n"


def _is(row: Row, dataset: str, observation: str | None, policy: str) -> bool:
    return (row["dataset"], row["policy"]) == (dataset, policy) and observation in (None, row["observation"])


def _bar(row: Row, left: int, top: int) -> str:
    policy, middle = row["policy"], top + 6
    kind = "clone" if policy.startswith("bc") else "acrlpd" if policy == "acrlpd" else "other"
    low, high = (left + PANEL * row[end] for end in ("low", "high"))
    return (
        f'<rect class="track" x="{left}" y="{top + 1}" width="{PANEL}" height="{ROW - 4}"/>'
        f'<rect class="{kind}" x="{left}" y="{top + 1}" width="{PANEL * row["success"]:.1f}" height="{ROW - 4}"/>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle + 0.5}" y2="{middle + 0.5}"/>'
        f'<text class="value" x="{left + PANEL + 5}" y="{top + 11}">{100 * row["success"]:.1f} %</text>'
    )


if __name__ == "__main__":
    main()
