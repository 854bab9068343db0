"""Two processes train as one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train_cases import CASES, train_cases


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one process makes of the cases, and what two do."""
    folder = tmp_path_factory.mktemp("processes")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = Path(__file__).parent.parent / "train_cases.py"
    process = subprocess.run(
        [*launcher, str(worker), str(folder / "two.pt"), "2"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return train_cases(folder, 4), torch.load(folder / "two.pt")


@pytest.mark.parametrize("kind", [kind for kind, _ in CASES])
def test_two_processes_train_as_one(kind, results):
    one, two = (result[kind] for result in results)
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-6, atol=1e-7)
