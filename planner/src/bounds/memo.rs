//! A table of values that are computed once.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, OnceLock};

/// Values by key, each computed when it is first requested. Threads may share it.
pub(super) struct Memo<Key, Value>(Mutex<HashMap<Key, Arc<OnceLock<Value>>>>);

impl<Key: Hash + Eq, Value: Clone> Memo<Key, Value> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    /// Returns the value of `key`, computed by `compute` if there is none yet.
    pub(super) fn get(&self, key: Key, compute: impl FnOnce() -> Value) -> Value {
        // A poisoned lock is harmless: no panic leaves the table half changed.
        let cell = Arc::clone(self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).entry(key).or_default());
        if let Some(known) = cell.get() {
            return known.clone();
        }
        // Not inside `get_or_init`: rayon lets a thread that waits there run other tasks, and one
        // of these may request the same key. So two threads may compute a value, and one of the two
        // results is dropped.
        let value = compute();
        cell.get_or_init(|| value).clone()
    }
}
