"""Exact option names, and jsonargparse's messages made readable."""

import pytest
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger

from linvit.callbacks import AttentionRank
from linvit.cli.options import read_options
from linvit.data import ClassificationData  # noqa: F401  # its options are known once it is imported
from linvit.runs.options import read_config
from linvit.runs.parser import Parser, readable
from linvit.runs.run import Run
from tests.cli.runs import QUICKSTART, linvit


@pytest.mark.parametrize(
    "flag",
    [
        "--trainer.max_epoch=3",
        "--model.attent=linear",
        "--seed=3",
    ],
)
def test_abbreviations_are_mistakes(tmp_path, flag):
    done = linvit("fit", f"--config={QUICKSTART}", flag, "--print_config", cwd=tmp_path)
    assert done.code == 2
    assert flag.partition("=")[0].rpartition(".")[2].removeprefix("--") in done.err


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--model.attention={name: linear, feature_map: relu}", "feature_map: relu"),
        ("--model.attention=[linear, softmax, linear, {name: focused}]", "- name: focused"),
        ("--data.augmentation.rotate=25", "rotate: 25.0"),
        ("--trainer.callbacks+=linvit.callbacks.Throughput", "linvit.callbacks.Throughput"),
    ],
)
def test_values_reach_the_configuration(tmp_path, flag, line):
    done = linvit("fit", f"--config={QUICKSTART}", flag, "--print_config", cwd=tmp_path)
    assert done.code == 0, done.err
    assert line in done.out
    assert "linvit.callbacks.AttentionRank" in done.out, "the callback of the file is gone"


def test_null_takes_back_what_stands_two_levels_below_a_section(tmp_path):
    given = ["auto_augment=rand-m9", "crop_scale=[0.5, 1.0]", "auto_augment=null", "crop_scale=null"]
    flags = [f"--data.augmentation.{flag}" for flag in given]
    done = linvit("fit", f"--config={QUICKSTART}", *flags, "--print_config", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "      auto_augment: null\n" in done.out
    assert "      crop_scale: null\n" in done.out


MESSAGE = """Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'linvit.tasks.base.Task'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'linvit.tasks.ClassificationTask':
        Option 'label_smothing' is not accepted
    - Expected a <class 'NoneType'>
  Given value type: <class 'dict'>
  Given value: {'class_path': 'linvit.tasks.ClassificationTask'}"""


def test_what_explains_the_types_is_left_out():
    assert readable(MESSAGE).splitlines() == [
        'Parser key "model":',
        "  Problem with given class_path 'linvit.tasks.ClassificationTask':",
        "        Option 'label_smothing' is not accepted. Did you mean --model.label_smoothing?",
    ]


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("unrecognized arguments: --trainer.epochs=3", "--trainer.max_epochs"),
        ("unrecognized arguments: --lr 0.1", "--model.lr"),
        ("unrecognized arguments: --seed 3", "--seed_everything"),
        ("unrecognized arguments: --batch-size=3", "--data.batch_size"),
        ("unrecognized arguments: --num_classes=3", "--data.num_classes"),  # that of the model follows from the data
        ("unrecognized arguments: --checkpoint.mod=min", "--checkpoint.mode"),
        ("unrecognized arguments: --modell=linvit.tasks.Task", "--model"),
        (
            "Problem with given class_path 'linvit.data.ClassificationData': Option 'sorce' is not accepted",
            "--data.source",
        ),
        (
            "Problem with given class_path 'linvit.data.ClassificationData': Option 'augment_on' is not accepted",
            "--data.augmentation.augment_on",
        ),
        (
            "Problem with given class_path 'linvit.tasks.ClassificationTask': Option 'hflipp' is not accepted",
            "--data.augmentation.hflip",
        ),
        (
            "Problem with given class_path 'linvit.callbacks.AttentionRank': Option 'every_n_step' is not accepted",
            "'every_n_steps'",  # a key in the list of callbacks
        ),
        (
            "Problem with given class_path 'linvit.data.DetectionData': Group 'augmentation' does not accept option "
            "'crop_scale'",
            "--data.augmentation.crop_size",  # the crop_scale of another class is no help
        ),
        ("Subcommand 'fit' does not accept option 'modell.init_args.backbone'", "--model.backbone"),
        ("Subcommand 'fit' does not accept option 'modell.class_path'", "--model"),
        ("unrecognized arguments: --trainer.zzz=3", None),
    ],
)
def test_the_suggestion_is_what_to_type(message, hint):
    assert readable(message) == (f"{message}. Did you mean {hint}?" if hint else f"{message}.")


class NeedsAPackage(CSVLogger):
    """A logger whose package is not installed."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("run `pip install tracker`")


def test_a_package_that_is_not_installed_is_named(tmp_path):
    logger = "--trainer.logger=tests.runs.test_parser.NeedsAPackage"
    done = linvit("fit", f"--config={QUICKSTART}", logger, "--trainer.fast_dev_run=true", cwd=tmp_path)
    assert (done.code, done.err.count("Traceback")) == (2, 0)
    assert "pip install tracker" in done.err


def test_every_deprecated_call_of_jsonargparse_is_an_error_in_the_suite(pytestconfig):
    from jsonargparse._deprecated import JsonargparseDeprecationWarning  # version 5 has none

    for _ in range(2):  # by default only the first warns
        with pytest.warns(JsonargparseDeprecationWarning, match="will be removed in v5"):
            Parser().instantiate_classes(Namespace())
    assert (
        f"error::{JsonargparseDeprecationWarning.__module__}.{JsonargparseDeprecationWarning.__name__}"
        in pytestconfig.getini("filterwarnings")
    )


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], 1),
        (["--attention_rank=false"], 0),
        (["--trainer.logger=false"], 0),
        (["--trainer.callbacks=linvit.callbacks.AttentionRank", "--trainer.callbacks.every_n_steps=7"], 1),
    ],
    ids=str,
)
def test_every_run_logs_the_rank_unless_it_is_told_not_to(tmp_path, monkeypatch, options, found):
    monkeypatch.chdir(tmp_path)
    first = [] if "callbacks" in str(options) else ["--trainer.callbacks=[]"]
    run = Run(read_options("fit", [f"--config={QUICKSTART}", *first, *options]))
    own = [callback for callback in run.trainer.callbacks if isinstance(callback, AttentionRank)]
    assert len(own) == found
    assert all(callback.every_n_steps == (7 if "every_n_steps" in str(options) else None) for callback in own)


def test_a_configuration_is_not_printed_because_of_an_earlier_mistake(tmp_path, capsys):
    """All calls of a process share a parser, which keeps the request."""
    done = linvit("fit", f"--config={QUICKSTART}", "--trainer.bogus=1", "--print_config", cwd=tmp_path)
    assert done.code == 2
    assert Run.from_config(read_config(QUICKSTART)).folder is None
    assert capsys.readouterr().out == ""
