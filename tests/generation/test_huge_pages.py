"""Memory in huge pages: it is what torch's would be, and goes with its last tensor; pages are asked for where there are any."""

import gc
import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from hf_pardraft.generation.packing import huge_pages
from threads import in_threads

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for huge pages")


@pytest.fixture(autouse=True)
def no_memory_is_shared(monkeypatch):
    """None with what other tests have packed."""
    monkeypatch.setattr(huge_pages, "_pieces", type(huge_pages._pieces)())


def filled(count, shape, dtype=torch.float32):
    return [huge_pages.empty(shape, dtype).fill_(number) for number in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5, 48, 2), (1100, 1000), (5000, 1200), (0, 4)])
def test_tensors_share_no_numbers(shape, dtype):
    tensors = filled(9, shape, dtype)
    for number, tensor in enumerate(tensors):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % huge_pages.LINE == 0
        assert torch.equal(tensor, torch.full(shape, number, dtype=dtype))


def test_threads_are_given_different_memory():
    tensors = [tensor for mine in in_threads(4, lambda: filled(50, (100, 10))) for tensor in mine]
    assert len({tensor.data_ptr() for tensor in tensors}) == 200


def flags_of(address):
    """What Linux calls the properties of the memory there."""
    found = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif line.startswith("VmFlags:") and is_here:
            found = line
    return found.split()


@on_linux
def test_huge_pages_are_asked_for():
    first, second = filled(2, (600, 600))
    # Where they begin, one lies; the small ones follow each other in it.
    assert first.data_ptr() % huge_pages.PAGE == 0
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    if "hg" not in flags_of(first.data_ptr()):
        assert not Path("/sys/kernel/mm/transparent_hugepage").exists()


@on_linux
def test_memory_goes_with_the_last_of_its_tensors():
    tensors = filled(8, (600, 600))
    address = tensors[0].data_ptr()
    del tensors[1:]
    gc.collect()
    assert flags_of(address)
    assert torch.equal(tensors[0], torch.zeros(600, 600))
    tensors.clear()
    gc.collect()
    assert not huge_pages._pieces
    assert not flags_of(address)


def refuse(*arguments):
    raise OSError("there is no such thing in this kernel")


@on_linux
@pytest.mark.parametrize("what", ["another system", "a kernel without them", "no memory left"])
def test_elsewhere_memory_is_torchs(what, monkeypatch):
    if what == "another system":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    elif what == "a kernel without them":
        monkeypatch.setattr(huge_pages._Piece, "madvise", refuse, raising=False)
    else:
        monkeypatch.setattr(huge_pages, "_Piece", refuse)
    for number, tensor in enumerate(filled(3, (600, 600))):
        assert torch.equal(tensor, torch.full((600, 600), float(number)))
    assert not huge_pages._pieces
