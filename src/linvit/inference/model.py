"""`linvit.load`: a trained network that is called with images, without its trainer and data."""

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from linvit.data.sources.images import Sample, collate
from linvit.data.sources.read import BadImageError
from linvit.errors import UserError, check_choice, check_number
from linvit.inference.description import ModelDescription, Weights, build_task, read_trained, write_trained
from linvit.inference.preprocessing import EvaluationTransform, ImageLike, Preprocessing
from linvit.io.machine import cpus
from linvit.registry.signatures import parameters_of
from linvit.tasks.base import Task
from linvit.tasks.results import Result

OnError = Literal["raise", "skip"]
Reading = tuple[ImageLike, str, Future[Sample]]
"""An image that is being read: as it was given, its name, and what comes of it."""


class TrainedModel:
    """A trained network with what it takes to predict: called with images, it gives a result of its task for each.

    Several threads may call it at once; their batches take turns.

    Attributes:
        network: The network, plain torch, in evaluation mode: a batch of `transform`ed images in, its output out.
        description: What its file says of it.
        class_names: Names of the classes.
    """

    def __init__(self, task: Task, description: ModelDescription, preprocessing: Preprocessing | None) -> None:
        self.network: nn.Module = task.network
        self.description = description
        self.class_names = description.class_names
        self._task, self._preprocessing = task, preprocessing
        self._dtype: torch.dtype | None = None
        self._lock = Lock()

    @property
    def preprocessing(self) -> Preprocessing:
        """How images are prepared."""
        if self._preprocessing is None:
            raise UserError(
                "this network's file does not say how images are prepared: linvit.load(..., preprocessing={...})"
            )
        return self._preprocessing

    @property
    def transform(self) -> EvaluationTransform:
        """An image to what the network takes: a transform of torchvision's v2."""
        return EvaluationTransform(self.preprocessing)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device

    def to(self, device: str | torch.device) -> "TrainedModel":
        """Moves the network."""
        with self._lock:
            self._task.to(device)
        return self

    def __call__(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        threads: int | None = None,
        on_error: OnError = "raise",
        **options: Any,
    ) -> Any:
        """Predicts.

        Args:
            images: A path, a picture of PIL, an array (H, W) or (H, W, C), a tensor (C, H, W), of 8 bits or floats in
                [0, 1]; or a list, a batch in one array or tensor, or any other iterable of these.
            batch_size: Images that the network gets at once.
            device: Where to move the network first.
            threads: How many read and decode images while the network runs; None takes the processors, at most 8.
            on_error: What to do about an image that cannot be read: "raise" a `UserError` with its name, or "skip" it
                with a warning; its result is then None.
            **options: Of the task: `top_k` of classification, `threshold` of detection.

        Returns:
            The result for an image; a list of them for a list; and for an iterator another one, which has no more than
            three batches in memory.
        """
        check_number("batch_size", batch_size, at_least=1, whole=True)
        threads = max(1, min(8, int(cpus()))) if threads is None else threads
        check_number("threads", threads, at_least=1, whole=True)
        check_choice("on_error", on_error, get_args(OnError))
        allowed = [name for name in parameters_of(self._task.image_results) if name != "predicted"]
        for name in options:
            check_choice(f"an option of {type(self._task).__name__}'s results", name, allowed or ["(none)"])
        if device is not None:
            self.to(device)
        _ = self.preprocessing
        one = isinstance(images, str | Path | Image.Image) or getattr(images, "ndim", 4) < 4
        given: Iterable[Any] = [images] if one else images  # type: ignore[assignment]
        found = self._predict(iter(given), batch_size, threads, on_error, options)
        if one:
            return next(found)
        return list(found) if isinstance(images, list | tuple | np.ndarray | Tensor) else found

    def save(self, path: str | Path) -> None:
        """Writes the network and its description as a safetensors file, which `linvit.load` and safetensors read."""
        write_trained(path, self.network, self.description)

    def _predict(
        self, given: Iterator[ImageLike], batch_size: int, threads: int, on_error: OnError, options: dict[str, Any]
    ) -> Iterator[Result | None]:
        """Results in order; two batches are read ahead."""
        ahead: deque[list[Reading]] = deque()
        pool = ThreadPoolExecutor(threads, "linvit-images")

        def read(number: int, image: ImageLike) -> Reading:
            name = str(image) if isinstance(image, str | Path) else f"image {number}"
            return image, name, pool.submit(self.preprocessing.sample, image, name)

        numbered = enumerate(given)
        try:
            while True:
                while len(ahead) < 3 and (batch := [read(*each) for each in islice(numbered, batch_size)]):
                    ahead.append(batch)
                if not ahead:
                    return
                yield from self._results(ahead.popleft(), on_error, options)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _results(self, batch: list[Reading], on_error: OnError, options: dict[str, Any]) -> list[Result | None]:
        samples, results = [], dict[int, Result]()
        for number, (_, name, future) in enumerate(batch):
            try:
                samples.append({**future.result(), "index": number})
            except BadImageError as error:
                said = f"'{name}' cannot be predicted: {error.reason}"
                if on_error == "raise":
                    raise UserError(said) from error
                warnings.warn(f"{said}; it is skipped", stacklevel=1)
        if samples:
            collated = collate(samples, list_keys=("size",))
            found = self._run(collated, options)
            for number, result in zip(collated["index"].tolist(), found, strict=True):
                image, result.name, _ = batch[number]
                result.source, result.class_names = image, self.class_names
                result.category_ids = self.description.category_ids
                result.read = partial(self.preprocessing.read, image, result.name)
                results[number] = result
        return [results.get(number) for number in range(len(batch))]

    def _run(self, batch: dict[str, Any], options: dict[str, Any]) -> Iterable[Result]:
        with self._lock, torch.inference_mode():
            device, images = self.device, batch["image"]
            pinned = device.type == "cuda"

            def moved(image: Tensor) -> Tensor:
                return (image.pin_memory() if pinned else image).to(device, non_blocking=pinned)

            batch["image"] = [moved(each) for each in images] if isinstance(images, list) else moved(images)
            self.preprocessing.normalise.finish(batch)
            with nullcontext() if self._dtype is None else torch.autocast(device.type, self._dtype):
                predicted = self._task.predict_batch(self.network, batch)
            return self._task.image_results(predicted, **options)


def load(
    source: str | Path,
    *,
    weights: Weights | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    compile: bool = False,
    preprocessing: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    **options: Any,
) -> TrainedModel:
    """Loads a trained network to predict with. Nothing in its file is executed.

    Args:
        source: The folder of a run, whose best checkpoint is taken, or of several, whose newest is; a checkpoint of a
            run; a safetensors file that `save` of the returned object wrote; or what `linvit push` wrote, a folder or
            `hf-hub:owner/name`.
        weights: "raw", or "ema", the moving average; None is what the run predicts with.
        device: Where the network runs.
        dtype: Computes in bfloat16 or float16 where that is safe (torch's autocast); None in float32.
        compile: Whether torch compiles the network at its first batch.
        preprocessing: Options of `linvit.inference.preprocessing.Preprocessing` that take the place of the file's.
        allow: Paths, "package.module:Class", of classes that the file may have imported though no package registers
            them. To import one runs its code.
        **options: Options of the task that do not change its weights, such as `window`, `stride` and `scales` of
            segmentation.

    Raises:
        UserError: If there is no such file, it does not say which network it is of, or names what is not registered.

    Example:
        >>> model = linvit.load("checkpoints/quickstart/version_0")
        >>> model("photo.jpg").labels[0]
        '7'
    """
    check_choice("weights", str(weights), ["raw", "ema", "None"])
    description, state = read_trained(source, weights)
    given = {**(description.preprocessing or {}), **(preprocessing or {})}
    prepared = Preprocessing.of(given) if given else None
    task = build_task(description, state, source, allow, compile=compile, **options)
    model = TrainedModel(task, description, prepared).to(device)
    model._dtype = dtype
    return model
