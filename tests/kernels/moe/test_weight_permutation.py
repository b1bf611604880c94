# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The core of the weight conversions against a byte-by-byte reference."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.moe.interpreted_kernels import interpreted_kernels
from vllm.model_executor.layers.quantization.utils import weight_permutation as core
from vllm.model_executor.layers.quantization.utils.weight_room import has_room, reserve

pytest_plugins = ["tests.kernels.moe.interpreted_kernels"]

#: Bytes of a run are not neighbours here.
SPLIT_RUNS = core.Tiling("split runs", (4, 2), run=2, order=(0, 2, 3, 4, 1))
TILINGS = (core.ROW_MAJOR, core.BLOCK_MAJOR_K, core.SCALE_128X4, SPLIT_RUNS)


@pytest.fixture(scope="module")
def interpreted():
    with interpreted_kernels() as modules:
        yield modules


def reference(source: torch.Tensor, conversion: core.Conversion) -> torch.Tensor:
    """uint8 [experts, bytes], written one row at a time."""
    rows, row_bytes = conversion.shape
    matrix = torch.full(
        (source.shape[0], rows, row_bytes), conversion.fill, dtype=torch.uint8
    )
    for row, origin in enumerate(conversion.rows.tolist()):
        if origin >= 0:
            matrix[:, row, : source.shape[2]] = source[:, origin]
    if conversion.tiling is core.BLOCK_MAJOR_K:
        matrix = torch.cat(
            [block.flatten(1) for block in matrix.split(128, dim=2)], dim=1
        )
    elif conversion.tiling is core.SCALE_128X4:
        tiles = [
            tile[:, group:128:32, :].flatten(1)
            for block in matrix.split(128, dim=1)
            for tile in block.split(4, dim=2)
            for group in range(32)
        ]
        matrix = torch.cat(tiles, dim=1)
    elif conversion.tiling is SPLIT_RUNS:
        parts = [
            matrix[:, block + pair : block + 8 : 2, run : run + 2].mT.flatten(1)
            for block in range(0, rows, 8)
            for pair in range(2)
            for run in range(0, row_bytes, 2)
        ]
        matrix = torch.cat(parts, dim=1)
    return matrix.flatten(1)


def random_weight(experts: int, rows: int, row_bytes: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, 256, (experts, rows, row_bytes), dtype=torch.uint8, generator=generator
    )


def shuffled(rows: int, seed: int = 0) -> list[int]:
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return order


def run_interpreted(kernels, weight, conversion, budget):
    """What `convert_` does, with the interpreted kernels for executor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "use_triton", lambda _: True)
        executor = kernels.weight_permutation_triton
        patch.setattr(core, "_triton_kernels", lambda: executor)
        return core.convert_((weight, conversion), budget=budget, gaps=True)[0]


@st.composite
def cases(draw, max_rows=4, max_columns=4):
    tiling = draw(st.sampled_from(TILINGS))
    row_unit = {core.SCALE_128X4: 128, SPLIT_RUNS: 8}.get(tiling)
    row_unit = row_unit or draw(st.sampled_from((1, 3, 16)))
    column_unit = tiling.run or draw(st.sampled_from((1, 2, 7, 16, 40)))
    rows = row_unit * draw(st.integers(1, max_rows))
    row_bytes = column_unit * draw(st.integers(1, max_columns))
    order = shuffled(rows, draw(st.integers(0, 9)))
    source_rows, source_bytes = rows, row_bytes
    if draw(st.booleans()):  # padding
        source_rows = draw(st.integers(1, rows))
        source_bytes = draw(st.integers(1, row_bytes))
        order = [row if row < source_rows else -1 for row in order]
    fill = draw(st.sampled_from((0, 127)))
    experts = draw(st.integers(0, 3))
    conversion = core.Conversion(
        order, (source_rows, source_bytes), row_bytes, tiling, fill
    )
    return random_weight(experts, source_rows, source_bytes), conversion


@settings(max_examples=150, deadline=None)
@given(cases())
def test_torch_matches_reference(case):
    weight, conversion = case
    expected = reference(weight, conversion)
    in_place = conversion.in_place
    before = weight.clone()
    (result,) = core.convert_((weight, conversion))
    assert result.shape == (weight.shape[0], *conversion.shape)
    assert torch.equal(result.flatten(1), expected)
    if weight.numel():
        assert (result.data_ptr() == weight.data_ptr()) is in_place
    if not in_place:
        assert torch.equal(weight, before)


@settings(max_examples=40, deadline=None)
@given(cases(max_rows=2, max_columns=3), st.sampled_from((0, 1, 1 << 30)))
def test_interpreted_triton_matches_reference(interpreted, case, budget):
    weight, conversion = case
    expected = reference(weight, conversion)
    result = run_interpreted(interpreted, weight, conversion, budget)
    assert torch.equal(result.flatten(1), expected)


def with_room(weight: torch.Tensor, conversion: core.Conversion):
    """A parameter of these values, with room for what the conversion makes of it."""
    parameter = torch.nn.Parameter(torch.empty_like(weight), requires_grad=False)
    result = weight.shape[0] * conversion.shape[0] * conversion.shape[1]
    reserve(parameter, max(result, weight.numel() + 1))
    parameter.data.copy_(weight)
    return parameter


def spread(draw_rows: int, source_rows: int, seed: int) -> list[int]:
    """Shuffled source rows with padding anywhere among them."""
    padding = [-1] * (draw_rows - source_rows)
    order = [*shuffled(source_rows, seed), *padding]
    random.Random(seed + 1).shuffle(order)
    return order


@st.composite
def growing(draw, max_columns=3):
    tiling = draw(st.sampled_from(TILINGS))
    row_unit = {core.SCALE_128X4: 128, SPLIT_RUNS: 8}.get(tiling, 1)
    column_unit = tiling.run or draw(st.sampled_from((1, 2, 7, 16, 40)))
    rows = row_unit * draw(st.integers(1, 256 // max(row_unit, 64)))
    row_bytes = column_unit * draw(st.integers(1, max_columns))
    source_rows = draw(st.integers(max(1, rows // 2), rows))
    source_bytes = draw(st.integers(max(1, row_bytes // 2), row_bytes))
    order = spread(rows, source_rows, draw(st.integers(0, 9)))
    if draw(st.booleans()):
        order = sorted(order, key=lambda row: row if row >= 0 else rows)
    experts = draw(st.integers(1, 9))
    conversion = core.Conversion(
        order, (source_rows, source_bytes), row_bytes, tiling, fill=127
    )
    return random_weight(experts, source_rows, source_bytes), conversion


def check_room(weight, conversion, convert):
    parameter = with_room(weight, conversion)
    expected = reference(weight, conversion)
    storage = parameter.untyped_storage().data_ptr()
    result = convert(parameter)
    assert result.shape == (weight.shape[0], *conversion.shape)
    assert torch.equal(result.flatten(1), expected)
    assert result.data_ptr() == storage or conversion.tiling is core.BLOCK_MAJOR_K


@settings(max_examples=100, deadline=None)
@given(growing())
def test_torch_pads_where_there_is_room(case):
    weight, conversion = case
    check_room(weight, conversion, lambda p: core.convert_((p, conversion))[0])


@settings(max_examples=40, deadline=None)
@given(growing(), st.sampled_from((1, 1 << 15, 1 << 30)))
def test_interpreted_triton_pads_where_there_is_room(interpreted, case, budget):
    weight, conversion = case
    with pytest.MonkeyPatch.context() as patch:
        # Many groups in a small tensor, whose sources overlap their targets.
        patch.setattr(interpreted.expand_rows_triton, "GROUP_BYTES", 512)
        check_room(
            weight,
            conversion,
            lambda p: run_interpreted(interpreted, p, conversion, budget),
        )


def test_only_a_reserved_storage_has_room():
    """What lies behind a view may belong to another tensor."""
    base = torch.arange(64, dtype=torch.uint8)
    view = torch.nn.Parameter(base[:32].view(1, 4, 8), requires_grad=False)
    assert not has_room(view, 64)
    grow = core.Conversion([*range(4), -1], (4, 8))
    (result,) = core.convert_((view, grow))
    assert result.data_ptr() != base.data_ptr()
    assert torch.equal(base, torch.arange(64, dtype=torch.uint8))


def test_the_room_belongs_to_the_whole_parameter():
    """A part of it would be padded over what follows."""
    parameter = torch.nn.Parameter(torch.empty((4, 2, 4), dtype=torch.uint8), False)
    reserve(parameter, 64)
    parameter.data.copy_(random_weight(4, 2, 4))
    rest = parameter[2:].clone()
    core.convert_((parameter[:2], core.Conversion([0, 1, -1, -1], (2, 4))))
    assert torch.equal(parameter[2:], rest)


def test_reserving_changes_nothing_but_the_storage():
    parameter = torch.nn.Parameter(
        torch.empty((2, 3, 4), dtype=torch.bfloat16), requires_grad=False
    )
    parameter.weight_loader = len
    reserve(parameter, 100)
    assert parameter.untyped_storage().nbytes() == 100
    assert parameter.shape == (2, 3, 4) and parameter.stride() == (12, 4, 1)
    assert parameter.dtype == torch.bfloat16
    assert vars(parameter) == {"weight_loader": len}
    assert has_room(parameter, 100)
    assert not has_room(parameter, 101)
    assert not has_room(parameter[1:], 50)
    storage = parameter.untyped_storage().data_ptr()
    reserve(parameter, 48)
    assert parameter.untyped_storage().data_ptr() == storage


@pytest.mark.parametrize("rows", [384, 512])
@pytest.mark.parametrize("tiling", TILINGS[:2], ids=lambda t: t.name)
def test_interpreted_triton_cuts_long_cycles(interpreted, rows, tiling):
    """One cycle through all rows: longer than what a program holds."""
    cycle = [(row + 1) % rows for row in range(rows)]
    weight = random_weight(2, rows, 256)
    conversion = core.Conversion(cycle, (rows, 256), tiling=tiling)
    expected = reference(weight, conversion)
    result = run_interpreted(interpreted, weight, conversion, budget=1)
    assert torch.equal(result.flatten(1), expected)
    assert result.data_ptr() == weight.data_ptr()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(0, 9), st.sampled_from((1, 4, 64)))
def test_moves_are_a_cut_of_the_permutation(interpreted, n, seed, cells):
    source = shuffled(n, seed)
    if seed % 3 == 0:  # short cycles: swaps
        source = [i ^ 1 if (i ^ 1) < n else i for i in range(n)]
    moves = interpreted.weight_permutation_triton.plan_moves(source, cells)
    saved = moves.saved_cells.tolist()
    table = list(zip(moves.to_cells.tolist(), moves.from_cells.tolist(), strict=True))
    assert len(table) == moves.groups * cells
    done = {}
    for start in range(0, len(table), cells):
        group = [(to, origin) for to, origin in table[start : start + cells] if to >= 0]
        written = {to for to, _ in group}
        for to, origin in group:
            # What is read without being saved, this group alone overwrites.
            assert origin < 0 or origin in written
            done[to] = saved[-origin - 1] if origin < 0 else origin
    assert done == {cell: s for cell, s in enumerate(source) if cell != s}


def test_swaps_need_no_scratch(interpreted):
    half = 96
    moves = interpreted.weight_permutation_triton.plan_moves(
        [*range(half, 2 * half), *range(half)], 128
    )
    assert moves.saved_cells.numel() == 0


@pytest.mark.parametrize("gap", [0, 1])
def test_experts_with_gaps_stay_in_place(interpreted, gap):
    """Every other expert of a larger tensor: neighbours are left alone."""
    base = random_weight(6, 32, 128)
    kept = base.clone()
    conversion = core.Conversion(shuffled(32), (32, 128), tiling=core.BLOCK_MAJOR_K)
    weight = base[:: 1 + gap]
    expected = reference(weight, conversion)
    result = run_interpreted(interpreted, weight, conversion, budget=1)
    assert torch.equal(result.flatten(1), expected)
    assert result.data_ptr() == base.data_ptr()
    if gap:
        assert torch.equal(base[1::2], kept[1::2])


def test_strided_rows_go_to_a_new_tensor():
    base = random_weight(2, 32, 256)
    weight = base[:, :, :128]
    conversion = core.Conversion(shuffled(32), (32, 128))
    (result,) = core.convert_((weight, conversion))
    assert torch.equal(result.flatten(1), reference(weight, conversion))
    assert result.data_ptr() != base.data_ptr()


def test_torch_scratch_is_one_expert(monkeypatch):
    """All steps share scratch of one expert, taken before the first write."""
    weights = [random_weight(4, 64, 256), random_weight(4, 32, 128)]
    before = [w.clone() for w in weights]
    conversions = [
        core.Conversion(shuffled(64), (64, 256)),
        core.Conversion(shuffled(32), (32, 128)),
    ]
    for conversion in conversions:
        conversion.row_index(torch.device("cpu"))  # built once per shape
    sizes = []
    empty = torch.empty

    def counted(*args, **kwargs):
        for weight, copy in zip(weights, before, strict=True):
            assert torch.equal(weight, copy)
        result = empty(*args, **kwargs)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(torch, "empty", counted)
    core.convert_(*zip(weights, conversions, strict=True))
    assert sizes == [64 * 256]


def test_out_of_memory_leaves_the_layer(monkeypatch):
    first, second = random_weight(2, 32, 64), random_weight(2, 32, 60)
    before = first.clone(), second.clone()
    grow = core.Conversion(range(32), (32, 60), 64)
    swap = core.Conversion([*range(16, 32), *range(16)], (32, 64))
    empty, calls = torch.empty, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory left")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(torch.OutOfMemoryError):
        core.convert_((first, swap), (second, grow))
    assert len(calls) == 2
    assert torch.equal(first, before[0]) and torch.equal(second, before[1])


def test_identity_writes_nothing(monkeypatch):
    weight = random_weight(2, 8, 16)
    monkeypatch.setattr(core, "run_torch", lambda *_: pytest.fail("ran"))
    (result,) = core.convert_((weight, core.Conversion(range(8), (8, 16))))
    assert result.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: core.Conversion([0, 4], (4, 8)), "between -1 and 3, found 0 to 4"),
        (
            lambda: core.Conversion([0], (1, 8), 4),
            "shorten rows of 8 bytes to 4",
        ),
        (
            lambda: core.Conversion([0], (1, 130), tiling=core.BLOCK_MAJOR_K),
            "130 bytes cannot be tiled as BlockMajorK.*multiple of 128 bytes",
        ),
        (
            lambda: core.Conversion([0], (1, 4), tiling=core.SCALE_128X4),
            "1 rows cannot be tiled as 128x4 scale tiles.*multiple of 128 rows",
        ),
    ],
)
def test_bad_conversions_say_what_is_wrong(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_weight_of_another_shape_is_refused():
    conversion = core.Conversion(range(8), (8, 16))
    with pytest.raises(ValueError, match=r"shape \(2, 8, 15\).*for \(8, 16\)"):
        core.convert_((random_weight(2, 8, 15), conversion))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: t.name)
@pytest.mark.parametrize("rows, row_bytes", [(1536, 1344), (2816, 464), (4096, 7168)])
@pytest.mark.parametrize("kind", ["shuffle", "cycle", "pad", "grow"])
def test_triton_matches_torch_on_gpu(tiling, rows, row_bytes, kind):
    row_bytes = row_bytes // tiling.run * tiling.run if tiling.run else row_bytes
    order = shuffled(rows)
    source_rows, source_bytes = rows, row_bytes
    if kind == "cycle":
        order = [(row + 1) % rows for row in range(rows)]
    elif kind in ("pad", "grow"):
        less = 48 if kind == "pad" else rows // 3
        source_rows, source_bytes = rows - less, row_bytes - 16
        order = [row if row < source_rows else -1 for row in order]
    conversion = core.Conversion(
        order, (source_rows, source_bytes), row_bytes, tiling, fill=127
    )
    weight = random_weight(5, source_rows, source_bytes)
    (expected,) = core.convert_((weight.clone(), conversion))
    (result,) = core.convert_((weight.cuda(), conversion))
    assert torch.equal(result.cpu().flatten(1), expected.flatten(1))
    if kind in ("pad", "grow"):
        (result,) = core.convert_((with_room(weight.cuda(), conversion), conversion))
        assert torch.equal(result.cpu().flatten(1), expected.flatten(1))
