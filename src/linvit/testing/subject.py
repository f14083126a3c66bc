"""Subjects of a contract: reproducible instances of an attention or backbone, and inputs for them."""

import abc
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from linvit.attention.base import Grid
from linvit.registry import Registry
from linvit.registry.signatures import parameters_of, takes
from linvit.testing.numbers import disturb

Size = tuple[int, int]


class Given:
    """Inputs of one call, such as images (B, 3, H, W): the distinct tensors by name, in the order of the call."""

    def __init__(self, **named: Tensor) -> None:
        self.named = named

    def __call__(self, model: Callable[..., Any]) -> Any:
        """Calls the model on them."""
        return model(*self.named.values())

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns the same inputs with each tensor changed."""
        return self.replace(**{name: change(x) for name, x in self.named.items()})

    def replace(self, **named: Tensor) -> Self:
        """Returns the same inputs with some tensors replaced or added."""
        copied = copy.copy(self)
        copied.named = self.named | named
        return copied


class Subject(abc.ABC):
    """Attention or backbone under test: instances with changed initial values, and the properties that clauses use."""

    arguments: ClassVar[Mapping[str, str]] = {}  # that the constructor must accept, with their meaning
    supplied: ClassVar[tuple[str, ...]] = ()  # those that `create` needs
    defaults: ClassVar[Mapping[str, Any]] = {}  # required defaults of arguments
    attributes: ClassVar[Mapping[str, str]] = {}  # that an instance must have, with their meaning
    methods: ClassVar[Mapping[str, str]] = {}  # that the class must have, with their meaning
    base = "linvit.Attention"  # has all of these
    picklable = True
    independent_in_training = False  # True if also in training a sample's output is that of the sample alone

    def __init__(self, spec: Any, registry: Registry, quick: bool) -> None:
        self.spec, self.quick, self._registry = spec, quick, registry
        self.constructor: Callable[..., Any]
        self.options: dict[str, Any] = {}
        if callable(spec):
            self.constructor = spec
        else:
            self._name, self.options = registry.parse(spec)
            self.constructor = registry.get(self._name)
        self.parameters = parameters_of(self.constructor)

    def __str__(self) -> str:
        if isinstance(self.spec, str):
            return self.spec
        if isinstance(self.spec, Mapping):
            return ", ".join(str(value) if key == "name" else f"{key}={value}" for key, value in self.spec.items())
        built = self.spec.func if isinstance(self.spec, functools.partial) else self.spec
        return f"{built.__module__}:{built.__qualname__}"

    def takes(self, option: str) -> bool:
        """Returns True if the constructor has a parameter of this name, or `**kwargs` for anything."""
        return takes(self.constructor, option)

    def construct(self, **context: Any) -> Any:
        """Calls the constructor with the arguments that a host supplies and the options of the spec."""
        options = {name: value for name, value in self.options.items() if name not in context}
        if callable(self.spec):
            return self.spec(**context, **options)
        return self._registry.create({"name": self._name, **options}, **context)

    @abc.abstractmethod
    def create(self, size: Any = None, **context: Any) -> Any:
        """Builds an instance for a size with its initial values."""

    def build(self, size: Any = None, dtype: torch.dtype = torch.float64, seed: int = 0, **context: Any) -> Any:
        """Builds an instance in evaluation mode with changed initial values. A seed gives the same parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = self.create(size, **context)
        disturb(built)
        return built.to(dtype).eval()

    @functools.cached_property
    def model(self) -> Any:
        """Returns the instance in float64 that is shared by clauses that do not change it."""
        return self.build()

    @abc.abstractmethod
    def inputs(self, model: Any, size: Any = None, batch: int = 2) -> Given:
        """Returns random inputs in float64."""

    @abc.abstractmethod
    def neighbours(self, model: Any) -> Given:
        """Returns a batch of samples of different scales."""

    @abc.abstractmethod
    def gradients(self) -> Iterator[tuple[dict[str, Tensor | None], Set[str]]]:
        """Yields gradients by name, and the names of those that may be 0; several tries complement each other."""

    def part(self, model: Any) -> Any:
        """Returns the object in an instance that the constructor builds."""
        return model

    def check_kind(self, part: Any) -> None:  # noqa: B027
        """Fails the clause if the constructor builds another type; the default accepts any."""


def sized(size: Grid | Size) -> str:
    """Writes a size as "64x96"; a grid as "14x14 + 2 prefix", or "14x14 reduced to 7x7"."""
    if not isinstance(size, Grid):
        return f"{size[0]}x{size[1]}"
    text = sized(size.size)
    if size.kv_size is not None:
        text += f" reduced to {sized(size.kv_size)}"
    return text + (f" + {size.num_prefix} prefix" if size.num_prefix else "")
