"""Operands of all kernels except attention (row kernels, cache writes, copies, sampling), checked against fp64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.attention import LLAMA_8B, TOY
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels import dispatch, experts, recurrence, reference
from pagemill.kernels.experts import Routing
from pagemill.kernels.gpu.tuning import MOST_UNWIDENED_ROWS
from pagemill.kernels.types.grouped_weight import GroupedWeight
from pagemill.kernels.types.layer_cache import FP8, LayerCache, allocate_layer, as_bytes
from pagemill.kernels.types.low_rank import AdapterRows
from pagemill.kernels.types.rotation import Rotation
from pagemill.kernels.types.sampling_rows import SamplingRows
from pagemill.kernels.types.scaled_rows import ScaledRows
from pagemill.kernels.types.tiled_weight import TiledWeight
from tests.kernels.low_rank_case import low_rank_case

# Largest ||out - truth|| / ||truth||: a few roundings of each dtype.
_RELATIVE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

# The same for a row of normally distributed values rounded to 8 bits, scaled by its largest magnitude.
_STEP = {torch.int8: 2e-2, FP8: 4e-2}
# The same for matmuls of such values, whose outliers are larger: 0.024 at 4,096 per row, 0.029 at 14,336.
_PRODUCT_STEP = {torch.int8: 4e-2, FP8: 4e-2}

# Tensor cores of compute capability 9.0 accumulate fp8 products with about 14 bits.
_SUMS = {torch.int8: 0.0, FP8: 2e-3}


@dataclass(frozen=True)
class Sizes:
    """The size of the operands: a real model's, or toy sizes for a run without a GPU."""

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    shape: Shape
    num_rows: int
    """Rows to sample from."""


# Enough tokens that no operand is still in the L2 cache (60 MB on an H200) at the next replay.
LLAMA_SIZES = Sizes(32768, 4096, 14336, 128256, LLAMA_8B, 256)
TOY_SIZES = Sizes(5, 96, 80, 700, TOY, 3)
# The kernels of LLAMA_SIZES, without its gigabytes.
COMPILED_SIZES = replace(LLAMA_SIZES, num_tokens=64)
LAUNCHED_SIZES = replace(LLAMA_SIZES, num_tokens=33, intermediate_size=3000, num_rows=8)
# Enough for a pass over several programs, with remainders everywhere.
CHECKED_SIZES = Sizes(133, 4096, 3000, 128256, LLAMA_8B, 64)


def correctness(bench: Bench, sizes: Sizes, dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
    """Check every kernel against the fp64 reference on the same inputs; outputs allocated here are poisoned."""
    torch.manual_seed(1)
    for dtype in dtypes:
        for name, out, truth in _dense_cases(bench, sizes, dtype):
            error = ((out.double() - truth.double()).norm() / truth.double().norm()).item()
            yield _checked(name, dtype, error, _RELATIVE[dtype])
        yield from _scaled_cases(bench, sizes, dtype)
        yield from _cache_cases(bench, sizes, dtype)
        yield _low_rank(bench, sizes, dtype)
        for num_experts in (2, 9):
            yield from _experts(bench, sizes, dtype, num_experts)
    yield _copied_blocks(bench, sizes)
    yield from _recurrences(bench)
    yield from _sampled(bench, sizes)


def _checked(name: str, dtype: torch.dtype, error: float, limit: float) -> Row:
    facts = {"dtype": str(dtype).removeprefix("torch."), "limit": limit}
    return Row(case=name, measured=error, unit="error", ok=error <= limit, facts=facts)  # NaN is not


def _recurrences(bench: Bench) -> Iterator[Row]:
    """Three rows of five tokens, next to the states of other slots."""
    device = bench.device

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    keys, gates = [draw(3, 5, 2, 64) for _ in range(2)], torch.rand(3, 5, 4, device=device)
    cases = {
        "gated_delta_rule": [*keys, draw(3, 5, 4, 64), -gates, gates],
        "state_space_scan": [draw(3, 5, 4, 64), gates, -gates[0, 0][:, None], *keys],
    }
    slots = torch.tensor([4, 0, 2], device=device)
    for name, given in cases.items():
        states = draw(6, 4, 64, 64)
        truth = states.double()
        wanted = getattr(recurrence, name)(truth, *(each.double() for each in given), slots, is_new=False)
        with dispatch.override(bench.face):
            found = getattr(dispatch, name)(states, *given, slots, is_new=False)
        parts = [((x.double() - y).norm() / y.norm()).item() for x, y in ((found, wanted), (states, truth))]
        yield _checked(name, torch.float32, max(parts), _RELATIVE[torch.float32])


def _dense_cases(
    bench: Bench, sizes: Sizes, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, the kernel's output, the truth)."""
    device = bench.device

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, residual, weight = (
        draw(*s) for s in [(sizes.num_tokens, sizes.hidden_size)] * 2 + [(sizes.hidden_size,)]
    )
    gate_up = draw(sizes.num_tokens, 2 * sizes.intermediate_size)
    counted = {"": x, ", many rows": draw(MOST_UNWIDENED_ROWS + 1, sizes.hidden_size)}
    with dispatch.override(bench.face):
        normed = dispatch.rms_norm(x, weight, 1e-5)
        normed_sum, total = dispatch.add_rms_norm(x, residual, weight, 1e-5)
        gated = dispatch.silu_and_mul(gate_up)
        products = {
            name + count: (
                dispatch.grouped_matmul(rows, weight),
                rows.double() @ weight.numbers().double().t(),
            )
            for name, weight in _few_bits(device, sizes).items()
            for count, rows in counted.items()
        }
    for name, (out, truth) in products.items():
        yield f"grouped_matmul, {name}", out, truth
    yield "rms_norm", normed, reference.rms_norm(x.double(), weight.double(), 1e-5)
    yield "add_rms_norm, norm", normed_sum, reference.rms_norm(total.double(), weight.double(), 1e-5)
    yield "add_rms_norm, sum", total, x.double() + residual.double()
    yield "silu_and_mul", gated, reference.silu_and_mul(gate_up.double())


def _scaled_cases(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    """Quantized rows, alone and with the kernels that compute them, and their matmuls."""
    device = bench.device
    x, residual = (torch.randn(sizes.num_tokens, sizes.hidden_size, device=device).to(dtype) for _ in "xy")
    weight = torch.rand(sizes.hidden_size, device=device).to(dtype)
    gate_up = torch.randn(sizes.num_tokens, 2 * sizes.hidden_size, device=device).to(dtype)
    matrix = torch.randn(sizes.intermediate_size, sizes.hidden_size, device=device).to(dtype)
    for numbers in _eight_bits(device):
        with dispatch.override(bench.face):
            rows, weights = (dispatch.quantize_rows(part, numbers) for part in (x, matrix))
            normed, total = dispatch.norm_and_quantize(x, residual, weight, 1e-5, numbers, False)
            gated = dispatch.silu_and_quantize(gate_up, numbers, False)
            product = dispatch.scaled_matmul(rows, weights, None)
            # The library only supports sizes that are multiples of 16.
            even = ScaledRows(
                weights.numbers[: _even(matrix)], weights.scales[: _even(matrix)], weights.dtype
            )
            by_library = dispatch.scaled_matmul(rows, even, None)
        name, step = str(numbers).removeprefix("torch."), _STEP[numbers]
        for case, out, truth, limit in [
            ("quantize_rows", _widened(rows), x, step),
            ("norm_and_quantize", _widened(normed), reference.rms_norm(total.double(), weight.double(), 1e-5), step),
            ("norm_and_quantize, sum", total, x.double() + residual.double(), _RELATIVE[dtype]),
            ("silu_and_quantize", _widened(gated), reference.silu_and_mul(gate_up.double()), _PRODUCT_STEP[numbers]),
            ("scaled_matmul", product, _widened(rows) @ _widened(weights).t(), max(_SUMS[numbers], _RELATIVE[dtype])),
            (
                "scaled_matmul of multiples of 16", by_library, _widened(rows) @ _widened(even).t(),
                max(_SUMS[numbers], _RELATIVE[dtype]),
            ),
        ]:  # fmt: skip
            error = ((out.double() - truth.double()).norm() / truth.double().norm()).item()
            yield _checked(f"{case}, {name}", dtype, error, limit)


def _even(matrix: torch.Tensor) -> int:
    return len(matrix) // 16 * 16


def _eight_bits(device: torch.device) -> list[torch.dtype]:
    """Return the 8-bit dtypes that the device multiplies."""
    is_new = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)
    return [torch.int8, FP8] if is_new else [torch.int8]


def _widened(rows: ScaledRows) -> torch.Tensor:
    return rows.numbers.double() * rows.scales.double()[:, None]


def _few_bits(device: torch.device, sizes: Sizes) -> dict[str, TiledWeight]:
    """Return weights of each kind of number, with groups of 32."""
    shape = (sizes.intermediate_size, sizes.hidden_size)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    scales = 0.01 + torch.rand(shape[0], shape[1] // 32, device=device)
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.int16, device=device)
    kinds = {
        "4 bits": GroupedWeight(codes & 15, scales, zeros, bits=4),
        "8 bits": GroupedWeight(codes.view(torch.int8), scales),
        "floats": GroupedWeight((codes & 0xF7).view(FP8), scales),  # no NaN
    }
    tiled = {name: TiledWeight.from_weight(weight) for name, weight in kinds.items()}
    return {name: weight for name, weight in tiled.items() if weight is not None}


def _cache_cases(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    """Rotation and cache write, with and without norms, into every cache dtype that the device has."""
    device = bench.device
    for cache_dtype in [dtype, *_eight_bits(device)]:
        query, key, value, rotation, slots = projected(device, sizes, dtype)
        num_blocks = -(-sizes.num_tokens // 16) + 1
        shape = (num_blocks, sizes.shape.num_kv_heads, 16, sizes.shape.head_dim)
        cache, truth = (allocate_layer(*shape, cache_dtype, device) for _ in range(2))
        for tensor in (*cache.tensors(), *truth.tensors()):
            as_bytes(tensor).fill_(7)
        plain, plain_truth = (LayerCache(*(t.clone() for t in cache.tensors())) for _ in range(2))
        with dispatch.override(bench.face):
            out = dispatch.rotary_and_cache(query, key, value, rotation, cache, slots)
            dispatch.reshape_and_cache(key, value, plain, slots)
        expected = reference.rotary_and_cache(query, key, value, rotation, truth, slots)
        reference.reshape_and_cache(key, value, plain_truth, slots)
        name = f"into {str(cache_dtype).removeprefix('torch.')}"
        error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
        yield _checked(f"rotary_and_cache {name}, queries", dtype, error, _RELATIVE[dtype])
        # One step of the cache's dtype if a rounding differs; poison elsewhere must be unchanged.
        limit = 2e-2 if cache_dtype.itemsize == 1 else _RELATIVE[dtype]
        error = _cache_error(cache, truth)
        yield _checked(f"rotary_and_cache {name}, cache", dtype, error, limit)
        yield _checked(f"reshape_and_cache {name}", dtype, _cache_error(plain, plain_truth), limit)


def _cache_error(ours: LayerCache, theirs: LayerCache) -> float:
    """||difference|| / ||truth|| of the represented values, including scales."""

    def numbers(cache: LayerCache) -> torch.Tensor:
        keys, values = cache.keys.double(), cache.values.double()
        if cache.key_scales is not None and cache.value_scales is not None:
            keys, values = keys * cache.key_scales[..., None], values * cache.value_scales[..., None]
        return torch.stack([keys, values])

    truth = numbers(theirs)
    return float((numbers(ours) - truth).norm() / truth.norm())


def projected(
    device: torch.device, sizes: Sizes, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Rotation, torch.Tensor]:
    """(queries, keys, values, rotation, slots) as views of one projection; every ninth token is padding."""
    shape, n = sizes.shape, sizes.num_tokens
    qkv = torch.randn(n, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, device=device).to(dtype)
    sizes_of = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    query, key, value = torch.split(qkv, sizes_of, dim=1)
    half = torch.rand(n, shape.head_dim // 2, device=device) * 6.28
    angles = torch.cat([half, half], dim=1)
    query_norm, key_norm = (torch.randn(shape.head_dim, device=device).to(dtype) for _ in range(2))
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), query_norm, key_norm, 1e-6)
    slots = torch.randperm(n, device=device) + 16
    slots[::9] = -1
    return query, key, value, rotation, slots


def _low_rank(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> Row:
    """Rows of two adapters and of none; one of them does not change the second part."""
    slots, ranks = [0, 1, -1] * 7, [[8, 8], [16, 0]]
    with torch.device(bench.device):
        widths = [sizes.hidden_size, sizes.hidden_size // 2]
        case = low_rank_case(slots, ranks, in_features=sizes.hidden_size, widths=widths, dtype=dtype)
    fields = ("slots", "order", "tiles")
    rows = AdapterRows(*(getattr(case.rows, name).to(bench.device) for name in fields))
    truth = case.expected()
    with dispatch.override(bench.face):
        dispatch.add_low_rank(case.out, case.x, case.table, rows)
    error = ((case.out.double() - truth).norm() / truth.norm()).item()
    return _checked("add_low_rank", dtype, error, _RELATIVE[dtype])


def _experts(bench: Bench, sizes: Sizes, dtype: torch.dtype, num_experts: int) -> Iterator[Row]:
    """Two experts per row, and with more than two experts one without rows."""
    device = bench.device

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x = draw(sizes.num_tokens, sizes.hidden_size)
    weight = draw(num_experts, sizes.intermediate_size, sizes.hidden_size)
    bias, gate_up = draw(*weight.shape[:2]), 4 * draw(2 * sizes.num_tokens, 2 * sizes.intermediate_size)
    logits = torch.randn(sizes.num_tokens, num_experts, device=device)
    logits[:, 2:][:, -1:] = -100.0
    routing = Routing(top_k=2, normalizes=True)
    with dispatch.override(bench.face):
        weights, indices = dispatch.route(logits, None, routing)
        rows, places, offsets = found = dispatch.sort_by_expert(x, indices, num_experts)
        products = [dispatch.expert_matmul(rows, weight, offsets, added) for added in (None, bias)]
        gated = dispatch.clamped_swiglu(gate_up, 1.702, 7.0)
        combined = dispatch.combine_experts(products[0], places, weights)
    true_weights, true_indices = experts.route(logits, None, routing)
    differing = (indices != true_indices).sum().item()
    yield _checked(f"route: choices that differ, {num_experts} experts", dtype, differing, 0.0)
    expected = experts.sort_by_expert(x, indices, num_experts)
    differing = max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    yield _checked(f"sort_by_expert, {num_experts} experts", dtype, differing, 0.0)
    truth = experts.expert_matmul(rows.double(), weight.double(), offsets, None)
    owners = torch.repeat_interleave(offsets.diff())
    for name, out, wanted in [
        ("route", weights, true_weights.double()),
        ("expert_matmul", products[0], truth),
        ("expert_matmul with biases", products[1], truth + bias.double()[owners]),
        ("clamped_swiglu", gated, experts.clamped_swiglu(gate_up.double(), 1.702, 7.0)),
        ("combine_experts", combined, experts.combine_experts(products[0].double(), places, weights)),
    ]:
        error = ((out.double() - wanted).norm() / wanted.norm()).item()
        yield _checked(f"{name}, {num_experts} experts", dtype, error, _RELATIVE[dtype])


def _copied_blocks(bench: Bench, sizes: Sizes) -> Row:
    device = bench.device
    shape = (40, sizes.shape.num_kv_heads, 16, sizes.shape.head_dim)
    caches = [torch.randn(shape, device=device) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    pairs = [(number, number + 20) for number in range(20)]
    with dispatch.override(bench.face):
        dispatch.copy_blocks(caches[0], caches[1], pairs)
    reference.copy_blocks(expected[0], expected[1], pairs)
    error = max((a - b).abs().max().item() for a, b in zip(caches, expected, strict=True))
    return _checked("copy_blocks", torch.float32, error, 0.0)


def sampling_rows(device: torch.device, num_rows: int, *, filters: bool) -> SamplingRows:
    numbers = torch.arange(num_rows, device=device)
    off = torch.zeros(num_rows, device=device)
    return SamplingRows(
        temperatures=0.5 + (numbers % 4).float() / 4,
        top_k=(numbers % 3 * 50 * filters).to(torch.int32),
        top_p=torch.where(numbers % 2 == 0, 0.9, 1.0).double() if filters else off.double() + 1.0,
        log_min_p=torch.where(numbers % 5 == 0, 0.02, 0.0).log() if filters else off - torch.inf,
        seeds=numbers * 0x123456789AB + 7,
        sample_indices=numbers % 3,
        positions=numbers * 31,
    )


def _sampled(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """Tokens equal those of a sort on the CPU for the same logits."""
    device = bench.device
    for filters in (False, True):
        logits = 3 * torch.randn(sizes.num_rows, sizes.vocab_size, device=device)
        rows = sampling_rows(device, sizes.num_rows, filters=filters)
        with dispatch.override(bench.face):
            out = dispatch.sample_tokens(logits, logits.amax(dim=-1), rows, has_filters=filters)
        host_rows = SamplingRows(*(field.cpu() for field in rows))
        host = logits.cpu()
        truth = reference.sample_tokens(host, host.amax(dim=-1), host_rows, has_filters=filters)
        differing = (out.cpu() != truth).sum().item()
        name = "sample_tokens, top-k, top-p, min-p" if filters else "sample_tokens"
        # Rounding can decide between two tied tokens, but hardly ever in this many rows.
        yield _checked(
            f"{name}: rows that differ from the CPU", torch.float32, differing, sizes.num_rows / 64
        )
