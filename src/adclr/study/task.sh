#!/bin/bash
# A run of a study as a task of a SLURM array: task.sh PYTHON LIST. Line N of LIST is the file of the job of task N - 1.
# Signals end `wait`, not the run, which saves; the same job goes on with it when it is queued again.
job=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$2")
"$1" -u -m adclr.study.worker "$job" >>"${job%.json}.log" 2>&1 &
late=
trap 'late=1; kill -TERM $!' USR1 # the time of the job is nearly up
trap 'kill -TERM $! 2>/dev/null' TERM # SLURM ends the job and, if it was preempted, queues it again by itself
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!
code=$?
if [ -n "$late" ] && [ "$code" -ne 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
