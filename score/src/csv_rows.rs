//! Scored rows as CSV.

use crate::published::Subset;
use crate::scoring::ScoredRow;

/// Returns the rows as CSV text, with a header.
pub fn to_csv(rows: &[ScoredRow]) -> String {
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
            if row.subset == Subset::Fit { "fit" } else { "score" }.to_string(),
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
    written.expect("all records have the same length, and writing to memory cannot fail");
    let bytes = writer.into_inner().expect("writing to memory cannot fail");
    String::from_utf8(bytes).expect("the cells are UTF-8")
}
