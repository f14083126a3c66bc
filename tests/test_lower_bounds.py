"""Packages whose old versions are dangerous where linvit uses them, and that pyproject.toml keeps them out."""

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import linvit

PROJECT = tomllib.loads((Path(linvit.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["detection"]]
REQUIRED = {requirement.name.lower(): requirement for requirement in map(Requirement, DECLARED)}

DANGEROUS = {  # package: (the first version without the hole, what the versions before it do)
    "torch": ("2.10", "CVE-2026-24747, CVE-2025-32434: torch.load(weights_only=True) runs code or corrupts memory"),
    "lightning": (
        "2.6.6",
        "CVE-2026-58659: a checkpoint's _instantiator is imported and called; 2.6.2 and 2.6.3 steal credentials when "
        "they are imported",
    ),
    "pillow": (
        "13.0",
        "CVE-2026-96639, CVE-2026-112395 and others: decoders of images, TIFF among them, write and read outside of "
        "their memory",
    ),
    "fsspec": ("2026.6", "reference:// addresses run what stands in their templates, outside of jinja2's sandbox"),
    "datasets": (
        "5.2",
        "CVE-2026-57845: its builder of pickled tables unpickles freely; versions before 4.0 run scripts of the hub, "
        "and some of those between allow no fsspec from 2026.6 on",
    ),
    "pyarrow": ("23.0.1", "CVE-2026-25087, CVE-2023-47248: reading arrow files corrupts memory, or runs code"),
    "pyyaml": ("5.4", "CVE-2020-14343: the full loader runs code; Lightning reads hparams.yaml with it"),
    "filelock": ("3.20.3", "CVE-2025-68146, CVE-2026-22701: somebody else's link is followed where a lock is made"),
    "faster-coco-eval": ("1.8", "run-length encodings that do not fit their size are read and written out of memory"),
    "tqdm": ("4.66.3", "CVE-2024-34062: arguments of its command line are evaluated"),
}


@pytest.mark.parametrize("package", DANGEROUS)
def test_dangerous_versions_are_kept_out(package):
    first, why = DANGEROUS[package]
    (lower,) = [bound.version for bound in REQUIRED[package].specifier if bound.operator == ">="]
    assert Version(lower) >= Version(first), why
    assert Version(version(package)) >= Version(lower), "the environment of the tests is older"


def test_datasets_allows_the_fsspec_that_is_needed():
    allowed = Requirement(next(line for line in requires("datasets") if re.match(r"fsspec\b", line)))
    (lower,) = [bound.version for bound in REQUIRED["fsspec"].specifier if bound.operator == ">="]
    assert allowed.specifier.contains(lower)
