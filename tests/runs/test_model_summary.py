"""Lightning's model summary, which counts parameters and runs nothing: its counts fail at views of parameters."""

from tests.cli.runs import QUICKSTART, linvit, tiny


def test_a_network_with_attention_pooling_has_one(tmp_path):
    backbone = "{name: timm, model: test_vit3}"  # its pooling makes queries of a parameter
    options = ["--trainer.fast_dev_run=true", '--model.freeze=["blocks.0"]']
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(model__backbone=backbone), *options, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "760 K     Trainable params" in done.log
    assert "76.3 K    Non-trainable params" in done.log
