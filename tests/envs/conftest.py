"""What tests of several files need of simulators."""

import tarfile
from pathlib import Path

import pytest

from pirl.errors import ConfigError

ARCHIVE = Path(__file__).resolve().parents[3] / "shared" / "libero_assets.tar.xz"


@pytest.fixture(scope="session")
def libero_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LIBERO's installed assets, or the ones for tests that lie beside the project."""
    from pirl.envs.libero.package import LiberoPackage, find_assets

    try:
        return find_assets(None, LiberoPackage().root)
    except ConfigError:
        if not ARCHIVE.is_file():
            pytest.skip("LIBERO's assets are not here")
    folder = tmp_path_factory.mktemp("libero")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "assets"
