"""Linear attention as a Triton program, `run`, each for some tokens of heads of an image, in tiles (T, channels).

| step | computes | reads | writes |
|---|---|---|---|
| `sum_keys` | `S = sum_m R_m v_m^T`, `z = sum_m F_m` | k, v | S, z of each chunk of keys |
| `queries` | `o = R S / (F z + eps)` | q | o |
| `queries`, with the gradient of o | gradients of q, S, z | q, gradient | dq; dS, dz of each chunk of queries |
| `grad_keys` | gradients of k and v | k, v | dk, dv |
| `focus` | what f_p multiplies tokens by; with gradients of f_p: those of q and k | q, k; dq, dk | rows; dq, dk |

F = phi(x) are features of q or k, and R the same rotated by their positions. Inputs are converted to float32, as is
every sum; S and z of a head stay in registers. Steps that need S and z add up those of all chunks. Channels
are padded to powers of two, KD and VD, with zeros in F. S and z are followed by a third row: the largest key of each
channel for exponentials, or the sum of the values for MALA's difference.

Images of several sizes in one row are cut into pieces, and `images` has a row of numbers for each piece. The pieces
then take the place of the images of a batch, with one program along the second axis, and `images` that of `count`.

Triton 3.6, which comes with torch 2.11, cannot compare a tuple with None, and its functions cannot return None. So the
bits of STEPS select the steps, and each step moves its own pointers to its head.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(7)
"""Numbers of a piece: first token, end, tokens of all images, `tiles` of `_chunk`; first piece, pieces and tokens of
its image."""


@triton.jit
def _chunk(images, pair, heads, count, chunk, T: tl.constexpr):
    """A head in memory; first token and end of a program's chunk; end of the image; tokens in memory; `tiles`.

    Tile `tiles + first // T` of all images begins with token `first`.
    """
    if images is None:
        part, limit, tiles = tl.program_id(1), count, pair // heads * tl.cdiv(count, T)
        begin, end = part * chunk, tl.minimum(count, (part + 1) * chunk)
    else:
        images += pair // heads * COLUMNS
        begin, end, count, tiles = tl.load(images), tl.load(images + 1), tl.load(images + 2), tl.load(images + 3)
        pair, limit = pair % heads, end
    return pair, begin, end, limit, count, tiles


@triton.jit
def _load(x, shift, tokens, channels, inside, stride, shift_stride):
    """A tile as float32, plus a shift per token and channel."""
    found = tl.load(x + tokens[:, None] * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    if shift is not None:
        found += tl.load(shift + tokens[:, None] * shift_stride + channels[None, :], mask=inside, other=0.0)
    return found


@triton.jit
def _power(x, POWER: tl.constexpr):
    """`x^p` for x >= 0, by products where p is whole."""
    if POWER % 1 == 0:
        found = x
        for _ in tl.static_range(POWER - 1):
            found *= x
    else:
        found = tl.exp2(POWER * tl.log2(x))
    return found


@triton.jit
def _relu(x, factor, channels, relu_eps, D: tl.constexpr):
    """`(relu(x) + relu_eps) factor`; NaN stays NaN."""
    found = tl.where(x < 0, 0.0, x) + relu_eps
    if factor is not None:
        found *= tl.load(factor + channels, mask=channels < D, other=0.0)[None, :]
    return found


@triton.jit
def _phi(
    x, rows, factor, tokens, channels, inside, peak, relu_eps, D: tl.constexpr, PHI: tl.constexpr, POWER: tl.constexpr
):  # fmt: skip
    """Features F of a tile, 0 outside."""
    if PHI == "elu":
        found = tl.where(x > 0, x + 1, tl.exp(x))
    elif PHI == "exp" or PHI == "softmax":
        found = tl.exp(x - peak)
    else:
        found = _relu(x, factor, channels, relu_eps, D)
        if PHI == "focused":
            found = _power(found * tl.load(rows + tokens[:, None], mask=inside, other=0.0), POWER)
    return tl.where(inside, found, 0.0)


@triton.jit
def _through_phi(gradient, x, features, PHI: tl.constexpr):
    """The gradient of x for one of F; of "focused" that of F, which `focus` takes further."""
    if PHI == "elu":
        found = gradient * tl.where(x > 0, 1.0, features)
    elif PHI == "relu":
        found = tl.where(x > 0, gradient, 0.0)
    elif PHI == "focused":
        found = gradient
    else:
        found = gradient * features
    return found


@triton.jit
def _turned(x, turns, tokens, channels, inside, SIGN: tl.constexpr, D: tl.constexpr, T: tl.constexpr, KD: tl.constexpr):
    """A tile with each pair of channels rotated by SIGN times an angle, whose cosine and sine are in `turns`."""
    found = x
    if turns is not None:
        angles = tl.load(turns + tokens[:, None] * D + channels[None, :], mask=inside, other=0.0)
        cos, sin = tl.split(tl.reshape(angles, (T, KD // 2, 2)))
        first, second = tl.split(tl.reshape(x, (T, KD // 2, 2)))
        found = tl.join(first * cos - second * sin * SIGN, second * cos + first * sin * SIGN)
        found = tl.reshape(found, (T, KD))
    return found


@triton.jit
def _load_sums(
    sums, images, pair, heads, chunks, KD: tl.constexpr, VD: tl.constexpr, SIZE: tl.constexpr, THIRD: tl.constexpr
):  # fmt: skip
    """S (KD, VD), z (KD) and the third row over all chunks: "peak" (KD), "values" (VD), or "" for none."""
    channels, values = tl.arange(0, KD), tl.arange(0, VD)
    step = SIZE
    if images is None:
        sums += pair * chunks * SIZE
    else:
        images += pair // heads * COLUMNS
        sums += (tl.load(images + 4) * heads + pair % heads) * SIZE
        chunks, step = tl.load(images + 5), heads * SIZE
    context = tl.zeros((KD, VD), tl.float32)
    total = tl.zeros((KD,), tl.float32)
    third = tl.zeros((VD,), tl.float32)
    if THIRD == "peak":
        third = tl.full((KD,), -float("inf"), tl.float32)
        for i in range(chunks):
            third = tl.maximum(third, tl.load(sums + i * step + KD * VD + KD + channels))
        third = tl.where(third == -float("inf"), 0.0, third)
    for i in range(chunks):
        part = tl.load(sums + i * step + channels[:, None] * VD + values[None, :])
        part_total = tl.load(sums + i * step + KD * VD + channels)
        if THIRD == "peak":
            shrink = tl.exp(tl.load(sums + i * step + KD * VD + KD + channels) - third)
            part *= shrink[:, None]
            part_total *= shrink
        elif THIRD == "values":
            third += tl.load(sums + i * step + KD * VD + KD + values)
        context += part
        total += part_total
    return context, total, third


@triton.jit
def _normalized(context, total, peak, D: tl.constexpr, KD: tl.constexpr, PHI: tl.constexpr):
    """S and z as queries take them: of "exp" by one maximum, of "softmax" each channel's divided by its sum."""
    channels = tl.arange(0, KD)
    if PHI == "softmax":
        context /= tl.where(channels < D, total, 1.0)[:, None]
        total = tl.where(channels < D, 1.0, 0.0)
    elif PHI == "exp":
        peak = tl.where(channels < D, peak, -float("inf"))
        shrink = tl.exp(peak - tl.max(peak, 0))
        context *= shrink[:, None]
        total *= shrink
    return context, total


@triton.jit
def _store_sums(sums, context, total, KD: tl.constexpr, VD: tl.constexpr):
    channels = tl.arange(0, KD)
    tl.store(sums + channels[:, None] * VD + tl.arange(0, VD)[None, :], context)
    tl.store(sums + KD * VD + channels, total)


@triton.jit
def sum_keys(
    pair, k, v, sums, turns, weights, rows, shift, factor, images, k_batch, k_head, k_token, v_batch, v_head, v_token,
    heads, count, chunk, per_head, per_row, relu_eps,
    D: tl.constexpr, E: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, SIZE: tl.constexpr, GRAD_SIZE: tl.constexpr,
    T: tl.constexpr, PHI: tl.constexpr, POWER: tl.constexpr, THIRD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S, z and the third row of a chunk of keys. Exponentials are kept relative to the largest key so far."""
    part, channels, values = tl.program_id(1), tl.arange(0, KD), tl.arange(0, VD)
    own, begin, end, limit, count, _ = _chunk(images, pair, heads, count, chunk, T)
    batch, head = own // heads, own % heads
    if turns is not None:
        turns += head * per_head * count * D
    if rows is not None:
        rows += (own // per_row) * count
    if shift is not None:
        shift += head * D
    if factor is not None:
        factor += head * D
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    sums += (pair * tl.num_programs(1) + part) * SIZE
    context = tl.zeros((KD, VD), tl.float32)
    total = tl.zeros((KD,), tl.float32)
    value_sum = tl.zeros((VD,), tl.float32)
    peak = tl.full((KD,), -float("inf"), tl.float32)
    for first in range(begin, end, T):
        tokens = first + tl.arange(0, T).to(tl.int64)
        here = (tokens < limit)[:, None]
        inside = here & (channels < D)[None, :]
        x = _load(k, shift, tokens, channels, inside, k_token, heads * D)
        value = _load(v, None, tokens, values, here & (values < E)[None, :], v_token, 0)
        base = peak
        if THIRD == "peak":
            highest = tl.maximum(peak, tl.max(tl.where(inside, x, -float("inf")), 0))
            base = tl.where(highest == -float("inf"), 0.0, highest)  # so far all keys are masked
            shrink = tl.exp(peak - base)
            context *= shrink[:, None]
            total *= shrink
            peak = highest
        features = _phi(x, rows, factor, tokens, channels, inside, base[None, :], relu_eps, D, PHI, POWER)
        if weights is not None:
            features *= tl.load(weights + own * count + tokens[:, None], mask=here, other=0.0)
        turned = _turned(features, turns, tokens, channels, inside, 1, D, T, KD)
        context += tl.dot(tl.trans(turned), value, input_precision=PRECISION)
        total += tl.sum(features, 0)
        value_sum += tl.sum(value, 0)
    _store_sums(sums, context, total, KD, VD)
    if THIRD == "peak":
        tl.store(sums + KD * VD + KD + channels, peak)
    elif THIRD == "values":
        tl.store(sums + KD * VD + KD + values, value_sum)


@triton.jit
def queries(
    pair, q, sums, out, gradient, dq, turns, rows, factor, images, q_batch, q_head, q_token, g_batch, g_head, g_token,
    heads, count, chunk, per_head, per_row, relu_eps, eps, scale, share, mean_eps, key_chunks,
    D: tl.constexpr, E: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, SIZE: tl.constexpr, GRAD_SIZE: tl.constexpr,
    T: tl.constexpr, PHI: tl.constexpr, POWER: tl.constexpr, THIRD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output (B, N, h, E) of a chunk of queries.

    With its `gradient`, instead that of q, (B, N, h, D), and in `out` the chunk's share of those of S, z and the third
    row. The quotient is `o = R S / w` with `w = F z + eps`, the difference `o = scale (1 + 1 / w) R S - y mean(v)` with
    `w = y + eps`, `y = scale F z`; `scale` is s / M and `share` 1 / M. With `images` both are those of one
    key, as is eps with `mean_eps`.
    """
    part, channels, values = tl.program_id(1), tl.arange(0, KD), tl.arange(0, VD)
    own, begin, end, limit, count, _ = _chunk(images, pair, heads, count, chunk, T)
    batch, head = own // heads, own % heads
    if turns is not None:
        turns += head * per_head * count * D
    if rows is not None:
        rows += (own // per_row) * count
    if factor is not None:
        factor += head * D
    q += batch * q_batch + head * q_head
    context, total, third = _load_sums(sums, images, pair, heads, key_chunks, KD, VD, SIZE, THIRD)
    context, total = _normalized(context, total, third, D, KD, PHI)
    if images is not None:
        keys = tl.load(images + pair // heads * COLUMNS + 6).to(tl.float32)
        share /= keys
        if THIRD == "values":
            scale /= keys
        if mean_eps is not None:
            eps *= keys
    mean = tl.zeros((1, VD), tl.float32)
    if THIRD == "values":
        mean += third[None, :] * share
    of_context = tl.zeros((KD, VD), tl.float32)
    of_total = tl.zeros((KD,), tl.float32)
    of_value_sum = tl.zeros((VD,), tl.float32)
    if gradient is None:
        out += (batch * count * heads + head) * E
    else:
        gradient += batch * g_batch + head * g_head
        dq += (batch * count * heads + head) * D
        out += (pair * tl.num_programs(1) + part) * GRAD_SIZE
    for first in range(begin, end, T):
        tokens = first + tl.arange(0, T).to(tl.int64)
        here = (tokens < limit)[:, None]
        inside, there = here & (channels < D)[None, :], here & (values < E)[None, :]
        x = _load(q, None, tokens, channels, inside, q_token, 0)
        row_peak = tl.where(here, tl.max(tl.where(inside, x, -float("inf")), 1)[:, None], 0.0)
        features = _phi(x, rows, factor, tokens, channels, inside, row_peak, relu_eps, D, PHI, POWER)
        turned = _turned(features, turns, tokens, channels, inside, 1, D, T, KD)
        mixed = tl.dot(turned, context, input_precision=PRECISION)  # R S, (T, VD)
        w = tl.sum(features * total[None, :], 1)[:, None] * scale + eps  # (T, 1)
        factor_mixed = 1 / tl.where(here, w, 1.0)
        if THIRD == "values":
            factor_mixed = scale * (1 + factor_mixed)
        if gradient is None:
            found = mixed * factor_mixed
            if THIRD == "values":
                found -= (w - eps) * mean
            tl.store(out + tokens[:, None] * heads * E + values[None, :], found.to(out.dtype.element_ty), mask=there)
        else:
            given = _load(gradient, None, tokens, values, there, g_token, 0)
            of_mixed = given * factor_mixed
            of_w = -tl.sum(given * mixed, 1)[:, None] / tl.where(here, w * w, 1.0)
            if THIRD == "values":
                of_w = of_w * scale - tl.sum(given * mean, 1)[:, None]
                of_value_sum -= tl.sum((w - eps) * given, 0) * share
            of_w *= scale
            of_context += tl.dot(tl.trans(turned), of_mixed, input_precision=PRECISION)
            of_total += tl.sum(features * of_w, 0)
            of_turned = tl.dot(of_mixed, tl.trans(context), input_precision=PRECISION)
            of_features = _turned(of_turned, turns, tokens, channels, inside, -1, D, T, KD) + of_w * total[None, :]
            found = _through_phi(of_features, x, features, PHI).to(dq.dtype.element_ty)
            tl.store(dq + tokens[:, None] * heads * D + channels[None, :], found, mask=inside)
    if gradient is not None:
        _store_sums(out, of_context, of_total, KD, VD)
        if THIRD == "values":
            tl.store(out + KD * VD + KD + values, of_value_sum)


@triton.jit
def grad_keys(
    pair, k, v, sums, of_sums, dk, dv, of_weights, turns, weights, rows, shift, factor, images,
    k_batch, k_head, k_token, v_batch, v_head, v_token, heads, count, chunk, per_head, per_row, relu_eps, chunks,
    D: tl.constexpr, E: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, SIZE: tl.constexpr, GRAD_SIZE: tl.constexpr,
    T: tl.constexpr, PHI: tl.constexpr, POWER: tl.constexpr, THIRD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients (B, M, h, D) and (B, M, h, E) of a chunk of keys and values, (B, h, M) of weights of the keys."""
    channels, values = tl.arange(0, KD), tl.arange(0, VD)
    own, begin, end, limit, count, _ = _chunk(images, pair, heads, count, chunk, T)
    batch, head = own // heads, own % heads
    if turns is not None:
        turns += head * per_head * count * D
    if rows is not None:
        rows += (own // per_row) * count
    if shift is not None:
        shift += head * D
    if factor is not None:
        factor += head * D
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    dk += (batch * count * heads + head) * D
    dv += (batch * count * heads + head) * E
    of_context, of_total, of_value_sum = _load_sums(
        of_sums, images, pair, heads, chunks, KD, VD, GRAD_SIZE, "values" if THIRD == "values" else ""
    )
    peak = tl.zeros((KD,), tl.float32)
    divisor = tl.full((KD,), 1.0, tl.float32)
    if THIRD == "peak":
        key_chunks = tl.num_programs(1)
        context, divisor, peak = _load_sums(sums, images, pair, heads, key_chunks, KD, VD, SIZE, THIRD)
        divisor = tl.where(channels < D, divisor, 1.0)
        if PHI == "softmax":  # of each channel over the keys
            of_total = -tl.sum(context / divisor[:, None] * of_context, 1)
        else:
            peak = tl.full((KD,), tl.max(tl.where(channels < D, peak, -float("inf")), 0), tl.float32)
            divisor = tl.full((KD,), 1.0, tl.float32)
    for first in range(begin, end, T):
        tokens = first + tl.arange(0, T).to(tl.int64)
        here = (tokens < limit)[:, None]
        inside, there = here & (channels < D)[None, :], here & (values < E)[None, :]
        x = _load(k, shift, tokens, channels, inside, k_token, heads * D)
        value = _load(v, None, tokens, values, there, v_token, 0)
        features = _phi(x, rows, factor, tokens, channels, inside, peak[None, :], relu_eps, D, PHI, POWER)
        features /= divisor[None, :]
        of_turned = tl.dot(value, tl.trans(of_context), input_precision=PRECISION)
        of_features = _turned(of_turned, turns, tokens, channels, inside, -1, D, T, KD) + of_total[None, :]
        found = _through_phi(of_features, x, features, PHI)
        if weights is not None:
            weight = tl.load(weights + own * count + tokens[:, None], mask=here, other=0.0)
            of_weight = tl.sum(of_features * features, 1)[:, None]
            tl.store(of_weights + own * count + tokens[:, None], of_weight, mask=here)
            found *= weight
            features *= weight
        tl.store(dk + tokens[:, None] * heads * D + channels[None, :], found.to(dk.dtype.element_ty), mask=inside)
        turned = _turned(features, turns, tokens, channels, inside, 1, D, T, KD)
        of_value = tl.dot(turned, of_context, input_precision=PRECISION)
        of_value += of_value_sum[None, :]
        tl.store(dv + tokens[:, None] * heads * E + values[None, :], of_value.to(dv.dtype.element_ty), mask=there)


@triton.jit
def focus(
    pair, x, rows, dx, of_factor, shift, factor, images, x_batch, x_head, x_token, heads, count, chunk, members,
    relu_eps,
    D: tl.constexpr, E: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, SIZE: tl.constexpr, GRAD_SIZE: tl.constexpr,
    T: tl.constexpr, PHI: tl.constexpr, POWER: tl.constexpr, THIRD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows c of a chunk of x: `f_p(u) = (c u)^p` with `c^p = ||u|| / ||u^p||`, norms over `members` heads from a pair.

    With the gradient of f_p in `dx`: that of x in its place, and what each tile adds to the factor's.
    """
    TINY: tl.constexpr = 1.1754943508222875e-38
    channels = tl.arange(0, KD)
    own, begin, end, limit, count, tiles = _chunk(images, pair, heads, count, chunk, T)
    batch, lowest = own // heads, own % heads
    rows += (own // members) * count
    x += batch * x_batch
    if dx is not None:
        dx += batch * count * heads * D
    for first in range(begin, end, T):
        tokens = first + tl.arange(0, T).to(tl.int64)
        here = (tokens < limit)[:, None]
        inside = here & (channels < D)[None, :]
        unit = tl.full((T, 1), TINY, tl.float32)  # the largest entry
        squares = tl.zeros((T, 1), tl.float32)
        powers = tl.zeros((T, 1), tl.float32)
        row = unit
        if dx is not None:
            row = tl.load(rows + tokens[:, None], mask=here, other=0.0)
        for step in tl.static_range(2):
            for head in range(lowest, lowest + members):
                of_head, scales = shift, factor
                if shift is not None:
                    of_head += head * D
                if factor is not None:
                    scales += head * D
                tile = _load(x + head * x_head, of_head, tokens, channels, inside, x_token, heads * D)
                u = tl.where(inside, _relu(tile, scales, channels, relu_eps, D), 0.0)
                if dx is None:
                    if step == 0:
                        unit = tl.maximum(unit, tl.max(u, 1)[:, None])
                    else:
                        squares += tl.sum((u / unit) * (u / unit), 1)[:, None]
                        powered = _power(u / unit, POWER)
                        powers += tl.sum(powered * powered, 1)[:, None]
                else:
                    target = dx + tokens[:, None] * heads * D + head * D + channels[None, :]
                    given, focused = tl.load(target, mask=inside, other=0.0).to(tl.float32), _power(u * row, POWER)
                    if step == 0:  # `powers` are here products of y = f_p(u) and its gradient g
                        squares += tl.sum(u * u, 1)[:, None]
                        powers += tl.sum(given * focused, 1)[:, None]
                    else:  # p y / u (g - y (g y) / ||u||^2) + u (g y) / ||u||^2
                        along = powers / tl.maximum(squares, TINY)
                        found = u * along + (given - focused * along) * focused / tl.maximum(u, TINY) * POWER
                        if factor is not None:
                            scale = tl.load(scales + channels, mask=channels < D, other=1.0)
                            place = of_factor + ((tiles + first // T) * heads + head) * D
                            tl.store(place + channels, tl.sum(found * u, 0) / scale, mask=channels < D)
                            found *= scale[None, :]
                        tl.store(target, tl.where(tile > 0, found, 0.0).to(dx.dtype.element_ty), mask=inside)
        if dx is None:
            ratio = unit * tl.sqrt(squares) / tl.maximum(tl.sqrt(powers), TINY)
            tl.store(rows + tokens[:, None], tl.exp2(tl.log2(ratio) / POWER) / unit, mask=here)


@triton.jit
def run(
    members, before, first, between, second, behind, FIRST: tl.constexpr, SECOND: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, SIZE: tl.constexpr, GRAD_SIZE: tl.constexpr,
    T: tl.constexpr, PHI: tl.constexpr, POWER: tl.constexpr, THIRD: tl.constexpr, PRECISION: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """`focus`, FIRST, `focus`, SECOND, `focus` for some tokens of `members` heads; bits of STEPS say which of the five.

    Each finds in the cache what those before it have read and written of these tokens.
    """
    begin = tl.program_id(0).to(tl.int64) * members
    if STEPS & 1:
        focus(begin, *before, D, E, KD, VD, SIZE, GRAD_SIZE, T, PHI, POWER, THIRD, PRECISION)
        tl.debug_barrier()
    if STEPS & 2:
        for pair in range(begin, begin + members):
            FIRST(pair, *first, D, E, KD, VD, SIZE, GRAD_SIZE, T, PHI, POWER, THIRD, PRECISION)
        tl.debug_barrier()
    if STEPS & 4:
        focus(begin, *between, D, E, KD, VD, SIZE, GRAD_SIZE, T, PHI, POWER, THIRD, PRECISION)
        tl.debug_barrier()
    if STEPS & 8:
        for pair in range(begin, begin + members):
            SECOND(pair, *second, D, E, KD, VD, SIZE, GRAD_SIZE, T, PHI, POWER, THIRD, PRECISION)
        tl.debug_barrier()
    if STEPS & 16:
        focus(begin, *behind, D, E, KD, VD, SIZE, GRAD_SIZE, T, PHI, POWER, THIRD, PRECISION)
