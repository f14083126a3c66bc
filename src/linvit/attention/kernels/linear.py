"""The Triton kernels of linear attention as one function with its gradients; see `programs`."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from linvit.attention.kernels import programs
from linvit.attention.packed import Packed

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_turns, Tensor? k_turns, Tensor? weights, Tensor? shift, Tensor? factor, "
    "str phi, float[] numbers"
)
PROGRAMS = 1024
"""Number of programs that fill a device: about eight on each of an H100's 132 multiprocessors."""
CHUNKS = 32
"""Maximum number of chunks of the tokens of a head; each program that needs their sums adds them up."""


class _Call:
    """Inputs of the operators, and the grids, arguments and constants of the programs."""

    batch: int
    tile: int
    least: int

    def __init__(self, *given: Any) -> None:
        self.q, self.k, self.v, self.q_turns, self.k_turns, self.weights, self.shift, self.factor, *rest = given
        phi, (power, groups, difference, eps, self.relu_eps, mean), *packed = rest
        self.batch, self.heads, self.queries, d = self.q.shape
        self.keys, e = self.v.shape[2:]
        self.packed: Packed | None = next(iter(packed), None)
        self.images = self.batch if self.packed is None else len(self.packed.lengths)
        self.groups, self.focused = int(groups), phi == "focused"
        self.group = self.heads // self.groups
        keys = self.keys if self.packed is None else 1  # by whose number the programs divide
        self.scales = eps * keys if mean else eps, difference / keys if difference else 1.0, 1 / keys
        self.mean_eps = 1 if mean and self.packed is not None else None
        wide, value_wide = (max(16, triton.next_power_of_2(n)) for n in (d, e))  # products take 16 channels or more
        largest, single = max(wide, value_wide), self.v.dtype == torch.float32
        # as many tokens as leave S, z and a tile in registers: benchmarks/kernels.py
        self.tile = max(16, min(64, 2048 // largest) // (2 if single else 1))
        self.least = 8 * max(d, e)  # tokens of a chunk, so that S and z are small in comparison
        # One program processes all heads with a common norm (their tokens are then cached) if enough programs remain.
        chunks = min(CHUNKS, -(-self.mean(self.keys) // self.least))
        self.whole = not self.focused or 4 * self.images * self.groups * chunks >= PROGRAMS
        self.members = self.group if self.focused and self.whole else 1
        third = "peak" if phi in ("exp", "softmax") else "values" if difference else ""
        grad_size = wide * value_wide + wide + (value_wide if difference else 0)
        size = grad_size + (wide if third == "peak" else 0)
        self.constants = {"D": d, "E": e, "KD": wide, "VD": value_wide, "SIZE": size, "GRAD_SIZE": grad_size}
        self.constants |= {"T": self.tile, "PHI": phi, "POWER": int(power) if power == int(power) else power}
        self.constants |= {"THIRD": third, "PRECISION": "ieee" if single else "tf32"}
        self.constants |= {
            "num_warps": 4 if largest <= 64 else 8,
            "num_stages": 3 if largest <= 64 and not self.focused else 1,
        }
        self.table = None if self.packed is None else self.pieces(self.packed, self.chunk(self.keys))
        self.parts = self.batch if self.table is None else len(self.table)

    def mean(self, tokens: int) -> int:
        """Returns the mean number of tokens of an image, rounded up."""
        return -(-tokens * self.batch // self.images)

    def chunk(self, tokens: int) -> int:
        """Returns the tokens of a program, a multiple of a tile; so few that all heads together fill the device."""
        filling = CHUNKS if self.members > 1 else max(1, PROGRAMS // (self.images * self.heads))
        longest = tokens if self.packed is None else max(self.packed.lengths)
        tokens = max(self.least, -(-longest // CHUNKS), -(-self.mean(tokens) // filling))
        return -(-tokens // self.tile) * self.tile

    def chunks(self, tokens: int) -> int:
        """Returns the number of programs for a number of tokens of an image, or for a piece of one."""
        return -(-tokens // self.chunk(tokens)) if self.packed is None else 1

    def pieces(self, packed: Packed, chunk: int) -> Tensor:
        """Returns the pieces of images of at most `chunk` tokens, (pieces, `programs.COLUMNS`)."""

        def made() -> Tensor:
            rows: list[tuple[int, ...]] = []
            tiles = 0
            for begin, count in zip(packed.offsets, packed.lengths, strict=False):
                own = len(rows), -(-count // chunk), count
                for first in range(begin, begin + count, chunk):
                    tile = tiles + (first - begin) // self.tile - first // self.tile
                    rows.append((first, min(first + chunk, begin + count), self.keys, tile, *own))
                tiles += -(-count // self.tile)
            return torch.tensor(rows).to(self.q.device)

        return packed.kept(("pieces", chunk, self.tile, self.q.device), made)  # type: ignore[no-any-return]

    def tiles(self, tokens: int) -> int:
        """Returns the number of tiles of all images."""
        if self.packed is None:
            return self.batch * -(-tokens // self.tile)
        return sum(-(-count // self.tile) for count in self.packed.lengths)

    def of_tokens(self, x: Tensor, other: Tensor, turns: Tensor | None) -> tuple[Any, ...]:
        """Arguments of steps over the tokens of x."""
        tokens, per_head = x.shape[2], int(turns is not None and turns.ndim == 4)
        strides = *x.stride()[:3], *other.stride()[:3]
        return self.table, *strides, self.heads, *self.counts(tokens), per_head, self.group, self.relu_eps

    def counts(self, tokens: int) -> tuple[int | None, int | None]:
        """Returns the numbers of tokens of an image and of a program; None where a table has them."""
        return (tokens, self.chunk(tokens)) if self.table is None else (None, None)

    def of_queries(self, rows: Tensor, other: Tensor) -> tuple[Any, ...]:
        """Arguments of `queries`."""
        last = *self.scales, self.mean_eps, self.chunks(self.keys)
        return self.q_turns, rows, self.factor, *self.of_tokens(self.q, other, self.q_turns), *last

    def of_keys(self, rows: Tensor) -> tuple[Any, ...]:
        """Arguments of the steps over keys."""
        tables = self.k_turns, self.weights, rows, self.shift, self.factor
        return *tables, *self.of_tokens(self.k, self.v, self.k_turns)

    def focus(self, x: Tensor, rows: Tensor, *gradients: Tensor | None) -> tuple[Any, ...] | None:
        """Arguments of `focus`; None where there is nothing to focus."""
        tokens, shift = x.shape[2], self.shift if x is self.k else None
        last = *x.stride()[:3], self.heads, *self.counts(tokens), self.group, self.relu_eps
        return (x, rows, *gradients, shift, self.factor, self.table, *last) if self.focused else None

    def run(self, backward: bool, *given: tuple[Any, ...] | None) -> None:
        """Starts the steps of `programs.run`, in as few programs as their order allows."""
        q, k = self.chunks(self.queries), self.chunks(self.keys)
        first, second = (programs.queries, programs.grad_keys) if backward else (programs.sum_keys, programs.queries)
        if self.whole and q == k == 1 and self.parts == self.images:
            plan = [(1, {0, 1, 2, 3, 4})]
        elif self.whole:
            plan = [(q, {1, 2}), (k, {3, 4})] if backward else [(k, {0, 1}), (q, {2, 3})]
        else:
            plan = [(q, {1}), (k, {3}), (max(q, k), {2, 4})] if backward else [(max(q, k), {0, 2}), (k, {1}), (q, {3})]
        constants = self.constants | {"FIRST": first, "SECOND": second}
        if backward and not self.focused and self.tile == 64:  # S and its gradient are also in registers
            constants |= {"T": 32, "num_warps": 2}
        for chunks, chosen in plan:
            members = self.members if chosen & {1, 3} else self.group
            arguments = (x if place in chosen else None for place, x in enumerate(given))
            grid = self.parts * self.heads // members, chunks
            constants["STEPS"] = sum(1 << place for place in chosen if given[place] is not None)
            launch(programs.run, grid, self.q.device, members, *arguments, **constants)

    def outputs(self) -> tuple[Tensor, ...]:
        """Returns the empty outputs of `forward`."""
        sums = self.sums(self.keys, "SIZE")
        sizes = (self.batch * self.groups * tokens * self.focused for tokens in (self.queries, self.keys))
        return _like_tokens(self.q, self.v.shape[3]), sums, *(sums.new_empty(size) for size in sizes)

    def gradients(self) -> tuple[Tensor, ...]:
        """Returns the empty outputs of `backward`."""
        extras = (self.weights, self.shift, self.factor)
        own = (self.q.new_empty(0 if x is None else x.shape, dtype=torch.float32) for x in extras)
        return *(_like_tokens(x, x.shape[3]) for x in (self.q, self.k, self.v)), *own

    def sums(self, tokens: int, size: str) -> Tensor:
        """Returns an empty tensor for the sums over chunks of tokens."""
        shape = self.parts * self.heads, self.chunks(tokens), self.constants[size]
        room: Tensor = self.q.new_empty(shape, dtype=torch.float32)
        return room


def launch(program: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Starts a program."""
    with torch.cuda.device(device if device.type == "cuda" else -1):
        program[grid](*arguments, **constants)


def _like_tokens(x: Tensor, width: int) -> Tensor:
    """Returns an empty (B, h, N, width) with the memory layout (B, N, h, width) of projections."""
    batch, heads, tokens, _ = x.shape
    return x.new_empty(batch, tokens, heads, width).transpose(1, 2)


def forward(*given: Any) -> tuple[Tensor, ...]:
    """Returns the output (B, h, N, e), and for the backward pass S and z per head, and the rows of focused q and k."""
    call = _Call(*given)
    out, sums, q_rows, k_rows = call.outputs()
    keys = call.k, call.v, sums, *call.of_keys(k_rows)
    queries = call.q, sums, out, None, None, *call.of_queries(q_rows, call.q)
    call.run(False, call.focus(call.k, k_rows, None, None), keys, call.focus(call.q, q_rows, None, None), queries, None)
    return out, sums, q_rows, k_rows


def backward(gradient: Tensor, sums: Tensor, q_rows: Tensor, k_rows: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Returns gradients of q, k, v, weights, shift and factor; empty for missing inputs."""
    call = _Call(*given)
    dq, dk, dv, of_weights, of_shift, of_factor = call.gradients()
    parts = call.sums(call.queries, "GRAD_SIZE")
    tiles = [call.tiles(tokens) for tokens in (call.queries, call.keys)]
    of_tiles = of_factor.new_empty(sum(tiles), *of_factor.shape)
    of_q, of_k = of_tiles.split(tiles)
    queries = call.q, sums, parts, gradient, dq, *call.of_queries(q_rows, gradient)
    keys = call.k, call.v, sums, parts, dk, dv, of_weights, *call.of_keys(k_rows), parts.shape[1]
    call.run(True, None, queries, call.focus(call.q, q_rows, dq, of_q), keys, call.focus(call.k, k_rows, dk, of_k))
    if call.factor is not None:
        of_factor = of_tiles.sum(0)
    if call.shift is not None:
        of_shift = dk.transpose(1, 2).flatten(2).sum(0, dtype=torch.float32)
    return dq, dk, dv, of_weights, of_shift, of_factor


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:8])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for these
    ctx.options = inputs[8:]


def _gradients(compute: Callable[..., tuple[Tensor, ...]], ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    dq, dk, dv, *extras = compute(gradient, *ctx.saved_tensors, *ctx.options)
    found = [None if x is None else dx for x, dx in zip(ctx.saved_tensors[-3:], extras, strict=True)]
    return dq, dk, dv, None, None, *found, *(None for _ in ctx.options)


class _Attention(torch.autograd.Function):
    """Calls both passes directly: through registered operators, a call takes the host twice as long."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        found = forward(*given)
        _keep(ctx, given, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(backward, ctx, gradient)


forward_operator = torch.library.custom_op(
    "linvit::linear_attention", forward, mutates_args=(), schema=f"({GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)"
)
backward_operator = torch.library.custom_op(
    "linvit::linear_attention_backward",
    backward,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor sums, Tensor q_rows, Tensor k_rows, {GIVEN}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
forward_operator.register_fake(lambda *given: _Call(*given).outputs())
backward_operator.register_fake(lambda *given: _Call(*given[4:]).gradients())
forward_operator.register_autograd(
    lambda ctx, gradient, *_: _gradients(backward_operator, ctx, gradient), setup_context=_keep
)


def attention(packed: Packed | None, *given: Any) -> Tensor:
    """Returns the output (B, h, N, e) with its gradients: in compiled networks by an operator that breaks no graph."""
    if torch.compiler.is_compiling() and packed is None:
        return forward_operator(*given)[0]  # type: ignore[no-any-return]
    return _Attention.apply(*given, packed)[0]  # type: ignore[no-any-return]
