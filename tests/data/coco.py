"""Writes small folders with COCO's files."""

import json

from tests.data.images import picture, save

CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}, {"id": 44, "name": "bottle"}]
SIZES = {5: (48, 64), 2: (64, 48), 9: (50, 50), 30: (40, 60)}  # of the image of each id: height and width


def annotation(key, image, category=1, bbox=(3, 4, 20, 10), **more):
    """An annotation whose polygon is its box."""
    x, y, w, h = bbox
    polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
    given = {"id": key, "image_id": image, "category_id": category, "bbox": list(bbox), "area": w * h, "iscrowd": 0}
    return {**given, "segmentation": [polygon], **more}


def annotations():
    """Two objects in each image but the last, all classes among them."""
    boxes = [(3, 4, 20, 10), (10.5, 8.25, 30.1, 20)]
    return [
        annotation(10 * image + i, image, CATEGORIES[(image + i) % 3]["id"], box)
        for image in (5, 2, 9)
        for i, box in enumerate(boxes)
    ]


def write_json(path, found=None, sizes=SIZES, categories=CATEGORIES, **more):
    """Writes an annotation file."""
    images = [{"id": key, "file_name": f"{key}.png", "height": h, "width": w} for key, (h, w) in sizes.items()]
    content = {"info": {"year": 2017}, "images": images, "annotations": annotations() if found is None else found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, "categories": categories, **more}), encoding="utf-8")
    return path


def write_coco(folder, splits=("train", "val"), found=None, **content):
    """Writes `annotations/instances_SPLIT2017.json` and the images of `SPLIT2017/`."""
    for split in splits:
        for key, (height, width) in content.get("sizes", SIZES).items():
            save(picture(key, width, height), folder / f"{split}2017" / f"{key}.png")
        write_json(folder / "annotations" / f"instances_{split}2017.json", found, **content)
    return folder
