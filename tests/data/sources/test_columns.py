"""Which columns hold images and labels, and labels as class indices."""

import datasets
import pytest
from datasets import Dataset, Value

import linvit
from linvit.data.sources.labels import as_images, as_indices, find_column


class TestColumns:
    """Finding the image and the label column."""

    @pytest.mark.parametrize(
        ("kinds", "expected"),
        [
            ({"a": Value("int64"), "image": datasets.Image()}, "image"),
            ({"a": Value("int64"), "scan": datasets.Image()}, "scan"),
            ({"scan": datasets.Image(), "image": datasets.Image()}, "image"),
            ({"first": datasets.Image(), "second": datasets.Image()}, "first"),
            ({"a": Value("int64")}, None),
        ],
        ids=lambda value: str(value) if value is None or isinstance(value, str) else " ".join(value),
    )
    def test_by_its_usual_name_else_by_its_type(self, kinds, expected):
        assert find_column(kinds, None, datasets.Image, ["image", "img"], "x") == expected

    def test_a_misspelt_one_is_a_user_error(self):
        with pytest.raises(linvit.UserError) as error:
            find_column({"image": datasets.Image()}, "imgae", datasets.Image, ["image"], "somewhere")
        assert str(error.value) == (
            "data source 'somewhere' has no column 'imgae'. Did you mean 'image'? It has: image"
        )


class TestIndices:
    """Labels as class indices."""

    def tables(self, kind, **labels):
        kinds = datasets.Features({"image": Value("int64"), "label": Value(kind)})
        rows = {split: {"image": list(range(len(given))), "label": given} for split, given in labels.items()}
        return {split: Dataset.from_dict(row, features=kinds) for split, row in rows.items()}

    @pytest.mark.parametrize("kind", ["string", "large_string"])
    def test_words_are_numbered_over_all_splits(self, kind):
        splits = self.tables(kind, train=["bee", "cat", "bee"], test=["ant", None, "cat"])
        found = as_indices(splits, "label", "here")
        assert {name: rows["label"][:] for name, rows in found.items()} == {"train": [1, 2, 1], "test": [0, None, 2]}
        assert found["test"].features["label"].names == ["ant", "bee", "cat"]
        assert found["test"]["image"][:] == [0, 1, 2]

    @pytest.mark.parametrize(
        ("kind", "labels", "told"),
        [
            ("float32", [0.5], "float32"),
            ("bool", [True], "bool"),
            ("int64", [0, -1], "int64"),
            ("int64", [None, None], "int64"),
            ("string", [None], "string"),
            ("null", [None], "null"),
        ],
    )
    def test_anything_else_is_a_user_error(self, kind, labels, told):
        with pytest.raises(linvit.UserError) as error:
            as_indices(self.tables(kind, train=labels), "label", "here")
        assert str(error.value) == (
            f"column 'label' of data source 'here' ({told}) holds no class labels: expected words, or whole numbers "
            f"from 0, and not nulls alone. Name another one with --data.label_column"
        )

    def test_a_split_without_a_value_takes_part(self):
        splits = self.tables("string", train=["a", "b"]) | self.tables("null", test=[None])
        assert as_indices(splits, "label", "here")["test"]["label"][:] == [None]


def test_splits_without_the_column_keep_what_they_have():
    other = Dataset.from_dict({"text": ["a"]})
    found = as_images({"train": Dataset.from_dict({"image": ["a.jpg"]}), "test": other}, "image", "x")
    assert isinstance(found["train"].features["image"], datasets.Image)
    assert found["test"] is other
