#!/bin/sh
# submit.sh TASKS ARGUMENTS...: runs `srun ARGUMENTS` as a job of Slurm's on two nodes of so many tasks, and ends as it ends
tasks=$1
shift
sbatch --nodes=2 --ntasks-per-node="$tasks" --job-name=train --overcommit --time="$MINUTES" --output="$MARKS/slurm.out" \
  --wrap="srun --ntasks-per-node=$tasks --kill-on-bad-exit=1 $*; echo \$? >$MARKS/code" || exit 1
# sbatch's own --wait asks Slurm every half minute only
until [ -z "$(squeue -h -n train)" ]; do sleep 0.3; done
exit "$(cat "$MARKS/code" || echo 1)"
