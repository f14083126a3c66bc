"""The distance of a student to its teacher: attention by attention, block by block, last features and logits.

Sources: attention transfer of LoLCATs (Zhang et al. 2025, equation 7); "Copy the same, distill the difference" (2026),
one stage with the weight 50; ViT-AdaLA (2026), attention alone and then the last features.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from linvit.backbones.timm.hosts import ReplacedAttention
from linvit.backbones.transformers.hosts import output_projection
from linvit.errors import UserError, check_choice, check_number
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.stripes import StripeAttention

HOSTS = (AttentionLayer, StripeAttention, ReplacedAttention)
PLAIN = (str, int, float, bool, tuple, type, FunctionType, BuiltinFunctionType, type(None))


@dataclass(frozen=True)
class Matching:
    """Outputs of a student that are matched to its teacher, and their weights.

    Args:
        attention_weight: Weight of the mean over blocks of the mean squared error of attention outputs.
        block_weight: The same of the outputs of whole blocks.
        feature_weight: Weight of the mean squared error of the last features, after the final norm if there is one.
        logit_weight: Weight of the Kullback-Leibler divergence of the logits, times the squared temperature (Hinton et
            al. 2015). Logits are (B, K) or (B, K, H, W).
        temperature: Divides the logits of both.
        attention_at: Attention outputs before ("mixed": heads concatenated, after gate and norm) or after
            ("projected") the output projection. Where a mechanism widens its output, or a layer of timm projects by
            more than a linear layer, always after.
        attention_tokens: "all", or "patches" without class and register tokens.
        attention_inputs: Input of a block's attention: the "student"'s own tokens, or the "teacher"'s. With the
            teacher's, errors do not add up, each block learns alone, and only its attention gets gradients. Modules
            whose output is replaced by the teacher's get no gradient: in DistributedDataParallel your module must
            return the loss from its `forward` and be wrapped with find_unused_parameters=True, as tasks of linvit are.
    """

    attention_weight: float = 50.0
    block_weight: float = 0.0
    feature_weight: float = 0.0
    logit_weight: float = 0.0
    temperature: float = 1.0
    attention_at: Literal["mixed", "projected"] = "mixed"
    attention_tokens: Literal["all", "patches"] = "all"
    attention_inputs: Literal["student", "teacher"] = "student"

    def __post_init__(self) -> None:
        for name in ("attention_weight", "block_weight", "feature_weight", "logit_weight"):
            check_number(name, getattr(self, name), at_least=0)
        check_number("temperature", self.temperature, above=0)
        check_choice("attention_at", self.attention_at, ["mixed", "projected"])
        check_choice("attention_tokens", self.attention_tokens, ["all", "patches"])
        check_choice("attention_inputs", self.attention_inputs, ["student", "teacher"])

    @property
    def weights(self) -> dict[str, float]:
        """The weights by the part that they are of."""
        own = self.attention_weight, self.block_weight, self.feature_weight, self.logit_weight
        return dict(zip(("attention", "blocks", "features", "logits"), own, strict=True))


class Distillation:
    """Measures the distance of a student to its teacher in every forward pass of the student in training mode.

    Hooks of the student run the teacher on the same images, without gradients and in evaluation mode, and compare
    their outputs. `loss()` then returns the weighted sum. The teacher is not part of the student: it is in none of
    its state dicts and gets no gradients. A copy of the student, or one from a pickle, is a plain network.

    A student with BatchNorm normalises by its batch and its teacher by fixed statistics, so their distance has a floor.

    Args:
        teacher: The trained network. It is put into evaluation mode, and follows the student's device and precision.
        student: The same network with another attention, as `linvit.linearize` makes it; it may be wrapped in
            DistributedDataParallel, now or later.
        matching: Outputs to match; None means only attention outputs, with the weight 50.

    Attributes:
        layers: Names of the matched attention layers: those whose mechanism or its options differ;
            all, if none differs.

    Example:
        >>> student = linvit.linearize(teacher, "focused").train()
        >>> distillation = linvit.Distillation(teacher, student)
        >>> for images, labels in loader:
        ...     loss = F.cross_entropy(student(images), labels) + distillation.loss()
    """

    def __init__(self, teacher: nn.Module, student: nn.Module, matching: Matching | None = None) -> None:
        student = student.module if isinstance(student, DistributedDataParallel) else student
        self.teacher, self.student = teacher.eval(), student
        self.matching = matching or Matching()
        self.layers = matched_layers(teacher, student)
        weights = self.matching.weights
        attention_alone = not any(weight for part, weight in weights.items() if part != "attention")
        self._layers_suffice = self.matching.attention_inputs == "teacher" and attention_alone
        self._size: Any = None  # of the images (C, H, W) that the student had last
        self._measuring = False  # also in evaluation mode
        self._of_teacher: dict[tuple[str, str], Tensor] = {}  # by part and module
        self._of_student: dict[tuple[str, str], Tensor] = {}
        self._inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # of the teacher's attention layers
        self._hooks: list[Any] = []
        for name in self.layers:
            if self.matching.attention_inputs == "teacher":
                self._force(name)
            self._watch("attention", name)
            if self.matching.block_weight:
                self._watch("blocks", name.rpartition(".")[0])
        for name in last_features(teacher) if self.matching.feature_weight else ():
            self._watch("features", name)
        if self.matching.logit_weight:
            self._watch("logits", "")
        self._hooks.append(student.register_forward_pre_hook(_Hook(self._start), with_kwargs=True, prepend=True))

    def run(self, images: Any) -> Any:
        """Runs the student and its teacher on images and returns their outputs, without the head of a dense task.

        If only attention is matched on the teacher's inputs, only the student's attention layers run, and it returns
        None: the student's other parts have no effect. They run once for each size of images, to record the grid of
        the layers' tokens.
        """
        alone = self._layers_suffice and (self._measuring or self.student.training)
        if alone and isinstance(images, Tensor) and images.shape[1:] == self._size:
            self._start(self.student, (images,), {})
            for name in self.layers:
                self.student.get_submodule(name)(*self._inputs[name][0], **self._inputs[name][1])
            return None
        if hasattr(self.student, "feature_maps"):
            self._start(self.student, (images,), {})
            return self.student.feature_maps(images)  # type: ignore[operator]
        return self.student(images)

    def errors(self) -> dict[str, dict[str, Tensor]]:
        """Returns unweighted errors of the last training forward pass, by part ("attention", ...) and module."""
        if not self._of_student:
            raise UserError(
                "the student has not been called in training mode since the last loss: call student.train()"
            )
        errors: dict[str, dict[str, Tensor]] = {}
        for (part, name), own in self._of_student.items():
            errors.setdefault(part, {})[name] = self._error(part, name, own, self._of_teacher.pop((part, name)))
        self._of_student.clear()
        return errors

    def parts(self) -> dict[str, Tensor]:
        """Returns unweighted losses of the last training forward pass, scalars by part: means over its modules."""
        return {part: torch.stack([*own.values()]).mean() for part, own in self.errors().items()}

    def loss(self) -> Tensor:
        """Returns the weighted sum of the parts, a scalar."""
        return self.weighted(self.parts())

    def weighted(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum of losses, each times its weight; those of weight 0 give no gradients."""
        weights = self.matching.weights
        return torch.stack([weights[part] * loss for part, loss in parts.items() if weights[part]]).sum()

    @torch.no_grad()
    def distances(self, images: Any) -> dict[str, dict[str, float]]:
        """Returns the distance of the student to its teacher on images, both in evaluation mode, by part and module.

        Squared errors are divided by the mean square of the teacher's output: 0 is equal, 1 is as far as zeros are.
        """
        with self._measured():
            self.run(images)
            scales = {
                (part, name): self._error(part, name, torch.zeros_like(target), target).item()
                for (part, name), target in self._of_teacher.items()
                if part != "output"  # what `_force` gives, of a layer of transformers in a tuple
            }
            return {
                part: {
                    name: (error / (scales[part, name] or 1.0) if part != "logits" else error).item()
                    for name, error in own.items()
                }
                for part, own in self.errors().items()
            }

    def unreached(self, images: Any, *, by_outputs: bool) -> list[str]:
        """Returns the names of parameters on which no matched output depends, nor, `by_outputs`, that of `run`."""
        # Images change nothing in evaluation mode.
        with self._measured(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            self._size = None  # all of the student runs
            output = self.run(images)
            loss = self.loss()
            if by_outputs:
                loss = loss + sum(part.sum() for part in ([output] if isinstance(output, Tensor) else output))
        trained = {name: parameter for name, parameter in self.student.named_parameters() if parameter.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Compares in evaluation mode; then restores the mode of each module of the student."""
        modes = {module: module.training for module in self.student.modules()}
        self.student.eval()
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False
            for module, training in modes.items():
                module.training = training

    def close(self) -> None:
        """Removes all hooks from both networks."""
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets copies and pickles have copies of both networks: those of a module that has all three as parts."""
        return type(self), (self.teacher, self.student, self.matching)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def _start(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if student is not self.student:
            return  # one of DataParallel's
        for kept in (self._of_teacher, self._of_student, self._inputs):
            kept.clear()
        self._size = args[0].shape[1:] if args and isinstance(args[0], Tensor) else None  # images may have a name
        if not (self._measuring or (student.training and any(self.matching.weights.values()))):
            return
        of_student, of_teacher = next(student.parameters()), next(self.teacher.parameters())
        if (of_student.device, of_student.dtype) != (of_teacher.device, of_teacher.dtype):
            self.teacher.to(of_student)
        if self.teacher.training:  # by a module that has it as a part
            self.teacher.eval()
        with torch.no_grad():
            if self.matching.logit_weight or not hasattr(self.teacher, "feature_maps"):
                self.teacher(*args, **kwargs)
            else:  # without the head of a dense task
                self.teacher.feature_maps(args[0])  # type: ignore[operator]

    def _pair(self, name: str) -> list[Any]:
        return [network.get_submodule(name) for network in (self.teacher, self.student)]

    def _watch(self, part: str, name: str) -> None:
        """Compares the outputs of the modules of this name, or for attention inputs or outputs of its projection."""
        key, inputs = (part, name), False
        of_teacher, of_student = self._pair(name)
        if part == "attention":
            # without widths a convolution, or more than a projection: then the layers' outputs are of one shape
            projections = [output_projection(layer) for layer in (of_teacher, of_student)]
            widths = [getattr(projection, "in_features", None) for projection in projections]
            inputs = self.matching.attention_at == "mixed" and None not in widths and widths[0] == widths[1]
            if None not in widths:
                of_teacher, of_student = projections

        def keep(_: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
            self._of_teacher[key] = first_tensor(args if inputs else output)

        def compare(_: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
            if key in self._of_teacher:  # not where a checkpointed block is computed again in backward
                self._of_student[key] = first_tensor(args if inputs else output)

        for module, hook in (of_teacher, keep), (of_student, compare):
            register = module.register_forward_pre_hook if inputs else module.register_forward_hook
            self._hooks.append(register(_Hook(hook)))

    def _error(self, part: str, name: str, own: Tensor, target: Tensor) -> Tensor:
        if own.shape != target.shape:
            raise UserError(
                f"{part} of {name or 'the network'}: the student makes {tuple(own.shape)} and its teacher "
                f"{tuple(target.shape)}; both must have the same width, classes and image size"
            )
        own, target = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (own, target))
        if part == "logits":
            temperature = self.matching.temperature
            log_p, log_q = ((logits / temperature).log_softmax(1) for logits in (target, own))
            divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).mean()
            return divergence * temperature**2
        if part == "attention" and self.matching.attention_tokens == "patches":
            mechanism = getattr(self.student.get_submodule(name), "mechanism", None)  # stripes have no prefix
            prefix = 0 if mechanism is None else mechanism.grid.num_prefix  # a pyramid has one in some stages only
            own, target = own[:, prefix:], target[:, prefix:]
        return F.mse_loss(own, target)

    def _force(self, name: str) -> None:
        """Replaces the inputs and outputs of a student's attention layer by the teacher's."""
        of_teacher, of_student = self._pair(name)

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            self._inputs[name] = args, kwargs
            self._of_teacher["output", name] = output

        def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._inputs.get(name)

        def replace(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            return self._of_teacher.get(("output", name))

        self._hooks += [
            of_teacher.register_forward_hook(_Hook(keep), with_kwargs=True),
            of_student.register_forward_pre_hook(_Hook(give), with_kwargs=True),
            of_student.register_forward_hook(_Hook(replace)),
        ]


class _Hook:
    """A hook that does nothing in a network that was copied or pickled with it."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return None if self.call is None else self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def matched_layers(teacher: nn.Module, student: nn.Module) -> list[str]:
    """Names of the attention layers whose mechanism or its options differ in two networks; of all, if none does."""
    of_student = {name: layer for name, layer in student.named_modules() if isinstance(layer, HOSTS)}
    of_teacher = dict(teacher.named_modules())
    missing = [name for name in of_student if output_projection(of_teacher.get(name)) is None]
    known = dict(student.named_modules())
    inside = tuple(f"{name}." for name in of_student)
    others = {name: layer for name, layer in of_teacher.items() if name not in known and not name.startswith(inside)}
    lost = [name for name, layer in others.items() if output_projection(layer) is not None]
    if missing or lost or not of_student:
        wrong = f"has no attention layer {missing[0]}" if missing else f"is the teacher of a {type(student).__name__}"
        wrong = f"has the layer {lost[0]}, which its student lacks" if lost else wrong
        raise UserError(
            f"{type(teacher).__name__} {wrong}; the student must be a copy of its teacher with another attention, as "
            f"linvit.linearize makes it"
        )
    differing = [name for name, layer in of_student.items() if kind_of(layer) != kind_of(of_teacher[name])]
    return differing or list(of_student)


def last_features(network: nn.Module) -> list[str]:
    """Returns the modules of a network's last features: its final norm, one per branch, or its last stage."""
    prefix, backbone = ("backbone.", network.backbone) if hasattr(network, "backbone") else ("", network)
    norm = getattr(backbone, "norm", None)
    if isinstance(norm, nn.ModuleList):
        return [f"{prefix}norm.{branch}" for branch in range(len(norm))]
    if norm is not None and not isinstance(norm, nn.Identity):
        return [f"{prefix}norm"]
    info: Any = getattr(backbone, "feature_info", None)
    if not info:
        raise UserError(f"{type(backbone).__name__} does not say where its last features are; set feature_weight: 0")
    return [f"{prefix}{info[-1]['module']}"]


def kind_of(layer: Any) -> list[Any]:
    """Returns classes, options and parameter shapes of a layer's mechanisms; in timm models a layer is itself one."""
    found: list[Any] = []
    for name, mechanism in layer.named_modules():
        if name.endswith("mechanism"):
            found += [(name, type(module), _options(module)) for name, module in mechanism.named_modules()]
            found.append({name: tensor.shape for name, tensor in mechanism.state_dict().items()})
    return found or [type(layer)]


def _options(module: nn.Module) -> dict[str, Any]:
    """Returns the recorded constructor arguments of a module, to compare with those of a copy."""
    changeable = ("training", "recompute", "attention_kernel", "grid")
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in changeable and (isinstance(value, PLAIN) or is_dataclass(value))
    }


def first_tensor(values: Any) -> Tensor:
    """Returns the tensor, or the first of several."""
    return values if isinstance(values, Tensor) else values[0]
