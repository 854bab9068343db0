"""What several tests of decoding share."""

import pytest
import torch


@pytest.fixture
def fresh_compiler():
    """What was compiled for other tests is forgotten."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
