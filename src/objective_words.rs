//! The objective of a search in words: its name, and amounts of it.

use crate::choices::Objective;
use crate::running_cost::money;
use foretell_planner::Candidate;
use foretell_units::{Joules, Seconds};

/// An objective, with the currency of its prices.
pub struct ObjectiveWords {
    objective: Objective,
    currency: Option<String>,
}

impl ObjectiveWords {
    /// The words of an objective.
    pub fn new(objective: Objective, currency: Option<&str>) -> Self {
        Self { objective, currency: currency.map(str::to_owned) }
    }

    /// The minimised quantity, and the word for more of it.
    pub fn names(&self) -> (&'static str, &'static str) {
        match self.objective {
            Objective::Time | Objective::TimeToLoss => ("its step", "longer"),
            Objective::P90 => ("the slower end of its step", "longer"),
            Objective::Cost => ("its price", "higher"),
            Objective::Energy => ("its energy", "higher"),
            Objective::Goodput => ("its time with failures", "longer"),
        }
    }

    /// The title of a column; `None` if the step itself is minimised.
    pub fn column(&self) -> Option<&'static str> {
        match self.objective {
            Objective::Time | Objective::TimeToLoss => None,
            Objective::P90 => Some("slow end"),
            Objective::Cost => Some("price"),
            Objective::Energy => Some("energy"),
            Objective::Goodput => Some("with failures"),
        }
    }

    /// An amount of the minimised quantity, for a step ([`Candidate::value`]).
    pub fn amount(&self, value: f64) -> String {
        /// Prices are per hour.
        const HOUR: f64 = 3600.0;
        match self.objective {
            Objective::Cost => money(value / HOUR, self.currency.as_deref()),
            Objective::Energy => Joules::new(value).to_string(),
            _ => Seconds::new(value).to_string(),
        }
    }

    /// Whether a layout needs measurably less of it than another.
    pub fn is_less(&self, one: &Candidate, other: &Candidate) -> bool {
        (one.value / other.value - 1.0) * 100.0 < -SAME
    }

    /// By how much a layout exceeds the best one, such as `its price is 2.1 % higher`.
    pub fn difference(&self, best: &Candidate, other: &Candidate) -> String {
        let (what, more) = self.names();
        let change = (other.value / best.value - 1.0) * 100.0;
        if change < -SAME {
            let better = if more == "longer" { "shorter" } else { "lower" };
            return format!("{what} is {:.1} % {better}, and layout 1 is simpler (`--prefer fastest`)", -change);
        }
        if change < SAME { format!("{what} is the same") } else { format!("{what} is {change:.1} % {more}") }
    }
}

/// Differences in per cent that are printed as zero.
const SAME: f64 = 0.05;
