"""Fixtures that every test may use."""

from pathlib import Path

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--golden", metavar="DIR", help="run the golden tests on this folder's reference tensors alone")


@pytest.fixture(autouse=True)
def threads(request):
    """Tiny models run fastest on one thread; tests of the real one get two."""
    torch.set_num_threads(2 if request.node.get_closest_marker("slow") else 1)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache folder."""
    from checkpoints.download import demo_model

    return demo_model()


@pytest.fixture
def shared_data() -> Path:
    """The folder of shared measuring data beside a developer's checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("skipped: no shared data")
    return folder
