"""What most tests of training train with; a file that needs another text has a fixture of its own."""

import pytest

from tiny_models import tiny_target
from training.tiny_training import written_text


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture(scope="module")
def text(target):
    """Rows of one length, so that each of several processes has as much to learn from as the others."""
    return written_text(target)
