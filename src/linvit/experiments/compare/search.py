"""Tuning by Optuna: a study per variant, all in one file of the comparison's folder, whose trials are runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from linvit.errors import UserError
from linvit.experiments.compare.experiment import Experiment
from linvit.experiments.compare.grid import Settings, Sweep, range_of
from linvit.experiments.compare.results import Results

if TYPE_CHECKING:
    import optuna

FILE = "optuna.log"  # the studies of a comparison, in the folder of the runs that tune
DECADE = 10  # a range of positive numbers that spans more is searched on a logarithmic scale
WARM_UP = 4  # no trial is pruned in the first quarter of its epochs


class Search:
    """The studies of a grid. What they know is in their file, so that any process continues them."""

    def __init__(self, folder: Path, sweep: Sweep) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.sweep = folder, sweep

    def ask(self, at_a_time: int) -> Sweep:
        """The runs of the trials that have not ended, or else of so many new ones of each variant; none at the end."""
        found: dict[str, Settings] = {}
        for name in self.sweep.variants:
            study = self._study(name)
            numbers = [trial.number for trial in study.trials if not trial.state.is_finished()]
            for _ in range(0 if numbers else min(at_a_time, self.sweep.trials - len(study.trials))):
                try:
                    numbers.append(study.ask({key: _space(values) for key, values in self.sweep.tune.items()}).number)
                except ValueError as error:
                    raise UserError(f"{self.folder / FILE} is of other values: {error}. Choose a --name") from error
            for number in numbers:
                options = {"study": name, "trial": number, "score": self.sweep.score}
                callback = {"class_path": f"{__name__}.{PruneTrial.__name__}", "init_args": options}
                settings = {**self._settings(name, study.trials[number]), "trainer.callbacks+": callback}
                found[f"{name}-trial{number}"] = settings
        return replace(self.sweep.tuning(), variants=found)

    def tell(self, results: Results) -> None:
        """Ends trials with the scores of their runs; one without a score has failed, if it was not pruned."""
        import optuna

        for variant in results.variants:
            name, _, number = variant.name.rpartition("-trial")
            scores = [score.value for score in variant.scores(results.score).values()]
            state = None if scores else optuna.trial.TrialState.FAIL
            self._study(name).tell(int(number), scores or None, state, skip_if_finished=True)

    def best(self) -> Sweep:
        """The grid with the values of the best trials; that of the folder gets those that have a score."""
        chosen: dict[str, Settings] = {}
        scored: dict[str, Settings] = {}
        for name in self.sweep.variants:
            try:
                study = self._study(name)
                chosen[name] = self._settings(name, study.best_trial)
            except ValueError as error:
                raise UserError(f"no trial of the variant '{name}' has a score, so it has no best value") from error
            complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
            scored |= {f"{name}-trial{trial.number}": self._settings(name, trial) for trial in complete}
        Experiment(self.folder, replace(self.sweep.tuning(), variants=scored)).save()
        return replace(self.sweep, set=self.sweep.tuning().set, variants=chosen)

    def _study(self, name: str) -> "optuna.Study":
        return open_study(self.folder, name, self.sweep.score)[0]

    def _settings(self, variant: str, trial: "optuna.trial.FrozenTrial") -> Settings:
        """Those of a variant with the values of a trial, numbers with three digits."""
        found = dict(self.sweep.variants[variant])
        for key, value in trial.params.items():
            choices = {str(choice): choice for choice in self.sweep.tune[key]}
            found[key] = float(f"{value:.3g}") if isinstance(value, float) else choices.get(value, value)
        return found


class PruneTrial(Callback):
    """Tells a study the score of each epoch, and ends the run if the study's pruner finds it not worth another.

    The study lies in `trainer.default_root_dir`; without one, as in a stage before the last, this does nothing.
    """

    def __init__(self, study: str, trial: int, score: str | None = None) -> None:
        self.study, self.trial, self.score = study, trial, score

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tells and asks on rank 0, and ends the run on all."""
        averaged, folder = pl_module.hparams["predict_with"] == "ema", Path(trainer.default_root_dir)
        value = trainer.callback_metrics.get(self.score or ("val/ema_score" if averaged else "val/score"))
        if value is None or trainer.sanity_checking or not (folder / FILE).exists():
            return
        prune = False
        if trainer.is_global_zero:
            from optuna.trial import Trial, TrialState

            warm_up, epoch = max(trainer.max_epochs or 0, 0) // WARM_UP, trainer.current_epoch
            study, storage = open_study(folder, self.study, self.score, warm_up)
            own = storage.get_study_id_from_name(self.study)
            trial = Trial(study, storage.get_trial_id_from_study_id_trial_number(own, self.trial))
            if epoch not in study.trials[self.trial].intermediate_values:  # as of a run that was resumed
                trial.report(float(value), epoch)
            if prune := trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
        if trainer.strategy.reduce_boolean_decision(prune, all=False):
            rank_zero_info(f"trial {self.trial} is pruned after epoch {trainer.current_epoch + 1}, its score is poor")
            trainer.should_stop = True


def open_study(
    folder: Path, name: str, score: str | None, warm_up: int = 0
) -> "tuple[optuna.Study, optuna.storages.JournalStorage]":
    """A study in a folder's file, and its storage. No sampler draws again what an earlier process has drawn."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise UserError("--search=optuna needs the package 'optuna': pip install 'linvit[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / FILE)))
    directions = optuna.study.StudyDirection
    direction = directions.MINIMIZE if (score or "").endswith("loss") else directions.MAXIMIZE
    study = optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), constant_liar=True)
    study.pruner = optuna.pruners.MedianPruner(n_warmup_steps=warm_up)
    return study, storage


def _space(values: Sequence[Any]) -> "optuna.distributions.BaseDistribution":
    from optuna import distributions

    if (ends := range_of(values)) is None:
        return distributions.CategoricalDistribution([*map(str, values)])
    kind: Any = distributions.IntDistribution if isinstance(sum(ends), int) else distributions.FloatDistribution
    found: distributions.BaseDistribution = kind(*ends, log=0 < DECADE * ends[0] < ends[1])
    return found
