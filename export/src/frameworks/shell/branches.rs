//! Which branches of a script are taken, as far as the script's own variables decide. Tests of
//! anything outside the script (files, the environment, other commands) are unknown.

/// Whether commands are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    Yes,
    No,
    Unknown,
}

impl Taken {
    pub(super) fn not(self) -> Self {
        match self {
            Self::Yes => Self::No,
            Self::No => Self::Yes,
            Self::Unknown => Self::Unknown,
        }
    }

    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No, _) | (_, Self::No) => Self::No,
            (Self::Yes, Self::Yes) => Self::Yes,
            _ => Self::Unknown,
        }
    }

    pub(super) fn or(self, other: Self) -> Self {
        self.not().and(other.not()).not()
    }
}

impl From<bool> for Taken {
    fn from(is: bool) -> Self {
        if is { Self::Yes } else { Self::No }
    }
}

/// How a command is joined to the previous one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Joined {
    /// After `;`, a line's end or a pipe.
    #[default]
    Apart,
    /// After `&&`.
    And,
    /// After `||`.
    Or,
}

/// An open `if`, `case` or loop.
#[derive(Clone, Debug)]
struct Branch {
    taken: Taken,
    /// Whether an earlier arm was taken.
    earlier: Taken,
    /// Whether the next command belongs to a condition.
    is_testing: bool,
    /// `true` for the body of a `while` or `until` loop.
    is_loop: bool,
    /// `true` for `until`, whose body runs as long as the condition fails.
    is_until: bool,
    /// The word that the arms of a `case` are compared with; `None` for other branches.
    subject: Option<String>,
    /// The condition so far.
    condition: Taken,
}

impl Branch {
    /// A branch that starts with this value of `taken`.
    fn of(taken: Taken) -> Self {
        Self {
            taken,
            earlier: Taken::No,
            is_testing: false,
            is_loop: false,
            is_until: false,
            subject: None,
            condition: Taken::Unknown,
        }
    }
}

/// The open branches, from the outermost to the innermost.
#[derive(Debug, Default)]
pub(super) struct Branches(Vec<Branch>);

impl Branches {
    /// Whether commands here are run, by all open branches.
    pub(super) fn taken(&self) -> Taken {
        self.0.iter().filter(|branch| !branch.is_testing).map(|branch| branch.taken).fold(Taken::Yes, Taken::and)
    }

    /// Interprets a word at the beginning of a command. Returns whether it is a keyword.
    pub(super) fn keyword(&mut self, word: &str) -> bool {
        let unknown = Branch::of(Taken::Unknown);
        match word {
            "if" => self.0.push(Branch { is_testing: true, ..unknown }),
            "while" => self.0.push(Branch { is_testing: true, is_loop: true, ..unknown }),
            "until" => self.0.push(Branch { is_testing: true, is_loop: true, is_until: true, ..unknown }),
            "for" | "select" => self.0.push(unknown),
            "fi" | "esac" | "done" => _ = self.0.pop(),
            "then" => self.begin_arm(None),
            "else" => self.begin_arm(Some(Taken::Yes)),
            "elif" => {
                if let Some(branch) = self.0.last_mut() {
                    (branch.is_testing, branch.condition) = (true, Taken::Unknown);
                }
            }
            "do" => {
                // How often the body runs is unknown, unless the condition fails at once.
                if let Some(branch) = self.0.last_mut().filter(|branch| branch.is_loop) {
                    branch.is_testing = false;
                    let condition = if branch.is_until { branch.condition.not() } else { branch.condition };
                    branch.taken = if condition == Taken::No { Taken::No } else { Taken::Unknown };
                }
            }
            "{" | "}" | "export" | "local" | "declare" | "readonly" | "time" | "exec" => {}
            _ => return false,
        }
        true
    }

    /// Begins a `case SUBJECT in`. Its arms follow.
    pub(super) fn case(&mut self, subject: String) {
        self.0.push(Branch { subject: Some(subject), ..Branch::of(Taken::No) });
    }

    /// Whether the innermost branch is a `case`, whose arms follow.
    pub(super) fn has_arms(&self) -> bool {
        self.0.last().is_some_and(|branch| branch.subject.is_some())
    }

    /// Begins the arm with these patterns.
    pub(super) fn arm(&mut self, patterns: &[String]) {
        let Some(subject) = self.0.last().and_then(|branch| branch.subject.as_deref()) else { return };
        let is_open = |text: &str| text.contains(['$', '*', '?', '[', '`']);
        let condition = match patterns {
            [any] if any == "*" => Taken::Yes,
            _ if is_open(subject) || patterns.iter().any(|pattern| is_open(pattern)) => Taken::Unknown,
            _ => patterns.iter().any(|pattern| pattern == subject).into(),
        };
        self.begin_arm(Some(condition));
    }

    fn begin_arm(&mut self, condition: Option<Taken>) {
        if let Some(branch) = self.0.last_mut() {
            let condition = condition.unwrap_or(branch.condition);
            branch.is_testing = false;
            branch.taken = branch.earlier.not().and(condition);
            branch.earlier = branch.earlier.or(branch.taken);
        }
    }

    /// The result of a condition that ends the innermost loop at once. `None` unless the next
    /// command belongs to a loop's condition.
    pub(super) fn ends_loop(&self) -> Option<Taken> {
        let branch = self.0.last().filter(|branch| branch.is_loop && branch.is_testing)?;
        Some(if branch.is_until { Taken::Yes } else { Taken::No })
    }

    /// Records the result of a command, if it belongs to a condition.
    pub(super) fn result(&mut self, result: Taken) {
        if let Some(branch) = self.0.last_mut().filter(|branch| branch.is_testing) {
            branch.condition = result;
        }
    }
}

/// The result of a command whose words decide it: a test of expanded words, `true` or `false`.
/// `None` for other commands.
pub(super) fn result(words: &[String]) -> Option<Taken> {
    let (first, rest) = words.split_first()?;
    let inner = match first.as_str() {
        "true" | ":" => return Some(Taken::Yes),
        "false" => return Some(Taken::No),
        "test" => rest,
        "[" => rest.strip_suffix(&["]".to_string()]).unwrap_or(&[]),
        "[[" => rest.strip_suffix(&["]]".to_string()]).unwrap_or(&[]),
        _ => return None,
    };
    let is_open = inner.is_empty() || inner.iter().any(|word| word.contains('$'));
    let words: Vec<&str> = inner.iter().map(String::as_str).collect();
    Some(if is_open { Taken::Unknown } else { test(&words) })
}

fn test(words: &[&str]) -> Taken {
    let number = |text: &str| text.trim().parse::<i64>().ok();
    match *words {
        ["!", ref rest @ ..] => test(rest).not(),
        // A variable without a value is dropped here even if it is quoted.
        ["-z"] => Taken::Yes,
        ["-n"] => Taken::No,
        ["-z", text] => text.is_empty().into(),
        ["-n", text] => (!text.is_empty()).into(),
        ["=" | "==", text] => text.is_empty().into(),
        ["!=", text] => (!text.is_empty()).into(),
        [text] => (!text.is_empty()).into(),
        [_, "=" | "==" | "!=", pattern] if pattern.contains(['*', '?']) => Taken::Unknown,
        [one, "=" | "==", other] => (one == other).into(),
        [one, "!=", other] => (one != other).into(),
        [one, operator, other] => {
            let (Some(one), Some(other)) = (number(one), number(other)) else { return Taken::Unknown };
            match operator {
                "-eq" => (one == other).into(),
                "-ne" => (one != other).into(),
                "-gt" => (one > other).into(),
                "-ge" => (one >= other).into(),
                "-lt" => (one < other).into(),
                "-le" => (one <= other).into(),
                _ => Taken::Unknown,
            }
        }
        _ => Taken::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_expanded_words_are_decided_and_all_others_are_not() {
        let decided = |text: &str| {
            let words: Vec<String> = text.split(' ').map(String::from).collect();
            result(&words)
        };
        for (text, taken) in [
            ("[[ fp8 == fp8 ]]", Taken::Yes),
            ("[ a = b ]", Taken::No),
            ("[ 8 -gt 4 ]", Taken::Yes),
            ("test 8 -le 4", Taken::No),
            ("[ -z ]", Taken::Yes),
            ("[ -n x ]", Taken::Yes),
            ("[ ! -n x ]", Taken::No),
            ("false", Taken::No),
            ("[ -f file ]", Taken::Unknown),
            ("[ -n $X ]", Taken::Unknown),
            ("[[ a == b*", Taken::Unknown),
            ("[[ ab == a* ]]", Taken::Unknown),
        ] {
            assert_eq!(decided(text), Some(taken), "{text}");
        }
        assert_eq!(decided("python train.py"), None);
    }
}
