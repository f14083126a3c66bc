"""Images that cannot be used: skipped, counted and named, or refused."""

import csv

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import linvit
from linvit.data import ClassificationData
from linvit.data.loading.sampler import SeededIndex
from linvit.data.sources.read import ALWAYS_ALLOWED, BadImageError, BadImages
from tests.data.damaged import encoded, photo
from tests.data.images import image_folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


class Rows(Dataset):
    """Rows of which some are bad, as `Images` uses the account."""

    def __init__(self, bad, wrong, length=1000):
        self.bad, self.wrong, self.length = bad, wrong, length
        bad.start(length)

    def __len__(self):
        return self.length

    def __getitem__(self, at):
        return self.bad.sample_or_other(self.sample, at.row, at.seed, self.length)

    def sample(self, row, seed):
        if row in self.wrong:
            raise BadImageError(f"{row}.jpg", "bad, and that's it")
        return row


def seeded(*rows):
    return [SeededIndex(row, 17 * row + 3) for row in rows]


def named(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


class TestSkipping:
    """Another image takes the place."""

    def test_which_one_follows_from_the_seed_alone(self):
        rows = Rows(BadImages("skip", 1.0), {4})
        torch.manual_seed(0)
        first = rows[SeededIndex(4, 11)]
        torch.manual_seed(1)
        assert rows[SeededIndex(4, 11)] == first != 4
        assert len({rows[SeededIndex(4, seed)] for seed in range(6)}) == 6  # another seed, another image

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_choice_and_the_account_are_the_same_for_any_number_of_processes(self, tmp_path, workers):
        bad = BadImages("skip", 0.1)
        bad.report = tmp_path / "run" / "bad_images.csv"
        loader = DataLoader(Rows(bad, {3, 40, 77}), 8, sampler=seeded(*range(100)), num_workers=workers)
        batches = [batch.tolist() for batch in loader]
        alone = Rows(BadImages("skip", 0.1), {3, 40, 77})
        assert batches == [[alone[at] for at in seeded(*range(i, min(i + 8, 100)))] for i in range(0, 100, 8)]
        assert bad.named() == {"3.jpg", "40.jpg", "77.jpg"}
        header, *lines = named(bad.report)
        assert header == ["image", "reason"]
        assert sorted(lines) == [[f"{row}.jpg", "bad, and that's it"] for row in (3, 40, 77)]

    def test_each_is_named_once_whoever_meets_it(self, tmp_path):
        for _ in range(3):  # ranks, epochs, continued runs
            bad = BadImages("skip", 0.5)
            bad.report = tmp_path / "bad_images.csv"
            rows = Rows(bad, {1, 2})
            assert [rows[at] for at in seeded(1, 2, 1)]
        assert [line[0] for line in named(bad.report)] == ["image", "1.jpg", "2.jpg"]


class TestMaxFraction:
    """How many may be skipped."""

    @pytest.mark.parametrize(("fraction", "allowed", "workers"), [(0.008, 8, 3), (0.001, ALWAYS_ALLOWED, 0)])
    def test_a_fraction_of_the_set_and_always_a_few(self, tmp_path, fraction, allowed, workers):
        bad = BadImages("skip", fraction)
        bad.report = tmp_path / "bad.csv"
        rows = Rows(bad, set(range(allowed + 1)))
        epochs = [*range(allowed), *range(500, 520)] * 10
        loader = DataLoader(rows, 4, sampler=seeded(*epochs), num_workers=workers)
        assert sum(map(len, loader)) == len(epochs)
        assert len(bad.named()) == allowed
        with pytest.raises(linvit.UserError) as error:
            list(DataLoader(rows, 4, sampler=seeded(allowed), num_workers=workers))
        text = str(error.value)
        assert f"{allowed + 1} of the 1000 training images cannot be decoded" in text
        said = (
            f"{allowed}.jpg (bad",
            f"At most {allowed} are",
            f"max_bad_fraction={fraction}",
            f"listed in '{bad.report}'",
        )
        for part in (*said, "linvit data check PATH"):
            assert part in text

    def test_none_allows_none(self):
        with pytest.raises(linvit.UserError, match=r"1 of the 1000 .* 4\.jpg"):
            Rows(BadImages("skip", 0.0), {4})[SeededIndex(4, 0)]

    def test_it_ends_even_if_everything_is_allowed(self):
        with pytest.raises(linvit.UserError, match="cannot decode any of 100 images"):
            Rows(BadImages("skip", 1.0), range(10), 10)[SeededIndex(4, 0)]

    def test_raise_raises_at_once(self):
        with pytest.raises(linvit.UserError, match=r"image 4\.jpg cannot be decoded: bad.*Replace or remove it"):
            Rows(BadImages("raise"), {4})[SeededIndex(4, 0)]

    def test_the_error_of_a_loader_process_reaches_the_user(self):
        loader = DataLoader(
            Rows(BadImages("skip", 0.001), range(20)),
            4,
            sampler=seeded(*range(20)),
            num_workers=2,
        )
        with pytest.raises(linvit.UserError, match=r"([6-9]|\d\d) of the 1000 "):
            list(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "ignore"}, "bad_images must be one of raise, skip; got 'ignore'"),
        ({"policy": "skip", "max_fraction": 5}, "max_bad_fraction must be between 0 and 1, such as 0.001; got 5"),
    ],
)
def test_mistakes_are_user_errors(options, message):
    with pytest.raises(linvit.UserError) as error:
        BadImages(**options)
    assert message in str(error.value)


class TestData:
    """Of the data module: skipped in training, never in evaluation."""

    def data(self, root, **options):
        return ClassificationData(str(root), batch_size=8, img_size=16, **{"num_workers": 0, **options})

    def test_evaluation_raises_whatever_the_policy(self, tmp_path):
        folder = image_folder(tmp_path / "data", ["train", "val", "test"])
        files = [folder / split / "ant" / "1.png" for split in ("val", "test")]
        for file in files:
            file.write_bytes(b"")
        data = self.data(folder, bad_images="skip", max_bad_fraction=1.0)
        for stage, file in (("validate", files[0]), ("test", files[1]), ("predict", files[1])):
            data.setup(stage)
            loader = getattr(data, f"{'val' if stage == 'validate' else stage}_dataloader")()
            with pytest.raises(linvit.UserError) as error:
                list(loader)
            assert f"image {file} cannot be decoded: an empty file" in str(error.value)

    def test_rows_without_an_image_and_rows_of_one_path_are_listed_one_by_one(self, tmp_path):
        images = [{"bytes": encoded(photo(row), "PNG"), "path": "image.png"} for row in range(8)]
        images[2]["bytes"], images[5] = b"no image", None
        kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 4}, features=kinds)
        datasets.DatasetDict({"train": rows, "val": rows.select([0, 1])}).save_to_disk(tmp_path / "set")
        data = self.data(tmp_path / "set", max_bad_fraction=0.5)
        data.setup("fit")
        data.bad_images.report = tmp_path / "bad_images.csv"
        assert [len(batch["label"]) for batch in data.train_dataloader()] == [8]
        assert sorted(named(data.bad_images.report)[1:]) == [
            ["row 2 (image.png)", "not an image of the formats JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF"],
            ["row 5 (stored in the table)", "no image: the cell is empty"],
        ]
