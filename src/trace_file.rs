//! Traces in files: of which ranks, streamed, and compressed if the name ends in `.gz`. It knows
//! no simulation.

use crate::failure::{Failure, code};
use crate::host;
use crate::output;
use flate2::Compression;
use flate2::write::GzEncoder;
use foretell_program::{Program, Rank, Timeline};
use foretell_reports::{differing_ranks, write_trace_of};
use foretell_units::diagnostic::Mistake;
use std::path::Path;
use std::str::FromStr;

/// The ranks that a trace has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TraceRanks {
    /// One rank of each set whose ranks do the same at the same times.
    #[default]
    Differing,
    /// All of them.
    All,
    /// Those from a first to a last one, several times.
    Ranges(Vec<(usize, usize)>),
}

impl FromStr for TraceRanks {
    type Err = Mistake;

    fn from_str(text: &str) -> Result<Self, Mistake> {
        let range = |part: &str| {
            let (first, last) = part.split_once("..").unwrap_or((part, part));
            let range = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (range.0 <= range.1).then_some(range)
        };
        match text {
            "differing" => Ok(Self::Differing),
            "all" => Ok(Self::All),
            list => list.split(',').map(range).collect::<Option<Vec<_>>>().map(Self::Ranges).ok_or_else(|| {
                Mistake::new(format!("`{text}` names no ranks"), "write `differing`, `all`, or numbers such as 0,8..15")
            }),
        }
    }
}

impl TraceRanks {
    fn of(&self, program: &Program, timelines: &[&Timeline]) -> Vec<Rank> {
        let all = (0..program.mesh.world_size()).map(Rank);
        match self {
            Self::Differing => differing_ranks(program, timelines),
            Self::All => all.collect(),
            Self::Ranges(ranges) => {
                all.filter(|rank| ranges.iter().any(|(first, last)| (*first..=*last).contains(&rank.0))).collect()
            }
        }
    }
}

/// Writes a trace completely or not at all, event by event. Prints which ranks it leaves out.
pub fn write(path: &Path, program: &Program, timelines: &[&Timeline], ranks: &TraceRanks) -> Result<(), Failure> {
    let chosen = ranks.of(program, timelines);
    if chosen.is_empty() {
        let last = program.mesh.world_size().saturating_sub(1);
        return Err(Failure::input(
            code::OPTION_VALUE,
            format!("`--trace-ranks` names no rank of the layout, which has ranks 0 to {last}"),
        ));
    }
    let all = program.mesh.world_size();
    if *ranks == TraceRanks::Differing && chosen.len() < all {
        output::note(&format!(
            "the trace has {} of {all} ranks: each of the others does the same as one of them (`foretell simulate --trace FILE \
             --trace-ranks all` writes all)",
            chosen.len()
        ));
    }
    let failed = |error: &dyn std::fmt::Display| {
        Failure::undone(code::FILE_UNWRITABLE, format!("`{}` cannot be written: {error}", path.display()))
    };
    let is_compressed = path.extension().is_some_and(|ending| ending == "gz");
    let written = host::write_streamed(path, |mut writer| {
        if is_compressed {
            let mut encoder = GzEncoder::new(writer, Compression::default());
            write_trace_of(program, timelines, &chosen, &mut encoder)?;
            encoder.finish()?;
        } else {
            write_trace_of(program, timelines, &chosen, &mut writer)?;
        }
        Ok(())
    });
    written.map_err(|error| failed(&error))?;
    tracing::info!("wrote `{}`, {} ranks", path.display(), chosen.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::TraceRanks;

    #[test]
    fn ranks_are_named_by_a_word_or_by_numbers() {
        assert_eq!("differing".parse(), Ok(TraceRanks::Differing));
        assert_eq!("all".parse(), Ok(TraceRanks::All));
        assert_eq!("0,8..15".parse(), Ok(TraceRanks::Ranges(vec![(0, 0), (8, 15)])));
        for wrong in ["", "some", "3..1", "1,", "-1"] {
            let error = wrong.parse::<TraceRanks>().expect_err("no ranks");
            assert!(!error.hint.is_empty(), "{error}");
        }
    }
}
