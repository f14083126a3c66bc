"""`linvit import-weights`: an official file in, a file of ours out, and what can be done with it."""

import hashlib
import json

import pytest
import torch
import yaml
from safetensors import safe_open

import linvit
from tests.cli.runs import QUICKSTART, tiny
from tests.cli.runs import linvit as command
from tests.weights.files import FAKES


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """family -> (official file, imported file, what was printed), made once."""
    folder, made = tmp_path_factory.mktemp("imported"), {}

    def files(family):
        if family not in made:
            fake = FAKES[family]
            source, out = folder / f"{family}.pth", folder / f"{family}.safetensors"
            fake.save(fake.state(), source)
            spec = json.dumps(fake.spec)
            done = command("import-weights", source, "--backbone", spec, "-o", out, cwd=folder)
            assert done.code == 0, done.err
            made[family] = source, out, done.out
        return made[family]

    return files


def create(family, classes=1000):
    torch.manual_seed(0)
    return linvit.create_backbone(FAKES[family].spec, num_classes=classes)


@pytest.mark.parametrize("family", {fake.layout: family for family, fake in FAKES.items()}.values())
def test_the_written_file_holds_what_the_official_one_does(imported, family):
    """One family of each layout; test_load.py loads the official file of every family, and its state dict again."""
    source, out, printed = imported(family)
    direct, ours = create(family), create(family)
    linvit.load_pretrained(direct, source)
    report = linvit.load_pretrained(ours, out)
    assert report.fraction == 1
    assert not report.missing
    assert not report.unexpected
    for name, own in ours.state_dict().items():
        assert torch.equal(own, direct.state_dict()[name]), name
    assert "100.0% of the backbone" in printed
    assert f"wrote {out}: {len(report.loaded)} tensors" in printed


@pytest.mark.parametrize("family", ["cswin"])
def test_the_written_file_is_validated(imported, tmp_path, family):
    """On small data, with another image size and other classes than the file has; test_load.py has every family."""
    _, out, _ = imported(family)
    backbone = json.dumps(FAKES[family].spec)
    size = 224 if "cswin" in family else 64  # its convolutions are split by stripes, which follow the size
    data = {"data__img_size": size, "data__batch_size": 4, "trainer__limit_val_batches": 1}
    arguments = tiny(model__backbone=backbone, model__attention="null", model__pretrained=out, **data)
    done = command("validate", f"--config={QUICKSTART}", *arguments, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "val/score" in done.out
    assert "100.0% of the backbone" in done.log
    assert "zero: the file has 1000 classes, the model 10" in done.log
    assert "not trained" not in done.err + done.log


def test_the_metadata(imported):
    source, out, _ = imported("flatten_pvt")
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert metadata["linvit"] == linvit.__version__
    assert metadata["backbone"] == "flatten_pvt_tiny"
    assert json.loads(metadata["options"]) == {**FAKES["flatten_pvt"].options, "num_classes": 1000}
    assert metadata["source"] == "flatten_pvt.pth"
    assert metadata["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert (metadata["source_layout"], metadata["source_key"]) == ("pvt", "model")


def deit(**options):
    return "--backbone", json.dumps({**FAKES["deit"].spec, **options})


def importing(cwd, *arguments):
    return command("import-weights", "x.pth", *deit(), *arguments, cwd=cwd)


@pytest.fixture
def folder(tmp_path):
    """A folder with a small official file in it."""
    torch.save({"model": FAKES["deit"].state()}, tmp_path / "x.pth")
    return tmp_path


def keys(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def test_other_sizes_and_classes(folder):
    done = importing(folder, "-o", "out.safetensors", "--img_size=320", "--num_classes=7")
    assert done.code == 0, done.err
    written = keys(folder / "out.safetensors")
    assert written["pos_embed"] == [1, 401, 48]
    assert not [name for name in written if name.startswith("head")], "a head of zeros is no weight of the file"


@pytest.mark.parametrize(("flag", "taken"), [([], 1), (["--ema"], 2)], ids=str)
def test_averaged_weights(folder, flag, taken):
    state = FAKES["deit"].state()
    content = {
        "model": {n: 1 + 0 * t for n, t in state.items()},
        "state_dict_ema": {n: 2 + 0 * t for n, t in state.items()},
    }
    torch.save(content, folder / "x.pth")
    assert importing(folder, "-o", "out.safetensors", *flag).code == 0
    with safe_open(folder / "out.safetensors", "pt") as file:
        assert file.get_tensor("norm.weight").eq(taken).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "out.pth"], "the output is a .safetensors file; got 'out.pth'. Write -o out.safetensors"),
        (
            ["-o", "there.safetensors"],
            "'there.safetensors' exists: name another file, or remove it first",
        ),
        (["-o", "nowhere/out.safetensors"], "cannot write 'out.safetensors': the folder 'nowhere' does not exist"),
        (["-o", "out.safetensors", *deit(dept=3)], "takes no option 'dept'. Did you mean 'depth'?"),
        (["-o", "out.safetensors", *deit(depth=12)], "less than min_fraction = 90%"),
        (["-o", "out.safetensors", "--ema"], "holds no averaged weights"),
        (["-o", "out.safetensors", "--min_fraction", "2"], "min_fraction must be between 0 and 1; got 2.0"),
    ],
    ids=str,
)
def test_mistakes_leave_nothing_behind(folder, arguments, message):
    (folder / "there.safetensors").write_text("precious")
    done = importing(folder, *arguments)
    assert done.code == 2
    assert message in done.err
    assert sorted(path.name for path in folder.iterdir()) == ["there.safetensors", "x.pth"]
    assert (folder / "there.safetensors").read_text() == "precious"


def test_layers_that_share_a_parameter_have_each_its_own_in_the_file(folder):
    spec = FAKES["deit"].spec
    attention = {"name": "linformer", "share": "layerwise"}
    made, other = (linvit.create_backbone(spec, attention=attention) for _ in range(2))
    torch.save(made.state_dict(), folder / "x.pth")
    done = importing(folder, "-o", "out.safetensors", *deit(attention=attention))
    assert done.code == 0, done.err
    report = linvit.load_pretrained(other, folder / "out.safetensors")
    assert len(report.loaded) == len(made.state_dict())
    assert len([name for name in report.loaded if name.endswith("proj_k")]) > 1
    assert torch.equal(other.blocks[1].attn.mechanism.proj_k, made.blocks[0].attn.mechanism.proj_k)


class TestPretrained:
    """`--model.pretrained` and the checkpoints of runs that began with it."""

    @pytest.fixture(scope="class")
    @classmethod
    def begun(cls, tmp_path_factory):
        """A run of one epoch that began with a file which is gone now."""
        root = tmp_path_factory.mktemp("begun")
        backbone = {"name": "deit_nano", "depth": 1}
        first = linvit.create_backbone(backbone, num_classes=10, attention="focused")
        torch.save({"model": first.state_dict()}, root / "first.pth")
        arguments = tiny(trainer__max_epochs=1, model__pretrained="{source: first.pth, min_fraction: 0.9}")
        done = command("fit", f"--config={QUICKSTART}", *arguments, cwd=root)
        assert done.code == 0, done.err
        (root / "first.pth").unlink()
        return root, done

    def test_the_run_says_what_it_began_with(self, begun):
        root, done = begun
        assert done.log.count("weights from 'first.pth': deit names, from model") == 1
        folder = root / "checkpoints" / "quickstart" / "version_0"
        given = {"source": "first.pth", "min_fraction": 0.9}
        assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]["pretrained"] == given
        kept = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["hyper_parameters"]
        assert kept["pretrained"] == given

    @pytest.mark.parametrize("verb", ["fit", "predict"])
    def test_a_checkpoint_needs_it_no_more(self, begun, verb):
        root, _ = begun
        folder = root / "checkpoints" / "quickstart" / "version_0"
        saved = [f"--config={folder}/config.yaml", f"--ckpt_path={folder}/checkpoints/last.ckpt"]
        done = command(verb, *saved, *(["--trainer.max_epochs=2"] if verb == "fit" else []), cwd=root)
        assert done.code == 0, done.err
        assert " names, " not in done.log
        assert "is ignored" not in done.log
        if verb == "fit":  # and what it began with stays on record
            resumed = yaml.safe_load((folder / "config_from_step_10.yaml").read_text())
            kept = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
            assert kept["global_step"] == 20
            assert resumed["model"]["init_args"]["pretrained"]["source"] == "first.pth"
            assert kept["hyper_parameters"]["pretrained"]["source"] == "first.pth"

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("frist.pth", "'frist.pth' is not a file of weights. In '.' there are: first.pth"),
            ("{source: first.pth, minfraction: 1}", "Did you mean 'min_fraction'?"),
            ("broken.pth", "'broken.pth' is incomplete or not a checkpoint (3 bytes)"),
        ],
    )
    def test_a_mistake_ends_the_run_before_it_starts(self, tmp_path, given, message):
        torch.save({"w": torch.ones(1)}, tmp_path / "first.pth")
        (tmp_path / "broken.pth").write_bytes(b"xyz")
        done = command("fit", f"--config={QUICKSTART}", *tiny(model__pretrained=given), cwd=tmp_path)
        assert done.code == 2
        assert message in done.err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.pth", "first.pth"]

    def test_a_checkpoint_of_a_run_is_a_source(self, run, tmp_path):
        """Another task on the weights of a run: the way that --ckpt_path points to."""
        done = command(
            "validate",
            f"--config={QUICKSTART}",
            *tiny(model__pretrained=run.checkpoint("best"), data__img_size=64, trainer__limit_val_batches=1),
            cwd=tmp_path,
        )
        assert done.code == 0, done.err
        assert "from state_dict" in done.log
        assert "resized" in done.log
