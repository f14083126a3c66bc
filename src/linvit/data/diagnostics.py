"""Generated diagnostic tasks: associative recall and Pathfinder."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from linvit.data.base import ImageData
from linvit.data.sources import paths
from linvit.data.sources.images import Target
from linvit.data.sources.scenes import Generated, GeneratedSource
from linvit.data.sources.tokens import PATCH, VALUES, Recall, Size, sample
from linvit.data.transforms import classification
from linvit.data.transforms.segmentation import EvalTransform
from linvit.errors import check_choice
from linvit.ignore_index import IGNORE_INDEX


class GeneratedData(ImageData):
    """Base of data modules that generate images on request, each with an exact answer."""

    sources: ClassVar[Collection[str]] = ()
    """Names of the data that the module makes."""
    answer: ClassVar[str]
    """The entry of a sample that is to be predicted."""

    def targets(self, split: str) -> Mapping[str, Target]:
        """Returns the answers."""
        return {self.answer: Target("scene")}

    @classmethod
    def recognises(cls, source: str) -> bool:
        """True for the names in `sources`."""
        return source in cls.sources

    def facts(self) -> list[str]:
        """Returns the report of `linvit data check`: size of the answers, chance level and ceiling."""
        answers = torch.cat([batch[self.answer] for batch in self.evaluation_dataloader("val")])
        counts = answers.flatten().bincount(minlength=IGNORE_INDEX)[:IGNORE_INDEX]
        tokens, asked = " x ".join(map(str, answers.shape[1:])) or "1", counts.sum() / len(answers)
        return [
            f"{self.source}: {tokens} answers an image, {asked:.1f} of them asked, each one of {self.num_classes}; "
            f"chance {counts.max() / counts.sum():.3f} (always the most frequent of the validation set), ceiling 1"
        ]


class DiagnosticData(GeneratedData):
    """Grids of tokens, each an image patch of 4 x 4 pixels, and queries whose answer is one of 16 values.

    The task is multi-query associative recall (Arora et al. 2023, "Zoology"): the grid has `pairs` of a key and a
    value, and for each pair a query, a token with the key alone, whose answer is the value. A mechanism must hold all
    pairs apart, and a state of rank r holds about r. `linvit.tasks.SegmentationTask` learns it: the mask has a pixel
    per token, and 255 where nothing is asked. With `score: aAcc` the score is the fraction of the answers that are
    right. The chance level, that of always the same answer, is about 1/16 (`linvit data check recall --pairs=8` counts
    it); the ceiling is 1, as every answer follows from the image.

    Args:
        source: recall.
        pairs: Pairs of an image.
        grid: Side, or [rows, columns], of the grids of tokens; null is the smallest square with room for them.
        eval_grid: That of validation and test, if it is another one (resolution).
        train: Training images of an epoch, which are new in each.
        val: Validation images.
        test: Test images.
        samples_seed: Of all images: another number makes others.
        batch_size: Images per step and device.
        num_workers: Loader processes per device; 0 makes images in the training process.
        seed: Of the order of images and which images an epoch has; null is `seed_everything`.
        predict_path: Images of tokens to predict in place of the test set's.

    Example:
        $ linvit compare diagnostics/recall --model.attention=softmax,linear --data.pairs=8,32
    """

    sources = ("recall",)
    answer = "mask"
    list_keys: ClassVar[tuple[str, ...]] = ("size",)
    num_classes = VALUES
    class_names: ClassVar[list[str]] = [*map(str, range(VALUES))]

    def __init__(
        self,
        source: str = "recall",
        pairs: int = 32,
        grid: int | Size | None = None,
        eval_grid: int | Size | None = None,
        train: int = 3200,
        val: int = 1000,
        test: int = 1000,
        samples_seed: int = 0,
        batch_size: int = 32,
        num_workers: int = 0,
        seed: int | None = None,
        predict_path: str | None = None,
    ) -> None:
        check_choice("--data.source", source, self.sources)
        given = Recall(train, val, test, samples_seed, pairs, grid, eval_grid)
        height, width = given.size("train")
        size = (PATCH * height, PATCH * width)
        half = [0.5] * 3
        super().__init__(
            source, batch_size, num_workers, size, mean=half, std=half, seed=seed, predict_path=predict_path
        )
        self.data_source = GeneratedSource(source, self.images, options=given, make=partial(sample, given=given))
        self.train_transform = self.eval_transform = EvalTransform(None)


class PathfinderData(GeneratedData):
    """Images of dashed paths and two dots, with the label 1 if one path joins the dots, else 0.

    It measures whether a network follows a path from dash to dash over the whole image (Linsley et al. 2018,
    "Learning long-range spatial dependencies with horizontal gated recurrent units"). `linvit.tasks.ClassificationTask`
    learns it. The chance level is 0.5, the ceiling 1. Numbers, lengths and thickness of paths are those of the Long
    Range Arena (Tay et al. 2021); how paths bend is linvit's own, so scores are not those of its files. The dots are as
    far from each other with either label.

    Args:
        source: pathfinder.
        img_size: Side of the images, 32 or 64.
        train: Training images of an epoch, which are new in each.
        val: Validation images.
        test: Test images.
        samples_seed: Of all images: another number makes others.
        **data: Arguments of `ImageData`, such as `batch_size`.

    Example:
        $ linvit fit --config diagnostics/pathfinder --model.attention=linear --data.img_size=64
    """

    sources = ("pathfinder",)
    answer = "label"
    num_classes = 2
    class_names: ClassVar[list[str]] = ["apart", "joined"]

    def __init__(
        self,
        source: str = "pathfinder",
        img_size: int = 32,
        train: int = 3200,
        val: int = 1000,
        test: int = 1000,
        samples_seed: int = 0,
        **data: Any,
    ) -> None:
        check_choice("--data.source", source, self.sources)
        check_choice("--data.img_size", str(img_size), map(str, paths.LAYOUTS))
        super().__init__(source, img_size=img_size, **data)
        made = partial(paths.sample, side=img_size)
        given = Generated(train, val, test, samples_seed)
        self.data_source = GeneratedSource(source, self.images, options=given, make=made)
        self.train_transform = self.eval_transform = classification.EvalTransform(self.size, "center", 1.0)
