//! The page's clock.

use std::ops::{Add, Sub};
use std::time::Duration;

#[link(wasm_import_module = "page")]
unsafe extern "C" {
    /// Milliseconds since the worker was started.
    fn now() -> f64;
}

/// A moment of the page's clock: the time since its worker was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    /// Now.
    pub fn now() -> Self {
        // SAFETY: The call passes a number.
        let milliseconds = unsafe { now() };
        Self(Duration::from_secs_f64(milliseconds.max(0.0) / 1e3))
    }

    /// The time from this moment until now.
    pub fn elapsed(&self) -> Duration {
        Self::now().saturating_duration_since(*self)
    }

    /// The time from an earlier moment until this one; zero if it is later.
    pub fn saturating_duration_since(&self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The moment so much later; `None` if no number holds it.
    pub fn checked_add(&self, later: Duration) -> Option<Self> {
        self.0.checked_add(later).map(Self)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}
