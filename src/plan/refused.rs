//! Combinations of options that `plan` has no answer for.

use super::Arguments;
use crate::choices::{Choices, Objective};
use crate::failure::{Failure, code};
use crate::modes::ModeChoice;

impl Arguments {
    /// Refuses a folder for plots of a search that draws none.
    pub(super) fn refuse_plots_of_one_layout(&self) -> Result<(), Failure> {
        if self.plots.is_none() || self.scaling.is_some() || self.front {
            return Ok(());
        }
        let message = "`--plots` draws the points of `--scaling` or `--front`, and neither is asked for";
        Err(Failure::input(code::OPTION_VALUE, message)
            .hint("add one of them; `foretell simulate --plots` draws the step of a plan"))
    }

    /// Refuses questions about a run's cost if the answer is not a single layout.
    pub(super) fn refuse_running_costs(&self) -> Result<(), Failure> {
        let others = [
            ("--gpus-needed", !self.gpus_needed.is_empty()),
            ("--table", self.table.is_some()),
            ("--scaling", self.scaling.is_some()),
            ("--front", self.front),
            ("--mode", self.mode == ModeChoice::Any),
        ];
        match others.iter().find(|(_, is_given)| *is_given && self.running.ask()) {
            Some((other, _)) => {
                Err(Failure::input(code::OPTION_VALUE, format!("what a run costs is asked of one layout, not with `{other}`"))
                    .hint("plan without it, or ask `foretell simulate` about a plan"))
            }
            None => Ok(()),
        }
    }

    /// Refuses options that have no answer for RL post-training.
    pub(super) fn refuse_of_policies(&self) -> Result<(), Failure> {
        let Choices { objective, oversubscribe, precision, price_limit, .. } = &self.choices;
        let stated = [
            ("--explain", self.explain),
            ("--scaling", self.scaling.is_some()),
            ("--front", self.front),
            ("--compare", self.compare.is_some()),
            ("--breakeven", self.breakeven.is_some()),
            ("--plots", self.plots.is_some()),
            ("--lengths", self.lengths.are_stated()),
            ("--goodput", self.running.goodput),
            ("--checkpoint-every", self.running.checkpoint_every.is_some()),
            ("--mode", self.mode == ModeChoice::Any),
            ("--progress", self.progress.is_some()),
            ("--objective", !matches!(objective, Objective::Time)),
            ("--oversubscribe", *oversubscribe),
            ("--price-limit", price_limit.is_some()),
            ("several formats in --precision", precision.len() > 1),
        ];
        let of_policies =
            |(name, is_stated): (&str, bool)| if is_stated { self.choices.refuse_policy(&format!("`{name}`")) } else { Ok(()) };
        stated.into_iter().try_for_each(of_policies)
    }
}
