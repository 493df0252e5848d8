//! The key of a run: an id that anyone may see and a secret that only the run's processes hold.

use std::fmt;
use std::process::Command;

use super::TransportError;

/// The variable in which child processes find the key. A process's environment can be read only by
/// its own user; a command line can be read by all users.
const ENVIRONMENT_VARIABLE: &str = "FORETELL_RUN_KEY";

pub(super) const RUN_BYTES: usize = 16;
const SECRET_BYTES: usize = 32;

/// A run's id and its secret.
#[derive(Clone, PartialEq, Eq)]
pub struct RunKey {
    /// The run's id.
    pub(super) run: [u8; RUN_BYTES],
    pub(super) secret: [u8; SECRET_BYTES],
}

impl fmt::Debug for RunKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RunKey({}, secret not shown)", to_hexadecimal(&self.run))
    }
}

impl RunKey {
    /// Creates the key of a new run from the operating system's random numbers.
    pub fn generate() -> Result<Self, TransportError> {
        Ok(RunKey { run: random_bytes()?, secret: random_bytes()? })
    }

    /// The key as 96 hexadecimal digits. Pass them only over trusted channels, and never on a
    /// command line.
    pub fn to_text(&self) -> String {
        format!("{}{}", to_hexadecimal(&self.run), to_hexadecimal(&self.secret))
    }

    /// Reads the text of [`to_text`](Self::to_text).
    pub fn from_text(text: &str) -> Result<Self, TransportError> {
        let malformed = || TransportError::Credentials { reason: "the run key is not 96 hexadecimal digits" };
        let digits: Option<Vec<u8>> = text.trim().chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect();
        let digits = digits.filter(|digits| digits.len().is_multiple_of(2)).ok_or_else(malformed)?;
        let bytes: Vec<u8> = digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect();
        let (run, secret) = bytes.split_first_chunk::<RUN_BYTES>().ok_or_else(malformed)?;
        let secret = <[u8; SECRET_BYTES]>::try_from(secret).map_err(|_| malformed())?;
        Ok(RunKey { run: *run, secret })
    }

    /// Gives the key to the process that `command` will start.
    pub fn pass_to(&self, command: &mut Command) {
        command.env(ENVIRONMENT_VARIABLE, self.to_text());
    }

    /// Returns whether this process was given a key in its environment.
    pub fn is_in_environment() -> bool {
        std::env::var_os(ENVIRONMENT_VARIABLE).is_some()
    }

    /// Reads the key from this process's environment.
    pub fn from_environment() -> Result<Self, TransportError> {
        let text = std::env::var(ENVIRONMENT_VARIABLE)
            .map_err(|_| TransportError::Credentials { reason: "FORETELL_RUN_KEY is not set for this process" })?;
        Self::from_text(&text)
    }
}

/// Unpredictable bytes from the operating system.
fn random_bytes<const LENGTH: usize>() -> Result<[u8; LENGTH], TransportError> {
    let mut bytes = [0; LENGTH];
    getrandom::fill(&mut bytes).map_err(|error| TransportError::system("get random numbers for the run's secret", error))?;
    Ok(bytes)
}

fn to_hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
