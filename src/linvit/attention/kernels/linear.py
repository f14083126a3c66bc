"""The Triton kernels of linear attention as one operator of torch, with its gradients; see `programs`."""

from typing import Any

import torch
import triton
from torch import Tensor

from linvit.attention.kernels import programs

PROGRAMS = 512
"""How many programs fill a device: some four on each of an H100's 132 multiprocessors."""
CHUNKS = 32
"""The most chunks of the tokens of a head, whose sums each program adds up that needs them."""


class _Shape:
    """Sizes of a call, and what the programs take of them."""

    tile: int

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, phi: str, numbers: list[float]) -> None:
        power, groups, difference, eps, self.relu_eps = numbers
        self.batch, self.heads, self.queries, d = q.shape
        self.keys, e = v.shape[2:]
        self.groups, self.focused = int(groups), phi == "focused"
        self.scales = eps, difference / self.keys if difference else 1.0, 1 / self.keys
        self.of_both = self.heads, self.queries, self.keys, self.groups, self.relu_eps
        wide, value_wide = (max(16, triton.next_power_of_2(n)) for n in (d, e))  # products take 16 channels or more
        largest, single = max(wide, value_wide), v.dtype == torch.float32
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

    def of_tokens(self, tokens: int, turns: Tensor | None) -> tuple[float, ...]:
        """Arguments of the programs that follow the strides."""
        per_head = int(turns is not None and turns.ndim == 4)
        return self.heads, tokens, self.chunk(tokens), per_head, self.heads // self.groups, self.relu_eps

    def rows(self, x: Tensor) -> Tensor:
        """Empty rows of focused queries or keys."""
        return x.new_empty(self.batch * self.groups * x.shape[2] * self.focused, dtype=torch.float32)


def launch(program: Any, grid: tuple[int, ...], first: Tensor, *arguments: Any, **constants: Any) -> None:
    """Starts a program on the device of its first argument."""
    with torch.cuda.device(first.device if first.is_cuda else -1):
        program[grid](first, *arguments, **constants)


def _like_tokens(x: Tensor, width: int | None = None) -> Tensor:
    """An empty (B, h, N, width) that lies in memory as (B, N, h, width), as projections take and give it."""
    batch, heads, tokens, own = x.shape
    return x.new_empty(batch, tokens, heads, own if width is None else width).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


@torch.library.custom_op("linvit::linear_attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_turns: Tensor | None,
    k_turns: Tensor | None,
    weights: Tensor | None,
    shift: Tensor | None,
    factor: Tensor | None,
    phi: str,
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output (B, h, N, e), and for the backward pass S and z of each head, and the rows of focused q and k."""
    shape = _Shape(q, k, v, phi, numbers)
    q_rows, k_rows = (shape.rows(x) for x in (q, k))
    given: tuple[Any, ...]
    if phi == "focused":
        given = shift, factor, *_strides(q, k), *shape.of_both
        launch(programs.focus, shape.focus_grid, q, k, q_rows, k_rows, None, None, None, *given, **shape.focus)
    pairs, chunks = shape.grid(shape.keys)
    sums = q.new_empty(pairs, chunks, shape.size, dtype=torch.float32)
    given = k_turns, weights, k_rows, shift, factor, *_strides(k, v), *shape.of_tokens(shape.keys, k_turns)
    launch(programs.sum_keys, (pairs, chunks), k, v, sums, *given, **shape.products)
    out = _like_tokens(q, v.shape[3])
    given = q_turns, q_rows, factor, *_strides(q, q), *shape.of_tokens(shape.queries, q_turns)
    constants = shape.products | {"GRAD_SIZE": 0}
    given = None, None, *given, *shape.scales, chunks
    launch(programs.queries, shape.grid(shape.queries), q, sums, out, *given, **constants)
    return out, sums, q_rows, k_rows


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shape = _Shape(q, k, v, *rest[5:])
    pairs, chunks = shape.grid(shape.keys)
    sums = q.new_empty(pairs, chunks, shape.size, dtype=torch.float32)
    return _like_tokens(q, v.shape[3]), sums, shape.rows(q), shape.rows(k)


@torch.library.custom_op("linvit::linear_attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    sums: Tensor,
    q_rows: Tensor,
    k_rows: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_turns: Tensor | None,
    k_turns: Tensor | None,
    weights: Tensor | None,
    shift: Tensor | None,
    factor: Tensor | None,
    phi: str,
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, weights, shift and factor; those of what is not there are empty."""
    shape = _Shape(q, k, v, phi, numbers)
    dq, dk, dv = _like_tokens(q), _like_tokens(k), _like_tokens(v)
    pairs, chunks = shape.grid(shape.queries)
    parts = q.new_empty(pairs, chunks, shape.grad_size, dtype=torch.float32)
    given: tuple[Any, ...]
    given = q_turns, q_rows, factor, *_strides(q, gradient), *shape.of_tokens(shape.queries, q_turns)
    given = gradient, dq, *given, *shape.scales, shape.grid(shape.keys)[1]
    constants = shape.products | {"GRAD_SIZE": shape.grad_size}
    launch(programs.queries, (pairs, chunks), q, sums, parts, *given, **constants)
    of_weights, of_shift, of_factor = (sums.new_empty(0 if x is None else x.shape) for x in (weights, shift, factor))
    tables = k_turns, weights, k_rows, shift, factor
    given = *tables, *_strides(k, v), *shape.of_tokens(shape.keys, k_turns), chunks
    launch(programs.grad_keys, shape.grid(shape.keys), k, v, sums, parts, dk, dv, of_weights, *given, **constants)
    if phi == "focused":
        _, tiles, both = shape.focus_grid
        of_tiles = sums.new_empty(both * tiles * shape.batch, *of_factor.shape)
        given = of_tiles, shift, factor, *_strides(q, k), *shape.of_both
        launch(programs.focus, shape.focus_grid, q, k, q_rows, k_rows, dq, dk, *given, **shape.focus)
        if factor is not None:
            of_factor = of_tiles.sum(0)
    if shift is not None:
        of_shift = dk.transpose(1, 2).flatten(2).sum(0, dtype=torch.float32)
    return dq, dk, dv, of_weights, of_shift, of_factor


@attention_backward.register_fake
def _(gradient: Tensor, sums: Tensor, q_rows: Tensor, k_rows: Tensor, *given: Any) -> tuple[Tensor, ...]:
    extras = (sums.new_empty(0 if x is None else x.shape) for x in given[5:8])
    return *(_like_tokens(x) for x in given[:3]), *extras


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
