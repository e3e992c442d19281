"""Loggers beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow. Each is an extra, imported on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from adclr.config.parsing import UserError, flatten
from adclr.config.settings import Settings
from adclr.system.optional import check_installed

REMEDY = {
    "tensorboard": "leave it out of train.loggers",
    "wandb": "run 'wandb login' or set WANDB_MODE=offline",
    "mlflow": "check MLFLOW_TRACKING_URI",
}


class Logger(Protocol):
    """Takes the metrics of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""

    def close(self) -> None:
        """Write what is left and end."""


def check(names: Sequence[str]) -> None:
    """Raise a UserError that names the extra, if the package of a logger is missing."""
    for name in names:
        check_installed(name, extra=name, purpose="train.loggers")


def open_loggers(settings: Settings, run: Path, step: int) -> list[Logger]:
    """Return the loggers of a run that starts or resumes at `step`."""
    classes: dict[str, Callable[[Settings, Path, int], Logger]] = {
        "tensorboard": TensorBoard,
        "wandb": WandB,
        "mlflow": MLflow,
    }
    opened: list[Logger] = []
    for name in settings.train.loggers:
        try:
            opened.append(classes[name](settings, run, step))
        except Exception as error:  # each package has its own; it is about an account, a server or a disk
            for logger in opened:
                logger.close()
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{name} cannot be logged to ({first}); {REMEDY[name]}") from None
    return opened


class TensorBoard:
    """Writes RUN/tensorboard; show it with: tensorboard --logdir RUN"""

    def __init__(self, settings: Settings, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        del settings
        self.writer: Any = SummaryWriter(run / "tensorboard", purge_step=step + 1 if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and end."""
        self.writer.close()


class WandB:
    """Logs to the project 'adclr' or WANDB_PROJECT; WANDB_MODE=offline keeps everything in RUN/wandb."""

    def __init__(self, settings: Settings, run: Path, step: int) -> None:
        import wandb

        del step
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "adclr"),
            name=run.name,
            id=blake2b(str(run.resolve()).encode(), digest_size=8).hexdigest(),  # a resumed run continues its curves
            resume="allow",
            dir=str(run),
            config=settings.model_dump(mode="json"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left and end."""
        self.run.finish()


class MLflow:
    """Logs to the server that MLFLOW_TRACKING_URI names, or else to RUN/mlflow.db."""

    def __init__(self, settings: Settings, run: Path, step: int) -> None:
        import mlflow

        self.client: Any = mlflow.MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.resolve() / 'mlflow.db'}")
        )
        experiment = self.client.get_experiment_by_name("adclr")
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment("adclr")
        id_file = run / ".mlflow_run"
        if step and id_file.exists():
            self.id = id_file.read_text(encoding="utf-8")
        else:
            self.id = self.client.create_run(experiment_id, run_name=run.name).info.run_id
            id_file.write_text(self.id, encoding="utf-8")
            for name, value in flatten(settings.model_dump(mode="json")).items():
                self.client.log_param(self.id, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        for name, value in values.items():
            self.client.log_metric(self.id, name, value, step=step)

    def close(self) -> None:
        """Write what is left and end."""
        self.client.set_terminated(self.id)
