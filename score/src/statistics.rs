//! Error statistics of many predictions against their measurements.

use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// One prediction and its measurement.
#[derive(Clone, Debug)]
pub(crate) struct Pair<'a> {
    /// Source of the measurement.
    pub(crate) source: &'a str,
    /// Group of rows that differ in layout only: same model, cluster and framework.
    pub(crate) group: &'a str,
    /// Job within the group: same batch and sizes. A planner would choose among the job's rows.
    pub(crate) job: &'a str,
    /// Measured step time in seconds.
    pub(crate) measured: f64,
    /// Predicted step time in seconds.
    pub(crate) predicted: f64,
    /// True if the measurement lies inside the 80 % interval.
    pub(crate) is_inside: bool,
    /// Predicted and measured memory in bytes, if both are known.
    pub(crate) memory: Option<[f64; 2]>,
}

/// Statistics of a set of rows. An error is predicted over measured, minus one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Summary {
    /// Number of rows with a prediction and a measurement.
    pub rows: usize,
    /// Mean magnitude of the errors.
    pub mean_absolute_error: f64,
    /// Median magnitude of the errors.
    pub median_absolute_error: f64,
    /// 95th percentile of the magnitudes of the errors.
    pub p95_absolute_error: f64,
    /// Largest magnitude of an error.
    pub worst_absolute_error: f64,
    /// Mean of the signed errors.
    pub bias: f64,
    /// Spearman's rank correlation within groups of the same model, cluster and framework, weighted
    /// by the size of the group. `None` if no group has three rows.
    pub rank_correlation: Option<f64>,
    /// Number of jobs with at least three measured layouts.
    pub jobs: usize,
    /// For each of these jobs, the measured time of the layout that is predicted fastest over that
    /// of the layout that was measured fastest, minus one; the mean over the jobs. `None` without
    /// such jobs.
    pub regret: Option<f64>,
    /// Share of measurements inside the 80 % interval.
    pub inside_interval: f64,
    /// Number of rows with predicted and measured memory.
    pub memory_rows: usize,
    /// Mean magnitude of the memory errors.
    pub memory_mean_absolute_error: Option<f64>,
    /// Mean of the signed memory errors.
    pub memory_bias: Option<f64>,
}

impl Summary {
    pub(crate) fn of(pairs: &[&Pair]) -> Self {
        if pairs.is_empty() {
            return Self::default();
        }
        let errors: Vec<f64> = pairs.iter().map(|pair| pair.predicted / pair.measured - 1.0).collect();
        let mut magnitudes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        magnitudes.sort_by(f64::total_cmp);
        let memory: Vec<f64> =
            pairs.iter().filter_map(|pair| pair.memory).map(|[predicted, measured]| predicted / measured - 1.0).collect();
        let regrets = regrets(pairs);
        let memory_mean = |map: fn(f64) -> f64| (!memory.is_empty()).then(|| mean(memory.iter().map(|&error| map(error))));
        Self {
            rows: pairs.len(),
            mean_absolute_error: mean(magnitudes.iter().copied()),
            median_absolute_error: quantile(&magnitudes, 0.5),
            p95_absolute_error: quantile(&magnitudes, 0.95),
            worst_absolute_error: magnitudes.last().copied().unwrap_or(0.0),
            bias: mean(errors.iter().copied()),
            rank_correlation: rank_correlation(pairs),
            jobs: regrets.len(),
            regret: (!regrets.is_empty()).then(|| mean(regrets.iter().copied())),
            inside_interval: mean(pairs.iter().map(|pair| f64::from(u8::from(pair.is_inside)))),
            memory_rows: memory.len(),
            memory_mean_absolute_error: memory_mean(f64::abs),
            memory_bias: memory_mean(|error| error),
        }
    }

    /// Returns the mean over sources with equal weights. Sources without rows do not count.
    pub(crate) fn macro_average(summaries: &BTreeMap<String, Summary>) -> Self {
        let sources: Vec<&Summary> = summaries.values().filter(|summary| summary.rows > 0).collect();
        if sources.is_empty() {
            return Self::default();
        }
        let mean_of = |field: fn(&Summary) -> f64| mean(sources.iter().map(|summary| field(summary)));
        let mean_of_known = |field: fn(&Summary) -> Option<f64>| {
            let values: Vec<f64> = sources.iter().filter_map(|summary| field(summary)).collect();
            (!values.is_empty()).then(|| mean(values.iter().copied()))
        };
        Self {
            rows: sources.iter().map(|summary| summary.rows).sum(),
            mean_absolute_error: mean_of(|summary| summary.mean_absolute_error),
            median_absolute_error: mean_of(|summary| summary.median_absolute_error),
            p95_absolute_error: mean_of(|summary| summary.p95_absolute_error),
            worst_absolute_error: sources.iter().map(|summary| summary.worst_absolute_error).fold(0.0, f64::max),
            bias: mean_of(|summary| summary.bias),
            rank_correlation: mean_of_known(|summary| summary.rank_correlation),
            jobs: sources.iter().map(|summary| summary.jobs).sum(),
            regret: mean_of_known(|summary| summary.regret),
            inside_interval: mean_of(|summary| summary.inside_interval),
            memory_rows: sources.iter().map(|summary| summary.memory_rows).sum(),
            memory_mean_absolute_error: mean_of_known(|summary| summary.memory_mean_absolute_error),
            memory_bias: mean_of_known(|summary| summary.memory_bias),
        }
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

/// Returns the median, 0 without values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(&values, 0.5)
}

/// Returns the quantile at `share` of ascending values, 0 without values.
fn quantile(ascending: &[f64], share: f64) -> f64 {
    foretell_units::interpolated_quantile(ascending, share).unwrap_or(0.0)
}

fn rank_correlation(pairs: &[&Pair]) -> Option<f64> {
    let mut groups: BTreeMap<&str, Vec<&Pair>> = BTreeMap::new();
    for pair in pairs {
        groups.entry(pair.group).or_default().push(pair);
    }
    let (mut sum, mut weight) = (0.0, 0.0);
    for group in groups.values().filter(|group| group.len() >= 3) {
        let measured = ranks(group.iter().map(|pair| pair.measured).collect());
        let predicted = ranks(group.iter().map(|pair| pair.predicted).collect());
        if let Some(correlation) = correlation(&measured, &predicted) {
            sum += correlation * group.len() as f64;
            weight += group.len() as f64;
        }
    }
    (weight > 0.0).then(|| sum / weight)
}

/// Returns, for each job with at least three layouts, the measured time of the layout predicted
/// fastest over the shortest measured time, minus one.
fn regrets(pairs: &[&Pair]) -> Vec<f64> {
    let mut jobs: BTreeMap<&str, Vec<&Pair>> = BTreeMap::new();
    for pair in pairs {
        jobs.entry(pair.job).or_default().push(pair);
    }
    let regret = |job: &Vec<&Pair>| {
        let chosen = job.iter().min_by(|a, b| a.predicted.total_cmp(&b.predicted))?;
        Some(chosen.measured / job.iter().map(|pair| pair.measured).reduce(f64::min)? - 1.0)
    };
    jobs.values().filter(|job| job.len() >= 3).filter_map(regret).collect()
}

/// Returns the rank of each value, counted from 0. Equal values share their mean rank.
fn ranks(values: Vec<f64>) -> Vec<f64> {
    let below = |value: f64| values.iter().filter(|&&other| other < value).count() as f64;
    let equal = |value: f64| values.iter().filter(|&&other| other == value).count() as f64;
    values.iter().map(|&value| below(value) + (equal(value) - 1.0) / 2.0).collect()
}

/// Returns the correlation of two lists of ranks, or `None` if one is constant.
fn correlation(one: &[f64], two: &[f64]) -> Option<f64> {
    let center = (one.len() as f64 - 1.0) / 2.0;
    let product = |left: &[f64], right: &[f64]| left.iter().zip(right).map(|(a, b)| (a - center) * (b - center)).sum::<f64>();
    let spread = (product(one, one) * product(two, two)).sqrt();
    (spread > 0.0).then(|| product(one, two) / spread)
}

/// Named summaries, displayed as a Markdown table.
pub struct SummaryTable<'a>(pub &'a [(String, Summary)]);

impl std::fmt::Display for SummaryTable<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |value: f64| format!("{:.1} %", 100.0 * value);
        let mut text = String::new();
        writeln!(
            text,
            "| source | rows | mean | median | p95 | worst | bias | rank corr. | in 80 % | memory rows | memory mean | memory bias |"
        )?;
        writeln!(text, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")?;
        for (name, summary) in self.0 {
            let memory = |value: Option<f64>| value.map_or(String::new(), percent);
            writeln!(
                text,
                "| {name} | {} | {} | {} | {} | {} | {:+.1} % | {} | {:.0} % | {} | {} | {} |",
                summary.rows,
                percent(summary.mean_absolute_error),
                percent(summary.median_absolute_error),
                percent(summary.p95_absolute_error),
                percent(summary.worst_absolute_error),
                100.0 * summary.bias,
                summary.rank_correlation.map_or(String::new(), |value| format!("{value:.3}")),
                100.0 * summary.inside_interval,
                summary.memory_rows,
                memory(summary.memory_mean_absolute_error),
                memory(summary.memory_bias),
            )?;
        }
        formatter.write_str(text.trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(measured: f64, predicted: f64) -> Pair<'static> {
        Pair { source: "s", group: "g", job: "j", measured, predicted, is_inside: true, memory: None }
    }

    #[test]
    fn a_summary_has_the_statistics_of_its_pairs() {
        let pairs = [pair(1.0, 1.1), pair(2.0, 1.8), pair(4.0, 4.0)];
        let summary = Summary::of(&pairs.iter().collect::<Vec<_>>());
        assert_eq!(summary.rows, 3);
        assert!((summary.mean_absolute_error - 0.2 / 3.0).abs() < 1e-12);
        assert!(summary.bias.abs() < 1e-12);
        assert!((summary.median_absolute_error - 0.1).abs() < 1e-12);
        assert_eq!(summary.rank_correlation, Some(1.0));
        assert_eq!((summary.jobs, summary.regret), (1, Some(0.0)));
        let reversed = [pair(1.0, 3.0), pair(2.0, 2.0), pair(3.0, 1.0)];
        assert_eq!(Summary::of(&reversed.iter().collect::<Vec<_>>()).rank_correlation, Some(-1.0));
        assert_eq!(Summary::of(&reversed.iter().collect::<Vec<_>>()).regret, Some(2.0));
    }

    #[test]
    fn sources_have_equal_weights_in_the_macro_average() {
        let one = Summary { rows: 100, mean_absolute_error: 0.1, ..Summary::default() };
        let two = Summary { rows: 1, mean_absolute_error: 0.3, ..Summary::default() };
        let both = Summary::macro_average(&BTreeMap::from([("a".into(), one), ("b".into(), two)]));
        assert!((both.mean_absolute_error - 0.2).abs() < 1e-12);
    }
}
