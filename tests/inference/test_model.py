"""`linvit.load`: the numbers of `linvit test` and `linvit predict`, from paths, pictures, arrays and tensors."""

import csv
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import linvit
from linvit.data.sources.images import collate
from linvit.errors import UserError
from linvit.inference.preprocessing import Preprocessing
from linvit.runs.options import read_config
from linvit.runs.run import Run
from linvit.tasks.detection.evaluation import DetectionResults, Objects
from linvit.tasks.segmentation.scores import PixelConfusion, mean_scores
from tests.cli.runs import flags
from tests.cli.runs import linvit as command_line

SMALL = flags(
    **{"trainer__limit_train_batches": 2, "trainer__max_epochs": 1, "trainer__accelerator": "cpu"},
    **{"data__batch_size": 4, "data__num_workers": 0, "data__scenes__val": 4, "data__scenes__test": 4},
    **{"trainer__enable_progress_bar": False, "data__img_size": 64, "data__scenes__digits": "[1, 2]"},
    **{"model__backbone__embed_dims": "[16, 16, 16, 16]", "model__backbone__depths": "[1, 1, 1, 1]"},
)


@pytest.fixture(scope="module")
def digits(run, tmp_path_factory):
    """Files of some test images."""
    folder = tmp_path_factory.mktemp("photos")
    for i, (sample, _) in enumerate(zip(raw(run.folder)[1], range(40), strict=False)):
        Image.fromarray(sample["image"].permute(1, 2, 0).numpy()).save(folder / f"{i:02}.png")
    return folder


@pytest.fixture(scope="module")
def model(run):
    return linvit.load(run.folder)


def run_of(folder, verb):
    return Run.from_config(read_config(folder, {"ckpt_path": folder}), verb)


def raw(folder, **options):
    """A run's data, and the samples of its test split as they are before any transform."""
    data = run_of(folder, "test").data
    data.setup("test")
    data.test_set.reader.transform = lambda sample, seed: sample
    return data, [data.test_set[i] for i in range(len(data.test_set))]


def scores_of_test(folder):
    run = run_of(folder, "test")
    run.test()
    return dict(run.trainer.callback_metrics)


def test_it_scores_what_the_test_scores(run, model):
    _, samples = raw(run.folder)
    found = model([sample["image"] for sample in samples], batch_size=16)
    right = sum(result.indices[0] == sample["label"] for result, sample in zip(found, samples, strict=True))
    assert torch.tensor(right / len(samples)) == scores_of_test(run.folder)["test/score"]


def test_it_predicts_what_the_command_line_predicts(run, model, digits, tmp_path):
    """By a run's configuration, and without one: the same rows; every kind of image gives the same numbers."""
    done = run.then("predict", f"--data.predict_path={digits}", "--data.batch_size=16")
    assert done.code == 0, done.err
    table = next(run.folder.glob(f"predictions_{digits.name}*.csv"))
    old = table.read_text(encoding="utf-8")
    table.unlink()  # other tests read the same run
    new = command_line("predict", "--model", run.folder, digits, "--output", tmp_path, "--batch_size=16", cwd=tmp_path)
    assert new.code == 0, new.err
    assert next(tmp_path.glob("predictions_*.csv")).read_text(encoding="utf-8") == old
    paths = sorted(digits.glob("*.png"))
    results = model(paths, batch_size=16)
    with next(tmp_path.glob("predictions_*.csv")).open(encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    assert [(r.name, r.labels[0], f"{r.scores[0]:.6f}") for r in results] == [tuple(row) for row in rows]
    pictures = [Image.open(path) for path in paths]
    arrays = [np.array(picture.convert("RGB")) for picture in pictures]
    tensors = [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]
    for given in (pictures, arrays, tensors, [tensor / 255 for tensor in tensors], iter(paths), np.stack(arrays)):
        assert [result.scores for result in model(given, batch_size=16)] == [result.scores for result in results]
    with torch.inference_mode():
        logits = model.network(torch.stack([model.transform(picture) for picture in pictures[:16]]))
    assert logits.softmax(-1).amax(-1).tolist() == [result.scores[0] for result in results[:16]]


def test_one_image_gives_one_result(model, digits, tmp_path):
    result = model(str(digits / "00.png"), top_k=3)
    assert len(result.labels) == len(result.scores) == 3
    assert result.scores == sorted(result.scores, reverse=True)
    assert set(result.labels) <= set(model.class_names) == set("0123456789")
    assert result.plot().height > result.image.height
    assert json.loads(result.save(tmp_path / "one.json").read_text())["labels"] == result.labels
    with pytest.raises(UserError, match="an option of ClassificationTask's results must be one of top_k; got 'topk'"):
        model(digits / "00.png", topk=1)


def test_a_stream_is_read_no_further_than_three_batches(model, digits):
    taken = []

    def images():
        for _ in range(10_000):
            taken.append(Image.open(digits / "00.png"))
            yield taken[-1]

    found = model(images(), batch_size=4)
    for _ in range(9):
        next(found)
    assert len(taken) <= 9 + 3 + 3 * 4
    found.close()


def test_what_is_no_image_is_named_and_skipped_if_asked(model, digits, tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    Image.new("RGB", (60_000, 1)).save(tmp_path / "thin.png")
    good = digits / "00.png"
    for bad, said in (
        (tmp_path / "text.jpg", r"text.jpg' cannot be predicted: not an image of the formats"),
        (tmp_path / "thin.png", r"thin.png' cannot be predicted: 60000 x 1 pixels: one side is more than 200 times"),
        (tmp_path / "none.png", r"none.png' cannot be predicted: No such file"),
        (torch.full((3, 8, 8), 2.0), r"'image 1' cannot be predicted: its float values are between 2 and 2"),
        (np.zeros((8, 8, 5), np.uint8), r"'image 1' cannot be predicted: it has 5 bands of uint8, and without bands"),
        (np.zeros((8, 8, 3), np.uint16), r"Set value_range=.*linvit.load\(RUN, preprocessing={NAME: VALUE}\)"),
        (5, "but must be a path"),
    ):
        with pytest.raises(UserError, match=said):
            model([good, bad])
        with pytest.warns(UserWarning, match=said):
            first, skipped, last = model([good, bad, good], on_error="skip")
        assert skipped is None
        assert first.scores == last.scores == model([good, good])[0].scores


def test_threads_share_a_model(model, digits):
    paths = sorted(digits.glob("*.png"))[:8]
    alone = [result.scores for result in model(paths)]
    with ThreadPoolExecutor(4) as pool:
        assert all([r.scores for r in found] == alone for found in pool.map(lambda _: model(paths), range(8)))
    with pytest.raises(UserError, match="threads must be a whole number at least 1; got 0"):
        model(paths, threads=0)


def test_a_file_of_weights_predicts_the_same(model, digits, tmp_path):
    model.save(tmp_path / "model.safetensors")
    again = linvit.load(tmp_path / "model.safetensors")
    assert again.description == model.description
    assert again(digits / "00.png").scores == model(digits / "00.png").scores


def test_a_file_of_weights_keeps_the_options_it_was_loaded_with(run, digits, tmp_path):
    names = [f"digit {number}" for number in range(10)]
    changed = linvit.load(run.folder, preprocessing={"crop_pct": 0.5}, class_names=names)
    assert changed.class_names == names
    changed.save(tmp_path / "model.safetensors")
    again, photo = linvit.load(tmp_path / "model.safetensors"), digits / "00.png"
    assert again(photo).scores == changed(photo).scores
    assert again(photo).labels == changed(photo).labels


def test_a_file_of_weights_refuses_the_other_weights(model, tmp_path):
    model.save(tmp_path / "model.safetensors")
    own, other = ("ema", "raw") if model.description.weights == "ema" else ("raw", "ema")
    assert linvit.load(tmp_path / "model.safetensors", weights=own).description == model.description
    with pytest.raises(UserError, match=f"has only the {own} weights"):
        linvit.load(tmp_path / "model.safetensors", weights=other)


def test_without_preprocessing_there_is_the_network_alone(run, model, digits):
    content = torch.load(run.checkpoint("best"), weights_only=True)
    content["linvit"]["preprocessing"] = None
    torch.save(content, digits.parent / "bare.ckpt")
    bare = linvit.load(digits.parent / "bare.ckpt")
    assert bare.network(torch.zeros(1, 3, *model.preprocessing.size)).shape == (1, 10)
    with pytest.raises(UserError, match="has no description of its preprocessing"):
        bare(digits / "00.png")
    said = linvit.load(digits.parent / "bare.ckpt", preprocessing=model.description.preprocessing)
    assert said(digits / "00.png").scores == model(digits / "00.png").scores
    with pytest.raises(UserError, match="an option of preprocessing must be one of mean"):
        linvit.load(run.folder, preprocessing={"sizes": 3})


@pytest.mark.parametrize(
    "options",
    [
        {"resize_limits": [100]},
        {"resize_limits": [1e9, 1e9]},
        {"size": [8, 8], "crop_pct": 1e-9},
        {"mean": [float("nan")] * 3},
        {"std": [0.0] * 3},
    ],
    ids=str,
)
def test_preprocessing_of_any_file_is_refused_or_can_be_done(options):
    with pytest.raises(UserError):
        Preprocessing.of({"mean": [0.5] * 3, "std": [0.5] * 3, **options})


def dense(tmp_path, name):
    done = command_line("fit", f"--config={name}", *SMALL, cwd=tmp_path)
    assert done.code == 0, done.err
    return tmp_path / "checkpoints" / name / "version_0"


def test_masks_are_those_of_the_test(tmp_path):
    """Also of images of several sizes in one batch."""
    folder = dense(tmp_path, "segmentation_quickstart")
    model = linvit.load(folder)
    assert model.description.weights == "ema"
    _, samples = raw(folder)
    found = model([sample["image"] for sample in samples])
    confusion = PixelConfusion(len(model.class_names))
    for result, sample in zip(found, samples, strict=True):
        confusion.update(torch.from_numpy(result.mask)[None].long(), sample["mask"][None].long())
    assert mean_scores(confusion.compute())["mIoU"].float() == scores_of_test(folder)["test/ema_score"]
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    Image.fromarray(samples[0]["image"].permute(1, 2, 0).numpy()).save(photos / "more" / "a.png")
    Image.fromarray(samples[1]["image"].permute(1, 2, 0).numpy()[:50, :60]).save(photos / "b.png")
    done = command_line("predict", f"--model={folder}", photos, "--output=out", cwd=tmp_path)
    assert done.code == 0, done.err
    out = next((tmp_path / "out").iterdir())
    assert np.array_equal(np.array(Image.open(out / "more" / "a.png")), found[0].mask)
    assert np.array(Image.open(out / "b.png")).shape == (50, 60)
    assert {"legend.png", "b_overlay.jpg"} <= {path.name for path in out.iterdir()}
    windows = linvit.load(folder, window=32)(samples[0]["image"]).mask
    assert windows.shape == found[0].mask.shape


def test_detections_are_those_of_the_test(tmp_path):
    folder = dense(tmp_path, "detection_quickstart")
    model = linvit.load(folder)
    data, samples = raw(folder)
    found = model([sample["image"] for sample in samples])
    results = DetectionResults(10, ["box", "mask"], "box")
    for i, (result, sample) in enumerate(zip(found, samples, strict=True)):
        results.update(i, Objects.of_truth(collate([data.eval_transform(sample, 0)], *KEYS), 0), result.objects)
    scores = scores_of_test(folder)
    assert all(torch.tensor(value) == scores[f"test/{name}"] for name, value in results.figures().items())
    run = run_of(folder, "predict")
    run.predict()
    (saved,) = (folder / "predictions_digit_scenes").glob("results.json")
    old = [{**each, "image_id": 0} for each in json.loads(saved.read_text())]
    new = [each for result in found for each in result.objects.annotations(0, [*range(10)])]
    assert [each["bbox"] for each in new] == [each["bbox"] for each in old]
    photos = tmp_path / "photos"
    (photos / ".ipynb_checkpoints").mkdir(parents=True)
    Image.fromarray(samples[0]["image"].permute(1, 2, 0).numpy()).save(photos / "a.png")
    for hidden in ("._1.png", ".ipynb_checkpoints/a.png"):  # left out, as by predict --config
        (photos / hidden).write_bytes((photos / "a.png").read_bytes()[:99])
    done = command_line("predict", f"--model={folder}", photos, "--output=out", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    (saved,) = (tmp_path / "out").glob("*/results.json")
    ids = [each["category_id"] for each in json.loads(saved.read_text())]
    assert ids == [each["category_id"] for each in new[: len(ids)]] == found[0].objects.labels.tolist()
    options = [f"--config={folder / 'config.yaml'}", f"--ckpt_path={folder}", f"--data.predict_path={photos}"]
    assert command_line("predict", *options, cwd=tmp_path).code == 0
    (other,) = folder.glob("predictions_photos*/results.json")
    own, theirs = (json.loads(path.read_text()) for path in (saved, other))
    keys = ("image_id", "category_id")
    assert [[one[key] for key in keys] for one in own] == [[one[key] for key in keys] for one in theirs]
    some = model(samples[0]["image"], threshold=found[0].scores[2])
    assert len(some.boxes) == len(some.masks) == len(some.labels) >= 3
    assert some.masks.shape[1:] == samples[0]["image"].shape[1:]
    assert some.plot().size == (64, 64)


KEYS = (("image", "size", "image_id", "boxes", "labels", "iscrowd", "area", "rles"),)
