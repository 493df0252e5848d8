//! Mistakes in the command line: clap's errors, with the hint of the type that refused a value.

use super::{Failure, code};
use clap::error::{ContextKind, ErrorKind};
use foretell_planner::FixedError;
use foretell_simulator::WhatIfError;
use foretell_units::UnitError;
use foretell_units::diagnostic::{Mistake, help};
use miette::Diagnostic;
use std::error::Error;

/// Returns the failure for an option's value, if the type that refused it gives more information
/// than clap.
pub fn of_value(error: &clap::Error) -> Option<Failure> {
    if error.kind() != ErrorKind::ValueValidation {
        return None;
    }
    let cause = diagnostic(error.source()?)?;
    let part = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    let (value, argument) = (part(ContextKind::InvalidValue), part(ContextKind::InvalidArg));
    let failure = Failure::input(code::OPTION_VALUE, format!("invalid value `{value}` for `{argument}`: {cause}"));
    Some(failure.hint(help(cause).unwrap_or_else(|| "see `--help`".into())))
}

/// Returns the failure for any other mistake in a command line. Its message is clap's own text
/// above the usage.
pub fn of_command_line(error: &clap::Error) -> Failure {
    let text = error.to_string();
    let message = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ").trim();
    let suggested = [ContextKind::SuggestedArg, ContextKind::SuggestedValue, ContextKind::SuggestedSubcommand]
        .into_iter()
        .find_map(|kind| error.get(kind));
    let hint = suggested.map_or_else(|| "see `--help`".to_owned(), |name| format!("did you mean `{name}`?"));
    Failure::input(code::OPTION_USAGE, message).hint(hint)
}

/// Returns an error as a diagnostic, if it is the error of an option's value.
fn diagnostic<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a dyn Diagnostic> {
    fn of<'a, Kind: Diagnostic + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a dyn Diagnostic> {
        error.downcast_ref::<Kind>().map(|error| error as &dyn Diagnostic)
    }
    let found = of::<Mistake>(error)
        .or_else(|| of::<UnitError>(error))
        .or_else(|| of::<FixedError>(error))
        .or_else(|| of::<WhatIfError>(error));
    #[cfg(not(target_family = "wasm"))]
    let found = found.or_else(|| super::execution::of_data_option(error));
    found
}
