#!/bin/bash
# Train on three nodes, or on two of them:  sbatch examples/slurm.sh train.py [its arguments]
# The folder in which this is submitted is on a file system that all nodes share.
#SBATCH --nodes=3 --ntasks-per-node=1   # one agent on each node
#SBATCH --cpus-per-task=2               # of all ranks of a node, with --gpus-per-node=... for theirs
#SBATCH --time=1-00:00:00
#SBATCH --signal=TERM@120               # that long before the time limit, save the state and requeue
#SBATCH --no-kill                       # when a node fails, the others go on
#SBATCH --requeue --open-mode=append

run_agent() {  # on each node. Slurm signals this shell alone
    trap 'kill -TERM $agent' TERM
    while
        elasticgang run "$@" & agent=$!
        while kill -0 $agent 2>/dev/null; do wait $agent; done  # a signal ends `wait`, too
        wait $agent; code=$?
        [ $code = 137 ]  # the agent was killed, and is started again
    do :; done
    # After a failure, is the node of the batch script and the coordinator gone?
    [ $code = 0 ] || squeue --noheader --jobs="$SLURM_JOB_ID" --nodelist="$first" | grep -q . || scontrol requeue "$SLURM_JOB_ID"
    exit $code
}

export ELASTICGANG_SECRET_FILE="$PWD/.secret-$SLURM_JOB_ID"
(umask 077 && head -c 32 /dev/urandom | base64 >"$ELASTICGANG_SECRET_FILE")
first=$SLURMD_NODENAME port=$((20000 + SLURM_JOB_ID % 10000))
trap : TERM  # this shell, and with it the coordinator, outlives the agents
elasticgang coordinator --host 0.0.0.0 --port $port &
export first; export -f run_agent
srun --no-kill --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c 'run_agent "$@"' - \
    --nnodes 2:3 --nproc-per-node 2 --coordinator "$first:$port" --job-id "$SLURM_JOB_ID" \
    --connect-timeout 60 --coordinator-timeout 600 --grace-period 100 \
    --checkpoint-dir "checkpoints/$SLURM_JOB_ID" "$@"
code=$?
rm "$ELASTICGANG_SECRET_FILE"
if [ $code = 143 ] && squeue --noheader --states=RUNNING --jobs="$SLURM_JOB_ID" | grep -q .; then
    scontrol requeue "$SLURM_JOB_ID"  # SIGTERM, and the job was not cancelled: go on at that checkpoint
fi
exit $code
