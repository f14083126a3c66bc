"""Pickles read without running them.

A pickle is a program: it may name any function and have it called. `torch.load(weights_only=True)` therefore refuses
files that hold more than tensors, such as the configuration object of a training script. This reader opens them all the
same, since it never runs the program: `pickletools.genops` parses the opcodes, and what is kept of them is containers,
plain values and where the tensors lie. Classes and functions stay names. They are not looked up, imported or called;
what they would have made becomes an `Inert`.
"""

import pickletools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
MARK = object()


@dataclass(frozen=True, eq=False)
class Inert:
    """Stands for an object that a file describes and nobody makes; takes any content and keeps none."""


@dataclass(frozen=True, eq=False)
class Name:
    """A class or function that a file names, and no more than its name."""

    module: str
    attribute: str


@dataclass(frozen=True, eq=False)
class Storage:
    """Where the numbers of tensors lie in a file."""

    key: str
    dtype: torch.dtype
    offset: int
    read: Callable[["Storage"], Tensor]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that is still in its file."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def load(self) -> Tensor:
        """Reads the numbers."""
        flat = self.storage.read(self.storage)
        return flat.as_strided(self.size, self.stride, self.storage.offset + self.offset)


class Machine:
    """Follows the opcodes of a pickle with containers, plain values and names, and calls nothing.

    Args:
        read: Reads the numbers of a storage.
    """

    def __init__(self, read: Callable[[Storage], Tensor]) -> None:
        self.read = read
        self.dtypes: dict[str, torch.dtype] = {}  # of each storage seen

    def run(self, file: IO[bytes]) -> Any:
        """What one pickle describes."""
        stack: list[Any] = []
        memo: dict[int, Any] = {}
        for opcode, argument, _ in pickletools.genops(file):
            self.step(opcode.name, argument, stack, memo)
        return stack[-1]

    def step(self, name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
        """One opcode. The names are those of `pickletools`."""
        match name:
            case "PROTO" | "FRAME" | "STOP" | "READONLY_BUFFER":
                pass
            case "MARK":
                stack.append(MARK)
            case "POP":
                stack.pop()
            case "POP_MARK" | "ADDITEMS":  # a set is inert
                since_mark(stack)
            case "DUP":
                stack.append(stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(since_mark(stack)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(top(stack, int(name[-1]))))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                stack.append(since_mark(stack))
            case "APPEND":
                extend(stack, top(stack, 1))
            case "APPENDS":
                extend(stack, since_mark(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                stack.append(mapping(since_mark(stack)))
            case "SETITEM":
                update(stack, top(stack, 2))
            case "SETITEMS":
                update(stack, since_mark(stack))
            case "GLOBAL":
                stack.append(Name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(Name(*map(str, top(stack, 2))))
            case "REDUCE":
                stack.append(made(*top(stack, 2)))
            case "BUILD":
                stack.pop()  # the state of an object that nobody made
            case "BINPERSID":
                stack.append(self.storage(stack.pop()))
            case "NEWOBJ" | "NEWOBJ_EX":
                top(stack, 2 if name == "NEWOBJ" else 3)
                stack.append(Inert())
            case "OBJ" | "INST" | "FROZENSET":
                since_mark(stack)
                stack.append(Inert())
            case "EXT1" | "EXT2" | "EXT4" | "PERSID" | "EMPTY_SET" | "NEXT_BUFFER":
                stack.append(Inert())
            case _:  # INT, BINUNICODE and the other plain values, which genops has read
                stack.append(argument)

    def storage(self, saved: Any) -> Storage | Inert:
        """The storage that a persistent id `("storage", class, key, device, count[, view])` stands for."""
        match saved:
            case ("storage", Name(attribute=kind), str(key), _, int(), *view) if kind in DTYPES:
                self.dtypes[key] = DTYPES[kind]
                match view:
                    case [(_, int(offset), _)]:
                        return Storage(key, DTYPES[kind], offset, self.read)
                return Storage(key, DTYPES[kind], 0, self.read)
        return Inert()


def top(stack: list[Any], count: int) -> list[Any]:
    """Takes the last entries off the stack."""
    if len(stack) < count:
        raise ValueError("the pickle takes more than it has")
    taken = stack[-count:]
    del stack[-count:]
    return taken


def since_mark(stack: list[Any]) -> list[Any]:
    """Takes everything above the last mark off the stack, and the mark."""
    taken = []
    while (entry := stack.pop()) is not MARK:
        taken.append(entry)
    return taken[::-1]


def extend(stack: list[Any], items: list[Any]) -> None:
    """Appends to the list on the stack; what is no list keeps nothing."""
    if type(stack[-1]) is list:
        stack[-1].extend(items)


def update(stack: list[Any], items: list[Any]) -> None:
    """Adds keys and values to the dict on the stack; what is no dict keeps nothing."""
    if type(stack[-1]) is dict:
        stack[-1].update(mapping(items))


def mapping(items: Iterable[Any]) -> dict[Any, Any]:
    """[key, value, key, value, ...] as a dict, without keys that are no plain values."""
    items = list(items)
    pairs = zip(items[::2], items[1::2], strict=True)
    return {key: value for key, value in pairs if isinstance(key, str | int | float | bytes | None)}


def made(function: Any, arguments: Any) -> Any:
    """What a call in a file comes to: a tensor, a parameter, an ordered dict, or nothing."""
    match function, arguments:
        case (
            Name("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2"),
            (Storage() as storage, int(offset), tuple(size), tuple(stride), *_),
        ) if all(isinstance(number, int) for number in size + stride):
            return StoredTensor(storage, offset, size, stride)
        case Name("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state"), (StoredTensor() as data, *_):
            return data
        case Name("collections", "OrderedDict"), ():
            return {}
        case Name("collections", "OrderedDict"), (list(pairs),) if all(
            isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
        ):
            return mapping(part for pair in pairs for part in pair)
    return Inert()
