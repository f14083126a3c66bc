"""Images with a bright square each, and a network that finds them: batches as DetectionData makes them."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader

from linvit.io import coco_masks
from linvit.tasks import DetectionTask

SIZE = (40, 56)  # of the originals: twice the images


def sample(index: int, training: bool) -> dict[str, Any]:
    """An image (3, 20, 28) with a square of class 0, red, or 1, green; every fifth has none, every third a crowd."""
    draw = torch.Generator().manual_seed(index)
    count, crowd = int(index % 5 > 0), not training and index % 3 == 0
    x, y, side = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((1, 14), (1, 8), (4, 10)))
    label = index % 2
    image, mask = torch.zeros(3, 20, 28), torch.zeros(20, 28, dtype=torch.uint8)
    mask[y : y + side, x : x + side] = count
    image[label] = mask
    boxes = torch.tensor([[x, y, x + side, y + side]] * count, dtype=torch.float32).view(-1, 4)
    labels = torch.full((count,), label)
    found = {"image": image, "index": index, "id": f"{index}.png", "image_id": 100 + index, "size": torch.tensor(SIZE)}
    if training:
        return found | {"boxes": boxes, "labels": labels, "masks": mask[None][:count]}
    large = mask.repeat_interleave(2, 0).repeat_interleave(2, 1)
    masks = torch.stack([large] * count + [torch.ones_like(large)] * crowd) if count + crowd else large[None][:0]
    boxes = torch.cat([2 * boxes, torch.tensor([[0.0, 0.0, 56.0, 40.0]] * crowd).view(-1, 4)])
    return found | {
        "boxes": boxes,
        "labels": torch.full((len(boxes),), label),
        "iscrowd": torch.tensor([False] * count + [True] * crowd),
        "area": masks.flatten(1).sum(1).float(),
        "rles": coco_masks.encode(masks.numpy()),
    }


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists, but for the indices."""
    batch = {name: [each[name] for each in samples] for name in samples[0]}
    return batch | {"index": torch.tensor(batch["index"])}


def batch(indices: Any, training: bool = False) -> dict[str, Any]:
    """A batch of samples by their numbers."""
    return collate([sample(index, training) for index in indices])


class Squares(LightningDataModule):
    """Batches of three."""

    mean, std, predicted = (0, 0, 0), (1, 1, 1), "photos"

    def _loader(self, count: int, training: bool) -> DataLoader[Any]:
        samples = [sample(index, training) for index in range(count)]
        return DataLoader(samples, batch_size=3, collate_fn=collate)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(9, training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(12, training=False)

    test_dataloader = predict_dataloader = val_dataloader


class Finder(nn.Module):
    """Finds squares by their brightness; boxes are `shift` pixels to the right, which is what it learns to mend."""

    def __init__(self, with_masks: bool = True, shift: float = 1.0) -> None:
        super().__init__()
        self.with_masks = with_masks
        self.shift = nn.Parameter(torch.tensor(shift))
        self.seen: list[Any] = []

    def forward(self, images, targets=None, sizes=None):
        if targets is not None:
            self.seen.append(targets)
            return {"loss_box": (2 * self.shift).square(), "loss_cls": 0 * self.shift}
        return [self._find(*pair) for pair in zip(images, sizes or [each.shape[1:] for each in images], strict=True)]

    def _find(self, image, size):
        scale = size[0] / image.shape[1]
        label = int(image.sum((1, 2)).argmax())
        mask = image[label] > 0
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        count = int(len(rows) > 0)
        corners = [columns[0] + self.shift, rows[0], columns[-1] + 1 + self.shift, rows[-1] + 1] if count else []
        found = {
            "boxes": scale * torch.tensor([corner.item() for corner in corners]).view(-1, 4),
            "labels": torch.full((count,), label),
            "scores": torch.full((count,), 0.5 + 0.01 * float(rows.sum()) / 20),
        }
        if self.with_masks:
            found["masks"] = nn.functional.interpolate(mask[None, None].float(), size)[0, :count] > 0.5
        return found


class FinderTask(DetectionTask):
    """The task with that network."""

    def configure_network(self):
        return Finder(with_masks=self.hparams["head"] != "retinanet")


def finder_task(**options: Any) -> FinderTask:
    """The task for two classes."""
    return FinderTask(
        **{
            "head": "mask_rcnn",
            "num_classes": 2,
            "class_names": ["red", "green|x"],
            "lr": 0.1,
            "warmup_epochs": 0,
            **options,
        }
    )
