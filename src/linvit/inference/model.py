"""`linvit.load`: a trained network that predicts images, without its trainer and data."""

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
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
"""An image being read: the input, its name, and its result."""


class TrainedModel:
    """Trained network with its preprocessing: called with images, it returns a result of its task for each.

    Several threads may call it at once; their batches are processed in turn.

    Attributes:
        network: The network, plain torch, in evaluation mode: maps a batch of `transform`ed images to its output.
        description: The description in its file.
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
        """Preparation of images."""
        if self._preprocessing is None:
            raise UserError(
                "this network's file has no description of its preprocessing: linvit.load(..., preprocessing={...})"
            )
        return self._preprocessing

    @property
    def transform(self) -> EvaluationTransform:
        """Transform from an image to the network's input, for torchvision's v2."""
        return EvaluationTransform(self.preprocessing)

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return next(self.network.parameters()).device

    def to(self, device: str | torch.device) -> "TrainedModel":
        """Moves the network to a device."""
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
            images: A path, a PIL image, an array (H, W) or (H, W, C), a tensor (C, H, W), of 8 bits or floats in
                [0, 1]; or a list, a batch in one array or tensor, or any other iterable of these.
            batch_size: Number of images per batch.
            device: Device to which the network is moved first.
            threads: Number of threads that read and decode images while the network runs; None means the number of
                processors, at most 8.
            on_error: Action for an image that cannot be read: "raise" a `UserError` with its name, or "skip" it
                with a warning; its result is then None.
            **options: Options of the task: `top_k` of classification, `threshold` of detection.

        Returns:
            The result for an image; a list of results for a list; and for an iterator an iterator with at most
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
        """Yields results in order; two batches are read ahead."""
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
        source: The folder of a run, whose best checkpoint is used, or of several, whose newest run is; a checkpoint of
            a run; a safetensors file written by `save` of the returned object; or an output of `linvit push`, a folder
            or `hf-hub:owner/name`.
        weights: "raw", or "ema", the moving average; None selects the weights with which the run predicts.
        device: Where the network runs.
        dtype: bfloat16 or float16 for operations where this is safe (torch's autocast); None means float32.
        compile: Compile the network at its first batch.
        preprocessing: Options of `linvit.inference.preprocessing.Preprocessing` that replace those of the file.
        allow: Paths, "package.module:Class", of unregistered classes that the file may import. Importing one runs its
            code.
        **options: Options of the task that do not change its weights, such as `window`, `stride` and `scales` of
            segmentation.

    Raises:
        UserError: If the file does not exist, does not describe its network, or names an unregistered class.

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
    description = replace(description, preprocessing=given or None, options={**description.options, **options})
    model = TrainedModel(task, description, prepared).to(device)
    model._dtype = dtype
    return model
