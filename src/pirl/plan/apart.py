"""The process that compiles: `python -m pirl.plan.apart TOPOLOGY DIRECTORY` reads a configuration there and answers."""

import json
import os
import sys
import threading
from pathlib import Path

from pirl.config import load_config
from pirl.errors import UserError
from pirl.files import write_file
from pirl.plan.measuring import measure, to_plain
from pirl.plan.topologies import parse_topology


def main(topology: str, place: str) -> int:
    """Measure, say on the way what is being done, and leave the answer or the reason why there is none."""
    directory = Path(place)
    try:
        measured = measure(load_config(directory / "config.yaml", None), parse_topology(topology), _say)
    except UserError as error:
        write_file(directory / "refusal", str(error))
        return UserError.exit_code
    write_file(directory / "answer.json", json.dumps(to_plain(measured)))
    return 0


def _say(what: str) -> None:
    print(what, flush=True)


def _end_with_whoever_asked() -> None:
    """Nobody wants the answer any more when the other end of this process's input is gone, however it went."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_whoever_asked, daemon=True).start()
    sys.exit(main(*sys.argv[1:]))
