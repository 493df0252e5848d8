//! `foretell submit`: writes a plan's job for Slurm, submits it and follows it to its end. A job
//! that is preempted is queued again and resumes from its last checkpoint, which its script takes
//! care of.

use crate::failure::{Failure, code};
use crate::output;
use crate::plan_file::PlanFile;
use crate::slurm::{self, SlurmJob};
use crate::{export, progress_of};
use clap::Args;
use foretell_export::Framework;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Submit a plan to Slurm and follow it
///
/// Writes the job's folder, submits it with `sbatch`, and follows it until it ends. All nodes must
/// share the folder. A job that Slurm preempts and starts again goes on from its last checkpoint.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  foretell submit --plan plan.yaml
  foretell submit --plan plan.yaml -o jobs/first --sbatch=--partition=gpu --sbatch=--time=4:00:00 -- --steps 1000 --save-every 100
  foretell submit --plan plan.yaml --no-wait; foretell status")]
pub struct Arguments {
    /// The plan
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// The job's folder [default: jobs/NAME, after the plan's file]
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// An option of sbatch, such as --sbatch=--partition=gpu; may be repeated
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    sbatch: Vec<String>,
    /// Do not wait for the job's end
    #[arg(long)]
    no_wait: bool,
    /// Options of `foretell execute`, after `--`
    #[arg(last = true, value_name = "EXECUTE OPTIONS")]
    execute: Vec<String>,
}

/// Time between two queries of the job.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Queries in a row that may fail, as while Slurm's controller restarts.
const MOST_FAILED_LOOKS: usize = 10;

/// Lines of the job's log that a failure shows.
const LOG_LINES: usize = 5;

/// The document of `submit`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SubmitAnswer {
    /// The job's number.
    job: u64,
    /// The folder of its files.
    folder: PathBuf,
    /// The run's folder.
    run: PathBuf,
    /// The job's final state; null with `--no-wait`.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<String>,
    /// Its last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<usize>,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let loaded = PlanFile::load(&arguments.plan)?;
    let folder = arguments.output.clone().unwrap_or_else(|| {
        let stem = arguments.plan.file_stem().map_or_else(|| "plan".into(), |stem| stem.to_os_string());
        Path::new("jobs").join(stem)
    });
    if export::has_other_plan(&loaded, Framework::Slurm, &folder)? {
        let hint = "give another folder with `-o`";
        return Err(Failure::input(code::RUN_TAKEN, format!("`{}` has another job already", folder.display())).hint(hint));
    }
    export::write_job(&loaded, Framework::Slurm, &folder)?;
    let mut options: Vec<&str> = vec!["--parsable"];
    options.extend(arguments.sbatch.iter().map(String::as_str));
    options.push("job.sbatch");
    options.extend(arguments.execute.iter().map(String::as_str));
    let printed = slurm::ask("sbatch", &options, &folder)?;
    // `12` or `12;cluster`.
    let id = printed.trim().split(';').next().and_then(|id| id.parse::<u64>().ok());
    let id =
        id.ok_or_else(|| Failure::undone(code::SLURM, format!("sbatch printed `{}`, which is no job's number", printed.trim())))?;
    let run = folder.join(format!("run-{id}"));
    if !json {
        output::line(&format!("job {id} is submitted; its folder is {}", folder.display()))?;
    }
    if arguments.no_wait {
        return if json { output::json(&SubmitAnswer { job: id, folder, run, state: None, steps: None }) } else { Ok(()) };
    }
    let ended = follow(id, &run)?;
    let steps = progress_of::last_step(&run);
    if ended.state != "COMPLETED" {
        return Err(failed(&ended, &folder));
    }
    if json {
        let steps = steps.map(|step| step.step);
        return output::json(&SubmitAnswer { job: id, folder, run, state: Some(ended.state), steps });
    }
    output::line(&format!(
        "job {id} is done; the run is in {0}; `foretell check {0}` compares it with its prediction",
        run.display()
    ))
}

/// Waits for the end of a job. Prints each change of its state, and its last step.
fn follow(id: u64, run: &Path) -> Result<SlurmJob, Failure> {
    let mut shown = String::new();
    let mut failed_looks = 0;
    loop {
        let jobs = match slurm::jobs(Some(id)) {
            Ok(jobs) => jobs,
            Err(failure) => {
                failed_looks += 1;
                if failed_looks >= MOST_FAILED_LOOKS {
                    return Err(failure);
                }
                std::thread::sleep(POLL_INTERVAL);
                continue;
            }
        };
        failed_looks = 0;
        // Slurm forgets a job some minutes after its end.
        let forgotten =
            || Failure::undone(code::SLURM, format!("Slurm no longer knows job {id}")).hint("see its log in the job's folder");
        let job = jobs.into_iter().next().ok_or_else(forgotten)?;
        let step = progress_of::last_step(run).map_or(String::new(), |step| format!(", {step}"));
        // The reason why a job waits stands in parentheses already.
        let place = job.place.trim_matches(['(', ')']);
        let place = if place.is_empty() { String::new() } else { format!(" ({place})") };
        let now = format!("job {id}: {}{place}{step}", job.state.to_lowercase());
        if now != shown {
            output::note(&now);
            shown = now;
        }
        if !job.is_alive() {
            return Ok(job);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The failure of a job, with the end of its log.
fn failed(job: &SlurmJob, folder: &Path) -> Failure {
    let log = folder.join(format!("job-{}.log", job.id));
    let text = progress_of::tail(&log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let end = lines.get(lines.len().saturating_sub(LOG_LINES)..).unwrap_or_default().join("\n  ");
    let state = job.state.to_lowercase().replace('_', " ");
    Failure::undone(code::SLURM, format!("job {} ended: {state}", job.id)).hint(format!("its log is {}\n  {end}", log.display()))
}
