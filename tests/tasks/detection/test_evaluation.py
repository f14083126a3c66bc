"""COCO's figures against those of pycocotools that are stored."""

from copy import deepcopy

import numpy as np
import pytest

from linvit.tasks.detection.evaluation import evaluate
from tests.golden_files import load

GOLDEN = load("dense_coco_eval")
# copies, since COCO's tools write into what they are given
TRUTH, DETECTIONS = deepcopy((GOLDEN.meta["ground_truth"], GOLDEN.meta["detections"]))


@pytest.mark.parametrize(
    ("output", "kind", "area_from"),
    [("bbox", "box", "box"), ("segm", "mask", "mask"), ("segm_box_area", "mask", "box")],
)
def test_the_figures_are_exactly_the_stored_ones(output, kind, area_from):
    """float32 of ours against float32 of the stored figures: no tolerance."""
    found = evaluate(TRUTH, DETECTIONS, kind, area_from)
    assert (found.figures.astype(np.float32) == GOLDEN.tensors[f"output.{output}"].numpy()).all()
    if kind == "box":
        ours = found.class_scores()["AP"].astype(np.float32)
        assert (ours == GOLDEN.tensors["output.bbox_ap_per_class"].numpy()).all()


def test_a_set_without_detections_or_objects_has_figures():
    assert (evaluate(TRUTH, [], "mask").figures <= 0).all()
    empty = evaluate({**TRUTH, "annotations": []}, DETECTIONS, "box")
    assert (empty.figures == -1).all()
    assert np.isnan(empty.class_scores()["AP50"]).all()
