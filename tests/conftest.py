"""Fixtures that every test may use."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def two_threads():
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache folder."""
    from models.download import demo_model

    return demo_model()


@pytest.fixture
def shared_data() -> Path:
    """The folder of shared measuring data beside a developer's checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("skipped: no shared data")
    return folder
