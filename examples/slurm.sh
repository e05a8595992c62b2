#!/bin/bash
# One run of Tandem on several machines of a Slurm cluster: Ray on all of them, the run itself on the first.
#
#     sbatch examples/slurm.sh run.yaml rollout.tensor_parallel=8
#
# Run folder, model and this folder must be on a file system that all machines see. The same command goes on with a run
# that has been interrupted, and so does Slurm when it starts the job again.

#SBATCH --job-name=tandem
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

gpus_per_node=${SLURM_GPUS_ON_NODE:-8}
port=6379
export RAY_USAGE_STATS_ENABLED=0
source .venv/bin/activate
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN # for this job alone: other users' programs may reach the port, too
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')

# Ray's head on this machine, the first of the job; its other processes on the others.
head=$SLURMD_NODENAME
address=$(hostname -I | awk '{print $1}'):$port # the first interface: choose another one if that does not lead out
on_each=(--overlap --cpus-per-task="$SLURM_CPUS_PER_TASK") # srun does not take it over from sbatch
srun "${on_each[@]}" --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="${address%:*}" --port="$port" --num-gpus="$gpus_per_node" \
    --include-dashboard=false --block &
until (: > "/dev/tcp/${address/://}") 2> /dev/null; do
    ((SECONDS < 300)) || { echo "Ray's head does not answer at $address" >&2; exit 1; }
    sleep 1
done
if ((SLURM_NNODES > 1)); then
    srun "${on_each[@]}" --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" \
        ray start --address="$address" --num-gpus="$gpus_per_node" --block &
fi

# Tandem counts the devices when it starts: wait until all have come.
workers=$((SLURM_NNODES * gpus_per_node))
python - "$address" "$workers" << 'END'
import sys, time, ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
end = time.monotonic() + 300
while (found := ray.cluster_resources().get("GPU", 0)) < int(sys.argv[2]):
    if time.monotonic() > end:
        sys.exit(f"{found:.0f} of {sys.argv[2]} GPUs have come: see what `ray start` says on the other machines")
    time.sleep(1)
END

# Slurm's signal, ten minutes before the end, reaches this script only. Tandem finishes the step, saves, and ends.
tandem train "$@" cluster.address="$address" cluster.num_workers="$workers" cluster.device=cuda &
run=$!
trap 'kill -TERM "$run"; wait "$run"; exit $?' TERM
wait "$run"
