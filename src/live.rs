//! The progress of a running run: a bar on a terminal, lines elsewhere, and TensorBoard's event
//! files. It only shows what it is given, and knows no ranks and no files of the run.

use crate::failure::Failure;
use crate::output;
use crate::tensorboard::EventFile;
use foretell_executor::{Classification, Departure, Evaluation, RunEvent, StepMetrics};
use foretell_program::{Period, RunLength};
use foretell_units::Seconds;
use indicatif::ProgressBar;
use std::path::Path;

/// The number of first steps that the measured time leaves out because they warm up.
const WARM_UP_STEPS: usize = 1;

/// Shows a run's progress.
pub struct LiveProgress {
    bar: ProgressBar,
    /// How often a line is printed if there is no bar.
    print_every: Option<Period>,
    length: RunLength,
    predicted: Seconds,
    /// The number of steps so far.
    shown: usize,
    /// The number and total duration of the steps so far, without those that warm up.
    measured: (usize, f64),
    events: Option<EventFile>,
    /// The first failure to write events. It ends the run's command when the run is over.
    failure: Option<Failure>,
}

impl LiveProgress {
    /// Progress of a run whose steps are predicted to take `predicted`. Events are written to the
    /// folder `tensorboard`, if there is one.
    pub fn new(print_every: Option<Period>, predicted: Seconds, tensorboard: Option<&Path>) -> Result<Self, Failure> {
        Ok(Self {
            bar: output::progress(1, "train"),
            print_every,
            length: RunLength { steps: 0, steps_per_epoch: 0 },
            predicted,
            shown: 0,
            measured: (0, 0.0),
            events: tensorboard.map(EventFile::create).transpose()?,
            failure: None,
        })
    }

    /// Shows an event of the run.
    pub fn show(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Started { length } => {
                self.length = *length;
                self.bar.set_length(length.steps as u64);
            }
            RunEvent::Step(step) => self.step(step),
            RunEvent::Evaluation(evaluation) => self.evaluation(evaluation),
            RunEvent::Left(departure) => self.bar.suspend(|| output::note(&in_words(departure))),
        }
    }

    /// Ends the display. Returns the first failure to write events.
    pub fn finish(self) -> Result<(), Failure> {
        self.bar.finish_and_clear();
        self.failure.map_or(Ok(()), Err)
    }

    fn step(&mut self, step: &StepMetrics) {
        self.shown += 1;
        if self.shown > WARM_UP_STEPS {
            self.measured.0 += 1;
            self.measured.1 += step.seconds;
        }
        let text = self.text_of(step);
        self.bar.set_position(step.step as u64 + 1);
        if self.bar.is_hidden() {
            if self.print_every.is_some_and(|every| every.ends_with(step.step, self.length)) {
                output::message(&format!("step {}/{}: {text}", step.step + 1, self.length.steps));
            }
        } else {
            self.bar.set_message(text);
        }
        self.write(step.step, &step_values(step));
    }

    /// A step in text: loss, throughput, and the mean step time so far beside the predicted one.
    fn text_of(&self, step: &StepMetrics) -> String {
        let mut text = format!("loss {:.4}, {:.1} samples/s", step.loss, step.samples_per_second);
        let (steps, seconds) = self.measured;
        if steps > 0 {
            let mean = Seconds::new(seconds / steps as f64);
            text.push_str(&format!(", step {mean}, predicted {}", self.predicted));
        }
        text
    }

    fn evaluation(&mut self, evaluation: &Evaluation) {
        let text = format!("epoch {}: loss {:.4}, top-1 {:.2} %", evaluation.epoch, evaluation.loss, evaluation.top1 * 100.0);
        if self.bar.is_hidden() {
            output::message(&text)
        } else {
            self.bar.println(text)
        }
        self.write(evaluation.step, &evaluation_values(evaluation));
    }

    fn write(&mut self, step: usize, values: &[(&str, f64)]) {
        if let Some(events) = &mut self.events
            && let Err(failure) = events.write(step, values)
        {
            self.failure.get_or_insert(failure);
        }
    }
}

/// A departure in one sentence.
fn in_words(Departure { worker, step, cause }: &Departure) -> String {
    format!("worker {worker} has left after {step} steps of all, and the others go on: {cause}")
}

fn step_values(step: &StepMetrics) -> [(&'static str, f64); 5] {
    [
        ("train/loss", step.loss),
        ("train/learning_rate", f64::from(step.learning_rate)),
        ("train/gradient_norm", step.gradient_norm),
        ("train/samples_per_second", step.samples_per_second),
        ("train/step_seconds", step.seconds),
    ]
}

fn evaluation_values(evaluation: &Evaluation) -> Vec<(&'static str, f64)> {
    let Evaluation { loss, top1, top5, perplexity, .. } = *evaluation;
    let mut values = vec![
        ("evaluation/loss", loss),
        ("evaluation/top1", top1),
        ("evaluation/top5", top5),
        ("evaluation/perplexity", perplexity),
    ];
    if let Some(Classification { precision, recall, f1, roc_auc, .. }) = &evaluation.classification {
        values.extend([("evaluation/precision", *precision), ("evaluation/recall", *recall), ("evaluation/f1", *f1)]);
        values.extend(roc_auc.map(|area| ("evaluation/roc_auc", area)));
    }
    values
}
