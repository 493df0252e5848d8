//! Scores the simulator: predicts every row or refuses it with a reason, and summarises the errors.

use crate::interval::{Coverage, IntervalBasis};
use crate::memory_figure::{allocated, memory_figure};
use crate::prediction::{CompiledRun, StepPrediction};
use crate::published::{Split, Subset};
use crate::refusal::Refusal;
use crate::row::Row;
use crate::run::Run;
use crate::statistics::{Pair, Summary, SummaryTable, median};
use crate::traced;
use foretell_program::Offload;
use foretell_simulator::gpu::Profiles;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// A row with its prediction, or with the reason why it has none.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ScoredRow {
    /// Name of the row.
    pub row_id: String,
    /// Source of the measurement.
    pub table: String,
    /// What the row is used for.
    #[serde(rename = "split")]
    pub subset: Subset,
    /// Measured step time.
    pub measured_step_seconds: Option<f64>,
    /// Predicted step time.
    pub predicted_step_seconds: Option<f64>,
    /// 10th percentile of the predicted step time, in seconds.
    pub p10: Option<f64>,
    /// 90th percentile of the predicted step time, in seconds.
    pub p90: Option<f64>,
    /// Predicted over measured step time, minus one.
    pub error: Option<f64>,
    /// Measured memory of a device.
    pub measured_memory_bytes: Option<f64>,
    /// Predicted memory of a device, as the source counts it.
    pub predicted_memory_bytes: Option<f64>,
    /// Whether it is predicted to fit the device's memory.
    pub fits: Option<bool>,
    /// Whether the job ran (true), or ran out of memory (false).
    pub ran: Option<bool>,
    /// True if the prediction follows from the framework's own operators, as they were traced.
    pub is_traced: bool,
    /// Name of the software stack's profile.
    pub stack: Option<String>,
    /// The runs that the interval was derived from.
    pub basis: Option<IntervalBasis>,
    /// Whether the prediction used only fitted profiles and no assumptions.
    pub calibrated: bool,
    /// The assumptions, one sentence each.
    #[serde(rename = "stand_ins")]
    pub assumptions: Vec<String>,
    /// Which part of the time is implausible, if the error exceeds `FAR_OFF`.
    pub implausible: Option<String>,
    /// Why the row has no prediction.
    pub refused: Option<String>,
    /// Why the measurement is unclear; `assumptions` has the same sentence.
    #[serde(skip)]
    pub doubt: Option<String>,
    /// See [`Pair::group`].
    #[serde(skip)]
    group: String,
    /// See [`Pair::job`].
    #[serde(skip)]
    job: String,
}

/// All scored rows and their statistics.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Scores {
    /// Every row once, in the order of the input.
    pub rows: Vec<ScoredRow>,
    /// Statistics of the held-out rows by source; of all rows if none is held out or each was left
    /// out of a fit.
    pub by_source: BTreeMap<String, Summary>,
    /// Statistics of the held-out rows over all sources.
    pub overall: Overall,
    /// How many measurements are inside their intervals, by the runs that the intervals were
    /// derived from.
    pub coverage: BTreeMap<IntervalBasis, Coverage>,
    /// Number of refused rows by reason.
    pub refused: BTreeMap<String, usize>,
    /// Number of profile values that were fitted on measured runs.
    pub fitted_values: usize,
}

/// Statistics over all sources.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Overall {
    /// Mean over sources of the mean magnitude of the errors.
    pub macro_mean_error: f64,
    /// Mean over sources of the share of measurements inside the 80 % interval.
    pub macro_inside_interval: f64,
    /// Median over sources of the mean magnitude of the errors.
    pub median_source_error: f64,
    /// Statistics with equal weights of the sources.
    pub sources: Summary,
    /// Statistics with equal weights of the rows.
    pub rows: Summary,
}

impl Overall {
    fn of(rows: &[ScoredRow], subset: Option<Subset>) -> Self {
        let by_source = by_source(rows, subset);
        let sources = Summary::macro_average(&by_source);
        Self {
            macro_mean_error: sources.mean_absolute_error,
            macro_inside_interval: sources.inside_interval,
            median_source_error: median(by_source.values().map(|summary| summary.mean_absolute_error).collect()),
            sources,
            rows: over_rows(rows, subset),
        }
    }
}

/// Predicts every row. The result does not depend on the number of threads.
pub fn score(rows: &[Row], split: &Split, profiles: &Profiles) -> Scores {
    let runs: Vec<Result<Run, Refusal>> = rows.par_iter().map(|row| Run::of(row, profiles)).collect();
    // Rows with the same Programs are compiled together. The Programs are dropped after the last of
    // these rows.
    let mut by_program: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, run) in runs.iter().enumerate() {
        if let Ok(run) = run {
            by_program.entry(run.program_key()).or_default().push(index);
        }
    }
    let predict = |indices: Vec<usize>| -> Vec<(usize, Result<StepPrediction, Refusal>)> {
        let runs: Vec<(usize, &Run)> = indices.iter().filter_map(|&index| Some((index, runs[index].as_ref().ok()?))).collect();
        let Some((_, first)) = runs.first() else { return Vec::new() };
        match CompiledRun::new(first) {
            Ok(compiled) => runs.iter().map(|(index, run)| (*index, compiled.predict(run))).collect(),
            Err(refusal) => runs.iter().map(|(index, _)| (*index, Err(refusal.clone()))).collect(),
        }
    };
    let predictions: Vec<_> = by_program.into_values().collect::<Vec<_>>().into_par_iter().flat_map_iter(predict).collect();
    let predictions: BTreeMap<usize, Result<StepPrediction, Refusal>> = predictions.into_iter().collect();
    let scored = rows.iter().zip(runs).enumerate().map(|(index, (row, run))| {
        let outcome = run.and_then(|run| match predictions.get(&index) {
            Some(Ok(prediction)) => {
                let mut prediction = prediction.clone();
                traced::apply_traced(row, &run, &mut prediction);
                if run.plan.layout.offload == Offload::State && prediction.traced.is_none() {
                    return Err(Refusal("offloading parameters to hosts is known of traced operators alone".into()));
                }
                Ok((run, prediction))
            }
            Some(Err(refusal)) => Err(refusal.clone()),
            None => Err(Refusal("the run was not simulated".into())),
        });
        scored(row, split, outcome)
    });
    let scored: Vec<ScoredRow> = scored.collect();
    // Without held-out rows, as in a user's own table, all rows count.
    let subset = scored.iter().any(|row| row.subset == Subset::Score).then_some(Subset::Score);
    Scores::of(scored, subset, profiles.fitted_values())
}

/// Error above which a row is compared with physical bounds.
const FAR_OFF: f64 = 0.25;

/// Returns which part of a measured time is implausible, if the prediction is off by more than
/// [`FAR_OFF`]. No run is faster than its FLOPs at peak rate, and the times of kernels are the best
/// known ones.
fn implausible(measured: f64, prediction: &StepPrediction) -> Option<String> {
    let [step, kernels, least] = [prediction.step, prediction.compute, prediction.least].map(|time| time.value());
    if (step / measured - 1.0).abs() <= FAR_OFF {
        return None;
    }
    let share = 100.0 * least / measured;
    Some(if least > measured {
        format!("the row: its FLOPs take {least:.4} s at the devices' peak, more than the measured {measured:.4} s")
    } else if kernels > measured {
        format!(
            "the kernels: predicted to take {kernels:.4} s of the measured {measured:.4} s, which is {share:.0} % of peak if the \
             row is right"
        )
    } else if step > measured {
        format!(
            "the time beside kernels: {:.4} s predicted where the measurement leaves {:.4} s, at {share:.0} % of peak",
            step - kernels,
            measured - kernels
        )
    } else {
        format!(
            "the time beside kernels: {:.4} s predicted, but the measurement would need {:.4} s ({:.1} times); the run reaches \
             {share:.0} % of peak",
            step - kernels,
            measured - kernels,
            (measured - kernels) / (step - kernels).max(1e-9)
        )
    })
}

fn scored(row: &Row, split: &Split, outcome: Result<(Run, StepPrediction), Refusal>) -> ScoredRow {
    let measured = row.step_seconds();
    let group = format!("{}|{}|{}|{}|{:?}|{}", row.table, row.model, row.gpu, row.framework, row.count("n_gpus"), row.precision);
    let sizes = ["gbs", "seq", "layers", "hidden", "n_nodes"].map(|column| row.count(column));
    let job = format!("{group}|{sizes:?}");
    let mut scored = ScoredRow {
        row_id: row.row_id.clone(),
        table: row.table.clone(),
        subset: split.subset(row),
        measured_step_seconds: measured,
        predicted_step_seconds: None,
        p10: None,
        p90: None,
        error: None,
        measured_memory_bytes: row.memory_bytes(),
        predicted_memory_bytes: None,
        fits: None,
        ran: None,
        is_traced: false,
        stack: None,
        basis: None,
        calibrated: false,
        assumptions: Vec::new(),
        implausible: None,
        refused: None,
        doubt: row.doubt.clone(),
        group,
        job,
    };
    match outcome {
        Ok((run, prediction)) => {
            let step = prediction.step.value();
            scored.predicted_step_seconds = Some(step);
            let basis = IntervalBasis::of(row, &run, prediction.traced.is_some());
            let [p10, p90] = basis.interval(&prediction);
            (scored.p10, scored.p90) = (Some(p10), Some(p90));
            scored.error = measured.map(|measured| step / measured - 1.0);
            scored.predicted_memory_bytes = Some(memory_figure(row, &run.stack, &prediction.memory, prediction.traced.as_ref()));
            scored.implausible = measured.and_then(|measured| implausible(measured, &prediction));
            let capacity = run.cluster.gpu.memory;
            let needed = match &prediction.traced {
                Some(traced) => traced.memory.needed + traced.outside,
                None => allocated(&prediction.memory),
            };
            scored.fits = Some(needed <= capacity);
            scored.ran = match row.cells.get("oom").map(String::as_str) {
                Some("1") => Some(false),
                _ => measured.map(|_| true),
            };
            scored.is_traced = prediction.traced.is_some();
            scored.basis = Some(basis);
            scored.calibrated = run.assumptions.is_empty();
            scored.stack = Some(run.stack_name);
            scored.assumptions = run.assumptions;
            if measured.is_some() && needed > capacity {
                scored.assumptions.push(format!("it is predicted to need {needed} of the device's {capacity}, although it ran"));
            }
        }
        Err(Refusal(reason)) => scored.refused = Some(reason),
    }
    scored
}

impl Scores {
    /// Returns the statistics of the scored rows of one subset, or of all.
    pub(crate) fn of(rows: Vec<ScoredRow>, subset: Option<Subset>, fitted_values: usize) -> Self {
        let by_source = by_source(&rows, subset);
        let overall = Overall::of(&rows, subset);
        let mut refused: BTreeMap<String, usize> = BTreeMap::new();
        for reason in rows.iter().filter_map(|row| row.refused.clone()) {
            *refused.entry(reason).or_default() += 1;
        }
        let coverage = coverage(&rows, subset);
        Self { by_source, overall, coverage, refused, fitted_values, rows }
    }

    /// Returns a Markdown table of the statistics of one subset of the rows, or of all (`None`).
    pub fn table(&self, subset: Option<Subset>) -> String {
        let by_source = by_source(&self.rows, subset);
        let all = over_rows(&self.rows, subset);
        let choice = all.regret.map_or_else(String::new, |regret| {
            let (jobs, percent) = (all.jobs, regret * 100.0);
            format!(
                "\nin {jobs} jobs with at least three measured layouts, the layout predicted fastest took {percent:.1} % \
                 longer than the fastest, on average"
            )
        });
        let mean = Summary::macro_average(&by_source);
        let mut lines: Vec<(String, Summary)> = by_source.into_iter().collect();
        lines.push(("all rows".into(), all));
        lines.push(("mean over sources".into(), mean));
        let unclear = self.without_unclear(subset).map_or_else(String::new, |(count, without)| {
            let percent = 100.0 * without.mean_absolute_error;
            format!("\n{count} rows are unclear and count all the same; without them the mean over sources is {percent:.1} %")
        });
        let coverage: String =
            coverage(&self.rows, subset).iter().map(|(basis, coverage)| format!("\n{}", coverage.line(*basis))).collect();
        format!("{}{choice}{unclear}{coverage}{}", SummaryTable(&lines), self.fits_in_words(subset))
    }

    /// States how many of the jobs that ran are predicted to fit, and how many of those that ran
    /// out of memory are predicted not to.
    fn fits_in_words(&self, subset: Option<Subset>) -> String {
        let right = |ran: bool| {
            let of_subset = self.rows.iter().filter(|row| subset.is_none_or(|subset| row.subset == subset));
            let judged: Vec<bool> = of_subset.filter(|row| row.ran == Some(ran)).filter_map(|row| row.fits).collect();
            (judged.iter().filter(|&&fits| fits == ran).count(), judged.len())
        };
        let ((fit, ran), (not, out)) = (right(true), right(false));
        if out == 0 {
            return String::new();
        }
        format!("\nof {ran} jobs that ran, {fit} are said to fit; of {out} that ran out of memory, {not} are said not to")
    }

    /// Returns how many rows with an error are unclear, and the mean over sources of the other
    /// rows. `None` if no row is unclear.
    fn without_unclear(&self, subset: Option<Subset>) -> Option<(usize, Summary)> {
        let is_counted = |row: &&ScoredRow| row.error.is_some() && subset.is_none_or(|subset| row.subset == subset);
        let (unclear, clear): (Vec<&ScoredRow>, Vec<&ScoredRow>) =
            self.rows.iter().filter(is_counted).partition(|row| row.doubt.is_some());
        let clear: Vec<ScoredRow> = clear.into_iter().cloned().collect();
        (!unclear.is_empty()).then(|| (unclear.len(), Summary::macro_average(&by_source(&clear, subset))))
    }
}

fn coverage(rows: &[ScoredRow], subset: Option<Subset>) -> BTreeMap<IntervalBasis, Coverage> {
    let mut found = BTreeMap::new();
    for basis in IntervalBasis::all() {
        let of_basis: Vec<ScoredRow> = rows.iter().filter(|row| row.basis == Some(basis)).cloned().collect();
        let all = over_rows(&of_basis, subset);
        if all.rows > 0 {
            let macro_inside_interval = Summary::macro_average(&by_source(&of_basis, subset)).inside_interval;
            found.insert(basis, Coverage { rows: all.rows, inside_interval: all.inside_interval, macro_inside_interval });
        }
    }
    found
}

fn pairs(rows: &[ScoredRow], subset: Option<Subset>) -> Vec<Pair<'_>> {
    rows.iter()
        .filter(|row| subset.is_none_or(|subset| row.subset == subset))
        .filter_map(|row| {
            let (measured, predicted) = (row.measured_step_seconds?, row.predicted_step_seconds?);
            Some(Pair {
                source: &row.table,
                group: &row.group,
                job: &row.job,
                measured,
                predicted,
                is_inside: row.p10? <= measured && measured <= row.p90?,
                memory: row
                    .predicted_memory_bytes
                    .zip(row.measured_memory_bytes)
                    .map(|(predicted, measured)| [predicted, measured]),
            })
        })
        .collect()
}

fn by_source(rows: &[ScoredRow], subset: Option<Subset>) -> BTreeMap<String, Summary> {
    let pairs = pairs(rows, subset);
    let mut by_source: BTreeMap<String, Vec<&Pair>> = BTreeMap::new();
    for pair in &pairs {
        by_source.entry(pair.source.to_string()).or_default().push(pair);
    }
    by_source.into_iter().map(|(source, pairs)| (source, Summary::of(&pairs))).collect()
}

fn over_rows(rows: &[ScoredRow], subset: Option<Subset>) -> Summary {
    let pairs = pairs(rows, subset);
    Summary::of(&pairs.iter().collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::published;
    use crate::row::read_rows;

    /// Every 37th published row, from many sources.
    fn sample() -> Vec<Row> {
        let rows = published().expect("sound");
        assert!(rows.len() > 2000, "{}", rows.len());
        rows.into_iter().step_by(37).collect()
    }

    #[test]
    fn every_row_appears_once_with_a_prediction_or_a_reason() {
        let rows = sample();
        let scores = score(&rows, &Split::library().expect("sound"), Profiles::library().expect("sound"));
        assert_eq!(scores.rows.len(), rows.len());
        for (row, scored) in rows.iter().zip(&scores.rows) {
            assert_eq!(row.row_id, scored.row_id);
            assert!(scored.predicted_step_seconds.is_some() != scored.refused.is_some(), "{scored:?}");
        }
        assert!(scores.refused.len() > 1 && scores.by_source.len() > 6);
        assert!(!scores.by_source.contains_key(""));
    }

    #[test]
    fn a_row_that_is_far_off_says_which_part_is_implausible() {
        let seconds = foretell_units::Seconds::new;
        let prediction = StepPrediction {
            step: seconds(2.0),
            p10: seconds(1.8),
            p90: seconds(2.2),
            memory: Default::default(),
            compute: seconds(1.5),
            least: seconds(0.8),
            traced: None,
        };
        let part = |measured| implausible(measured, &prediction).unwrap_or_default();
        assert_eq!(part(1.9), "");
        assert!(part(0.7).starts_with("the row: "), "{}", part(0.7));
        assert!(part(1.2).starts_with("the kernels: "), "{}", part(1.2));
        assert!(part(1.55).starts_with("the time beside kernels: 0.5000 s predicted where"), "{}", part(1.55));
        assert!(part(4.0).contains("2.5000 s (5.0 times)"), "{}", part(4.0));
    }

    #[test]
    fn unclear_rows_count_and_the_table_says_what_they_change() {
        let is_of_source = |row: &Row| row.table == "megatron_bridge_perf" && row.count("n_gpus") == Some(8);
        let rows: Vec<Row> = published().expect("sound").into_iter().filter(is_of_source).collect();
        let scores = score(&rows, &Split::library().expect("sound"), Profiles::library().expect("sound"));
        let (count, without) = scores.without_unclear(None).expect("two rows on eight devices");
        let errors: Vec<f64> = scores.rows.iter().filter_map(|row| row.error).collect();
        assert_eq!((count, without.rows), (2, errors.len() - 2));
        assert_eq!(
            scores.by_source["megatron_bridge_perf"].rows,
            scores.rows.iter().filter(|row| row.subset == Subset::Score).count()
        );
        assert!(scores.table(None).contains("2 rows are unclear and count all the same"), "{}", scores.table(None));
        for row in scores.rows.iter().filter(|row| row.doubt.is_some()) {
            assert!(!row.calibrated && row.assumptions[0].starts_with("the measurement is unclear: "), "{row:?}");
        }
    }

    #[test]
    fn the_number_of_threads_does_not_change_the_scores() {
        let rows = sample();
        let split = Split::library().expect("sound");
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| score(&rows, &split, Profiles::library().expect("sound")))
        };
        assert_eq!(on(1), on(3));
    }

    #[test]
    fn hostile_rows_are_refused_without_a_panic() {
        let text = "row_id,table,model,layers,hidden,heads,vocab,seq,gpu,n_gpus,dp,tp,pp,mbs,gbs,precision,framework,step_s\n\
            zero,t,GPT,0,0,0,0,0,A100,0,0,0,0,0,0,bf16,Megatron-LM,1\n\
            huge,t,GPT,999999999999,999999999999,3,9e11,1e12,A100,1e11,1e11,1,1,9e11,9e11,bf16,Megatron-LM,1\n\
            words,t,GPT,many,few,some,?,!,A100,a,b,c,d,e,f,bf16,Megatron-LM,soon\n\
            none,,,,,,,,,,,,,,,,,\n\
            odd,t,GPT,7,1024,16,50257,1024,A100,6,1,2,3,5,11,bf16,Megatron-LM,1\n\
            unknown,t,GPT,8,1024,16,50257,1024,abacus,8,8,1,1,1,8,bf16,Megatron-LM,1\n\
            framework,t,GPT,8,1024,16,50257,1024,A100,8,8,1,1,1,8,bf16,by hand,1\n";
        let rows = read_rows(text).expect("a table");
        let scores = score(&rows, &Split::library().expect("sound"), Profiles::library().expect("sound"));
        assert_eq!(scores.rows.len(), 7);
        for row in &scores.rows[..6] {
            assert!(row.refused.is_some(), "{row:?}");
        }
        let reason = |index: usize| scores.rows[index].refused.clone().unwrap_or_default();
        assert_eq!(reason(5), "the device `abacus` has no profile");
        // A similar stack stands in for a framework without a profile, and the row says so.
        let by_hand = &scores.rows[6];
        assert!(by_hand.predicted_step_seconds.is_some() && !by_hand.calibrated, "{by_hand:?}");
        assert!(by_hand.assumptions.iter().any(|assumption| assumption.contains("by hand")), "{by_hand:?}");
    }
}
