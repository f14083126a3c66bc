"""Grids: which options differ, what the variants are called, and what is refused."""

import pytest

from linvit import Grid, UserError, create_attention
from linvit.experiments.compare.grid import Sweep, expand_names, split, value_label, without_convolution
from linvit.registry import attentions


def grid(**content):
    return Sweep.read({"config": "quickstart", **content}, "'x.yaml'").grid()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("linear,{name: focused, focusing_factor: 4}", ["linear", "{name: focused, focusing_factor: 4}"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("[{a: [1, 2]}, b],3", ["[{a: [1, 2]}, b]", "3"]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_part_values(text, values):
    assert split(text) == values


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("model.attention", "softmax", "softmax"),
        ("model.attention", {"name": "focused", "focusing_factor": 4}, "focused-focusing_factor4"),
        ("model.attention", ["focused", "focused", "softmax", {"name": "hydra"}], "2focused-softmax-hydra"),
        ("model.lr", 0.001, "lr0.001"),
        ("model.ema_decay", None, "ema_decay-null"),
        ("model.backbone.depths", [2, 2, 6, 2], "depths2-2-6-2"),
        ("model.backbone.qkv_bias", False, "qkv_bias-false"),
    ],
)
def test_a_variant_is_named_by_its_values(key, value, name):
    assert value_label(key, value) == name


def test_all_combinations_are_variants():
    found = grid(vary={"model.attention": ["softmax", "linear"], "model.lr": [1e-3, 2e-3]}, seeds=[0, 5]).variants
    assert list(found) == ["softmax-lr0.001", "softmax-lr0.002", "linear-lr0.001", "linear-lr0.002"]
    assert found["linear-lr0.001"] == {"model.attention": "linear", "model.lr": 0.001}


def test_named_variants_and_varied_options_are_combined():
    found = grid(variants={"plain": {}, "big": {"model.lr": 0.1}}, vary={"data.batch_size": [8, 16]})
    assert list(found.variants) == ["plain-batch_size8", "plain-batch_size16", "big-batch_size8", "big-batch_size16"]
    assert found.keys == ["data.batch_size", "model.lr"]


def test_each_variant_takes_its_best_values_and_is_tuned_with_a_seed_of_its_own():
    tune = {"model.lr": [1, 2, 3], "model.weight_decay": [0]}
    found = grid(vary={"model.attention": ["softmax", "linear"]}, set={"model.lr": 9}, tune=tune, seeds=[0, 1000])
    trials = found.all_trials()
    assert list(trials.variants)[:2] == ["softmax-lr1-weight_decay0", "softmax-lr2-weight_decay0"]
    assert (len(trials.variants), trials.seeds, trials.set) == (6, [1001], {})
    scores = dict(zip(trials.variants, (0.5, 0.9, 0.7, 1.0, 1.0, 1.0), strict=True))
    tuned = found.tuned(scores)
    assert {name: given["model.lr"] for name, given in tuned.variants.items()} == {"softmax": 2, "linear": 2}
    assert tuned.keys == ["model.attention"]
    assert tuned.seeds == [0, 1000]
    assert tuned.tuned(scores) == tuned  # as a file that is read again
    with pytest.raises(UserError, match="no run that tunes the variant 'linear' has a score"):
        found.tuned({name: score for name, score in scores.items() if "softmax" in name})


def test_names_are_those_of_folders_and_differ():
    found = grid(vary={"model.attention": ["package.module:Class/..", "package.module:Class ..", "x" * 100, "x" * 101]})
    assert len(found.variants) == 4
    assert all("/" not in name and ":" not in name and len(name) <= 81 for name in found.variants)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"varied": {}}, "a key of 'x.yaml' must be one of config, set, vary.*got 'varied'. Did you mean 'vary'"),
        ({"vary": ["softmax"]}, r"'x.yaml' is not a grid: .*\"vary\":\s+Expected a <class 'dict'>"),
        ({"variants": {"a": 3}}, r"\"variants\":\s+Expected a .*Mapping'>. Got value: 3"),
        ({"seeds": [0, 0]}, "a list in which each is once"),
        ({"seeds": [-1]}, "at least 0"),
        ({"vary": {"model.attention": ["softmax", "softmax"]}}, "the variant 'softmax' is there twice"),
        ({"vary": {"model.lr": [1, 2]}, "set": {"model.lr": 3}}, "'model.lr' differs between the variants"),
        ({"vary": {"model.lr": [1, 2]}, "baseline": "lr3"}, "baseline must be one of lr1, lr2, teacher; got 'lr3'"),
        (
            {"vary": {"model.lr": [1, 2]}, "tune": {"model.lr": [1]}},
            "'model.lr' is tuned for each variant, so it cannot",
        ),
        ({"variants": {"a": {}}, "published": {"source": "x", "scores": {"b": 1}}}, "must be one of a; got 'b'"),
        ({"variants": {"a": {}}, "published": {"scores": {}}}, "must have a source, and scores by variant"),
    ],
)
def test_what_makes_no_sense_is_refused(content, message):
    with pytest.raises(UserError, match=message):
        grid(**content)


def test_a_star_stands_for_the_registered_names():
    assert list(grid(vary={"model.attention": ["*"]}).variants) == attentions.names()
    assert expand_names("model.attention", ["soft*", {"name": "linear"}]) == [
        *attentions.names("soft*"),
        {"name": "linear"},
    ]
    assert expand_names("data.split", ["a*"]) == ["a*"]
    with pytest.raises(UserError, match=r"no registered name fits model.attention='nothing\*'"):
        expand_names("model.attention", ["nothing*"])


def test_every_attention_but_one_has_an_option_that_leaves_its_convolution_out():
    def convolved(spec):
        return "convolution" in create_attention(spec, dim=32, num_heads=2, grid=Grid((4, 4))).matrix_parts()

    names = [name for name in attentions.names() if attentions.entries()[name][0].owner == "linvit"]
    assert [name for name in names if convolved(without_convolution(name))] == ["linear_angular"]
    unchanged = [name for name in names if without_convolution(name) == name]
    assert not [name for name in unchanged if name != "linear_angular" and convolved(name)]
    assert {"softmax", "linear", "nystrom"} <= {*unchanged}
