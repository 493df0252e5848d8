//! A batch script for Slurm that runs the plan with Foretell itself. Every plan is expressed as it
//! is; the caller puts the plan beside the script.

use super::{FrameworkError, Job, JobFiles};

const VERSION: &str = "Slurm 20.11 and later";

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let [nodes, per_node] = job.nodes()?;
    let ranks = job.ranks()?;
    let name: String =
        job.name.chars().map(|one| if one.is_ascii_alphanumeric() || "-_.".contains(one) { one } else { '-' }).collect();
    let script = format!(
        "#!/bin/bash\n#SBATCH --job-name={name}\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks={ranks}\n#SBATCH --ntasks-per-node={per_node}\n\
         #SBATCH --exclusive\n#SBATCH --output=%x-%j.log\n# {VERSION}. On GPUs add: #SBATCH --gpus-per-node={per_node}\nset -e\n\
         MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\n\
         # Each rank reads its number from Slurm's environment. All nodes must share the folder.\n\
         export MASTER_ADDR FORETELL_PORT=$((20000 + SLURM_JOB_ID % 20000)) FORETELL_RENDEZVOUS_DIR=$PWD\n\
         srun foretell execute --plan plan.yaml --run \"run-$SLURM_JOB_ID\" \"$@\"\n"
    );
    Ok(JobFiles {
        version: VERSION,
        files: vec![("job.sbatch".into(), script)],
        command: "sbatch job.sbatch".into(),
        plan: job.plan.clone(),
        differences: Vec::new(),
    })
}
