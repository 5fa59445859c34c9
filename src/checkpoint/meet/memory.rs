//! A meeting place inside one process, for tests and for ranks that are threads.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::Meet;
use crate::error::Result;

/// A map behind a lock.
#[derive(Debug, Default)]
pub struct MemoryMeet {
    values: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl MemoryMeet {
    /// Keys that are set now.
    pub fn keys(&self) -> Vec<String> {
        self.values.lock().keys().cloned().collect()
    }
}

impl Meet for MemoryMeet {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.values.lock().insert(key.into(), value.into());
        Ok(())
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.values.lock().get(key).cloned())
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.values.lock().remove(key);
        Ok(())
    }
}
