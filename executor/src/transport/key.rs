//! What the ranks of one run share and nobody else has: the run's number and its secret.

use std::fmt;
use std::process::Command;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::TransportError;

/// Children find the key here. The environment of a process is only readable by its own user; a command line by everybody.
const ENVIRONMENT_VARIABLE: &str = "FORETELL_RUN_KEY";

pub(super) const RUN_BYTES: usize = 16;
const SECRET_BYTES: usize = 32;
pub(super) const TAG_BYTES: usize = 32;

/// The run's number, which may be seen, and its secret, which may not.
#[derive(Clone, PartialEq, Eq)]
pub struct RunKey {
    pub(super) run: [u8; RUN_BYTES],
    secret: [u8; SECRET_BYTES],
}

impl fmt::Debug for RunKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RunKey({}, secret not shown)", to_hexadecimal(&self.run))
    }
}

impl RunKey {
    /// A new run's key, from the operating system's random numbers.
    pub fn generate() -> Result<Self, TransportError> {
        let mut key = RunKey { run: [0; RUN_BYTES], secret: [0; SECRET_BYTES] };
        fill_with_random(&mut key.run)?;
        fill_with_random(&mut key.secret)?;
        Ok(key)
    }

    /// The key as text, for the launcher to hand to ranks on other machines by a channel it trusts. Keep it off command lines.
    pub fn to_text(&self) -> String {
        format!("{}{}", to_hexadecimal(&self.run), to_hexadecimal(&self.secret))
    }

    /// Reads what [`to_text`](Self::to_text) wrote.
    pub fn from_text(text: &str) -> Result<Self, TransportError> {
        let malformed = || TransportError::Credentials { reason: "the run key is not 96 hexadecimal digits" };
        let digits: Option<Vec<u8>> = text.trim().chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect();
        let digits = digits.filter(|digits| digits.len().is_multiple_of(2)).ok_or_else(malformed)?;
        let bytes: Vec<u8> = digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect();
        let (run, secret) = bytes.split_first_chunk::<RUN_BYTES>().ok_or_else(malformed)?;
        let secret = <[u8; SECRET_BYTES]>::try_from(secret).map_err(|_| malformed())?;
        Ok(RunKey { run: *run, secret })
    }

    /// Lets the child that `command` will start have the key.
    pub fn pass_to(&self, command: &mut Command) {
        command.env(ENVIRONMENT_VARIABLE, self.to_text());
    }

    /// Whether somebody gave this process a key.
    pub fn is_in_environment() -> bool {
        std::env::var_os(ENVIRONMENT_VARIABLE).is_some()
    }

    /// The key that the launcher gave to this process.
    pub fn from_environment() -> Result<Self, TransportError> {
        let text = std::env::var(ENVIRONMENT_VARIABLE)
            .map_err(|_| TransportError::Credentials { reason: "FORETELL_RUN_KEY is not set for this process" })?;
        Self::from_text(&text)
    }

    /// The proof that whoever plays `role` holds the secret and has seen all of `transcript`.
    pub(super) fn prove(&self, role: &[u8], transcript: &[&[u8]]) -> [u8; TAG_BYTES] {
        self.keyed(role, transcript).finalize().into_bytes().into()
    }

    /// Whether `tag` is that proof; takes as long whatever is wrong with it.
    pub(super) fn verify(&self, role: &[u8], transcript: &[&[u8]], tag: &[u8; TAG_BYTES]) -> bool {
        self.keyed(role, transcript).verify_slice(tag).is_ok()
    }

    fn keyed(&self, role: &[u8], transcript: &[&[u8]]) -> Hmac<Sha256> {
        let mut keyed = <Hmac<Sha256> as KeyInit>::new(&padded(&self.secret).into());
        // Role names have one length, and so have the transcript's parts: nothing can be shifted from one into the next.
        keyed.update(role);
        transcript.iter().for_each(|part| keyed.update(part));
        keyed
    }
}

/// HMAC pads its key with zeros to the hash's block; done here, the key's type says that it has the right length.
fn padded(secret: &[u8; SECRET_BYTES]) -> [u8; 64] {
    let mut block = [0; 64];
    block[..SECRET_BYTES].copy_from_slice(secret);
    block
}

/// Fills `bytes` with unpredictable ones.
pub(super) fn fill_with_random(bytes: &mut [u8]) -> Result<(), TransportError> {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        // SAFETY: the pointer and the length are those of a slice of ours.
        let count = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(count) {
            Ok(count) => filled += count,
            Err(_) => {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(TransportError::system("get random numbers for the run's secret", error));
                }
            }
        }
    }
    Ok(())
}

fn to_hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
