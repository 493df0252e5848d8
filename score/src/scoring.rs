//! Scoring: every row predicted, or refused with the reason, and what all of them say.

use crate::predict::{Predicted, allocated, prepare};
use crate::row::{Row, read_rows};
use crate::run::{Refusal, Run};
use crate::split::{Part, Split};
use crate::statistics::{Pair, Summary, Table};
use crate::table::TableError;
use foretell_program::Footprint;
use foretell_simulator::gpu::{Profiles, StackKind};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;

/// The rows that the project scores itself on: a copy of those of `validation/runs.csv`.
const PUBLISHED: &str = include_str!("../../tests/published/runs.csv");

/// The rows that the project scores itself on.
///
/// # Errors
/// [`TableError`], which a test excludes.
pub fn published() -> Result<Vec<Row>, TableError> {
    read_rows(PUBLISHED)
}

/// A row, predicted or refused.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scored {
    /// The row's name.
    pub row_id: String,
    /// Its source.
    pub table: String,
    /// What it is for.
    pub split: Part,
    /// What was measured, if a step time was.
    pub measured_step_seconds: Option<f64>,
    /// What is foretold.
    pub predicted_step_seconds: Option<f64>,
    /// The prediction's 10th percentile.
    pub p10: Option<f64>,
    /// The prediction's 90th percentile.
    pub p90: Option<f64>,
    /// Predicted over measured, less one.
    pub error: Option<f64>,
    /// What was measured, if memory was.
    pub measured_memory_bytes: Option<f64>,
    /// What is foretold.
    pub predicted_memory_bytes: Option<f64>,
    /// The profile of the software stack.
    pub stack: Option<String>,
    /// Whether device and stack were fitted and nothing stands in for something else.
    pub calibrated: bool,
    /// What stands in for what.
    pub stand_ins: Vec<String>,
    /// Why there is no prediction.
    pub refused: Option<String>,
    #[serde(skip)]
    group: String,
    #[serde(skip)]
    job: String,
}

/// All rows, and what they say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scores {
    /// Every row once, in the order of the input.
    pub rows: Vec<Scored>,
    /// By source, of the rows that were kept from fitting.
    pub by_source: BTreeMap<String, Summary>,
    /// Of those rows: `rows` counts each row alike, `sources` each source.
    pub overall: BTreeMap<String, Summary>,
    /// How many rows were refused, by reason.
    pub refused: BTreeMap<String, usize>,
}

/// Predicts every row. The same on any number of threads.
pub fn score(rows: &[Row], split: &Split, profiles: &Profiles) -> Scores {
    let runs: Vec<Result<Run, Refusal>> = rows.par_iter().map(|row| Run::of(row, profiles)).collect();
    // Rows of one model and one plan have their Programs in common, which are dropped with the last of them.
    let mut alike: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (place, run) in runs.iter().enumerate() {
        if let Ok(run) = run {
            // What is computed again may follow from a device's memory.
            let memory = (!run.recompute_is_stated).then_some((run.cluster.gpu.memory, run.format));
            alike.entry(format!("{:?} {:?} {memory:?}", run.model, run.plan)).or_default().push(place);
        }
    }
    let of_alike = |places: Vec<usize>| -> Vec<(usize, Result<Predicted, Refusal>)> {
        let runs: Vec<(usize, &Run)> = places.iter().filter_map(|&place| Some((place, runs[place].as_ref().ok()?))).collect();
        let Some((_, first)) = runs.first() else { return Vec::new() };
        match prepare(first) {
            Ok(prepared) => runs.iter().map(|(place, run)| (*place, prepared.predict(run))).collect(),
            Err(refusal) => runs.iter().map(|(place, _)| (*place, Err(refusal.clone()))).collect(),
        }
    };
    let predicted: BTreeMap<usize, Result<Predicted, Refusal>> =
        alike.into_values().collect::<Vec<_>>().into_par_iter().flat_map_iter(of_alike).collect::<Vec<_>>().into_iter().collect();
    let of_row = |((place, row), run): ((usize, &Row), Result<Run, Refusal>)| {
        let predicted = run.and_then(|run| match predicted.get(&place) {
            Some(Ok(predicted)) => Ok((run, predicted.clone())),
            Some(Err(refusal)) => Err(refusal.clone()),
            None => Err(Refusal("nothing was simulated".into())),
        });
        scored(row, split, predicted.map_err(|refusal| refusal.to_string()))
    };
    Scores::of(rows.iter().enumerate().zip(runs).map(of_row).collect())
}

fn scored(row: &Row, split: &Split, predicted: Result<(Run, Predicted), String>) -> Scored {
    let measured = row.step_seconds();
    let group = format!("{}|{}|{}|{}|{:?}|{}", row.table, row.model, row.gpu, row.framework, row.count("n_gpus"), row.precision);
    let sizes = ["gbs", "seq", "layers", "hidden", "n_nodes"].map(|what| row.count(what));
    let job = format!("{group}|{sizes:?}");
    let mut scored = Scored {
        row_id: row.row_id.clone(),
        table: row.table.clone(),
        split: split.part(row),
        measured_step_seconds: measured,
        predicted_step_seconds: None,
        p10: None,
        p90: None,
        error: None,
        measured_memory_bytes: row.memory_bytes(),
        predicted_memory_bytes: None,
        stack: None,
        calibrated: false,
        stand_ins: Vec::new(),
        refused: None,
        group,
        job,
    };
    match predicted {
        Ok((run, predicted)) => {
            let step = predicted.step.value();
            scored.predicted_step_seconds = Some(step);
            scored.p10 = Some(predicted.p10.value());
            scored.p90 = Some(predicted.p90.value());
            scored.error = measured.map(|measured| step / measured - 1.0);
            scored.predicted_memory_bytes = Some(stated_memory(row, &run.stack, &predicted.memory));
            scored.calibrated = run.stand_ins.is_empty();
            scored.stack = Some(run.stack_name);
            scored.stand_ins = run.stand_ins;
        }
        Err(reason) => scored.refused = Some(reason),
    }
    scored
}

/// What the figure of the row's kind would be: what the allocator gave out, what it holds, or all that the device has in use.
pub fn stated_memory(row: &Row, stack: &StackKind, held: &Footprint) -> f64 {
    let kind = row.mem_kind.to_lowercase();
    let says = |word: &str| kind.contains(word) && !kind.contains("not stated");
    let stated = if kind.contains("nvidia-smi") {
        held.total()
    } else if says("reserved") || (stack.memory.prints_reserved && !says("allocated")) {
        allocated(held) + held.unused
    } else {
        allocated(held)
    };
    stated.value()
}

impl Scores {
    fn of(rows: Vec<Scored>) -> Self {
        let kept = summaries(&rows, Some(Part::Score));
        let mut overall = BTreeMap::from([("sources".to_string(), Summary::macro_average(&kept))]);
        overall.insert("rows".into(), overall_rows(&rows, Some(Part::Score)));
        let mut refused: BTreeMap<String, usize> = BTreeMap::new();
        for reason in rows.iter().filter_map(|row| row.refused.clone()) {
            *refused.entry(reason).or_default() += 1;
        }
        Self { by_source: kept, overall, refused, rows }
    }

    /// The table for people: of one part of the rows, or of all.
    pub fn table(&self, part: Option<Part>) -> String {
        let by_source = summaries(&self.rows, part);
        let mut lines: Vec<(String, Summary)> = by_source.clone().into_iter().collect();
        lines.push(("all rows".into(), overall_rows(&self.rows, part)));
        lines.push(("mean over sources".into(), Summary::macro_average(&by_source)));
        let all = overall_rows(&self.rows, part);
        let choice = all.regret.map_or_else(String::new, |regret| {
            let percent = regret * 100.0;
            format!("\nof {} jobs with three layouts or more, the one foretold to be the fastest took {percent:.1} % longer than the best", all.jobs)
        });
        format!("{}{choice}", Table(&lines))
    }
}

fn pairs(rows: &[Scored], part: Option<Part>) -> Vec<Pair<'_>> {
    rows.iter()
        .filter(|row| part.is_none_or(|part| row.split == part))
        .filter_map(|row| {
            let (measured, predicted) = (row.measured_step_seconds?, row.predicted_step_seconds?);
            Some(Pair {
                table: &row.table,
                group: row.group.clone(),
                job: row.job.clone(),
                measured,
                predicted,
                inside: row.p10? <= measured && measured <= row.p90?,
                memory: row
                    .predicted_memory_bytes
                    .zip(row.measured_memory_bytes)
                    .map(|(predicted, measured)| [predicted, measured]),
            })
        })
        .collect()
}

fn summaries(rows: &[Scored], part: Option<Part>) -> BTreeMap<String, Summary> {
    let pairs = pairs(rows, part);
    let mut by_source: BTreeMap<String, Vec<&Pair>> = BTreeMap::new();
    for pair in &pairs {
        by_source.entry(pair.table.to_string()).or_default().push(pair);
    }
    by_source.into_iter().map(|(table, pairs)| (table, Summary::of(&pairs))).collect()
}

fn overall_rows(rows: &[Scored], part: Option<Part>) -> Summary {
    let pairs = pairs(rows, part);
    Summary::of(&pairs.iter().collect::<Vec<_>>())
}

/// The rows as a table.
pub fn to_csv(rows: &[Scored]) -> String {
    const HEADER: [&str; 13] = [
        "row_id",
        "table",
        "split",
        "stack",
        "measured_step_s",
        "predicted_step_s",
        "p10_s",
        "p90_s",
        "error",
        "measured_memory_bytes",
        "predicted_memory_bytes",
        "calibrated",
        "refused",
    ];
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.6}"));
    let whole = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.0}"));
    let records = rows.iter().map(|row| {
        [
            row.row_id.clone(),
            row.table.clone(),
            if row.split == Part::Fit { "fit" } else { "score" }.to_string(),
            row.stack.clone().unwrap_or_default(),
            number(row.measured_step_seconds),
            number(row.predicted_step_seconds),
            number(row.p10),
            number(row.p90),
            number(row.error),
            whole(row.measured_memory_bytes),
            whole(row.predicted_memory_bytes),
            row.calibrated.to_string(),
            row.refused.clone().unwrap_or_default(),
        ]
    });
    let mut writer = csv::Writer::from_writer(Vec::new());
    let written = std::iter::once(HEADER.map(String::from)).chain(records).try_for_each(|record| writer.write_record(record));
    written.expect("every record has as many cells, and memory takes them all");
    let bytes = writer.into_inner().expect("memory takes what is left");
    String::from_utf8(bytes).expect("it was made of strings")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some of every source.
    fn some() -> Vec<Row> {
        let rows = published().expect("sound");
        assert!(rows.len() > 2000, "{}", rows.len());
        rows.into_iter().step_by(67).collect()
    }

    #[test]
    fn every_row_appears_once_with_a_prediction_or_a_reason() {
        let rows = some();
        let scores = score(&rows, &Split::library().expect("sound"), Profiles::library().expect("sound"));
        assert_eq!(scores.rows.len(), rows.len());
        for (row, scored) in rows.iter().zip(&scores.rows) {
            assert_eq!(row.row_id, scored.row_id);
            assert!(scored.predicted_step_seconds.is_some() != scored.refused.is_some(), "{scored:?}");
        }
        assert!(scores.refused.len() > 1 && scores.by_source.len() > 8);
        assert!(!scores.by_source.contains_key(""));
    }

    #[test]
    fn any_number_of_threads_gives_the_same() {
        let rows = some();
        let split = Split::library().expect("sound");
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| score(&rows, &split, Profiles::library().expect("sound")))
        };
        assert_eq!(on(1), on(3));
    }

    #[test]
    fn a_peak_is_what_its_kind_or_else_the_stack_prints() {
        let mut stack = Profiles::library().expect("sound").stack("megatron-core").expect("known").clone();
        let gib = |gib: u64| foretell_units::Bytes::new(gib << 30);
        let held = Footprint { parameters: gib(4), unused: gib(2), context: gib(1), ..Footprint::default() };
        let row = |kind: &str| Row { mem_kind: kind.into(), ..Row::default() };
        let stated = |stack: &StackKind, kind| stated_memory(&row(kind), stack, &held) / gib(1).value();
        assert_eq!(stated(&stack, "nvidia-smi max"), 7.0);
        assert_eq!((stated(&stack, "max_memory_reserved"), stated(&stack, "max over GPUs")), (6.0, 4.0));
        stack.memory.prints_reserved = true;
        assert_eq!((stated(&stack, "max over GPUs"), stated(&stack, "max_memory_allocated")), (6.0, 4.0));
    }

    #[test]
    fn hostile_rows_are_refused_and_end_nothing() {
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
        assert_eq!(reason(5), "no profile of the device `abacus`");
        // What is likest stands in for a framework without a profile, and that is said.
        let by_hand = &scores.rows[6];
        assert!(by_hand.predicted_step_seconds.is_some() && !by_hand.calibrated, "{by_hand:?}");
        assert!(by_hand.stand_ins.iter().any(|one| one.contains("by hand")), "{by_hand:?}");
    }
}
