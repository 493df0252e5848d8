//! Assignments to a script's variables.

use super::super::deciding::may_decide;
use super::Script;
use super::branches::Taken;

/// The longest value of a variable, in bytes.
const LONGEST_VALUE: usize = 1 << 17;

/// What is assigned to a variable.
pub(super) enum Assigned {
    Text(String),
    /// `(...)`
    Elements(Vec<String>),
}

impl Assigned {
    fn elements(self) -> Vec<String> {
        match self {
            Self::Text(text) => vec![text],
            Self::Elements(elements) => elements,
        }
    }
}

impl Script<'_> {
    /// Assigns a variable, or adds to it.
    pub(super) fn assign(&mut self, name: &str, value: Assigned, adds: bool) {
        let before = self.variables.get(name).map(Vec::as_slice);
        match self.taken() {
            Taken::No => {
                self.undone.insert(name.into());
                return;
            }
            Taken::Unknown => {
                // `CMD="$CMD --more"` appends, too.
                let rest = match (&value, before) {
                    (Assigned::Text(longer), Some([text])) if !adds && !text.is_empty() => longer.strip_prefix(text.as_str()),
                    _ => None,
                };
                let rest = rest.map(String::from);
                let (value, adds) = match rest {
                    Some(rest) => (vec![rest], true),
                    None => (value.elements(), adds),
                };
                return self.assign_perhaps(name, &value, adds);
            }
            Taken::Yes => {}
        }
        if adds && self.unexpanded.contains_key(name) {
            return;
        }
        let value = match (value, before.filter(|_| adds)) {
            (Assigned::Text(more), Some([text])) => vec![format!("{text}{more}")],
            (value, before) => [before.unwrap_or_default(), &value.elements()].concat(),
        };
        // `A="$A$A"` in a loop: no command line is that long.
        if value.iter().map(String::len).sum::<usize>() > LONGEST_VALUE {
            self.variables.remove(name);
            self.unexpanded.insert(name.into(), format!("is longer than {LONGEST_VALUE} letters"));
            return;
        }
        self.unexpanded.remove(name);
        self.variables.insert(name.into(), value);
        if !self.order.iter().any(|known| known == name) {
            self.order.push(name.into());
        }
    }

    /// Records an assignment that may not be run. Flags that it appends are left out if none
    /// decides what is planned; otherwise the variable is no longer expanded.
    fn assign_perhaps(&mut self, name: &str, value: &[String], adds: bool) {
        let words = value.iter().flat_map(|text| text.split_whitespace());
        let flags: Vec<&str> = words.filter(|word| word.starts_with("--")).collect();
        if adds && !flags.is_empty() && !flags.iter().any(|flag| may_decide(flag)) {
            self.notes.push(format!("a branch of the script adds {}, which are left out", flags.join(", ")));
            return;
        }
        self.variables.remove(name);
        let what = if flags.is_empty() { String::new() } else { format!(" ({})", flags.join(", ")) };
        let why = format!("is assigned in a branch or loop of the script that may not be taken{what}");
        self.unexpanded.entry(name.into()).or_insert(why);
    }
}
