"""Our own layout: exact where nothing is rounded, as near as torch where something is, on any processor, or not there at all."""

import logging

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.codecache import CppCodeCache
from torch.nn import functional

from hf_pardraft.generation.packing import native_code, panels
from hf_pardraft.generation.packing.packed_layouts import PANELS, layouts_for
from hf_pardraft.generation.packing.panels import SOURCE, multiply_panels, pack_panels, sum_rows
from processes import in_a_process
from processors import PROCESSORS, compile_for
from threads import in_threads, torch_threads

DTYPES = [torch.float32, torch.bfloat16]

pytestmark = [
    pytest.mark.skipif(panels.library() is None, reason="there is no compiler here"),
    pytest.mark.usefixtures("no_gradients"),
]


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch, no_layout_is_known):
    """The same layout as it is compiled for some processor."""
    compile_for(request.param, monkeypatch)
    assert panels.library() is not None
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_right_as_compiled_for_other_processors(processor, dtype):
    assert PANELS in layouts_for(dtype)


def whole_numbers(*shape, dtype):
    """Numbers whose products and sums no order of adding rounds, in either dtype."""
    return torch.randint(-1, 2, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_number_of_tokens_inputs_and_outputs_is_multiplied_exactly(dtype, num_threads):
    torch.manual_seed(0)
    with torch_threads(num_threads):
        for num_outputs in (1, 47, 48, 49, 130):
            for num_inputs in (1, 2, 63, 64, 129, 200):
                matrix = whole_numbers(num_outputs, num_inputs, dtype=dtype)
                packed = pack_panels(matrix)
                for num_tokens in (0, 1, 2, 5, 7, 8, 9, 17, 63, 64, 65, 129):
                    tokens = whole_numbers(num_tokens, num_inputs, dtype=dtype)
                    expected = (tokens.double() @ matrix.double().T).to(dtype)
                    assert torch.equal(multiply_panels(tokens, packed, matrix, None), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_rounds_no_more_than_torch_does(dtype):
    """Its mean error is 0.5 to 1.1 of that of torch's products; those of packed libraries have 1 to 2.8."""
    torch.manual_seed(0)
    for num_inputs in (576, 1536):
        matrix, tokens = torch.randn(640, num_inputs).to(dtype), torch.randn(8, num_inputs).to(dtype)
        exact = tokens.double() @ matrix.double().T
        errors = [
            (product.double() - exact).abs().mean()
            for product in (
                multiply_panels(tokens, pack_panels(matrix), matrix, None),
                functional.linear(tokens, matrix),
            )
        ]
        assert errors[0] <= 1.5 * errors[1]


def test_bfloat16_is_rounded_once_from_sums_in_float32():
    torch.manual_seed(0)
    matrix, tokens = torch.randn(96, 256).bfloat16(), torch.randn(8, 256).bfloat16()
    wide = multiply_panels(tokens.float(), pack_panels(matrix.float()), matrix.float(), None)
    product = multiply_panels(tokens, pack_panels(matrix), matrix, None)
    # The order of adding is another one, so that some are just on the other side of half a step.
    assert (product == wide.bfloat16()).float().mean() > 0.99
    # A half is rounded to the even one of its neighbours: 257 to 256, 259 to 260.
    halves = pack_panels(torch.tensor([[256.0, 1.0], [256.0, 3.0]]).bfloat16())
    rounded = multiply_panels(torch.ones(1, 2).bfloat16(), halves, torch.ones(2, 2).bfloat16(), None)
    assert rounded.tolist() == [[256.0, 260.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none_in_its_own_output(dtype):
    matrix = torch.ones(50, 64, dtype=dtype)
    matrix[7, 3], matrix[8, 5] = float("nan"), float("inf")
    product = multiply_panels(torch.ones(2, 64, dtype=dtype), pack_panels(matrix), matrix, None)
    expected = torch.full((2, 50), 64.0)
    expected[:, 7], expected[:, 8] = float("nan"), float("inf")
    torch.testing.assert_close(product.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_threads_may_multiply_at_once(dtype):
    torch.manual_seed(0)
    matrix, tokens = torch.randn(576, 512).to(dtype), torch.randn(32, 8, 512).to(dtype)
    packed = pack_panels(matrix)
    expected = [multiply_panels(each, packed, matrix, None) for each in tokens]
    found = in_threads(4, lambda: [multiply_panels(each, packed, matrix, None) for each in tokens])
    assert len(found) == 4
    for products in found:
        assert all(map(torch.equal, products, expected))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_summed_alike_with_and_without_the_library(monkeypatch, processor, num_threads):
    torch.manual_seed(0)
    for rows, columns in ((1, 1), (7, 33), (64, 288), (500, 3)):
        numbers, factors = torch.randint(-(1 << 62), 1 << 62, (rows + 1, columns)).split([rows, 1])
        expected = []
        for row in numbers.tolist():
            words = [number % (1 << 64) for number in row]
            mixed = [(word ^ word >> 29) * factor for word, factor in zip(words, factors[0].tolist(), strict=True)]
            expected.append(sum(mixed) % (1 << 64))
        with torch_threads(num_threads):
            found = [sum_rows(numbers, factors[0])]
        with monkeypatch.context() as without:
            without.setattr(panels, "library", lambda: None)
            found.append(sum_rows(numbers, factors[0]))
        assert [[number % (1 << 64) for number in sums.tolist()] for sums in found] == [expected] * 2


def test_the_library_is_compiled_once_for_a_machine(tmp_path, monkeypatch, no_layout_is_known):
    """By one process, and found by another."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CppCodeCache, "cache", {})

    def load():
        assert panels.library() is not None

    made = []
    for _ in range(2):
        assert in_a_process(load) == 0
        made.append([(file, file.stat().st_mtime_ns) for file in tmp_path.rglob("*.so")])
    assert len(made[0]) == 1
    assert made[0] == made[1]


@pytest.mark.parametrize("is_gcc", [True, False])
def test_only_gcc_is_given_a_flag_that_clang_refuses(monkeypatch, no_layout_is_known, is_gcc):
    given = []

    def begin(text, extra_flags, needs_vec_isa):
        return lambda: given.extend(extra_flags)

    monkeypatch.setattr(CppCodeCache, "load_async", begin)
    monkeypatch.setattr(cpp_builder, "is_gcc", lambda: is_gcc)
    assert panels.library() is None
    assert "-ffp-contract=fast" in given
    assert ("-ftree-loop-vectorize" in given) == is_gcc


def test_the_library_is_compiled_by_torch_2_7(monkeypatch, no_layout_is_known):
    """Which takes less."""
    given = []

    def begin(source_code, device_type="cpu", submit_fn=None, extra_flags=()):
        return lambda: given.append(source_code)

    monkeypatch.setattr(CppCodeCache, "load_async", begin)
    assert panels.library() is None
    assert SOURCE.read_text() in given[0]


@pytest.mark.parametrize("failure", [RuntimeError("no C++ compiler"), PermissionError("read only"), OSError("noexec")])
def test_without_a_compiler_libraries_pack_and_the_log_says_why(monkeypatch, caplog, no_layout_is_known, failure):
    def fail(*arguments, **settings):
        raise failure

    monkeypatch.setattr(CppCodeCache, "load_async", fail)
    monkeypatch.setattr(native_code.logger, "propagate", True)
    caplog.set_level(logging.INFO, logger=native_code.logger.name)
    assert panels.library() is None
    assert PANELS not in layouts_for(torch.float32)
    with pytest.raises(RuntimeError, match=r"no panels of torch\.float32 on this machine"):
        pack_panels(torch.ones(2, 2))
    assert f"Without {SOURCE.name} torch's libraries compute here, since it can't be compiled: {failure}" in caplog.text
