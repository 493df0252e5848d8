//! What each part of the code must not know, as ARCHITECTURE.md states it: words that its source
//! must not have. Tests and comments may have them.

use crate::text::has_word;

/// Words that the source of some folders must not have.
#[derive(Debug, Clone, Copy)]
pub struct Invariant {
    /// The folders, from the root.
    pub folders: &'static [&'static str],
    /// The words.
    pub words: &'static [&'static str],
    /// Ends of paths that may have them.
    pub except: &'static [&'static str],
    /// What ARCHITECTURE.md says.
    pub says: &'static str,
}

/// Crates that neither touch the machine nor tell the time, so that their answers depend on their
/// input alone.
const PURE: &[&str] =
    &["units/src", "models/src", "topologies/src", "program/src", "simulator/src", "planner/src", "reports/src", "export/src"];

/// Every schedule by its name in the source.
const SCHEDULES: &[&str] = &[
    "Schedule::Gpipe",
    "Schedule::OneForwardOneBackward",
    "Schedule::Interleaved",
    "Schedule::ZeroBubbleH1",
    "Schedule::ZeroBubbleV",
];

/// The invariants that can be read in the source.
pub const INVARIANTS: &[Invariant] = &[
    Invariant {
        folders: PURE,
        words: &["std::fs", "std::time", "std::thread", "std::env", "std::process", "std::net", "Instant", "SystemTime"],
        except: &[],
        says: "answers depend on the input alone",
    },
    Invariant {
        folders: &["simulator/src", "planner/src", "executor/src", "executor/kernels/src", "reports/src", "lab/src"],
        words: SCHEDULES,
        except: &[],
        says: "no schedule is named",
    },
    Invariant {
        folders: &["simulator/src/network", "simulator/src/lowering", "simulator/src/equivalence", "simulator/src/engine"],
        words: &["Plan", "Layout"],
        except: &[],
        says: "the simulation of events reads Programs alone",
    },
    Invariant {
        folders: &["simulator/src/cost", "simulator/src/gpu"],
        words: &["Plan", "Layout"],
        except: &[],
        says: "a Program is priced without its plan",
    },
    Invariant {
        folders: &["executor/kernels/src"],
        words: &["foretell_program", "foretell_topologies", "foretell_simulator"],
        except: &[],
        says: "knows kernels only",
    },
    Invariant {
        folders: &["executor/src", "lab/src"],
        words: &["foretell_simulator", "foretell_planner"],
        except: &[],
        says: "no search and no cost model",
    },
    Invariant {
        folders: &["program/src", "models/src"],
        words: &["foretell_simulator", "foretell_planner", "foretell_executor", "foretell_topologies"],
        except: &[],
        says: "knows no durations and no devices",
    },
];

/// Lines of `source` (from 1) that have a word which `invariant` forbids, each with the word.
#[must_use]
pub fn breaches(invariant: &Invariant, source: &str) -> Vec<(usize, &'static str)> {
    let code = source.lines().enumerate().take_while(|(_, line)| !line.trim_start().starts_with("#[cfg(test)]"));
    let code = code.filter(|(_, line)| !line.trim_start().starts_with("//"));
    code.flat_map(|(index, line)| {
        let words = invariant.words.iter().filter(move |word| has_word(line, word));
        words.map(move |word| (index + 1, *word))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_code_only() {
        let invariant = Invariant { folders: &[], words: &["std::fs"], except: &[], says: "" };
        let source = "// std::fs\nuse std::fs;\nlet std::fsx = 1;\n#[cfg(test)]\nmod tests { use std::fs; }";
        assert_eq!(breaches(&invariant, source), [(2, "std::fs")]);
    }
}
