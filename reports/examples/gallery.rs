//! Draws every plot and a page from a made-up run into a folder, to look at:
//! `cargo run -p foretell-reports --example gallery -- /tmp/gallery`.

use foretell_reports::{Chart, CheckDocument, LossPoint, Plot, ScatterPoint, Section, check_table, compare, page, write_trace};
use foretell_units::{Bytes, Seconds};
use std::error::Error;
use std::path::PathBuf;

#[allow(dead_code)]
#[path = "../src/sample.rs"]
mod sample;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("the folder to draw into is missing")?);
    std::fs::create_dir_all(&folder)?;
    let (program, predicted, measured) = sample::pipeline();
    let comparison = compare(&program, &predicted, &measured);
    let document = CheckDocument::new(
        comparison,
        Seconds::new(1e-3),
        Seconds::new(4e-3),
        program.lists[0].arena,
        Some(Bytes::new(12 << 20)),
    );
    println!("{}\n\n{}", check_table(&document), serde_json::to_string_pretty(&document)?);

    let loss =
        |step: u64| 2.3 * (-(step as f64) / 60.0).exp() + 0.35 + 0.12 * (step as f64 * 1.7).sin() * (-(step as f64) / 90.0).exp();
    let training: Vec<LossPoint> = (0..200).map(|step| LossPoint { step, loss: loss(step) }).collect();
    let evaluation: Vec<LossPoint> = (1..=4).map(|epoch| LossPoint { step: epoch * 49, loss: loss(epoch * 49) + 0.06 }).collect();
    let points: Vec<ScatterPoint> = (0..30)
        .map(|index| {
            let measured = 0.02 * 1.25f64.powi(index);
            let predicted = measured * (1.0 + 0.16 * f64::from(index * 7).sin());
            let series = if index % 2 == 0 { "Megatron-LM" } else { "torchtitan" };
            ScatterPoint { series: series.into(), predicted: Seconds::new(predicted), measured: Seconds::new(measured) }
        })
        .collect();

    let plots = [
        ("timeline", Plot::timeline("Predicted against measured", &program, &[&predicted, &measured])),
        ("memory", Plot::memory("Memory over a step", &program, &predicted)),
        ("loss", Plot::loss("Loss", &training, &evaluation)),
        ("scatter", Plot::scatter("Published step times", &points)),
    ];
    for (name, plot) in plots {
        std::fs::write(folder.join(format!("{name}.svg")), plot.svg()?)?;
        std::fs::write(folder.join(format!("{name}.png")), plot.png()?)?;
    }
    let mut sections = Section::check(&document);
    let charts = [
        ("timeline", Chart::timeline(&program, &[&predicted, &measured])),
        ("memory", Chart::memory(&program, &predicted, Some(Bytes::new(16 << 20)))),
        ("loss", Chart::loss(&training, &evaluation)),
    ];
    for (name, chart) in charts {
        sections.push(Section::Chart { heading: name.into(), chart: Box::new(chart), caption: String::new() });
    }
    sections
        .push(Section::Listing { heading: "Plan".into(), text: "layout:\n  data: 2\n  pipeline: 2\nglobal_batch: 8\n".into() });
    std::fs::write(folder.join("page.html"), page("A made-up run", &sections)?)?;
    write_trace(&program, &[&predicted, &measured], std::fs::File::create(folder.join("trace.json"))?)?;
    Ok(())
}
