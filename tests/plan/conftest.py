"""What the tests of planning share."""

import pytest

from pirl.cli.main import main


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Call pirl; gives the exit code, and what was printed to both streams."""
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return end.value.code or 0, out, err

    return run
