"""What a run says of a total batch that its learning rate is not meant for."""

import pytest

from tests.training import batches, fit, tiny_task, trainer


def said(recwarn):
    """Warnings of the batch or the rates, each once."""
    messages = [str(warning.message) for warning in recwarn]
    return [text for text in messages if "total batch" in text or "learning rate" in text]


OTHER = "the total batch is 8 (batch_size x devices x accumulate_grad_batches), the recipe was published with"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"published_batch_size": 32, "lr": 2e-3},
            [f"{OTHER} 32: results differ", "does not scale with it: its peak is 0.002", "to reach the same total"],
        ),
        (
            {"published_batch_size": 32, "lr": 2e-3, "lr_base_batch_size": 16},
            [f"{OTHER} 32", "scales with it: its peak is 0.001", "--trainer.accumulate_grad_batches"],
        ),
    ],
    ids=str,
)
def test_one_warning_says_what_differs_what_comes_of_it_and_the_way_out(tmp_path, recwarn, options, words):
    fit(tiny_task(**options), tmp_path)
    (text,) = said(recwarn)
    position = -1
    for part in words:
        assert text.find(part) > position
        position = text.find(part)


@pytest.mark.parametrize(
    ("options", "running"),
    [
        ({}, {}),
        ({"published_batch_size": 32}, {"accumulate_grad_batches": 4}),
        ({"published_batch_size": 32}, {"fast_dev_run": True}),
        ({"lr_base_batch_size": 32}, {}),
    ],
    ids=str,
)
def test_a_run_as_it_is_meant_gets_no_warning(tmp_path, recwarn, options, running):
    fit(tiny_task(**options), tmp_path, 32, **running)
    assert not said(recwarn)


def test_a_run_that_goes_on_is_held_against_the_one_before(tmp_path, recwarn):
    runner = fit(tiny_task(), tmp_path)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    assert not said(recwarn)
    again = trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2)
    task = tiny_task(published_batch_size=64)
    again.fit(task, batches(32), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    (text,) = said(recwarn)
    assert "total batch is 16" in text
    assert "the checkpoint was trained with 8" in text
    assert "and the recipe was published with 64:" in text
