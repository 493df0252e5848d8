//! What is found once and kept.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, OnceLock};

/// What is found once is kept: probes by the layouts that share them, cuts and timetables by the pipelines that do.
pub(crate) struct Memo<Key, Value>(Mutex<HashMap<Key, Arc<OnceLock<Value>>>>);

impl<Key: Hash + Eq, Value: Clone> Memo<Key, Value> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    pub(crate) fn get(&self, key: Key, find: impl FnOnce() -> Value) -> Value {
        // A panic elsewhere leaves the table as it was.
        let cell = Arc::clone(self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).entry(key).or_default());
        if let Some(known) = cell.get() {
            return known.clone();
        }
        // Not within the cell: who waits there for other threads takes up their work meanwhile, which may ask for the same.
        let found = find();
        cell.get_or_init(|| found).clone()
    }
}
