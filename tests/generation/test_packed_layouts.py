"""Every layout multiplies rightly, by any number of tokens, and panels are used, or the fastest of the libraries."""

import pytest
import torch

from hf_pardraft.generation.packing import packing_trials, panels
from hf_pardraft.generation.packing.packed_layouts import LAYOUTS, MKL, ONEDNN, PANELS, WeightLayout, layouts_for
from hf_pardraft.generation.packing.packing_trials import faster_layout, products_of
from threads import torch_threads

HERE = [(layout, dtype) for dtype in LAYOUTS for layout in layouts_for(dtype)]


@pytest.mark.parametrize(("layout", "dtype"), HERE, ids=lambda case: getattr(case, "name", str(case)))
@pytest.mark.parametrize(("rows", "columns"), [(256, 320), (64, 1024), (1030, 66), (4099, 18), (576, 1536), (47, 81)])
@torch.no_grad()
def test_products_are_those_of_torch(layout, dtype, rows, columns):
    generator = torch.Generator().manual_seed(rows)
    matrix, bias = torch.randn(rows, columns, generator=generator) / 16, torch.randn(rows, generator=generator)
    matrix, bias = matrix.to(dtype), bias.to(dtype)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.002}[dtype]
    packed = layout.pack(matrix)
    for count in (1, 2, 3, 8, 9, 16, 31, 64, 65, 300):
        tokens = torch.randn(count, columns, generator=generator).to(dtype)
        for bias_or_none in (bias, None):
            expected = torch.nn.functional.linear(
                tokens.double(), matrix.double(), None if bias_or_none is None else bias_or_none.double()
            )
            for given in (tokens, tokens[None], tokens.t().contiguous().t()):
                product = layout.multiply(given, packed, matrix, bias_or_none)
                assert product.shape == (*given.shape[:-1], rows)
                assert product.dtype == dtype
                torch.testing.assert_close(product.view(count, rows).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch was built without MKL")
def test_in_float32_there_are_panels_and_those_of_both_libraries(monkeypatch, no_layout_is_known):
    assert layouts_for(torch.float32) == (PANELS, ONEDNN, MKL)
    layouts_for.cache_clear()
    monkeypatch.setattr(panels, "library", lambda: None)
    assert layouts_for(torch.float32) == (ONEDNN, MKL)


def wrong_by_one(tokens, packed, matrix, bias):
    return ONEDNN.multiply(tokens, packed, matrix, bias) + 1


def wrong_for_few(tokens, packed, matrix, bias):
    return wrong_by_one(tokens, packed, matrix, bias)[: len(tokens)] if tokens.shape[1] == 2 else tokens.new_zeros(1)


def unknown(*arguments):
    raise NotImplementedError("no such kernel")


@pytest.mark.parametrize("multiply", [wrong_by_one, wrong_for_few, unknown])
def test_a_layout_that_is_not_right_here_is_not_used(monkeypatch, no_layout_is_known, multiply):
    wrong = WeightLayout("wrong", ONEDNN.pack, multiply)
    monkeypatch.setitem(LAYOUTS, torch.float32, (wrong, ONEDNN))
    assert layouts_for(torch.float32) == (ONEDNN,)


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


def slow(clock, name, seconds):
    """A layout whose products take so long, and packing an hour."""

    def pack(matrix):
        clock.now += 3600
        assert matrix.is_contiguous()
        return ONEDNN.pack(matrix)

    def multiply(*arguments):
        clock.now += seconds.pop(0) if len(seconds) > 1 else seconds[0]
        return ONEDNN.multiply(*arguments)

    return WeightLayout(name, pack, multiply)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(packing_trials, "time", clock)
    monkeypatch.setattr(packing_trials, "_faster_layouts", {})
    return clock


@pytest.mark.parametrize(
    ("first", "second", "fastest"),
    [([1.0], [2.0], 0), ([2.0], [1.0], 1), ([1.0, 900.0, 1.0], [2.0], 0), ([2.0], [900.0, 1.0], 1)],
)
def test_the_faster_layout_is_chosen_whatever_one_interruption_says(clock, monkeypatch, first, second, fastest):
    layouts = slow(clock, "first", [*first]), slow(clock, "second", [*second])
    monkeypatch.setattr(packing_trials, "layouts_for", lambda dtype: layouts)
    assert faster_layout(torch.ones(64, 32)) is layouts[fastest]


def test_few_tokens_are_multiplied_by_panels_and_more_by_what_is_faster_then(clock, monkeypatch):
    library = slow(clock, "library", [1.0])
    panels_here = WeightLayout("panels", PANELS.pack, slow(clock, "panels", [2.0]).multiply)
    monkeypatch.setattr(packing_trials, "PANELS", panels_here)
    monkeypatch.setattr(packing_trials, "layouts_for", lambda dtype: (panels_here, library))
    assert faster_layout(torch.ones(64, 32)) is panels_here
    with products_of(48):
        assert faster_layout(torch.ones(64, 32)) is library
        with products_of(1):
            assert faster_layout(torch.ones(64, 32)) is panels_here
        assert faster_layout(torch.ones(64, 32)) is library
    assert faster_layout(torch.ones(64, 32)) is panels_here


def test_it_is_found_out_once_for_a_kind_of_matrix_and_with_some_of_its_rows(clock, monkeypatch):
    layouts = slow(clock, "first", [1.0]), slow(clock, "second", [2.0])
    monkeypatch.setattr(packing_trials, "layouts_for", lambda dtype: layouts)
    monkeypatch.setattr(packing_trials, "COMPARED_ELEMENTS", 40 * 32)
    faster_layout(torch.ones(64, 32))
    after = clock.now
    assert faster_layout(torch.zeros(64, 32)) is layouts[0]
    assert clock.now == after
    for other in (torch.ones(65, 32), torch.ones(64, 48)):
        faster_layout(other)
        assert clock.now > after
        after = clock.now
    with torch_threads(torch.get_num_threads() + 1):
        faster_layout(torch.ones(64, 32))
    assert clock.now > after


def test_a_single_layout_needs_no_trial(clock, monkeypatch):
    monkeypatch.setattr(packing_trials, "layouts_for", lambda dtype: (ONEDNN,))
    assert faster_layout(torch.ones(64, 32)) is ONEDNN
    assert clock.now == 0
