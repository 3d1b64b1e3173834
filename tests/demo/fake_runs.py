"""Runs and datasets as their directories tell of them, without what they hold."""

import json


def save(run, step, *records):
    """A run that was saved after so many updates, with these records in its log, if any."""
    (run / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_dataset(data, successes, failures, length=10):
    """The log of a dataset; one more episode was lost."""
    log = data / "meta/pirl_collect.json"
    log.parent.mkdir(parents=True)
    outcomes = [True] * successes + [False] * failures
    episodes = [{"success": success, "length": length, "lost": None} for success in outcomes]
    log.write_text(json.dumps({"complete": True, "episodes": [*episodes, {"success": True, "length": 5, "lost": "x"}]}))
