"""Where hostile input is tried: a guarded directory, one real command, and what must be true afterwards."""

import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pirl.cli.main import main

SECONDS = 30  # a hang, on a machine that is busy with other things
Hurt = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One piece of hostile input.

    `hurt` changes the files in the working directory; `command` is then called there. `says` are what the message has to
    mention. `findings` belong to commands that report to stdout what they find. `writes` is where the command may write.
    """

    what: str
    hurt: Hurt
    command: str | Sequence[str]
    says: Sequence[str]
    code: int = 2
    findings: bool = False
    writes: str | None = None

    @property
    def arguments(self) -> list[str]:
        """The command, word by word."""
        return self.command.split() if isinstance(self.command, str) else list(self.command)


def parametrized(cases: Sequence[Case]) -> Any:
    """One test for each case, named by what it is about."""
    assert len({case.what for case in cases}) == len(cases), "two cases are described alike"
    return pytest.mark.parametrize("case", cases, ids=[case.what.replace(" ", "-") for case in cases])


class Arena:
    """A working directory in the middle of files that nobody may touch."""

    def __init__(self, around: Path, capture: Any) -> None:
        """Lay out the directory, a home, a cache, and something outside that is worth protecting."""
        self.around, self.work, self._capture = around, around / "work", capture
        for name in ("work", "home", "outside"):
            (around / name).mkdir()
        (around / "outside" / "precious.json").write_text('{"precious": true}')

    def try_case(self, case: Case) -> None:
        """Hurt, call, and look: exit code, one message, nothing written, nothing executed, no hang."""
        case.hurt(self.work)
        before = self._snapshot(case.writes)
        with _nothing_runs(), _time_limit(), pytest.raises(SystemExit) as end:
            main(case.arguments)
        out, err = self._capture.readouterr()
        code = end.value.code or 0
        shown = f"pirl {case.arguments} ended with {code}\nstdout: {out[-2000:]}\nstderr: {err[-3000:]}"
        assert code == case.code, shown
        assert "Traceback" not in out + err, shown
        message = " ".join((out if case.findings else err).split())
        if case.findings:
            assert err == "", shown
        else:
            assert err.startswith("error: "), shown
            assert err.count("error: ") == 1, shown
        assert len(message) < 6000, "the message is too long to be read"
        missing = [words for words in case.says if not any(word in message for word in words.split("|"))]
        assert not missing, f"{missing} is not said\n{shown}"
        assert self._snapshot(case.writes) == before, f"something was written\n{shown}"

    def _snapshot(self, writes: str | None) -> dict[str, Any]:
        """Everything there is, with its time of change; but for caches, and for where the command may write."""
        free = [self.around / "cache", *([self.work / writes] if writes else [])]
        found = {}
        for directory, folders, files in os.walk(self.around):
            folders[:] = [name for name in folders if Path(directory, name) not in free]
            for path in (Path(directory, name) for name in [".", *folders, *files]):
                about = path.lstat()
                target = os.readlink(path) if stat.S_ISLNK(about.st_mode) else ""
                is_place = Path(os.path.normpath(path)) in [place.parent for place in free]
                found[str(path)] = (
                    (about.st_mode, target) if is_place else (*about[:3], about.st_size, about.st_mtime_ns)
                )
        return found


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Interrupt what hangs; what hangs beyond Python ends the whole process, and says where."""

    def give_up(*_: Any) -> None:
        pytest.fail(f"it hangs: no end after {SECONDS} s")

    old = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _nothing_runs() -> Iterator[None]:
    """Fail loudly if a pickle is opened, or a program started."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a pickle was read, or a program started")

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            *((pickle, name) for name in ("load", "loads", "Unpickler", "_Unpickler")),
            *((os, name) for name in ("system", "popen", "execv", "execve", "fork")),
            (subprocess.Popen, "__init__"),
        ):
            patch.setattr(module, name, refuse)
        yield


# --- ways to hurt a file -----------------------------------------------------------------------------------------


def write(name: str, content: str | bytes) -> Hurt:
    """Put a file there, or another in its place."""

    def hurt(work: Path) -> None:
        file = work / name
        _remove(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    return hurt


def delete(name: str) -> Hurt:
    """Take a file or a directory away."""
    return lambda work: _remove(work / name)


def cut(name: str, keep: float = 0.5) -> Hurt:
    """Leave only the first part of a file."""
    return lambda work: os.truncate(work / name, int((work / name).stat().st_size * keep))


def scramble(name: str) -> Hurt:
    """Turn over every bit of the middle third of a file."""

    def hurt(work: Path) -> None:
        content = bytearray((work / name).read_bytes())
        third = len(content) // 3
        content[third : 2 * third] = bytes(byte ^ 0xFF for byte in content[third : 2 * third])
        (work / name).write_bytes(content)

    return hurt


def pipe(name: str) -> Hurt:
    """A FIFO in place of a file: whoever opens it waits for ever."""

    def hurt(work: Path) -> None:
        _remove(work / name)
        os.mkfifo(work / name)

    return hurt


def directory(name: str) -> Hurt:
    """A directory in place of a file."""

    def hurt(work: Path) -> None:
        _remove(work / name)
        (work / name).mkdir(parents=True)

    return hurt


def link(name: str, target: str) -> Hurt:
    """A symbolic link in place of a file; `OUTSIDE` stands for the directory beside the working directory."""

    def hurt(work: Path) -> None:
        _remove(work / name)
        (work / name).symlink_to(target.replace("OUTSIDE", str(work.parent / "outside")))

    return hurt


def move_out(name: str) -> Hurt:
    """Move a file or directory out of the working directory, and leave a link to it."""

    def hurt(work: Path) -> None:
        away = work.parent / "outside" / Path(name).name
        shutil.move(work / name, away)
        (work / name).symlink_to(away)

    return hurt


def both(*hurts: Hurt) -> Hurt:
    """One after the other."""

    def hurt(work: Path) -> None:
        for one in hurts:
            one(work)

    return hurt


def nothing(work: Path) -> None:
    """The files are sound; the command is what is hostile."""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
