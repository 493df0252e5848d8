//! A batch script for Slurm that runs the plan with Foretell itself. Every plan is expressed
//! unchanged; the caller writes the plan next to the script.

use super::{FrameworkError, Job, JobFiles};

const VERSION: &str = "Slurm 20.11 and later";

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let [nodes, per_node] = job.nodes()?;
    let ranks = job.ranks()?;
    let name: String = job
        .name
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '-' })
        .collect();
    let script = format!(
        r#"#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ranks}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=job-%j.log
# {VERSION}. On GPUs add: #SBATCH --gpus-per-node={per_node}
set -e
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Each rank reads its number from Slurm's environment. All nodes must share the folder.
export MASTER_ADDR FORETELL_PORT=$((20000 + SLURM_JOB_ID % 20000)) FORETELL_RENDEZVOUS_DIR=$PWD
run=run-$SLURM_JOB_ID
# A job that was preempted, and is started again, goes on from its last checkpoint.
if [ -n "$(ls "$run/checkpoints" 2>/dev/null)" ]; then
  start=(--resume "$run")
elif [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then
  start=(--plan plan.yaml --run "$run" --overwrite)
else
  start=(--plan plan.yaml --run "$run")
fi
srun "${{FORETELL:-foretell}}" execute "${{start[@]}}" "$@"
"#
    );
    Ok(JobFiles {
        version: VERSION,
        files: vec![("job.sbatch".into(), script)],
        command: "sbatch job.sbatch".into(),
        plan: job.plan.clone(),
        differences: Vec::new(),
    })
}
