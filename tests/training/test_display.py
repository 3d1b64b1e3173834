import contextlib
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pirl.errors import DataError
from pirl.training.display import Display
from pirl.training.logging import Stopwatch


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


EVALUATED = {"eval/success": 0.435, "eval/success_low": 0.368, "eval/success_high": 0.504}


def test_without_a_terminal_a_line_says_how_the_run_goes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Display(4000, "fold1") as display:
        display.update(0, EVALUATED)
        clock.now += 40.0
        display.update(500, {"loss": 0.12345, "critic/q_mean": 0.45}, {"steps_per_second": 12.34})
    shown = capsys.readouterr()
    first, second = shown.err.splitlines()
    assert first == "step 0/4000  success 43.5 % [36.8, 50.4]"
    # 40 s for 500 steps: 280 s, about 5 min, for the other 3500, whatever the speed of the last steps.
    assert second == "step 500/4000  loss 0.123  q 0.45  success 43.5 % [36.8, 50.4]  12.3 steps/s  ETA 5 min"
    assert not shown.out
    with Display(25, "fold1", every=10) as display:
        for step in range(1, 26):
            display.update(step, {"loss": 1.0})
    assert re.findall(r"step (\d+)/", capsys.readouterr().err) == ["1", "11", "21", "25"], "and the last step"


def test_what_is_said_and_what_is_logged_is_in_the_log_with_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run" / "log.txt"
    for word in ("first", "second"):  # a resumed run goes on in the same file
        with Display(10, "fold1", log=log) as display:
            display.say(f"the {word} [word] × {tmp_path}")
            logging.getLogger("pirl.data").warning("odd")
    logging.getLogger("pirl.data").warning("not ours")
    said = [re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) (.*)", line) for line in log.read_text().splitlines()]
    assert [line and line[2] for line in said] == [
        f"INFO the first [word] × {tmp_path}",
        "WARNING odd",
        f"INFO the second [word] × {tmp_path}",
        "WARNING odd",
    ]
    assert capsys.readouterr().err == f"the first [word] × {tmp_path}\nthe second [word] × {tmp_path}\n"


def test_the_log_says_why_a_run_ended(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for error in (DataError("episode 3 is empty"), ZeroDivisionError("oops")):
        with pytest.raises(type(error)), Display(10, "fold1", log=log):
            raise error
    text = log.read_text()
    assert "ERROR episode 3 is empty" in text
    assert text.count("Traceback") == 1, "only what nobody expects comes with a traceback"
    assert "ZeroDivisionError: oops" in text


def test_a_reader_who_leaves_does_not_take_the_run_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `pirl train … 2>&1 | head`: what is said from then on is in the log."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        display = Display(10, "run", log=tmp_path / "log.txt")
        with display:
            display.say("hello")
            os.close(reading)
            display.say("is anybody there?")
            display.update(1, {"loss": 1.0})
            display.say("done")
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    log = (tmp_path / "log.txt").read_text()
    assert all(line in log for line in ("hello", "is anybody there?", "done"))
    assert log.count("nothing can be printed any more") == 1


def test_the_stopwatch_says_where_the_time_of_each_lap_went() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for _ in range(4):
        with watch("data"):
            clock.now += 0.5
        with watch("update"):
            clock.now += 1.0
    clock.now += 2.0
    with contextlib.suppress(KeyboardInterrupt), watch("evaluation"):
        clock.now += 2.0
        raise KeyboardInterrupt
    expected = {"seconds/data": 2.0, "seconds/update": 4.0, "seconds/evaluation": 2.0}
    assert watch.lap(4) == {"steps_per_second": 0.4, "seconds": 10.0, **expected}
    clock.now += 1.0
    assert watch.lap(3) == {"steps_per_second": 3.0, "seconds": 1.0}


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background would have it ignored
import logging, sys, time
from pathlib import Path
logging.basicConfig(format="%(levelname)s: %(message)s")
from pirl.training.display import Display
with Display(4000, "fold1", log=Path(sys.argv[1])) as display, display.phase("offline"):
    for step in (100, 200):
        display.update(step, {"loss": 0.125, "eval/success": 0.5, "skipped": 2}, {"steps_per_second": 10.0})
    display.say("a line that stays")
    logging.getLogger().warning("mind the gap")
    print("for a program")
    with display.phase("evaluating"):
        display.note("stopping after this step")
        time.sleep(60)
"""


def test_the_live_display_keeps_said_lines_whole_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log.txt")]
    shown = b""
    with (
        (tmp_path / "stdout.txt").open("wb") as stdout,
        subprocess.Popen(command, env=environment, stdout=stdout, stderr=end) as process,
    ):
        os.close(end)
        interrupted = False
        while select.select([terminal], [], [], 30)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
            if b"stopping after this step" in shown and not interrupted:
                process.send_signal(signal.SIGINT)
                interrupted = True
    os.close(terminal)
    text = shown.decode()
    assert (tmp_path / "stdout.txt").read_text() == "for a program\n", "what goes to a file is left alone"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    assert "a line that stays" in plain
    assert "WARNING: mind the gap" in plain
    drawn = "\n".join(plain)
    for part in (
        "fold1",
        "evaluating",
        "200/4000",
        "loss 0.125  success 50.0 %  skipped 2",
        "stopping after this step",
    ):
        assert part in drawn
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible again"
    last = text[text.rindex("\x1b[?25h") :]
    assert "step 200/4000  loss 0.125" in last, "the last state stays readable"
    assert process.returncode == -signal.SIGINT
    assert "ERROR KeyboardInterrupt" in (tmp_path / "log.txt").read_text()
