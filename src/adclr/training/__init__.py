"""Pretraining: launch, job, loop, step, checkpoints, logs, and the plan of a run."""
