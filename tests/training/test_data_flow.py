"""docs/concepts/data_flow.md names the files that the data passes, and none besides."""

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from training_runs import QUICK

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "data_flow.md"


def test_the_page_names_every_file_that_the_data_passes(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("walks.py")), str(tmp_path)]
    environment = {**os.environ, **QUICK, "PIRL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = PAGE.read_text()
    offline, online = (re.findall(r"[\w/]+\.py", block) for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    of_both, of_online = text.split("## Beside the way")[1].split("The second walk")
    for walk, files, left_out, limit in (
        ("offline", offline, of_both, 30),
        ("online", online, of_both + of_online, 12),
    ):
        patterns = re.findall(r"`([\w/]+(?:\.py|/\*))`", left_out)
        ran = json.loads(done.stdout.splitlines()[-1])[walk]
        passed = {file for file in ran if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)}
        assert set(files) == passed
        assert len(files) == len(passed) <= limit
