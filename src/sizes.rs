//! How `foretell plan --scaling` and `--front` print their points.

use crate::choices::Setting;
use foretell_planner::SizePoint;
use foretell_reports::{Column, CurvePoint, Plot, table};
use foretell_units::{Bytes, Seconds};

/// Formats points as a table.
pub fn points_table(points: &[SizePoint]) -> String {
    let columns = [
        Column::numbers("devices"),
        Column::numbers("step"),
        Column::numbers("samples/s"),
        Column::numbers("efficiency"),
        Column::numbers("memory"),
        Column::numbers("price/h"),
        Column::numbers("gap"),
        Column::words("layout"),
    ];
    let row = |point: &SizePoint| {
        vec![
            point.devices.to_string(),
            Seconds::new(point.step_seconds).to_string(),
            format!("{:.1}", point.samples_per_second),
            format!("{:.1} %", point.efficiency * 100.0),
            Bytes::new(point.memory_bytes).to_string(),
            point.price_per_hour.map_or_else(|| "-".into(), |price| format!("{price:.2}")),
            if point.gap.is_finite() { format!("{:.1} %", point.gap * 100.0) } else { "-".into() },
            point.layout.clone(),
        ]
    };
    table(&columns, &points.iter().map(row).collect::<Vec<_>>())
}

/// Plots points: samples per second over devices; for a front, step time over memory with a series
/// per number of devices.
pub fn plot(name: &str, setting: &Setting, points: &[SizePoint]) -> Plot {
    let title = format!("{} on {}: {name}", setting.model.name, setting.topology.name());
    if name == "scaling" {
        let curve = |series: &str, y: &dyn Fn(&SizePoint) -> f64| -> Vec<CurvePoint> {
            points.iter().map(|point| CurvePoint { series: series.into(), x: point.devices as f64, y: y(point) }).collect()
        };
        let first = points.first().map_or(1.0, |point| point.samples_per_second / point.devices.max(1) as f64);
        let all = [
            curve("best layout", &|point| point.samples_per_second),
            curve("linear scaling", &|point| first * point.devices as f64),
        ];
        return Plot::curve(title, ["devices", "samples per second"], &all.concat());
    }
    let mut of_devices: Vec<CurvePoint> = points
        .iter()
        .map(|point| CurvePoint {
            series: format!("{} devices", point.devices),
            x: point.memory_bytes as f64 / 2f64.powi(30),
            y: point.step_seconds,
        })
        .collect();
    of_devices.sort_by(|a, b| a.series.cmp(&b.series).then(a.x.total_cmp(&b.x)));
    Plot::curve(title, ["peak memory of a device (GiB)", "step time (s)"], &of_devices)
}
