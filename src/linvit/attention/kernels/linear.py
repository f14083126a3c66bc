"""The Triton kernels of linear attention as one operator of torch, with its gradients; see `programs`."""

from typing import Any

import torch
import triton
from torch import Tensor

from linvit.attention.kernels import programs

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_turns, Tensor? k_turns, Tensor? weights, Tensor? shift, Tensor? factor, "
    "str phi, float[] numbers"
)
PROGRAMS = 512
"""How many programs fill a device: some four on each of an H100's 132 multiprocessors."""
CHUNKS = 32
"""The most chunks of the tokens of a head, whose sums each program adds up that needs them."""


class _Call:
    """What the operators were given, and of it what the programs take: grids, arguments, constants."""

    tile: int
    chunk_at_least: int

    def __init__(self, *given: Any) -> None:
        self.q, self.k, self.v, self.q_turns, self.k_turns, self.weights, self.shift, self.factor, phi, numbers = given
        power, groups, difference, eps, self.relu_eps = numbers
        self.batch, self.heads, self.queries, d = self.q.shape
        self.keys, e = self.v.shape[2:]
        self.groups, self.focused = int(groups), phi == "focused"
        self.scales = eps, difference / self.keys if difference else 1.0, 1 / self.keys
        wide, value_wide = (max(16, triton.next_power_of_2(n)) for n in (d, e))  # products take 16 channels or more
        largest, single = max(wide, value_wide), self.v.dtype == torch.float32
        # as many tokens as leave S, z and a tile in registers: benchmarks/kernels.py
        self.tile = max(16, min(64, 2048 // largest) // (2 if single else 1))
        self.chunk_at_least = 8 * max(d, e)  # of which S and z are a small part
        third = "peak" if phi in ("exp", "softmax") else "values" if difference else ""
        self.grad_size = wide * value_wide + wide + (value_wide if difference else 0)
        self.size = self.grad_size + (wide if third == "peak" else 0)
        self.focus_grid = self.batch * self.groups, -(-max(self.queries, self.keys) // self.tile), 2
        self.focus = {"D": d, "KD": wide, "T": self.tile, "POWER": int(power) if power == int(power) else power}
        self.products = self.focus | {"E": e, "VD": value_wide, "SIZE": self.size, "PHI": phi}
        self.products |= {"THIRD": third, "PRECISION": "ieee" if single else "tf32"}
        self.products |= {"num_warps": 4 if largest <= 64 else 8, "num_stages": 2 if largest <= 64 else 1}

    def grid(self, tokens: int) -> tuple[int, int]:
        """Programs for a number of tokens: heads of images, of which there may be more than 65,535, and chunks."""
        return self.batch * self.heads, -(-tokens // self.chunk(tokens))

    def chunk(self, tokens: int) -> int:
        """Tokens of a program, a multiple of a tile; so few that all heads together fill the device."""
        chunks = min(CHUNKS, max(1, PROGRAMS // (self.batch * self.heads)))
        tokens = max(self.chunk_at_least, -(-tokens // chunks))
        return -(-tokens // self.tile) * self.tile

    def of_tokens(self, x: Tensor, other: Tensor, turns: Tensor | None) -> tuple[float, ...]:
        """Arguments of programs over the tokens of x."""
        tokens, per_head = x.shape[2], int(turns is not None and turns.ndim == 4)
        strides = *x.stride()[:3], *other.stride()[:3]
        return *strides, self.heads, tokens, self.chunk(tokens), per_head, self.heads // self.groups, self.relu_eps

    def of_queries(self, rows: Tensor, other: Tensor) -> tuple[Any, ...]:
        """Arguments of `queries`."""
        last = *self.scales, self.grid(self.keys)[1]
        return self.q_turns, rows, self.factor, *self.of_tokens(self.q, other, self.q_turns), *last

    def of_keys(self, rows: Tensor) -> tuple[Any, ...]:
        """Arguments of the programs over keys."""
        tables = self.k_turns, self.weights, rows, self.shift, self.factor
        return *tables, *self.of_tokens(self.k, self.v, self.k_turns)

    def run_focus(self, q_rows: Tensor, k_rows: Tensor, *gradients: Tensor | None) -> None:
        """Starts `focus`."""
        strides = *self.q.stride()[:3], *self.k.stride()[:3]
        last = *strides, self.heads, self.queries, self.keys, self.groups, self.relu_eps
        given = self.q, self.k, q_rows, k_rows, *gradients, self.shift, self.factor, *last
        launch(programs.focus, self.focus_grid, *given, **self.focus)

    def outputs(self) -> tuple[Tensor, ...]:
        """What `attention` returns, empty."""
        sums = self.sums(self.keys, self.size)
        sizes = (self.batch * self.groups * tokens * self.focused for tokens in (self.queries, self.keys))
        return _like_tokens(self.q, self.v.shape[3]), sums, *(sums.new_empty(size) for size in sizes)

    def gradients(self) -> tuple[Tensor, ...]:
        """What `attention_backward` returns, empty."""
        extras = (self.weights, self.shift, self.factor)
        own = (self.q.new_empty(0 if x is None else x.shape, dtype=torch.float32) for x in extras)
        return *(_like_tokens(x, x.shape[3]) for x in (self.q, self.k, self.v)), *own

    def sums(self, tokens: int, size: int) -> Tensor:
        """Room for the sums over chunks of tokens."""
        room: Tensor = self.q.new_empty(*self.grid(tokens), size, dtype=torch.float32)
        return room


def launch(program: Any, grid: tuple[int, ...], first: Tensor, *arguments: Any, **constants: Any) -> None:
    """Starts a program on the device of its first argument."""
    with torch.cuda.device(first.device if first.is_cuda else -1):
        program[grid](first, *arguments, **constants)


def _like_tokens(x: Tensor, width: int) -> Tensor:
    """An empty (B, h, N, width) that lies in memory as (B, N, h, width), as projections take and give it."""
    batch, heads, tokens, _ = x.shape
    return x.new_empty(batch, tokens, heads, width).transpose(1, 2)


@torch.library.custom_op(
    "linvit::linear_attention", mutates_args=(), schema=f"({GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def attention(*given: Any) -> tuple[Tensor, ...]:
    """The output (B, h, N, e), and for the backward pass S and z of each head, and the rows of focused q and k."""
    call = _Call(*given)
    out, sums, q_rows, k_rows = call.outputs()
    if call.focused:
        call.run_focus(q_rows, k_rows, None, None, None)
    launch(programs.sum_keys, call.grid(call.keys), call.k, call.v, sums, *call.of_keys(k_rows), **call.products)
    arguments = call.q, sums, out, None, None, *call.of_queries(q_rows, call.q)
    launch(programs.queries, call.grid(call.queries), *arguments, GRAD_SIZE=0, **call.products)
    return out, sums, q_rows, k_rows


@torch.library.custom_op(
    "linvit::linear_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor sums, Tensor q_rows, Tensor k_rows, {GIVEN}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(gradient: Tensor, sums: Tensor, q_rows: Tensor, k_rows: Tensor, *given: Any) -> Any:
    """Gradients of q, k, v, weights, shift and factor; those of what is not there are empty."""
    call = _Call(*given)
    dq, dk, dv, of_weights, of_shift, of_factor = call.gradients()
    parts = call.sums(call.queries, call.grad_size)
    constants = call.products | {"GRAD_SIZE": call.grad_size}
    arguments = call.q, sums, parts, gradient, dq, *call.of_queries(q_rows, gradient)
    launch(programs.queries, call.grid(call.queries), *arguments, **constants)
    arguments = call.k, call.v, sums, parts, dk, dv, of_weights, *call.of_keys(k_rows), parts.shape[1]
    launch(programs.grad_keys, call.grid(call.keys), *arguments, **constants)
    if call.focused:
        _, tiles, both = call.focus_grid
        of_tiles = of_factor.new_empty(both * tiles * call.batch, *of_factor.shape)
        call.run_focus(q_rows, k_rows, dq, dk, of_tiles)
        if call.factor is not None:
            of_factor = of_tiles.sum(0)
    if call.shift is not None:
        of_shift = dk.transpose(1, 2).flatten(2).sum(0, dtype=torch.float32)
    return dq, dk, dv, of_weights, of_shift, of_factor


attention.register_fake(lambda *given: _Call(*given).outputs())
attention_backward.register_fake(lambda *given: _Call(*given[4:]).gradients())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:8])
    ctx.mark_non_differentiable(*output[1:])
    ctx.options = inputs[8:]


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    dq, dk, dv, *extras = attention_backward(gradient, *ctx.saved_tensors, *ctx.options)
    extras = [None if x is None else dx for x, dx in zip(ctx.saved_tensors[-3:], extras, strict=True)]
    return dq, dk, dv, None, None, *extras, None, None


attention.register_autograd(_backward, setup_context=_keep)
